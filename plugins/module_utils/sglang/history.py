# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which launches of a server are kept, what became of each, and which of them can be started again."""

from __future__ import annotations

import os
import typing as t
from dataclasses import dataclass

from ..errors import CleanSlateError, NotPermitted
from .again import Kept, check_kept
from .keeping import MOST_KEPT
from .kept import REQUEST, UNIT, parse_request
from .record import LAUNCHES, is_launch_id, launch_dir, new_launch_id, opened_folder, read_record, server_dir
from .record_files import look_link, read_config_text, read_document, read_kept_record, read_text
from .summary import soak_of

LAST_GOOD, PREVIOUS = "last_good", "previous"
_SHOWN = 10


@dataclass(frozen=True)
class Launch:
    """One kept launch. ``verdict``: ready, failed, hung, starting; None: it was never judged.

    ``soak``: the load of its proof, for a later one to be compared with. ``problem``: why a part of it can't be used
    (then what depends on that part is None).
    """

    launch_id: str
    started_at: t.Optional[str] = None
    config_hash: t.Optional[str] = None
    user: t.Optional[str] = None
    from_launch: t.Optional[str] = None
    operator: t.Optional[str] = None
    run_id: t.Optional[str] = None
    verdict: t.Optional[str] = None
    error: t.Optional[str] = None
    seconds_to_ready: t.Optional[float] = None
    tokens_per_s: t.Optional[float] = None
    soak: t.Optional[t.Mapping[str, t.Any]] = None
    current: bool = False
    last_good: bool = False
    startable: bool = False
    problem: t.Optional[str] = None


def list_launches(state_dir: str, name: str) -> list[Launch]:
    """The kept launches, the newest first. Raises CleanSlateError only where their folder can't be read at all."""
    reading = read_record(state_dir, name)
    good = look_link(state_dir, name, "last_good").launch_id
    if reading.record is not None:
        current = reading.record.launch_id
    else:
        current = look_link(state_dir, name, "current").launch_id or ""
    return [_launch(state_dir, name, launch_id, current, good) for launch_id in _ids(state_dir, name)[:MOST_KEPT]]


def next_launch_id(state_dir: str, name: str) -> str:
    """An id that sorts after those of earlier launches, also within one second."""
    try:
        taken = _ids(state_dir, name)
    except CleanSlateError:
        taken = []  # the start itself says what is wrong with that folder
    return new_launch_id(taken=taken)


def _ids(state_dir: str, name: str) -> list[str]:
    folder = server_dir(state_dir, name)
    try:
        with opened_folder(folder):
            pass
        with opened_folder(os.path.join(folder, LAUNCHES)) as dir_fd:
            return sorted((entry for entry in os.listdir(dir_fd) if is_launch_id(entry)), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NotPermitted(f"the launches in {folder} can't be read: {error.strerror}; use become") from error


def _launch(state_dir: str, name: str, launch_id: str, current: str, good: t.Optional[str]) -> Launch:
    marks: dict[str, t.Any] = {"current": launch_id == current, "last_good": launch_id == good}
    try:
        record = read_kept_record(state_dir, name, launch_id)
    except CleanSlateError as error:
        return Launch(launch_id, problem=str(error), **marks)
    proof: t.Mapping[str, t.Any] = {}
    problem = None
    try:
        proof = read_document(state_dir, name, launch_id, "proof") or {}
        startable = read_text(state_dir, name, launch_id, REQUEST) is not None
    except CleanSlateError as error:
        problem, startable = str(error), False
    verdict = _text(proof.get("verdict"))
    return Launch(
        launch_id,
        started_at=record.started_at,
        config_hash=record.config_hash,
        user=record.user,
        from_launch=record.from_launch,
        operator=record.operator,
        run_id=record.run_id,
        verdict=verdict,
        error=_text(proof.get("error")),
        seconds_to_ready=_number(proof.get("seconds_to_ready", proof.get("seconds"))) if verdict == "ready" else None,
        tokens_per_s=_number((soak_of(proof) or {}).get("tokens_per_s")),
        soak=_soak(soak_of(proof)),
        startable=startable,
        problem=problem,
        **marks,
    )


def _text(value: t.Any) -> t.Optional[str]:
    return value if isinstance(value, str) else None


def _number(value: t.Any) -> t.Optional[float]:
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)


def _soak(found: t.Optional[t.Mapping[str, t.Any]]) -> t.Optional[dict[str, t.Any]]:
    """The figures of a soak that a later one is compared by; None where there was none."""
    if found is None:
        return None
    latency = found.get("latency_s")
    figures = {name: _number(found.get(name)) for name in ("requests", "concurrency", "tokens", "tokens_per_s")}
    middle = _number(latency.get("p50")) if isinstance(latency, t.Mapping) else None
    return {**figures, "latency_p50_s": middle}


def baseline_of(state_dir: str, name: str, config_hash: str) -> t.Optional[dict[str, t.Any]]:
    """The newest soak of a proved launch with this configuration, None where there is none; with its launch_id."""
    for launch in list_launches(state_dir, name):
        if launch.verdict == "ready" and launch.config_hash == config_hash and launch.problem is None:
            soak = soak_of(read_document(state_dir, name, launch.launch_id, "proof") or {})
            if soak is not None:
                return {**soak, "launch_id": launch.launch_id}
    return None


# --- a launch to start again ------------------------------------------------------------------------------------------


def choose_launch(state_dir: str, name: str, wanted: str) -> str:
    """The id that ``wanted`` stands for: an id itself, last_good, or previous (the newest proved one that is not
    current). Raises CleanSlateError that names the kept launches."""
    launches = list_launches(state_dir, name)
    if wanted == LAST_GOOD:
        link = look_link(state_dir, name, "last_good")
        if link.launch_id is None:
            why = link.problem or f"no launch of {name!r} was proved yet, so there is no last_good"
            raise CleanSlateError(f"from_launch: {why}; {_kept_words(launches)}")
        return link.launch_id
    if wanted == PREVIOUS:
        for launch in launches:
            if launch.verdict == "ready" and launch.startable and not launch.current:
                return launch.launch_id
        raise CleanSlateError(
            f"from_launch: no launch of {name!r} but the current one was proved; {_kept_words(launches)}"
        )
    if not is_launch_id(wanted) or wanted not in [launch.launch_id for launch in launches]:
        raise CleanSlateError(
            f"from_launch: {wanted!r} is neither a kept launch of {name!r} nor {LAST_GOOD} nor {PREVIOUS}; "
            + _kept_words(launches)
        )
    return wanted


def _kept_words(launches: t.Sequence[Launch]) -> str:
    if not launches:
        return "no launch is kept"
    words = []
    for launch in launches[:_SHOWN]:
        marks = [word for word, is_so in (("current", launch.current), ("last_good", launch.last_good)) if is_so]
        told = launch.verdict or ("can't be used" if launch.problem else "never judged")
        words.append(f"{launch.launch_id} ({', '.join([told, *marks])})")
    more = f" and {len(launches) - _SHOWN} older ones" if len(launches) > _SHOWN else ""
    return f"kept are {', '.join(words)}{more}"


def read_kept(state_dir: str, name: str, launch_id: str) -> Kept:
    """A launch with everything that starts it again, checked.

    Raises:
        CleanSlateError: something is missing, or was changed.
    """
    folder = launch_dir(state_dir, name, launch_id)
    try:
        record = read_kept_record(state_dir, name, launch_id)
        text = read_text(state_dir, name, launch_id, REQUEST)
        if text is None:
            raise CleanSlateError(
                "its folder has no request.json: a version of cleanslate.sglang made it that kept none; "
                "start it from its flags instead"
            )
        try:
            request = parse_request(text)
        except (ValueError, RecursionError) as error:
            raise CleanSlateError(f"its request.json can't be used: it {error}") from error
        kept = Kept(
            record,
            request,
            config=_there(folder, "config.yaml", read_config_text(state_dir, name, launch_id)),
            environment=_there(folder, "env", read_text(state_dir, name, launch_id, "env")),
            unit=read_text(state_dir, name, launch_id, UNIT),
        )
        check_kept(kept, state_dir)
    except CleanSlateError as error:
        raise CleanSlateError(again_error(name, launch_id, error)) from error
    return kept


def again_error(name: str, launch_id: str, error: object) -> str:
    """Why a kept launch can't be started, in one sentence."""
    return f"from_launch: the launch {launch_id} of {name!r} can't be started again: {error}"


def _there(folder: str, file: str, text: t.Optional[str]) -> str:
    if text is None:
        raise CleanSlateError(f"{folder}/{file} is missing")
    return text
