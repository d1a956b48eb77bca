# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The host's drift: GPUs that are missing or silent, holders nobody declared, what dead servers left."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.drift import Row
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.drift_host import (
    WantedHost,
    judge_gpus,
    judge_leftovers,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import (
    DeviceScan,
    Gpu,
    GpuMemory,
    GpuReading,
    Holder,
    Problem,
    Process,
    ShmFile,
    ShmReading,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.snapshot import GpuHolders, Snapshot

PROCESS = Process(70, 5, 1, 70, 70, "S", "python3", ("/opt/bin/python3", "/srv/train.py", "--key=sk-1"), uid=1000)


def memory(used: int | None, **changes: t.Any) -> GpuMemory:
    return dataclasses.replace(GpuMemory(80000, used, 600, None, "v2", True), **changes)


def holders(*found: Holder, rule_holds: bool | None = True) -> GpuHolders:
    return GpuHolders(0, found, (), (), (), rule_holds)


def snapshot(*gpus: Gpu, held: GpuHolders | None = None, **changes: t.Any) -> Snapshot:
    found = {gpu.index: held if held is not None and gpu.index == 0 else holders() for gpu in gpus}
    seen = Snapshot(
        processes={70: PROCESS},
        reading=GpuReading("nvml", gpus),
        gpus=gpus,
        scan=DeviceScan((), (), 1, 0.1),
        holders=found,
        leaders=(),
        units={},
        own_pids=frozenset({9}),
        boot_id="b",
    )
    return dataclasses.replace(seen, **changes)


def items(rows: t.Iterable[Row]) -> list[tuple[str, str]]:
    return [(row.item, row.state) for row in rows]


IDLE = Gpu(0, memory=memory(0))
HELD = Gpu(0, memory=memory(20000))
HOLDER = Holder(0, PROCESS, 70, "holder", ("readable mapping",))


def test_an_idle_gpu_is_no_finding() -> None:
    assert judge_gpus(WantedHost(1), snapshot(IDLE), ()) == []


def test_another_number_of_gpus() -> None:
    (row,) = judge_gpus(WantedHost(2), snapshot(IDLE), ())
    assert (row.item, row.wanted, row.found) == ("gpu_count", 2, 1)
    assert judge_gpus(WantedHost(None), snapshot(IDLE), ()) == []


def test_a_driver_without_an_answer_is_unknown() -> None:
    reading = GpuReading("none", None, problems=(Problem("nvmlInit", 9, "the driver is not loaded"),))
    (row,) = judge_gpus(WantedHost(8), snapshot(reading=reading), ())
    assert (row.item, row.state) == ("gpu_count", "unknown")
    assert "not loaded" in row.found


def test_a_host_without_gpus_is_asked_for_none() -> None:
    assert judge_gpus(WantedHost(0), snapshot(reading=GpuReading("none", None)), ()) == []


def test_a_holder_that_nobody_declared_and_one_that_is_ours() -> None:
    seen = snapshot(HELD, held=holders(HOLDER))
    (row,) = judge_gpus(WantedHost(1), seen, ())
    assert (row.item, row.found) == ("holder:70/python3 train.py", "/opt/bin/python3 /srv/train.py holds GPU 0")
    assert judge_gpus(WantedHost(1), seen, {70}) == []
    protected = dataclasses.replace(HOLDER, protected="GPU service dcgm-exporter")
    assert judge_gpus(WantedHost(1), snapshot(HELD, held=holders(protected)), ()) == []


def test_memory_that_nobody_holds() -> None:
    assert items(judge_gpus(WantedHost(1), snapshot(HELD), ())) == [("memory_unexplained:0", "drift")]
    assert judge_gpus(WantedHost(1, 64, {"0": 20000}), snapshot(HELD), ()) == []
    assert judge_gpus(WantedHost(1, 20000), snapshot(HELD), ()) == []


def test_a_gpu_that_gives_no_figure_is_unknown() -> None:
    lost = Gpu(0, memory=None, errors=(Problem("nvmlDeviceGetMemoryInfo", 15, "GPU is lost"),))
    (row,) = judge_gpus(WantedHost(1), snapshot(lost), ())
    assert (row.item, row.state) == ("gpu:0", "unknown")
    assert "GPU is lost" in row.found


def test_reserved_memory_that_is_not_told_apart_is_unknown() -> None:
    gpu = Gpu(0, memory=memory(615, used_excludes_reserved=False))
    assert items(judge_gpus(WantedHost(1), snapshot(gpu), ())) == [("gpu:0", "unknown")]


def test_a_gpu_whose_memory_is_the_host_s_is_no_finding() -> None:
    gpu = Gpu(0, memory=memory(None, unified=True))
    assert judge_gpus(WantedHost(1), snapshot(gpu), ()) == []


def test_processes_that_hide_may_hold_a_gpu() -> None:
    blind = DeviceScan((), (70,), 1, 0.1)
    assert items(judge_gpus(WantedHost(1), snapshot(IDLE, scan=blind), ())) == [("holders", "unknown")]
    own = snapshot(IDLE, scan=DeviceScan((), (9, 999), 1, 0.1), own_pids=frozenset({70}))
    assert judge_gpus(WantedHost(1), own, ()) == []  # gone, and ourselves


def test_a_driver_on_which_the_rule_does_not_hold_is_unknown() -> None:
    seen = snapshot(HELD, held=holders(HOLDER, rule_holds=False))
    assert items(judge_gpus(WantedHost(1), seen, {70})) == [("holders", "unknown")]


# --- shared memory ----------------------------------------------------------------------------------------------------

LEFT = ShmFile("sgl_shm_mq_812_x", 1.0, 0, 5.0, 812, False, (), ())


def shm(*files: ShmFile, complete: bool = True, **changes: t.Any) -> ShmReading:
    return dataclasses.replace(ShmReading("/dev/shm", 64, 60, None, files, scan_complete=complete), **changes)


def test_what_a_dead_server_left() -> None:
    (row,) = judge_leftovers(shm(LEFT))
    assert (row.item, row.state, row.found) == ("leftovers", "drift", "sgl_shm_mq_812_x")


def test_files_in_use_and_of_others_are_no_leftovers() -> None:
    used = dataclasses.replace(LEFT, mapped_by=(812,), creator_alive=True)
    other = dataclasses.replace(LEFT, name="psm_1234", creator_pid=None, creator_alive=None)
    assert judge_leftovers(shm(used, other)) == []
    assert judge_leftovers(shm(other, complete=False)) == []


def test_a_scan_that_could_not_see_everybody_is_unknown_where_it_matters() -> None:
    unsure = dataclasses.replace(LEFT, creator_alive=None)
    (row,) = judge_leftovers(shm(unsure, complete=False, problems=(Problem("read", None, "3 processes: run as root"),)))
    assert (row.item, row.state) == ("leftovers", "unknown")
    assert "run as root" in row.found


def test_shared_memory_that_cannot_be_listed_is_unknown() -> None:
    assert items(judge_leftovers(shm(files=None))) == [("leftovers", "unknown")]


def test_without_the_drivers_list_a_visitor_may_be_a_holder() -> None:
    visitor = Holder(0, PROCESS, 70, "visitor", ("1 open descriptors",))
    visited = GpuHolders(0, (), (visitor,), (), (), None)
    mute, listed = (dataclasses.replace(IDLE, processes=rows) for rows in (None, ()))
    assert items(judge_gpus(WantedHost(1), snapshot(mute, held=visited), ())) == [("holders", "unknown")]
    assert judge_gpus(WantedHost(1), snapshot(listed, held=visited), ()) == []
    assert judge_gpus(WantedHost(1), snapshot(mute, held=visited), (70,)) == []
    service = dataclasses.replace(visited, visitors=(dataclasses.replace(visitor, protected="GPU service x"),))
    assert judge_gpus(WantedHost(1), snapshot(mute, held=service), ()) == []
