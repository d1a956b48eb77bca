# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at a host for drift: nothing is changed, every reading is bounded, and a server is asked once and gently."""

from __future__ import annotations

import datetime
import os
import time
import typing as t
from dataclasses import dataclass

from .decide import drift
from .decide.drift import Acceptance, Row
from .decide.drift_server import Place, SeenServer, WantedServer, judge_server
from .decide.gpus import choose_gpus
from .decide.leftovers import judge_leftover
from .decide.ports import program_of
from .decide.workers import expected_workers, judge_workers, workers_of
from .errors import CleanSlateError, UnknownDevice
from .hosteyes import launch_secrets
from .model import Process, ShmReading, to_json
from .observe.bounded import fetch_launched
from .observe.look import LookOptions, look
from .observe.memory import read_meminfo
from .observe.ports import read_ports
from .observe.procfs import age_s, read_boot_id, read_uptime_s
from .observe.servers import LaunchedServer
from .observe.shm import read_shm
from .results import memory_rows, process_row, user_name
from .sglang import http
from .sglang import servers as tools
from .sglang.cmdline import launched_flags
from .sglang.kept import KeptRequest, environment_of, parse_request
from .sglang.record import Reading, Record, read_record, recorded_process
from .sglang.record_files import read_config_text, read_text
from .sglang.redact import Redactor
from .spawn import fetch_bounded

FILES_DEADLINE_S = 20.0
HOST_DEADLINE_S = 30.0
_DEFAULT_PORT = 30000
_DROP_INS = ("/etc/systemd/system", "/run/systemd/system")
_SLACK_S = 2.0  # a process's start counts in ticks since boot, and the clock may have been set since
Json = dict[str, t.Any]


@dataclass(frozen=True)
class DriftOptions:
    """How to look, and what is accepted."""

    state_dir: str
    look: LookOptions
    accepted: tuple[Acceptance, ...] = ()
    probe: bool = True
    health_deadline_s: float = http.HEALTH_DEADLINE_S
    info_deadline_s: float = http.INFO_DEADLINE_S
    today: t.Optional[datetime.date] = None


class Check:
    """The host at one moment, and the servers that the inventory wants on it."""

    def __init__(self, options: DriftOptions, servers: t.Sequence[t.Mapping[str, t.Any]]) -> None:
        self.options = options
        self.servers = servers
        self.start = time.monotonic()
        self.snapshot = look(options.look)
        self.uptime_s = read_uptime_s(options.look.proc)
        self.boot_id = read_boot_id(options.look.proc)
        leaders = tools.leaders(self.snapshot.processes)
        self.launched = {leader.pid: fetch_launched(leader, options.look.proc) for leader in leaders}
        self.leaders = {leader.pid: leader for leader in leaders}
        self.ours: set[int] = set()
        self.users: set[int] = set()

    def result(self) -> Json:
        """The module's result."""
        rows: list[Row] = []
        shown: list[Json] = []
        for raw in self.servers:
            found, row = self._server(raw)
            rows += found
            shown.append(row)
        rows += self._host()
        today = self.options.today or datetime.datetime.now(datetime.timezone.utc).date()
        standing, fine = drift.accept(drift.merge(rows), self.options.accepted, today)
        for row in shown:
            own = [one for one in standing if one.server == row["name"]]
            row["verdict"] = drift.verdict_of(own)
            row["drift"] = to_json(own)
            row["accepted"] = to_json([one for one in fine if one.server == row["name"]])
        names = {row["name"] for row in shown}
        host = [one for one in standing if one.server not in names]
        verdict = drift.verdict_of(standing)
        result = {
            "verdict": verdict,
            "summary": _summary(verdict, standing, fine),
            "servers": shown,
            "host": {
                "verdict": drift.verdict_of(host),
                "drift": to_json(host),
                "accepted": to_json([one for one in fine if one.server not in names]),
                "gpus": memory_rows(self.snapshot),
                "driver_version": self.snapshot.reading.driver_version,
                "memory": self._memory(),
            },
            "seconds": round(time.monotonic() - self.start, 2),
        }
        return t.cast(Json, self._redactor().data(result))

    def _redactor(self) -> Redactor:
        secrets: list[t.Optional[str]] = []
        for raw in self.servers:
            secrets += [raw.get(name) for name in ("api_key", "admin_api_key", "ssl_keyfile_password")]
            secrets += [str(value) for value in (raw.get("secret_environment") or {}).values()]
        return Redactor(secrets)

    # --- one server ---------------------------------------------------------------------------------------------------

    def _server(self, raw: t.Mapping[str, t.Any]) -> tuple[list[Row], Json]:
        wanted, problem = self._wanted(raw)
        reading = read_record(self.options.state_dir, wanted.name)
        problems = [text for text in (reading.problem, problem) if text is not None]
        record = reading.record
        leader, by_record = self._leader(wanted, record)
        seen = self._seen(wanted, reading, leader, by_record, raw, problems)
        rows, compared = judge_server(wanted, seen)
        age = None if leader is None else age_s(leader, self.uptime_s)
        return list(rows), {
            "name": wanted.name,
            "running": leader is not None,
            "pid": None if leader is None else leader.pid,
            "started_at": None if leader is None else process_row(leader, self.uptime_s)["started_at"],
            "uptime_s": None if age is None else round(age, 1),
            "launch_id": None if record is None else record.launch_id,
            "config_hash": None if record is None else record.config_hash,
            "health": seen.health,
            "engine_keys_compared": compared,
        }

    def _wanted(self, raw: t.Mapping[str, t.Any]) -> tuple[WantedServer, t.Optional[str]]:
        names = raw.get("gpus")
        gpus: t.Optional[tuple[str, ...]] = None
        problem = None
        if names is not None:
            try:
                gpus = self._uuids([str(name) for name in names])
            except UnknownDevice as error:
                problem = f"gpus: {error}"
        environment = {str(key): str(value) for key, value in (raw.get("environment") or {}).items()}
        return (
            WantedServer(
                name=str(raw["name"]),
                flags=raw.get("flags") or {},
                host=raw.get("host"),
                port=raw.get("port"),
                environment=environment,
                secret_names=frozenset(map(str, raw.get("secret_environment") or {})),
                gpus=gpus,
                python=raw.get("python"),
                user=raw.get("user"),
            ),
            problem,
        )

    def _uuids(self, names: t.Sequence[str]) -> tuple[str, ...]:
        gpus = self.snapshot.reading.gpus
        if not names or not gpus:
            return tuple(names)
        return tuple(gpu.uuid or str(gpu.index) for gpu in choose_gpus(gpus, names))

    def _leader(self, wanted: WantedServer, record: t.Optional[Record]) -> tuple[t.Optional[Process], bool]:
        """The server's leader: the recorded process, else whichever SGLang was started for its port."""
        if record is not None:
            process = recorded_process(record, self.snapshot.processes, self.boot_id)
            if process is not None and process.pid in self.leaders:
                exact = (process.pid, process.start_ticks) == (record.pid, record.start_ticks)
                return process, exact or self._in_unit(process, record)
        for pid, (launched, _unknown) in self.launched.items():
            if _port_of(launched) == (wanted.port or _DEFAULT_PORT):
                return self.leaders[pid], False
        return None, False

    def _in_unit(self, process: Process, record: Record) -> bool:
        """systemd started it again, with the same files."""
        return record.unit is not None and self.snapshot.units.get(process.pid) == record.unit

    def _seen(
        self,
        wanted: WantedServer,
        reading: Reading,
        leader: t.Optional[Process],
        by_record: bool,
        raw: t.Mapping[str, t.Any],
        problems: list[str],
    ) -> SeenServer:
        record = reading.record
        launched, unknown = (None, None) if leader is None else self.launched[leader.pid]
        options = None if launched is None else launched.options
        files = _Files(self.options.state_dir, record, options)
        problems += files.problems
        listens, stranger = self._port(wanted, leader)
        stopped = () if leader is None or launched is None else self._stopped(leader, launched)
        health, words, info, info_problem = self._asked(raw, record, launched, bool(listens) and not stopped)
        version = None if launched is None or launched.install is None else launched.install.version
        told = None if info is None or not isinstance(info.get("version"), str) else str(info["version"])
        place = None if launched is None or leader is None else self._place(leader, launched, unknown)
        if leader is not None:
            tree = {member.process.pid for member in tools.tree_of(leader, self.snapshot.processes)}
            self.ours |= tree
            if leader.uid is not None:
                self.users.add(leader.uid)
        return SeenServer(
            file=files.place,
            process=place,
            pid=None if leader is None else leader.pid,
            by_record=by_record,
            stranger=stranger,
            options=options,
            info=info,
            info_problem=info_problem,
            health=health,
            health_words=words,
            listens=listens,
            stopped=stopped,
            changed_after_start=() if leader is None or not by_record else files.changed_after(self._began(leader)),
            units=files.units,
            versions=(None if files.request is None else files.request.version, version, told),
            problems=tuple(problems),
        )

    def _began(self, leader: Process) -> t.Optional[float]:
        age = age_s(leader, self.uptime_s)
        return None if age is None else time.time() - age

    def _place(self, leader: Process, launched: LaunchedServer, unknown: t.Optional[str]) -> Place:
        environment = launched.environment
        known, gpus = False, None
        if environment is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES")
            known = True
            if visible is not None:
                try:
                    gpus = self._uuids([name.strip() for name in visible.split(",") if name.strip()])
                except UnknownDevice:
                    known = False
        python = leader.argv[0] if leader.argv and leader.argv[0].startswith("/") else None
        return Place(launched.flags, environment, known, gpus, python, user_name(leader.uid), unknown)

    def _port(self, wanted: WantedServer, leader: t.Optional[Process]) -> tuple[t.Optional[bool], t.Optional[str]]:
        """(whether the server's tree listens on its port, who else does)."""
        port = wanted.port or _DEFAULT_PORT
        called = fetch_bounded(lambda: read_ports(self.options.look.proc, [port]), HOST_DEADLINE_S)
        if not called.ok or called.value is None:
            return None, None
        tree: set[int] = set()
        if leader is not None:
            tree = {member.process.pid for member in tools.tree_of(leader, self.snapshot.processes)}
        listeners = [use for use in called.value if use.state == "LISTEN"]
        if any(tree.intersection(use.pids) for use in listeners):
            return True, None
        for use in listeners:
            for pid in use.pids:
                process = self.snapshot.processes.get(pid)
                return False, f"pid {pid}" + ("" if process is None else f" ({program_of(process)})")
        return (None, None) if listeners else (False, None)

    def _stopped(self, leader: Process, launched: LaunchedServer) -> tuple[str, ...]:
        """Ranks that can't answer: asking would only make it worse."""
        flags = {} if launched.flags is None else launched.flags.flags
        version = None if launched.install is None else launched.install.version
        judged = judge_workers(workers_of(leader, self.snapshot.processes), expected_workers(flags, version, None))
        return () if judged.problem is None else (judged.problem,)

    def _asked(
        self,
        raw: t.Mapping[str, t.Any],
        record: t.Optional[Record],
        launched: t.Optional[LaunchedServer],
        may_ask: bool,
    ) -> tuple[t.Optional[str], t.Optional[str], t.Optional[Json], t.Optional[str]]:
        """(health, in words, what it resolved, why not). Its port is proved to be its own before."""
        if launched is None or not may_ask or not self.options.probe:
            return None, None, None, None
        flags = {} if launched.flags is None else launched.flags.flags
        key = raw.get("api_key") or (launch_secrets(record).get("api-key") if record is not None else None)
        endpoint = http.Endpoint(
            str(flags.get("host", "127.0.0.1")), _port_of(launched) or _DEFAULT_PORT, key, tls="ssl-certfile" in flags
        )
        later_node = str(flags.get("node-rank", "0")) != "0"
        if later_node:
            return None, None, None, None
        probe = http.probe(endpoint, self.options.health_deadline_s, self.options.info_deadline_s)
        seen = probe.health
        words = seen.error or f"HTTP {seen.status} after {seen.seconds:.1f} s"
        info = None if probe.info is None else dict(probe.info)
        return seen.kind or ("ok" if seen.ok else "unhealthy"), words, info, probe.info_error

    # --- the host -----------------------------------------------------------------------------------------------------

    def _memory(self) -> Json:
        called = fetch_bounded(lambda: read_meminfo(self.options.look.proc), FILES_DEADLINE_S)
        memory = called.value if called.ok else None
        return {
            "total_mib": None if memory is None else memory.mem_total_mib,
            "available_mib": None if memory is None else memory.mem_available_mib,
        }

    def _host(self) -> list[Row]:
        rows: list[Row] = []
        reading = self.snapshot.reading
        expected = self.options.look.expected_gpus
        if not self.options.look.without_gpus:
            if reading.gpus is None:
                why = "; ".join(problem.message for problem in reading.problems) or "the driver does not answer"
                rows.append(_unknown("gpu_count", expected, why))
            elif expected is not None and len(reading.gpus) != expected:
                found = len(reading.gpus)
                remedy = "look at the host's kernel log for Xids, and at nvidia-smi"
                rows.append(Row(None, "gpu_count", expected, found, "host", "critical", remedy))
            rows += self._holders()
        return rows + self._leftovers()

    def _holders(self) -> list[Row]:
        found: dict[int, tuple[str, list[int]]] = {}
        for index, holders in sorted(self.snapshot.holders.items()):
            for holder in (*holders.holders, *holders.suspects):
                if holder.pid in self.ours or holder.protected is not None:
                    continue
                title = "?" if holder.process is None else program_of(holder.process)
                found.setdefault(holder.pid, (title, []))[1].append(index)
        remedy = "declare it, or end it: gpu_evict with scope: gpu"
        rows = [
            Row(None, f"holder:{pid}/{title}", "nobody else", f"holds GPU {', '.join(map(str, gpus))}", "host",
                "warning", remedy)
            for pid, (title, gpus) in found.items()
        ]
        if self.snapshot.scan.unreadable and os.geteuid() == 0:
            count = len(self.snapshot.scan.unreadable)
            rows.append(_unknown("holders", None, f"{count} processes could not be looked into"))
        return rows

    def _leftovers(self) -> list[Row]:
        called = fetch_bounded(lambda: read_shm("/dev/shm", self.options.look.proc), HOST_DEADLINE_S)
        if not called.ok:
            return [_unknown("leftovers", None, called.error or "/dev/shm was not read in time")]
        shm: ShmReading = called.value
        names = [
            file.name
            for file in shm.files or ()
            if judge_leftover(file, server_uid=None, leader_died_at=None, scan_complete=shm.scan_complete).removable
        ]
        if not names:
            return []
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return [Row(None, "leftovers", "none", shown, "host", "warning", "clean_state with leftovers: remove")]


def _unknown(item: str, wanted: t.Any, why: str) -> Row:
    return Row(None, item, wanted, why, "host", "warning", "look at it as root; nothing was changed", "unknown")


def _port_of(launched: LaunchedServer) -> t.Optional[int]:
    flags = launched.flags
    if flags is None:
        return None
    port = flags.flags.get("port", _DEFAULT_PORT if flags.complete else None)
    return int(port) if str(port).isdigit() else None


def _summary(verdict: str, standing: t.Sequence[Row], fine: t.Sequence[Row]) -> str:
    drifted = sum(row.state in ("drift", "expired_acceptance") and row.severity != "note" for row in standing)
    unknown = sum(row.state == "unknown" for row in standing)
    words = [f"{drifted} drifted", f"{unknown} unknown", f"{len(fine)} accepted"]
    return f"{verdict}: " + ", ".join(words)


class _Files:
    """What the launch left on the disk: its configuration, environment, request and unit."""

    def __init__(self, state_dir: str, record: t.Optional[Record], options: t.Any) -> None:
        self.place: t.Optional[Place] = None
        self.request: t.Optional[KeptRequest] = None
        self.units: tuple[tuple[str, t.Any, t.Any], ...] = ()
        self.problems: list[str] = []
        self._times: dict[str, float] = {}
        if record is None:
            return
        called = fetch_bounded(lambda: _read_files(state_dir, record), FILES_DEADLINE_S)
        if not called.ok:
            self.problems.append(f"the launch's files: {called.error or 'not read in time'}")
            return
        texts, self._times, drop_ins, self.problems = called.value
        config = texts.get("config.yaml")
        argv = list(record.argv)
        environment = None
        try:
            environment = environment_of(texts["env"]) if texts.get("env") is not None else None
            self.request = None if texts.get("request.json") is None else parse_request(texts["request.json"])
        except (ValueError, RecursionError) as error:
            self.problems.append(f"the launch's files can't be used: {error}")
        self.place = Place(
            launched_flags(argv, lambda path: config if path == record.config else None, options),
            environment,
            True,
            record.gpus,
            record.python,
            record.user,
        )
        self.units = tuple(_unit_rows(record, texts, drop_ins))

    def changed_after(self, began: t.Optional[float]) -> tuple[str, ...]:
        """Files of the launch that were written after the process began."""
        if began is None:
            return ()
        return tuple(name for name, mtime in sorted(self._times.items()) if mtime > began + _SLACK_S)


def _unit_rows(
    record: Record, texts: t.Mapping[str, t.Optional[str]], drop_ins: t.Sequence[str]
) -> t.Iterator[tuple[str, t.Any, t.Any]]:
    if record.unit is None:
        return
    kept, now = texts.get("unit"), texts.get("unit now")
    if kept is not None and now is None:
        yield "unit_file", record.unit, "missing"
    elif kept is not None and kept != now:
        yield "unit_file", f"{record.unit} as launched", "edited"
    if drop_ins:
        yield "unit_override", "none", ", ".join(drop_ins)


ReadFiles = tuple[dict[str, t.Optional[str]], dict[str, float], list[str], list[str]]


def _read_files(state_dir: str, record: Record) -> ReadFiles:
    texts: dict[str, t.Optional[str]] = {}
    times: dict[str, float] = {}
    problems: list[str] = []
    folder = os.path.join(state_dir, record.name, "launches", record.launch_id)
    for name in ("config.yaml", "env", "request.json", "unit"):
        try:
            if name == "config.yaml":
                texts[name] = read_config_text(state_dir, record.name, record.launch_id)
            else:
                texts[name] = read_text(state_dir, record.name, record.launch_id, name)
        except CleanSlateError as error:
            problems.append(str(error))
        if name in ("config.yaml", "env") and texts.get(name) is not None:
            times[name] = os.lstat(os.path.join(folder, name)).st_mtime
    drop_ins: list[str] = []
    if record.unit is not None:
        for place in _DROP_INS:
            path = os.path.join(place, record.unit)
            if os.path.isfile(path) and "unit now" not in texts:
                with open(path, encoding="utf-8", errors="replace") as stream:
                    texts["unit now"] = stream.read(1 << 20)
            if os.path.isdir(f"{path}.d"):
                drop_ins += [f"{path}.d/{name}" for name in sorted(os.listdir(f"{path}.d")) if name.endswith(".conf")]
    return texts, times, drop_ins, problems
