# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each row of the fault matrix in LXC containers whose entry point is a module is a test; and what their looks see."""

from __future__ import annotations

import os
import signal
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.faults import lab_site, matrix, rows_lab, runner
from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Row
from ansible_collections.cleanslate.sglang.tests.harness.trace import strace_missing
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import why_not

pytestmark = [
    pytest.mark.lab,
    pytest.mark.long(25),
    pytest.mark.timeout(900),
    pytest.mark.skipif(strace_missing() is not None, reason="strace is not installed"),
]


@pytest.fixture(scope="module", autouse=True)
def shared_lab() -> t.Iterator[None]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    yield
    lab_site.close_shared()


@pytest.mark.parametrize("row", rows_lab.ROWS, ids=lambda row: row.id)
def test_row(row: Row, tmp_path: Path) -> None:
    outcome = runner.run_row(row, tmp_path)
    assert outcome.result == "ok", matrix.line(row, outcome) + f"\n{outcome.detail}"


SIGNAL = "import os, signal; signal.pidfd_send_signal(os.pidfd_open({pid}), signal.SIGCONT)"


def test_who_survives_a_signal_is_seen_on_both_sides(tmp_path: Path) -> None:
    with lab_site.opened(tmp_path / "site", 60) as site:
        (visitor,) = site.box.find("--write-only")
        node = next(pid for (pid, _unused), name in site.shared.names.items() if name == "the node's editor")

        def signal_both() -> Answer:
            site.box.run([lab_site.TRACED_PYTHON, "-c", SIGNAL.format(pid=visitor.pid)], 30).check()
            site.node.run([site.shared.interpreter, "-c", SIGNAL.format(pid=node)], 30).check()
            return Answer("done")

        site.look(signal_both)
        assert site.facts is not None and site.facts.signalled == ("the node's editor", "visitor"), site.facts
        assert not site.facts.died, site.facts


def test_a_container_is_used_again_as_long_as_it_is_what_it_was(tmp_path: Path) -> None:
    """What a row brought is gone before the next one; a container that lost somebody is given up."""
    with lab_site.opened(tmp_path / "first", 60) as site:
        init = site.box.outer_init
        brought = site.unit("somebodys", 30000, restart="always")
        (site.box.root / "dev/shm/somebodys").write_text("1")
        (site.box.root / "var/lib/cleanslate/chat").mkdir(parents=True)
        site.look(lambda: Answer("seen"))
        assert site.facts is not None and not site.facts.died + site.facts.signalled + site.facts.stayed
    with lab_site.opened(tmp_path / "second", 60) as site:
        assert site.box.outer_init == init and not site.shared.notes
        assert not brought & lab_site.members({site.guest.vmid})
        (editor,) = [one.outer_pid for one in site.box.find("vim ")]

        def lose_one() -> Answer:
            os.kill(editor, signal.SIGKILL)
            argv = ["setsid", "--fork", "sleep", "3000"]
            site.box.run(argv, 30).check()
            wait_for("another one", lambda: site.box.find("sleep 3000"))
            return Answer("done")

        site.settle_s = 0.5
        site.look(lose_one)
        assert site.facts is not None and site.facts.died == ("editor",), site.facts
        assert [words.endswith("sleep 3000") for words in site.facts.stayed] == [True], site.facts
    assert len(site.shared.notes) == 1 and f"died: pid {editor}" in site.shared.notes[0], site.shared.notes
    site.shared.notes.clear()
    with lab_site.opened(tmp_path / "third", 60) as site:
        assert site.box.outer_init != init
