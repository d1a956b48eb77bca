# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an inventory may say, and what is wrong with one: pure functions over its variables.

The description of every variable is the argument specification of the role preflight; nothing here repeats it. All
functions return sentences for people instead of raising, so that one run names every mistake at once.
"""

from __future__ import annotations

import functools
import re
import typing as t
from pathlib import Path

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.parsing.convert_bool import boolean

from ..module_utils.decide.clean import DRIVER_CODES
from .client_settings import client_host_problems, client_problems
from .drift_accepted import acceptance_problems
from .results import items, rows
from .router_settings import router_problems, worker_problems
from .router_settings import secrets_of as router_secrets
from .words import nearest, said, spec_problems, unknown_keys

Options = dict[str, t.Any]
Server = dict[str, t.Any]

_SPEC_FILE = Path(__file__).resolve().parents[2] / "roles" / "preflight" / "meta" / "argument_specs.yml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
_MERGED = ("flags", "environment", "secret_environment", "deadlines", "soak", "hung_after", "drain")
# Flags that have a place of their own in a server's entry, or that would put a secret on a command line.
_ELSEWHERE = {
    "port": "port",
    "host": "host",
    "api_key": "api_key",
    "admin_api_key": "admin_api_key",
    "ssl_keyfile_password": "ssl_keyfile_password",
    "config": "flags",
}


@functools.lru_cache(maxsize=1)
def host_options() -> Options:
    """The variables ``sglang_*`` of a host, as argument specification options."""
    with _SPEC_FILE.open(encoding="utf-8") as handle:
        spec = yaml.safe_load(handle)
    options = spec["argument_specs"]["main"]["options"]
    return {name: option for name, option in options.items() if name.startswith("sglang_")}


def server_options() -> Options:
    """The keys of one entry of ``sglang_servers``."""
    return t.cast(Options, host_options()["sglang_servers"]["options"])


def choice_problems(given: t.Mapping[str, t.Any], choices: t.Mapping[str, t.Sequence[str]]) -> list[str]:
    """Values that are none of their variable's choices."""
    return [
        f"{name} is '{said(value)}', but must be one of {', '.join(filter(None, choices[name]))}"
        f"{nearest(said(value), choices[name])}"
        for name, value in given.items()
        if value not in choices[name]
    ]


def flag_name(name: str) -> str:
    """A flag as SGLang's own field name: ``--tp-size`` and ``tp_size`` are the same."""
    return name.lstrip("-").replace("-", "_")


def _given(values: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Without the entries that are null: in an inventory null means 'not said'."""
    return {str(key): value for key, value in values.items() if value is not None}


def _deeply_given(settings: t.Mapping[str, t.Any]) -> Server:
    """The same, also in the mappings whose keys the specification lists (it fills them up with null)."""
    nested = {key for key, option in server_options().items() if option.get("options")}
    return {key: _given_within(value) if key in nested else value for key, value in _given(settings).items()}


def _given_within(value: t.Any) -> t.Any:
    """One mapping, or each of a list of them."""
    return [_given(each) for each in value] if isinstance(value, list) else _given(value)


def merge(defaults: t.Mapping[str, t.Any], server: t.Mapping[str, t.Any]) -> Server:
    """A server's entry over the host's defaults; the mappings in it are merged key by key."""
    merged = {**_given(defaults), **_given(server)}
    for key in _MERGED:
        parts = [each[key] for each in (defaults, server) if isinstance(each.get(key), t.Mapping)]
        if len(parts) == 2:
            merged[key] = {**parts[0], **parts[1]}
    return merged


def complete(server: t.Mapping[str, t.Any], defaults: t.Mapping[str, t.Any]) -> Server:
    """One server with defaults filled in and types as the specification says; keys that nobody gave are absent."""
    checked = ArgumentSpecValidator(server_options()).validate(merge(defaults, server))
    return _deeply_given(checked.validated_parameters)


def find(servers: t.Sequence[t.Mapping[str, t.Any]], name: str, defaults: t.Mapping[str, t.Any]) -> Server:
    """The complete settings of the server of this name. Raises KeyError where there is none."""
    for server in servers:
        if server.get("name") == name:
            return complete(server, defaults)
    raise KeyError(name)


def _secrets(server: t.Mapping[str, t.Any]) -> list[str]:
    """Texts that no message may show."""
    environment = server.get("secret_environment")
    values = [server.get(key) for key in ("api_key", "admin_api_key", "ssl_keyfile_password")]
    values += list(environment.values()) if isinstance(environment, t.Mapping) else [environment]
    return [str(value) for value in values if value not in (None, "")]


def _type_problems(where: str, server: t.Mapping[str, t.Any]) -> list[str]:
    """What the specification says against the types and choices. A secret of a wrong type is never quoted."""
    options = server_options()
    problems = []
    checked = {}
    for key, value in server.items():
        option = options.get(key)
        if option is None:
            continue
        if option.get("no_log"):
            wanted = t.Mapping if option["type"] == "dict" else str
            if not isinstance(value, wanted):
                problems.append(f"{where}: {key} must be a {'mapping' if option['type'] == 'dict' else 'string'}")
            continue
        if option.get("type") == "list" and option.get("options"):
            continue  # in words of its own, see client_settings
        if option.get("options") and isinstance(value, t.Mapping):
            problems += unknown_keys(f"{where}: {key}", map(str, value), option["options"], "key")
            value = {name: each for name, each in value.items() if name in option["options"]}
        checked[key] = value
    return problems + [f"{where}: {message}" for message in spec_problems(options, checked)]


def _flag_problems(where: str, flags: t.Any) -> list[str]:
    if not isinstance(flags, t.Mapping):
        return []
    problems = []
    names = [flag_name(str(key)) for key in flags]
    for name in names:
        if name in _ELSEWHERE and name != "config":
            own = _ELSEWHERE[name]
            vault = ", with its value from a vault" if server_options()[own].get("no_log") else ""
            problems.append(
                f"{where}: flags: '{name}' is given as the server's own '{own}', not as a flag; "
                f"move it out of flags, beside name and port{vault}"
            )
    if "config" in names:
        problems.append(f"{where}: flags: 'config' is not possible, since these flags become SGLang's --config file")
    if not {"model_path", "model"} & set(names):
        problems.append(f"{where}: flags: 'model_path' is missing")
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [f"{where}: flags: '{name}' is given twice, with dashes and with underscores" for name in twice]
    return problems


def server_problems(where: str, server: t.Mapping[str, t.Any]) -> list[str]:
    """What is wrong with one server (its defaults merged in), each as one sentence that starts with ``where``."""
    problems = unknown_keys(where, map(str, server), server_options(), "key")
    problems += _type_problems(where, server)
    problems += _flag_problems(where, server.get("flags"))
    problems += client_problems(where, server.get("clients"), server_options()["clients"]["options"])
    problems += _figure_problems(where, server)
    name, port = server.get("name"), server.get("port")
    if isinstance(name, str) and not _NAME.match(name):
        problems.append(
            f"{where}: name '{name}' must be letters, digits, '.', '_' and '-' and start with one of the first two"
        )
    if isinstance(port, int) and not 1 <= port <= 65535:
        problems.append(f"{where}: port {port} is outside of 1 to 65535")
    gpus = server.get("gpus")
    if isinstance(gpus, list):
        texts = [str(gpu) for gpu in gpus]
        problems += [f"{where}: GPU {gpu} is listed twice" for gpu in sorted({g for g in texts if texts.count(g) > 1})]
        if gpus and server.get("device") == "cpu":
            problems.append(f"{where}: device is cpu, but gpus lists {', '.join(texts)}")
    return problems


# One to go back to beside the current one, and no more than a disk bears.
KEPT_LAUNCHES = range(2, 101)
# Least values of figures for which zero or less would switch off what they bound.
_LEAST = {
    "soak": {"requests": 0, "concurrency": 1, "tokens": 1, "deadline_s": 1},
    "hung_after": dict.fromkeys(("imports", "distributed", "weights", "kv_cache", "graphs", "warm_up"), 1),
    "drain": {"deadline_s": 0},
}


def _figure_problems(where: str, server: t.Mapping[str, t.Any]) -> list[str]:
    found = []
    for key, bounds in _LEAST.items():
        given = server.get(key)
        values: t.Mapping[str, t.Any] = given if isinstance(given, t.Mapping) else {}
        for name, least in bounds.items():
            value = values.get(name)
            if isinstance(value, (int, float)) and not least <= value < float("inf"):
                found.append(f"{where}: {key}: {name} is {value}, but must be at least {least}")
    keep = server.get("keep_launches")
    if isinstance(keep, int) and keep not in KEPT_LAUNCHES:
        last = KEPT_LAUNCHES[-1]
        found.append(f"{where}: keep_launches is {keep}, but must be from {KEPT_LAUNCHES[0]} to {last}")
    return found


def _twice(host: str, servers: t.Sequence[t.Mapping[str, t.Any]], key: str) -> list[str]:
    seen: dict[str, list[str]] = {}
    for position, server in enumerate(servers):
        if server.get(key) is not None:
            seen.setdefault(str(server[key]), []).append(str(server.get("name") or f"number {position}"))
    return [
        f"{host}: {key} {value} is used by more than one server: {', '.join(names)}"
        for value, names in seen.items()
        if len(names) > 1
    ]


def host_problems(
    host: str,
    names: t.Iterable[str],
    values: t.Mapping[str, t.Any],
    needs_servers: bool,
    known_hosts: t.Collection[str] = (),
) -> list[str]:
    """What is wrong with the variables of one host. ``names``: all its variables; ``values``: those named sglang_*.

    ``known_hosts``: all hosts of the inventory, since a container may name one of them as its node.
    """
    options = host_options()
    ours = sorted(name for name in names if name.startswith("sglang_"))
    problems = unknown_keys(host, ours, options, "variable")
    servers = values.get("sglang_servers")
    # Servers, the container's number, accepted drift and routers have checks of their own below, with clearer words.
    apart = ("sglang_servers", "sglang_vmid", "sglang_drift_accepted", "sglang_routers", "sglang_router_hooks")
    plain = {name: value for name, value in values.items() if name in options and name not in apart}
    spec = {name: option for name, option in options.items() if name not in apart}
    problems += [f"{host}: {message}" for message in spec_problems(spec, _given(plain))]
    # Ansible's validation takes a text for a list or a mapping; the roles join these values as they are.
    wanted = {"list": "a list", "dict": "a mapping"}
    problems += [
        f"{host}: {name} must be {wanted[spec[name]['type']]}, but is a text"
        for name, value in plain.items()
        if isinstance(value, str) and spec[name]["type"] in wanted
    ]
    problems += container_problems(host, values, known_hosts)
    problems += acceptance_problems(host, values.get("sglang_drift_accepted"))
    problems += router_problems(host, values, options, known_hosts)
    problems = [redact(problem, router_secrets(values)) for problem in problems]
    if servers is None:
        return [*problems, f"{host}: sglang_servers is missing"] if needs_servers else problems
    if not isinstance(servers, (list, tuple)) or not all(isinstance(server, t.Mapping) for server in servers):
        return [*problems, f"{host}: sglang_servers must be a list of mappings, each with name, port, python and flags"]
    defaults = values.get("sglang_server_defaults")
    defaults = defaults if isinstance(defaults, t.Mapping) else {}
    merged = [merge(defaults, server) for server in servers]
    secrets: list[str] = []
    for position, server in enumerate(merged):
        name = server.get("name")
        where = f"{host}: server '{name}'" if isinstance(name, str) else f"{host}: sglang_servers[{position}]"
        problems += server_problems(where, server)
        problems += client_host_problems(where, server.get("clients"), known_hosts)
        problems += worker_problems(where, server, values)
        secrets += _secrets(server)
    for key in ("name", "port", "unit"):
        problems += _twice(host, merged, key)
    return [redact(problem, secrets) for problem in problems]


VMIDS = range(100, 1_000_000_000)
_VMID = re.compile(r"[1-9][0-9]{2,8}\Z")
# Rungs that only the Proxmox node can climb. Each asks for a confirmation on the command line.
NODE_RUNGS = ("container_stop", "gpu_reset")
DEFAULT_RUNGS = ("drain", "stop", "term", "kill", "holders")


def _said(value: t.Any) -> bool:
    return value is not None and str(value).strip() != ""


def node_of(values: t.Mapping[str, t.Any]) -> str:
    """The Proxmox node that may be asked and may act for this host; empty where none is named or it must not."""
    node = values.get("sglang_proxmox_host")
    if not _said(node) or not _said(values.get("sglang_vmid")):
        return ""
    allowed = values.get("sglang_host_rungs")
    return str(node) if allowed is None or boolean(allowed, strict=False) else ""


def container_problems(host: str, values: t.Mapping[str, t.Any], known_hosts: t.Collection[str]) -> list[str]:
    """What is wrong with how a container names its Proxmox node. ``known_hosts``: all hosts of the inventory."""
    node, vmid = values.get("sglang_proxmox_host"), values.get("sglang_vmid")
    allowed = values.get("sglang_host_rungs")
    problems = []
    if _said(node) and not _said(vmid):
        problems.append(
            f"{host}: sglang_proxmox_host is '{node}', but sglang_vmid is missing: which container is it there?"
        )
    if _said(vmid) and not _said(node):
        problems.append(f"{host}: sglang_vmid is {vmid}, but sglang_proxmox_host is missing: which node is it on?")
    # As cgroups and pct write it: 0129 is no container's name.
    if _said(vmid) and not (_VMID.match(str(vmid)) and int(str(vmid)) in VMIDS):
        problems.append(f"{host}: sglang_vmid is '{vmid}', but must be a number from {VMIDS[0]} to {VMIDS[-1]}")
    if _said(node) and str(node) == host:
        problems.append(
            f"{host}: sglang_proxmox_host is the host itself; name the Proxmox node that its container runs on"
        )
    elif _said(node) and str(node) not in known_hosts:
        advice = nearest(str(node), known_hosts) or "; add it, outside of the group sglang"
        problems.append(f"{host}: sglang_proxmox_host '{node}' is no host of the inventory{advice}")
    if not _said(node) and allowed is not None and boolean(allowed, strict=False):
        problems.append(
            f"{host}: sglang_host_rungs is true, but no node is named: set sglang_proxmox_host and sglang_vmid"
        )
    if node_of(values):
        problems += _inner_pids(host, values)
    return problems


def _inner_pids(host: str, values: t.Mapping[str, t.Any]) -> list[str]:
    """Protected pids: seen from the node a process of the container has another one."""
    defaults = values.get("sglang_server_defaults")
    lists = [values.get("sglang_protect"), defaults.get("protect") if isinstance(defaults, t.Mapping) else None]
    lists += [server.get("protect") for server in items(values, "sglang_servers") if isinstance(server, t.Mapping)]
    pids = sorted({one for each in lists for one in listed(each) if one.isdecimal()})
    return (
        [
            f"{host}: pid {', '.join(pids)} is protected by its number, which is another one seen from the node "
            f"{values.get('sglang_proxmox_host')}: protect it by its unit or program"
        ]
        if pids
        else []
    )


def listed(value: t.Any) -> list[str]:
    """A list, or a text with commas, as a list of texts."""
    parts = value if isinstance(value, (list, tuple)) else str(value if value is not None else "").split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def confirmation_problems(
    host: str, values: t.Mapping[str, t.Any], confirm_container_stop: t.Any = "", confirm_gpu_reset: t.Any = ""
) -> list[str]:
    """Confirmations that don't fit this host: a rung that ends a whole container must not be confirmed for another."""
    stop, reset = listed(confirm_container_stop), listed(confirm_gpu_reset)
    given = [name for name, value in (("container_stop", stop), ("gpu_reset", reset)) if value]
    if not given:
        return []
    names = " and ".join(f"confirm_{name}" for name in given)
    if not _said(values.get("sglang_proxmox_host")):
        return [f"{host}: {names} is given, but no node is named (sglang_proxmox_host), so there is nobody to do it"]
    if not node_of(values):
        return [f"{host}: {names} is given, but sglang_host_rungs is false, so the node must not act for this host"]
    vmid = str(values.get("sglang_vmid"))
    if stop and stop != [vmid]:
        return [
            f"{host}: confirm_container_stop is {', '.join(stop)}, but the container of {host} is {vmid}: "
            "confirm the one that may be stopped"
        ]
    return []


def shared_container_problems(variables: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    """Hosts of one run that name the same container: one of them has another's number, or it would be done twice."""
    named: dict[tuple[str, str], list[str]] = {}
    for host, values in variables.items():
        node, vmid = values.get("sglang_proxmox_host"), values.get("sglang_vmid")
        if _said(node) and _said(vmid):
            named.setdefault((str(node), str(vmid)), []).append(host)
    return [
        f"{', '.join(hosts)}: all of them name container {vmid} of node {node}; correct sglang_vmid, or leave all but "
        "one out with --limit"
        for (node, vmid), hosts in named.items()
        if len(hosts) > 1
    ]


def confirmation_scope_problems(
    hosts: t.Sequence[str],
    given: t.Mapping[str, t.Any],
    kept: t.Mapping[str, t.Sequence[str]],
    server_count: int = 1,
) -> list[str]:
    """Confirmations that would count for more than they were given for.

    ``hosts``: those with a chosen server, ``given``: the playbooks' variables; ``kept``: which of them each host has
    from the inventory instead of from the command line, ``server_count``: how many servers are chosen.
    """
    problems = [
        f"{host}: {' and '.join(names)} stands in the inventory, but a confirmation is for one run: remove it there, "
        "and say it with -e"
        for host, names in kept.items()
        if names
    ]
    names = [name for name, value in given.items() if listed(value)]
    if names and len(hosts) > 1:
        problems.append(
            f"{' and '.join(names)} is given, and servers of {', '.join(hosts)} are chosen: numbers of containers and "
            "GPUs mean others on another node, so confirm for one host at a time, with -e server=HOST/NAME"
        )
    elif listed(given.get("confirm_container_stop")) and server_count > 1:
        problems.append(
            f"confirm_container_stop is given, and {server_count} servers in that container are chosen: a stop for "
            "one of them takes down the one that was done before; choose one with -e server=HOST/NAME"
        )
    return problems


def inside_rungs(server: t.Mapping[str, t.Any]) -> list[str]:
    """The server's rungs without those that only the node can climb."""
    return [rung for rung in server.get("rungs") or DEFAULT_RUNGS if rung not in NODE_RUNGS]


def node_rungs(
    server: t.Mapping[str, t.Any], confirm_container_stop: t.Any = "", confirm_gpu_reset: t.Any = ""
) -> list[str]:
    """The rungs of the node's eviction: the server's, and those that were confirmed on the command line."""
    rungs = list(server.get("rungs") or DEFAULT_RUNGS)
    for name, confirmed in (("container_stop", confirm_container_stop), ("gpu_reset", confirm_gpu_reset)):
        if listed(confirmed) and name not in rungs:
            rungs.append(name)
    return rungs


def redact(text: str, secrets: t.Iterable[str]) -> str:
    """The text without these secrets."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


Fleet = t.Mapping[str, t.Sequence[str]]
# (host, server) of each node of one server over several hosts.
Together = t.Sequence[t.Sequence[tuple[str, str]]]


def _listed(fleet: Fleet, together: Together = ()) -> str:
    """The servers as HOST/NAME; one over several hosts once, with its other hosts."""
    others = {name: [host for host, _server in group[1:]] for group in together for name in group[:1]}
    later = {name for group in together for name in group[1:]}
    names = []
    for host, servers in fleet.items():
        for server in servers:
            if (host, server) not in later:
                more = others.get((host, server))
                names.append(f"{host}/{server}" + (f" (with {', '.join(more)})" if more else ""))
    return ", ".join(names) or "none"


def choose(
    fleet: Fleet, wanted: str, every: bool, together: Together = ()
) -> tuple[dict[str, list[str]], t.Optional[str]]:
    """Which servers to work on: (chosen names per host, why nothing was chosen or None).

    ``fleet``: the servers' names of each host in play. ``wanted``: '', NAME or HOST/NAME. More than one server is only
    chosen where ``every`` says so: a slip of the keyboard must not take a fleet down. ``together``: the nodes of each
    server over several hosts, which is one server: all of them are chosen with one.
    """
    nothing: dict[str, list[str]] = {host: [] for host in fleet}
    host_part, _slash, name_part = wanted.rpartition("/")
    meant = {
        (host, name)
        for host, names in fleet.items()
        for name in names
        if (not wanted or name == name_part) and (not host_part or host == host_part)
    }
    groups = [group for group in together if meant & set(group)]
    meant |= {node for group in groups for node in group}
    chosen = {host: [name for name in names if (host, name) in meant] for host, names in fleet.items()}
    count = len(meant) - sum(len(group) - 1 for group in groups)
    if count == 0 and wanted:
        names = {name for each in fleet.values() for name in each}
        suggestion = nearest(name_part, names) or "."
        return nothing, f"no server '{wanted}' is in play{suggestion} In play: {_listed(fleet, together)}"
    if count == 0:
        return nothing, f"no server is in play: sglang_servers is empty on {', '.join(fleet) or 'every host'}"
    if count > 1 and not every:
        example = next(f"{host}/{name}" for host, names in chosen.items() for name in names)
        return nothing, (
            f"{count} servers are in play: {_listed(chosen, together)}. This playbook works on one: choose it with "
            f"-e server={example}, or say -e all=true for all of them, one after another. "
            "Each is down while it is relaunched; for a change without downtime see rollout.yml"
        )
    return chosen, None


def driver_problem(problem: t.Mapping[str, t.Any]) -> str:
    """What the driver answered to a query as a whole, and what to do about it where its code says so."""
    code = problem.get("code")
    _name, advice = DRIVER_CODES.get(code if isinstance(code, int) else 0, ("", ""))
    return f"{problem.get('message')}{': ' + advice if advice else ''}"


def _matches(wanted: str, gpu: t.Mapping[str, t.Any]) -> bool:
    names = {str(gpu.get("index")), str(gpu.get("uuid")), str(gpu.get("bus_id")).lower()}
    return wanted in names or wanted.lower() in names


def gpu_indices(server: t.Mapping[str, t.Any], gpus: t.Sequence[t.Mapping[str, t.Any]]) -> list[int]:
    """The indices of the GPUs that a server uses, of those that the host shows."""
    if server.get("device") == "cpu":
        return []
    wanted = [str(gpu) for gpu in server.get("gpus") or []]
    known = [gpu for gpu in gpus if isinstance(gpu.get("index"), int)]
    return [gpu["index"] for gpu in known if not wanted or any(_matches(each, gpu) for each in wanted)]


def gpu_problems(
    host: str,
    chosen: t.Sequence[str],
    servers: t.Sequence[t.Mapping[str, t.Any]],
    info: t.Mapping[str, t.Any],
    expected: int | None = None,
) -> list[str]:
    """What the GPUs that the host shows say against the chosen servers. ``info``: the result of gpu_info.

    ``expected``: how many the host must show; another number would only be found after the eviction.
    """
    mine = [server for server in servers if server["name"] in chosen and server.get("device") != "cpu"]
    if not mine:
        return []
    gpus = rows(info, "gpus") if info.get("gpus") is not None else None
    if gpus is None:
        problems = "; ".join(map(driver_problem, rows(info, "problems"))) or info.get("msg")
        return [f"{host}: the GPUs can't be read, so nothing about them is known: {problems or 'no reason given'}"]
    if not gpus:
        return [f"{host}: the driver shows no GPU; a server without one says device: cpu"]
    problems = []
    shown = ", ".join(f"{gpu.get('index')} ({gpu.get('bus_id')})" for gpu in gpus)
    if expected is not None and len(gpus) != expected:
        problems.append(
            f"{host}: sglang_expected_gpus is {expected}, the driver shows {len(gpus)}: {shown}. "
            "Look for the missing GPU on the host, or correct the number"
        )
    for server in mine:
        for wanted in map(str, server.get("gpus") or []):
            if not any(_matches(wanted, gpu) for gpu in gpus):
                problems.append(f"{host}: server '{server['name']}': there is no GPU {wanted}; the host shows {shown}")
        used = set(gpu_indices(server, gpus))
        for other in servers:
            shared = sorted(used & set(gpu_indices(other, gpus)))
            if shared and other["name"] != server["name"]:
                problems.append(
                    f"{host}: servers '{server['name']}' and '{other['name']}' both use GPU "
                    f"{', '.join(map(str, shared))}; a GPU can only be proved clean for one server"
                )
    return sorted(set(problems))
