# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Slice after slice until the module has its verdict, and what people see meanwhile."""

from __future__ import annotations

import types
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.action import server_ready


class Clock:
    """A time that moves by what is asked of it."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Run:
    """The plugin with scripted answers of the module; the last one stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, t.Any]], step: float = 0.0) -> None:
        self.given: list[dict[str, t.Any]] = []
        self.shown: list[str] = []
        self.answers = answers
        monkeypatch.setattr(server_ready, "time", Clock(step))
        monkeypatch.setattr(server_ready.display, "display", lambda line, **_words: self.shown.append(line))
        self.plugin = object.__new__(server_ready.ActionModule)
        self.plugin._task = t.cast(t.Any, types.SimpleNamespace(delegate_to=None))
        monkeypatch.setattr(self.plugin, "_slice", self._slice, raising=False)

    def _slice(self, arguments: dict[str, t.Any], variables: t.Any, background: bool = False) -> dict[str, t.Any]:
        self.given.append(arguments)
        return dict(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

    def watch(self, peers: server_ready.Peers | None = None, **arguments: t.Any) -> dict[str, t.Any]:
        variables = {"inventory_hostname": "gpu01"}
        result: dict[str, t.Any] = self.plugin._watch({"name": "chat", **arguments}, variables, 5.0, peers)
        return result


def under_way(phase: str, number: int = 1, line: str | None = None) -> dict[str, t.Any]:
    return {"finished": False, "phase": phase, "progress_line": line or f"{phase} line", "watch": {"n": number}}


READY = {"finished": True, "verdict": "ready", "watch": None}


def test_each_slice_gets_what_the_one_before_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [under_way("imports", 1), under_way("weights", 2), READY])
    result = run.watch(deadline_s=600)
    assert [given.get("watch") for given in run.given] == [None, {"n": 1}, {"n": 2}]
    assert {(given["slice_s"], given["deadline_s"]) for given in run.given} == {(5.0, 600)}
    assert (result["verdict"], "watch" in result) == ("ready", False)
    assert result["progress"] == run.shown == ["chat on gpu01: imports line", "chat on gpu01: weights line"]


def test_a_phase_is_told_at_once_and_then_every_quarter_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Run(monkeypatch, [*[under_way("weights") for _unused in range(20)], READY], step=0.1)
    assert len(quick.watch()["progress"]) == 1
    slow = Run(monkeypatch, [*[under_way("weights") for _unused in range(20)], READY], step=8.0)
    assert len(slow.watch()["progress"]) > 5


def test_the_beginning_of_the_proof_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = under_way("warm_up", 2, "warm_up, 3 s; it answers, the proof begins")
    run = Run(monkeypatch, [under_way("warm_up"), proof, READY])
    assert len(run.watch()["progress"]) == 2


@pytest.mark.parametrize("answer", [{"failed": True, "msg": "no launch"}, {"failed": True, "finished": False}])
def test_a_failure_of_the_module_ends_it_as_it_is(answer: dict[str, t.Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [under_way("imports"), answer])
    assert run.watch() == {**answer, "progress": ["chat on gpu01: imports line"]}
    assert len(run.given) == 2


def test_a_module_that_never_ends_is_ended_beyond_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [under_way("imports")], step=100.0)
    result = run.watch(deadline_s=50)
    assert result["failed"] is True
    assert "beyond its own deadline" in result["msg"]
    assert len(run.given) < 20


def test_an_answer_without_what_was_seen_is_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, [{**under_way("imports"), "watch": None}])
    assert run.watch()["failed"] is True
    assert len(run.given) == 1


@pytest.mark.parametrize("value", [0, -1, "soon", None, True, float("nan"), float("inf")])
def test_a_slice_of_no_length_is_refused(value: t.Any) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        server_ready._seconds(value)
    assert server_ready._seconds("2.5") == 2.5


# --- nodes of one server ----------------------------------------------------------------------------------------------

PROVED = {"finished": True, "ready": True, "verdict": "ready", "watch": None}
DEAD = {"finished": True, "ready": False, "verdict": "failed", "error": "no memory", "failed": True}


def nodes(folder: Path) -> tuple[server_ready.Peers, server_ready.Peers]:
    hosts = ["gpu01", "gpu02"]
    return server_ready.Peers(folder / "unit", "gpu01", hosts), server_ready.Peers(folder / "unit", "gpu02", hosts)


def test_a_node_ends_with_the_first_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = nodes(tmp_path)
    other.tell("failed", "hung: no progress")
    run = Run(monkeypatch, [under_way("weights")])
    result = run.watch(ours, deadline_s=600)
    assert (result["failed"], result["ready"], result["peer_failed"]) == (True, False, True)
    assert result["error"] == "another node of it failed, gpu02: hung: no progress"
    assert result["phase"] == "weights"
    assert len(run.given) == 1
    # What it was told is not its own word: nobody fails for that.
    assert other.failed() == ""


def test_a_node_that_fails_tells_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = nodes(tmp_path)
    Run(monkeypatch, [under_way("weights"), DEAD]).watch(ours)
    assert other.failed() == "gpu01: failed: no memory"


@pytest.mark.parametrize("answer", [{"unreachable": True, "msg": "timed out"}, {"failed": True, "msg": "no launch"}])
def test_what_is_no_verdict_ends_no_other_node(
    answer: dict[str, t.Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = nodes(tmp_path)
    Run(monkeypatch, [answer]).watch(ours)
    assert other.failed() == ""
    assert not other.under_way()


@pytest.mark.parametrize("state", [None, "ready", "failed", "gone"])
def test_nobody_is_waited_for_who_does_not_wait(
    state: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it has not begun, and may only begin when this one ends."""
    ours, other = nodes(tmp_path)
    if state:
        other.tell(state)
    run = Run(monkeypatch, [PROVED])
    assert run.watch(ours)["ready"] is True
    assert len(run.given) == 1


def test_a_node_that_is_ready_is_looked_at_until_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = nodes(tmp_path)
    other.tell("waits")
    run = Run(monkeypatch, [PROVED])
    looks = 0

    def look(arguments: dict[str, t.Any], variables: t.Any, background: bool = False) -> dict[str, t.Any]:
        nonlocal looks
        looks += 1
        run.given.append(arguments)
        if looks == 3:
            other.tell("ready")
        return dict(PROVED)

    monkeypatch.setattr(run.plugin, "_slice", look)
    assert run.watch(ours, record=True, deadline_s=600)["ready"] is True
    assert [given.get("record") for given in run.given] == [True, False, False]
    assert run.given[1]["soak_requests"] == 0


def test_a_node_that_dies_while_it_waits_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = nodes(tmp_path)
    other.tell("waits")
    run = Run(monkeypatch, [PROVED, DEAD])
    result = run.watch(ours, record=True)
    assert result["verdict"] == "failed"
    assert [given.get("record") for given in run.given] == [True, False, True]
    assert other.failed() == "gpu01: failed: no memory"


def test_a_wait_for_others_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = nodes(tmp_path)
    other.tell("waits")
    run = Run(monkeypatch, [PROVED], step=50.0)
    assert run.watch(ours, deadline_s=100)["ready"] is True
    assert len(run.given) < 30


def test_where_nothing_can_be_written_each_waits_for_its_own_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unit").write_text("a file in its place")
    ours, other = nodes(tmp_path)
    other.tell("failed", "lost")
    assert Run(monkeypatch, [under_way("imports"), PROVED]).watch(ours)["ready"] is True


@pytest.mark.parametrize("unit", [None, {}, {"key": "k"}, {"key": "", "hosts": ["a"]}, "text"])
def test_a_server_of_one_host_has_no_others(unit: t.Any) -> None:
    assert server_ready._peers_of(unit, "gpu01") is None


def test_each_start_has_its_own_place() -> None:
    one = server_ready._peers_of({"key": "big, first", "hosts": ["gpu01"]}, "gpu01")
    other = server_ready._peers_of({"key": "big, second", "hosts": ["gpu01"]}, "gpu01")
    assert one is not None
    assert other is not None
    assert one._folder != other._folder
