# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a launch leaves on the host, and that the same can be started again from it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import history
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record as records
from ansible_collections.cleanslate.sglang.tests.harness.modules import ModuleResult, module_env, run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.integration_ns.test_launch_server import Site

pytestmark = pytest.mark.ns

KEY = "sk-record-Secret-1"
TOKEN = "hf-record-Secret-2"
CUT = Path(__file__).parent / "cut_launch.py"
NEVER = 10**6
MOST_CUTS = 110


@pytest.fixture
def site(ns: Namespace, tmp_path: Path) -> Site:
    return Site(ns, tmp_path)


def folder_of(site: Site, result: ModuleResult) -> Path:
    return site.state / "main" / "launches" / str(result.json["launch_id"])


def again(site: Site, wanted: str, *, check: bool = False, **changes: t.Any) -> ModuleResult:
    arguments = {"name": "main", "state_dir": str(site.state), "from_launch": wanted, **changes}
    return run_module("server_launch", arguments, 60, ns=site.ns, check=check)


def seen_by_the_kernel(site: Site, result: ModuleResult) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a server's process."""
    folder = site.ns.proc / str(result.json["pid"])
    argv = (folder / "cmdline").read_bytes().decode().split("\0")[:-1]
    environment = (folder / "environ").read_bytes().decode().split("\0")[:-1]
    return argv, dict(word.split("=", 1) for word in environment)


def proved(site: Site, **changes: t.Any) -> ModuleResult:
    launched = site.started(**changes)
    ready = site.ready(record=True)
    assert ready.json["ready"] is True, ready.json
    return launched


def test_everything_about_a_launch_lies_in_its_folder(site: Site) -> None:
    documents = {
        "plan": {"verdict": "approved", "note": KEY},
        "evict": {"verdict": "evicted", "log": ["x" * 1000] * 2000},
        "clean": {"verdict": "clean", "api_key": "sk-other-secret"},
    }
    launched = site.started(
        api_key=KEY, secret_environment={"ANY": TOKEN}, documents=documents, operator="alice", run_id=None
    )
    ready = site.ready(record=True)
    assert ready.json["ready"] is True, ready.json
    folder = folder_of(site, launched)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(
        (
            *("config.yaml", "env", "record.json", "request.json", "server.log", "summary.txt"),
            *("plan.json", "evict.json", "clean.json", "phases.json", "proof.json"),
        ),
        0o600,
    )
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    with_secrets = {name for name, text in texts.items() if KEY in text or TOKEN in text or "sk-other" in text}
    assert with_secrets == {"config.yaml", "env", "server.log"}  # SGLang itself prints its key
    assert (folder / "evict.json").stat().st_size <= 256 * 1024
    assert json.loads(texts["evict.json"])["verdict"] == "evicted"
    assert json.loads(texts["proof.json"])["verdict"] == "ready"
    for words in ("by alice", "ready after", "clean state: clean", "soak: 8 requests"):
        assert words in texts["summary.txt"], texts["summary.txt"]
    for link in ("current", "last_good"):
        assert os.readlink(site.state / "main" / link) == f"launches/{launched.json['launch_id']}"
    [server] = site.info(name="main", api_key=KEY).json["servers"]
    [row] = server["launches"]
    assert (row["verdict"], row["current"], row["last_good"], row["operator"]) == ("ready", True, True, "alice")
    assert row["seconds_to_ready"] > 0
    assert row["tokens_per_s"] > 0


@pytest.mark.promise
def test_a_kept_launch_starts_exactly_what_ran_then(site: Site) -> None:
    """The bytes of its files, and what the kernel shows of its process."""
    first = proved(
        site,
        api_key=KEY,
        secret_environment={"ANY": TOKEN},
        flags={"tp_size": 2, "served_model_name": 'a "b" \u20ac', "reasoning_parser": "kimi_k2"},
        environment={"NCCL_DEBUG": "IN FO"},
        waivers={"some_guardrail": "for a test"},
    )
    before = seen_by_the_kernel(site, first)
    files = {name: (folder_of(site, first) / name).read_bytes() for name in ("config.yaml", "env")}
    site.kill_all()
    site.started(flags={"tp_size": 1})
    site.kill_all()
    would = again(site, "last_good", check=True)
    assert not would.failed, would.json
    assert (would.json["launch_id"], would.json["from_launch"]) == (None, first.json["launch_id"])
    record = would.json["record"]
    assert (record["port"], record["device"], record["gpus"], record["flags"]["tp-size"]) == (30000, "cpu", None, 2)
    assert not site.ns.living()
    second = again(site, "last_good", operator="bob")
    assert not second.failed, second.json
    old, new = first.json["launch_id"], second.json["launch_id"]
    argv, environment = seen_by_the_kernel(site, second)
    assert argv == [word.replace(old, new) for word in before[0]]
    assert environment == before[1]
    assert {name: (folder_of(site, second) / name).read_bytes() for name in files} == files
    assert second.json["config_hash"] == first.json["config_hash"]
    changed = {
        key
        for key, value in second.json["record"].items()
        if json.loads(json.dumps(value).replace(new, old)) != first.json["record"][key]
    }
    assert changed == {"pid", "start_ticks", "sid", "started_at", "from_launch", "operator"}
    assert KEY not in json.dumps(second.json)
    assert TOKEN not in json.dumps(second.json)
    ready = site.ready(record=True, reasoning_parser="kimi_k2")
    assert ready.json["ready"] is True, ready.json
    assert os.readlink(site.state / "main" / "last_good") == f"launches/{new}"
    # And that one again, by its id.
    site.kill_all()
    third = again(site, new)
    assert not third.failed, third.json
    assert {name: (folder_of(site, third) / name).read_bytes() for name in files} == files


def test_what_is_gone_is_an_error_before_anything_is_touched(site: Site, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    launched = proved(site, python=str(python))
    folder = folder_of(site, launched)
    living = site.ns.living()

    def refused(*words: str, wanted: str = "last_good") -> None:
        before = sorted(str(path) for path in site.state.rglob("*"))
        result = again(site, wanted, check=True)
        assert result.failed, result.json
        for word in words:
            assert word in result.json["msg"]
        assert sorted(str(path) for path in site.state.rglob("*")) == before
        assert site.ns.living() == living

    assert not again(site, "last_good", check=True).failed
    site.model.rename(tmp_path / "away")
    refused(f"launch {launched.json['launch_id']} of 'main' can't be started again", "model_path", "is missing")
    (tmp_path / "away").rename(site.model)
    python.unlink()
    refused("can't be started again", f"python: {python} is missing")
    python.symlink_to(sys.executable)
    request = json.loads((folder / "request.json").read_text())
    for changes, words in (
        ({"user": "nobody-such"}, "user: 'nobody-such' does not exist"),
        ({"gpus": [[0, "GPU-gone"]]}, "GPU-gone"),
    ):
        (folder / "request.json").write_text(json.dumps({**request, **changes}))
        refused("can't be started again", words)
    (folder / "request.json").unlink()
    refused("no request.json")
    refused("kept are", launched.json["launch_id"], wanted="20260101T000000Z-0000")
    refused("but the current one was proved", wanted="previous")
    (site.state / "main" / "last_good").unlink()
    refused("no launch of 'main' was proved yet")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"from_launch": "last_good", "flags": {"model_path": "/m"}}, ["mutually exclusive", "from_launch"]),
        ({"from_launch": "last_good", "api_key": "sk-long"}, ["mutually exclusive", "api_key"]),
        ({}, ["from_launch, python"]),
        ({"from_launch": "last_good", "keep_launches": 1}, ["keep_launches is 1"]),
        ({"from_launch": "last_good", "operator": "a\nb"}, ["operator"]),
        ({"from_launch": "last_good", "run_id": "../x"}, ["run_id"]),
        ({"from_launch": "../../etc"}, ["no launch is kept"]),
        ({"from_launch": "last_good", "name": "../x"}, ["name of a server"]),
    ],
)
def test_what_makes_no_sense_is_refused(site: Site, changes: dict[str, t.Any], words: list[str]) -> None:
    result = run_module("server_launch", {"name": "main", "state_dir": str(site.state), **changes}, 60, ns=site.ns)
    assert result.failed
    for word in words:
        assert word in result.json["msg"]
    assert not site.state.exists()


def test_a_start_that_can_not_be_recorded_is_no_start(site: Site) -> None:
    site.started()
    site.kill_all()
    (site.state / "main" / "last_good").mkdir()
    for check in (True, False):
        result = site.launch(check=check)
        assert result.failed
        assert "last_good is no link" in result.json["msg"]
    assert not site.ns.living()


def test_a_refused_start_leaves_no_folder(site: Site) -> None:
    """The server's user can't read its configuration, since the state directory lies in a closed folder."""
    site.state.mkdir(mode=0o700)
    result = site.launch(user="nobody", python="/usr/bin/python3", flags={"model_path": "/usr"})
    assert result.failed
    assert "can't read" in result.json["msg"]
    assert os.listdir(site.state / "main" / "launches") == []
    assert not (site.state / "main" / "current.json").exists()


def test_launches_are_kept_up_to_their_number_and_their_logs_up_to_their_size(site: Site) -> None:
    good = proved(site, keep_launches=3)
    site.kill_all()
    with (folder_of(site, good) / "server.log").open("r+b") as log:
        log.truncate(20 << 20)
    others = []
    for _round in range(4):
        others.append(site.started(keep_launches=3).json["launch_id"])
        site.kill_all()
    left = sorted(os.listdir(site.state / "main" / "launches"))
    assert left == sorted([good.json["launch_id"], *others[-2:]])
    assert (folder_of(site, good) / "server.log").stat().st_size < 6 << 20
    rows = site.info().json["records"][0]["launches"]
    assert [(row["launch_id"], row["verdict"], row["current"], row["last_good"]) for row in rows] == [
        (others[-1], None, True, False),
        (others[-2], None, False, False),
        (good.json["launch_id"], "ready", False, True),
    ]
    assert not again(site, "last_good").failed


def cut(site: Site, launch: str, *states: tuple[Path, int]) -> list[int]:
    """Start in each state directory, cut before that change: 9 where it was cut, 0 where it came to its end."""
    words = [f"{state}:{number}" for state, number in states]
    done = site.ns.run([sys.executable, str(CUT), launch, *words], 240, module_env())
    assert done.rc == 0, done.stderr
    assert not done.stderr, done.stderr
    return [int(line) for line in done.stdout.split()]


def launch_id(number: int) -> str:
    return f"20260101T{number // 60:02}{number % 60:02}00Z-0000"


def test_a_run_that_is_killed_between_any_two_writes_leaves_a_record_that_can_be_used(
    site: Site, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    for number in (1, 2, 3):
        assert cut(site, launch_id(number), (base, NEVER)) == [0]
    states = []
    for number in range(1, MOST_CUTS + 1):
        states.append(tmp_path / f"cut{number}")
        shutil.copytree(base, states[-1], symlinks=True)
        for path in (states[-1] / "main").rglob("*.json"):  # the copies name their own place
            path.write_text(path.read_text().replace(str(base), str(states[-1])))
    ends = cut(site, launch_id(100), *((state, number) for number, state in enumerate(states, 1)))
    cuts = ends.index(0)
    assert ends == [9] * cuts + [0] * (MOST_CUTS - cuts)
    assert cuts > 40
    for state in states[:cuts]:
        reading = records.read_record(str(state), "main")
        assert reading.problem is None, state
        assert reading.record is not None
        assert reading.record.launch_id in (launch_id(3), launch_id(100)), state
        rows = history.list_launches(str(state), "main")
        [current] = [row for row in rows if row.current]
        assert (current.problem, current.startable) == (None, True), state
        for row in rows:  # what is listed without a problem can be started again
            if row.problem is None:
                history.read_kept(str(state), "main", row.launch_id)
    # And the next run goes on, and leaves nothing of it behind.
    assert cut(site, launch_id(200), *((state, NEVER) for state in states[:cuts])) == [0] * cuts
    for state in states[:cuts]:
        rows = history.list_launches(str(state), "main")
        assert [row.problem for row in rows] == [None, None], (state, rows)
        assert rows[0].launch_id == launch_id(200)
        assert sorted(os.listdir(state / "main" / "launches")) == sorted(row.launch_id for row in rows), state
        assert os.readlink(state / "main" / "current") == f"launches/{launch_id(200)}"
