# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at a host for drift: nothing is changed, every reading is bounded, and a server is asked once and gently."""

from __future__ import annotations

import dataclasses
import datetime
import time
import typing as t
from dataclasses import dataclass

from .arguments import baselines_of
from .asking import endpoint_of, why_no_key
from .cgroups import unit_of
from .decide import drift
from .decide.drift import Acceptance, Row
from .decide.drift_host import MAX_USED_MIB, WantedHost, judge_gpus, judge_leftovers
from .decide.drift_server import (
    DEFAULT_PORT,
    HEALTH_LIMIT_S,
    SETTINGS,
    START_S,
    Health,
    Place,
    Prints,
    SeenServer,
    UnitSeen,
    WantedServer,
    given_secrets,
    judge_server,
)
from .decide.gpus import choose_gpus
from .decide.ports import program_of
from .decide.workers import Workers, expected_workers, judge_workers, workers_of
from .errors import CleanSlateError, UnknownDevice
from .hosteyes import launch_secrets
from .model import PortUse, Process, ShmReading, to_json
from .observe.bounded import fetch_install, fetch_launched
from .observe.fingerprint import fetch_model_print
from .observe.launchfiles import LaunchFiles, fetch_launch_files, fetch_unit_files
from .observe.look import LookOptions, look
from .observe.memory import read_meminfo
from .observe.ports import read_ports
from .observe.procfs import age_s, ancestors, read_boot_id, read_uptime_s
from .observe.servers import LaunchedServer, same_network
from .observe.shm import read_shm
from .results import account, memory_rows, process_row, user_name
from .sglang import flags as flag_tools
from .sglang import http
from .sglang import servers as tools
from .sglang.cmdline import launched_flags
from .sglang.configfile import read_config
from .sglang.kept import print_of
from .sglang.option_table import OptionTable
from .sglang.record import Reading, Record, read_record, recorded_process
from .sglang.redact import Redactor, is_secret_flag, is_secret_variable
from .snapshot import Snapshot
from .spawn import fetch_bounded

MEMORY_DEADLINE_S = 20.0
HOST_DEADLINE_S = 30.0
SHM = "/dev/shm"
_SLACK_S = 2.0  # a process's start counts in ticks since boot, and the clock may have been set since
_SHORTEST_SECRET = 8  # of what is a secret by its name alone: a value like 1 would be masked wherever it stands
_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
_HEALTH_LIMIT = "SGLANG_HEALTH_CHECK_TIMEOUT"
Json = dict[str, t.Any]
Raw = t.Mapping[str, t.Any]


@dataclass(frozen=True)
class DriftOptions:
    """How to look, and what is accepted. ``today`` None: the day (UTC) on which it looks."""

    state_dir: str
    look: LookOptions
    accepted: tuple[Acceptance, ...] = ()
    probe: bool = True
    health_deadline_s: float = http.HEALTH_DEADLINE_S
    info_deadline_s: float = http.INFO_DEADLINE_S
    max_used_mib: int = MAX_USED_MIB
    baselines: t.Mapping[str, int] = dataclasses.field(default_factory=dict)
    today: t.Optional[datetime.date] = None


def check(options: DriftOptions, servers: t.Sequence[Raw]) -> Json:
    """The module's result. ``servers``: of the inventory, with their secrets."""
    start = time.monotonic()
    redactor_of = _Secrets()
    for raw in servers:
        redactor_of.add_inventory(raw)
    try:
        snapshot = look(options.look)
    except CleanSlateError as error:
        return _finished(options, _blind(servers, str(error)), start, redactor_of)
    hidden = "; ".join(f"{problem.call}: {problem.message}" for problem in snapshot.problems)
    if hidden:  # whoever is not even listed is not one who does not run
        return _finished(options, _blind(servers, hidden), start, redactor_of)
    seen = _Check(options, servers, snapshot, redactor_of).look()
    return _finished(options, seen, start, redactor_of)


@dataclass(frozen=True)
class _Found:
    """Everything but the judgement over it. ``servers``: what is shown of each."""

    rows: tuple[Row, ...]
    servers: tuple[Json, ...]
    snapshot: t.Optional[Snapshot] = None
    memory: t.Optional[Json] = None


class _Secrets:
    """All values that no result may show."""

    def __init__(self) -> None:
        self.values: list[t.Optional[str]] = []

    def add_inventory(self, raw: Raw) -> None:
        self.values += _secret_values(raw)
        given = raw.get("environment")
        if isinstance(given, t.Mapping):
            self.add_environment({str(name): str(value) for name, value in given.items()})

    def add_environment(self, environment: t.Optional[t.Mapping[str, str]], given: t.Collection[str] = ()) -> None:
        for name, value in (environment or {}).items():
            if name in given or (is_secret_variable(name) and len(value) >= _SHORTEST_SECRET):
                self.values.append(value)

    def add_flags(self, flags: t.Optional[t.Mapping[str, t.Any]]) -> None:
        self.values += [str(value) for name, value in (flags or {}).items() if value and is_secret_flag(str(name))]

    def redactor(self) -> Redactor:
        return Redactor(self.values)


def _secret_values(raw: Raw) -> tuple[str, ...]:
    given = raw.get("secret_environment")
    values = [raw.get(name) for name in _SECRETS] + list(given.values() if isinstance(given, t.Mapping) else ())
    return tuple(str(value) for value in values if value not in (None, ""))


def _blind(servers: t.Sequence[Raw], why: str) -> _Found:
    """The processes can't be read: nothing is known of anybody."""
    rows = [drift.unknown(None, "processes", why)]
    rows += [drift.unknown(str(raw["name"]), "processes", why, "process") for raw in servers]
    return _Found(tuple(rows), tuple(_shown(str(raw["name"]), None) for raw in servers))


def _shown(name: str, running: t.Optional[bool]) -> Json:
    nothing = ("pid", "started_at", "uptime_s", "launch_id", "config_hash", "health")
    return {"name": name, "running": running, **dict.fromkeys(nothing), "engine_keys_compared": 0}


def _finished(options: DriftOptions, found: _Found, start: float, secrets: _Secrets) -> Json:
    today = options.today or datetime.datetime.now(datetime.timezone.utc).date()
    names = {shown["name"] for shown in found.servers}
    rows = [*found.rows, *drift.lost(options.accepted, names)]
    standing, fine = drift.settle(rows, options.accepted, today)

    def judged(name: t.Optional[str]) -> Json:
        own = [row for row in standing if (row.server if row.server in names else None) == name]
        accepted = [row for row in fine if row.server == name]
        return {"verdict": drift.verdict_of(own), "drift": to_json(own), "accepted": to_json(accepted)}

    snapshot = found.snapshot
    verdict = drift.verdict_of(standing)
    result = {
        "verdict": verdict,
        "summary": _summary(verdict, standing, fine),
        "servers": [{**shown, **judged(shown["name"])} for shown in found.servers],
        "host": {
            **judged(None),
            "gpus": memory_rows(snapshot),
            "driver_version": None if snapshot is None else snapshot.reading.driver_version,
            "simulated": snapshot is not None and snapshot.simulated,
            "memory": found.memory or {"total_mib": None, "available_mib": None},
        },
        "seconds": round(time.monotonic() - start, 2),
    }
    return t.cast(Json, secrets.redactor().data(result))


def _summary(verdict: str, standing: t.Sequence[Row], fine: t.Sequence[Row]) -> str:
    counted = [row.state for row in standing if row.severity != "note"]
    unknown = counted.count("unknown")
    words = [f"{len(counted) - unknown} drifted", f"{unknown} unknown", f"{len(fine)} accepted"]
    return f"{verdict}: " + ", ".join(words)


@dataclass(frozen=True)
class _Claimed:
    """A server and the leader that is its own. ``identity``: the process is known by pid and start alone."""

    raw: Raw
    wanted: WantedServer
    reading: Reading
    leader: t.Optional[Process] = None
    by_record: bool = False
    again: bool = False
    problems: tuple[tuple[str, str, str], ...] = ()

    @property
    def record(self) -> t.Optional[Record]:
        return self.reading.record


class _Check:
    """The host at one moment, and the servers that the inventory wants on it."""

    def __init__(
        self, options: DriftOptions, servers: t.Sequence[Raw], snapshot: Snapshot, secrets: _Secrets
    ) -> None:
        self.options = options
        self.servers = servers
        self.snapshot = snapshot
        self.secrets = secrets
        self.proc = options.look.proc
        self.uptime_s = read_uptime_s(self.proc)
        self.boot_id = read_boot_id(self.proc)
        self.leaders = {leader.pid: leader for leader in tools.leaders(snapshot.processes)}
        self.launched: dict[int, tuple[LaunchedServer, t.Optional[str]]] = {}
        self.ours: set[int] = set()

    def look(self) -> _Found:
        rows: list[Row] = []
        shown = []
        today = self.options.today or datetime.datetime.now(datetime.timezone.utc).date()
        for claimed in self._claims():
            if isinstance(claimed, _Refused):
                rows.append(drift.unknown(claimed.name, "settings", claimed.why, remedy="correct the inventory"))
                shown.append(_shown(claimed.name, None))
                continue
            try:
                found, row = self._judged(claimed, today)
            except Exception as error:  # whatever a foreign command line or answer holds, it hides no other server
                why = f"it could not be looked at ({type(error).__name__}: {str(error)[:200]})"
                found, row = [drift.unknown(claimed.wanted.name, "settings", why)], _shown(claimed.wanted.name, None)
            rows += found
            shown.append(row)
        rows += self._host()
        return _Found(tuple(rows), tuple(shown), self.snapshot, self._memory())

    def _judged(self, claimed: _Claimed, today: datetime.date) -> tuple[list[Row], Json]:
        seen, row = self._server(claimed)
        found, compared = judge_server(claimed.wanted, seen)
        waivers = drift.expired_waivers(claimed.wanted.name, _waivers(claimed), today, claimed.wanted.fix)
        return [*found, *waivers], {**row, "engine_keys_compared": compared}

    # --- which process is whose -------------------------------------------------------------------------------------

    def _claims(self) -> list[t.Union[_Claimed, _Refused]]:
        """First those whom a record names; then, by its port, whichever SGLang nobody has claimed."""
        found: list[t.Union[_Claimed, _Refused]] = []
        for raw in self.servers:
            try:
                found.append(self._recorded(raw))
            except CleanSlateError as error:
                found.append(_Refused(str(raw["name"]), str(error)))
        taken = {one.leader.pid for one in found if isinstance(one, _Claimed) and one.leader is not None}
        for number, one in enumerate(found):
            if isinstance(one, _Claimed) and one.leader is None:
                leader = self._by_port(int(one.wanted.all_flags["port"]), taken)
                if leader is not None:
                    taken.add(leader.pid)
                    found[number] = dataclasses.replace(one, leader=leader)
        return found

    def _recorded(self, raw: Raw) -> _Claimed:
        wanted, problems = self._wanted(raw)
        reading = read_record(self.options.state_dir, wanted.name)
        if reading.problem is not None:
            problems += (("record", reading.problem, "file"),)
        record = reading.record
        process = None if record is None else recorded_process(record, self.snapshot.processes, self.boot_id)
        if record is None or process is None:
            return _Claimed(raw, wanted, reading, problems=problems)
        exact = record.boot_id == self.boot_id and (process.pid, process.start_ticks) == (
            record.pid,
            record.start_ticks,
        )
        # A unit of the system: a user's own manager takes any name.
        again = not exact and record.unit is not None and unit_of(process) == record.unit
        return _Claimed(raw, wanted, reading, process, exact or again, again, problems)

    def _by_port(self, port: int, taken: t.Collection[int]) -> t.Optional[Process]:
        """Whoever listens on it; else whoever was started for it."""
        for use in self._listeners(port)[0] or ():
            for pid in use.pids:
                owner = next((one for one in (pid, *ancestors(pid, self.snapshot.processes)) if one in self.leaders), 0)
                if owner and owner not in taken:
                    return self.leaders[owner]
        for pid, leader in self.leaders.items():
            if pid in taken or same_network(pid, self.proc) is False:
                continue  # one with a network of its own has ports of its own
            if _port_of(self._launched(leader)[0]) == port:
                return leader
        return None

    def _listeners(self, port: int) -> tuple[t.Optional[tuple[PortUse, ...]], t.Optional[str]]:
        """(who listens on a port, why that is not known)."""
        called = fetch_bounded(lambda: read_ports(self.proc, [port]), HOST_DEADLINE_S)
        if not called.ok or called.value is None:
            return None, f"who listens on port {port} can't be read: {called.error or 'no answer'}"
        uses = t.cast("tuple[PortUse, ...]", called.value)
        return tuple(use for use in uses if use.state == "LISTEN"), None

    def _launched(self, leader: Process) -> tuple[LaunchedServer, t.Optional[str]]:
        if leader.pid not in self.launched:
            found = fetch_launched(leader, self.proc)
            self.secrets.add_environment(found[0].environment)
            self.launched[leader.pid] = found
        return self.launched[leader.pid]

    # --- what is wanted ---------------------------------------------------------------------------------------------

    def _wanted(self, raw: Raw) -> tuple[WantedServer, tuple[tuple[str, str, str], ...]]:
        """Raises CleanSlateError for settings that make no sense."""
        gpus, problems = self._wanted_gpus(raw)
        wanted = WantedServer(
            name=str(raw["name"]),
            flags=_mapping(raw, "flags"),
            host=raw.get("host"),
            port=_number(raw, "port"),
            environment={str(key): str(value) for key, value in _mapping(raw, "environment").items()},
            secret_names=frozenset(map(str, _mapping(raw, "secret_environment"))),
            secret_flags=given_secrets({**_mapping(raw, "flags"), **{name: raw.get(name) for name in _SECRETS}}),
            secrets=_secret_values(raw),
            gpus=gpus,
            python=raw.get("python"),
            user=account(None if raw.get("user") is None else str(raw["user"])),
            settings={name: raw[name] for name in SETTINGS if raw.get(name) is not None},
            start_s=float(raw.get("ready_deadline_s") or START_S),
        )
        _number({**wanted.all_flags, "name": wanted.name}, "port")  # it may stand among the flags as well
        return wanted, problems

    def _wanted_gpus(self, raw: Raw) -> tuple[t.Optional[tuple[str, ...]], tuple[tuple[str, str, str], ...]]:
        """None: not judged, since it uses none, or (with a problem) since it can't be told which they are."""
        names = raw.get("gpus")
        flags = {flag_tools.normalise(str(name)): value for name, value in _mapping(raw, "flags").items()}
        on_cpu = "cpu" in (raw.get("device"), str(flags.get("device", "")).lower())
        if names is None or on_cpu or self.options.look.without_gpus:
            return None, ()
        if not isinstance(names, (list, tuple)):
            raise CleanSlateError(f"{raw['name']}: gpus must be a list, not {type(names).__name__}")
        if names and self.snapshot.reading.gpus is None:
            return None, (("gpus", "the GPUs can't be read, so its own can't be compared", "host"),)
        try:
            return self._uuids([str(name) for name in names]), ()
        except UnknownDevice as error:
            return None, (("gpus", str(error), "host"),)

    def _uuids(self, names: t.Sequence[str]) -> tuple[str, ...]:
        """Raises UnknownDevice."""
        gpus = self.snapshot.reading.gpus or ()
        return tuple(gpu.uuid or str(gpu.index) for gpu in choose_gpus(gpus, names)) if names else ()

    # --- what is seen of one server -----------------------------------------------------------------------------------

    def _server(self, claimed: _Claimed) -> tuple[SeenServer, Json]:
        wanted, record, leader = claimed.wanted, claimed.record, claimed.leader
        unseen = list(claimed.problems)
        launched, problem = (None, None) if leader is None else self._launched(leader)
        files = None if record is None else fetch_launch_files(self.options.state_dir, record)
        installed = _Installed() if record is None else _installed(record, files)
        options = installed.options if launched is None else launched.options
        if record is not None and files is not None:
            given = () if files.request is None else files.request.secret_environment
            self.secrets.add_environment(files.environment, given)
            self.secrets.add_flags(read_config(files.config or ""))
            if not files.missing:  # else it is a finding of its own
                unseen += [("launch_files", text, "file") for text in files.problems]
        began = None if leader is None else self._began(leader)
        own_port = (None if launched is None else _port_of(launched)) or int(wanted.all_flags["port"])
        port = self._port(own_port, leader)
        stranger = port.stranger or self._stranger(wanted, own_port, leader)
        workers = None if leader is None or launched is None else self._workers(leader, launched)
        flags = {} if launched is None or launched.flags is None else launched.flags.flags
        first_node = str(flags.get("node-rank", "0")) == "0"
        may_ask = port.listens is True and first_node and (workers is None or workers.problem is None)
        health, info, info_problem = self._asked(claimed, launched, port, may_ask)
        self.secrets.add_flags(info)
        prints = self._prints(claimed, files, installed, info)
        if leader is not None:
            self.ours.update(member.process.pid for member in tools.tree_of(leader, self.snapshot.processes))
        seen = SeenServer(
            file=None if record is None or files is None else self._file_place(record, files, options),
            process=None if launched is None or leader is None else self._place(leader, launched, problem, began),
            pid=None if leader is None else leader.pid,
            age_s=None if leader is None else age_s(leader, self.uptime_s),
            by_record=claimed.by_record,
            again=claimed.again,
            stranger=stranger,
            port=own_port,
            listens=port.listens,
            port_problem=port.problem,
            workers=workers,
            first_node=first_node,
            held=None if leader is None else self._held(leader),
            options=options,
            info=info,
            info_problem=info_problem,
            health=health,
            kept=None if files is None or files.request is None else _kept_settings(files.request),
            changed_after_start=() if not claimed.by_record else _after(files, began),
            missing=() if files is None else files.missing,
            unit=None if record is None or files is None else self._unit(record, files),
            prints=prints,
            unseen=tuple(unseen),
        )
        return seen, self._shown(claimed, seen)

    def _shown(self, claimed: _Claimed, seen: SeenServer) -> Json:
        leader, record = claimed.leader, claimed.record
        return {
            "name": claimed.wanted.name,
            "running": leader is not None,
            "pid": None if leader is None else leader.pid,
            "started_at": None if leader is None else process_row(leader, self.uptime_s)["started_at"],
            "uptime_s": None if seen.age_s is None else round(seen.age_s, 1),
            "launch_id": None if record is None else record.launch_id,
            "config_hash": None if record is None else record.config_hash,
            "health": None if seen.health is None else seen.health.kind,
        }

    def _began(self, leader: Process) -> t.Optional[float]:
        age = age_s(leader, self.uptime_s)
        return None if age is None else time.time() - age

    def _file_place(
        self, record: Record, files: LaunchFiles, options: t.Optional[OptionTable]
    ) -> t.Optional[Place]:
        if files.missing:
            return None  # that they are gone is the finding
        return Place(
            flags=launched_flags(record.argv, lambda path: files.config if path == record.config else None, options),
            environment=files.environment,
            gpus=record.gpus,
            python=record.python,
            user=account(record.user),
            problem="; ".join(files.problems) or None,
            chosen=_chosen(files),
        )

    def _place(
        self, leader: Process, launched: LaunchedServer, problem: t.Optional[str], began: t.Optional[float]
    ) -> Place:
        # A leader whose first thread has ended shows neither command line nor environment.
        environment = None if launched.flags is None and not launched.environment else launched.environment
        gpus: t.Optional[tuple[str, ...]] = None
        gpus_problem = None
        visible = None if environment is None else environment.get("CUDA_VISIBLE_DEVICES")
        if environment is None:
            gpus_problem = "its environment can't be read"
        elif visible is not None:
            gpus, gpus_problem = self._visible(visible, environment.get("CUDA_DEVICE_ORDER"))
        if problem is None and launched.flags is None:
            problem = f"the command line of pid {leader.pid} (state {leader.state}) is empty or can't be read"
        mtime = launched.config_mtime
        return Place(
            flags=launched.flags,
            environment=environment,
            gpus=gpus,
            gpus_problem=gpus_problem,
            python=None if launched.flags is None else launched.python,
            user=user_name(leader.uid),
            problem=problem,
            partial=mtime is not None and began is not None and mtime > began + _SLACK_S,
        )

    def _visible(
        self, visible: str, order: t.Optional[str]
    ) -> tuple[t.Optional[tuple[str, ...]], t.Optional[str]]:
        """CUDA's own order of numbers is not the driver's."""
        names = [name.strip() for name in visible.split(",") if name.strip()]
        numbered = any(name.isdigit() for name in names)
        if numbered and order != "PCI_BUS_ID" and len(self.snapshot.reading.gpus or ()) > 1:
            return None, f"CUDA_VISIBLE_DEVICES is {visible}, counted in CUDA's own order of GPUs"
        if self.snapshot.reading.gpus is None:
            return None, "the GPUs can't be read"
        try:
            return self._uuids(names), None
        except UnknownDevice as error:
            return None, f"CUDA_VISIBLE_DEVICES: {error}"

    def _held(self, leader: Process) -> t.Optional[tuple[str, ...]]:
        gpus = self.snapshot.reading.gpus
        if not gpus:
            return None
        tree = {member.process.pid for member in tools.tree_of(leader, self.snapshot.processes)}
        return tuple(
            gpu.uuid or str(gpu.index)
            for gpu in gpus
            if any(holder.pid in tree for holder in self.snapshot.holders[gpu.index].holders)
        )

    def _stranger(self, wanted: WantedServer, own_port: int, leader: t.Optional[Process]) -> t.Optional[str]:
        """Who listens on the port that the inventory wants, where the server was started for another one."""
        port = int(wanted.all_flags["port"])
        return None if port == own_port else self._port(port, leader).stranger

    def _port(self, port: int, leader: t.Optional[Process]) -> _Port:
        """Whether the server's tree listens on this port, and who else does."""
        if leader is not None and same_network(leader.pid, self.proc) is not True:
            words = f"pid {leader.pid} has a network of its own (a container?): its port can't be seen from here"
            return _Port(problem=words)
        listeners, problem = self._listeners(port)
        if listeners is None:
            return _Port(problem=problem)
        tree: set[int] = set()
        if leader is not None:
            tree = {member.process.pid for member in tools.tree_of(leader, self.snapshot.processes)}
        own = [use.address for use in listeners if tree.intersection(use.pids)]
        if own:
            return _Port(True, endpoint=endpoint_of(port, own))
        for use in listeners:
            for pid in use.pids:
                process = self.snapshot.processes.get(pid)
                return _Port(False, f"pid {pid}" + ("" if process is None else f" ({program_of(process)})"))
        if listeners:
            return _Port(problem=f"somebody listens on port {port}, and who it is can't be seen")
        return _Port(False)

    def _workers(self, leader: Process, launched: LaunchedServer) -> Workers:
        flags = {} if launched.flags is None else launched.flags.flags
        version = None if launched.install is None else launched.install.version
        return judge_workers(workers_of(leader, self.snapshot.processes), expected_workers(flags, version, None))

    def _asked(
        self, claimed: _Claimed, launched: t.Optional[LaunchedServer], port: _Port, may_ask: bool
    ) -> tuple[t.Optional[Health], t.Optional[Json], t.Optional[str]]:
        """(health, what it resolved, why not). It is asked where its own tree was seen to listen, whatever its command
        line names: that may be another host. Who gets a key must be known; others get none, and tell less."""
        endpoint = port.endpoint
        if launched is None or endpoint is None or not may_ask or not self.options.probe:
            return None, None, None
        flags = {} if launched.flags is None else launched.flags.flags
        endpoint = dataclasses.replace(endpoint, tls="ssl-certfile" in flags)
        users = (claimed.wanted.user, None if claimed.record is None else claimed.record.user)
        stranger = None if claimed.by_record and not claimed.again else why_no_key(claimed.leader, users)
        if stranger is not None:
            seen = http.health(endpoint, self.options.health_deadline_s)
            return _health(seen, launched, with_key=False), None, f"not asked: {stranger}" if seen.ok else None
        keys = [claimed.raw.get("api_key"), self._launch_key(claimed.record)]
        key = next((key for key in (reversed(keys) if claimed.by_record else keys) if key), None)
        probe = http.probe(
            dataclasses.replace(endpoint, api_key=key), self.options.health_deadline_s, self.options.info_deadline_s
        )
        info = None if probe.info is None else dict(probe.info)
        return _health(probe.health, launched, with_key=True), info, probe.info_error

    def _launch_key(self, record: t.Optional[Record]) -> t.Optional[str]:
        return None if record is None else launch_secrets(record).get("api-key")

    # --- what lies around it ------------------------------------------------------------------------------------------

    def _unit(self, record: Record, files: LaunchFiles) -> t.Optional[UnitSeen]:
        if record.unit is None:
            return None
        folder = None if files.request is None else files.request.unit_dir
        found = fetch_unit_files(record.unit, folder)
        edited = None
        then = (record.fingerprint or {}).get("unit")
        if found.text is not None and then is not None:
            edited = print_of(found.text) != then
        elif found.text is not None and files.unit is not None:
            edited = found.text != files.unit
        return UnitSeen(
            name=record.unit,
            kept=files.unit,
            text=found.text,
            edited=edited,
            wanted_path=None if folder is None else f"{folder.rstrip('/')}/{record.unit}",
            path=found.path,
            drop_ins=found.drop_ins,
            enabled=found.enabled,
            problem=found.problem,
        )

    def _prints(
        self, claimed: _Claimed, files: t.Optional[LaunchFiles], installed: _Installed, info: t.Optional[Json]
    ) -> Prints:
        """The host as it was at the launch and as it is now, beside the flags."""
        record = claimed.record
        version = None if info is None or not isinstance(info.get("version"), str) else str(info["version"])
        if record is None:
            return Prints(running_version=version, launched=False)
        now: Json = {}
        problems: dict[str, str] = {}
        reading = self.snapshot.reading
        if reading.gpus is not None and not self.options.look.without_gpus:
            now["driver_version"] = reading.driver_version
            problems["driver_version"] = "the driver does not tell its version"
            if self.options.look.expected_gpus is None:
                now["gpu_count"] = len(reading.gpus)
        flags = {flag_tools.canonical(name): value for name, value in record.flags.items()}
        model, revision = flags.get("model-path"), flags.get("revision")
        found = fetch_model_print(
            None if model is None else str(model),
            _environment(record, files),
            None if revision is None else str(revision),
        )
        now.update({"model_config": found.config, "model_index": found.index})
        if found.problem is not None:
            problems.update(dict.fromkeys(("model_config", "model_index"), found.problem))
        now["sglang_version"] = installed.version
        if installed.problem is not None:
            problems["sglang_version"] = installed.problem
        return Prints(_then(record, files), now, problems, version)

    # --- the host -----------------------------------------------------------------------------------------------------

    def _memory(self) -> Json:
        called = fetch_bounded(lambda: read_meminfo(self.proc), MEMORY_DEADLINE_S)
        memory = called.value if called.ok else None
        return {
            "total_mib": None if memory is None else memory.mem_total_mib,
            "available_mib": None if memory is None else memory.mem_available_mib,
        }

    def _host(self) -> list[Row]:
        wanted = WantedHost(self.options.look.expected_gpus, *self._idle_memory())
        rows = judge_gpus(wanted, self.snapshot, self.ours)
        called = fetch_bounded(lambda: read_shm(SHM, self.proc), HOST_DEADLINE_S)
        if not called.ok:
            return [*rows, drift.unknown(None, "leftovers", called.error or f"{SHM} was not read in time")]
        return rows + judge_leftovers(t.cast(ShmReading, called.value))

    def _idle_memory(self) -> tuple[int, dict[str, int]]:
        """What the host's and the servers' settings allow on a GPU that is called clean."""
        limits = [raw["max_used_mib"] for raw in self.servers if isinstance(raw.get("max_used_mib"), int)]
        baselines = dict(self.options.baselines)
        for raw in self.servers:
            try:
                found = baselines_of(raw.get("baselines_mib"))
            except (CleanSlateError, AttributeError):
                continue  # nothing is added to what is allowed
            for name, value in found.items():
                baselines[name] = max(value, baselines.get(name, 0))
        return max([self.options.max_used_mib, *limits]), baselines


@dataclass(frozen=True)
class _Refused:
    """A server whose settings make no sense."""

    name: str
    why: str


@dataclass(frozen=True)
class _Port:
    """``listens`` None: not known, and ``problem`` says why."""

    listens: t.Optional[bool] = None
    stranger: t.Optional[str] = None
    problem: t.Optional[str] = None
    endpoint: t.Optional[http.Endpoint] = None


def _health(seen: http.Response, launched: LaunchedServer, with_key: bool) -> Health:
    words = seen.error or f"HTTP {seen.status} after {seen.seconds:.1f} s"
    kind = seen.kind or ("ok" if seen.ok else "unhealthy")
    if not with_key and seen.status in (401, 403):
        kind, words = "broken", f"{words}; it gets no API key"  # no answer, and no fault of it
    return Health(kind, words, seen.seconds, _limit_s(launched))


def _mapping(raw: Raw, name: str) -> t.Mapping[str, t.Any]:
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, t.Mapping):
        raise CleanSlateError(f"{raw['name']}: {name} must be a mapping, not {type(value).__name__}")
    return value


def _number(raw: Raw, name: str) -> t.Optional[int]:
    value = raw.get(name)
    if value is None:
        return None
    number = flag_tools.port_number(value)
    if number is None:
        raise CleanSlateError(f"{raw['name']}: {name} is {value!r}; it must be a number from 1 to 65535")
    return number


def _port_of(launched: LaunchedServer) -> t.Optional[int]:
    flags = launched.flags
    if flags is None:
        return None
    port = flags.flags.get("port", DEFAULT_PORT if flags.complete else None)
    return flag_tools.port_number(port)


def _limit_s(launched: LaunchedServer) -> float:
    """After how many seconds this server's /health gives up."""
    try:
        return float((launched.environment or {}).get(_HEALTH_LIMIT, HEALTH_LIMIT_S))
    except ValueError:
        return HEALTH_LIMIT_S


def _chosen(files: LaunchFiles) -> frozenset[str]:
    """The variables of the launch that somebody chose, or added to its file since; the others it sets itself."""
    asked = () if files.request is None else files.request.environment
    return frozenset(set(files.environment or ()) - tools.BY_LAUNCH | set(asked))


def _after(files: t.Optional[LaunchFiles], began: t.Optional[float]) -> tuple[str, ...]:
    """Files of the launch that were written after the process began."""
    if files is None or began is None:
        return ()
    return tuple(name for name, mtime in sorted(files.times.items()) if mtime > began + _SLACK_S)


def _kept_settings(request: t.Any) -> Json:
    return {name: getattr(request, name) for name in SETTINGS}


def _waivers(claimed: _Claimed) -> dict[str, str]:
    """Of the launch; where the inventory has the same one, its reason counts: somebody may have renewed it."""
    given = _mapping(claimed.raw, "waivers")
    record = claimed.record
    found = {} if record is None else dict(record.waivers)
    return {**found, **{str(name): str(reason) for name, reason in given.items()}}


def _then(record: Record, files: t.Optional[LaunchFiles]) -> t.Optional[Json]:
    """The launch's fingerprint. An older version of this collection only kept which SGLang there was."""
    if record.fingerprint is not None:
        return dict(record.fingerprint)
    version = None if files is None or files.request is None else files.request.version
    return None if version is None else {"sglang_version": version}


def _environment(record: Record, files: t.Optional[LaunchFiles]) -> t.Mapping[str, str]:
    """Of the launch: its file has the whole, its record all but the secrets."""
    return record.environment if files is None or files.environment is None else files.environment


@dataclass(frozen=True)
class _Installed:
    """The SGLang that a start would take now. ``problem``: why its version is not known."""

    version: t.Optional[str] = None
    options: t.Optional[OptionTable] = None
    problem: t.Optional[str] = None


def _installed(record: Record, files: t.Optional[LaunchFiles]) -> _Installed:
    if record.python is None:
        return _Installed()
    try:
        install, options = fetch_install(record.python, _environment(record, files).get("PYTHONPATH", ""))
    except CleanSlateError as error:
        return _Installed(problem=str(error))
    if install is None or install.version is None:
        words = f"{record.python}: no SGLang is found for it, or not which version it is"
        return _Installed(options=options, problem=words)
    return _Installed(install.version, options)
