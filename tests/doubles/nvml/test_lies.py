# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each lie of the double, seen through the real nvidia-ml-py, and the state file's own rules.

Only processes that this file starts are signalled, by their Popen.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml import lies
from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import (
    NA,
    STATE_ENV,
    Fault,
    Gpu,
    Hold,
    Mig,
    NvmlDouble,
    System,
    Variant,
    install,
)

MIB = 1024 * 1024
DEADLINE_S = 60
# Evaluates each expression of argv in turn: its value, or {"code": N} for NVML's error, or {"exception": name}.
SCRIPT = """
import json, sys
import pynvml as n
def h(index): return n.nvmlDeviceGetHandleByIndex(index)
def m(gpu, mig): return n.nvmlDeviceGetMigDeviceHandleByIndex(h(gpu), mig)
def v1(index): return n.nvmlDeviceGetMemoryInfo(h(index)).used >> 20
def used(handle): return n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2).used >> 20
def v2(index): return used(h(index))
def rows(handle): return [[p.pid, None if p.usedGpuMemory is None else p.usedGpuMemory >> 20]
                          for p in n.nvmlDeviceGetComputeRunningProcesses(handle)]
def pids(index): return [row[0] for row in rows(h(index))]
def field(index, number):
    value = n.nvmlDeviceGetFieldValues(h(index), [number])[0]
    return [value.nvmlReturn, value.value.ullVal]
answers = []
for text in ["n.nvmlInit()", *sys.argv[1:]]:
    try:
        answers.append(eval(text))
    except n.NVMLError as error:
        answers.append({"code": error.value})
    except Exception as error:
        answers.append({"exception": type(error).__name__})
init = answers.pop(0)
print(json.dumps([init] if init is not None else answers))
"""
Answers = list[t.Any]


def ask(nvml: NvmlDouble, *expressions: str, prefix: t.Sequence[str] = (), timeout_s: float = DEADLINE_S) -> Answers:
    argv = [*prefix, sys.executable, "-c", SCRIPT, *expressions]
    env = {**os.environ, **nvml.env()}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return t.cast(Answers, json.loads(done.stdout))


@pytest.fixture
def nvml(tmp_path: Path) -> NvmlDouble:
    return NvmlDouble(tmp_path)


@pytest.fixture
def sleeper() -> t.Iterator[t.Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes that do nothing; `title` becomes their command line."""
    started: list[subprocess.Popen[bytes]] = []

    def start(title: str = "a-sleeper") -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([title, "600"], executable="/bin/sleep"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=DEADLINE_S)


Sleeper = t.Callable[..., "subprocess.Popen[bytes]"]


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=DEADLINE_S)


# ---- the whole driver ----


@pytest.mark.parametrize("code", [4, 9, 12, 999])
def test_init_fails(nvml: NvmlDouble, code: int) -> None:
    nvml.write(Gpu(0), *lies.init_fails(code))
    assert ask(nvml) == [{"code": code}]


def test_version_mismatch_still_names_the_library(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0), *lies.version_mismatch("580.95.05"))
    script = (
        "import pynvml\ntry:\n pynvml.nvmlInit()\n"
        "except pynvml.NVMLError as error:\n print(error.value, pynvml.nvmlSystemGetNVMLVersion())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **nvml.env()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "18 13.580.95.05\n"


def test_no_state_is_no_driver(nvml: NvmlDouble) -> None:
    assert ask(nvml) == [{"code": 9}]


@pytest.mark.parametrize("call", ["nvmlInit*", "nvmlDeviceGetMemoryInfo*"])
def test_a_hang_lasts_until_the_process_is_killed(nvml: NvmlDouble, call: str) -> None:
    nvml.write(Gpu(0), *lies.hangs(call))
    with pytest.raises(subprocess.TimeoutExpired):
        ask(nvml, "v2(0)", timeout_s=2)


def test_a_hanging_gpu_leaves_the_others_answering(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0), Gpu(1), *lies.hangs("nvmlDeviceGetMemoryInfo*", gpu=1))
    assert ask(nvml, "v2(0)") == [0]


def test_slow_calls_take_their_time(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0), *lies.slow(400, "nvmlDeviceGetMemoryInfo_v2"))
    before = time.monotonic()
    assert ask(nvml, "v2(0)") == [0]
    assert time.monotonic() - before >= 0.4


# ---- one GPU ----


@pytest.mark.parametrize("code", [lies.UNKNOWN, lies.GPU_IS_LOST, lies.RESET_REQUIRED])
def test_a_gpu_without_handle_is_counted(nvml: NvmlDouble, code: int) -> None:
    nvml.write(Gpu(0), Gpu(1), *lies.no_handle(1, code))
    answers = ask(nvml, "n.nvmlDeviceGetCount()", "v2(0)", "v2(1)", f"n.nvmlDeviceGetHandleByUUID({_uuid(1)!r})")
    assert answers == [2, 0, {"code": code}, {"code": code}]


def _uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012x}"


def test_unified_memory_has_no_figures(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0, name="NVIDIA GB10"), *lies.unified_memory(0))
    assert ask(nvml, "v1(0)", "v2(0)", "n.nvmlDeviceGetName(h(0))") == [{"code": 3}, {"code": 3}, "NVIDIA GB10"]


def test_without_memory_v2_by_code_and_by_symbol(tmp_path: Path, nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0), *lies.without_memory_v2())
    missing = NvmlDouble(tmp_path / "missing", Variant.WITHOUT_MEMORY_V2)
    missing.write(Gpu(0))
    assert ask(nvml, "v1(0)", "v2(0)") == ask(missing, "v1(0)", "v2(0)") == [615, {"code": 13}]


def test_r430_lacks_the_newer_names(tmp_path: Path, sleeper: Sleeper) -> None:
    process = sleeper()
    nvml = NvmlDouble(tmp_path, Variant.WITHOUT_V3)
    nvml.write(Gpu(0), Hold(0, mib=5, pid=process.pid))
    answers = ask(nvml, "pids(0)", "n.nvmlDeviceGetComputeRunningProcesses_v2(h(0))", "v1(0)")
    assert answers == [{"exception": "NVMLLibraryMismatchError"}, {"code": 13}, 620]


def test_wide_rows_scramble_a_reader_of_24_bytes(tmp_path: Path, sleeper: Sleeper) -> None:
    first, second = sleeper(), sleeper()
    nvml = NvmlDouble(tmp_path, Variant.WIDE_V3)
    nvml.write(Gpu(0), Hold(0, mib=5, pid=first.pid), Hold(0, mib=6, pid=second.pid))
    [found, v2] = ask(nvml, "pids(0)", "[p.pid for p in n.nvmlDeviceGetComputeRunningProcesses_v2(h(0))]")
    assert found[0] == first.pid
    assert found[1] != second.pid
    assert v2 == [first.pid, second.pid]


def test_the_list_may_grow_between_two_calls(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    nvml.write(Gpu(0), Hold(0, mib=5, pid=sleeper().pid), *lies.list_grows_meanwhile(0))
    answers = ask(nvml, "len(pids(0))", "len(pids(0))")
    assert answers == [{"code": 7}, 1]


def test_forbidden_lists(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0), *lies.processes_forbidden(0))
    assert ask(nvml, "pids(0)", "n.nvmlDeviceGetGraphicsRunningProcesses(h(0))") == [{"code": 4}] * 2


def test_health(nvml: NvmlDouble) -> None:
    nvml.write(
        lies.pending_retirement(0),
        Gpu(1, throttle=0x48, util=100),
        lies.wants(2, 2),
        lies.remap_failed(3),
        lies.busy_when_idle(4),
        lies.remap_pending(5),
        *lies.field_fails(5, 230),
    )
    assert ask(
        nvml,
        "n.nvmlDeviceGetRetiredPagesPendingStatus(h(0))",
        "n.nvmlDeviceGetRemappedRows(h(0))",
        "n.nvmlDeviceGetCurrentClocksEventReasons(h(1))",
        "field(2, 230)",
        "n.nvmlDeviceGetRemappedRows(h(3))",
        "n.nvmlDeviceGetUtilizationRates(h(4)).gpu",
        "n.nvmlDeviceGetRemappedRows(h(5))",
        "field(5, 230)",
    ) == [1, {"code": 3}, 0x48, [0, 2], [0, 1, 0, 1], 100, [0, 1, 1, 0], [999, 0]]


def test_memory_rebounds_over_processes(nvml: NvmlDouble) -> None:
    nvml.write(lies.rebounds(0, 0, 0, 5000, 0))
    seen = [ask(nvml, "v2(0)")[0] for _unused in range(6)]
    nvml.forget()
    nvml.write(Gpu(0, extra_mib_seq=(0, 7), extra_cycle=True))
    cycled = ask(nvml, "v2(0)", "v1(0)", "v2(0)", "v1(0)", "v2(0)")
    assert seen == [0, 0, 5000, 0, 0, 0]
    # Only v2 moves on; v1 sees the figure handed out last, and its own reserved part.
    assert cycled == [0, 615, 7, 622, 0]


# ---- processes ----


def test_a_dead_pid_stays(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    process = sleeper()
    nvml.write(Gpu(0), *lies.dead_pid(0, process.pid, 10151))
    end(process)
    assert ask(nvml, "v2(0)", "pids(0)") == [10151, [process.pid]]


def test_a_forked_orphan_is_not_listed(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    parent, child = sleeper(), sleeper()
    nvml.write(Gpu(0), *lies.forked_orphan(0, parent.pid, child.pid, 20998))
    end(parent)
    orphaned = ask(nvml, "v2(0)", "pids(0)")
    end(child)
    assert orphaned == [20998, [parent.pid]]
    assert ask(nvml, "v2(0)", "pids(0)") == [0, []]


def test_held_elsewhere_and_foreign_pids(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0), Gpu(1), *lies.held_elsewhere(0, 602), *lies.foreign_pids(1, 900, 1, 77))
    assert ask(nvml, "v2(0)", "pids(0)", "v2(1)", "pids(1)") == [602, [], 900, [1, 77]]


def test_rows_without_or_with_another_figure(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    pid = sleeper().pid
    nvml.write(
        *(Gpu(index) for index in range(3)),
        *lies.no_figure(0, pid, 100),
        *lies.managed_memory(1, pid, 60_000, 5_000),
        *lies.listed_twice(2, pid, 50),
    )
    answers = ask(nvml, "rows(h(0))", "rows(h(1))", "v2(1)", "pids(2)", "v2(2)")
    assert answers == [[[pid, None]], [[pid, 5000]], 60_000, [pid, pid], 50]


def test_mps_server_is_in_both_lists(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    pid = sleeper().pid
    nvml.write(Gpu(0), *lies.mps_server(0, pid, 50))
    mps = "[p.pid for p in n.nvmlDeviceGetMPSComputeRunningProcesses(h(0))]"
    assert ask(nvml, "pids(0)", mps, "v2(0)") == [[pid], [pid], 50]


@pytest.mark.parametrize("queried_before", [True, False], ids=["seen-alive", "never-seen-alive"])
def test_memory_outlives_the_process(nvml: NvmlDouble, sleeper: Sleeper, queried_before: bool) -> None:
    process = sleeper()
    nvml.write(Gpu(0), *lies.unpins_slowly(0, process.pid, 40_000, 1.5))
    if queried_before:
        assert ask(nvml, "v2(0)") == [40_000]
    end(process)
    first = ask(nvml, "v2(0)", "pids(0)")
    time.sleep(1.6)
    assert first == [40_000, [process.pid]]
    assert ask(nvml, "v2(0)", "pids(0)") == [0, []]


def test_a_title_releases_slowly_too(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    process = sleeper("cs-test::scheduler_TP0")
    nvml.write(Gpu(0), Hold(0, mib=300, title="cs-test::scheduler", release_s=1.5))
    assert ask(nvml, "v2(0)") == [300]
    end(process)
    first = ask(nvml, "v2(0)", "pids(0)")
    time.sleep(1.6)
    assert first == [300, [process.pid]]
    assert ask(nvml, "v2(0)", "pids(0)") == [0, []]


def test_titles_are_looked_up_at_every_query(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    nvml.write(
        Gpu(0),
        Gpu(1),
        Hold(0, mib=100, title_is="cs-test::scheduler"),
        Hold(0, mib=100, title="cs-test::scheduler_TP0"),
        Hold(1, mib=100, title="cs-test::scheduler_TP1"),
    )
    assert ask(nvml, "v2(0)", "v2(1)") == [0, 0]
    ranks = [sleeper("cs-test::scheduler_TP0"), sleeper("cs-test::scheduler_TP1")]
    assert ask(nvml, "pids(0)", "pids(1)") == [[ranks[0].pid], [ranks[1].pid]]
    end(ranks[1])
    single = sleeper("cs-test::scheduler")
    assert ask(nvml, "pids(0)", "v2(0)", "pids(1)") == [[single.pid, ranks[0].pid], 200, []]


def test_a_pid_with_another_start_time_is_somebody_else(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    pid = sleeper().pid
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    nvml.write(Gpu(0), Gpu(1), Hold(0, mib=5, pid=pid, start=start), Hold(1, mib=5, pid=pid, start=start + 1))
    assert ask(nvml, "pids(0)", "pids(1)") == [[pid], []]


def test_a_zombie_holds_nothing_and_a_stopped_process_does(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    zombie, stopped = sleeper(), sleeper()
    nvml.write(Gpu(0), Hold(0, mib=5, pid=zombie.pid), Hold(0, mib=7, pid=stopped.pid))
    stopped.send_signal(signal.SIGSTOP)
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert ask(nvml, "v2(0)", "pids(0)") == [7, [stopped.pid]]


HOLDER = """
import mmap, os, sys, time
kind, node = sys.argv[1:]
fd = os.open(node, os.O_RDWR)
protection = {"read": mmap.PROT_READ | mmap.PROT_WRITE, "doorbell": mmap.PROT_WRITE}.get(kind)
mapping = mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE, prot=protection) if protection else None
if os.fork():
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a device node and reads others' mappings, which only root may")
def test_devices_by_mapping_and_by_descriptor(nvml: NvmlDouble, tmp_path: Path) -> None:
    node = tmp_path / "nvidia0"
    os.mknod(node, 0o600 | 0o020000, os.makedev(1, 5))
    nvml.write(Gpu(0), Gpu(1), Hold(0, mib=1, device="1:5"), Hold(1, mib=1, device_fd=str(node)))
    processes = {
        kind: subprocess.Popen(
            [sys.executable, "-c", HOLDER, kind, str(node)], stdout=subprocess.PIPE, start_new_session=True
        )
        for kind in ("read", "doorbell", "open")
    }
    sessions = {process.pid for process in processes.values()}

    def ours(pids: list[int]) -> list[int]:
        """The node's numbers are /dev/zero's, which strangers may have open too."""
        return sorted(pid for pid in pids if Path(f"/proc/{pid}").exists() and os.getsid(pid) in sessions)

    try:
        for process in processes.values():
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid
        mapped, opened = map(ours, ask(nvml, "pids(0)", "pids(1)"))
    finally:
        for process in processes.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=DEADLINE_S)
            assert process.stdout is not None
            process.stdout.close()
    # The forks are there too, and are no users of their own.
    assert mapped == [processes["read"].pid]
    assert opened == sorted(sessions)


# ---- MIG ----


def test_a_mute_mig_instance(nvml: NvmlDouble, sleeper: Sleeper) -> None:
    pid = sleeper().pid
    nvml.write(Gpu(0), *lies.mig_with_a_mute_instance(0, 3, mute=1), Hold(0, mib=160, pid=pid, mig=2))
    ids = "[(p.gpuInstanceId, p.computeInstanceId) for p in n.nvmlDeviceGetComputeRunningProcesses(m(0, 2))]"
    assert ask(
        nvml,
        "n.nvmlDeviceGetMigMode(h(0))",
        "n.nvmlDeviceGetMaxMigDeviceCount(h(0))",
        "used(m(0, 0))",
        "used(m(0, 1))",
        "used(m(0, 2))",
        "m(0, 3)",
        "v2(0)",
        ids,
        "n.nvmlDeviceGetRemappedRows(h(0))",
        "n.nvmlDeviceGetUUID(m(0, 1))",
    ) == [
        [1, 1], 7, 0, {"code": 999}, 160, {"code": 6}, 160, [[9, 0]], {"code": 3},
        "MIG-00000000-0000-0000-0000-000000000001",
    ]  # fmt: skip


# ---- faults and the state file ----


def test_faults_by_count_and_glob(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0), Gpu(1), Fault("nvmlDeviceGetMemoryInfo*", gpu=0, code=999, after=1, times=2))
    answers = ask(nvml, "v2(0)", "v2(0)", "v2(1)", "v2(0)", "v2(0)")
    assert answers == [0, {"code": 999}, 0, {"code": 999}, 0]


def test_the_state_changes_under_a_running_process(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0))
    script = (
        "import pynvml as n, sys; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
        "for _ in sys.stdin: print(n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used >> 20, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, **nvml.env()}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as reader:  # fmt: skip
        assert reader.stdin is not None
        assert reader.stdout is not None
        seen = []
        for extra in (0, 700):
            nvml.write(Gpu(0, extra_mib=extra))
            reader.stdin.write("\n")
            reader.stdin.flush()
            seen.append(int(reader.stdout.readline()))
        reader.stdin.close()
        assert reader.wait(timeout=DEADLINE_S) == 0
    assert seen == [0, 700]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gpu index=0 colour=red", "line 1: unknown key colour"),
        ("gpu index=1", "line 1: index must count up from 0"),
        ("gpus index=0", "line 1: unknown keyword gpus"),
        ("gpu index=0\nhold gpu=0 mib=5", "line 2: exactly one of pid, title"),
        ("gpu index=0\nhold gpu=1 mib=5 pid=1", "line 2: gpu: no such GPU above this line"),
        ("gpu index=0\nhold gpu=0 mib=5 pid=1 title=x", "line 2: pid goes alone"),
        ("gpu index=0\nhold gpu=0 mib=5 mig=1 pid=1", "line 2: mig: no such instance"),
        ('gpu index=0 name="open', "line 1: name: the quote is not closed"),
        ("gpu index=0 minor=0 minor=1", "line 1: minor is given twice"),
        ("gpu index=0 util=lots", "line 1: util is neither a number nor na"),
        ("fault call=nvmlInit", "line 1: a fault needs code, slow_ms or hang"),
        ("gpu index=0\nhold gpu=0 mib=999999 always=yes pid=1", "the holds use more than the GPU has"),
    ],
)
def test_a_wrong_state_is_named_and_never_quiet(nvml: NvmlDouble, text: str, reason: str) -> None:
    nvml.state.write_text(text + "\n")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "v2(0)"],
        env={**os.environ, **nvml.env()}, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    assert json.loads(done.stdout) == [{"code": 999}]
    assert done.stderr.startswith(f"NVML double: {nvml.state}: ")
    assert reason in done.stderr


def test_texts_survive_the_file(nvml: NvmlDouble) -> None:
    name = 'NVIDIA "RTX" PRO\\6000 #1'
    nvml.write(System(driver="595.45.04"), Gpu(0, name=name, uuid="GPU-x", util=NA, persistence=0), Mig(0, 0))
    answers = ask(
        nvml,
        "n.nvmlDeviceGetName(h(0))",
        "n.nvmlSystemGetDriverVersion()",
        "n.nvmlDeviceGetUtilizationRates(h(0)).gpu",
        "n.nvmlDeviceGetPersistenceMode(h(0))",
    )
    assert answers == [name, "595.45.04", {"code": 3}, 0]


def test_a_value_is_one_line() -> None:
    with pytest.raises(ValueError, match="one line"):
        Gpu(0, name="two\nlines").render()


def test_environment_names_library_state_and_tool(nvml: NvmlDouble) -> None:
    env = nvml.env()
    assert env[STATE_ENV] == str(nvml.state)
    assert Path(env["LD_LIBRARY_PATH"].split(":")[0], "libnvidia-ml.so.1").is_file()
    assert os.access(Path(env["PATH"].split(":")[0], "nvidia-smi"), os.X_OK)
    assert "PATH" not in nvml.env(smi=False)


# ---- without the environment ----


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts over /run in a namespace of its own, which only root may")
def test_the_default_place_of_the_state(nvml: NvmlDouble) -> None:
    nvml.write(Gpu(0, extra_mib=321))
    inside = (
        "mount -t tmpfs tmpfs /run && mkdir /run/cleanslate-nvml-double && "
        'cp "$STATE" /run/cleanslate-nvml-double/state && exec "$@"'
    )
    script = (
        "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"
        "print(n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used >> 20)"
    )
    env = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(nvml.library_dir), "STATE": str(nvml.state)}
    argv = ["unshare", "--mount", "sh", "-c", inside, "sh", sys.executable, "-c", script]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.stdout, done.stderr) == ("321\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="ldconfig changes its root, which only root may")
def test_installed_it_is_in_the_loaders_path(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "ld.so.conf").write_text("/usr/local/lib\n")
    install(tmp_path, python="/opt/venv/bin/python")
    known = subprocess.run(
        ["ldconfig", "-r", str(tmp_path), "-p"], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert "libnvidia-ml.so.1 (libc6,x86-64) => /usr/local/lib/libnvidia-ml.so.1" in known.stdout
    tool = tmp_path / "usr/local/bin/nvidia-smi"
    assert tool.read_text().startswith("#!/opt/venv/bin/python\n")
    assert os.access(tool, os.X_OK)
    assert (tmp_path / "run/cleanslate-nvml-double").is_dir()
