# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 30: `--cuda-graph-max-bs` on SGLang 0.5.20 or newer: removed, and argparse only says "ambiguous option"."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.flags_plan import judge_flags
from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import Finding
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.install import version_tuple
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import Option, OptionTable
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.retired import RETIRED, RETIRED_CHOICES

NEW = OptionTable(
    [
        Option(("cuda-graph-max-bs-decode",), dest="cuda_graph_max_bs_decode", action="store", type="int"),
        Option(("cuda-graph-max-bs-prefill",), dest="cuda_graph_max_bs_prefill", action="store", type="int"),
        Option(("nsa-prefill-backend",), dest="nsa_prefill_backend", action="store", type="str"),
        Option(("attention-backend",), dest="attention_backend", action="store", type="str", choices=("triton", "fa3")),
    ],
    "test",
)


def only(flags: dict[str, object], version: str | None) -> Finding:
    findings, _canonical = judge_flags(flags, NEW, version)
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize("name", ["cuda_graph_max_bs", "--cuda-graph-max-bs"])
@pytest.mark.parametrize("version", ["0.5.20", "0.5.23", None])
def test_it_is_named_with_version_and_successor(name: str, version: str | None) -> None:
    finding = only({name: 8}, version)
    assert (finding.id, finding.severity) == ("flags-removed", "deny")
    assert "removed in SGLang 0.5.20" in finding.message and "--cuda-graph-max-bs-prefill" in finding.message
    assert finding.remedy == "Use cuda-graph-max-bs-decode"


def test_before_that_version_it_is_just_ambiguous() -> None:
    assert only({"cuda-graph-max-bs": 8}, "0.5.19").id == "flags-ambiguous"


def test_a_removed_option_that_argparse_takes_for_another_is_a_warning() -> None:
    finding = only({"nsa-prefill": "fa3"}, "0.5.12")
    assert (finding.id, finding.severity) == ("flags-removed", "warn")
    assert "argparse now takes it for --nsa-prefill-backend" in finding.message


def test_a_removed_option_without_a_successor() -> None:
    finding = only({"torchao-config": "int4wo"}, "0.5.18.post1")
    assert "removed in SGLang 0.5.18" in finding.message and "no successor" in finding.remedy


def test_a_removed_choice_is_named_with_its_version() -> None:
    finding = only({"attention-backend": "cutlass_mla"}, "0.5.21")
    assert "'cutlass_mla' was removed in SGLang 0.5.20; there are triton, fa3" in finding.message
    assert "removed" not in only({"attention-backend": "cutlass_mla"}, "0.5.12").message


def test_the_list_is_sound() -> None:
    for name, entry in RETIRED.items():
        assert name == entry.name and version_tuple(entry.removed) is not None
        assert not entry.value or (entry.use is not None and " " not in entry.use)
    for version, _instead in RETIRED_CHOICES.values():
        assert version_tuple(version) is not None
