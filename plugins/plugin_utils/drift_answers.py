# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What came back from the hosts of a drift check: ansible-runner's events in, one answer for each host out.

Nothing of an answer is trusted further than it must be: known fields only, texts and lists of a bounded length, secrets
masked once more, and a verdict that is never better than its own rows.
"""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import Redactor

JSON = dict[str, t.Any]

MODULE = "server_drift"
VERDICTS = ("in_sync", "drifted", "unknown")
SEVERITIES = ("critical", "warning", "note")
STATES = ("drift", "unknown", "accepted", "expired_acceptance")
PLACES = ("host", "file", "process", "engine")

TEXT_LIMIT = 2000
ROW_LIMIT = 200
LIST_LIMIT = 64
DEPTH_LIMIT = 6
CUT = " ... (cut)"
_HUGE = 2**63
_NO_XML = (0xFFFE, 0xFFFF)

_REDACTOR = Redactor()


@dataclass(frozen=True)
class HostAnswer:
    """One host. ``state``: answered, unreachable, failed or no_answer; ``answer``: the module's result, else None."""

    name: str
    state: str
    problem: t.Optional[str] = None
    answer: t.Optional[JSON] = None
    at: t.Optional[str] = None


class Collector:
    """ansible-runner's event handler: keeps what tells of a host, and lets the runner keep its events.

    A handler that returns something false makes ansible-runner throw the event away, and its own statistics with it.
    """

    def __init__(self) -> None:
        self._answers: dict[str, HostAnswer] = {}
        self._failures: dict[str, HostAnswer] = {}
        self.finished = False

    def take(self, event: t.Mapping[str, t.Any]) -> bool:
        """One event, whatever it is. Always true, and never an error: that would end the run for all other hosts."""
        kind = event.get("event")
        data = event.get("event_data")
        if kind == "playbook_on_stats":
            self.finished = True
        if not isinstance(data, t.Mapping) or not isinstance(data.get("host"), str):
            return True
        host, result = data["host"], data.get("res")
        at = event.get("created") if isinstance(event.get("created"), str) else None
        if kind == "runner_on_ok" and _of_module(data):
            try:
                self._answers[host] = read_answer(host, result, at)
            except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
                why = f"its answer can't be read ({type(error).__name__})"
                self._answers[host] = HostAnswer(host, "failed", why, at=at)
        elif kind in ("runner_on_failed", "runner_on_unreachable") and (_of_module(data) or not _ignored(data)):
            state = "unreachable" if kind == "runner_on_unreachable" else "failed"
            self._failures.setdefault(host, HostAnswer(host, state, failure_text(result), at=at))
        return True

    def hosts(self, expected: t.Iterable[str]) -> list[HostAnswer]:
        """Each host that was to answer, and any other that did, by name. An answer counts more than a failure: what
        fails after it is the playbook's own judgement of it."""
        names = sorted({*expected, *self._answers})
        return [
            self._answers.get(name) or self._failures.get(name) or HostAnswer(name, "no_answer", "it gave no answer")
            for name in names
        ]


def _of_module(data: t.Mapping[str, t.Any]) -> bool:
    names = (data.get("resolved_action"), data.get("task_action"))
    return any(isinstance(name, str) and name.rpartition(".")[2] == MODULE for name in names)


def _ignored(data: t.Mapping[str, t.Any]) -> bool:
    return bool(data.get("ignore_errors"))


def failure_text(result: t.Any) -> str:
    """Why a task failed, in one line: Ansible's message, and the last line of what the module wrote where that tells
    more."""
    if not isinstance(result, t.Mapping):
        return "it failed without a reason"
    message = _line(result.get("msg"))
    if "MODULE FAILURE" in message or not message:
        written = [_last_line(result.get(name)) for name in ("exception", "module_stderr", "module_stdout")]
        message = ": ".join(part for part in (message, next(filter(None, written), "")) if part)
    return text(message, 500) or "it failed without a reason"


def _line(value: t.Any) -> str:
    if isinstance(value, (list, tuple)):
        value = "; ".join(str(each) for each in value)
    return " ".join(str(value).split()) if value else ""


def _last_line(value: t.Any) -> str:
    lines = [line.strip() for line in str(value or "").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def read_answer(host: str, result: t.Any, at: t.Optional[str]) -> HostAnswer:
    """A module's result as we keep it. One that is no answer is no reason for silence: the host is unknown."""
    if not isinstance(result, t.Mapping) or result.get("verdict") not in VERDICTS:
        hidden = isinstance(result, t.Mapping) and "censored" in result
        why = "its answer was hidden by no_log" if hidden else "its answer has no verdict"
        return HostAnswer(host, "failed", why, at=at)
    servers = result.get("servers")
    own = result.get("host")
    if not isinstance(servers, (list, tuple)) or not isinstance(own, t.Mapping):
        return HostAnswer(host, "failed", "its answer names neither servers nor the host", at=at)
    answer = {
        "verdict": result["verdict"],
        "summary": _optional_text(result.get("summary")),
        "seconds": number(result.get("seconds")),
        "servers": [_server(each) for each in servers if isinstance(each, t.Mapping)],
        "host": _host(own),
    }
    blocks = [*answer["servers"], answer["host"]]
    answer["verdict"] = worst([answer["verdict"], *(block["verdict"] for block in blocks)])
    return HostAnswer(host, "answered", None, answer, at)


def worst(verdicts: t.Iterable[str]) -> str:
    """One word for the parts of one host: drifted outranks unknown, as in the module; its unknown rows stay."""
    found = set(verdicts)
    return next((word for word in ("drifted", "unknown") if word in found), "in_sync")


def _server(raw: t.Mapping[str, t.Any]) -> JSON:
    drift = rows(raw.get("drift"))
    return {
        "name": text(raw.get("name") or "?", 200),
        "verdict": _block_verdict(raw.get("verdict"), drift),
        "running": raw.get("running") if isinstance(raw.get("running"), bool) else None,
        "pid": whole(raw.get("pid")),
        "started_at": _optional_text(raw.get("started_at")),
        "uptime_s": number(raw.get("uptime_s")),
        "launch_id": _optional_text(raw.get("launch_id")),
        "config_hash": _optional_text(raw.get("config_hash")),
        "health": _optional_text(raw.get("health")),
        "engine_keys_compared": whole(raw.get("engine_keys_compared")),
        "drift": drift,
        "accepted": rows(raw.get("accepted")),
    }


def _host(raw: t.Mapping[str, t.Any]) -> JSON:
    drift = rows(raw.get("drift"))
    memory = raw.get("memory")
    memory = memory if isinstance(memory, t.Mapping) else {}
    gpus = raw.get("gpus")
    return {
        "verdict": _block_verdict(raw.get("verdict"), drift),
        "drift": drift,
        "accepted": rows(raw.get("accepted")),
        "driver_version": _optional_text(raw.get("driver_version")),
        "simulated": raw.get("simulated") is True,
        "gpus": [_gpu(each) for each in (gpus or ())[:LIST_LIMIT] if isinstance(each, t.Mapping)]
        if isinstance(gpus, (list, tuple))
        else [],
        "memory": {name: whole(memory.get(name)) for name in ("total_mib", "available_mib")},
    }


def _gpu(raw: t.Mapping[str, t.Any]) -> JSON:
    holders = raw.get("holders")
    found = [each for each in holders[:LIST_LIMIT] if isinstance(each, t.Mapping)] if isinstance(holders, list) else []
    return {
        "index": whole(raw.get("index")),
        "uuid": _optional_text(raw.get("uuid")),
        "name": _optional_text(raw.get("name")),
        "used_mib": whole(raw.get("used_mib")),
        "total_mib": whole(raw.get("total_mib")),
        "holders": [{"pid": whole(each.get("pid")), "title": _optional_text(each.get("title"))} for each in found],
    }


def _block_verdict(claimed: t.Any, drift: t.Sequence[JSON]) -> str:
    """The block's own word, or what its rows say where that is worse. Notes change nothing."""
    states = {row["state"] for row in drift if row["severity"] != "note"}
    by_rows = "drifted" if states & {"drift", "expired_acceptance"} else "unknown" if "unknown" in states else "in_sync"
    return worst([claimed if claimed in VERDICTS else "unknown", by_rows])


def rows(raw: t.Any) -> list[JSON]:
    """Rows of drift with exactly our fields. Beyond the limit one row says how many are missing."""
    if not isinstance(raw, (list, tuple)):
        return []
    found = [_row(each) for each in raw[:ROW_LIMIT] if isinstance(each, t.Mapping)]
    if len(raw) > ROW_LIMIT:
        found.append(_row({"item": "more", "found": f"{len(raw) - ROW_LIMIT} more rows", "severity": "warning"}))
    return found


def _row(raw: t.Mapping[str, t.Any]) -> JSON:
    also = raw.get("also")
    return {
        "server": None if raw.get("server") is None else text(raw["server"], 200),
        "item": text(raw.get("item") or "?", 300),
        "wanted": value(raw.get("wanted")),
        "found": value(raw.get("found")),
        "where": raw["where"] if raw.get("where") in PLACES else "host",
        "also": [each for each in also if each in PLACES] if isinstance(also, (list, tuple)) else [],
        "severity": raw["severity"] if raw.get("severity") in SEVERITIES else "warning",
        "state": raw["state"] if raw.get("state") in STATES else "drift",
        "remedy": _optional_text(raw.get("remedy")),
        "reason": _optional_text(raw.get("reason")),
    }


def text(raw: t.Any, limit: int = TEXT_LIMIT) -> str:
    """A text of a bounded length, without secrets, control characters and halves of surrogate pairs."""
    plain = raw if isinstance(raw, str) else str(raw)
    cut = plain[: limit * 2]
    masked = _REDACTOR.text(cut)
    clean = "".join(each if _printable(each) else "\N{REPLACEMENT CHARACTER}" for each in masked)
    return clean if len(clean) <= limit else clean[: limit - len(CUT)] + CUT


def _printable(character: str) -> bool:
    code = ord(character)
    return character in "\n\t" or not (code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in _NO_XML)


def _optional_text(raw: t.Any) -> t.Optional[str]:
    return None if raw is None else text(raw)


def value(raw: t.Any) -> t.Any:
    """Any JSON value, bounded in depth, length and texts. A mapping's secrets are masked by their names as well."""
    bounded = _bounded(raw, 0)
    return _clean(_REDACTOR.data(bounded) if isinstance(bounded, (dict, list)) else bounded)


def _bounded(raw: t.Any, depth: int) -> t.Any:
    if raw is None or isinstance(raw, bool):
        return raw
    if isinstance(raw, int):
        return raw if abs(raw) < _HUGE else "a huge number"
    if isinstance(raw, float):
        return number(raw)
    if isinstance(raw, str):
        return raw[: TEXT_LIMIT * 2]
    if depth >= DEPTH_LIMIT:
        return CUT.strip()
    if isinstance(raw, t.Mapping):
        return {str(key)[:200]: _bounded(each, depth + 1) for key, each in list(raw.items())[:LIST_LIMIT]}
    if isinstance(raw, (list, tuple)):
        shown = [_bounded(each, depth + 1) for each in raw[:LIST_LIMIT]]
        return shown + [f"{len(raw) - LIST_LIMIT} more"] if len(raw) > LIST_LIMIT else shown
    return str(raw)[: TEXT_LIMIT * 2]


def _clean(bounded: t.Any) -> t.Any:
    if isinstance(bounded, str):
        return text(bounded)
    if isinstance(bounded, dict):
        return {text(key, 200): _clean(each) for key, each in bounded.items()}
    if isinstance(bounded, list):
        return [_clean(each) for each in bounded]
    return bounded


def whole(raw: t.Any) -> t.Optional[int]:
    """An integer, or None: a failed reading is no zero."""
    return raw if isinstance(raw, int) and not isinstance(raw, bool) and abs(raw) < _HUGE else None


def number(raw: t.Any) -> t.Optional[float]:
    """A finite number, or None: JSON has no others."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not abs(raw) < _HUGE:
        return None
    return round(float(raw), 3)
