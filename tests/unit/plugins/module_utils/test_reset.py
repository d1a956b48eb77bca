# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""GPU resets by the NVML double's nvidia-smi. Its action log shows that persistence mode always comes back."""

from __future__ import annotations

import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act import reset
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.reset import ResetOutcome, parse_state, reset_gpus
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Gpu
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import Completed
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import NA, NvmlDouble
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu as Card
from ansible_collections.cleanslate.sglang.tests.unit.builders import gpu

GENEROUS_S = 60.0
SHORT_S = 1.0
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="nvidia-smi changes settings for root only")


def card(index: int = 0, **changes: t.Any) -> Gpu:
    return gpu(index, uuid=f"GPU-00000000-0000-0000-0000-{index:012d}", **changes)


@pytest.fixture
def nvml(tmp_path: Path) -> NvmlDouble:
    return NvmlDouble(tmp_path)


def reset_them(
    nvml: NvmlDouble, *gpus: Gpu, deadline_s: float = GENEROUS_S, interfere: tuple[str, str] | None = None
) -> ResetOutcome:
    """Reset by the double's nvidia-smi as PATH finds it. ``interfere``: a pattern of arguments and the shell script
    that runs instead.
    """
    env = {**os.environ, **nvml.env()}
    if interfere is not None:
        pattern, script = interfere
        real = nvml.library_dir / "bin" / "nvidia-smi"
        wrapped = nvml.state.parent / "wrapped"
        wrapped.mkdir()
        path = wrapped / "nvidia-smi"
        path.write_text(
            f'#!/bin/sh\nreal() {{ {real} "$@"; }}\ncase "$*" in\n{pattern}) {script} ;;\nesac\nreal "$@"\n'
        )
        path.chmod(0o755)
        env["PATH"] = f"{wrapped}:{env['PATH']}"
    return reset_gpus(gpus or (card(),), deadline_s, env=env)


def codes(outcome: ResetOutcome) -> list[str]:
    return [reason.code for reason in outcome.reasons]


def states(outcome: ResetOutcome) -> list[tuple[bool, bool | None, bool | None]]:
    return [(one.done, one.persistence_before, one.persistence_after) for one in outcome.gpus]


# --- persistence mode ---


def test_persistence_mode_is_turned_off_for_the_reset_and_on_again(nvml: NvmlDouble) -> None:
    nvml.write(Card(0, smi_reset="pm", extra_mib=600))
    outcome = reset_them(nvml)
    assert nvml.actions() == ["pm 0 0", "reset 0", "pm 0 1"]
    assert (states(outcome), outcome.reasons, outcome.all_done) == ([(True, True, True)], (), True)
    assert [(row["what"], row["result"]) for row in outcome.steps] == [
        ("nvidia-smi -pm 0 of GPU 0 (00000000:01:00.0)", "accepted"),
        ("nvidia-smi --gpu-reset of GPU 0 (00000000:01:00.0)", "accepted"),
        ("nvidia-smi -pm 1 of GPU 0 (00000000:01:00.0)", "accepted"),
    ]


def test_where_it_was_off_it_stays_off(nvml: NvmlDouble) -> None:
    nvml.write(Card(0, persistence=0))
    outcome = reset_them(nvml)
    assert nvml.actions() == ["reset 0"]
    assert (states(outcome), outcome.reasons) == ([(True, False, False)], ())


def test_it_comes_back_after_a_reset_that_was_refused(nvml: NvmlDouble) -> None:
    nvml.write(Card(0, smi_reset="never"))
    outcome = reset_them(nvml)
    assert nvml.actions() == ["pm 0 0", "refused 0", "pm 0 1"]
    assert (states(outcome), codes(outcome)) == ([(False, True, True)], ["gpu_reset_in_use"])
    assert "exit 255" in outcome.reasons[0].message
    assert "In use by another client" in outcome.reasons[0].message
    assert not outcome.all_done


def test_it_comes_back_after_a_reset_that_hung(nvml: NvmlDouble) -> None:
    nvml.write(Card(0))
    outcome = reset_them(nvml, deadline_s=SHORT_S, interfere=("*--gpu-reset*", "exec sleep 600"))
    assert nvml.actions() == ["pm 0 0", "pm 0 1"]
    assert (states(outcome), codes(outcome)) == ([(False, True, True)], ["gpu_reset_timed_out"])
    assert outcome.reasons[0].means == "unknown"
    assert "no answer within 1 s" in outcome.reasons[0].message


def test_a_helper_that_cannot_be_ended_is_named(nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.write(Card(0))
    run = reset.run_bounded

    def stuck(argv: t.Sequence[str], deadline_s: float, **options: t.Any) -> Completed:
        if "--gpu-reset" in argv:
            return Completed(None, "", "", timed_out=True, stuck_pid=4711)
        return run(argv, deadline_s, **options)

    monkeypatch.setattr(reset, "run_bounded", stuck)
    outcome = reset_them(nvml)
    assert "its pid 4711 can't be ended (state D)" in outcome.reasons[0].message
    assert nvml.actions() == ["pm 0 0", "pm 0 1"]


def test_it_comes_back_after_an_exception(nvml: NvmlDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.write(Card(0))
    run = reset.run_bounded

    def broken(argv: t.Sequence[str], deadline_s: float, **options: t.Any) -> Completed:
        if "--gpu-reset" in argv:
            raise OSError("no more processes")
        return run(argv, deadline_s, **options)

    monkeypatch.setattr(reset, "run_bounded", broken)
    with pytest.raises(OSError, match="no more processes"):
        reset_them(nvml)
    assert nvml.actions() == ["pm 0 0", "pm 0 1"]


def test_it_comes_back_where_turning_it_off_failed_half_way(nvml: NvmlDouble) -> None:
    nvml.write(Card(0))
    outcome = reset_them(nvml, interfere=("*-pm?0*", "echo 'Unknown Error'; exit 255"))
    assert nvml.actions() == []  # it is on already, and nothing was reset
    assert (states(outcome), codes(outcome)) == ([(False, True, True)], ["gpu_reset_persistence_stays"])


def test_an_exit_of_0_that_turned_nothing_off_is_noticed(nvml: NvmlDouble) -> None:
    nvml.write(Card(0))
    outcome = reset_them(nvml, interfere=("*-pm?0*", "echo 'Treating as warning and moving on.'; exit 0"))
    assert (nvml.actions(), codes(outcome)) == ([], ["gpu_reset_persistence_stays"])


@pytest.mark.parametrize("answer", ["echo 'Unknown Error'; exit 255", "echo 'All done.'; exit 0"])
def test_a_restore_that_fails_is_a_reason_of_its_own_and_ends_the_round(nvml: NvmlDouble, answer: str) -> None:
    nvml.write(Card(0), Card(1))
    outcome = reset_them(nvml, card(0), card(1), interfere=("*-pm?1*", answer))
    assert nvml.actions() == ["pm 0 0", "reset 0"]
    assert states(outcome) == [(True, True, False), (False, None, None)]
    assert codes(outcome) == ["persistence_not_restored", "gpu_reset_skipped"]
    assert "nvidia-smi -i 00000000:01:00.0 -pm 1" in outcome.reasons[0].message


def test_a_restore_that_fails_once_is_repeated(nvml: NvmlDouble) -> None:
    nvml.write(Card(0))
    mark = nvml.state.parent / "failed-once"
    once = f"[ -e {mark} ] || {{ : > {mark}; echo busy; exit 255; }}"
    outcome = reset_them(nvml, interfere=("*-pm?1*", once))
    assert nvml.actions() == ["pm 0 0", "reset 0", "pm 0 1"]
    assert (states(outcome), outcome.reasons) == ([(True, True, True)], ())


def test_a_mode_that_is_not_told_is_not_touched(nvml: NvmlDouble) -> None:
    nvml.write(Card(0, persistence=NA))
    outcome = reset_them(nvml)
    assert (nvml.actions(), codes(outcome)) == ([], ["gpu_reset_persistence_unknown"])
    assert outcome.reasons[0].means == "unknown"


# --- which GPU ---


def test_one_by_one_and_only_those(nvml: NvmlDouble) -> None:
    nvml.write(Card(0), Card(1), Card(2))
    outcome = reset_them(nvml, card(2), card(0))
    assert nvml.actions() == ["pm 2 0", "reset 2", "pm 2 1", "pm 0 0", "reset 0", "pm 0 1"]
    assert [(one.index, one.bus_id, one.done) for one in outcome.gpus] == [
        (2, "00000000:03:00.0", True),
        (0, "00000000:01:00.0", True),
    ]


def test_one_that_is_refused_does_not_keep_the_next(nvml: NvmlDouble) -> None:
    nvml.write(Card(0, smi_reset="never"), Card(1))
    outcome = reset_them(nvml, card(0), card(1))
    assert nvml.actions() == ["pm 0 0", "refused 0", "pm 0 1", "pm 1 0", "reset 1", "pm 1 1"]
    assert states(outcome) == [(False, True, True), (True, True, True)]


def test_one_that_hangs_keeps_the_next(nvml: NvmlDouble) -> None:
    nvml.write(Card(0), Card(1))
    outcome = reset_them(nvml, card(0), card(1), deadline_s=SHORT_S, interfere=("*--gpu-reset*", "exec sleep 600"))
    assert nvml.actions() == ["pm 0 0", "pm 0 1"]
    assert codes(outcome) == ["gpu_reset_timed_out", "gpu_reset_skipped"]


def test_another_uuid_at_that_address_is_another_gpu(nvml: NvmlDouble) -> None:
    nvml.write(Card(0))
    outcome = reset_them(nvml, gpu(0, uuid="GPU-b75bd30c-6f2a-b532-d75f-225e13950e00"))
    assert (nvml.actions(), codes(outcome)) == ([], ["gpu_reset_other_gpu"])


@pytest.mark.parametrize("unknown", [{"bus_id": None}, {"uuid": None}])
def test_a_gpu_that_is_not_known_by_both_names_is_left_alone(nvml: NvmlDouble, unknown: dict[str, t.Any]) -> None:
    nvml.write(Card(0))
    outcome = reset_them(nvml, gpu(0, **unknown))
    assert (nvml.actions(), outcome.steps, codes(outcome)) == ([], (), ["gpu_reset_users_unknown"])


def test_mig_is_looked_at_anew(nvml: NvmlDouble) -> None:
    nvml.write(Card(0, mig_mode=1))
    outcome = reset_them(nvml)
    assert (nvml.actions(), codes(outcome)) == ([], ["gpu_reset_mig"])
    nvml.write(Card(0, mig_mode=NA))
    assert reset_them(nvml).all_done


def test_no_nvidia_smi_is_no_reset(nvml: NvmlDouble) -> None:
    outcome = reset_gpus((card(),), SHORT_S, command=str(nvml.state.parent / "no-nvidia-smi"))
    assert (outcome.all_done, codes(outcome)) == (False, ["gpu_reset_persistence_unknown"])
    assert "No such file" in outcome.reasons[0].message


# --- what nvidia-smi says ---


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("echo 'Unable to reset GPU 00000000:01:00.0: Insufficient Permissions'; exit 4", "gpu_reset_not_permitted"),
        ("echo 'GPU 00000000:01:00.0: all NVLink peers must be reset together'; exit 255", "gpu_reset_peers"),
        ("echo 'GPU Reset is not supported on this device.'; exit 3", "gpu_reset_unsupported"),
        ("echo 'Unknown Error'; exit 255", "gpu_reset_failed"),
        ("exit 0", "gpu_reset_failed"),
        ("echo 'Treating as warning and moving on.'; exit 0", "gpu_reset_failed"),
    ],
)
def test_refusals_are_told_apart(nvml: NvmlDouble, answer: str, code: str) -> None:
    nvml.write(Card(0))
    outcome = reset_them(nvml, interfere=("*--gpu-reset*", answer))
    assert nvml.actions() == ["pm 0 0", "pm 0 1"]
    assert (states(outcome), codes(outcome)) == ([(False, True, True)], [code])


@pytest.mark.parametrize(
    "text", ["", "\n", "a, b", "a, Enabled, Disabled\nb, Enabled, Disabled\n", "No devices were found"]
)
def test_what_is_no_state(text: str) -> None:
    assert parse_state(text) is None


@pytest.mark.parametrize(
    ("text", "persistence", "mig"),
    [
        ("GPU-1, Enabled, Disabled\n", True, False),
        ("GPU-1, Disabled, [N/A]", False, False),
        ("GPU-1, [N/A], Enabled", None, True),
        ("GPU-1, [Unknown Error], [Unknown Error]", None, None),
    ],
)
def test_states(text: str, persistence: bool | None, mig: bool | None) -> None:
    state = parse_state(text)
    assert state is not None
    assert (state.uuid, state.persistence, state.mig) == ("GPU-1", persistence, mig)
