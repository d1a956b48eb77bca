# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The step runner: outcomes, deadlines, what it leaves behind, and its counts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.tools.runner import (
    Result,
    Step,
    closing_counts,
    counts_of,
    skip_reasons,
    summary,
    telling_lines,
)

COLLECTIONS = Path(__file__).resolve().parents[3] / ".collections"


def result(outcome: str, detail: str) -> Result:
    return Result(Step("a", ("true",), 1), outcome, 0.0, detail, None)


def run_steps(tmp_path: Path, steps: str, budget: str = "None") -> subprocess.CompletedProcess[str]:
    """Run steps in a Python of their own: the runner adopts and kills orphans of its whole process."""
    code = f"""
        import sys
        from pathlib import Path
        from ansible_collections.cleanslate.sglang.tests.tools.runner import Runner, Step, summary
        results = Runner(Path({str(tmp_path / "logs")!r}), budget_s={budget}).run([{steps}])
        sys.exit(summary(results, 0.0))
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(COLLECTIONS)},
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("3 passed in 0.10s", "3 passed"),
        ("===== 1 failed, 20 passed, 2 skipped in 61.00s (0:01:01) =====", "1 failed, 20 passed, 2 skipped"),
        ("4 passed, 1 warning in 2.00s\nlater words", "4 passed, 1 warning"),
        ("no tests ran in 0.01s", ""),
        ("cloned in 3s", ""),
    ],
)
def test_closing_counts(text: str, counts: str) -> None:
    assert closing_counts(text) == counts


def test_skip_reasons_are_named_once() -> None:
    text = "SKIPPED [2] tests/lab/test_a.py:3: not root\nskipped: no GPU\nskipped: no GPU\n"
    assert skip_reasons(text) == ["2x tests/lab/test_a.py:3: not root", "skipped: no GPU"]


def test_telling_lines_prefer_marked_errors() -> None:
    assert telling_lines("Collecting x\nERROR: a.py:1: wrong\nmore\n") == ["ERROR: a.py:1: wrong"]
    assert telling_lines("one\ntwo\n") == ["one", "two"]


@pytest.mark.parametrize(
    ("outcome", "detail", "counts"),
    [
        ("passed", "3 passed, 1 skipped", {"passed": 3, "skipped": 1}),
        ("passed", "", {"passed": 1}),
        ("failed", "2 failed, 3 passed", {"failed": 2, "passed": 3}),
        ("failed", "1 passed, 2 errors", {"failed": 2, "passed": 1}),
        ("failed", "3 passed; no end after 9 s", {"passed": 3, "failed": 1}),
        ("skipped", "no Python 3.12", {"skipped": 1}),
    ],
)
def test_counts_of_a_step(outcome: str, detail: str, counts: dict[str, int]) -> None:
    assert dict(counts_of(result(outcome, detail))) == counts


def test_a_run_where_nothing_passed_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert summary([result("skipped", "nothing here")], 1.0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 0 failed, 1 skipped in 1 s"


def test_a_failing_step_fails_the_run_and_the_others_still_run(tmp_path: Path) -> None:
    done = run_steps(tmp_path, 'Step("bad", ("false",), 20), Step("good", ("echo", "2 passed in 0.1s"), 20)')
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("2 passed, 1 failed, 0 skipped in")


def test_a_step_past_its_deadline_is_ended_with_what_it_started(tmp_path: Path) -> None:
    script = f"setsid sleep 600 & echo $! > {tmp_path}/pid; sleep 600"
    done = run_steps(tmp_path, f'Step("slow", ("sh", "-c", {script!r}), 1.0)')
    assert "no end after 1 s" in done.stdout
    assert done.returncode == 1
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_a_passing_step_leaves_no_process_behind(tmp_path: Path) -> None:
    script = f"setsid sleep 600 & echo $! > {tmp_path}/pid"
    done = run_steps(tmp_path, f'Step("forgetful", ("sh", "-c", {script!r}), 20.0)')
    assert done.returncode == 0
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    assert "sleep 600" in (tmp_path / "logs" / "forgetful.log").read_text()


def test_steps_after_the_budget_fail_without_a_start(tmp_path: Path) -> None:
    steps = f'Step("first", ("sleep", "600"), 300, alone=True), Step("second", ("touch", {str(tmp_path / "ran")!r}), 5)'
    done = run_steps(tmp_path, steps, budget="1.0")
    assert "the time for the whole run is used up" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("0 passed, 2 failed")
    assert not (tmp_path / "ran").exists()
