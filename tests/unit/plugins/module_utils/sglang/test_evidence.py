# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Evidence in words, and that none of it shows a secret."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.evidence import (
    MAX_STACK_LINES,
    Evidence,
    MemoryEvidence,
    ProcessEvidence,
    activity_word,
    kernel_line,
    parse_py_spy,
    telling,
    top_frames,
    words_of,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.phases import Phase
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.ready import Leader, PortOwner, Readiness
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.record import Record
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import Redactor
from ansible_collections.cleanslate.sglang.plugins.modules import server_ready

DUMP = """\
Process 101: sglang::scheduler

Thread 140 (idle): "worker"
    wait (threading.py:320)
Thread 101 (active): "MainThread"
    recv (/usr/lib/python3.11/multiprocessing/connection.py:250)
    wait (sglang/srt/entrypoints/engine.py:1370)
    launch (engine.py:9)
    main (launch_server.py:1)
"""
SECRET = "s3cr3t-and-long"


def process(**changes: t.Any) -> ProcessEvidence:
    values: dict[str, t.Any] = {
        "pid": 812,
        "title": "sglang::scheduler",
        "role": "scheduler",
        "state": "R",
        "activity": "busy",
        "cpu_percent": 99.0,
        "wchan": None,
        "threads": 4,
    }
    return ProcessEvidence(**{**values, **changes})


@pytest.mark.parametrize(
    ("state", "percent", "word"),
    [
        ("T", 99.0, "stopped"),
        ("t", None, "stopped"),
        ("Z", None, "dead"),
        ("X", None, "dead"),
        ("D", 0.0, "waiting"),
        ("S", 0.0, "sleeping"),
        ("R", None, "sleeping"),
        ("S", 95.0, "busy"),
    ],
)
def test_a_state_in_a_word(state: str, percent: float | None, word: str) -> None:
    assert activity_word(state, percent) == word


def test_the_main_thread_goes_first_and_its_innermost_frames_are_told() -> None:
    stack = parse_py_spy(DUMP)
    assert stack[0] == 'Thread 101 (active): "MainThread"'
    assert stack[-1] == "    wait (threading.py:320)"
    assert top_frames(stack) == "recv (connection.py:250) < wait (engine.py:1370) < launch (engine.py:9)"
    assert top_frames([]) is None


def test_a_deep_stack_is_cut() -> None:
    deep = 'Thread 1 (active): "MainThread"\n' + "    f (x.py:1)\n" * 500
    assert len(parse_py_spy(deep)) == MAX_STACK_LINES


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[<0>] futex_wait_queue+0x60/0x90", "kernel: futex_wait_queue+0x60/0x90"),
        ("[<0>] 0xffffffffffffffff", None),
        ("", None),
    ],
)
def test_a_kernel_line(line: str, shown: str | None) -> None:
    assert kernel_line(line) == shown


def test_the_words_of_a_process() -> None:
    stack = tuple(parse_py_spy(DUMP))
    assert words_of(process(stack=stack, stack_source="py-spy")).startswith(
        "scheduler pid 812 is busy (CPU 99 %), its stack: recv (connection.py:250) < "
    )
    waiting = process(state="D", activity="waiting", wchan="nvidia_wait", role="leader")
    assert words_of(waiting) == "the server itself pid 812 is waiting in the kernel (nvidia_wait)"
    asleep = process(activity="sleeping", cpu_percent=0.0, stack=("kernel: futex_wait+0x1",), stack_source="kernel")
    assert words_of(asleep) == "scheduler pid 812 is sleeping (CPU 0 %), its kernel stack: futex_wait+0x1"


def test_the_process_that_tells_most() -> None:
    leader = process(pid=1, role="leader", cpu_percent=100.0)
    idle, busy = process(pid=2, cpu_percent=1.0), process(pid=3, cpu_percent=80.0)
    stopped, dead = process(pid=4, activity="stopped"), process(pid=5, activity="dead")
    assert telling([leader, idle, busy]) == busy
    assert telling([leader, idle, busy], 2) == idle
    assert telling([leader, busy, stopped]) == stopped
    assert telling([leader, dead], 5) == leader
    assert telling([dead]) is None


def readiness() -> Readiness:
    """A secret wherever one may come from."""
    return Readiness(
        verdict="hung",
        finished=True,
        phase="weights",
        phases=(Phase("weights", 3, detail=SECRET),),
        progress_line=f"weights {SECRET}",
        leader=Leader(100, 5),
        port_owner=None,
        proof=None,
        evidence=Evidence(
            log_error=f"ValueError: {SECRET}",
            last_lines=(f"api_key='{SECRET}'", "hf_token='hf_abcdefghijklmnopqrstuvwxyz'"),
            processes=(
                process(
                    title=f"python --api-key {SECRET} --admin-api-key other-secret",
                    stack=(f"    f (x.py:1) {SECRET}",),
                    stack_problem=f"py-spy: {SECRET}",
                ),
            ),
            gpus=None,
            gpus_problem=None,
            memory=MemoryEvidence(),
            port=f"pid 1 {SECRET}",
        ),
        total_tokens=None,
        error=f"its log says: {SECRET}",
        log=f"server_args=ServerArgs(api_key='{SECRET}', admin_api_key='other-secret')\n",
        seconds=3.0,
        watch=None,
    )


def test_no_secret_is_shown() -> None:
    record = Record("main", "20260131T235959Z-1a2b", "started", "detached")
    shown = json.dumps(server_ready.result_of(readiness(), record, 30000, Redactor([SECRET]), 40))
    for secret in (SECRET, "other-secret", "hf_abcdefghijklmnopqrstuvwxyz"):
        assert secret not in shown
    assert "scheduler" in shown
    assert "--api-key" in shown


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record("main", "20260131T235959Z-1a2b", "started", "detached")
    redactor = Redactor([SECRET])
    written: dict[str, t.Any] = {}

    def write(state_dir: str, name: str, launch_id: str, what: str, data: t.Any, _redactor: Redactor) -> None:
        written[what] = data

    monkeypatch.setattr(server_ready, "write_document", write)
    monkeypatch.setattr(server_ready, "write_summary", lambda *_where: None)
    monkeypatch.setattr(server_ready, "mark_good", lambda *_where: pytest.fail("it is hung"))
    result = server_ready.result_of(readiness(), record, 30000, redactor, 40)
    server_ready.keep_record(result, record, str(tmp_path), redactor)
    assert sorted(written) == ["phases", "proof"]
    assert written["proof"]["verdict"] == "hung"
    assert SECRET not in json.dumps(written)
    assert "other-secret" not in json.dumps(written)


def test_the_owner_of_the_port_is_shown_as_it_was_redacted() -> None:
    """Titles are cut when they are read: `eyes_of` shows command lines by the redactor."""
    params = {name: None for name in ("host", "port", "model", "dp_size")}
    record = Record("main", "20260131T235959Z-1a2b", "started", "detached")
    eyes = server_ready.eyes_of({**params, "nvml_deadline_s": 1.0}, record, Redactor([SECRET]), SECRET)
    owner = PortOwner(1, eyes._title(["python", "--api-key", SECRET, "--admin-api-key=other-secret"]), True)
    assert SECRET not in str(owner.title)
    assert "other-secret" not in str(owner.title)
