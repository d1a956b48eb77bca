# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One server: its settings in the inventory against its files, its process and what it says of itself. Pure.

Rows come out one for each place; drift.merge joins those of one item. What could not be seen is a row ``unknown``.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t
from dataclasses import dataclass, field

from ..sglang import flags as flag_tools
from ..sglang.cmdline import LaunchedFlags
from ..sglang.option_table import OptionTable
from ..sglang.redact import MASK, SECRET_FLAGS, Redactor, is_secret_flag, is_secret_name, is_secret_variable
from ..sglang.running import RunningFlags, judge_flags
from ..sglang.servers import Wanted, compare
from .drift import Row, note, unknown
from .workers import Workers

START_S = 600.0
HEALTH_LIMIT_S = 20.0  # SGLANG_HEALTH_CHECK_TIMEOUT: after that SGLang's /health says 503
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000
SETTINGS: t.Mapping[str, t.Any] = {
    "group": None,
    "launcher": None,
    "unit": None,
    "unit_overrides": {},
    "limit_memlock": "infinity",
    "stop_timeout_s": 60,
    "restart": "no",
    "start_check": [],
    "enabled": False,
    "log": None,
    "workdir": None,
}
"""A server's settings around its flags, with what holds where the inventory is silent."""
_OF_SYSTEMD = ("unit", "unit_overrides", "stop_timeout_s", "restart", "start_check", "enabled")
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_ANY = ("group", "launcher")  # silence of the inventory leaves the choice to the launch


@dataclass(frozen=True)
class WantedServer:
    """A server's settings in the inventory. ``gpus``: UUIDs or indices; empty: all; None: not judged.
    ``secret_names``: variables that are given as secrets; they are never compared.
    ``secret_flags``: SGLang's options for secrets that are given; only whether they are is compared.
    ``secrets``: all their values. A launch's files have them masked wherever they stand.
    ``settings``: of `SETTINGS` what the inventory gives. ``start_s``: how long a start may take."""

    name: str
    flags: t.Mapping[str, t.Any]
    host: t.Optional[str] = None
    port: t.Optional[int] = None
    environment: t.Mapping[str, str] = field(default_factory=dict)
    secret_names: frozenset[str] = frozenset()
    secret_flags: frozenset[str] = frozenset()
    secrets: tuple[str, ...] = field(default=(), repr=False)
    gpus: t.Optional[tuple[str, ...]] = None
    python: t.Optional[str] = None
    user: t.Optional[str] = None
    settings: t.Mapping[str, t.Any] = field(default_factory=dict)
    start_s: float = START_S

    @property
    def all_flags(self) -> dict[str, t.Any]:
        """The flags with host and port, as a launch has them; where nothing is said, SGLang's own defaults are meant.
        """
        wanted = flag_tools.check(self.flags)
        for name, value, default in (("host", self.host, DEFAULT_HOST), ("port", self.port, DEFAULT_PORT)):
            wanted[name] = value if value is not None else wanted.get(name, default)
        return wanted

    @property
    def fix(self) -> str:
        return f"relaunch it: playbooks/relaunch.yml -e server={self.name}"


@dataclass(frozen=True)
class Place:
    """Flags, environment, GPUs, interpreter and user as one place shows them.

    ``flags`` None: not known (``problem``). ``partial``: its configuration file was written after the process had read
    it, so ``flags`` are those of the command line alone. ``gpus_problem``: why ``gpus`` are not known.
    ``chosen``: variables that are known to have been chosen for this server, whatever their names are.
    """

    flags: t.Optional[LaunchedFlags]
    environment: t.Optional[t.Mapping[str, str]] = None
    gpus: t.Optional[tuple[str, ...]] = None
    gpus_problem: t.Optional[str] = None
    python: t.Optional[str] = None
    user: t.Optional[str] = None
    problem: t.Optional[str] = None
    partial: bool = False
    chosen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Health:
    """What /health said. ``kind``: ok, unhealthy (another status than 200), refused, timeout or broken."""

    kind: str
    words: str
    seconds: float = 0.0
    limit_s: float = HEALTH_LIMIT_S

    @property
    def slow(self) -> bool:
        """Whether SGLang itself gave up waiting for its scheduler before it said so."""
        return self.kind == "unhealthy" and self.seconds >= 0.9 * self.limit_s


@dataclass(frozen=True)
class Prints:
    """Of the host beside the flags (observe/fingerprint.py), at the launch and now. ``then`` None: the launch kept
    none; ``launched``: whether there was one. ``now`` lacks what could not be read, and ``problems`` say why, by name.
    """

    then: t.Optional[t.Mapping[str, t.Any]] = None
    now: t.Mapping[str, t.Any] = field(default_factory=dict)
    problems: t.Mapping[str, str] = field(default_factory=dict)
    running_version: t.Optional[str] = None
    launched: bool = True


@dataclass(frozen=True)
class UnitSeen:
    """The server's unit: what systemd would start now. ``kept``: its text as launched; None: not kept. ``text`` None:
    there is none. ``edited``: it is not as launched; None: nothing tells. ``wanted_path`` and ``path``: where the
    launch wrote it, and which file counts. ``enabled`` None: not known."""

    name: str
    kept: t.Optional[str]
    text: t.Optional[str]
    edited: t.Optional[bool] = None
    wanted_path: t.Optional[str] = None
    path: t.Optional[str] = None
    drop_ins: tuple[str, ...] = ()
    enabled: t.Optional[bool] = None
    problem: t.Optional[str] = None


@dataclass(frozen=True)
class SeenServer:
    """What was seen of one server.

    ``file``: its launch's files; None: it was never launched from here. ``process``: its leader; None: none runs.
    ``by_record``: whether that leader is the launch's, and ``again``: whether systemd has started it anew since.
    ``port``: on which its leader should listen by its own flags. ``stranger``: who else does.
    ``listens`` None: not known (``port_problem``).
    ``workers``: None where they were not judged. ``first_node``: only the first node of a server serves HTTP.
    ``held``: GPUs that its processes hold, as ``WantedServer.gpus`` names them; None: not known.
    ``info``: the answer of /server_info; ``health`` None: not asked.
    ``kept``: the settings of its launch, as `SETTINGS` names them; None: not known.
    ``changed_after_start``, ``missing``: files of its launch. ``unseen``: (item, why, place) of failed readings.
    """

    file: t.Optional[Place] = None
    process: t.Optional[Place] = None
    pid: t.Optional[int] = None
    age_s: t.Optional[float] = None
    by_record: bool = False
    again: bool = False
    stranger: t.Optional[str] = None
    port: t.Optional[int] = None
    listens: t.Optional[bool] = None
    port_problem: t.Optional[str] = None
    workers: t.Optional[Workers] = None
    first_node: bool = True
    held: t.Optional[tuple[str, ...]] = None
    options: t.Optional[OptionTable] = None
    info: t.Optional[t.Mapping[str, t.Any]] = None
    info_problem: t.Optional[str] = None
    health: t.Optional[Health] = None
    kept: t.Optional[t.Mapping[str, t.Any]] = None
    changed_after_start: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unit: t.Optional[UnitSeen] = None
    prints: Prints = field(default_factory=Prints)
    unseen: tuple[tuple[str, str, str], ...] = ()


def judge_server(wanted: WantedServer, seen: SeenServer) -> tuple[tuple[Row, ...], int]:
    """(rows, still one for each place: drift.merge joins them; how many flags the engine was asked for)."""
    rows: list[Row] = []
    if seen.file is not None:
        rows += _place(wanted, seen.file, seen.options, "file")
    if seen.process is not None:
        rows += _place(wanted, seen.process, seen.options, "process")
        rows += _partial(wanted, seen, seen.process)
    engine, compared = _engine(wanted, seen)
    rows += engine
    rows += _held(wanted, seen)
    rows += _state(wanted, seen)
    rows += _files(wanted, seen)
    rows += _settings(wanted, seen)
    rows += _unit(wanted, seen.unit)
    rows += _prints(wanted, seen)
    rows += [unknown(wanted.name, item, why, where) for item, why, where in seen.unseen]
    return tuple(rows), compared


# --- as it was started ------------------------------------------------------------------------------------------------


def _place(wanted: WantedServer, place: Place, options: t.Optional[OptionTable], where: str) -> t.Iterator[Row]:
    launched = _comparable(place)
    complete = launched is not None and launched.complete
    if not complete and not place.partial:
        known = () if launched is None else launched.problems
        why = place.problem or "; ".join(known) or "its flags can't be read"
        yield unknown(wanted.name, "command_line" if where == "process" else "launch_files", why, where)
    if place.environment is None:
        item = "environment" if where == "process" else "launch_files"
        yield unknown(wanted.name, item, place.problem or "its environment can't be read", where)
    gpus_known = place.gpus_problem is None
    if wanted.gpus is not None and place.gpus_problem is not None and place.environment is not None:
        yield unknown(wanted.name, "gpus", place.gpus_problem, where)
    found = compare(
        Wanted(_comparable_wanted(wanted, place, options), dict(wanted.environment), wanted.gpus),
        launched,
        _own_environment(wanted, place.environment),
        place.gpus,
        gpus_known,
        options,
        place.chosen,
    )
    yield from _secret_flags(wanted, launched, place, where)
    for row in found.differences:
        kind, _dot, name = row.item.partition(".")
        if kind == "gpus":
            yield Row(wanted.name, "gpus", row.wanted, row.found, where, "critical", wanted.fix)
        elif kind == "environment":
            want, got = _shown(name, row.wanted), _shown(name, row.found)
            yield Row(wanted.name, f"env:{name}", want, got, where, "warning", wanted.fix)
        elif complete or row.found is not None:
            yield Row(wanted.name, f"flag:{name}", row.wanted, row.found, where, "critical", wanted.fix)
    if wanted.python is not None and place.python is not None and not same_python(wanted.python, place.python):
        yield Row(wanted.name, "python", wanted.python, place.python, where, "warning", wanted.fix)
    if wanted.user is not None and place.user not in (None, wanted.user):
        yield Row(wanted.name, "user", wanted.user, place.user, where, "critical", wanted.fix)


def _partial(wanted: WantedServer, seen: SeenServer, process: Place) -> t.Iterator[Row]:
    """A configuration file that was written after the start. Of a launch's own process the launch's files tell, with
    a row for the change; for any other nobody knows what it has read."""
    if not process.partial or (seen.by_record and seen.file is not None):
        return
    path = None if process.flags is None else process.flags.config_path
    why = f"its configuration file {path} was written after its start: what it has read can't be seen"
    yield unknown(wanted.name, "command_line", why, "process", f"look at what was changed, or {wanted.fix}")


def _secret_flags(
    wanted: WantedServer, launched: t.Optional[LaunchedFlags], place: Place, where: str
) -> t.Iterator[Row]:
    """Whether keys are given at all: a server without one is open to everybody. Their values are never compared."""
    if launched is None or place.flags is None:
        return
    found = place.flags.flags
    if place.partial:
        found = {name: value for name, value in found.items() if place.flags.sources.get(name) == "command line"}
    given = given_secrets(found)
    for name in SECRET_FLAGS:
        want, has = name in wanted.secret_flags, name in given
        if want != has and (has or launched.complete):
            words = {True: "set", False: "not set"}
            yield Row(wanted.name, f"flag:{name}", words[want], words[has], where, "critical", wanted.fix)


def given_secrets(flags: t.Mapping[str, t.Any]) -> frozenset[str]:
    """SGLang's options for secrets that have a value here; argparse takes abbreviations."""
    names = [name for name in (flag_tools.normalise(str(key)) for key, value in flags.items() if value) if name]
    return frozenset(
        secret
        for secret in SECRET_FLAGS
        for name in names
        if name == secret or (is_secret_flag(name) and secret.startswith(name))
    )


def same_python(one: str, other: str) -> bool:
    """Whether both name one interpreter: a virtual environment has it as python, python3 and python3.12."""
    (folder, name), (other_folder, other_name) = one.rpartition("/")[::2], other.rpartition("/")[::2]
    return one == other or (folder == other_folder and all(_PYTHON.fullmatch(each) for each in (name, other_name)))


def _comparable(place: Place) -> t.Optional[LaunchedFlags]:
    """Without secrets, and with the defaults of host and port, which are compared whether they were given or not."""
    launched = place.flags
    if launched is None:
        return None
    found = _plain(launched.flags)
    if place.partial:
        found = {name: value for name, value in found.items() if launched.sources.get(name) == "command line"}
        return dataclasses.replace(launched, flags=found, complete=False)
    if launched.complete:
        found = {"host": DEFAULT_HOST, "port": DEFAULT_PORT, **found}
    return dataclasses.replace(launched, flags=found)


def _comparable_wanted(
    wanted: WantedServer, place: Place, options: t.Optional[OptionTable]
) -> dict[str, t.Any]:
    """The flags but secrets, and but those that this place shows masked: whether these are the same nobody can see."""
    found = {} if place.flags is None else place.flags.flags
    masked = {name for name, value in found.items() if MASK in str(value)}
    return {
        name: value
        for name, value in _plain(wanted.all_flags).items()
        if flag_tools.canonical(name, options) not in masked
    }


def _plain(flags: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """Without secrets, and without what was masked because it holds one."""
    return {
        name: value
        for name, value in flags.items()
        if not is_secret_name(flag_tools.normalise(str(name))) and MASK not in str(value)
    }


def _shown(name: str, value: t.Any) -> t.Any:
    return MASK if value is not None and is_secret_variable(name) else value


def _own_environment(
    wanted: WantedServer, environment: t.Optional[t.Mapping[str, str]]
) -> t.Optional[dict[str, str]]:
    """Without the variables that come as secrets."""
    if environment is None:
        return None
    return {name: value for name, value in environment.items() if name not in wanted.secret_names}


def _engine(wanted: WantedServer, seen: SeenServer) -> tuple[list[Row], int]:
    """Only what the user set, and of it only what SGLang does not set itself."""
    if seen.info is None:
        if seen.info_problem is None:
            return [], 0
        why = f"/server_info: {seen.info_problem}"
        return [unknown(wanted.name, "engine", why, "engine", "mend what keeps it from answering; see its log")], 0
    judged = judge_flags(_plain(wanted.all_flags), RunningFlags(None, seen.options), seen.info)
    if judged.compared == 0:
        why = "/server_info: its answer has none of the flags that are wanted"
        remedy = "look at what answers on its port, and at its log"
        return [unknown(wanted.name, "engine", why, "engine", remedy)], 0
    return [
        Row(wanted.name, f"flag:{row.item}", row.wanted, row.found, "engine", "critical", wanted.fix)
        for row in judged.differences
    ], judged.compared


def _held(wanted: WantedServer, seen: SeenServer) -> t.Iterator[Row]:
    """GPUs beyond its own. That it leaves some of its own alone is a matter of its flags."""
    if not wanted.gpus or seen.held is None:
        return
    beyond = [gpu for gpu in seen.held if gpu not in wanted.gpus]
    if beyond:
        found = f"its processes hold {', '.join(beyond)} too"
        yield Row(wanted.name, "gpus", list(wanted.gpus), found, "process", "critical", wanted.fix)


# --- how it is --------------------------------------------------------------------------------------------------------


def _state(wanted: WantedServer, seen: SeenServer) -> t.Iterator[Row]:
    name, port = wanted.name, wanted.all_flags["port"]
    if seen.port_problem is not None:
        yield unknown(name, "port", seen.port_problem, "process")
    if seen.stranger is not None:
        words = "the port's owner is no process of this server: end it, or choose another port, then relaunch"
        yield Row(name, "not_ours", f"this server on port {port}", seen.stranger, "process", "critical", words)
    if seen.process is None:
        if seen.stranger is None:
            yield Row(name, "not_running", "running", "no process of it", "process", "critical", wanted.fix)
        return
    if not seen.by_record:
        found = f"pid {seen.pid}, which no record stands for"
        yield Row(name, "restarted_by_hand", "started by a launch", found, "process", "warning", wanted.fix)
    elif seen.again:
        words = "systemd has started it anew since its launch"
        yield note(name, "restarted_by_systemd", "running since its launch", words, "process", "see its log for why")
    yield from _alive(wanted, seen)


def _alive(wanted: WantedServer, seen: SeenServer) -> t.Iterator[Row]:
    """Hung, dead in part, or still starting. Direct evidence of processes goes before what HTTP says."""
    name, workers, health, port = wanted.name, seen.workers, seen.health, wanted.all_flags["port"]
    young = seen.age_s is not None and seen.age_s < wanted.start_s

    def bad(item: str, want: str, found: t.Any, where: str) -> Row:
        return Row(name, item, want, found, where, "critical", f"see its log, then {wanted.fix}")

    def starting(what: str) -> Row:
        words = f"started {seen.age_s:.0f} s ago, and so far {what}"
        return note(name, "starting", "serves", words, "process", "wait for its start to end, then check again")

    if workers is not None and workers.stopped:
        yield bad("hung", "every process runs", workers.problem, "process")
    elif workers is not None and workers.dead:
        yield bad("unhealthy", "every process lives", workers.problem, "process")
    elif workers is not None and workers.problem is not None:
        yield starting(workers.problem) if young else bad("unhealthy", "all processes", workers.problem, "process")
    elif health is not None and (health.kind == "timeout" or health.slow):
        words = f"{health.words}: its scheduler does not answer (a very long prompt can do the same)"
        yield bad("hung", "GET /health: 200", words, "engine")
    elif health is not None and health.kind == "unhealthy":
        yield starting(health.words) if young else bad("unhealthy", "GET /health: 200", health.words, "engine")
    elif health is not None and health.kind != "ok":
        yield unknown(name, "health", f"GET /health: {health.words}", "engine", "check again; see its log")
    elif seen.first_node and seen.listens is False and seen.stranger is None:
        words = f"it does not listen on port {seen.port or port}"
        yield starting(words) if young else bad("unhealthy", "listens on its port", words, "process")
    elif workers is not None and workers.unknown is not None:
        yield unknown(name, "workers", workers.unknown, "process")


# --- what lies around it ----------------------------------------------------------------------------------------------


def _files(wanted: WantedServer, seen: SeenServer) -> t.Iterator[Row]:
    if seen.missing:
        found = f"missing: {', '.join(seen.missing)}"
        yield Row(wanted.name, "launch_files", "as launched", found, "file", "critical", wanted.fix)
    if seen.process is not None and seen.changed_after_start:
        found = f"written after its start: {', '.join(seen.changed_after_start)}"
        yield Row(wanted.name, "started_before_change", "started after its files", found, "file", "warning", wanted.fix)


def _settings(wanted: WantedServer, seen: SeenServer) -> t.Iterator[Row]:
    if seen.kept is None:
        return
    systemd = seen.kept.get("launcher") == "systemd"
    redactor = Redactor(wanted.secrets)
    for name, default in SETTINGS.items():
        given = wanted.settings.get(name)
        if given is None and name in _ANY or given == "auto" and name == "launcher":
            continue
        if name in _OF_SYSTEMD and not systemd:
            continue
        if name == "unit" and given is None:
            default = f"sglang-{wanted.name}.service"
        want = redactor.data(default if given is None else given, name)
        found = redactor.data(seen.kept.get(name), name)  # a launch of an older version masked less
        if _meaning(name, want) != _meaning(name, found):
            yield Row(wanted.name, f"setting:{name}", want, found, "file", "warning", wanted.fix)


def _meaning(name: str, value: t.Any) -> t.Any:
    if name == "restart" and value is False:
        return "no"  # as YAML reads a bare no
    if name == "limit_memlock" and isinstance(value, str):
        value = value.lower()
    return flag_tools.meaning(list(value) if isinstance(value, tuple) else value)


_SHOWN_LINES = 5


def _unit(wanted: WantedServer, unit: t.Optional[UnitSeen]) -> t.Iterator[Row]:
    if unit is None:
        return
    if unit.problem is not None:
        yield unknown(wanted.name, "unit_file", unit.problem, "file")
    elif unit.text is None:
        yield Row(wanted.name, "unit_file", unit.wanted_path or unit.name, "missing", "file", "warning", wanted.fix)
    elif unit.path is not None and unit.wanted_path is not None and unit.path != unit.wanted_path:
        found = f"systemd takes {unit.path}"
        yield Row(wanted.name, "unit_file", unit.wanted_path, found, "file", "warning", wanted.fix)
    elif unit.edited:
        want, found = _difference(unit)
        remedy = f"put what must change into unit_overrides, then {wanted.fix}"
        yield Row(wanted.name, "unit_file", want, found, "file", "warning", remedy)
    if unit.drop_ins:
        remedy = f"remove it, or put it into unit_overrides; then {wanted.fix}"
        yield Row(wanted.name, "unit_override", "none", list(unit.drop_ins), "file", "warning", remedy)
    boot = wanted.settings.get("enabled") is True
    if unit.enabled is not None and unit.enabled != boot:
        yield Row(wanted.name, "setting:enabled", boot, unit.enabled, "host", "warning", wanted.fix)


def _difference(unit: UnitSeen) -> tuple[t.Any, t.Any]:
    """The lines that differ, or words where that can't be told."""
    if unit.kept is None or unit.text is None:
        return "as launched", "edited"
    before, after = _unit_lines(unit.kept), _unit_lines(unit.text)
    gone, come = _only(before, after), _only(after, before)
    if not gone and not come:
        return "as launched", "its lines in another order"
    return gone or "without these lines", come or "without these lines"


_GOES_ON = re.compile(r"\\\r?\n(?:[ \t]*[#;].*\r?\n)*[ \t]*")


def _unit_lines(text: str) -> list[str]:
    """A unit's lines as systemd reads them, joined behind a backslash (comments between are passed over). A line shows
    a secret by the name before it, so it must be whole when it is masked."""
    return _GOES_ON.sub(" ", text).splitlines()


def _only(lines: t.Sequence[str], others: t.Collection[str]) -> list[str]:
    """The first lines that the others lack."""
    found = [line for line in lines if line.strip() and line not in others]
    more = len(found) - _SHOWN_LINES
    return found[:_SHOWN_LINES] + ([f"and {more} more"] if more > 0 else [])


# --- what the host had at the launch ----------------------------------------------------------------------------------

_PRINTS = (
    ("driver_version", "relaunch it, so that it is proved with this driver: "),
    ("gpu_count", "look at the host's kernel log for Xids, and at nvidia-smi; then "),
    ("model_config", "if the new model is meant, "),
    ("model_index", "if the new model is meant, "),
)


def _prints(wanted: WantedServer, seen: SeenServer) -> t.Iterator[Row]:
    prints = seen.prints
    if not prints.launched:
        return
    if prints.then is None:
        words = "its launch kept no fingerprint: SGLang, driver, GPUs and model can't be compared with it"
        yield note(wanted.name, "fingerprint", "kept at the launch", words, "file", wanted.fix)
        return
    yield from _version(wanted, prints)
    for item, remedy in _PRINTS:
        then, now = prints.then.get(item), prints.now.get(item)
        if then is None:
            continue
        if now is None:
            if item in prints.problems:
                yield unknown(wanted.name, item, prints.problems[item])
        elif now != then:
            yield Row(wanted.name, item, then, now, "host", "warning", remedy + wanted.fix)
    unread = [item for item, _remedy in _PRINTS[2:] if prints.then.get(item) is None]
    if unread:
        words = f"not read at its launch: {', '.join(unread)}"
        yield note(wanted.name, "fingerprint", "kept at the launch", words, "file", wanted.fix)


def _version(wanted: WantedServer, prints: Prints) -> t.Iterator[Row]:
    item = "sglang_version"
    then = None if prints.then is None else prints.then.get(item)
    installed, running = prints.now.get(item), prints.running_version
    if then is None:
        return
    if installed is None and item in prints.problems:
        yield unknown(wanted.name, item, prints.problems[item])
    elif installed not in (None, then):
        still = f" (the server still runs {running})" if running == then else ""
        yield Row(wanted.name, item, then, f"{installed}{still}", "host", "warning", wanted.fix)
    if running not in (None, then):
        yield Row(wanted.name, item, then, running, "engine", "warning", wanted.fix)
