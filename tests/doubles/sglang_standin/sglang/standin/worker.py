# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The children: scheduler, detokenizer and data parallel controller.

Each starts as a real multiprocessing spawn process, whose command line names neither SGLang nor its rank; it stays that
for the spawn phase and only then asks for the parent-death signal and takes its title, in SGLang's order. With the
leader it speaks over one multiprocessing connection: ("ready", info) first, then each request number comes back.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

from sglang.srt.server_args import ServerArgs
from sglang.standin import failures, holding, meeting
from sglang.standin.log import log, set_prefix
from sglang.standin.settings import Settings, read_settings
from sglang.standin.title import die_with_parent, set_title

SHUTDOWN = "shutdown"
Connection = multiprocessing.connection.Connection
LOADS_EVERY_S = 0.1  # the real one does it all the time


@dataclasses.dataclass(frozen=True)
class Rank:
    """Which scheduler this is: sizes are the server's, ``number`` counts all ranks, the segment is the leader's."""

    dp_rank: int
    tp_rank: int
    dp_size: int
    tp_size: int
    loads_segment: str

    @property
    def number(self) -> int:
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def label(self) -> str:
        """`` DP0 TP1``; a part is only there if its size is above 1."""
        data = f" DP{self.dp_rank}" if self.dp_size > 1 else ""
        return data + (f" TP{self.tp_rank}" if self.tp_size > 1 else "")


def ranks_of(args: ServerArgs, loads_segment: str) -> list[Rank]:
    """All ranks of this node in the order of their numbers."""
    here = args.tp_size // args.nnodes
    return [
        Rank(dp_rank, tp_rank, args.dp_size, args.tp_size, loads_segment)
        for dp_rank in range(args.dp_size)
        for tp_rank in range(here * args.node_rank, here * (args.node_rank + 1))
    ]


def no_core_files() -> None:
    """SIGQUIT is part of SGLang's normal ways: it must not fill a disk with core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_scheduler(args: ServerArgs, rank: Rank, connection: Connection) -> None:
    """Entry point of a scheduler process."""
    settings = read_settings()
    time.sleep(settings.spawn_s)
    no_core_files()
    die_with_parent()
    set_title("sglang::scheduler" + rank.label.replace(" ", "_"))
    set_prefix(rank.label)
    if settings.unreaped and os.fork() == 0:
        os._exit(0)  # nobody waits for it: a zombie with this rank's comm
    segment = None
    try:
        segment = _load(args, rank, settings)
        _answer(args, rank, settings, connection)
    except failures.StandinFailure as failure:
        log("Scheduler hit an exception: " + failures.traceback_text("run_scheduler_process", str(failure)))
        os.kill(os.getppid(), signal.SIGQUIT)
        # The leader kills this process; it must not look as if it had ended by itself before.
        signal.pause()
    if segment is not None:
        os.unlink(segment)


def _load(args: ServerArgs, rank: Rank, settings: Settings) -> str | None:
    """Everything before readiness. Returns the path of the queue segment if this rank made one."""
    holding.map_segment(rank.loads_segment, holding.loads_bytes(rank.dp_size))
    log("Init torch distributed begin.")
    if settings.listeners:
        holding.listen_like_torch(rank.number == 0, args.nccl_port)
    if settings.meets and args.nnodes > 1 and rank.tp_rank % (args.tp_size // args.nnodes) == 0:
        meeting.meet(str(args.dist_init_addr), args.node_rank, args.nnodes)
    total_gb, left_gb = settings.total_gpu_mem_gb, settings.available_gpu_mem_gb
    log(f"Load weight begin. avail mem={total_gb - 0.69:.2f} GB")
    holding.visit_devices(settings.device_paths)
    if rank.number < len(settings.device_paths):
        holding.hold_device(settings.device_paths[rank.number])
    failures.fail_if_asked(settings, args, failures.WEIGHTS)
    if settings.hang:
        _hang(settings.hang)
    time.sleep(settings.load_s)
    log(
        f"Load weight end. elapsed={settings.load_s:.2f} s, type=StandinForCausalLM, "
        f"avail mem={total_gb * 0.35:.2f} GB, mem usage={total_gb * 0.65:.2f} GB."
    )
    failures.fail_if_asked(settings, args, failures.KV_CACHE)
    tokens = args.max_total_tokens or settings.max_total_num_tokens
    log(f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: 6.61 GB, V size: 6.61 GB")
    log(f"Memory pool end. avail mem={left_gb + 1.5:.2f} GB")
    if args.enable_hierarchical_cache:
        size_gb = float(args.hicache_size or settings.pinned_mib / 1000)
        log(f"Allocating {size_gb:.2f} GB host memory for hierarchical KV cache.")
    holding.pin_memory(settings.pinned_mib)
    if not args.disable_cuda_graph:
        log(
            f"Capture target decode CUDA graph begin. backend=full, num_tokens_per_bs=1, bs=[1, 2, 4, 8], "
            f"avail mem={left_gb + 1.5:.2f} GB"
        )
        failures.fail_if_asked(settings, args, failures.GRAPH)
        log(f"Capture target decode CUDA graph end. elapsed=1.07 s, mem usage=1.50 GB, avail mem={left_gb:.2f} GB.")
    if rank.tp_rank == 0:
        log(
            f"max_total_num_tokens={tokens}, chunked_prefill_size={args.chunked_prefill_size}, "
            f"max_prefill_tokens={args.max_prefill_tokens}, max_running_requests={args.max_running_requests}, "
            f"context_len={args.context_length or 262144}, available_gpu_mem={left_gb:.2f} GB"
        )
    if settings.orphan:
        _fork_worker()
    return holding.make_queue_segment() if rank.tp_rank == 0 else None


def _hang(how: str) -> None:
    """Never become ready; ``spin`` uses the processor (at the lowest priority), ``sleep`` does not."""
    os.nice(19)
    while True:
        if how == "sleep":
            time.sleep(3600)


def _fork_worker() -> None:
    """A forked helper, such as a compile or data-loader worker: it inherits every mapping and outlives its parent.

    The kernel drops the parent-death signal at fork, which is why it survives.
    """
    if os.fork() == 0:
        # Otherwise multiprocessing's resource tracker lived as long as this process.
        from multiprocessing import resource_tracker

        if resource_tracker._resource_tracker._fd is not None:  # type: ignore[attr-defined]
            os.close(resource_tracker._resource_tracker._fd)  # type: ignore[attr-defined]
        set_title("python3")
        while True:
            signal.pause()


def _answer(args: ServerArgs, rank: Rank, settings: Settings, connection: Connection) -> None:
    tokens = args.max_total_tokens or settings.max_total_num_tokens
    _serve(connection, {"max_total_num_tokens": tokens, "max_req_input_len": tokens - 6}, args, rank, settings)


def _serve(connection: Connection, info: dict[str, int], args: ServerArgs, rank: Rank, settings: Settings) -> None:
    """Answer until told to shut down. Without a leader (it died in our spawn phase) SGLang would wait for ever too."""
    try:
        connection.send(("ready", info))
        if rank.dp_rank == settings.dead_dp_rank and rank.dp_size > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loads = holding.LoadsWriter(rank.loads_segment, rank.dp_size, rank.dp_rank) if rank.loads_segment else None
        while True:
            # Of the ranks of one model copy the first one tells; nobody else need wake up.
            while loads is not None and rank.tp_rank == 0 and not connection.poll(LOADS_EVERY_S):
                loads.write()
            message = connection.recv()
            if message == SHUTDOWN:
                return
            number, from_user = message
            if from_user:
                failures.fail_if_asked(settings, args, failures.REQUEST)
            connection.send(("done", number))
    except (EOFError, OSError):
        while True:
            signal.pause()


def run_detokenizer(args: ServerArgs, connection: Connection) -> None:
    """Entry point of the detokenizer process."""
    settings = read_settings()
    time.sleep(settings.spawn_s)
    no_core_files()
    die_with_parent()
    set_title("sglang::detokenizer")
    holding.visit_devices(settings.device_paths)
    _serve(connection, {}, args, Rank(0, 0, 1, 1, ""), dataclasses.replace(settings, crash="", dead_dp_rank=-1))


def run_controller(args: ServerArgs, ends: Sequence[tuple[Rank, Connection]]) -> None:
    """Entry point of the data parallel controller: it starts the schedulers and never notices when one dies."""
    settings = read_settings()
    time.sleep(settings.spawn_s)
    no_core_files()
    die_with_parent()
    set_title("sglang::data_parallel_controller")
    holding.visit_devices(settings.device_paths)
    children = start_schedulers(args, ends)
    for child in children:
        child.join()
    log("All schedulers terminated.")
    sys.exit(0)


def start_schedulers(
    args: ServerArgs, ends: Sequence[tuple[Rank, Connection]]
) -> list[multiprocessing.process.BaseProcess]:
    """Spawn one process per rank, hand it its end of the connection and close ours, so that its death shows as EOF."""
    context = multiprocessing.get_context("spawn")
    children: list[multiprocessing.process.BaseProcess] = []
    for rank, connection in ends:
        child = context.Process(target=run_scheduler, args=(args, rank, connection))
        child.start()
        connection.close()
        children.append(child)
    return children
