# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A launch in plain words, for whoever opens its folder: who, when, with what, how long, and why it failed. Pure."""

from __future__ import annotations

import json
import typing as t

from .record import Record

_WIDTH = 14
_LONGEST = 400
_LINES = 20


def summary_text(
    record: Record, documents: t.Mapping[str, t.Mapping[str, t.Any]], problems: t.Sequence[str] = ()
) -> str:
    """The text of summary.txt. ``documents`` by their names, as far as there are any; ``problems``: others."""
    proof = documents.get("proof", {})
    lines = [
        f"{record.name}, launch {record.launch_id}",
        *_row("started", _started(record)),
        *_row("verdict", _verdict(proof)),
        *_row("process", _process(record)),
        *_row("serves at", f"{record.host}:{record.port}"),
        *_row("GPUs", _gpus(record)),
        *_row("interpreter", record.python),
        *_row("configuration", record.config_hash),
        *_row("log", record.log),
        *_block("flags", [f"{name}: {_shown(value)}" for name, value in sorted(record.flags.items())]),
        *_block("environment", [f"{name}={value}" for name, value in sorted(record.environment.items())]),
        *_block("waivers", [f"{name}: {reason}" for name, reason in sorted(record.waivers.items())]),
        *_block("before the start", _before(documents)),
        *_block("phases", _phases(documents.get("phases", {}))),
        *_block("proof", _proof(proof)),
        *_block("last lines of its log", _last_lines(proof)),
        *_block("could not be read", problems),
    ]
    return "\n".join(_plain(line) for line in lines) + "\n"


def _plain(line: str) -> str:
    """One line without control characters: they could move a terminal's cursor, or colour what is not ours."""
    cleaned = "".join(character if character.isprintable() else " " for character in line)
    return cleaned if len(cleaned) <= _LONGEST else cleaned[: _LONGEST - 4] + " ..."


def _row(name: str, value: t.Optional[str]) -> list[str]:
    return [] if not value else [f"{name:<{_WIDTH}}{value}"]


def _block(title: str, rows: t.Sequence[str]) -> list[str]:
    return ["", title, *(f"  {row}" for row in rows)] if rows else []


def _shown(value: t.Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _started(record: Record) -> str:
    words = [record.started_at or "not completed: the run that started it did not come to its end"]
    if record.operator:
        words.append(f"by {record.operator}")
    if record.run_id:
        words.append(f"(run {record.run_id})")
    if record.from_launch:
        words.append(f"as launch {record.from_launch} again")
    return " ".join(words)


def _verdict(proof: t.Mapping[str, t.Any]) -> str:
    verdict = proof.get("verdict")
    if verdict is None:
        return "not judged"
    took = _seconds(proof.get("seconds"))
    words = f"{verdict}{f' after {took}' if took else ''}"
    return f"{words}: {proof['error']}" if proof.get("error") else words


def _process(record: Record) -> str:
    pid = "pid not known" if record.pid is None else f"pid {record.pid}"
    return f"{pid}, user {record.user}, {record.unit or record.launcher}"


def _gpus(record: Record) -> str:
    if record.device == "cpu":
        return "none (device cpu)"
    return "all" if record.gpus is None else ", ".join(record.gpus)


def _before(documents: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    rows = []
    for what, title in (("plan", "plan"), ("evict", "eviction"), ("clean", "clean state")):
        document = documents.get(what)
        if document is not None:
            verdict = document.get("verdict") or document.get("outcome") or "no verdict"
            why = document.get("why") or document.get("msg") or ""
            rows.append(f"{title}: {verdict}{f' ({_shown(why)})' if why else ''}, see {what}.json")
    return rows


def _phases(document: t.Mapping[str, t.Any]) -> list[str]:
    rows = []
    for phase in _rows_of(document, "phases"):
        detail = phase.get("detail")
        rate = phase.get("rate")
        more = ", ".join(_shown(word) for word in (rate, detail) if word)
        seconds = _seconds(phase.get("seconds"))
        rows.append(f"{_shown(phase.get('name')):<14}{seconds or '-':>9}{f'  {more}' if more else ''}")
    return rows


def _proof(proof: t.Mapping[str, t.Any]) -> list[str]:
    rows = []
    inner = proof.get("proof")
    if isinstance(inner, t.Mapping):
        for problem in _list(inner.get("problems")):
            rows.append(f"failed: {_shown(problem)}")
        for warning in _list(inner.get("warnings")):
            rows.append(f"warning: {_shown(warning)}")
    soak = soak_of(proof)
    if soak is not None:
        rows.append(_soak(soak))
    return rows


def _soak(soak: t.Mapping[str, t.Any]) -> str:
    failed = soak.get("failed") or "none"
    words = f"soak: {soak.get('requests')} requests, {soak.get('concurrency')} at a time, {failed} failed"
    if isinstance(soak.get("tokens_per_s"), (int, float)):
        words += f"; {soak['tokens_per_s']:.1f} tokens/s"
    latency = soak.get("latency_s")
    if isinstance(latency, t.Mapping):
        words += "; latency " + ", ".join(f"{name} {_seconds(value)}" for name, value in sorted(latency.items()))
    return words


def soak_of(proof: t.Mapping[str, t.Any]) -> t.Optional[t.Mapping[str, t.Any]]:
    """The soak in a proof, wherever it stands; None where there was none."""
    inner = proof.get("proof")
    for soak in (proof.get("soak"), inner.get("soak") if isinstance(inner, t.Mapping) else None):
        if isinstance(soak, t.Mapping):
            return soak
    return None


def _last_lines(proof: t.Mapping[str, t.Any]) -> list[str]:
    if proof.get("verdict") in (None, "ready"):
        return []
    return [_shown(line) for line in _list(proof.get("log_tail"))[-_LINES:]]


def _rows_of(document: t.Mapping[str, t.Any], key: str) -> list[t.Mapping[str, t.Any]]:
    return [row for row in _list(document.get(key)) if isinstance(row, t.Mapping)]


def _list(value: t.Any) -> list[t.Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _seconds(value: t.Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    return f"{value:.1f} s" if value >= 1 else f"{value:.3f} s"
