# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The leader: starts the children, waits until they are ready, serves HTTP, and ends as SGLang 0.5.15 ends.

Its title stays the command line. Main thread: waits for errands and takes signals. Threads: HTTP, warmup, one per child
that watches for its death, and the one that polls for SIGTERM.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn

from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.standin import failures, holding
from sglang.standin.engine import Channel, Engine
from sglang.standin.http import Api, listen, listen_dummy
from sglang.standin.log import log
from sglang.standin.settings import Settings, read_settings
from sglang.standin.tree import descendants, kill_tree
from sglang.standin.worker import (
    Connection,
    Rank,
    no_core_files,
    ranks_of,
    run_controller,
    run_detokenizer,
    start_schedulers,
)

Child = multiprocessing.process.BaseProcess


def main(argv: Sequence[str]) -> NoReturn:
    """Run the server; never returns. Ends by SIGKILL like SGLang, or with status 1 or 2 when it could not start."""
    if not sys.argv[0].endswith("sglang"):
        warnings.warn(
            "'python -m sglang.launch_server' is still supported, but 'sglang serve' is the recommended entrypoint.\n"
            "  Example: sglang serve --model-path <model> [options]",
            UserWarning,
            stacklevel=1,
        )
    settings = read_settings()
    if settings.crash and settings.crash not in failures.ALL:
        sys.exit(f"SGLANG_STANDIN_CRASH: one of {', '.join(failures.ALL)} expected, got {settings.crash!r}")
    args = prepare_server_args(argv)
    no_core_files()
    if settings.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        Leader(args, settings).run()
    finally:
        kill_tree(include_self=False)


class Leader:
    """One server's life."""

    def __init__(self, args: ServerArgs, settings: Settings) -> None:
        self.args = args
        self.settings = settings
        self.terminating = False
        self.stopping = threading.Event()
        self.handlers_installed = threading.Event()
        self.errands: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(self) -> NoReturn:
        """Start everything and serve until killed."""
        log(f"server_args={self.args!r}")
        if self.settings.crash == "model":
            sys.exit(failures.traceback_text("launch_server", failures.text_of("model", self.args)))
        signal.signal(signal.SIGQUIT, self._on_sigquit_at_launch)
        segment = holding.make_loads_segment(self.args.dp_size)
        holding.make_ipc_sockets()
        ranks = ranks_of(self.args, segment)
        if self.args.node_rank >= 1:
            self._run_later_node(ranks)
        children, channels, detokenizer = self._start_children(ranks)
        holding.visit_devices(self.settings.device_paths)
        info = self._wait_until_ready(children, [*channels, detokenizer])
        size = self.args.tp_size // self.args.nnodes
        groups = [channels[start : start + size] for start in range(0, len(channels), size)]
        engine = Engine(groups, detokenizer, self.settings)
        api = Api(self.args, self.settings, engine, info, self.install_handlers)
        server = listen(self.args, api)
        for child in children:
            threading.Thread(target=self._watch, args=(child,), daemon=True).start()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        threading.Thread(target=self._warm_up, args=(api,), daemon=True).start()
        while True:
            self.errands.get()
            self._install_handlers(api)

    def _run_later_node(self, ranks: list[Rank]) -> NoReturn:
        """Node rank 1 and above: schedulers alone, and once they are ready a dummy that says 200 whatever happens."""
        pairs = [multiprocessing.Pipe() for _unused in ranks]
        children = start_schedulers(self.args, [(rank, pair[1]) for rank, pair in zip(ranks, pairs)])
        self._wait_until_ready(children, [Channel(pair[0]) for pair in pairs])
        server = listen_dummy(self.args)
        log(f"Dummy health check server started in background thread at {self.args.host}:{self.args.port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for child in children:
            child.join()
            log(f"Scheduler or DataParallelController {child.pid} terminated with {child.exitcode}")
        while True:
            signal.pause()

    def _start_children(self, ranks: list[Rank]) -> tuple[list[Child], list[Channel], Channel]:
        """Schedulers (or the data parallel controller) first, then the detokenizer, as SGLang does."""
        context = multiprocessing.get_context("spawn")
        pairs = [multiprocessing.Pipe() for _unused in ranks]
        ends: list[tuple[Rank, Connection]] = [(rank, pair[1]) for rank, pair in zip(ranks, pairs)]
        if self.args.dp_size > 1:
            controller = context.Process(target=run_controller, args=(self.args, ends))
            controller.start()
            children: list[Child] = [controller]
            for _rank, connection in ends:
                connection.close()
        else:
            children = start_schedulers(self.args, ends)
        ours, theirs = multiprocessing.Pipe()
        detokenizer = context.Process(target=run_detokenizer, args=(self.args, theirs))
        detokenizer.start()
        theirs.close()
        return [*children, detokenizer], [Channel(pair[0]) for pair in pairs], Channel(ours)

    def _wait_until_ready(self, children: list[Child], channels: list[Channel]) -> dict[str, int]:
        """The first scheduler's init info. A child that dies before is an error that ends the server with status 1."""
        infos = []
        for rank, channel in enumerate(channels):
            try:
                infos.append(channel.read_ready())
            except (EOFError, OSError):
                child = children[min(rank, len(children) - 1)]
                child.join(timeout=10)
                raise RuntimeError(
                    f"Rank {rank} scheduler died during initialization (exit code: {child.exitcode}). "
                    "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. "
                    "Run `dmesg -T | grep -i oom` to check."
                ) from None
        return infos[0]

    def _watch(self, child: Child) -> None:
        """Wait for a child's death; unless it ended well or we are stopping, bring the server down."""
        assert child.pid is not None
        try:
            descriptor = os.pidfd_open(child.pid)
        except ProcessLookupError:
            descriptor = None
        if descriptor is not None:
            select.select([descriptor], [], [])
            os.close(descriptor)
        child.join()
        if self.stopping.is_set() or child.exitcode == 0:
            return
        time.sleep(self.settings.death_delay_s)
        log(
            f"Subprocess {child.name} (pid={child.pid}) crashed with exit code {child.exitcode}. "
            "Triggering SIGQUIT for cleanup..."
        )
        os.kill(os.getpid(), signal.SIGQUIT)

    def _warm_up(self, api: Api) -> None:
        """The first request, to ourselves; after it /health is 200."""
        time.sleep(self.settings.warmup_s)
        if self.settings.crash == "warmup":
            log(
                "Initialization failed. warmup error: AssertionError: "
                "res=<Response [500]>, res.text='Internal Server Error'"
            )
            kill_tree(include_self=True)
        if not self.args.skip_server_warmup:
            api.generate_warmup()
        api.up = True
        log("The server is fired up and ready to roll!")

    def install_handlers(self) -> None:
        """Have the main thread install the signal handlers (only it can); called with the first request."""
        if not self.handlers_installed.is_set():
            self.errands.put("install")
            self.handlers_installed.wait()

    def _install_handlers(self, api: Api) -> None:
        if self.handlers_installed.is_set():
            return
        if not self.settings.ignore_term:
            signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGQUIT, self._on_sigquit)
        threading.Thread(target=self._poll_for_termination, args=(api,), daemon=True).start()
        self.handlers_installed.set()

    def _on_sigterm(self, signum: int, frame: object | None) -> None:
        log(f"SIGTERM received. {signum=} frame=... Draining requests and shutting down...")
        self.terminating = True

    def _on_sigquit_at_launch(self, signum: int, frame: object | None) -> None:
        log("Received sigquit from a child process. It usually means the child failed.")
        kill_tree(include_self=True)

    def _on_sigquit(self, signum: int, frame: object | None) -> None:
        log(f"SIGQUIT received. {signum=}, frame=... It usually means one child failed.")
        kill_tree(include_self=True)

    def _poll_for_termination(self, api: Api) -> None:
        """SGLang polls every 5 s, then waits for the requests in flight without any limit."""
        while not self.terminating:
            time.sleep(self.settings.poll_s)
        api.terminating = True
        while True:
            running = sorted(api.engine.running)
            if api.unhealthy or os.environ.get("SGL_FORCE_SHUTDOWN", "").lower() in ("1", "true"):
                log("Signal SIGTERM received while health check failed. Force exiting.")
                break
            log(
                f"Gracefully exiting... Remaining number of requests {len(running)}. "
                f"Remaining requests remaining_rids={running}."
            )
            if not running:
                break
            time.sleep(self.settings.poll_s)
        self.stopping.set()
        api.engine.shut_down()
        self._wait_for_schedulers()
        kill_tree(include_self=True)

    def _wait_for_schedulers(self) -> None:
        deadline = time.monotonic() + self.settings.shutdown_wait_s
        while time.monotonic() < deadline and any(map(_is_scheduler, descendants(os.getpid()))):
            time.sleep(0.05)


def _is_scheduler(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().startswith(b"sglang::scheduler")
    except (FileNotFoundError, ProcessLookupError):
        return False
