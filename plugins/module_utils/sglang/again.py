# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A kept launch, started again: the same configuration file, environment, unit and command line, word for word.

Nothing is rendered anew, since a newer version of this collection or of SGLang could render it otherwise. Two things
change: the launch's id, and the numbers in CUDA_VISIBLE_DEVICES where the same GPUs (by UUID) have others now. Pure.
"""

from __future__ import annotations

import dataclasses
import os
import typing as t
from dataclasses import dataclass

from ..errors import CleanSlateError
from .configfile import read_config
from .kept import UNIT, KeptRequest, environment_of, print_of
from .launch import Account, ChosenGpu, LaunchPlan, LaunchRequest, kept_files, shown_of
from .record import LAUNCHES, Record, launch_dir
from .redact import SECRET_FLAGS, is_secret_flag
from .unit import MARK, check_unit_name, command_line, environment_text

_CONFIG_WORDS = 5  # python -m sglang.launch_server --config PATH


@dataclass(frozen=True)
class Kept:
    """What lies in a launch's folder."""

    record: Record
    request: KeptRequest
    config: str
    environment: str
    unit: t.Optional[str]


@dataclass(frozen=True)
class Now:
    """What is found on the host for it. ``gpus``: the kept ones in the kept order, as they are numbered now."""

    account: Account
    gpus: t.Optional[tuple[ChosenGpu, ...]]
    boot_id: t.Optional[str]
    version: t.Optional[str]
    operator: t.Optional[str] = None
    run_id: t.Optional[str] = None


def check_kept(kept: Kept, state_dir: str) -> None:
    """Raise CleanSlateError where the folder does not hold what was started then."""
    record, request = kept.record, kept.request
    folder = launch_dir(state_dir, record.name, record.launch_id)
    if (request.name, request.launch_id) != (record.name, record.launch_id):
        raise CleanSlateError(f"its request.json is of {request.name!r}, launch {request.launch_id}")
    if request.launcher not in ("systemd", "detached"):
        raise CleanSlateError(f"its request.json has the launcher {request.launcher!r}")
    if record.config != os.path.join(folder, "config.yaml"):
        raise CleanSlateError(f"it was recorded as {record.config}, and lies in {folder} now")
    for file, text, separator, secret in (
        ("config.yaml", kept.config, ":", request.secret_flags),
        ("env", kept.environment, "=", request.secret_variables),
        (UNIT, kept.unit, "", ()),
    ):
        if text is None and file not in request.prints:
            continue
        if text is None or print_of(text, separator, secret) != request.prints.get(file):
            raise CleanSlateError(f"{os.path.join(folder, file)} is not what the launch wrote: somebody changed it")
    if len(request.argv) < _CONFIG_WORDS or request.argv[_CONFIG_WORDS - 1] != record.config:
        raise CleanSlateError("its request.json has no usable command line")
    if request.launcher == "detached" and request.argv_masked:
        raise CleanSlateError("a word of its command line looked like a secret, so it was not kept")
    if request.launcher == "systemd":
        _check_unit(kept)


def _check_unit(kept: Kept) -> None:
    if kept.unit is None or kept.request.unit is None or kept.request.unit_dir is None:
        raise CleanSlateError("its unit was not kept")
    check_unit_name(kept.request.unit)
    if MARK not in kept.unit or command_line([str(kept.record.config)]) not in kept.unit:
        raise CleanSlateError("its unit is none that a launch writes")


def request_again(kept: Kept, now: Now, state_dir: str) -> LaunchRequest:
    """The request, its secrets from the private files. Raises CleanSlateError where these are not readable as ours."""
    request = kept.request
    environment = _environment(kept)
    config = _config(kept)
    hidden = set(request.secret_environment)
    return LaunchRequest(
        name=request.name,
        python=request.python,
        account=now.account,
        flags={name: value for name, value in config.items() if not is_secret_flag(name)},
        launcher=request.launcher,
        state_dir=state_dir,
        boot_id=now.boot_id,
        gpus=now.gpus,
        environment={name: value for name, value in environment.items() if name not in hidden},
        secret_environment={name: value for name, value in environment.items() if name in hidden},
        secrets={name: str(value) for name, value in config.items() if name in SECRET_FLAGS and value is not None},
        unit=request.unit,
        unit_overrides=request.unit_overrides,
        limit_memlock=request.limit_memlock,
        stop_timeout_s=request.stop_timeout_s,
        restart=request.restart,
        start_check=request.start_check,
        enabled=request.enabled,
        log=request.log,
        workdir=request.workdir,
        waivers={str(name): str(reason) for name, reason in request.waivers.items()},
        unit_dir=request.unit_dir or "",
        version=now.version,
        operator=now.operator,
        run_id=now.run_id,
    )


def plan_again(kept: Kept, request: LaunchRequest, launch_id: str) -> LaunchPlan:
    """What will be written and run: what was written and run then."""
    old, redactor = kept.record, request.redactor
    folder = launch_dir(request.state_dir, request.name, launch_id)

    def moved(text: str) -> str:
        # The id is unique and follows the folder's name, which no quoting changes.
        return text.replace(f"{LAUNCHES}/{old.launch_id}", f"{LAUNCHES}/{launch_id}")

    environment = _environment(kept)
    if request.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in request.gpus)
    argv = tuple(moved(word) for word in kept.request.argv)
    unit = None if kept.unit is None else moved(kept.unit)
    record = dataclasses.replace(
        old,
        launch_id=launch_id,
        state="starting",
        boot_id=request.boot_id,
        pid=None,
        start_ticks=None,
        sid=None,
        started_at=None,
        gpus=None if request.gpus is None else tuple(gpu.uuid or str(gpu.index) for gpu in request.gpus),
        config=os.path.join(folder, "config.yaml"),
        environment=_shown_environment(old, environment),
        argv=tuple(redactor.argv(argv)),
        log=None if old.log is None else moved(old.log),
        from_launch=old.launch_id,
        operator=None if request.operator is None else redactor.text(request.operator),
        run_id=request.run_id,
        fingerprint=None,  # of the host as it was then
    )
    files = {"config.yaml": kept.config, "env": environment_text(environment)}
    again = dataclasses.replace(
        kept.request,
        launch_id=launch_id,
        argv=argv,
        gpus=None if request.gpus is None else tuple((gpu.index, gpu.uuid) for gpu in request.gpus),
        version=request.version,
    )
    shown = shown_of(record, record.argv[_CONFIG_WORDS:], unit, redactor)
    log_path = None if record.log in (None, "journal") else record.log
    more = kept_files(again, files, unit, redactor)
    return LaunchPlan(record, folder, files, environment, argv, log_path, unit, shown, more)


def _shown_environment(old: Record, environment: t.Mapping[str, str]) -> dict[str, str]:
    name = "CUDA_VISIBLE_DEVICES"
    return {**old.environment, **({name: environment[name]} if name in old.environment else {})}


def _environment(kept: Kept) -> dict[str, str]:
    try:
        environment = environment_of(kept.environment)
    except ValueError as error:
        raise CleanSlateError(f"its env file can't be used: {error}") from error
    if environment_text(environment) != kept.environment:
        raise CleanSlateError("its env file can't be used: it is not as a launch writes it")
    return environment


def _config(kept: Kept) -> dict[str, t.Any]:
    config = read_config(kept.config)
    if config is None:
        raise CleanSlateError("its config.yaml can't be understood")
    return config
