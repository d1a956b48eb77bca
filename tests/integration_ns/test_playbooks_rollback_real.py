# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Going back with the real modules and the stand-in server: what serves, what runs, and what is said at the end."""

from __future__ import annotations

import json
import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.harness.standin import STANDIN
from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost, summary_of

pytestmark = [pytest.mark.ns, pytest.mark.slow]
BAD = {"CRASH": "memory"}


@pytest.fixture
def host(ns: Namespace, tmp_path: Path) -> PlaybookHost:
    one = PlaybookHost(tmp_path, ns)
    one.follow_schedulers()
    one.servers = [one.server("demo", 31000, flags={"tp_size": 2})]
    return one


def break_it(host: PlaybookHost, **settings: t.Any) -> None:
    """The wanted configuration is one that does not come up."""
    host.servers[0] = host.server("demo", 31000, flags={"tp_size": 2}, faults=BAD, **settings)


def error_of(run: PlaybookRun) -> str:
    failed = [task for task in run.tasks if task.status == "failed" and not task.ignored]
    assert run.rc == 2, f"rc {run.rc}\n{run.stdout}\n{run.stderr}"
    return str(failed[-1].result["msg"])


def serving(ns: Namespace) -> list[int]:
    """The leaders that live."""
    return [pid for pid, title in ns.titles().items() if "sglang.launch_server" in title]


def link(host: PlaybookHost, name: str) -> str:
    return Path(os.readlink(host.directory / "state/demo" / name)).name


def lease_of(host: PlaybookHost) -> bool:
    return (host.directory / "state/demo/lease.json").exists()


def test_a_bad_configuration_goes_back_and_serves_then_by_hand(host: PlaybookHost, ns: Namespace) -> None:
    host.run("relaunch.yml").check()
    good = host.record("demo")["launch_id"]
    assert link(host, "last_good") == good

    break_it(host)
    run = host.run("relaunch.yml")
    message = error_of(run)
    assert "the new configuration failed (failed: " in message
    assert "Not enough memory" in message
    assert f"rolled back to {good}: serving" in message
    again = host.record("demo")
    assert again["from_launch"] == good
    assert serving(ns) == [again["pid"]]
    assert link(host, "last_good") == link(host, "current") == again["launch_id"]
    assert not lease_of(host)
    text = summary_of(run)
    assert f"rolled back to {good}: SERVING" in text
    assert max(map(len, text.splitlines())) <= 100

    failed = sorted(path.name for path in (host.directory / "state/demo/launches").iterdir())[1]
    folder = host.directory / "state/demo/launches" / failed
    for name in ("plan.json", "evict.json", "clean.json", "proof.json", "phases.json"):
        json.loads((folder / name).read_text())
    assert json.loads((folder / "proof.json").read_text())["verdict"] == "failed"

    seen = summary_of(host.run("inspect.yml").check())
    for words in ("Launches of demo", good, failed, again["launch_id"], "current good", "again from"):
        assert words in seen, seen

    by_hand = summary_of(host.run("rollback.yml", extra_vars={"launch": good}).check())
    assert "demo on gpu01: SERVING" in by_hand
    assert host.record("demo")["from_launch"] == good
    assert serving(ns) == [host.record("demo")["pid"]]


def test_where_the_last_good_one_is_broken_too_it_is_stopped_and_the_host_is_clean(
    host: PlaybookHost, ns: Namespace, tmp_path: Path
) -> None:
    """It can still be tried in check mode, and dies at its start: what it imports was changed since."""
    library = tmp_path / "library"
    library.mkdir()
    path = f"{STANDIN}:{library}"
    host.servers = [host.server("demo", 31000, flags={"tp_size": 2}, environment={"PYTHONPATH": path})]
    host.run("relaunch.yml").check()
    good = host.record("demo")["launch_id"]
    (library / "sitecustomize.py").write_text("import os\nos.environ['SGLANG_STANDIN_CRASH'] = 'memory'\n")
    break_it(host)
    message = error_of(host.run("relaunch.yml"))
    assert f"the rollback to {good} failed too (failed: " in message, message
    assert message.endswith("stopped, the host is clean"), message
    assert not [title for title in ns.titles().values() if "sglang" in title]
    assert not lease_of(host)
    assert "clean" in summary_of(host.run("assert_clean.yml").check())


def test_the_first_launch_ever_has_nothing_to_go_back_to(host: PlaybookHost, ns: Namespace) -> None:
    break_it(host)
    message = error_of(host.run("relaunch.yml"))
    assert "there is nothing to go back to" in message
    assert message.endswith("stopped, the host is clean"), message
    assert serving(ns) == []
    assert not lease_of(host)


def test_leave_and_stop(host: PlaybookHost, ns: Namespace) -> None:
    """One that hangs at its start still runs after 'leave', and does not after 'stop'."""
    host.servers[0] = host.server(
        "demo", 31000, flags={"tp_size": 2}, faults={"HANG": "sleep"}, ready_deadline_s=6, on_failure="leave"
    )
    message = error_of(host.run("relaunch.yml"))
    assert "it was left as it is (on_failure: leave): pid" in message, message
    left = serving(ns)
    assert left == [host.record("demo")["pid"]]
    assert not lease_of(host)
    message = error_of(host.run("relaunch.yml", extra_vars={"on_failure": "stop"}))
    assert message.endswith("stopped, the host is clean"), message
    assert serving(ns) == []
