# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""nvidia-smi as the second source: its XML, its failures, and its figures beside the old memory call's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Gpu, GpuReading, NvmlProcess, Problem
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import nvidia_smi
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import Completed
from ansible_collections.cleanslate.sglang.tests.unit.builders import gpu, memory

XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log><driver_version>580.159.04</driver_version><cuda_version>13.0</cuda_version>
<attached_gpus>{count}</attached_gpus>
<gpu id="00000000:3B:00.0"><product_name>NVIDIA H200</product_name><uuid>GPU-0</uuid><minor_number>3</minor_number>
<persistence_mode>Enabled</persistence_mode><mig_mode><current_mig>Disabled</current_mig></mig_mode>
<fb_memory_usage><total>143771 MiB</total><reserved>615 MiB</reserved><used>{used}</used><free>143156 MiB</free>
</fb_memory_usage><utilization><gpu_util>100 %</gpu_util></utilization>
<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
<remapped_rows><remapped_row_pending>No</remapped_row_pending><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>
<gpu_recovery_action>Reboot</gpu_recovery_action>
<clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_hw_slowdown>Active</clocks_event_reason_hw_slowdown>
<clocks_event_reason_sync_boost>Not Active</clocks_event_reason_sync_boost></clocks_event_reasons>
<processes>{processes}</processes></gpu></nvidia_smi_log>"""
ROW = "<process_info><pid>77</pid><type>C+G</type><used_memory>500 MiB</used_memory></process_info>"


def parse(used: str = "0 MiB", processes: str = ROW, count: int = 1) -> GpuReading:
    reading = nvidia_smi.parse_xml(XML.format(used=used, processes=processes, count=count))
    assert reading is not None
    return reading


def only(reading: GpuReading) -> Gpu:
    assert reading.gpus is not None
    (one,) = reading.gpus
    return one


def test_the_xml_of_an_h200() -> None:
    reading = parse()
    one = only(reading)
    assert (reading.driver_version, reading.cuda_driver_version, reading.source) == ("580.159.04", "13.0", "nvidia-smi")
    assert (one.uuid, one.bus_id, one.minor, one.name) == ("GPU-0", "00000000:3B:00.0", 3, "NVIDIA H200")
    assert one.memory is not None
    assert (one.memory.used_mib, one.memory.reserved_mib, one.memory.api) == (0, 615, "nvidia-smi")
    assert one.processes == (NvmlProcess(77, "compute", 500),)
    health = one.health
    assert (health.remap_failure, health.remap_pending, health.retired_pages_pending) == (True, False, None)
    assert (health.recovery_action, health.utilization_percent, health.persistence_mode) == ("node reboot", 100, True)
    assert health.throttle_reasons == ("idle", "hw slowdown")


@pytest.mark.parametrize("raw", ["N/A", "[Unknown Error]", "ERR!", "", "GPU requires reset", "many"])
def test_no_figure_is_none_with_a_reason(raw: str) -> None:
    one = only(parse(used=raw))
    assert one.memory is None
    assert one.errors[0].call == "nvidia-smi fb_memory_usage/used"


def test_no_list_is_none_and_an_empty_one_is_empty() -> None:
    assert only(parse(processes="N/A")).processes is None
    assert only(parse(processes="")).processes == ()
    row = ROW.replace("500 MiB", "N/A")
    assert only(parse(processes=row)).processes == (NvmlProcess(77, "compute", None),)


def test_where_a_gpu_is_left_out_which_is_which_is_not_known() -> None:
    reading = parse(count=2)
    assert reading.gpus is None
    assert "1 of 2 attached GPUs" in reading.problems[0].message


@pytest.mark.parametrize("text", ["", "<", "<a/>", "NVIDIA-SMI has failed", "<!DOCTYPE x [<!ENTITY a 'b'>]><x/>", "\0"])
def test_what_is_no_xml_of_nvidia_smi_is_none(text: str) -> None:
    assert nvidia_smi.parse_xml(text) is None


def answer(monkeypatch: pytest.MonkeyPatch, done: Completed) -> GpuReading:
    monkeypatch.setattr(nvidia_smi, "run_bounded", lambda *_unused: done)
    return nvidia_smi.read_by_nvidia_smi(5, "/nowhere")


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (Completed(None, "", "", error="nvidia-smi: No such file"), "could not be run"),
        (Completed(None, "", "", timed_out=True), "no answer within 5 s"),
        (Completed(9, "NVIDIA-SMI has failed because", ""), "exit 9: NVIDIA-SMI has failed"),
        (Completed(0, "no xml", ""), "exit 0: no xml"),
        (Completed(15, XML.format(used="0 MiB", processes="", count=1), ""), "exit 15"),
    ],
)
def test_every_failure_is_no_gpus_and_a_problem(monkeypatch: pytest.MonkeyPatch, done: Completed, words: str) -> None:
    reading = answer(monkeypatch, done)
    assert reading.gpus is None
    assert words in reading.problems[0].message


def test_a_mismatch_names_the_librarys_version(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161\n"
    assert answer(monkeypatch, Completed(18, text, "")).nvml_version == "535.161"


def test_merging_takes_the_better_figure_by_uuid_only() -> None:
    old = memory(615, api="v1", used_excludes_reserved=False)
    figures = (old, old, memory(7), None)
    reading = GpuReading("nvml", tuple(gpu(index, memory=figure) for index, figure in enumerate(figures)))
    smi = GpuReading("nvidia-smi", tuple(gpu(index, memory=memory(3, api="nvidia-smi")) for index in (3, 2, 0)))
    merged = nvidia_smi.merge_memory(reading, smi).gpus
    assert merged is not None
    assert [one.memory and (one.memory.api, one.memory.used_mib) for one in merged] == [
        ("nvidia-smi", 3),
        ("v1", 615),
        ("v2", 7),
        None,
    ]
    failed = GpuReading("nvidia-smi", None, problems=(Problem("nvidia-smi", 9, "x"),))
    kept = nvidia_smi.merge_memory(reading, failed)
    assert kept.gpus == reading.gpus
    assert kept.problems == failed.problems


def test_a_library_that_the_environment_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}/none:{tmp_path}")
    assert nvidia_smi.library_by_environment() is None
    (tmp_path / "libnvidia-ml.so.1").touch()
    assert nvidia_smi.library_by_environment() == f"{tmp_path}/libnvidia-ml.so.1"
    reading = answer(monkeypatch, Completed(0, XML.format(used="0 MiB", processes="", count=1), ""))
    assert reading.simulated


@given(st.text())
def test_parse_xml_never_raises(text: str) -> None:
    for candidate in (text, f"<nvidia_smi_log><gpu>{text}</gpu></nvidia_smi_log>"):
        reading = nvidia_smi.parse_xml(candidate)
        assert reading is None or reading.source == "nvidia-smi"


FIELDS = st.sampled_from(["used", "processes", "count"])


@given(st.dictionaries(FIELDS, st.text("0123456789 MiB%N/A<>&.²-", max_size=12)))
def test_parse_xml_never_takes_nonsense_for_a_figure(values: dict[str, str]) -> None:
    reading = nvidia_smi.parse_xml(XML.format(**{"used": "0 MiB", "processes": "", "count": "1", **values}))
    for one in (reading.gpus if reading else None) or ():
        assert one.memory is None or (one.memory.used_mib is not None and one.memory.used_mib >= 0)


@pytest.mark.parametrize(
    "declared",
    [
        '<!DOCTYPE nvidia_smi_log [<!ENTITY nothing "0 MiB">]>',
        '<!DOCTYPE nvidia_smi_log [<!ENTITY a "aaaaaaaaaa"><!ENTITY nothing "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>',
        '<!DOCTYPE nvidia_smi_log [<!ENTITY nothing SYSTEM "file:///etc/hostname">]>',
    ],
)
def test_xml_that_declares_what_it_says_is_not_the_drivers(declared: str) -> None:
    text = XML.format(used="&nothing;", processes="", count=1)
    text = text.replace('<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">', declared)
    assert declared in text and nvidia_smi.parse_xml(text) is None
