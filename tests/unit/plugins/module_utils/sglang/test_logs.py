# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import logs

# The lines of a start with two ranks, as SGLang 0.5.12 prints them.
START = """\
[2026-02-23 10:00:00] server_args=ServerArgs(model_path='/models/kimi', tp_size=2)
[2026-02-23 10:00:20 TP0] Init torch distributed begin.
[2026-02-23 10:00:20 TP1] Init torch distributed begin.
[2026-02-23 10:00:25 TP0] Load weight begin. avail mem=94.10 GB
Loading safetensors checkpoint shards:  25% Completed | 16/64 [00:20<01:00,  1.2s/it]
Loading safetensors checkpoint shards: 100% Completed | 64/64 [01:20<00:00,  1.2s/it]
[2026-02-23 10:01:45 TP0] Load weight end. elapsed=80.1 s, type=KimiForCausalLM, avail mem=20.00 GB, mem usage=74.10 GB.
[2026-02-23 10:01:46 TP0] KV Cache is allocated. #tokens: 231120, KV size: 15.00 GB
[2026-02-23 10:01:50 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=3.99 GB
[2026-02-23 10:03:50 TP0] Capture cuda graph end. Time elapsed: 120.0 s. mem usage=2.90 GB. avail mem=1.09 GB.
[2026-02-23 10:03:51 TP1] Capture cuda graph end. Time elapsed: 121.0 s. mem usage=3.17 GB. avail mem=0.82 GB.
[2026-02-23 10:03:52 TP0] max_total_num_tokens=231120, chunked_prefill_size=8192, context_len=262144,
available_gpu_mem=1.05 GB
[2026-02-23 10:03:55] INFO:     Started server process [4711]
[2026-02-23 10:03:55] INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)
[2026-02-23 10:04:05] The server is fired up and ready to roll!
"""


def test_the_phases_of_a_start_with_their_seconds() -> None:
    progress = logs.progress(START)
    assert progress.phase == "ready"
    assert [(phase.name, phase.seconds) for phase in progress.phases] == [
        ("imports", 20),
        ("distributed", 5),
        ("weights", 80),
        ("kv_cache", 5),
        ("graphs", 125),
        ("warm_up", 10),
        ("ready", None),
    ]


@pytest.mark.parametrize(
    ("lines", "phase", "percent"),
    [
        (0, "imports", None),
        (1, "imports", None),
        (3, "distributed", None),
        (5, "weights", 25),
        (7, "kv_cache", None),
        (9, "graphs", None),
    ],
)
def test_a_start_under_way(lines: int, phase: str, percent: int | None) -> None:
    progress = logs.progress("".join(START.splitlines(keepends=True)[:lines]))
    assert (progress.phase, progress.weights_percent) == (phase, percent)


def test_the_headroom_is_that_of_the_rank_with_the_least() -> None:
    assert logs.headroom_mib(START) == int(0.82 * 1024)
    assert logs.total_tokens(START) == 231120


@pytest.mark.parametrize(
    ("line", "mib"),
    [
        (
            "[2026-02-23 10:00:00 TP0] Capture target decode CUDA graph end. elapsed=3.0 s, avail mem=2.50 GB",
            2560,
        ),
        ("[2026-02-23 10:00:00] bs=[1, 2], Capture draft prefill CUDA graph end. elapsed=1 s, avail mem=2.00 GB", 2048),
        ("max_total_num_tokens=1, context_len=2, available_gpu_mem=4.00 GB", 4096),
        ("max_total_num_tokens=1, context_len=2, available_cpu_mem=4.00 GB", None),
        ("", None),
    ],
)
def test_headroom_lines_of_other_versions(line: str, mib: int | None) -> None:
    assert logs.headroom_mib(line) == mib


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "usage: launch_server.py [-h]\nlaunch_server.py: error: unrecognized arguments: --tp-sizes 2\n",
            "unrecognized arguments: --tp-sizes",
        ),
        (
            "launch_server.py: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode\n",
            "ambiguous option: --cuda-graph-max-bs",
        ),
        (
            "ValueError: Unsupported config option 'disable_cuda_graph' with action 'DeprecatedStoreTrueAction'",
            "configuration file",
        ),
        (
            "ValueError: Not enough host memory available. Requesting 300.00 GB but only have 100.00 GB "
            "free. Please reduce",
            "Requesting 300.00 GB but only have 100.00 GB free",
        ),
        (
            "AssertionError: The host memory should be larger than the device memory with the current protocol",
            "hicache-size",
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "no GPU memory is left for the KV cache",
        ),
        (
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. x",
            "unbalanced",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\nReceived sigquit from a child",
            "Tried to allocate 2.00 GiB",
        ),
        ("RuntimeError: Rank 1 scheduler died during initialization (exit code: -7).", "/dev/shm"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", "no space left"),
        (
            "ERROR:    [Errno 98] error while attempting to bind on ('127.0.0.1', 30000): address already in use",
            "30000",
        ),
        ("[2026-02-23 10:00:00] Port 30233 is used by a process already", "Port 30233 is used"),
        ("RuntimeError: No accelerator (CUDA, XPU) is available.", "No accelerator"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error", "NCCL failed"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/models/x/config.json'", "a file is missing"),
        ("OSError: /models/x does not appear to have a file named config.json. Checkout", "the model is not whole"),
        ("/usr/bin/python3: No module named sglang", "No module named sglang"),
        ("ModuleNotFoundError: No module named 'sglang'", "installation is not whole"),
        ('  File "x.py", line 1, in f\n    assert a == b\n           ^^^^^^\nAssertionError\n', "assert a == b"),
        ("AssertionError: tp_size must divide", "an assertion failed: tp_size must divide"),
        ("ValueError: first\n\nDuring handling\n\npkg.mod.SomeError: second\n", "pkg.mod.SomeError: second"),
        ("[2026-02-23 10:00:00] Rank 0 scheduler died during initialization (exit code: -9).", "OOM killer"),
    ],
)
def test_the_cause_of_a_failed_start_in_one_sentence(log: str, words: str) -> None:
    error = logs.last_error("[2026-02-23 09:59:00] server_args=ServerArgs()\n" + log)
    assert error is not None
    assert words in error
    assert "\n" not in error
    assert len(error) <= 400


@pytest.mark.parametrize("text", ["", START, "Traceback (most recent call last):\n"])
def test_no_error(text: str) -> None:
    assert logs.last_error(text) is None


def test_colours_do_not_hide_a_cause() -> None:
    assert logs.last_error("\x1b[31mValueError: bad\x1b[0m") == "ValueError: bad"


def test_only_the_ends_of_a_large_log_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\n" + b"middle\n" * 1000 + b"last \xff\n")
    text = logs.read_ends(str(path), 20, 20)
    assert text is not None
    assert text.startswith("first\nmiddle\n")
    assert text.endswith("middle\nlast \ufffd\n")
    assert len(text) < 80
    assert logs.read_ends(str(path)) == path.read_bytes().decode(errors="replace")


def test_logs_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("nowhere", "fifo", "link", "."):
        assert logs.read_ends(str(tmp_path / name)) is None
