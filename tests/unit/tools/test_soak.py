# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The soak's judge: what counts as growth, and which claim is false. It must be able to say so."""

from __future__ import annotations

import random
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, TaskResult
from ansible_collections.cleanslate.sglang.tests.lab import soak
from ansible_collections.cleanslate.sglang.tests.lab.soak_judge import Bounds, Claim, counts, kind, untrue

LAUNCH = "chat/launches/20261130T151206Z-48ad"


def process(pid: int, title: str, parent: int = 1, **more: t.Any) -> dict[str, t.Any]:
    return {"pid": pid, "parent": parent, "state": "S", "ticks": 7, "comm": "x", "title": title, "fds": 3, **more}


def census(**more: t.Any) -> dict[str, t.Any]:
    """A host with one server, which serves."""
    leader, rank = process(40, "python -m sglang.launch_server"), process(41, "sglang::scheduler", 40)
    answer = {"listeners": [40], "health": 200, "info": {"max_total_tokens": 9}, "text": "yes"}
    empty: dict[str, t.Any] = {"shm": {}, "state": {}, "folders": {}, "units": [], "mounts": [], "cgroups": []}
    return {"processes": [process(1, "/sbin/init", 0), leader, rank], **empty, "server": answer, **more}


RECORD = {"pid": 40, "start_ticks": 7}
SERVES = Claim("serves", 9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sglang_loads_c0736dc0e3b7_4873907d.shm", "sglang_loads_N.shm"),
        ("sgl_shm_mq_383_00c0ffee", "sgl_shm_mq_N"),
        (f"{LAUNCH}/record.json", "chat/launches/N/record.json"),
        ("system.slice/embed.service", "system.slice/embed.service"),
        ("user.slice/user-0.slice/session-12.scope", "user.slice/user-N.slice/session-N.scope"),
        ("tmpab12_xyz", "tmpN"),
        ("sglang::scheduler", "sglang::scheduler"),
    ],
)
def test_kinds(name: str, expected: str) -> None:
    assert kind(name) == expected


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"processes": [*census()["processes"], process(50, "sglang::scheduler")]}, "process: 2 x sglang::scheduler"),
        ({"processes": [*census()["processes"], process(50, "", state="Z")]}, "zombie: 1 x x, at most 0"),
        ({"shm": {"sglang_loads_c0736dc0e3b7_4873907d.shm": 16384}}, "shm: 1 x sglang_loads_N.shm, at most 0"),
        ({"state": {f"chat/launches/20261130T15120{n}Z-48ad": 0 for n in range(5)}}, "state: 5 x chat/launches/N, at"),
        ({"state": {"chat/.lease.json.123.0a1b2c3d": 1, "chat/.lease.json.124.0a1b2c3d": 1}}, "state: 2 x"),
        ({"folders": {"/tmp": ["ansible-tmp-1.2-3-4"]}}, "/tmp: 1 x ansible-tmp-N, at most 0"),
        ({"units": ["session-9.scope"]}, "unit: 1 x session-N.scope, at most 0"),
        ({"mounts": ["/var/x"]}, "mount: 1 x /var/x"),
        ({"cgroups": ["system.slice/y.service"]}, "cgroup: 1 x system.slice/y.service"),
        ({"processes": [process(1, "/sbin/init", 0, fds=10), *census()["processes"][1:]]}, "fds: 10 x x, at most 9"),
    ],
)
def test_growth_is_named(more: dict[str, t.Any], said: str) -> None:
    bounds = Bounds(counts(census()), soak.promised())
    assert bounds.grown(counts(census())) == []
    assert any(str(one).startswith(said) for one in bounds.grown(counts(census(**more)))), said


def test_a_kept_launch_is_no_growth() -> None:
    bounds = Bounds(counts(census()), soak.promised())
    kept = {f"chat/launches/20261130T15120{n}Z-48ad/record.json": 100 for n in range(soak.KEEP)}
    assert bounds.grown(counts(census(state=kept))) == []


def test_a_true_claim() -> None:
    assert untrue(SERVES, census(), RECORD, [41]) == []
    silent = {"listeners": [], "health": 0, "info": {}, "text": ""}
    assert untrue(Claim("nobody"), census(server=silent), RECORD, []) == []


@pytest.mark.parametrize(
    ("claim", "changed", "record", "holders", "said"),
    [
        (SERVES, {}, None, [41], "no record"),
        (SERVES, {}, {"pid": 40, "start_ticks": 8}, [41], "does not live"),
        (SERVES, {}, {"pid": 39, "start_ticks": 7}, [41], "does not live"),
        (SERVES, {"listeners": [41]}, RECORD, [41], "does not listen"),
        (SERVES, {"health": 503}, RECORD, [41], "/health says 503"),
        (SERVES, {"text": ""}, RECORD, [41], "no tokens"),
        (SERVES, {"info": {"max_total_tokens": 8}}, RECORD, [41], "runs with 8, wanted 9"),
        (SERVES, {}, RECORD, [], "nobody holds"),
        (SERVES, {}, RECORD, [41, 1], "not of its tree"),
        (Claim("serves", 9, 39), {}, RECORD, [41], "pid 39 was there"),
        (Claim("nobody"), {}, RECORD, [], "nobody should serve"),
    ],
)
def test_a_false_claim(
    claim: Claim, changed: dict[str, t.Any], record: dict[str, t.Any] | None, holders: list[int], said: str
) -> None:
    seen = census(server={**census()["server"], **changed})
    assert any(said in text for text in untrue(claim, seen, record, holders))


@pytest.mark.parametrize(
    ("rc", "message", "verdict"),
    [
        (2, "chat on gpu1: the new configuration failed (x); rolled back to 1: serving", soak.BACK),
        (2, "chat on gpu1: the new configuration failed (x); nothing kept; stopped, the host is clean", soak.STOPPED),
        (2, "gpu1 is not clean for chat (dirty)", soak.NOT_CLEAN),
        (2, "run a of bob on c works on 'chat' since", soak.LEASED),
        (2, "the plan is denied: TCP port", soak.DENIED),
        (2, "something else", soak.FAILED),
        (2, "gpu1 is not known to be clean for chat (no verdict): unreachable: Data could not be sent", soak.LOST),
        (4, "", soak.LOST),
    ],
)
def test_verdicts(rc: int, message: str, verdict: str) -> None:
    task = TaskResult("gpu1", "x", "fail", "failed", False, {"msg": message})
    assert soak.told(PlaybookRun(rc, "", "", (task,))).verdict == verdict


def test_every_fault_comes_before_any_comes_again_and_a_seed_repeats() -> None:
    def names(seed: int) -> list[str]:
        deck = soak.dealt(random.Random(seed))
        return [next(deck).name for _unused in range(2 * len(soak.FAULTS))]

    drawn = names(1)
    half = len(soak.FAULTS)
    assert sorted(drawn[:half]) == sorted(drawn[half:]) == sorted({one.name for one in soak.FAULTS})
    assert drawn == names(1) != names(2)
