# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Mistakes of an inventory are named, and servers are only chosen where it is clear which."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import inventory

SERVER: dict[str, t.Any] = {
    "name": "chat",
    "port": 30000,
    "python": "/opt/sglang/bin/python",
    "flags": {"model_path": "/m"},
}
GPUS = [
    {"index": 0, "uuid": "GPU-aaaa", "bus_id": "00000000:3B:00.0"},
    {"index": 1, "uuid": "GPU-bbbb", "bus_id": "00000000:5E:00.0"},
]


def problems(**changes: t.Any) -> list[str]:
    values = {"sglang_servers": [{**SERVER, **changes}]}
    return inventory.host_problems("gpu01", values, values, True)


def test_a_plain_server_has_no_problems() -> None:
    assert problems() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prt": 1}, "unknown key 'prt'; did you mean 'port'?"),
        ({"port": "x"}, "port"),
        ({"port": 0}, "port 0 is outside"),
        ({"name": "a/b"}, "name 'a/b'"),
        ({"gpus": ["0", "0"]}, "GPU 0 is listed twice"),
        ({"device": "cpu", "gpus": ["0"]}, "device is cpu"),
        ({"device": "tpu"}, "device"),
        ({"flags": {}}, "'model_path' is missing"),
        ({"flags": {"--model-path": "/m", "api-key": "x"}}, "'api_key' is given as the server's own"),
        ({"flags": {"model": "/m", "config": "x"}}, "'config' is not possible"),
        ({"flags": "x"}, "flags"),
        ({"rungs": ["kill", "container_stopp"]}, "value of rungs must be one or more of"),
        ({"deadlines": {"attach": "soon"}}, "attach"),
        ({"deadlines": {"kil": 1}}, "deadlines: unknown key 'kil'; did you mean 'kill'?"),
    ],
)
def test_each_mistake_is_named(changes: dict[str, t.Any], words: str) -> None:
    assert any(words in problem for problem in problems(**changes)), problems(**changes)


def test_an_unlike_name_lists_the_valid_ones() -> None:
    assert "; valid are " in problems(zzzzzz=1)[0]


@pytest.mark.parametrize("key", ["api_key", "admin_api_key", "ssl_keyfile_password"])
def test_secrets_are_not_quoted(key: str) -> None:
    found = problems(**{key: ["sesame"]}) + problems(**{key: "sesame", "port": "sesame", "name": "sesame/"})
    assert len(found) >= 3
    assert "sesame" not in " ".join(found)


def test_servers_of_a_host_share_neither_name_nor_port() -> None:
    values = {"sglang_servers": [SERVER, SERVER]}
    found = inventory.host_problems("gpu01", values, values, True)
    assert "gpu01: name chat is used by more than one server: chat, chat" in found
    assert "gpu01: port 30000 is used by more than one server: chat, chat" in found


def test_missing_servers_are_a_problem_only_where_they_are_needed() -> None:
    assert inventory.host_problems("gpu01", [], {}, True) == ["gpu01: sglang_servers is missing"]
    assert inventory.host_problems("gpu01", [], {}, False) == []


def test_defaults_are_merged_key_by_key_and_null_is_not_said() -> None:
    defaults = {"user": "sglang", "flags": {"a": 1, "b": 1}, "deadlines": {"stop": 5}}
    found = inventory.find([{**SERVER, "flags": {"model_path": "/m", "b": 2}, "group": None}], "chat", defaults)
    assert found["flags"] == {"a": 1, "b": 2, "model_path": "/m"}
    assert found["user"] == "sglang"
    assert found["deadlines"] == {"stop": 5.0}
    assert "group" not in found
    with pytest.raises(KeyError):
        inventory.find([SERVER], "other", {})


FLEET = {"gpu01": ["chat", "embed"], "gpu02": ["chat"], "gpu03": []}


@pytest.mark.parametrize(
    ("wanted", "every", "chosen"),
    [
        ("embed", False, {"gpu01": ["embed"]}),
        ("gpu02/chat", False, {"gpu02": ["chat"]}),
        ("chat", True, {"gpu01": ["chat"], "gpu02": ["chat"]}),
        ("", True, {"gpu01": ["chat", "embed"], "gpu02": ["chat"]}),
    ],
)
def test_choice(wanted: str, every: bool, chosen: dict[str, list[str]]) -> None:
    found, problem = inventory.choose(FLEET, wanted, every)
    assert problem is None
    assert {host: names for host, names in found.items() if names} == chosen


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("", "3 servers are in play"), ("chat", "2 servers are in play"), ("chta", "did you mean 'chat'")],
)
def test_no_choice_chooses_nothing(wanted: str, words: str) -> None:
    found, problem = inventory.choose(FLEET, wanted, False)
    assert not any(found.values())
    assert problem is not None
    assert words in problem


SPREAD = {"gpu01": ["chat", "big"], "gpu02": ["big"], "gpu03": ["big"]}
TOGETHER = [[("gpu01", "big"), ("gpu02", "big")]]


@pytest.mark.parametrize("wanted", ["gpu01/big", "gpu02/big"])
def test_with_one_node_all_nodes_of_a_server_are_chosen(wanted: str) -> None:
    chosen = {"gpu01": ["big"], "gpu02": ["big"], "gpu03": []}
    assert inventory.choose(SPREAD, wanted, False, TOGETHER) == (chosen, None)


def test_a_server_over_several_hosts_is_one_of_those_to_choose_from() -> None:
    problem = inventory.choose(SPREAD, "big", False, TOGETHER)[1]
    assert problem is not None
    assert problem.startswith("2 servers are in play: gpu01/big (with gpu02), gpu03/big. ")
    assert "3 servers are in play" in str(inventory.choose(SPREAD, "", False, TOGETHER)[1])
    two = {"gpu01": ["big"], "gpu02": ["big"]}
    assert inventory.choose(two, "big", False, TOGETHER) == (two, None)
    assert inventory.choose(two, "", False, TOGETHER) == (two, None)


def test_the_only_server_needs_no_name() -> None:
    assert inventory.choose({"a": ["one"]}, "", False) == ({"a": ["one"]}, None)
    assert inventory.choose({"a": []}, "", True)[1] is not None


@pytest.mark.parametrize("name", ["0", "GPU-aaaa", "00000000:3b:00.0"])
def test_a_gpu_is_known_by_each_of_its_names(name: str) -> None:
    mine = inventory.complete({**SERVER, "gpus": [name]}, {})
    assert inventory.gpu_indices(mine, GPUS) == [0]
    assert inventory.gpu_problems("gpu01", ["chat"], [mine], {"gpus": GPUS}) == []


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"gpus": GPUS}, "there is no GPU 9; the host shows 0 (00000000:3B:00.0), 1 ("),
        ({"gpus": None, "problems": [{"message": "Driver Not Loaded"}]}, "can't be read"),
        ({"gpus": []}, "shows no GPU"),
        ({"msg": "Timed out"}, "Timed out"),
    ],
)
def test_gpus_that_are_not_there(info: dict[str, t.Any], words: str) -> None:
    mine = inventory.complete({**SERVER, "gpus": [0, 9]}, {})
    found = inventory.gpu_problems("gpu01", ["chat"], [mine], info)
    assert len(found) == 1
    assert words in found[0]


def test_one_gpu_for_two_servers() -> None:
    mine = inventory.complete({**SERVER, "gpus": ["1"]}, {})
    everything = inventory.complete({**SERVER, "name": "all"}, {})
    on_cpu = inventory.complete({**SERVER, "name": "cpu", "device": "cpu"}, {})
    found = inventory.gpu_problems("gpu01", ["chat"], [mine, everything, on_cpu], {"gpus": GPUS})
    assert found == ["gpu01: servers 'chat' and 'all' both use GPU 1; a GPU can only be proved clean for one server"]
    assert inventory.gpu_problems("gpu01", ["cpu"], [mine, on_cpu], {"gpus": None}) == []


def test_a_number_of_gpus_that_is_not_as_expected_is_found_before_anything_is_touched() -> None:
    mine = {"name": "chat", "gpus": ["0"]}
    found = inventory.gpu_problems("gpu01", ["chat"], [mine], {"gpus": GPUS}, len(GPUS) + 1)
    assert len(found) == 1 and f"sglang_expected_gpus is {len(GPUS) + 1}, the driver shows {len(GPUS)}" in found[0]
    assert inventory.gpu_problems("gpu01", ["chat"], [mine], {"gpus": GPUS}, len(GPUS)) == []
