# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A kept launch started again: what was written then is what is written now."""

from __future__ import annotations

import dataclasses
import json
import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import history
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.again import Now, plan_again, request_again
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.kept import environment_of, parse_request
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.launch import (
    Account,
    ChosenGpu,
    LaunchPlan,
    LaunchRequest,
    plan_launch,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.unit import environment_text
from ansible_collections.cleanslate.sglang.tests.unit.kept_launches import KEY, REQUEST, TOKEN, keep, launch_id

ACCOUNT = Account("sglang", "sglang", 900, 900, "/home/sglang")


def again(state: Path, day: int, gpus: t.Any = REQUEST.gpus) -> tuple[LaunchRequest, LaunchPlan]:
    kept = history.read_kept(str(state), "main", launch_id(day))
    request = request_again(kept, Now(ACCOUNT, gpus, "b", None, "bob", "run-2"), str(state))
    return request, plan_again(kept, request, launch_id(20))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"launcher": "detached"},
        {"gpus": None},
        {"secrets": {}, "secret_environment": {}},
        {"unit_overrides": {"Service": {"Nice": 5, "ExecStartPre": ["/bin/a", "/bin/b"]}}, "restart": "on-failure"},
        {"log": "file"},
        {"log": "/var/log/x y%.log", "enabled": True, "start_check": ("/bin/check", "a b")},
        {"environment": {"ODD": '\\"$`%\u20ac\U0001f600 \t', "EMPTY": ""}},
        {"flags": {"model_path": "/m", "chat_template": "line\nbreak: \"x\" # \U0001f600", "enable_metrics": True}},
        {"secrets": {"api-key": 'k"\\: #', "ssl-keyfile-password": "1234"}},
    ],
)
def test_what_is_written_and_run_is_what_was_but_for_the_id(tmp_path: Path, changes: dict[str, t.Any]) -> None:
    wanted = dataclasses.replace(REQUEST, state_dir=str(tmp_path), **changes)
    keep(tmp_path, 1, REQUEST, **changes)
    first = plan_launch(wanted, launch_id(1))
    # What an ordinary start of the same would write under the new id, and what the kept one does.
    expected = plan_launch(dataclasses.replace(wanted, operator="bob", run_id="run-2"), launch_id(20))
    request, plan = again(tmp_path, 1, wanted.gpus)
    assert dict(plan.files) == dict(first.files)
    assert (plan.argv, plan.unit_text, plan.environment) == (expected.argv, expected.unit_text, expected.environment)
    assert (plan.folder, plan.log_path) == (expected.folder, expected.log_path)
    assert plan.record == dataclasses.replace(expected.record, from_launch=launch_id(1))
    assert plan.shown == expected.shown
    assert (request.unit, request.workdir, request.enabled) == (
        wanted.unit if wanted.launcher == "systemd" else None,
        wanted.workdir,
        wanted.enabled,
    )
    # And it can be started again itself.
    assert set(plan.kept) == set(expected.kept)
    assert parse_request(plan.kept["request.json"]).prints == parse_request(expected.kept["request.json"]).prints


def test_a_launch_that_was_started_again_can_be_started_again(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    _request, second = again(tmp_path, 1)
    folder = Path(second.folder)
    folder.mkdir(mode=0o700)
    for name, text in {**second.files, **second.kept}.items():
        (folder / name).write_text(text)
    (folder / "record.json").write_text(json.dumps(dataclasses.asdict(second.record)))
    kept = history.read_kept(str(tmp_path), "main", launch_id(20))
    request = request_again(kept, Now(ACCOUNT, REQUEST.gpus, "b", None), str(tmp_path))
    third = plan_again(kept, request, launch_id(21))
    assert dict(third.files) == dict(second.files)
    assert third.record.from_launch == launch_id(20)


def test_gpus_with_other_numbers_now_are_the_same_gpus(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    _request, plan = again(tmp_path, 1, (ChosenGpu(7, "GPU-c"), ChosenGpu(0, "GPU-a")))
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "7,0"
    assert 'CUDA_VISIBLE_DEVICES="7,0"\n' in plan.files["env"]
    assert plan.record.environment["CUDA_VISIBLE_DEVICES"] == "7,0"
    first = plan_launch(dataclasses.replace(REQUEST, state_dir=str(tmp_path)), launch_id(1))
    others = {k: v for k, v in plan.environment.items() if k != "CUDA_VISIBLE_DEVICES"}
    assert others == {k: v for k, v in first.environment.items() if k != "CUDA_VISIBLE_DEVICES"}
    assert plan.record.config_hash == first.record.config_hash
    assert plan.record.gpus == ("GPU-c", "GPU-a")


def test_the_secrets_come_from_the_private_files_and_are_known_as_such(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    request, plan = again(tmp_path, 1)
    assert dict(request.secrets) == {"api-key": KEY}
    assert dict(request.secret_environment) == {"PLAIN_NAME": TOKEN}
    for text in (plan.kept["request.json"], plan.kept["unit"], plan.shown, repr(plan.record)):
        assert KEY not in text
        assert TOKEN not in text


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.yaml", "tp-size: 2", "tp-size: 1"),
        ("config.yaml", "tp-size: 2\n", "tp-size: 2\ntrust-remote-code: true\n"),
        ("config.yaml", f'api-key: "{KEY}"\n', f'api-key: "{KEY}"\napi-key: "other"\n'),
        ("env", 'NCCL_DEBUG="INFO"', 'NCCL_DEBUG="TRACE"'),
        ("env", 'NCCL_DEBUG="INFO"\n', 'NCCL_DEBUG="INFO"\nLD_PRELOAD="/x"\n'),
        ("unit", "KillMode=mixed", "KillMode=process"),
    ],
)
def test_a_file_that_somebody_changed_is_not_started(tmp_path: Path, file: str, old: str, new: str) -> None:
    keep(tmp_path, 1)
    path = tmp_path / "main" / "launches" / launch_id(1) / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(CleanSlateError, match="somebody changed it") as caught:
        again(tmp_path, 1)
    assert KEY not in str(caught.value)


def test_a_key_that_was_changed_by_hand_is_taken_since_it_is_the_servers_own(tmp_path: Path) -> None:
    """No fingerprint tells a secret; whoever may write that file is the server's own account, or root."""
    keep(tmp_path, 1)
    path = tmp_path / "main" / "launches" / launch_id(1) / "config.yaml"
    path.write_text(path.read_text().replace(KEY, "sk-by-hand"))
    assert dict(again(tmp_path, 1)[0].secrets) == {"api-key": "sk-by-hand"}


@pytest.mark.parametrize("file", ["config.yaml", "env", "unit", "request.json", "record.json"])
@pytest.mark.parametrize("damage", ["gone", "empty", "half", "fifo", "link", "folder"])
def test_a_folder_that_is_not_whole_is_one_error(tmp_path: Path, file: str, damage: str) -> None:
    keep(tmp_path, 1)
    path = tmp_path / "main" / "launches" / launch_id(1) / file
    text = path.read_text()
    path.unlink()
    if damage in ("empty", "half"):
        path.write_text("" if damage == "empty" else text[: len(text) // 2])
    elif damage == "fifo":
        os.mkfifo(path)
    elif damage == "link":
        (tmp_path / "copy").write_text(text)
        path.symlink_to(tmp_path / "copy")
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(CleanSlateError, match="can't be started again") as caught:
        again(tmp_path, 1)
    assert file in str(caught.value) or "unit was not kept" in str(caught.value)


def test_a_launch_of_an_older_version_says_so(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    (tmp_path / "main" / "launches" / launch_id(1) / "request.json").unlink()
    with pytest.raises(CleanSlateError, match=r"no request\.json.*start it from its flags"):
        again(tmp_path, 1)


def test_a_state_directory_that_was_moved_is_told(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    keep(tmp_path / "old", 1)
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(CleanSlateError, match="it was recorded as"):
        again(tmp_path / "new", 1)


def test_a_command_line_that_is_not_kept_whole_is_told(tmp_path: Path) -> None:
    flags = {"model_path": "/m", "no_such": True}
    keep(tmp_path, 1, flags=flags, launcher="detached")
    assert again(tmp_path, 1)[1].argv[0] == REQUEST.python
    request = tmp_path / "main" / "launches" / launch_id(1) / "request.json"
    data = json.loads(request.read_text())
    request.write_text(json.dumps({**data, "argv_masked": True}))
    with pytest.raises(CleanSlateError, match="looked like a secret"):
        again(tmp_path, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"name": 3},
        {"gpus": [["0", "GPU"]]},
        {"gpus": [[0, 1]]},
        {"gpus": {}},
        {"argv": [1]},
        {"prints": {"env": 1}},
        {"enabled": "yes"},
        {"stop_timeout_s": True},
        {"unit": 1},
        {"launcher": "other"},
        {"name": "other"},
        {"argv": []},
        {"prints": {}},
        {"unit": "../../x"},
    ],
)
def test_a_hostile_request_is_one_error(tmp_path: Path, changes: dict[str, t.Any]) -> None:
    keep(tmp_path, 1)
    path = tmp_path / "main" / "launches" / launch_id(1) / "request.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CleanSlateError, match="can't be started again"):
        again(tmp_path, 1)


@pytest.mark.parametrize("value", ["", "a", 'x"y', "\\", "$", "`", "a=b", "\t", "\u20ac", "\x85\x0b\u2028", "'"])
def test_the_environments_file_is_read_as_it_was_written(value: str) -> None:
    environment = {"A": value, "B": "1"}
    assert environment_of(environment_text(environment)) == environment


@pytest.mark.parametrize("text", ["A=1\n", 'A="1', 'A="1"\n\n', 'A="1"\nA="2"\n', 'A="a"b"\n', 'A="\\x"\n', '1A="x"\n'])
def test_an_environments_file_that_is_not_ours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="its line"):
        environment_of(text)
