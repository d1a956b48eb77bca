# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the weights are stored as, where a config.json says it; else nothing."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.model_config import read_model


def groups(*weights: t.Any) -> dict[str, t.Any]:
    named = {f"group_{number}": {"weights": each} for number, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": named}


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        (groups({"num_bits": 4, "type": "int"}), "int4"),
        (groups({"num_bits": 8, "type": "float"}), "float8"),
        (groups({"num_bits": 8, "type": "int"}, {"num_bits": 4, "type": "int"}), "int4"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "gptq", "bits": "4"}, None),
        ({"quant_method": "gptq", "bits": True}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        (groups({"num_bits": 4, "type": "int"}, {"num_bits": None, "type": "int"}), None),
        (groups({"num_bits": [4], "type": "int"}), None),
        (groups({"num_bits": 4, "type": ["int"]}), None),
        (groups("int4"), None),
        (groups(), None),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, None),
        ({}, None),
        ("int4", None),
        (None, None),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_weight_format(tmp_path: Path, quantization: t.Any, found: t.Optional[str], inside: bool) -> None:
    config: dict[str, t.Any] = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"hidden_size": 8}}
    (config["text_config"] if inside else config)["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(str(tmp_path)).extra.get("weight_format") == found
