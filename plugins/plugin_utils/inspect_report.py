# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One host for people: its GPUs and who holds them, its servers, its memory."""

from __future__ import annotations

import typing as t

from .evict_report import container_lines
from .inventory import driver_problem
from .results import Result, failure, items, mapping, ran, who
from .tables import UNKNOWN, Column, cell, duration, paragraph, shortened, table


def _gpu_rows(info: Result) -> list[list[t.Any]]:
    rows: list[list[t.Any]] = []
    for gpu in items(info, "gpus"):
        memory = mapping(gpu, "memory")
        used = f"{cell(memory.get('used_mib'))} / {cell(memory.get('total_mib'))}"
        first: list[t.Any] = [str(gpu.get("index")), gpu.get("name"), used]
        people = [
            [_pids(each), role, shortened(each.get("title"), 60), duration(each.get("age_s")), _evidence(each)]
            for role, key in (("holder", "holders"), ("visitor", "visitors"), ("suspect", "suspects"))
            for each in items(gpu, key)
            if isinstance(each, t.Mapping)
        ]
        for problem in items(gpu, "errors"):
            people.append(["-", "error", f"{problem.get('call')}: {problem.get('message')}", "", ""])
        for person in people or [["-", "", "nobody seen", "", ""]]:
            rows.append([*first, *person])
            first = ["", "", ""]
    return rows


def _pids(each: Result) -> str:
    inner = each.get("inner_pid")
    return str(each.get("pid")) if inner is None else f"{each.get('pid')} ({inner} inside)"


def _evidence(holder: Result) -> str:
    protected = f"protected: {holder['protected']}; " if holder.get("protected") else ""
    return protected + "; ".join(map(cell, items(holder, "evidence")))


def _host_line(host: str, info: Result) -> list[str]:
    if info.get("gpus") is None:
        problems = "; ".join(cell(driver_problem(each)) for each in items(info, "problems")) or failure(info)
        return paragraph(f"{host}: GPUs unknown: {problems}")
    scan = mapping(info, "scan")
    blind = len(items(scan, "unreadable_pids"))
    parts = [
        f"{len(items(info, 'gpus'))} GPUs{' (SIMULATED)' if info.get('simulated') else ''}",
        f"driver {cell(info.get('driver_version'))}, by {cell(info.get('source'))}",
        f"{cell(scan.get('processes'))} processes looked at" + (f", {blind} of them unreadable" if blind else ""),
    ]
    noticed = [cell(each.get("message")) for each in items(info, "problems") if isinstance(each, t.Mapping)]
    lines = paragraph(f"{host}: " + "; ".join(parts))
    for problem in noticed:
        lines += paragraph(problem, "problem: ", indent=2)
    return lines


def _flag(value: t.Any) -> str:
    """A flag's value as people would type it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_flag, value))
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def _server_lines(servers: Result) -> list[str]:
    found = items(servers, "servers")
    if not found:
        return [
            "Servers: none seen"
            if ran(servers) and not servers.get("failed")
            else f"Servers: unknown: {failure(servers)}"
        ]
    lines = ["Servers"]
    for server in found:
        leader = mapping(server, "leader")
        facts = [
            f"pid {leader.get('pid')}",
            f"port {server.get('port') or UNKNOWN}",
            f"GPUs {','.join(map(str, items(server, 'gpus'))) or 'none'}",
            cell(server.get("unit") or server.get("container") or "no unit"),
            f"version {cell(server.get('version'))}",
            "launched by Clean Slate" if server.get("launched_by_us") else "launched by others",
        ]
        lines += paragraph(", ".join(facts), f"  {server.get('name') or '(unnamed)'}: {server.get('state')}: ")
        flags = mapping(server, "flags")
        if flags:
            texts = [f"{key}={_flag(value)}" for key, value in sorted(flags.items()) if key not in ("host", "port")]
            lines += paragraph(" ".join(texts), "flags: ", indent=4)
    for orphan in items(servers, "orphans"):
        lines += paragraph(who(orphan), "orphan: ", indent=2)
    return lines


HISTORY = 10


def history_lines(servers: Result) -> list[str]:
    """The kept launches of each server, newest first: when, by whom, what came of it. Nothing where none are kept."""
    lines: list[str] = []
    seen: set[str] = set()
    for server in [*items(servers, "servers"), *items(servers, "records")]:
        name, launches = str(server.get("name")), items(server, "launches")
        if not launches or name in seen:
            continue
        seen.add(name)
        more = f" (the newest {HISTORY} of {len(launches)})" if len(launches) > HISTORY else ""
        lines.append(f"Launches of {name}{more}")
        heading, *rows = table(_HISTORY_COLUMNS, [_launch_row(each) for each in launches[:HISTORY]])
        lines.append(f"  {heading}")
        # Each row is one line: its cells are cut to their columns.
        for row, launch in zip(rows, launches):
            lines += [f"  {row}", *_launch_notes(launch)]
    return lines


_HISTORY_COLUMNS = [
    Column("", 12),
    Column("Launch", 21),
    Column("By", 10),
    Column("Config", 8),
    Column("Verdict", 8),
    Column("Ready s", right=True),
    Column("Tokens/s", right=True),
]


def _launch_row(launch: Result) -> list[t.Any]:
    launch_id = shortened(launch.get("launch_id"), 21)
    if launch.get("problem"):
        return ["", launch_id, "-", "-", "broken", "-", "-"]
    marks = [word for word, key in (("current", "current"), ("good", "last_good")) if launch.get(key)]
    seconds = launch.get("seconds_to_ready")
    rate = mapping(launch, "soak").get("tokens_per_s", launch.get("tokens_per_s"))
    return [
        " ".join(marks),
        launch_id,
        shortened(launch.get("operator") or "-", 10),
        str(launch.get("config_hash") or "-").removeprefix("sha256:")[:8],
        shortened(launch.get("verdict") or "-", 8),
        "-" if seconds is None else seconds,
        "-" if rate is None else rate,
    ]


def _launch_notes(launch: Result) -> list[str]:
    """Why it failed, and from which kept launch it was made."""
    source = f"again from {launch['from_launch']}" if launch.get("from_launch") else ""
    texts = [source, shortened(launch.get("problem") or launch.get("error") or "", 240)]
    text = "; ".join(filter(None, texts))
    return paragraph(text, indent=16) if text else []


def _ram_lines(memory: Result) -> list[str]:
    info = mapping(memory, "meminfo")
    if not info:
        return paragraph(f"unknown: {failure(memory)}", "RAM: ")
    cgroup = mapping(memory, "cgroup")
    limit = f"; container limit {cell(cgroup['limit_mib'])} MiB" if cgroup.get("limit_mib") is not None else ""
    shm = mapping(memory, "shm")
    figures = [
        f"{cell(memory.get('available_mib'))} MiB available of {cell(info.get('mem_total_mib'))}",
        f"page cache {cell(info.get('cached_mib'))}",
        f"pinned by SGLang {cell(memory.get('pinned_mib'))}",
        f"swap free {cell(info.get('swap_free_mib'))}",
        f"hugepages {cell(info.get('hugepages_mib'))} MiB{limit}",
    ]
    lines = paragraph("; ".join(figures), "RAM: ")
    lines += paragraph(f"{cell(shm.get('free_mib'))} of {cell(shm.get('total_mib'))} MiB free", "/dev/shm: ")
    stale = [each for each in items(shm, "files") if isinstance(each, t.Mapping) and each.get("stale")]
    for each in stale:
        lines += paragraph(
            f"{each.get('name')}, {cell(each.get('size_mib'))} MiB: {each.get('why')}", "leftover: ", indent=2
        )
    return lines


def inspect_lines(results: Result) -> list[str]:
    """One host for people.

    ``results``: host, gpu_info, memory_info and server_info as registered; for a container node_info, its node's view,
    and node, its name. A container that can't be reached is shown by its node alone.
    """
    host, node_info = str(results.get("host")), mapping(results, "node_info")
    if not ran(node_info):
        return _inside_lines(host, results)
    lines = []
    if mapping(results, "gpu_info").get("skipped"):
        lines += paragraph(f"{host}: it can't be reached, so its servers and its memory are not known")
    else:
        lines += _inside_lines(host, results)
    title = f"{host} seen from node {results.get('node')}"
    return lines + _look_lines(title, node_info) + container_lines(node_info)


def _inside_lines(host: str, results: Result) -> list[str]:
    lines = _look_lines(host, mapping(results, "gpu_info"))
    lines += _server_lines(mapping(results, "server_info"))
    lines += history_lines(mapping(results, "server_info"))
    return lines + _ram_lines(mapping(results, "memory_info"))


def _look_lines(host: str, info: Result) -> list[str]:
    lines = _host_line(host, info)
    rows = _gpu_rows(info)
    if rows:
        columns = [
            Column("GPU"),
            Column("Name", 14),
            Column("Used/total MiB", 16, right=True),
            Column("Pid", right=True),
            Column("Role"),
            Column("Who", 24),
            Column("Since", 10),
            Column("Evidence", 26),
        ]
        lines += table(columns, rows)
    return lines
