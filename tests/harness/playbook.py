# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run ansible-playbook as a process, with a deadline, and read what each task returned.

    run = run_playbook(ROOT / "playbooks" / "teardown.yml", inventory=inventory, deadline_s=120, ns=ns)
    assert run.rc == 0 and run.result("gpu", "Evict").get("changed")

The results come from our own callback plugin (callback_plugins/harness_events.py), which writes one JSON object per
task and host into a file: nothing but ansible-core is needed, and the text for people stays what it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import typing as t
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.harness import tree
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT, run_command
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace

PLUGINS = Path(__file__).parent / "callback_plugins"
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """One task on one host. ``status``: ok, failed, skipped or unreachable; ``ignored``: a failure that went on."""

    host: str
    task: str
    action: str
    status: str
    ignored: bool
    result: dict[str, t.Any]


@dataclasses.dataclass(frozen=True)
class PlaybookRun:
    """rc: 0 ok, 2 failed, 4 unreachable, 1 usage."""

    rc: int
    stdout: str
    stderr: str
    tasks: tuple[TaskResult, ...]

    def check(self) -> PlaybookRun:
        """Itself, or an AssertionError with the output where rc is not 0."""
        assert self.rc == 0, f"rc {self.rc}\n{self.stdout}\n{self.stderr}"
        return self

    def named(self, task: str) -> list[TaskResult]:
        """The results of the tasks whose name contains ``task``."""
        return [result for result in self.tasks if task in result.task]

    def of_action(self, action: str) -> list[TaskResult]:
        """The results of one module (its short name will do)."""
        return [result for result in self.tasks if result.action == action or result.action.endswith(f".{action}")]


def run_playbook(
    playbook: Path | str,
    *arguments: str,
    scratch: Path,
    deadline_s: float,
    inventory: Path | str | None = None,
    extra_vars: t.Mapping[str, t.Any] | None = None,
    env: t.Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    check: bool = False,
    ns: Namespace | None = None,
) -> PlaybookRun:
    """Run a playbook (a path or an FQCN). ``scratch``: a directory of the test, also visible inside the namespace.

    Extra variables go through a file: none of them shows on a command line.
    """
    number = next(_numbers)
    events = scratch / f"events.{number}"
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), str(playbook), *arguments]
    argv += ["-i", str(inventory)] if inventory is not None else []
    argv += ["--check"] if check else []
    if extra_vars:
        variables = scratch / f"vars.{number}.json"
        variables.write_text(json.dumps(dict(extra_vars)))
        argv += ["-e", f"@{variables}"]
    environment = {**playbook_env(scratch), "HARNESS_EVENTS": str(events), **(env or {})}
    if ns is None:
        done = run_command(argv, deadline_s, env={**os.environ, **environment}, cwd=cwd)
    else:
        done = ns.run(argv, deadline_s, environment, cwd=cwd)
    return PlaybookRun(done.rc, done.stdout, done.stderr, read_events(events))


def playbook_env(scratch: Path) -> dict[str, str]:
    """Ansible's settings for tests: nothing in the user's home, the collection from the checkout, our callback."""
    return {
        "ANSIBLE_CALLBACK_PLUGINS": str(PLUGINS),
        "ANSIBLE_CALLBACKS_ENABLED": "harness_events",
        "ANSIBLE_COLLECTIONS_PATH": str(tree.collections()),
        "ANSIBLE_HOME": str(scratch / "ansible"),
        "ANSIBLE_LOCAL_TEMP": str(scratch / "ansible" / "local"),
        "ANSIBLE_REMOTE_TEMP": str(scratch / "ansible" / "remote"),
        "ANSIBLE_LOCALHOST_WARNING": "0",
        "ANSIBLE_INVENTORY_UNPARSED_WARNING": "0",
        "ANSIBLE_NOCOLOR": "1",
    }


def read_events(path: Path) -> tuple[TaskResult, ...]:
    """The callback's file; nothing where the run ended before its first task."""
    if not path.exists():
        return ()
    return tuple(TaskResult(**json.loads(line)) for line in path.read_text().splitlines())


def run_task(
    module: str,
    arguments: t.Mapping[str, t.Any],
    *,
    scratch: Path,
    deadline_s: float,
    ns: Namespace | None = None,
    env: t.Mapping[str, str] | None = None,
    check: bool = False,
) -> TaskResult:
    """One module (FQCN) on localhost through the whole of Ansible. A failed task is returned, not raised."""
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars": {"ansible_python_interpreter": sys.executable},
        "tasks": [{"name": "the task", module: dict(arguments)}],
    }
    path = scratch / f"task.{next(_numbers)}.yml"
    path.write_text(json.dumps([play]))
    run = run_playbook(
        path, scratch=scratch, deadline_s=deadline_s, inventory="localhost,", env=env, check=check, ns=ns
    )
    assert len(run.tasks) == 1, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    return run.tasks[0]
