# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container and its Proxmox node: whether the node can be asked, what it is told, how the container is reached by it.

Pure functions over registered results and inventory variables.
"""

from __future__ import annotations

import typing as t

from .inventory import driver_problem, gpu_indices
from .results import failure, why

Result = t.Mapping[str, t.Any]
JSON = dict[str, t.Any]

PCT_CONNECTION = "community.proxmox.proxmox_pct_remote"
# What timeout(1) ends with, without and with its SIGKILL (which ends itself as well), and where there is no program.
_TIMED_OUT = (124, 137, -9)
_NOT_FOUND = (126, 127)


def node_problems(
    host: str,
    node: str,
    vmid: t.Any,
    uid: t.Any,
    info: t.Any,
    needs_gpus: bool,
    inside: bool,
    namespaces: t.Sequence[str],
) -> list[str]:
    """Why the node can't be asked or is the wrong one.

    ``uid``: the result of `id -u` there, ``info``: gpu_info's with container. ``inside``: whether the container itself
    answered; ``namespaces``: its PID namespace as seen from inside and as the node names that of the container's init.
    """
    where = f"{host}: node {node}"
    if not isinstance(uid, t.Mapping) or uid.get("unreachable") or uid.get("rc") != 0:
        # On the node another variable decides than on the host itself.
        return [f"{where} can't be asked: {failure(uid).replace('set sglang_become:', 'set sglang_host_become:')}"]
    if str(uid.get("stdout")).strip() != "0":
        return [
            f"{where}: no permission: the tasks run there as uid {str(uid.get('stdout')).strip()}, and only root sees "
            "the processes of a container; set sglang_host_become: true"
        ]
    if not isinstance(info, t.Mapping) or info.get("failed") or "gpus" not in info:
        return [f"{where} can't look at container {vmid}: {failure(info)}"]
    problems = []
    if info.get("gpus") is None and needs_gpus:
        words = "; ".join(driver_problem(each) for each in info.get("problems") or []) or "no reason given"
        problems.append(f"{where}: the GPUs can't be read there: {words}")
    container = info.get("container")
    state = container.get("state") if isinstance(container, t.Mapping) else None
    if inside and state in ("stopped", "unknown", None):
        problems.append(
            f"{where}: {host} answers, but container {vmid} is {state or 'not known'} there; sglang_vmid or "
            "sglang_proxmox_host names another one"
        )
    elif inside and not (len(namespaces) == 2 and all(namespaces)):
        problems.append(
            f"{where}: whether container {vmid} there is {host} can't be told: the PID namespace of "
            f"{'its init as the node sees it' if namespaces and namespaces[0] else host} is not known"
        )
    elif inside and namespaces[0] != namespaces[1]:
        problems.append(
            f"{where}: container {vmid} there is not {host} (their PID namespaces are {namespaces[1]} and "
            f"{namespaces[0]}); sglang_vmid or sglang_proxmox_host names another one"
        )
    return problems


def pct_problem(result: t.Any, vmid: t.Any) -> str:
    """Why `pct exec` does not reach into the container; empty where it does."""
    if not isinstance(result, t.Mapping) or not result or result.get("skipped"):
        return "sglang_pct_fallback is false"
    code = result.get("rc")
    if code == 0 and not result.get("unreachable"):
        return ""
    if code in _TIMED_OUT:
        return f"`pct exec {vmid}` gave no answer within 20 s (attach hangs)"
    text = " ".join(str(result.get("stderr") or result.get("msg") or "").split())
    if code in _NOT_FOUND:
        return f"there is no pct ({text or f'exit code {code}'})"
    if code is None:
        return failure(result)
    return f"`pct exec {vmid}` ended with code {code}{': ' + text if text else ''}"


def unreachable_problem(host: str, vmid: t.Any, ssh: t.Any, pct: str, node_name: str = "", seen: t.Any = None) -> str:
    """Why a container can't be reached, and what its node sees of it, in one sentence with the next step."""
    parts = [f"{host}: {failure(ssh)}"]
    if pct:
        parts.append(f"not by pct either: {pct}")
    if not node_name:
        return "; ".join(parts)
    if isinstance(seen, t.Mapping) and seen and not seen.get("skipped"):
        verdict = seen.get("verdict") or "no verdict"
        parts.append(f"node {node_name} sees container {vmid}: {verdict}: {_seen(seen)}")
    parts.append(
        "teardown.yml and assert_clean.yml work without the container, by the node; to stop and start it: "
        f"teardown.yml -e confirm_container_stop={vmid}"
    )
    return "; ".join(parts)


def _seen(seen: Result) -> str:
    return str(seen.get("summary") or "nothing stands against it") if seen.get("verdict") == "clean" else why(seen)


def node_connection(variables: Result, node_name: str, vmid: t.Any) -> JSON:
    """Connection variables of a container that is reached by pct on its node. ``variables``: the node's own.

    pct exec enters as root, so nothing has to become root inside. What the node does not say falls back to what the
    connection plugin would take for a node, never to the container's own.
    """

    def first(*names: str) -> t.Any:
        return next((variables[name] for name in names if variables.get(name) not in (None, "")), None)

    found = {
        "ansible_connection": PCT_CONNECTION,
        "ansible_host": first("ansible_host", "ansible_ssh_host") or node_name,
        "ansible_user": first("ansible_user", "ansible_ssh_user") or "root",
        "ansible_port": int(first("ansible_port", "ansible_ssh_port") or 22),
        "proxmox_vmid": int(vmid),
        "ansible_become": False,
    }
    for name, value in (
        ("ansible_private_key_file", first("ansible_private_key_file", "ansible_ssh_private_key_file")),
        ("ansible_password", first("ansible_password", "ansible_ssh_pass", "ansible_ssh_password")),
        ("ansible_host_key_checking", first("ansible_host_key_checking", "ansible_ssh_host_key_checking")),
        ("ansible_paramiko_proxy_command", first("ansible_paramiko_proxy_command")),
        ("proxmox_become_method", first("proxmox_become_method")),
    ):
        if value is not None:
            found[name] = value
    key = found.get("ansible_private_key_file")
    # The container's own variable of this name would otherwise win in the connection plugin.
    return {**found, "ansible_ssh_private_key_file": key} if key is not None else found


def node_devices(server: Result, preflight_gpus: t.Any = None, before: t.Any = None) -> list[str]:
    """The server's GPUs as the node is told them: by UUID where the view from inside told it, since indices differ.

    Without a view they are what the inventory says. A GPU without a UUID goes by its bus id. What the inventory names
    by UUID or bus id is not translated: a container could say that it is another one.
    """
    if server.get("device") == "cpu":
        return []
    asked = [str(gpu) for gpu in server.get("gpus") or []]
    named = [gpu for gpu in asked if not gpu.isdecimal()]
    if named and len(named) == len(asked):
        return asked
    shown = _rows(preflight_gpus)
    used = set(gpu_indices({**server, "gpus": [gpu for gpu in asked if gpu.isdecimal()]}, shown))
    rows = [gpu for gpu in shown if gpu.get("index") in used] or ([] if named else _rows(before))
    names = [str(gpu.get("uuid") or gpu.get("bus_id") or "") for gpu in rows]
    return named + names if names and all(names) else asked


def _rows(rows: t.Any) -> list[Result]:
    return [row for row in rows if isinstance(row, t.Mapping)] if isinstance(rows, (list, tuple)) else []


def node_baselines(baselines: t.Mapping[str, t.Any], preflight_gpus: t.Any = None, before: t.Any = None) -> JSON:
    """Known use of GPUs, by UUID instead of the container's indices where the view from inside tells them."""
    uuids = {
        str(gpu.get("index")): str(gpu["uuid"]) for gpu in _rows(before) + _rows(preflight_gpus) if gpu.get("uuid")
    }
    return {uuids.get(str(name), str(name)): value for name, value in baselines.items()}
