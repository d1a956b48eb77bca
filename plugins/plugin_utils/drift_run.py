# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One drift check of a fleet, for a scheduler: playbooks/drift.yml through ansible-runner, and reports of its answers.

    python3 scripts/drift.py -i inventory/mine --out /var/lib/cleanslate-drift

The exit status is 0 where everything is in sync, 10 where something drifted, and 20 where a host was not seen or the
run could not do its work, whatever the reason; 2 is a wrong command line. The reports are written in each case.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import io
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
import traceback
import typing as t
from dataclasses import dataclass, replace
from pathlib import Path

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import (
    MASK,
    Redactor,
    is_secret_flag,
    is_secret_name,
    is_secret_variable,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import Completed, run_bounded

from . import drift_document, drift_history, drift_junit, drift_metrics, drift_notify
from .drift_answers import JSON, Collector, HostAnswer, text
from .drift_files import HISTORY, JUNIT, LATEST, METRICS, PAGE, DriftFilesError, Store, write_atomic

ROOT = Path(__file__).resolve().parents[2]
LIST_DEADLINE_S = 180.0
STUCK_AFTER_S = 45.0  # ansible-runner looks at its timeout every 5 s; it has this long to end what it started
KEPT_RUNS = 5
SHOWN_ROWS = 40
_DEFAULT_TARGET = "sglang"  # of drift.yml
_WHOLE = """- name: Whom a run without a limit would check
  hosts: "{{ target | default('sglang') }}"
  gather_facts: false
- name: All hosts of the inventory
  hosts: all
  gather_facts: false
"""
_WRAPPER = """- name: The check of the collection that this runner belongs to
  ansible.builtin.import_playbook: cleanslate.sglang.drift
"""
_CONTROL_PATH_ROOM = 60  # a socket's path holds 107 bytes, of which ssh's own names take up to 45
_SHORTEST_SECRET = 6  # what is shorter is part of too many words
_ASSIGNED = re.compile(r"(?:--([A-Za-z][\w-]*)[ =]+|\b([A-Z][A-Z0-9_]+)=)([^\s\"'\\\\,;]+)")
_SUBREAPER = 36
_EXPECTED_RC = (0, 2, 4)


class Interrupted(Exception):
    """A signal asked for the end."""


class RunnerStuck(Exception):
    """ansible-runner did not come back."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    out: Path
    inventory: tuple[str, ...]
    limit: t.Optional[str]
    arguments: tuple[str, ...]
    timeout_s: float
    fresh_s: float
    limits: drift_history.Limits
    metrics: t.Optional[Path] = None
    hook: t.Optional[drift_notify.Hook] = None
    keep_run: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a run, before it is a document."""

    answers: tuple[HostAnswer, ...]
    status: str
    rc: t.Optional[int]
    problems: tuple[str, ...] = ()
    expected_known: bool = True
    gone: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def main(argv: t.Optional[t.Sequence[str]] = None) -> int:
    """The whole program; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the locale has no letters for is no failure
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        return run(options)
    except DriftFilesError as error:
        _complain(str(error))
    except Exception:  # a mistake of ours is no reason for silence, nor for a status that looks like a verdict
        traceback.print_exc()
        _complain("this is a mistake in the drift check itself; the reports may be those of an earlier run")
    return drift_document.EXIT_CODES["unknown"]


# --- the command line -------------------------------------------------------------------------------------------------


def parse(argv: t.Sequence[str]) -> Options:
    """Exits with 2 and a sentence where the command line makes no sense."""
    own, rest = _split(argv)
    parser = argparse.ArgumentParser(
        prog="drift.py",
        description="Compare a fleet with its inventory by playbooks/drift.yml, and write reports. Changes nothing.",
        epilog="Exit status: 0 in sync, 10 drifted, 20 unknown (a host was not seen, or the run failed). "
        "What follows -- goes to ansible-playbook as it is.",
        allow_abbrev=False,
    )
    parser.add_argument("-i", "--inventory", action="append", default=[], help="as for ansible-playbook; several times")
    parser.add_argument("-l", "--limit", help="only these hosts; the reports keep the others as they were")
    parser.add_argument("-c", "--connection", help="as for ansible-playbook; local for a host that checks itself")
    parser.add_argument("-e", "--extra-vars", action="append", default=[], help="as for ansible-playbook")
    parser.add_argument("-f", "--forks", type=int, help="how many hosts at once")
    parser.add_argument("--vault-password-file", action="append", default=[], help="as for ansible-playbook")
    parser.add_argument("--out", type=Path, required=True, help="the directory of the reports")
    parser.add_argument("--metrics", type=Path, help="write the metrics into this file as well (textfile collector)")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="for the whole playbook (900)")
    parser.add_argument("--fresh-s", type=float, default=93600, metavar="S",
                        help="a host that no run has asked for this long is unknown (93600)")  # fmt: skip
    parser.add_argument("--keep-days", type=int, default=400, metavar="N", help="days of history (400)")
    parser.add_argument("--keep-mb", type=float, default=64, metavar="N", help="size of the history in MB (64)")
    parser.add_argument("--notify", metavar="CMD", help="a command, without a shell; it gets JSON on its stdin")
    parser.add_argument("--notify-when", choices=drift_notify.WHEN, default="change",
                        help="something is new, something is not in sync, or after each run (change)")  # fmt: skip
    parser.add_argument("--notify-timeout", type=float, default=30, metavar="S", help="for that command (30)")
    parser.add_argument("--keep-run", action="store_true",
                        help=f"keep ansible-runner's directory below OUT/runs, the newest {KEPT_RUNS}")  # fmt: skip
    given = parser.parse_args(own)
    for name, lowest in (("timeout", 1), ("fresh_s", 1), ("keep_days", 1), ("keep_mb", 0.1), ("notify_timeout", 1)):
        value = getattr(given, name)
        if not lowest <= value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value:g}: it must be at least {lowest:g}, with an end")
    if given.forks is not None and given.forks < 1:
        parser.error(f"--forks {given.forks}: it must be at least 1")
    hook = None
    if given.notify is not None:
        try:
            words = tuple(shlex.split(given.notify))
        except ValueError as error:
            parser.error(f"--notify {given.notify!r}: {error}")
        if not words:
            parser.error("--notify is empty")
        hook = drift_notify.Hook(words, given.notify_when, given.notify_timeout)
    passed = [word for each in given.extra_vars for word in ("-e", each)]
    passed += [word for each in given.vault_password_file for word in ("--vault-password-file", each)]
    passed += ["-c", given.connection] if given.connection else []
    passed += ["-f", str(given.forks)] if given.forks else []
    passed += [f"--limit={given.limit}"] if given.limit is not None else []
    return Options(
        out=given.out.expanduser().absolute(),
        inventory=tuple(_inventory(each) for each in given.inventory),
        limit=_limit_in([*passed, *rest]),
        arguments=(*passed, *rest),
        timeout_s=given.timeout,
        fresh_s=given.fresh_s,
        limits=drift_history.Limits(given.keep_days, given.keep_mb),
        metrics=None if given.metrics is None else given.metrics.expanduser().absolute(),
        hook=hook,
        keep_run=given.keep_run,
    )


def _split(argv: t.Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _limit_in(words: t.Sequence[str]) -> t.Optional[str]:
    """The limit among the words for ansible-playbook; of several it takes the last."""
    found = None
    for word, after in zip(words, [*words[1:], None]):
        name, equals, value = word.partition("=")
        if word == "-l" or (name in ("--limit", "--limi", "--lim") and not equals):
            found = after
        elif name in ("--limit", "--limi", "--lim"):
            found = value
        elif word.startswith("-l") and len(word) > 2:
            found = word[2:]
    return found


def _inventory(source: str) -> str:
    """A path as an absolute one; a list of hosts as it is."""
    return source if "," in source else os.path.abspath(os.path.expanduser(source))


# --- a run ------------------------------------------------------------------------------------------------------------


def run(options: Options) -> int:
    """One check, from the question to the exit status."""
    store = Store(options.out)
    store.prepare()
    if options.metrics is not None and not options.metrics.parent.is_dir():
        raise DriftFilesError(f"--metrics {options.metrics}: {options.metrics.parent} is no directory")
    started, clock = time.time(), time.monotonic()
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(started))
    run_id = f"{moment}-{secrets.token_hex(3)}"
    with _Signals() as signals:
        outcome = _check(options, store, run_id, signals)
        facts = drift_document.Run(
            run_id=run_id,
            started=started,
            finished=started + time.monotonic() - clock,
            status=outcome.status,
            rc=outcome.rc,
            inventory=options.inventory,
            limit=options.limit,
            problems=outcome.problems,
            notes=outcome.notes,
            gone=outcome.gone,
        )
        document, previous, failures = publish(options, store, facts, outcome)
        if options.hook is not None and drift_notify.is_due(options.hook, document, previous):
            failures += _notify(options, options.hook, store, document)
    _show(document, options, failures)
    return drift_document.EXIT_CODES["unknown"] if failures else int(document["run"]["exit_code"])


def _check(options: Options, store: Store, run_id: str, signals: _Signals) -> Outcome:
    """Ask the hosts. Whatever goes wrong on the way is an outcome, and so gets into the reports."""
    expected: t.Optional[tuple[str, ...]] = None
    collector = Collector()
    status, rc = "error", None
    problems: list[str] = []
    gone: frozenset[str] = frozenset()
    notes: list[str] = []
    try:
        runner = _ansible_runner()
        with store.run_directory(run_id, KEPT_RUNS if options.keep_run else None) as directory:
            try:
                site = _Site(options, directory)
                with signals.interrupting():
                    listed = site.hosts()
                    expected = listed.hosts
                    try:
                        gone = site.gone(listed, _known(store))
                    except CheckError as error:
                        notes = [f"no host was taken out of the reports: {error}"]
                status, rc, problems = site.play(runner, collector, signals)
            finally:
                _end_children(str(directory), signals.children_before)
                if options.keep_run:
                    scrub(directory)
    except Interrupted as error:
        status, problems = "canceled", [str(error)]
    except CheckError as error:
        problems = [str(error)]
    answers = collector.hosts(expected or ())
    if answers and expected and all(answer.state != "no_answer" for answer in answers):
        # Everybody answered: what came to grief after that hides nothing.
        problems = []
    told = tuple(text(each, 1000) for each in problems)
    return Outcome(tuple(answers), status, rc, told, expected is not None, gone, tuple(notes))


def _known(store: Store) -> list[str]:
    """The hosts of the reports as they are now."""
    previous, _broken = store.latest()
    return [] if previous is None else [host["name"] for host in previous["hosts"]]


@dataclass(frozen=True)
class Play:
    """A play as --list-hosts shows it: whom it means, and who that is."""

    pattern: str
    hosts: tuple[str, ...]


class CheckError(Exception):
    """The run can't be made; the message says why and what to do."""


def _ansible_runner() -> t.Any:
    try:
        return importlib.import_module("ansible_runner")
    except ImportError as error:
        raise CheckError(
            f"ansible-runner can't be imported by {sys.executable} ({error}): "
            f"{sys.executable} -m pip install -r {ROOT / 'requirements' / 'drift.txt'}"
        ) from error


class _Site:
    """One run's playbook, arguments and environment, in a directory of its own."""

    def __init__(self, options: Options, directory: Path) -> None:
        self.options = options
        self.directory = directory
        self.program = self._program()
        project = directory / "project"
        # A collections folder beside the playbook comes first in Ansible's search: it is this very collection that
        # runs, whatever else is installed, and no setting of the user's is replaced.
        (project / "collections/ansible_collections/cleanslate").mkdir(parents=True)
        (project / "collections/ansible_collections/cleanslate/sglang").symlink_to(ROOT)
        self.playbook = project / "drift.yml"
        self.playbook.write_text(_WRAPPER)
        self.arguments = list(options.arguments)

    @staticmethod
    def _program() -> str:
        beside = Path(sys.executable).parent / "ansible-playbook"
        found = str(beside) if os.access(beside, os.X_OK) else shutil.which("ansible-playbook")
        if found is None:
            raise CheckError(f"there is no ansible-playbook beside {sys.executable} nor on the PATH")
        return found

    def environment(self) -> dict[str, str]:
        """What is added to our own environment."""
        added = {
            "PATH": os.pathsep.join([os.path.dirname(self.program), os.environ.get("PATH", os.defpath)]),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_DISPLAY_ARGS_TO_STDOUT": "0",  # a task's arguments hold the servers' secrets
        }
        control = self.directory / "cp"
        if "ANSIBLE_SSH_CONTROL_PATH_DIR" not in os.environ and len(os.fsencode(control)) <= _CONTROL_PATH_ROOM:
            # Masters of our own: nobody else's connection ends with them, and they end with the run.
            added["ANSIBLE_SSH_CONTROL_PATH_DIR"] = str(control)
        return added

    def hosts(self) -> Play:
        """The play whose hosts must answer: the playbook's first."""
        done = self._listed(self.arguments, self.playbook)
        plays = listed_plays(done.stdout)
        if not plays or not plays[0].hosts:
            where = ", ".join(self.options.inventory) or "Ansible's own inventory"
            why = last_error(done.stderr) or "its hosts, the limit and the target have nothing in common"
            raise CheckError(f"no host to check in {where}: {why}")
        return plays[0]

    def gone(self, listed: Play, known: t.Sequence[str]) -> frozenset[str]:
        """Of the hosts of the reports those that the inventory no longer has. Whatever way a run was narrowed, what it
        left out stays. The inventory is read once more only where something might be gone."""
        missing = set(known) - set(listed.hosts)
        if not missing or self.options.limit is not None:
            return frozenset()
        whole = self.directory / "project" / "whole.yml"
        whole.write_text(_WHOLE)
        plays = listed_plays(self._listed([*self.arguments, "--limit", "all"], whole).stdout)
        if len(plays) != 2:
            raise CheckError("the inventory's hosts can't be listed: ansible-playbook --list-hosts says something else")
        target, everybody = plays
        # Who left the default group is not meant any more. Another target may be a part of the fleet.
        still = target.hosts if listed.pattern == _DEFAULT_TARGET else (*target.hosts, *everybody.hosts)
        return frozenset(missing.difference(still))

    def _listed(self, arguments: t.Sequence[str], playbook: Path) -> Completed:
        """What --list-hosts says."""
        sources = [word for each in self.options.inventory for word in ("-i", each)]
        argv = [self.program, "--list-hosts", *sources, *arguments, str(playbook)]
        environment = {**os.environ, **self.environment(), "ANSIBLE_FORCE_COLOR": "0"}
        done = run_bounded(argv, LIST_DEADLINE_S, environment)
        if done.timed_out:
            raise CheckError(f"the inventory did not answer within {LIST_DEADLINE_S:.0f} s")
        if not done.ok:
            words = done.error or last_error(done.stderr + "\n" + done.stdout)
            raise CheckError(f"the hosts can't be listed (exit status {done.rc}): {words}")
        return done

    def play(self, runner: t.Any, collector: Collector, signals: _Signals) -> tuple[str, t.Optional[int], list[str]]:
        """(status, exit status, problems) of the playbook."""
        try:
            one = runner.interface.init_runner(
                private_data_dir=str(self.directory),
                project_dir=os.getcwd(),  # where Ansible looks for ansible.cfg
                playbook=str(self.playbook),
                inventory=list(self.options.inventory) or None,
                cmdline=shlex.join(self.arguments) or None,
                envvars=self.environment(),
                suppress_env_files=True,
                ident="run",
                quiet=True,
                timeout=max(1, int(self.options.timeout_s)),
                event_handler=collector.take,
                cancel_callback=signals.asked,
            )
            # ansible-runner switches the check of host keys off where nobody decided; that is not its to decide.
            if "ANSIBLE_HOST_KEY_CHECKING" not in os.environ:
                one.config.env.pop("ANSIBLE_HOST_KEY_CHECKING", None)
            with signals.alarm(self.options.timeout_s + STUCK_AFTER_S):
                one.run()
        except RunnerStuck:
            return "timeout", None, [f"ansible-runner did not come back {STUCK_AFTER_S:.0f} s after its timeout"]
        except Exception as error:  # of ansible-runner and pexpect: their own reasons, told as they are
            return "error", None, [f"ansible-runner: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
        return str(one.status), one.rc, self._problems(one, collector, signals)

    def _problems(self, one: t.Any, collector: Collector, signals: _Signals) -> list[str]:
        if signals.got is not None:
            return [signals.words()]
        if one.status == "timeout":
            return [f"the playbook did not end within {self.options.timeout_s:g} s (--timeout); it was ended"]
        if one.rc in _EXPECTED_RC and collector.finished:
            return []
        output = self.directory / "artifacts" / "run" / "stdout"
        words = ""
        with contextlib.suppress(OSError):
            words = last_error(output.read_text(encoding="utf-8", errors="replace")[-20000:])
        return [f"ansible-playbook ended with exit status {one.rc}: {words or 'it wrote nothing about it'}"]


def listed_plays(output: str) -> list[Play]:
    """What --list-hosts prints."""
    plays: list[tuple[str, list[str]]] = []
    inside = False
    for line in output.splitlines():
        start = re.match(r"^ {2}play #\d+ \((.*?)\): ", line)
        if start:
            plays.append((start.group(1), []))
            inside = False
        elif re.match(r"^ {4}hosts \(\d+\):$", line):
            inside = bool(plays)
        elif inside and line.startswith("      "):
            plays[-1][1].append(line.strip())
        elif inside:
            inside = False
    return [Play(pattern, tuple(names)) for pattern, names in plays]


def last_error(output: str) -> str:
    """Ansible's own words: its errors, else its warnings, else its last line."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    paragraphs = re.split(r"\n(?=\[|ERROR)|\n\s*\n", plain)
    for mark in (r"^(ERROR!|\[ERROR\]:)", r"^\[WARNING\]:"):
        found = [" ".join(each.split()) for each in paragraphs if re.match(mark, each.strip())]
        if found:
            return " ".join(found[:3])[:600]
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return lines[-1][:600] if lines else ""


def scrub(directory: Path) -> None:
    """A run's directory that is kept holds no secrets: ansible-runner writes its whole environment into it, and events
    show what was asked. A value that stands under a secret's name anywhere is masked everywhere."""
    kept: list[tuple[Path, str]] = []
    found: set[str] = set()
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        relative = path.relative_to(directory)
        if path.name == "command" or relative.parts[0] in ("env", "cp") or "fact_cache" in relative.parts:
            path.unlink()
            continue
        raw = path.read_text(encoding="utf-8", errors="replace")
        kept.append((path, raw))
        if path.suffix == ".json":
            found.update(_secrets_in(_parsed(raw)))
    redactor = Redactor(found)
    for path, raw in kept:
        event = _parsed(raw) if path.suffix == ".json" else None
        path.write_text(redactor.text(raw) if event is None else json.dumps(redactor.data(event)), encoding="utf-8")


def _parsed(raw: str) -> t.Any:
    """JSON, or None for what is none."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _secrets_in(value: t.Any, name: str = "") -> t.Iterator[str]:
    """Values under a secret's name: of a mapping, behind an option, as an environment variable, in JSON within JSON."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _secrets_in(each, str(key))
    elif isinstance(value, list):
        for before, each in zip(["", *value], value):
            yield from _secrets_in(each, before if isinstance(before, str) and before.startswith("--") else name)
    elif isinstance(value, str):
        if is_secret_name(name) and len(value) >= _SHORTEST_SECRET and value != MASK:
            yield value
        for option, variable, given in _ASSIGNED.findall(value):
            if len(given) >= _SHORTEST_SECRET and (is_secret_flag(option) if option else is_secret_variable(variable)):
                yield given
        if value.startswith(("{", "[")):
            yield from _secrets_in(_parsed(value))


# --- reports ----------------------------------------------------------------------------------------------------------


def publish(
    options: Options, store: Store, facts: drift_document.Run, outcome: Outcome
) -> tuple[JSON, t.Optional[JSON], list[str]]:
    """Write all files; returns the document, the one before, and what could not be written."""
    with store.locked():
        previous, broken = store.latest()
        if broken is not None:
            facts = replace(facts, notes=(*facts.notes, broken))
        answers = outcome.answers
        if not outcome.expected_known and options.limit is None and previous is not None:
            # Nobody could say whom to ask: all that were known are unknown now.
            why = "; ".join(outcome.problems)
            answers = tuple(HostAnswer(host["name"], "no_answer", why) for host in previous["hosts"])
        document = drift_document.build(facts, answers, previous, options.fresh_s, collection_version())
        document["notification"] = None if previous is None else previous["notification"]
        failures = _attempt(lambda: store.write(LATEST, _json(document)))
        failures += _attempt(
            lambda: store.add_history(drift_history.line_of(document), facts.finished, options.limits)
        )
        failures += _write_reports(options, store, document, facts.finished)
        failures += _attempt(lambda: store.write(JUNIT, drift_junit.render(document)))
    return document, previous, failures


def _write_reports(options: Options, store: Store, document: JSON, now: float) -> list[str]:
    metrics = drift_metrics.render(document)
    failures = _attempt(lambda: store.write(METRICS, metrics))
    if options.metrics is not None:
        target = options.metrics
        failures += _attempt(lambda: write_atomic(target, metrics))
    return failures + _attempt(lambda: store.write(PAGE, _page(store, document, now)))


def _page(store: Store, document: JSON, now: float) -> str:
    try:
        from .drift_page import render
    except ImportError as error:
        raise DriftFilesError(
            f"{PAGE}: Jinja2 can't be imported by {sys.executable} ({error}): "
            f"{sys.executable} -m pip install -r {ROOT / 'requirements' / 'drift.txt'}"
        ) from error
    return render(document, store.history(), now)


def _attempt(action: t.Callable[[], None]) -> list[str]:
    """A file that can't be written is no reason to leave the others."""
    try:
        action()
    except DriftFilesError as error:
        return [str(error)]
    return []


def _notify(options: Options, hook: drift_notify.Hook, store: Store, document: JSON) -> list[str]:
    """Call the hook and put into the reports how it went. Its failure is told, and is no verdict on the hosts."""
    told = drift_notify.tell(hook, document, str(options.out), drift_document.iso(time.time()))
    document["notification"] = told
    if not told["ok"]:
        _complain(f"notify: {told['command']}: {told['problem']}")
    with store.locked():
        latest, _broken = store.latest()
        if latest is None:
            return []
        latest["notification"] = told
        failures = _attempt(lambda: store.write(LATEST, _json(latest)))
        return failures + _write_reports(options, store, latest, time.time())


def _json(document: t.Mapping[str, t.Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def collection_version(root: Path = ROOT) -> t.Optional[str]:
    """Of an installed collection or of a checkout."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads((root / "MANIFEST.json").read_text())["collection_info"]["version"])
    with contextlib.suppress(OSError):
        found = re.search(r"^version:\s*(\S+)", (root / "galaxy.yml").read_text(), re.MULTILINE)
        return found.group(1) if found else None
    return None


def _show(document: t.Mapping[str, t.Any], options: Options, failures: t.Sequence[str]) -> None:
    """The outcome for who started it, and for the journal."""
    run_ = document["run"]
    lines = [f"drift: {run_['verdict']} ({run_['seconds']:g} s): {document['summary']}"]
    lines += [f"  run: {problem}" for problem in run_["problems"]]
    lines += [f"  note: {note}" for note in run_["notes"]]
    rows = [
        f"  {host['name']}: {drift_junit.sentence(row)[:400]}" if row["server"] is None
        else f"  {host['name']}/{row['server']}: {drift_junit.sentence(row)[:400]}"
        for host in document["hosts"]
        if host["in_this_run"]
        for row in drift_document.rows_of(host)
    ]
    lines += rows[:SHOWN_ROWS]
    if len(rows) > SHOWN_ROWS:
        lines.append(f"  and {len(rows) - SHOWN_ROWS} more rows")
    lines.append(f"  reports: {options.out} ({LATEST}, {HISTORY}, {METRICS}, {JUNIT}, {PAGE})")
    try:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has read enough; the reports are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for failure in failures:
        _complain(failure)


def _complain(words: str) -> None:
    sys.stderr.write(f"drift: error: {words}\n")
    sys.stderr.flush()


# --- signals and what is left behind ----------------------------------------------------------------------------------


class _Signals:
    """SIGTERM, SIGINT and SIGHUP end the run, not the reports."""

    def __init__(self) -> None:
        self.got: t.Optional[int] = None
        self.children_before = frozenset(_children())
        self._raising = False
        self._before: dict[int, t.Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._take)
        _become_reaper()
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _frame: t.Any) -> None:
        self.got = number
        if self._raising:
            raise Interrupted(self.words())

    def words(self) -> str:
        return f"the run was ended by {signal.Signals(self.got or signal.SIGTERM).name}"

    def asked(self) -> bool:
        """For ansible-runner: whether to end now."""
        return self.got is not None

    @contextlib.contextmanager
    def interrupting(self) -> t.Iterator[None]:
        """Inside of this a signal ends what is going on at once."""
        if self.got is not None:
            raise Interrupted(self.words())
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    @contextlib.contextmanager
    def alarm(self, seconds: float) -> t.Iterator[None]:
        """Inside of this RunnerStuck is raised once the time is over."""

        def ring(_number: int, _frame: t.Any) -> None:
            raise RunnerStuck

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _become_reaper() -> None:
    """Children of a process of ours that ends become ours, so that none is left behind unseen. Where the kernel
    refuses, systemd's cgroup still ends them."""
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def _end_children(ours: str, spared: t.Collection[int], deadline_s: float = 5.0) -> None:
    """End what ansible-playbook left running. Only our own unreaped children are signalled, so no pid can mean somebody
    else. Who was there before (a shell may have started something, and become us) is spared, and so is an ssh master
    that serves other runs too: its path is not below ``ours``."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        left = [pid for pid in _children() if pid not in spared and not _serves_others(pid, ours)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _children() -> list[int]:
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def _serves_others(pid: int, ours: str) -> bool:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return False
    return title.startswith("ssh:") and "[mux]" in title and ours not in title
