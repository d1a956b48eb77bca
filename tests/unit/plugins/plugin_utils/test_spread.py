# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers over several hosts: who belongs together, and what is wrong with them."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import spread

ADDRESS = "192.0.2.1:5000"


def entry(rank: t.Any, address: str = ADDRESS, nodes: t.Any = 2, name: str = "big", **flags: t.Any) -> dict[str, t.Any]:
    given = {"model_path": "/m", "nnodes": nodes, "node_rank": rank, "dist_init_addr": address, **flags}
    return {"name": name, "port": 30000, "flags": {key: value for key, value in given.items() if value is not None}}


def single(name: str = "chat") -> dict[str, t.Any]:
    return {"name": name, "port": 31000, "flags": {"model_path": "/m"}}


def only(fleet: spread.Fleet, in_play: t.Sequence[str] | None = None) -> spread.Unit:
    units = spread.units_of(fleet, list(fleet) if in_play is None else in_play)
    assert len(units) == 1, units
    return units[0]


def test_members_by_rank_whatever_the_order_of_the_hosts() -> None:
    unit = only({"gpu02": [single(), entry("1")], "gpu01": [entry(0)]})
    assert unit.problems == ()
    assert [(member.name, member.rank) for member in unit.members] == [("gpu01/big", 0), ("gpu02/big", 1)]
    assert unit.nodes == 2
    assert unit.missing == ()


def test_a_server_of_one_host_is_no_unit() -> None:
    assert spread.units_of({"gpu01": [single(), entry(0, nodes=1, name="one")]}, ["gpu01"]) == ()


def test_the_same_name_with_another_address_is_another_server() -> None:
    other = "192.0.2.3:5000"
    fleet = {"a": [entry(0)], "b": [entry(1)], "c": [entry(0, other)], "d": [entry(1, other)]}
    units = spread.units_of(fleet, list(fleet))
    assert [unit.hosts for unit in units] == [("a", "b"), ("c", "d")]
    assert all(not unit.problems for unit in units)


@pytest.mark.parametrize("alias", ["dist_init_addr", "nccl-init-addr", "--dist-init-addr"])
def test_other_spellings_of_the_flags(alias: str) -> None:
    """As SGLang reads them: dashes, underscores, its aliases; numbers as texts."""
    flags = {"model": "/m", "--nnodes": "2", "node-rank": "1", alias: ADDRESS}
    unit = only({"gpu01": [entry(0)], "gpu02": [{"name": "big", "flags": flags}]})
    assert unit.problems == ()


def test_a_member_that_is_not_in_play() -> None:
    unit = only({"gpu01": [entry(0)], "gpu02": [entry(1)]}, ["gpu01"])
    assert unit.missing == (1,)
    assert unit.hosts == ("gpu01",)
    assert len(unit.problems) == 1
    assert "node rank 1 (gpu02) is not in this run" in unit.problems[0]
    assert "--limit" in unit.problems[0]


def test_nobody_in_play_is_no_unit_of_this_run() -> None:
    assert spread.units_of({"gpu01": [entry(0)], "gpu02": [entry(1)]}, ["gpu03"]) == ()


def test_a_rank_that_no_host_has() -> None:
    unit = only({"gpu01": [entry(0, nodes=3)], "gpu02": [entry(1, nodes=3)]})
    assert [problem for problem in unit.problems if "no host of the inventory has node rank 2" in problem]


def test_another_address_by_mistake_is_named() -> None:
    fleet = {"gpu01": [entry(0)], "gpu02": [entry(1, "192.0.2.9:5000")]}
    first, second = spread.units_of(fleet, list(fleet))
    assert "another 'big' has dist_init_addr 192.0.2.9:5000" in first.problems[0]
    assert "no host of the inventory has node rank 0" in second.problems[0]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((0, 0), "gpu01, gpu02 all have node_rank 0"),
        ((None, None), "gpu01, gpu02 all have node_rank 0"),
        ((0, 2), "node_rank of gpu02 is no number from 0 to 1"),
        ((0, "one"), "node_rank of gpu02 is no number from 0 to 1"),
        ((0, -1), "node_rank of gpu02 is no number from 0 to 1"),
    ],
)
def test_wrong_ranks(ranks: tuple[t.Any, t.Any], said: str) -> None:
    unit = only({"gpu01": [entry(ranks[0])], "gpu02": [entry(ranks[1])]})
    assert any(said in problem for problem in unit.problems), unit.problems
    assert unit.missing == (1,)


def test_no_address() -> None:
    unit = only({"gpu01": [entry(0, "")], "gpu02": [entry(1, "")]})
    assert any("dist_init_addr is missing" in problem for problem in unit.problems)


def test_flags_that_differ_are_named_with_both_values() -> None:
    fleet = {"gpu01": [entry(0, mem_fraction_static=0.8)], "gpu02": [entry(1, mem_fraction_static="0.9", tp=4)]}
    problems = only(fleet).problems
    assert len(problems) == 2
    assert "flag mem-fraction-static is 0.8 on gpu01 and 0.9 on gpu02" in problems[0]
    assert "flag tp-size is not set on gpu01 and 4 on gpu02" in problems[1]


def test_flags_of_the_same_meaning_do_not_differ() -> None:
    fleet = {"gpu01": [entry(0, context_length=128000)], "gpu02": [entry(1, context_length="128k", node_ip=False)]}
    assert only(fleet).problems == ()


def test_nnodes_that_differ() -> None:
    unit = only({"gpu01": [entry(0, nodes=2)], "gpu02": [entry(1, nodes=3)]})
    assert any("flag nnodes is 2 on gpu01 and 3 on gpu02" in problem for problem in unit.problems)


def test_the_environment_may_differ() -> None:
    one, other = entry(0), entry(1)
    one["environment"], other["environment"] = {"NCCL_SOCKET_IFNAME": "ens1"}, {"NCCL_SOCKET_IFNAME": "ens2"}
    assert only({"gpu01": [one], "gpu02": [other]}).problems == ()


def test_the_unit_of_a_server_and_of_a_choice() -> None:
    fleet = {"gpu01": [entry(0), single()], "gpu02": [entry(1)], "gpu03": [single("big")]}
    units = spread.units_of(fleet, list(fleet))
    assert spread.unit_with(units, "gpu02", "big") is units[0]
    assert spread.unit_with(units, "gpu01", "chat") is None
    assert spread.unit_with(units, "gpu03", "big") is None
    assert spread.chosen_units(units, {"gpu01": ["big"], "gpu02": []}) == units
    assert spread.chosen_units(units, {"gpu01": ["chat"], "gpu03": ["big"]}) == ()


def test_data_for_playbooks() -> None:
    data = spread.to_data(only({"gpu01": [entry(0)], "gpu02": [entry(1)]}))
    assert data == {
        "server": "big",
        "name": "big over gpu01, gpu02",
        "address": ADDRESS,
        "nodes": 2,
        "hosts": ["gpu01", "gpu02"],
        "members": [{"host": "gpu01", "server": "big", "rank": 0}, {"host": "gpu02", "server": "big", "rank": 1}],
        "missing": [],
        "problems": [],
    }


def test_a_slip_in_nnodes_is_a_sentence_and_no_count_to_a_billion() -> None:
    found = only({"a": [entry(0, nodes=10**9)], "b": [entry(1, nodes=10**9)]})
    assert any("nnodes must be at most 1000" in problem for problem in found.problems)
    assert len(found.missing) < 1000
    assert all(len(problem) < 500 for problem in found.problems)
