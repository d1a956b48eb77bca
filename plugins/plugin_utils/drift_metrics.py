# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A drift check's document as Prometheus text, for node_exporter's textfile collector. Pure.

Times are gauges of our own, since the collector refuses samples that carry one. A series of a host or a server stays
while the host is in the document, seen or not, so that an alert on it can't end by the host's silence.
"""

from __future__ import annotations

import typing as t

from .drift_answers import JSON
from .drift_document import EXIT_CODES, moment_of

PREFIX = "cleanslate_drift_"
Labels = t.Mapping[str, t.Any]


class _Text:
    """Families of samples, each with its help once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def family(self, name: str, explained: str, samples: t.Iterable[tuple[Labels, t.Optional[float]]]) -> None:
        """One gauge. A value that is not known is no sample: never a zero."""
        rows = [(labels, number) for labels, number in samples if number is not None]
        if not rows:
            return
        self.lines += [f"# HELP {PREFIX}{name} {explained}", f"# TYPE {PREFIX}{name} gauge"]
        self.lines += [f"{PREFIX}{name}{_labels(labels)} {_number(number)}" for labels, number in rows]


def render(document: t.Mapping[str, t.Any]) -> str:
    """The whole text."""
    text = _Text()
    run, hosts = document["run"], document["hosts"]
    _run(text, document, run)
    text.family(
        "host_verdict",
        "1 for the verdict that the host has, 0 for the others.",
        (
            ({"host": host["name"], "verdict": verdict}, float(host["verdict"] == verdict))
            for host in hosts
            for verdict in EXIT_CODES
        ),
    )
    text.family(
        "host_answered",
        "Whether the host answered when it was asked last.",
        (({"host": host["name"]}, float(host["state"] == "answered")) for host in hosts),
    )
    text.family(
        "host_last_answer_timestamp_seconds",
        "When the host answered last.",
        (({"host": host["name"]}, moment_of((host["last_answer"] or {}).get("at"))) for host in hosts),
    )
    text.family(
        "server_verdict",
        "1 for the verdict that the server has, 0 for the others.",
        (
            ({"host": host["name"], "server": server["name"], "verdict": verdict}, float(server["verdict"] == verdict))
            for host in hosts
            for server in _once(host["servers"])
            for verdict in EXIT_CODES
        ),
    )
    _rows(text, hosts)
    text.family(
        "gpu_memory_used_bytes",
        "GPU memory in use when the host was asked.",
        (
            ({"host": host["name"], **_gpu_labels(gpu)}, gpu["used_mib"] * 2.0**20)
            for host in hosts
            for gpu in _gpus(host)
            if gpu["used_mib"] is not None
        ),
    )
    return "\n".join(text.lines) + "\n"


def _run(text: _Text, document: t.Mapping[str, t.Any], run: t.Mapping[str, t.Any]) -> None:
    text.family("run_timestamp_seconds", "When the last run ended.", [({}, moment_of(run["finished_at"]))])
    text.family("run_duration_seconds", "How long the last run took.", [({}, run["seconds"])])
    text.family("run_exit_code", "0 in sync, 10 drifted, 20 unknown.", [({}, run["exit_code"])])
    text.family("run_hosts", "Hosts that the last run asked.", [({}, run["hosts"])])
    text.family("run_failed", "Whether the last run could not do its work.", [({}, float(bool(run["problems"])))])
    text.family(
        "last_success_timestamp_seconds",
        "When every host was seen last, in sync or not.",
        [({}, moment_of(document["last_success_at"]))],
    )
    told = document["notification"]
    text.family(
        "notify_failed",
        "Whether the last notification could not be delivered.",
        [({}, None if told is None else float(not told["ok"]))],
    )
    text.family(
        "hosts",
        "Hosts by verdict.",
        (({"verdict": verdict}, count) for verdict, count in document["counts"]["hosts"].items()),
    )


def _rows(text: _Text, hosts: t.Sequence[t.Mapping[str, t.Any]]) -> None:
    """Rows of hosts that answered; of the others nobody knows how many there are."""
    counted: list[tuple[Labels, float]] = []
    unknown: list[tuple[Labels, float]] = []
    accepted: list[tuple[Labels, float]] = []
    for host in hosts:
        if host["host"] is None:
            continue
        blocks = [("", host["host"]), *((server["name"], server) for server in _once(host["servers"]))]
        for name, block in blocks:
            labels = {"host": host["name"], "server": name}
            drifted = [row for row in block["drift"] if row["state"] != "unknown"]
            for severity in ("critical", "warning", "note"):
                count = sum(row["severity"] == severity for row in drifted)
                counted.append(({**labels, "severity": severity}, count))
            unknown.append((labels, sum(row["state"] == "unknown" for row in block["drift"])))
            accepted.append((labels, len(block["accepted"])))
    text.family("rows", "Differences by severity; server is empty for those of the host.", counted)
    text.family("unknown_rows", "What could not be seen.", unknown)
    text.family("accepted_rows", "Differences that are accepted.", accepted)


def _once(servers: t.Sequence[t.Mapping[str, t.Any]]) -> list[t.Mapping[str, t.Any]]:
    """Servers by name, the first of each: two samples with the same labels would make the whole file invalid."""
    found: dict[str, t.Mapping[str, t.Any]] = {}
    for server in servers:
        found.setdefault(server["name"], server)
    return list(found.values())


def _gpus(host: t.Mapping[str, t.Any]) -> list[t.Mapping[str, t.Any]]:
    """GPUs by what their labels say, the first of each, for the same reason."""
    found: dict[tuple[str, str], t.Mapping[str, t.Any]] = {}
    for gpu in host["host"]["gpus"] if host["host"] else ():
        labels = _gpu_labels(gpu)
        found.setdefault((str(labels["gpu"]), str(labels["uuid"])), gpu)
    return list(found.values())


def _gpu_labels(gpu: t.Mapping[str, t.Any]) -> JSON:
    return {"gpu": gpu["index"], "uuid": gpu["uuid"] or ""}


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(number: float) -> str:
    return f"{number:.0f}" if number == int(number) else f"{number:.3f}"
