# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The error texts of a start that fails, as SGLang, torch and NCCL print them."""

from __future__ import annotations

import os
import signal

from sglang.srt.server_args import ServerArgs
from sglang.standin.settings import Settings

# Where in a scheduler's life each one strikes.
WEIGHTS, KV_CACHE, GRAPH, REQUEST = "weights", "kv_cache", "graph", "request"
PHASES = {
    "killed": WEIGHTS,
    "sigbus": WEIGHTS,
    "nccl": WEIGHTS,
    "cuda_oom": WEIGHTS,
    "unbalanced": WEIGHTS,
    "memory": KV_CACHE,
    "hicache": KV_CACHE,
    "graph_oom": GRAPH,
    "prefill_oom": REQUEST,
}
# These strike in the leader.
LEADER = ("model", "warmup")
ALL = (*PHASES, *LEADER)

CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried} GiB. GPU 0 has a total capacity of "
    "94.97 GiB of which {free} MiB is free. Including non-PyTorch memory, this process has 94.12 GiB memory in use. "
    "Of the allocated memory 93.01 GiB is allocated by PyTorch, and 214.13 MiB is reserved by PyTorch but unallocated."
)
GRAPH_HINT = (
    "\nPossible solutions:\n"
    "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
    "2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)\n"
    "3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled. (Not recommended. Huge performance loss)\n"
)


def text_of(kind: str, args: ServerArgs) -> str:
    """The last lines of the traceback for one kind of failure."""
    size_gb = args.hicache_size or 300
    texts = {
        "nccl": (
            "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
            "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.7\n"
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
        ),
        "cuda_oom": CUDA_OOM.format(tried="2.19", free="843.38"),
        "unbalanced": (
            "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
            "pre_model_load_memory=20.11, local_gpu_memory=94.28, local_gpu_memory * 0.9=84.85"
        ),
        "memory": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
        f"self.server_args.mem_fraction_static={args.mem_fraction_static}",
        "hicache": f"ValueError: Not enough host memory available. Requesting {size_gb:.2f} GB but only have "
        "123.45 GB free. Please reduce the size of the hierarchical cache.",
        "graph_oom": "Exception: Capture cuda graph failed: "
        + CUDA_OOM.format(tried="1.32", free="512.00")
        + GRAPH_HINT,
        "prefill_oom": CUDA_OOM.format(tried="3.50", free="839.00"),
        "model": f"OSError: {args.model_path} is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
    }
    return texts[kind]


class StandinFailure(Exception):
    """Carries the text that the traceback ends with."""


def fail_if_asked(settings: Settings, args: ServerArgs, phase: str) -> None:
    """Strike when this phase is the chosen failure's: raise StandinFailure, or die by a signal."""
    kind = settings.crash
    if PHASES.get(kind) != phase:
        return
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sigbus":
        os.kill(os.getpid(), signal.SIGBUS)
    raise StandinFailure(text_of(kind, args))


def traceback_text(function: str, text: str) -> str:
    """A Python traceback in SGLang's own shape around the text."""
    return (
        "Traceback (most recent call last):\n"
        f'  File "/sgl/python/sglang/srt/managers/scheduler.py", line 4310, in {function}\n'
        "    scheduler = Scheduler(\n"
        f"{text}\n"
    )
