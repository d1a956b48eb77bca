# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two views make one verdict, and no view ever makes it better."""

from __future__ import annotations

import itertools
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import verdicts

BUS_ID = "00000000:3B:00.0"
WORSE = {"clean": 0, "unknown": 1, "dirty": 2}


def reason(code: str = "held", means: str = "dirty", bus_id: str = BUS_ID, index: int = 0) -> dict[str, t.Any]:
    subject = f"GPU {index} ({bus_id})"
    return {"code": code, "message": f"{subject}: {code}", "subject": subject, "severity": "required", "means": means}


def view(verdict: str, *reasons: dict[str, t.Any], **changes: t.Any) -> dict[str, t.Any]:
    given = list(reasons) or ([] if verdict == "clean" else [reason(means=verdict)])
    facts = {"gpus": [{"index": 0, "bus_id": BUS_ID}], "available_mib": 1000}
    return {"verdict": verdict, "reasons": given, "warnings_found": [], "facts_seen": facts, "seconds": 1.0, **changes}


UNREACHABLE = {"unreachable": True, "msg": "Connection refused"}
TIMED_OUT = {"failed": True, "msg": "Timed out after 150 second(s)."}
REFUSED = {"failed": True, "verdict": "unknown", "msg": "container 129 is not here"}
# name: (result, what it counts as; None: no view)
INSIDE: dict[str, tuple[dict[str, t.Any], str | None]] = {
    "clean": (view("clean"), "clean"),
    "dirty": (view("dirty"), "dirty"),
    "unknown": (view("unknown"), "unknown"),
    "timed out": (TIMED_OUT, "unknown"),
    "refused": (REFUSED, "unknown"),
    "another word": ({**view("clean"), "verdict": "fine"}, "unknown"),
    "failed and clean": (view("clean", failed=True), "unknown"),
    "unreachable": (UNREACHABLE, None),
    "skipped": ({"skipped": True}, None),
    "never asked": ({}, None),
}
NODE: dict[str, tuple[dict[str, t.Any], str]] = {
    name: (result, word or "unknown") for name, (result, word) in INSIDE.items()
}


def join(inside: t.Any, node: t.Any, needs_inside: bool = False) -> dict[str, t.Any]:
    return verdicts.join_verdicts(inside, node, "ct129", "pve1", 129, needs_inside)


@pytest.mark.parametrize("needs_inside", [False, True])
@pytest.mark.parametrize("node", NODE)
@pytest.mark.parametrize("inside", INSIDE)
def test_every_combination(inside: str, node: str, needs_inside: bool) -> None:
    inside_result, inside_word = INSIDE[inside]
    node_result, node_word = NODE[node]
    words = [node_word, inside_word or ("unknown" if needs_inside else "clean")]
    joint = join(inside_result, node_result, needs_inside)
    assert joint["verdict"] == max(words, key=WORSE.__getitem__)
    assert (joint["verdict"] == "clean") == (not joint["reasons"])
    assert joint["summary"].startswith(f"{joint['verdict']}: ")
    assert all(one["seen_from"] in ("inside ct129", "node pve1") for one in joint["reasons"])
    assert not (joint["verdict"] == "clean" and joint["ask_again"])


@pytest.mark.parametrize(("vmid", "word"), [("129", "clean"), (129, "clean"), ("130", "unknown"), (None, "clean")])
def test_an_answer_about_another_container_is_none(vmid: t.Any, word: str) -> None:
    joint = join(view("clean"), view("clean", container={"vmid": vmid}))
    assert joint["verdict"] == word
    assert ("answered for container 130, not for 129" in joint["summary"]) == (word == "unknown")


@pytest.mark.parametrize("side", ["container", "host"])
def test_a_worse_view_never_makes_the_joint_verdict_better(side: str) -> None:
    """For each pair of views, each change of one of them to a worse one."""
    for inside, node in itertools.product(INSIDE, NODE):
        changed, kept = (INSIDE, NODE) if side == "container" else (NODE, INSIDE)
        name = inside if side == "container" else node
        before = join(INSIDE[inside][0], NODE[node][0])["verdict"]
        for result, word in changed.values():
            if WORSE[word or "clean"] < WORSE[changed[name][1] or "clean"]:
                continue
            pair = (result, NODE[node][0]) if side == "container" else (INSIDE[inside][0], result)
            assert WORSE[join(*pair)["verdict"]] >= WORSE[before], (inside, node, result)
        assert kept


def test_clean_needs_a_view_that_is_clean() -> None:
    assert join({}, {})["verdict"] == "unknown"
    assert join(UNREACHABLE, UNREACHABLE)["verdict"] == "unknown"
    assert join(None, None)["verdict"] == "unknown"


def test_a_container_that_can_not_be_reached_is_an_advisory_of_its_own() -> None:
    joint = join(UNREACHABLE, view("clean"))
    (advisory,) = joint["warnings_found"]
    assert (advisory["code"], advisory["severity"]) == ("container_unreachable", "advisory")
    assert "Connection refused" in advisory["message"]
    assert joint["summary"].endswith("seen from node pve1")
    required = join(UNREACHABLE, view("clean"), needs_inside=True)
    assert [one["code"] for one in required["reasons"]] == ["container_unreachable"]
    assert required["warnings_found"] == []


def test_what_the_node_knows_replaces_held_elsewhere() -> None:
    inside = view("dirty", reason("held_elsewhere"), reason("port_busy"))
    node = view("dirty", reason("held", bus_id=BUS_ID.lower(), index=4))
    joint = join(inside, node)
    assert [(one["code"], one["vantage"]) for one in joint["reasons"]] == [("port_busy", "container"), ("held", "host")]
    assert joint["verdict"] == "dirty"
    assert not joint["ask_again"]


@pytest.mark.parametrize(
    "node",
    [
        view("dirty", reason("held", bus_id="00000000:5E:00.0")),
        view("unknown", reason("gpu_no_answer", "unknown")),
        REFUSED,
    ],
    ids=["another GPU", "no figure", "refused"],
)
def test_held_elsewhere_stays_without_a_better_word(node: dict[str, t.Any]) -> None:
    joint = join(view("dirty", reason("held_elsewhere")), node)
    assert "held_elsewhere" in [one["code"] for one in joint["reasons"]]
    assert joint["verdict"] == "dirty"


@pytest.mark.parametrize(
    ("node", "again"),
    [
        (view("clean"), True),
        (view("dirty", reason("port_busy", bus_id="00000000:5E:00.0")), True),
        (view("dirty", reason("held")), False),
        (view("unknown", reason("memory_unknown", "unknown")), False),
        (view("clean", facts_seen={"gpus": []}), False),
        (REFUSED, False),
        (UNREACHABLE, False),
    ],
)
def test_both_are_asked_again_where_the_node_calls_the_gpu_free(node: dict[str, t.Any], again: bool) -> None:
    joint = join(view("dirty", reason("held_elsewhere")), node)
    assert joint["ask_again"] is again
    assert joint["verdict"] == "dirty"


def test_host_memory_is_the_least_that_a_view_tells() -> None:
    inside, node = view("clean"), view("clean")
    node["facts_seen"] = {"available_mib": 400, "gpus": []}
    joint = join(inside, node)
    assert joint["facts_seen"]["available_mib"] == 400
    assert joint["facts_seen"]["gpus"] == inside["facts_seen"]["gpus"]
    node["facts_seen"] = {"available_mib": None}
    assert join(inside, node)["facts_seen"]["available_mib"] == 1000
    inside["facts_seen"] = {}
    assert join(inside, node)["facts_seen"]["available_mib"] is None
    assert "unknown of host memory available" in join(inside, node)["summary"]


def test_the_node_sees_what_is_not_visible_from_inside() -> None:
    not_visible = {"code": "not_visible", "message": "holders elsewhere", "severity": "advisory"}
    inside = view("clean", warnings_found=[not_visible])
    assert join(inside, view("clean"))["warnings_found"] == []
    assert [one["code"] for one in join(inside, TIMED_OUT)["warnings_found"]] == ["not_visible"]


def test_simulated_gpus_stay_labelled() -> None:
    joint = join(view("clean"), view("clean", simulated=True))
    assert joint["simulated"] is True
    assert "simulated driver" in joint["summary"]


def eviction(verdict: str, *codes: str) -> dict[str, t.Any]:
    return {"verdict": verdict, "reasons": [{"code": code, "message": code} for code in codes]}


@pytest.mark.parametrize(
    ("inside", "node", "words"),
    [
        ({}, eviction("evicted"), ""),
        (UNREACHABLE, eviction("nothing_to_do"), ""),
        (TIMED_OUT, eviction("evicted"), ""),
        (TIMED_OUT, eviction("nothing_to_do"), "inside ct129: Timed out after 150 second(s).; node pve1 found nobody"),
        (eviction("nothing_to_do"), eviction("nothing_to_do"), ""),
        (eviction("failed", "still_there"), eviction("evicted"), ""),
        (eviction("failed", "memory_held"), eviction("evicted"), ""),
        (eviction("unknown", "scan_incomplete"), eviction("nothing_to_do"), ""),
        (eviction("failed", "memory_held"), eviction("nothing_to_do"), "inside ct129: memory_held"),
        (eviction("failed"), eviction("nothing_to_do"), "found nobody to evict"),
        (eviction("evicted"), eviction("failed", "unkillable"), "node pve1: unkillable"),
        (eviction("failed", "still_there"), eviction("unknown", "x"), "inside ct129: still_there [still_there]; node"),
        (UNREACHABLE, TIMED_OUT, "node pve1: Timed out"),
        ({}, {}, "node pve1: it did not run"),
        (eviction("planned"), eviction("planned"), ""),
    ],
)
def test_an_eviction_from_both_sides(inside: t.Any, node: t.Any, words: str) -> None:
    found = verdicts.eviction_problem(inside, node, "ct129", "pve1")
    assert (words in found) if words else found == ""
