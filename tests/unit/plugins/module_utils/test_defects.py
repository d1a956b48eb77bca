# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A mistake of ours is told in a sentence, by every module."""

from __future__ import annotations

import ast
import errno
import json
import typing as t
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told, defect
from ansible_collections.cleanslate.sglang.plugins.modules import gpu_info

MODULES = sorted((Path(__file__).resolve().parents[4] / "plugins" / "modules").glob("*.py"))


class Failing:
    def __init__(self) -> None:
        self.told: dict[str, t.Any] = {}

    def fail_json(self, msg: str, **more: t.Any) -> t.NoReturn:
        self.told = {"msg": msg, **more}
        raise SystemExit(1)


def test_an_exception_that_nobody_expected_fails_the_module_with_a_message() -> None:
    module = Failing()
    with pytest.raises(SystemExit), Told(module):
        raise KeyError("tokens")
    assert "KeyError: 'tokens' at test_defects.py:" in module.told["msg"]
    assert "Traceback" in module.told["exception"]


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_what_ends_a_module_by_intention_passes(error: BaseException) -> None:
    module = Failing()
    with pytest.raises(type(error)), Told(module):
        raise error
    assert module.told == {}


def test_the_message_is_one_line_of_bounded_length() -> None:
    text = defect(ValueError("a\nb" * 1000))
    assert "\n" not in text and len(text) < 500


def test_a_module_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def show(_params: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
        raise ValueError("not this")

    monkeypatch.setattr(gpu_info, "show", show)
    with patch_module_args({}), pytest.raises(SystemExit):
        gpu_info.main()
    answer = json.loads(capsys.readouterr().out)
    assert answer["failed"] is True
    assert "ValueError: not this at test_defects.py:" in answer["msg"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_each_module_ends_within_it(path: Path) -> None:
    tree = ast.parse(path.read_text())
    main = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "main")
    last = main.body[-1]
    assert isinstance(last, ast.With) and ast.unparse(last.items[0]).startswith("Told(module")
    assert ast.unparse(last.body[-1]).startswith("module.exit_json(")


@pytest.mark.parametrize("name", ["clean_state", "gpu_evict", "server_drift"])
def test_a_verdict_that_may_be_unknown_is_so_whatever_ended_the_module(name: str) -> None:
    path = next(path for path in MODULES if path.stem == name)
    main = next(node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "main")
    endings = [node for node in ast.walk(main) if isinstance(node, ast.Call) and "fail_json" in ast.unparse(node.func)]
    assert endings and 'with Told(module, verdict="unknown"):' in path.read_text()
    for ending in endings:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in ending.keywords}
        assert given.get("verdict") == "'unknown'" or given.get(None) == "result", ast.unparse(ending)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "x"), OSError(errno.ENOMEM, "x")])
def test_a_limit_of_the_machine_is_no_mistake_of_ours(error: BaseException) -> None:
    module = Failing()
    with pytest.raises(SystemExit), Told(module, verdict="unknown"):
        raise error
    assert "a defect" not in module.told["msg"]
    assert "RLIMIT_" in module.told["msg"]
    assert module.told["verdict"] == "unknown"
