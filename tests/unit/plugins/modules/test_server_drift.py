# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_drift's arguments; and the whole look where nothing, or nearly nothing, can be seen."""

from __future__ import annotations

import dataclasses
import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils import drifting
from ansible_collections.cleanslate.sglang.plugins.module_utils.drifting import DriftOptions, check
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Problem
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.look import LookOptions
from ansible_collections.cleanslate.sglang.plugins.module_utils.results import account
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import Snapshot
from ansible_collections.cleanslate.sglang.plugins.modules import server_drift
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import drift_settings

SERVER = {"name": "chat", "port": 30999, "flags": {"model_path": "/m"}, "device": "cpu"}


def params(**changes: t.Any) -> dict[str, t.Any]:
    given = {name: spec.get("default") for name, spec in server_drift.argument_spec().items()}
    return {**given, "servers": [SERVER], **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"servers": [{"port": 1}]}, "servers[0] has no name"),
        ({"servers": [SERVER, {**SERVER, "port": 2}]}, "the name 'chat' is taken by servers[0]"),
        ({"servers": [{**SERVER, "api_key": "sk-1"}]}, "give it by the option secrets"),
        ({"secrets": {"chet": {}}}, "there is no server 'chet'"),
        ({"secrets": {"chat": {"token": "x"}}}, "keys out of api_key"),
        ({"servers": [{**SERVER, "environment": {"HF_TOKEN": "sk-1"}}]}, "a secret within environment: HF_TOKEN"),
        ({"servers": [{**SERVER, "environment": {"P": "http://u:sk-1@h"}}]}, "a secret within environment: P"),
        ({"servers": [{**SERVER, "flags": {"x": '{"token": "sk-1"}'}}]}, "a secret within flags: x"),
        ({"servers": [{**SERVER, "start_check": ["HF_TOKEN=sk-1"]}]}, "a secret within start_check"),
        ({"servers": [{**SERVER, "log": "x-sk-1"}], "secrets": {"chat": {"api_key": "sk-1"}}}, "a secret within log"),
        ({"secrets": {"chat": {"settings_json": "{sk-1"}}}, "settings_json is no mapping"),
        ({"health_deadline_s": 0}, "health_deadline_s is 0"),
        ({"info_deadline_s": float("inf")}, "info_deadline_s is inf"),
        ({"nvml_deadline_s": -1}, "nvml_deadline_s is -1"),
        ({"max_used_mib": -1}, "max_used_mib is -1"),
        ({"baselines": {"0": "much"}}, "must be a whole number of MiB"),
        ({"today": "soon"}, "today is 'soon'"),
        ({"accepted": [{"server": "*", "item": "gpus", "reason": "x", "until": "1"}]}, "accepted[0]: until is '1'"),
    ],
)
def test_arguments_that_make_no_sense(changes: dict[str, t.Any], words: str) -> None:
    with pytest.raises(CleanSlateError) as caught:
        given = params(**changes)
        server_drift.servers_from(given)
        server_drift.options_from(given)
    assert words in str(caught.value)
    assert "sk-1" not in str(caught.value)


def test_secrets_join_their_servers() -> None:
    given = params(secrets={"chat": {"api_key": "sk-1", "secret_environment": {"A": "b"}}})
    assert server_drift.servers_from(given) == [{**SERVER, "api_key": "sk-1", "secret_environment": {"A": "b"}}]


def test_settings_that_hold_a_secret_join_their_server_again() -> None:
    """What the role does: what it gives to servers is taken, and together it is what the inventory has."""
    server = {
        **SERVER,
        "flags": {"model_path": "/m", "my-key": "a", "x": '{"token": "sk-1"}'},
        "environment": {"HF_TOKEN": "sk-1", "HTTPS_PROXY": "http://u:sk-1@h", "A": "1", "MY_KEY": ""},
        "unit_overrides": {"Service": {"ExecStartPre": "/x sk-of-nobody"}},
        "secret_environment": {"B": "sk-of-nobody"},
    }
    shown, secrets = drift_settings.settings_of([server], {}), drift_settings.secrets_of([server], {})
    assert "sk-1" not in json.dumps(shown)
    assert "sk-of-nobody" not in json.dumps(shown)
    assert shown[0]["environment"] == {"A": "1", "MY_KEY": ""}
    assert shown[0]["flags"] == {"model_path": "/m", "my-key": "a"}
    assert isinstance(secrets["chat"]["settings_json"], str)
    (joined,) = server_drift.servers_from(params(servers=shown, secrets=secrets))
    assert {key: joined[key] for key in server} == server


def test_a_server_that_cannot_be_looked_at_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = drifting.judge_server

    def fail(wanted: t.Any, seen: t.Any) -> t.Any:
        if wanted.name == "chat":
            raise RecursionError("too deep")
        return judge(wanted, seen)

    monkeypatch.setattr(drifting, "judge_server", fail)
    found = check(options(tmp_path), [SERVER, {**SERVER, "name": "other", "port": 30998}])
    assert [(row["server"], row["item"], row["state"]) for one in found["servers"] for row in one["drift"]] == [
        ("chat", "settings", "unknown"),
        ("other", "not_running", "drift"),
    ]


def options(tmp_path: Path, **changes: t.Any) -> DriftOptions:
    return DriftOptions(str(tmp_path), LookOptions(expected_gpus=0), **changes)


def test_where_the_processes_cannot_be_read_nothing_is_in_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_options: LookOptions) -> t.NoReturn:
        raise CleanSlateError("the processes below /proc can't be read: no answer within 30 s")

    monkeypatch.setattr(drifting, "look", refuse)
    found = check(options(tmp_path), [SERVER])
    assert found["verdict"] == "unknown"
    assert [(row["item"], row["state"]) for row in found["host"]["drift"]] == [("processes", "unknown")]
    (server,) = found["servers"]
    assert (server["verdict"], server["running"]) == ("unknown", None)
    assert [(row["item"], row["state"]) for row in server["drift"]] == [("processes", "unknown")]


def test_a_server_that_is_hidden_is_not_one_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hidepid: nobody else's processes are listed, and the server's may be among them."""
    seen = drifting.look

    def hidden(given: LookOptions) -> Snapshot:
        problem = Problem("list processes", None, "/proc hides the processes of others (hidepid)")
        return dataclasses.replace(seen(given), problems=(problem,))

    monkeypatch.setattr(drifting, "look", hidden)
    found = check(options(tmp_path), [SERVER])
    (server,) = found["servers"]
    assert (found["verdict"], server["verdict"], server["running"]) == ("unknown", "unknown", None)
    assert "hidepid" in json.dumps(found["host"]["drift"])


def test_a_server_that_never_was_here(tmp_path: Path) -> None:
    secret = {**SERVER, "api_key": "sk-Secret", "user": "sk-Secret"}
    found = check(options(tmp_path), [secret])
    (server,) = found["servers"]
    assert [row["item"] for row in server["drift"]] == ["not_running"]
    assert (server["verdict"], server["running"], server["launch_id"]) == ("drifted", False, None)
    assert "sk-Secret" not in json.dumps(found)


def test_a_host_without_servers_is_looked_at_all_the_same(tmp_path: Path) -> None:
    found = check(options(tmp_path), [])
    assert found["servers"] == []
    assert found["host"]["memory"]["total_mib"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": ["--tp", "2"]},
        {"flags": {"model_path": None}},
        {"flags": {"model_path": "/m", "api_key": "sk-1"}},
        {"environment": "A=b"},
        {"port": "many"},
        {"port": 70000},
        {"gpus": "0,1", "device": "gpu"},
        {"name": "a/b"},
    ],
)
def test_settings_that_make_no_sense_are_that_server_s_own_unknown(tmp_path: Path, changes: dict[str, t.Any]) -> None:
    look = LookOptions(expected_gpus=0 if "gpus" not in changes else None)
    found = check(DriftOptions(str(tmp_path), look), [{**SERVER, **changes}])
    (server,) = found["servers"]
    assert [(row["item"], row["state"]) for row in server["drift"]] == [("settings", "unknown")]
    assert "sk-1" not in json.dumps(found)


@pytest.mark.parametrize(
    ("given", "name"),
    [("0", "root"), (0, "root"), ("root", "root"), (None, None), ("nobody-here", "nobody-here"), ("9" * 30, "9" * 30)],
)
def test_an_account_has_one_name_however_it_is_given(given: t.Any, name: str | None, tmp_path: Path) -> None:
    """The inventory may say 0 where the process is shown as root's."""
    look = object.__new__(drifting._Check)
    look.options = options(tmp_path)
    wanted, _problems = look._wanted({**SERVER, "gpus": [], "user": given})
    assert wanted.user == name
    assert account(name) == name
