# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import to_json
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import configfile
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.launch import (
    Account,
    ChosenGpu,
    LaunchRequest,
    plan_launch,
    shown_before,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import Option, OptionTable
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import Redactor

KEY = "sk-Secret-1"
ID = "20260131T235959Z-1a2b"
REQUEST = LaunchRequest(
    name="main",
    python="/opt/v/bin/python",
    account=Account("sglang", "sglang", 900, 900, "/home/sglang"),
    flags={"model_path": "/m", "tp_size": 2},
    launcher="systemd",
    state_dir="/s",
    boot_id="b",
    host="0.0.0.0",
    port=8000,
    gpus=(ChosenGpu(3, "GPU-c"), ChosenGpu(1, "GPU-a")),
    environment={"NCCL_DEBUG": "INFO"},
    secret_environment={"HF_TOKEN": "hf-Secret-2"},
    secrets={"api-key": KEY},
    unit="sglang-main.service",
)


def changed(**changes: t.Any) -> LaunchRequest:
    return dataclasses.replace(REQUEST, **changes)


def test_the_configuration_file_holds_flags_and_secrets() -> None:
    plan = plan_launch(REQUEST, ID)
    assert configfile.read_subset(plan.files["config.yaml"]) == {
        **{"api-key": KEY, "host": "0.0.0.0", "model-path": "/m", "port": 8000, "tp-size": 2},
    }
    config = f"/s/main/launches/{ID}/config.yaml"
    assert plan.argv == ("/opt/v/bin/python", "-m", "sglang.launch_server", "--config", config)


def test_gpus_are_indices_in_their_order_since_sglang_makes_integers_of_them() -> None:
    environment = plan_launch(REQUEST, ID).environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "3,1"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert plan_launch(REQUEST, ID).record.gpus == ("GPU-c", "GPU-a")
    everything = plan_launch(changed(gpus=None), ID)
    assert "CUDA_VISIBLE_DEVICES" not in everything.environment
    assert everything.record.gpus is None


def test_no_secret_leaves_the_private_files() -> None:
    plan = plan_launch(REQUEST, ID)
    public = json.dumps(to_json(plan.record)) + plan.shown + str(plan.unit_text) + " ".join(plan.argv)
    for secret in (KEY, "hf-Secret-2"):
        assert secret not in public
    assert plan.record.flags["api-key"] == "********"
    assert plan.record.environment["HF_TOKEN"] == "********"
    assert 'HF_TOKEN="hf-Secret-2"' in plan.files["env"]


def test_a_toggle_and_a_retired_flag_go_onto_the_command_line() -> None:
    table = OptionTable(
        [Option(("strict",), "none", True, False), Option(("disable-cuda-graph",), "none", False, False)], "test"
    )
    request = changed(flags={"model_path": "/m", "strict": False, "disable_cuda_graph": True}, options=table)
    assert plan_launch(request, ID).argv[5:] == ("--no-strict", "--disable-cuda-graph")


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": {"model_path": "/m", "tp_size": 4}},
        {"environment": {}},
        {"gpus": None},
        {"gpus": (ChosenGpu(1, "GPU-a"), ChosenGpu(3, "GPU-c"))},
        {"python": "/opt/w/bin/python"},
        {"account": Account("other", "other", 901, 901, "/")},
        {"port": 8001},
        {"host": None},
    ],
)
def test_the_hash_changes_with_the_configuration(changes: dict[str, t.Any]) -> None:
    before, after = (plan_launch(request, ID).record.config_hash for request in (REQUEST, changed(**changes)))
    assert before != after


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": {"model": "/m", "tp-size": "2", "enable_metrics": False}},
        {"secrets": {"api-key": "sk-other"}},
        {"secrets": {}},
        {"secret_environment": {"HF_TOKEN": "other"}},
        {"state_dir": "/elsewhere"},
    ],
)
def test_the_hash_is_one_of_meaning_and_tells_nothing_of_secrets(changes: dict[str, t.Any]) -> None:
    before, after = (plan_launch(request, ID).record.config_hash for request in (REQUEST, changed(**changes)))
    assert before == after


def test_the_shown_configuration_of_two_equal_launches_is_the_same() -> None:
    first = plan_launch(REQUEST, ID)
    second = plan_launch(REQUEST, "20260201T000000Z-ffff")
    assert first.shown == second.shown
    assert shown_before(first.record, first.unit_text, Redactor()) == second.shown
    assert shown_before(None, None, Redactor()) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flags": {}}, "model_path is missing"),
        ({"flags": {"model_path": "/m", "host": "h"}}, "host"),
        ({"flags": {"model_path": "/m", "port": "x"}, "port": None}, "port is 'x'"),
        ({"port": 0}, "port is 0"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "made from gpus"),
        ({"environment": {"HF_TOKEN": "x"}}, "HF_TOKEN is in environment and in secret_environment"),
        ({"environment": {"A=B": "x"}}, "no name of a variable"),
        ({"secret_environment": {"A": "1\n2"}}, "A holds a line break"),
        ({"launcher": "detached", "log": "journal"}, "only systemd"),
        ({"log": "relative.log"}, "absolute path"),
        ({"unit_overrides": {"Service": {"User": "root"}}}, "Service.User"),
        ({"name": "a/b"}, "name of a server"),
    ],
)
def test_what_cannot_be_launched_is_refused(changes: dict[str, t.Any], words: str) -> None:
    with pytest.raises(CleanSlateError, match=words) as caught:
        plan_launch(changed(**changes), ID)
    assert "Secret" not in str(caught.value)


def test_logs() -> None:
    assert plan_launch(REQUEST, ID).record.log == "journal"
    assert plan_launch(changed(launcher="detached"), ID).record.log == f"/s/main/launches/{ID}/server.log"
    plan = plan_launch(changed(log="/var/log/x.log"), ID)
    assert "StandardOutput=append:/var/log/x.log" in str(plan.unit_text)
    assert "StandardOutput=journal" in str(plan_launch(REQUEST, ID).unit_text)


def test_a_unit_without_a_record_is_shown_in_the_difference() -> None:
    """A record may be lost while its unit is there: what would be overwritten is shown."""
    assert shown_before(None, "[Service]\nEnvironment=HF_TOKEN=hf-1\n", Redactor()) == (
        "[Service]\nEnvironment=HF_TOKEN=********\n"
    )
