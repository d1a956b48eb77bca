# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module server_ready in slices, and tells people how far the start is meanwhile.

One long module call would be silent until its end. Each slice returns what it saw, and the next one goes on with it, so
that the verdict is the same. Lines go to stderr: what a callback prints on stdout stays machine-readable.

Nodes of one server over several hosts are waited for side by side, each in a process of its own on the controller. They
tell each other how they are by small files in the run's own directory, which Ansible removes at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
import typing as t
from pathlib import Path

from ansible import constants
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

MODULE = "cleanslate.sglang.server_ready"
SLICE_VARIABLE = "sglang_progress_s"
SLICE_S = 5.0
TELL_EVERY_S = 15.0
# The module keeps the deadline; this one only ends what would go on for ever. A slice may be longer than it should be
# (the last one proves, soaks, and gathers evidence).
NET_S = 900.0
_KEPT_LINES = 500
# A node that is ready waits for the others: how often it looks for their word, and how often at its own server.
PEER_LOOK_S = 1.0
PEER_PROOF_S = 15.0
PEER_PROOF_DEADLINE_S = 30.0


class ActionModule(ActionBase):
    """Slices, one after another, until the module has its verdict."""

    TRANSFERS_FILES = False
    _requires_connection = True
    _supports_async = True
    _supports_check_mode = True

    def run(self, tmp: t.Any = None, task_vars: t.Optional[dict[str, t.Any]] = None) -> dict[str, t.Any]:
        variables = task_vars or {}
        result: dict[str, t.Any] = super().run(tmp, variables)
        del tmp
        arguments = dict(self._task.args)
        unit = arguments.pop("unit", None)
        if self._task.async_val or arguments.get("slice_s") is not None:
            # In the background nobody watches; and whoever cuts the slices himself gets one.
            result.update(self._slice(arguments, variables, background=bool(self._task.async_val)))
            return result
        try:
            slice_s = _seconds(self._templated(variables))
        except ValueError as error:
            return {**result, "failed": True, "msg": f"{SLICE_VARIABLE}: {error}"}
        peers = _peers_of(unit, str(variables.get("inventory_hostname")))
        result.update(self._watch(arguments, variables, slice_s, peers))
        return result

    def _templated(self, variables: t.Mapping[str, t.Any]) -> t.Any:
        return self._templar.template(variables.get(SLICE_VARIABLE, SLICE_S))

    def _watch(
        self,
        arguments: dict[str, t.Any],
        variables: dict[str, t.Any],
        slice_s: float,
        peers: t.Optional[Peers] = None,
    ) -> dict[str, t.Any]:
        teller = _Teller(f"{arguments.get('name')} on {variables.get('inventory_hostname', self._task.delegate_to)}")
        start = time.monotonic()
        if peers:
            peers.tell("waits")
        watch: t.Optional[t.Mapping[str, t.Any]] = None
        while True:
            given = {**arguments, "slice_s": slice_s, **({} if watch is None else {"watch": watch})}
            answer = self._slice(given, variables)
            if answer.get("finished") is not False or answer.get("failed"):
                break
            watch = answer.get("watch")
            teller.tell(answer)
            failed = peers.failed() if peers else ""
            if failed:
                answer.update(_ended_by_peer(failed, arguments.get("name")))
                break
            waited = time.monotonic() - start
            if not isinstance(watch, dict) or waited > _deadline(arguments) + NET_S:
                answer.update(
                    failed=True,
                    msg=f"server_ready did not come to a verdict within {waited:.0f} s, beyond its own deadline",
                )
                break
        if peers and _is_ready(answer):
            peers.tell("ready")
            answer = self._stay(answer, arguments, variables, peers, start, teller)
        if peers and not _is_ready(answer):
            peers.tell(*_end_of(answer))
        answer.pop("watch", None)
        answer["progress"] = teller.lines
        return answer

    def _stay(
        self,
        answer: dict[str, t.Any],
        arguments: dict[str, t.Any],
        variables: dict[str, t.Any],
        peers: Peers,
        start: float,
        teller: _Teller,
    ) -> dict[str, t.Any]:
        """This node is ready: until the others are, or one is not, see that it stays so. That renews its lease."""
        teller.say(f"{teller.who}: ready, and waits for the other nodes")
        looked = time.monotonic()
        again = {**arguments, "record": False, "soak_requests": 0, "deadline_s": PEER_PROOF_DEADLINE_S}
        while peers.under_way() and time.monotonic() - start < _deadline(arguments) + NET_S:
            time.sleep(PEER_LOOK_S)
            if time.monotonic() - looked < PEER_PROOF_S:
                continue
            if not _is_ready(self._slice(again, variables)):
                # Its verdict counts, and is kept with the launch.
                return self._slice({**again, "record": arguments.get("record", False)}, variables)
            looked = time.monotonic()
        return answer

    def _slice(
        self, arguments: dict[str, t.Any], variables: dict[str, t.Any], background: bool = False
    ) -> dict[str, t.Any]:
        answer: dict[str, t.Any] = self._execute_module(
            module_name=MODULE, module_args=arguments, task_vars=variables, wrap_async=background
        )
        return answer


class Peers:
    """What the nodes of one start of a server say of themselves, each in a file of its own."""

    def __init__(self, folder: Path, host: str, hosts: t.Sequence[str]) -> None:
        self._folder = folder
        self._host = host
        self._others = [each for each in hosts if each != host]

    def tell(self, state: str, error: str = "") -> None:
        """Whole or not at all. Where it can't be written the others wait for their own verdict."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._path(self._host)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps({"host": self._host, "state": state, "error": error}), encoding="utf-8")
            new.replace(path)

    def failed(self) -> str:
        """The first other node that surely does not serve, and why; empty where there is none."""
        for host in self._others:
            told = self._told(host)
            if told.get("state") == "failed":
                return f"{host}: {told.get('error') or 'it does not serve'}"
        return ""

    def under_way(self) -> bool:
        """Whether it is worth waiting: others still wait, and none of them failed.

        One that has not begun does not count, since there may be no process for it before we end.
        """
        states = [self._told(host).get("state") for host in self._others]
        return "waits" in states and "failed" not in states

    def _path(self, host: str) -> Path:
        return self._folder / hashlib.sha256(host.encode()).hexdigest()[:32]

    def _told(self, host: str) -> dict[str, t.Any]:
        try:
            found = json.loads(self._path(host).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _peers_of(unit: t.Any, host: str) -> t.Optional[Peers]:
    """The other nodes; None for a server of one host. What is no such option the module refuses itself."""
    if not isinstance(unit, t.Mapping) or not unit.get("key") or not isinstance(unit.get("hosts"), (list, tuple)):
        return None
    name = hashlib.sha256(str(unit["key"]).encode()).hexdigest()[:32]
    folder = Path(constants.DEFAULT_LOCAL_TMP) / f"cleanslate-{name}"  # type: ignore[attr-defined]
    return Peers(folder, host, [str(each) for each in unit["hosts"]])


def _is_ready(answer: t.Mapping[str, t.Any]) -> bool:
    return answer.get("ready") is True and not answer.get("failed")


def _end_of(answer: t.Mapping[str, t.Any]) -> tuple[str, str]:
    """The word for the others. A host that does not answer proves nothing against the server: they wait on."""
    if answer.get("unreachable") or answer.get("peer_failed"):
        return "gone", ""
    verdict = answer.get("verdict")
    if verdict is None:
        return "gone", ""
    return "failed", f"{verdict}: {answer.get('error') or answer.get('msg') or 'no reason given'}"


def _ended_by_peer(failed: str, name: t.Any) -> dict[str, t.Any]:
    """The end of a node whose server can't serve any more, since another node of it failed."""
    error = f"another node of it failed, {failed}"
    return {
        "failed": True,
        "ready": False,
        "verdict": "failed",
        "finished": True,
        "error": error,
        "peer_failed": True,
        "msg": f"{name} is not ready: {error}",
    }


class _Teller:
    """Shows a line when the phase changes, and every 15 s."""

    def __init__(self, who: str) -> None:
        self.lines: list[str] = []
        self.who = who
        self._phase: t.Any = None
        self._told_at = -math.inf

    def tell(self, answer: t.Mapping[str, t.Any]) -> None:
        now, phase = time.monotonic(), (answer.get("phase"), "the proof begins" in str(answer.get("progress_line")))
        if phase == self._phase and now - self._told_at < TELL_EVERY_S:
            return
        self._phase, self._told_at = phase, now
        self.say(f"{self.who}: {answer.get('progress_line')}")

    def say(self, line: str) -> None:
        display.display(line, color="bright blue", stderr=True)
        if len(self.lines) < _KEPT_LINES:
            self.lines.append(line)


def _seconds(value: t.Any) -> float:
    """The length of a slice. Raises ValueError for what is no such number."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{value!r} must be a number of seconds greater than 0")
    return seconds


def _deadline(arguments: t.Mapping[str, t.Any]) -> float:
    """The module's own deadline, for the net above it; what is no number the module refuses itself."""
    try:
        return float(arguments.get("deadline_s") or 600)
    except (TypeError, ValueError):
        return 600.0
