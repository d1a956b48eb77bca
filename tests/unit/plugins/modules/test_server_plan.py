# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_plan as a module: arguments in, documented keys out, one clear sentence where it can't judge."""

from __future__ import annotations

import typing as t
from pathlib import Path

import pytest
import yaml

from ansible_collections.cleanslate.sglang.plugins.modules import server_plan
from ansible_collections.cleanslate.sglang.tests.unit.fake_host import run_module
from ansible_collections.cleanslate.sglang.tests.unit.plan_host import PlanHost


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanHost:
    return PlanHost(tmp_path, monkeypatch)


def run(host: PlanHost, capsys: pytest.CaptureFixture[str], **changes: t.Any) -> dict[str, t.Any]:
    host.write_proc()
    given = {name: value for name, value in host.arguments(**changes).items() if value is not None}
    return t.cast("dict[str, t.Any]", run_module(server_plan.main, given, capsys))


def test_every_key_of_the_result_is_documented_and_there(host: PlanHost, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(host, capsys)
    names = set(yaml.safe_load(server_plan.RETURN))
    assert names == {name for name in result if name not in ("changed", "invocation")}
    assert result["changed"] is False
    assert result["verdict"] in ("allowed", "unknown")


def test_every_argument_is_documented() -> None:
    options = yaml.safe_load(server_plan.DOCUMENTATION)["options"]
    shared = {"devices", "expected_gpus", "nvml_deadline_s", "device_major", "proc_root"}
    assert set(options) | shared | {"name", "state_dir", "unit", "port"} == set(server_plan.ARGUMENTS)


def test_a_denied_plan_is_a_result_and_no_failure(host: PlanHost, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever calls the module decides what a deny means; in check mode it looks as well."""
    result = run(host, capsys, flags={"tp_sise": 2}, _ansible_check_mode=True)
    assert not result.get("failed")
    assert result["verdict"] == "denied"
    assert result["findings"][0]["id"] == "flags-unknown"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rules": [{"id": "x"}]}, "rule 'x'"),
        ({"devices": ["7"]}, "7"),
        ({"baselines": {"0": "some"}}, "baselines: GPU '0'"),
        ({"nvml_deadline_s": 0}, "nvml_deadline_s"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_bad_input_is_one_clear_error(
    host: PlanHost, capsys: pytest.CaptureFixture[str], changes: dict[str, t.Any], words: str
) -> None:
    result = run(host, capsys, **changes)
    assert result["failed"] is True
    assert words in result["msg"]


def test_a_server_on_the_cpu_may_name_gpus_of_no_use(host: PlanHost) -> None:
    request = server_plan.request_from(host.arguments(device="cpu", devices=["0"], expected_gpus=8))
    assert request.look.without_gpus and request.look.devices == ()
