# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container names its node rightly, the node is told what it knows, and a wrong one is refused."""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import containers, inventory

GOOD: dict[str, t.Any] = {"sglang_proxmox_host": "pve1", "sglang_vmid": 129}
HOSTS = ["ct129", "pve1", "pve2"]
SERVER: dict[str, t.Any] = {"name": "chat", "port": 1, "python": "/p", "flags": {"model_path": "/m"}}
GPUS = [
    {"index": 0, "uuid": "GPU-aaaa", "bus_id": "00000000:3B:00.0"},
    {"index": 1, "uuid": "GPU-bbbb", "bus_id": "00000000:5E:00.0"},
]


def problems(**values: t.Any) -> list[str]:
    return inventory.host_problems("ct129", values, values, False, HOSTS)


@pytest.mark.parametrize("vmid", [100, 129, "129", 999_999_999])
def test_a_container_with_its_node(vmid: t.Any) -> None:
    assert problems(**{**GOOD, "sglang_vmid": vmid}) == []
    assert problems(**GOOD, sglang_host_rungs=False) == []
    assert problems(sglang_host_rungs=False) == []
    assert problems(sglang_proxmox_host=None, sglang_vmid=None, sglang_pct_fallback=True) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sglang_proxmox_host": "pve1"}, "sglang_proxmox_host is 'pve1', but sglang_vmid is missing"),
        ({"sglang_vmid": 129}, "sglang_vmid is 129, but sglang_proxmox_host is missing"),
        ({**GOOD, "sglang_vmid": 99}, "sglang_vmid is '99', but must be a number from 100 to 999999999"),
        ({**GOOD, "sglang_vmid": 1_000_000_000}, "from 100 to 999999999"),
        ({**GOOD, "sglang_vmid": "ct129"}, "sglang_vmid is 'ct129'"),
        ({**GOOD, "sglang_vmid": -129}, "sglang_vmid is '-129'"),
        ({**GOOD, "sglang_vmid": 129.5}, "sglang_vmid is '129.5'"),
        ({**GOOD, "sglang_vmid": "0129"}, "sglang_vmid is '0129'"),
        ({**GOOD, "sglang_proxmox_host": "pve3"}, "'pve3' is no host of the inventory; did you mean 'pve"),
        ({**GOOD, "sglang_proxmox_host": "node"}, "'node' is no host of the inventory; add it"),
        ({**GOOD, "sglang_proxmox_host": "ct129"}, "sglang_proxmox_host is the host itself"),
        ({"sglang_host_rungs": True}, "sglang_host_rungs is true, but no node is named"),
        ({**GOOD, "sglang_host_rungs": "perhaps"}, "sglang_host_rungs"),
        ({**GOOD, "sglang_protect": ["4711"]}, "pid 4711 is protected by its number"),
        ({**GOOD, "sglang_servers": [{**SERVER, "protect": [17]}]}, "pid 17 is protected by its number"),
        ({**GOOD, "sglang_server_defaults": {"protect": ["18"]}}, "pid 18 is protected by its number"),
        ({**GOOD, "sglang_server_defaults": {"protect": "gdm.service, 19"}}, "pid 19 is protected by its number"),
        ({**GOOD, "sglang_servers": [{**SERVER, "protect": "20"}]}, "pid 20 is protected by its number"),
        ({"sglang_protect": "gdm.service"}, "sglang_protect must be a list, but is a text"),
        ({"sglang_baselines_mib": "0=150"}, "sglang_baselines_mib must be a mapping, but is a text"),
    ],
)
def test_each_mistake_is_one_sentence(values: dict[str, t.Any], words: str) -> None:
    found = problems(**values)
    assert len(found) == 1, found
    assert words in found[0]
    assert found[0].startswith("ct129: ")


@pytest.mark.parametrize(
    ("values", "node"),
    [
        (GOOD, "pve1"),
        ({**GOOD, "sglang_host_rungs": True}, "pve1"),
        ({**GOOD, "sglang_host_rungs": None}, "pve1"),
        ({**GOOD, "sglang_host_rungs": False}, ""),
        ({**GOOD, "sglang_host_rungs": "no"}, ""),
        ({**GOOD, "sglang_host_rungs": "perhaps"}, ""),
        ({"sglang_proxmox_host": "pve1"}, ""),
        ({"sglang_vmid": 129}, ""),
        ({}, ""),
    ],
)
def test_the_node_acts_only_where_it_is_named_and_allowed(values: dict[str, t.Any], node: str) -> None:
    assert inventory.node_of(values) == node


@pytest.mark.parametrize(
    ("values", "stop", "reset", "words"),
    [
        (GOOD, "129", "", ""),
        (GOOD, 129, [], ""),
        (GOOD, "", "0,1", ""),
        ({}, "", "", ""),
        (GOOD, "130", "", "confirm_container_stop is 130, but the container of ct129 is 129"),
        (GOOD, "129,130", "", "confirm_container_stop is 129, 130"),
        ({}, "129", "", "confirm_container_stop is given, but no node is named"),
        ({}, "129", "0", "confirm_container_stop and confirm_gpu_reset is given"),
        ({**GOOD, "sglang_host_rungs": False}, "", "0", "sglang_host_rungs is false"),
    ],
)
def test_a_confirmation_must_fit(values: dict[str, t.Any], stop: t.Any, reset: t.Any, words: str) -> None:
    found = inventory.confirmation_problems("ct129", values, stop, reset)
    assert len(found) == (1 if words else 0), found
    assert words in "".join(found)


def test_only_the_node_climbs_the_opt_in_rungs() -> None:
    server = {"rungs": ["term", "gpu_reset", "kill", "container_stop"]}
    assert inventory.inside_rungs(server) == ["term", "kill"]
    assert inventory.node_rungs(server) == server["rungs"]
    assert inventory.inside_rungs({}) == ["drain", "stop", "term", "kill", "holders"]
    assert inventory.node_rungs({}) == ["drain", "stop", "term", "kill", "holders"]
    assert inventory.node_rungs({"rungs": ["kill"]}, 129, "0") == ["kill", "container_stop", "gpu_reset"]
    assert inventory.node_rungs(server, "129") == server["rungs"]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("", []), (None, []), ("0, 1,", ["0", "1"]), (0, ["0"]), ([0, " a "], ["0", "a"]), (129, ["129"])],
)
def test_lists_and_texts_with_commas(value: t.Any, wanted: list[str]) -> None:
    assert inventory.listed(value) == wanted


@pytest.mark.parametrize(
    ("server", "gpus", "before", "wanted"),
    [
        ({"gpus": ["1"]}, GPUS, [], ["GPU-bbbb"]),
        ({"gpus": ["1"]}, [], GPUS[1:], ["GPU-bbbb"]),
        ({"gpus": []}, GPUS, [], ["GPU-aaaa", "GPU-bbbb"]),
        ({"gpus": ["1"]}, None, None, ["1"]),
        # What is named is not translated: a container might say that it is another one.
        ({"gpus": ["00000000:3b:00.0"]}, GPUS, [], ["00000000:3b:00.0"]),
        ({"gpus": ["GPU-aaaa"]}, [{"index": 0, "uuid": "GPU-bbbb", "bus_id": "GPU-aaaa"}], GPUS, ["GPU-aaaa"]),
        ({"gpus": ["GPU-aaaa", "1"]}, GPUS, [], ["GPU-aaaa", "GPU-bbbb"]),
        ({"gpus": ["GPU-aaaa", "7"]}, GPUS, GPUS, ["GPU-aaaa", "7"]),
        ({"gpus": ["0"]}, [{**GPUS[0], "uuid": None}], [], ["00000000:3B:00.0"]),
        ({"gpus": ["0"]}, [{"index": 0, "uuid": None}], [], ["0"]),
        ({"gpus": ["7"]}, GPUS, [], ["7"]),
        ({"gpus": [], "device": "cpu"}, GPUS, GPUS, []),
    ],
)
def test_the_node_is_told_uuids(server: dict[str, t.Any], gpus: t.Any, before: t.Any, wanted: list[str]) -> None:
    assert containers.node_devices(server, gpus, before) == wanted


def test_baselines_go_by_uuid_as_well() -> None:
    known: dict[t.Any, int] = {"0": 150, "GPU-bbbb": 10, 7: 5}
    assert containers.node_baselines(known, GPUS) == {"GPU-aaaa": 150, "GPU-bbbb": 10, "7": 5}
    assert containers.node_baselines(known, None, None) == {"0": 150, "GPU-bbbb": 10, "7": 5}


ROOT = {"rc": 0, "stdout": "0"}
SEEN: dict[str, t.Any] = {"gpus": GPUS, "container": {"state": "running", "init_pid": 7}}


def node_problems(**changes: t.Any) -> list[str]:
    given: dict[str, t.Any] = {
        "uid": ROOT,
        "info": SEEN,
        "needs_gpus": True,
        "inside": True,
        "namespaces": ["pid:[1]", "pid:[1]"],
    }
    given.update(changes)
    return containers.node_problems("ct129", "pve1", 129, **given)


def test_a_node_that_can_be_asked() -> None:
    assert node_problems() == []
    assert node_problems(inside=False, namespaces=["", ""]) == []
    assert node_problems(needs_gpus=False, info={**SEEN, "gpus": None}) == []
    for state in ("stopped", "broken", "unknown"):
        assert node_problems(inside=False, info={**SEEN, "container": {"state": state}}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"uid": {"unreachable": True, "msg": "refused"}}, "node pve1 can't be asked: unreachable: refused"),
        ({"uid": {}}, "can't be asked: it did not run"),
        ({"uid": {"rc": 1, "msg": "no"}}, "can't be asked: no"),
        ({"uid": {"rc": 0, "stdout": "1000"}}, "uid 1000, and only root sees the processes"),
        ({"info": {"failed": True, "msg": "container 129 is not here"}}, "container 129 is not here"),
        ({"info": {"unreachable": True, "msg": "gone"}}, "can't look at container 129: unreachable: gone"),
        ({"info": {**SEEN, "gpus": None, "problems": [{"message": "not loaded"}]}}, "can't be read there: not loaded"),
        ({"info": {**SEEN, "container": {"state": "stopped"}}}, "ct129 answers, but container 129 is stopped there"),
        ({"info": {"gpus": GPUS}}, "container 129 is not known there"),
        ({"namespaces": ["pid:[1]", "pid:[2]"]}, "container 129 there is not ct129"),
        ({"namespaces": ["pid:[1]", ""]}, "can't be told: the PID namespace of its init as the node sees it is not"),
        ({"namespaces": ["", "pid:[1]"]}, "can't be told: the PID namespace of ct129 is not known"),
        ({"uid": {"rc": 1, "msg": "sudo: not found"}}, "connect as root and set sglang_host_become: false"),
    ],
)
def test_a_wrong_node_is_refused(changes: dict[str, t.Any], words: str) -> None:
    found = node_problems(**changes)
    assert len(found) == 1, found
    assert words in found[0]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"rc": 0}, ""),
        ({"rc": 124}, "gave no answer within 20 s (attach hangs)"),
        ({"rc": -9}, "gave no answer within 20 s (attach hangs)"),
        ({"rc": 137}, "gave no answer within 20 s (attach hangs)"),
        ({"rc": 127, "stderr": "timeout: failed to run command 'pct'"}, "there is no pct (timeout: failed"),
        ({"rc": 255, "stderr": "container '129' not running!"}, "ended with code 255: container '129' not running!"),
        ({"unreachable": True, "msg": "refused"}, "unreachable: refused"),
        ({"msg": "Timed out after 90 second(s)."}, "Timed out"),
        ({"skipped": True}, "sglang_pct_fallback is false"),
        ({}, "sglang_pct_fallback is false"),
    ],
)
def test_why_pct_does_not_reach_inside(result: dict[str, t.Any], words: str) -> None:
    found = containers.pct_problem(result, 129)
    assert (words in found) if words else found == ""


def test_an_unreachable_container_is_one_sentence_with_the_next_step() -> None:
    ssh = {"unreachable": True, "msg": "Connection refused"}
    stuck = {"verdict": "dirty", "reasons": [{"code": "unkillable", "message": "pid 7 waits in fuse_wait"}]}
    text = containers.unreachable_problem("ct129", 129, ssh, "attach hangs", "pve1", stuck)
    for words in (
        "ct129: unreachable: Connection refused",
        "not by pct either: attach hangs",
        "node pve1 sees container 129: dirty: pid 7 waits in fuse_wait [unkillable]",
        "teardown.yml and assert_clean.yml work without the container",
        "-e confirm_container_stop=129",
    ):
        assert words in text, text
    assert "\n" not in text
    assert containers.unreachable_problem("ct129", 129, ssh, "") == "ct129: unreachable: Connection refused"


def test_the_way_in_is_the_nodes() -> None:
    node = {"ansible_host": "192.0.2.10", "ansible_user": "ops", "ansible_ssh_port": "2222"}
    found = containers.node_connection({**node, "ansible_ssh_private_key_file": "/k"}, "pve1", "129")
    assert found == {
        "ansible_connection": "community.proxmox.proxmox_pct_remote",
        "ansible_host": "192.0.2.10",
        "ansible_user": "ops",
        "ansible_port": 2222,
        "ansible_private_key_file": "/k",
        "ansible_ssh_private_key_file": "/k",
        "proxmox_vmid": 129,
        "ansible_become": False,
    }
    bare = containers.node_connection({}, "pve1", 129)
    assert (bare["ansible_host"], bare["ansible_user"], bare["ansible_port"]) == ("pve1", "root", 22)
