# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a launch writes and starts, worked out before anything is touched. Pure: no file is read or written here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import typing as t
from dataclasses import dataclass, field

from ..errors import CleanSlateError
from . import flags as flag_tools
from .kept import REQUEST, UNIT, KeptRequest, print_of, request_text, secret_lines
from .option_table import OptionTable
from .record import Record, launch_dir
from .redact import MASK, SECRET_FLAGS, Redactor, is_secret_variable
from .unit import UnitPlan, environment_text, unit_text

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Account:
    """Whom the server runs as. ``groups`` are supplementary group ids, the primary one included."""

    user: str
    group: str
    uid: int
    gid: int
    home: str
    groups: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChosenGpu:
    """A GPU by NVML's index (the order of PCI bus ids) and its UUID."""

    index: int
    uuid: t.Optional[str]


@dataclass(frozen=True)
class LaunchRequest:
    """What was asked for. ``gpus`` None: all. ``secrets``: SGLang's secret options by their names (`api-key`, ...).

    ``launcher``: systemd or detached. ``log``: journal (systemd alone), file (in the launch's folder) or a path.
    """

    name: str
    python: str
    account: Account
    flags: t.Mapping[str, t.Any]
    launcher: str
    state_dir: str
    boot_id: t.Optional[str]
    host: t.Optional[str] = None
    port: t.Optional[int] = None
    gpus: t.Optional[tuple[ChosenGpu, ...]] = None
    environment: t.Mapping[str, str] = field(default_factory=dict)
    secret_environment: t.Mapping[str, str] = field(default_factory=dict)
    secrets: t.Mapping[str, str] = field(default_factory=dict)
    unit: t.Optional[str] = None
    unit_overrides: t.Mapping[str, t.Mapping[str, t.Any]] = field(default_factory=dict)
    limit_memlock: str = "infinity"
    stop_timeout_s: int = 60
    restart: str = "no"
    start_check: tuple[str, ...] = ()
    enabled: bool = False
    log: t.Optional[str] = None
    workdir: t.Optional[str] = None
    waivers: t.Mapping[str, str] = field(default_factory=dict)
    options: t.Optional[OptionTable] = None
    unit_dir: str = "/etc/systemd/system"
    version: t.Optional[str] = None
    operator: t.Optional[str] = None
    run_id: t.Optional[str] = None

    @property
    def redactor(self) -> Redactor:
        return Redactor([*self.secrets.values(), *self.secret_environment.values()])


@dataclass(frozen=True)
class LaunchPlan:
    """What will be written and run. ``files`` names inside the launch's folder -> text; only these hold secrets.

    ``kept``: more files of the folder, by which the same can be started again.
    """

    record: Record
    folder: str
    files: t.Mapping[str, str]
    environment: t.Mapping[str, str]
    argv: tuple[str, ...]
    log_path: t.Optional[str]
    unit_text: t.Optional[str]
    shown: str
    kept: t.Mapping[str, str] = field(default_factory=dict)


def plan_launch(request: LaunchRequest, launch_id: str) -> LaunchPlan:
    """Everything about a launch. Raises CleanSlateError for what can't be written."""
    wanted = _own_flags(request)
    rendered = flag_tools.render(wanted, request.options)
    folder = launch_dir(request.state_dir, request.name, launch_id)
    config_path = os.path.join(folder, "config.yaml")
    argv = (request.python, "-m", "sglang.launch_server", "--config", config_path, *rendered.argv)
    environment = _environment(request)
    log_path = _log_path(request, folder)
    redactor = request.redactor
    record = Record(
        name=request.name,
        launch_id=launch_id,
        state="starting",
        launcher=request.launcher,
        boot_id=request.boot_id,
        unit=request.unit if request.launcher == "systemd" else None,
        user=request.account.user,
        host=str(wanted.get("host", "127.0.0.1")),
        port=_port(wanted),
        device="cpu" if str(wanted.get("device", "")).lower() == "cpu" else "gpu",
        gpus=None if request.gpus is None else tuple(gpu.uuid or str(gpu.index) for gpu in request.gpus),
        python=request.python,
        config=config_path,
        config_hash=config_hash(request, wanted),
        flags={**redactor.data(wanted), **dict.fromkeys(request.secrets, MASK)},
        environment={
            **redactor.environment(environment),
            **dict.fromkeys(request.secret_environment, MASK),
        },
        argv=tuple(redactor.argv(argv)),
        log=log_path or "journal",
        waivers={name: redactor.text(reason) for name, reason in request.waivers.items()},
        operator=None if request.operator is None else redactor.text(request.operator),
        run_id=request.run_id,
    )
    unit = _unit_text(request, argv, folder, log_path) if request.launcher == "systemd" else None
    files = {
        "config.yaml": flag_tools.to_yaml({**rendered.config, **request.secrets}),
        "env": environment_text(environment),
    }
    shown = shown_of(record, rendered.argv, unit, redactor)
    kept = kept_files(_kept_request(request, record, argv), files, unit, redactor)
    return LaunchPlan(record, folder, files, environment, argv, log_path, unit, shown, kept)


def _kept_request(request: LaunchRequest, record: Record, argv: t.Sequence[str]) -> KeptRequest:
    """The settings, without secrets, for whoever starts this launch again."""
    redactor = request.redactor
    words = redactor.argv(argv)
    return KeptRequest(
        name=request.name,
        launch_id=record.launch_id,
        python=request.python,
        user=request.account.user,
        group=request.account.group,
        launcher=request.launcher,
        unit=record.unit,
        unit_dir=request.unit_dir if record.unit is not None else None,
        unit_overrides=redactor.data(dict(request.unit_overrides)),
        limit_memlock=request.limit_memlock,
        stop_timeout_s=request.stop_timeout_s,
        restart=request.restart,
        start_check=tuple(redactor.argv(request.start_check)),
        enabled=request.enabled,
        log=request.log,
        workdir=request.workdir,
        flags=redactor.data(dict(request.flags)),
        environment={
            **redactor.environment(request.environment),
            **dict.fromkeys(request.secret_environment, MASK),
        },
        gpus=None if request.gpus is None else tuple((gpu.index, gpu.uuid) for gpu in request.gpus),
        waivers=dict(record.waivers),
        argv=tuple(words),
        argv_masked=words != list(argv),
        secret_environment=tuple(sorted(request.secret_environment)),
        secret_flags=tuple(sorted(request.secrets)),
        version=request.version,
    )


def kept_files(
    request: KeptRequest, files: t.Mapping[str, str], unit: t.Optional[str], redactor: Redactor
) -> dict[str, str]:
    """request.json with the fingerprints of the other files, and the unit's text."""
    flags = secret_lines(files["config.yaml"], ":", request.secret_flags, redactor)
    variables = secret_lines(files["env"], "=", request.secret_environment, redactor)
    prints = {
        "config.yaml": print_of(files["config.yaml"], ":", flags),
        "env": print_of(files["env"], "=", variables),
        **({} if unit is None else {UNIT: print_of(unit)}),
    }
    complete = dataclasses.replace(request, secret_flags=flags, secret_variables=variables, prints=prints)
    return {REQUEST: request_text(complete), **({} if unit is None else {UNIT: unit})}


def _own_flags(request: LaunchRequest) -> dict[str, t.Any]:
    """The flags with host and port, which are options of their own (the proof and the eviction need them too)."""
    wanted = flag_tools.check(request.flags)
    for name, value in (("host", request.host), ("port", request.port)):
        if value is None:
            continue
        if name in wanted and not flag_tools.same_value(wanted[name], value):
            raise CleanSlateError(
                f"flags: {name} is {wanted[name]!r}, but the option {name} is {value!r}; keep one of them"
            )
        wanted[name] = value
    if "model-path" not in wanted and "model" not in wanted:
        raise CleanSlateError("flags: model_path is missing: SGLang needs a model")
    for name in request.secrets:
        if name not in SECRET_FLAGS:
            raise CleanSlateError(f"{name} is no secret option of SGLang")
    return wanted


def _port(wanted: t.Mapping[str, t.Any]) -> int:
    port = wanted.get("port", 30000)
    number = flag_tools.port_number(port)
    if number is None:
        raise CleanSlateError(f"port is {port!r}; it must be a number from 1 to 65535")
    return number


def _environment(request: LaunchRequest) -> dict[str, str]:
    """The server's whole environment: nothing is inherited from the one who starts it."""
    account = request.account
    result = {
        "PATH": f"{os.path.dirname(request.python)}:{_SYSTEM_PATH}",
        "HOME": account.home,
        "USER": account.user,
        "LOGNAME": account.user,
        "LANG": "C.UTF-8",
    }
    if request.gpus is not None:
        # Indices, not UUIDs: SGLang makes integers of this list (custom all-reduce). Ours count by PCI bus id, as
        # NVML does.
        result["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        result["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in request.gpus)
    for where, mapping in (("environment", request.environment), ("secret_environment", request.secret_environment)):
        for name, value in mapping.items():
            if not _VARIABLE.fullmatch(name):
                raise CleanSlateError(f"{where}: {name!r} is no name of a variable")
            if where == "secret_environment" and name in request.environment:
                raise CleanSlateError(f"{name} is in environment and in secret_environment; keep one of them")
            if request.gpus is not None and name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
                raise CleanSlateError(f"{where}: {name} is made from gpus; name the GPUs there")
            result[name] = value
    return result


def _log_path(request: LaunchRequest, folder: str) -> t.Optional[str]:
    """Where a file takes the output; None for the journal."""
    log = request.log or ("journal" if request.launcher == "systemd" else "file")
    if log == "journal":
        if request.launcher != "systemd":
            raise CleanSlateError("log: only systemd writes to the journal; say 'file' or a path for a detached server")
        return None
    if log == "file":
        return os.path.join(folder, "server.log")
    if not log.startswith("/"):
        raise CleanSlateError(f"log: {log!r} is neither 'journal' nor 'file' nor an absolute path")
    return log


def _unit_text(request: LaunchRequest, argv: t.Sequence[str], folder: str, log_path: t.Optional[str]) -> str:
    return unit_text(
        UnitPlan(
            server=request.name,
            argv=argv,
            user=request.account.user,
            group=request.account.group,
            environment_file=os.path.join(folder, "env"),
            working_directory=request.workdir or "/",
            stop_timeout_s=request.stop_timeout_s,
            restart=request.restart,
            limit_memlock=request.limit_memlock,
            log=log_path or "journal",
            wanted_by="multi-user.target" if request.enabled else None,
            exec_start_pre=[request.start_check] if request.start_check else [],
            overrides=request.unit_overrides,
        )
    )


def config_hash(request: LaunchRequest, wanted: t.Mapping[str, t.Any]) -> str:
    """Changes with flags, environment, GPUs, interpreter and user. Secrets are left out: a hash of a short one would
    tell it."""
    content = {
        "flags": {name: repr(flag_tools.meaning(value)) for name, value in flag_tools.effective(wanted).items()},
        "environment": {k: v for k, v in sorted(request.environment.items()) if not is_secret_variable(k)},
        "gpus": None if request.gpus is None else [gpu.uuid or gpu.index for gpu in request.gpus],
        "python": request.python,
        "user": request.account.user,
    }
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def shown_of(record: Record, argv: t.Sequence[str], unit: t.Optional[str], redactor: Redactor) -> str:
    """The configuration for a diff, where the record and the words after the configuration file are known."""
    return redactor.text(_shown(record, argv, unit))


def _shown(record: Record, argv: t.Sequence[str], unit: t.Optional[str]) -> str:
    """The configuration for a diff: redacted, and with the launch's own id taken out, so that only what was changed
    differs."""
    lines = [
        f"python: {record.python}",
        f"user: {record.user}",
        f"gpus: {'all' if record.gpus is None else ', '.join(record.gpus)}",
    ]
    lines += ["", "# flags", flag_tools.to_yaml(record.flags).rstrip("\n")]
    if argv:
        lines += ["# on the command line", " ".join(argv)]
    lines += ["", "# environment", *(f"{name}={record.environment[name]}" for name in sorted(record.environment))]
    if unit is not None:
        lines += ["", f"# {record.unit}", unit.rstrip("\n")]
    return ("\n".join(lines) + "\n").replace(record.launch_id, "<launch>")


def shown_before(record: t.Optional[Record], unit: t.Optional[str], redactor: Redactor) -> str:
    """The same of an earlier launch, as far as its record holds it; ``unit``: the text of its unit, if there is one."""
    if record is None:
        return redactor.text(unit or "")
    config_words = 5  # python -m sglang.launch_server --config PATH
    return redactor.text(_shown(record, record.argv[config_words:], unit))
