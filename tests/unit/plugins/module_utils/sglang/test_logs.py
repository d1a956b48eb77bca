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
