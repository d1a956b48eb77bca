# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a launch finds on its host beside the flags: hashes of a model's files, also in a hub's cache."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import fingerprint
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.fingerprint import (
    NONE,
    ModelPrint,
    fetch_model_print,
    read_fingerprint,
    read_model_print,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def test_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_model_print(str(tmp_path), {}) == ModelPrint(sha256("{}"), NONE)
    (tmp_path / "model.safetensors.index.json").write_text("1")
    first = read_model_print(str(tmp_path), {}).index
    (tmp_path / "a.index.json").write_text("2")
    both = read_model_print(str(tmp_path), {}).index
    (tmp_path / "a.index.json").rename(tmp_path / "b.index.json")
    renamed = read_model_print(str(tmp_path), {}).index
    assert len({NONE, first, both, renamed}) == 4


def test_what_is_not_there_is_none_and_no_problem(tmp_path: Path) -> None:
    assert read_model_print(str(tmp_path / "gone"), {}) == ModelPrint(NONE, NONE)
    file = tmp_path / "model.gguf"
    file.write_text("x")
    assert read_model_print(str(file), {}) == ModelPrint(NONE, NONE)


def test_what_cannot_be_read_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "config.json")
    found = fetch_model_print(str(tmp_path), {}, deadline_s=5)
    assert (found.config, found.index) == (None, None)
    assert found.problem is not None and "config.json" in found.problem
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("x" * 100)
    monkeypatch.setattr(fingerprint, "_LIMIT_BYTES", 50)
    problem = read_model_print(str(tmp_path), {}).problem
    assert problem is not None and "larger than" in problem
    for model in (None, "", "a\0b"):
        assert fetch_model_print(model, {}).problem == "the flags name no model"


def test_a_dead_file_server_is_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "read_model_print", lambda *_args: time.sleep(60))
    found = fetch_model_print("/models/far", {}, deadline_s=0.2)
    assert found.problem is not None and "dead file server" in found.problem


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_a_model_of_a_hub_by_its_revision(tmp_path: Path, name: str) -> None:
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
    cache = tmp_path / below.get(name, ".cache/huggingface/hub")
    place = cache / "models--org--tiny"
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    (place / "blob").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blob")
    environment = {name: str(tmp_path)}
    wanted = ModelPrint(sha256("{}"), NONE)
    assert read_model_print("org/tiny", environment) == wanted
    assert read_model_print("org/tiny", environment, COMMIT) == wanted
    for revision in ("v2", "../refs/main", str(place / "refs" / "main")):
        assert read_model_print("org/tiny", environment, revision).config is None
    problem = read_model_print("org/other", environment).problem
    assert problem is not None and "hub" in problem


def test_of_a_launch_without_gpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = read_fingerprint(
        model=str(tmp_path),
        revision=None,
        environment={},
        version="0.5.15",
        uses_gpu=False,
        unit="sha256:aa",
        nvml_deadline_s=1,
    )
    assert found == {
        "sglang_version": "0.5.15",
        "driver_version": None,
        "gpu_count": None,
        "model_config": sha256("{}"),
        "model_index": NONE,
        "unit": "sha256:aa",
    }
