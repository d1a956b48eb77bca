# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Identity, health answers and the shape of errors."""

from __future__ import annotations

import re
from pathlib import Path

from ansible_collections.cleanslate.sglang.tests.contract.subject import Subject

SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 0, 1, 2, 3, 6
FUNCTION_NOT_FOUND = 13


def test_all_ways_to_a_gpu_lead_to_the_same_one(subject: Subject) -> None:
    for gpu in subject.read()["gpus"]:
        found = [gpu["own_index"], gpu["index_by_uuid"], gpu["index_by_bus"], gpu["index_by_short_bus"]]
        assert found == [gpu["index"]] * 4


def test_identity_has_the_expected_form(subject: Subject) -> None:
    gpus = subject.read()["gpus"]
    for gpu in gpus:
        assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", gpu["uuid"])
        assert re.fullmatch(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.0", gpu["bus"])
        assert gpu["capability"][0] >= 1
        assert gpu["name"]
    for key in ("uuid", "bus", "minor"):
        assert len({gpu[key] for gpu in gpus}) == len(gpus)


def test_the_minor_number_is_the_kernels(subject: Subject) -> None:
    for gpu in subject.read()["gpus"]:
        assert gpu["minor"] >= 0
        told = Path("/proc/driver/nvidia/gpus") / gpu["bus"][4:].lower() / "information"
        if told.exists():
            assert re.search(rf"Device Minor:\s+{gpu['minor']}$", told.read_text(), re.MULTILINE)


def test_versions_are_told(subject: Subject) -> None:
    reading = subject.read()
    assert re.fullmatch(r"\d+(\.\d+)+", reading["driver"])
    assert reading["nvml"].endswith(reading["driver"])
    assert reading["cuda"] >= 11_000


def test_each_field_carries_its_own_code(subject: Subject) -> None:
    answers = {answer["id"]: answer for answer in subject.gpu()["fields"]}
    assert answers[60000]["code"] == INVALID_ARGUMENT
    assert answers[230]["code"] == SUCCESS
    assert answers[230]["value"] == 0
    # Row remapping took the place of page retirement: a GPU has one or the other.
    assert (answers[31]["code"] == SUCCESS) != (answers[145]["code"] == SUCCESS)


def test_row_remapping_agrees_with_its_fields(subject: Subject) -> None:
    gpu = subject.gpu()
    fields = {answer["id"]: answer for answer in gpu["fields"]}
    if isinstance(gpu["remapped"], dict):
        assert gpu["remapped"]["code"] == NOT_SUPPORTED
        assert fields[145]["code"] != SUCCESS
    else:
        assert gpu["remapped"] == [fields[number]["value"] for number in (142, 143, 144, 145)]


def test_both_names_of_the_clock_reasons_agree(subject: Subject) -> None:
    gpu = subject.gpu()
    assert isinstance(gpu["event_reasons"], int)
    assert gpu["event_reasons"] == gpu["throttle_reasons"]


def test_errors_have_these_codes(subject: Subject) -> None:
    assert subject.read()["errors"] == {
        "index_past_the_end": INVALID_ARGUMENT,
        "unknown_uuid": NOT_FOUND,
        "unknown_bus": NOT_FOUND,
        # Not "argument version mismatch": this code alone doesn't prove that the library has no v2.
        "memory_v2_wrong_version": FUNCTION_NOT_FOUND,
        "missing_symbol": FUNCTION_NOT_FOUND,
        "after_one_of_two_shutdowns": SUCCESS,
        "after_shutdown": UNINITIALIZED,
        "second_shutdown": UNINITIALIZED,
        "handle_after_shutdown": UNINITIALIZED,
    }
