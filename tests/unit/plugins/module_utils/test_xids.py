# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.xids import judge_xids
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import Gpu, Problem, Reason
from ansible_collections.cleanslate.sglang.plugins.module_utils.xid import KernelLog, Xid
from ansible_collections.cleanslate.sglang.tests.unit.builders import gpu

NOW, WINDOW = 10_000.0, 600.0
BUS = "00000000:01:00.0"  # of builders.gpu(0)


def xid(code: int, ago_s: float = 10.0, bus_id: str = BUS, text: str = "pid=1, name=python3, words") -> Xid:
    return Xid(bus_id, code, NOW - ago_s, None, text)


def log(*xids: Xid, complete: bool = True, since_s: float = 0.0, problems: tuple[Problem, ...] = ()) -> KernelLog:
    return KernelLog(tuple(sorted(xids, key=lambda one: one.at_s)), complete, problems, NOW, since_s)


def judge(
    kernel_log: KernelLog | None, gpus: tuple[Gpu, ...] = (gpu(0), gpu(1)), vantage: str = "host"
) -> list[Reason]:
    return judge_xids(gpus, kernel_log, NOW, WINDOW, vantage)


def rows(reasons: list[Reason]) -> list[tuple[str, str, str]]:
    return [(one.code, one.severity, one.subject) for one in reasons]


LABEL = gpu(0).label


def test_no_xids_no_reasons() -> None:
    assert judge(log()) == []


@pytest.mark.parametrize("code", [46, 95, 109, 119, 120, 140, 143])
def test_a_gpu_that_must_be_reset_is_dirty_and_says_how(code: int) -> None:
    (reason,) = judge(log(xid(code)))
    assert rows([reason]) == [("xid_reset", "required", LABEL)]
    assert reason.means == "dirty"
    for part in (f"Xid {code} once", "10 s ago", "gpu_reset", "pid=1, name=python3, words"):
        assert part in reason.message


def test_off_the_bus_asks_for_the_host() -> None:
    (reason,) = judge(log(xid(79)))
    assert (rows([reason]), reason.means) == ([("xid_host_restart", "required", LABEL)], "dirty")
    assert "restart the host" in reason.message


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (13, "another start of the program"),
        (31, "another start of the program"),
        (94, "another start of the program"),
        (45, "ended by force"),
        (154, "recovery action"),
        (63, "Xid 63 asks for is not known"),
        (99999, "Xid 99999 asks for is not known"),
    ],
)
def test_warnings(code: int, part: str) -> None:
    (reason,) = judge(log(xid(code)))
    assert rows([reason]) == [("xid_seen", "warning", LABEL)]
    assert part in reason.message


def test_43_is_nothing() -> None:
    assert judge(log(xid(43))) == []


def test_45_beside_another_one_is_left_to_that_one() -> None:
    assert [one.code for one in judge(log(xid(45), xid(119)))] == ["xid_reset"]
    assert [one.code for one in judge(log(xid(45), xid(43)))] == ["xid_seen"]
    assert [one.subject for one in judge(log(xid(45), xid(119, bus_id="00000000:02:00.0")))] == [LABEL, gpu(1).label]


def test_repeats_are_counted() -> None:
    (reason,) = judge(log(*(xid(119, ago_s=10 + 45 * number) for number in range(14))))
    assert "Xid 119 14 times in the last 600 s, the last one 10 s ago" in reason.message


@pytest.mark.parametrize(("ago_s", "count"), [(600.0, 1), (600.1, 0), (9999.0, 0), (-5.0, 1)])
def test_only_the_window_counts(ago_s: float, count: int) -> None:
    # Clocks that are a little apart can make a report look as if it were still to come.
    found = judge(log(xid(119, ago_s)))
    assert len(found) == count
    assert all("-" not in one.message.partition("s ago")[0][-4:] for one in found)


def test_window_0_does_not_look() -> None:
    assert judge_xids((gpu(0),), log(xid(119)), NOW, 0, "host") == []
    assert judge_xids((gpu(0),), None, NOW, 0, "host") == []


def test_bus_ids_are_compared_by_meaning() -> None:
    (reason,) = judge(log(xid(119)), (gpu(0, bus_id="0000:01:00.0"),))
    assert reason.code == "xid_reset"


def test_another_gpu_is_no_failure_of_ours() -> None:
    elsewhere = log(
        xid(119, bus_id="00000000:61:00.0"), xid(119, 3, "00000000:61:00.0"), xid(63, bus_id="00000000:62:00.0")
    )
    (reason,) = judge(elsewhere)
    assert rows([reason]) == [("xid_elsewhere", "advisory", "GPU at 00000000:61:00.0")]
    assert "3 s ago" in reason.message


def test_a_gpu_without_a_bus_id_may_be_the_one() -> None:
    (reason,) = judge(log(xid(79, bus_id="00000000:61:00.0")), (gpu(0), gpu(1, bus_id=None)))
    assert (reason.code, reason.severity) == ("xid_elsewhere", "warning")


def test_a_demand_that_was_taken_back() -> None:
    back = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    demand = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    after = judge(log(xid(119, 50), xid(154, 49, text=demand), xid(154, 20, text=back)))
    assert [(one.code, one.severity) for one in after] == [("xid_seen", "warning")] * 2
    assert "taken its demand" in after[0].message
    again = judge(log(xid(154, 20, text=back), xid(119, 5), xid(119, 50)))
    assert again[0].code == "xid_reset"
    assert judge(log(xid(119, 50), xid(154, 49, text=demand)))[0].code == "xid_reset"


def test_what_was_before_a_reset_counts_no_more() -> None:
    seen = log(xid(119, 50), xid(79, 40, "00000000:02:00.0"))
    found = judge_xids((gpu(0), gpu(1)), seen, NOW, WINDOW, "host", {"0000:01:00.0": NOW - 30})
    assert [one.code for one in found] == ["xid_host_restart"]
    found = judge_xids((gpu(0), gpu(1)), seen, NOW, WINDOW, "host", {"0000:01:00.0": NOW - 60})
    assert [one.code for one in found] == ["xid_reset", "xid_host_restart"]


UNREAD = KernelLog(None, False, (Problem("/dev/kmsg", 1, "Operation not permitted"),), NOW)


@pytest.mark.parametrize(("kernel_log", "part"), [(UNREAD, "Operation not permitted"), (None, "not read")])
def test_a_log_that_was_not_read(kernel_log: KernelLog | None, part: str) -> None:
    (reason,) = judge(kernel_log)
    assert rows([reason]) == [("kernel_log_unknown", "warning", "kernel log")]
    assert part in reason.message
    assert judge(kernel_log, vantage="container") == []


def test_a_log_with_gaps_is_told_and_what_it_has_counts() -> None:
    gap = log(xid(119), complete=False, problems=(Problem("/dev/kmsg", None, "records were overwritten"),))
    found = judge(gap)
    assert [one.code for one in found] == ["xid_reset", "kernel_log_incomplete"]
    assert "at least once" in found[0].message
    assert "records were overwritten" in found[1].message
    assert [one.code for one in judge(gap, vantage="container")] == ["xid_reset"]


@pytest.mark.parametrize(("since_s", "codes"), [(0.0, []), (NOW - 601, []), (NOW - 90, ["kernel_log_incomplete"])])
def test_a_log_that_does_not_reach_back_far_enough(since_s: float, codes: list[str]) -> None:
    found = judge(log(since_s=since_s))
    assert [one.code for one in found] == codes
    assert all("90 s of the 600 s" in one.message for one in found)


@given(
    st.lists(st.builds(Xid, st.sampled_from([BUS, "00000000:61:00.0", "", "x"]), st.integers(0, 999_999),
                       st.floats(0, 2 * NOW), st.none(), st.text(max_size=300)), max_size=8),
)  # fmt: skip
def test_only_known_codes_of_chosen_gpus_fail_a_verdict(xids: list[Xid]) -> None:
    found = judge(log(*xids))
    failing = {
        one.bus_id for one in xids if NOW - one.at_s <= WINDOW and one.code in (46, 79, 95, 109, 119, 120, 140, 143)
    }
    taken_back = any("to 0x0 " in one.text for one in xids)
    required = [one for one in found if one.severity == "required"]
    assert bool(required) == (BUS in failing) or taken_back
    assert {one.subject for one in required} <= {LABEL}
