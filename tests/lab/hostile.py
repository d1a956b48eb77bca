# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A node with a container whose root means harm, and everything beside it that must not be touched: who is signalled is
told by strace, who opens a file by inotify, what becomes of one by its inode.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import secrets
import struct
import sys
import threading
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Hold
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.playbook import TaskResult, run_playbook
from ansible_collections.cleanslate.sglang.tests.harness.trace import CALLS, parse_trace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.gpus import USED_MIB
from ansible_collections.cleanslate.sglang.tests.lab.node import NAME, Guest, Node
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import DOUBLES, PYTHON
from ansible_collections.cleanslate.sglang.tests.lab.scenarios import (
    DEADLINES,
    NVML_S,
    OTHER_PORT,
    PORT,
    STEP_S,
    Census,
    ansible_env_of,
    bounded,
    everybody_in,
    holder_on,
    start_by_hand,
    start_ticks,
)

GPU = "/dev/nvidia0"
DEAD_PID = 4194000  # as in hostile_guest.py
READY_S = 120
SIZE_LIMIT = 2 << 20
# Everything that can be done to files and processes but to read them; who reads is told by inotify.
CHANGES = "unlink,unlinkat,rename,renameat,renameat2,rmdir,mknod,mknodat,symlink,symlinkat,link,linkat,mount,umount2"
IN_ACCESS, IN_MODIFY, IN_OPEN, IN_DELETE_SELF, IN_MOVE_SELF, IN_ATTRIB = 0x1, 0x2, 0x20, 0x400, 0x800, 0x4
TOUCHED = IN_ACCESS | IN_MODIFY | IN_OPEN | IN_DELETE_SELF | IN_MOVE_SELF | IN_ATTRIB
EVENT = struct.Struct("iIII")
# The sum of what three modules on the node may take: their deadlines, and the steps around them.
BOUND_S = 2 * sum(DEADLINES.values()) + 12 * NVML_S + 10 * STEP_S + 3 * 30


class Canaries:
    """Files that nobody may touch: whoever opens, changes, moves or removes one is noticed by the kernel's inotify."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._notify = self._libc.inotify_init1(os.O_NONBLOCK)
        self._names: dict[int, str] = {}

    def watch(self, path: Path) -> None:
        number = self._libc.inotify_add_watch(self._notify, os.fsencode(path), TOUCHED)
        assert number >= 0, f"{path}: {os.strerror(ctypes.get_errno())}"
        self._names[number] = str(path)

    def touched(self) -> set[str]:
        """What happened since the last call."""
        found = set()
        data = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                data += os.read(self._notify, 1 << 16)
        at = 0
        while at < len(data):
            number, mask, _cookie, length = EVENT.unpack_from(data, at)
            at += EVENT.size + length
            found.add(f"{self._names.get(number, '?')} {mask:#x}")
        return found

    def close(self) -> None:
        os.close(self._notify)


class Whereabouts:
    """Who was seen inside of a container's cgroups, and who outside, while the block runs."""

    def __init__(self, guest: Guest) -> None:
        self._roots = [path for path in _cgroups_of(guest.vmid) if path.is_dir()]
        assert self._roots
        self.inside: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.is_set():
            for root in self._roots:
                for folder, _names, _files in os.walk(root):
                    with contextlib.suppress(OSError):
                        self.inside |= {int(pid) for pid in Path(folder, "cgroup.procs").read_text().split()}
            time.sleep(0.02)

    def __enter__(self) -> Whereabouts:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        self._thread.join(10)


def _cgroups_of(vmid: int) -> list[Path]:
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [line[4] for line in lines if "cgroup2" in line or "name=systemd" in line[-1]]
    return [Path(point) / "lxc" / str(vmid) for point in points]


class Field:
    """A node with a hostile container, a neighbour, and everything that must not be touched."""

    def __init__(self, node: Node, mine: Guest, other: Guest | None, stack: contextlib.ExitStack) -> None:
        self.node, self.mine, self.other = node, mine, other
        self.token = secrets.token_hex(8)
        self.secret = f"SECRET-{self.token}"
        self.aim = f"/etc/aim-{self.token}"
        self.canaries = Canaries()
        self.lock = node.gpus.locks / "gpu0.2"
        node.gpus.write(Hold(0, USED_MIB, lock=str(self.lock), listed="no"))
        stack.callback(self.canaries.close)
        self.victim = stack.enter_context(holder_on(node, 1))
        self.spared = Census.of({self.victim, mine.box.outer_init, os.getpid(), *node.processes()[:1]})
        self.kept: dict[Path, tuple[int, int, str]] = {}
        self._make_files()
        if other is not None:
            start_by_hand(other, "embed", OTHER_PORT, 0)
            self.spared = Census.of({*self.spared.living, *everybody_in(other)})

    def _make_files(self) -> None:
        """On the node: a record where a guest's links would lead, leftovers in its own /dev/shm, a state directory."""
        record = {
            "schema": 1,
            "name": "chat",
            "launch_id": "20260131T235959Z-1a2b",
            "state": "started",
            "launcher": "systemd",
            "pid": self.victim,
            "start_ticks": start_ticks(self.victim),
            "sid": self.victim,
            "port": PORT,
            "unit": self.secret,
        }
        text = json.dumps(record)
        chat = "/var/lib/cleanslate/chat"
        places = [self.aim, f"/dev/shm/sgl_shm_mm_{DEAD_PID}_node", f"/dev/shm/sgl_shm_mm_{DEAD_PID}_swap"]
        places += [f"{chat}/current.json", f"{chat}/lease.json", f"/tmp/sgl_shm_mm_{DEAD_PID}_{self.token}"]
        script = "mkdir -p /var/lib/cleanslate"
        script += "; for each in /var/lib/cleanslate /dev/shm; do mount -t tmpfs tmpfs $each; done"
        script += f"; mkdir {chat}; for each in {' '.join(places)}; do printf %s '{text}' >$each; done"
        self.node.run(["sh", "-ec", script], 30).check()
        root = Path(f"/proc/{self.node.processes()[0]}/root")
        for place in places:
            self.keep(root / place.lstrip("/"))
        if self.other is not None:
            theirs = self.other.box.root
            for place in (f"dev/shm/sgl_shm_mm_{DEAD_PID}_other", f"tmp/sgl_shm_mm_{DEAD_PID}_other"):
                (theirs / place).write_text(self.secret)
                self.keep(theirs / place)

    def keep(self, path: Path) -> None:
        info = path.stat()
        self.kept[path] = (info.st_dev, info.st_ino, path.read_text())
        self.canaries.watch(path)

    def attack(self, *attacks: str, more: t.Sequence[str] = ()) -> None:
        """Let it begin; returns when all of it is in place."""
        ready = self.mine.box.root / "run/hostile.out"
        words = ["systemd-run", "--quiet", "--unit=hostile", f"--property=StandardOutput=file:/run/{ready.name}"]
        words += ["--property=StandardError=file:/run/hostile.err", "--property=TasksMax=infinity"]
        words += ["--property=Delegate=yes", PYTHON, f"{DOUBLES}/fixtures/hostile_guest.py", "--gpu", GPU]
        words += ["--aim", self.aim, "--victim", str(self.victim), *more, *attacks]
        self.mine.box.run(words, 60).check()
        errors = ready.with_name("hostile.err")

        def is_ready() -> bool:
            if errors.exists() and errors.read_text(errors="replace").strip():
                raise AssertionError(errors.read_text(errors="replace"))
            return ready.exists() and ready.read_text() == "ready\n"

        wait_for("the attacks", is_ready, READY_S)
        self.canaries.touched()

    def still_held(self) -> set[int]:
        """Who of the container has GPU 0, as the kernel says; 0 for those that come and go, by their lock."""
        pids = {0} if self._is_locked() else set()
        for root in _cgroups_of(self.mine.vmid):
            for folder, _names, _files in os.walk(root):
                with contextlib.suppress(OSError):
                    pids |= {int(pid) for pid in Path(folder, "cgroup.procs").read_text().split()}
        return pids & (self.node.gpus.holders(0) | {0})

    def _is_locked(self) -> bool:
        with self.lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def check_untouched(self) -> None:
        """Files of the node and of the neighbour, and whoever lives there."""
        assert not (touched := self.canaries.touched()), touched
        for path, (device, inode, text) in self.kept.items():
            info = path.stat()
            assert (info.st_dev, info.st_ino) == (device, inode), path
            assert path.read_text() == text, path
        self.canaries.touched()
        self.spared.check()


def traced_python(node: Node) -> str:
    """An interpreter for the node's modules that records every signal, and every change of a file."""
    traces = node.directory / "traces"
    traces.mkdir(exist_ok=True)
    path = node.directory / "traced-python"
    words = f"strace -f -qq --seccomp-bpf -e trace={CALLS},{CHANGES} -e signal=none --decode-fds=pidfd"
    path.write_text(f'#!/bin/sh\nexec {words} -o {traces}/$$ {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def traces_of(node: Node) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted((node.directory / "traces").iterdir()))


def on_node(field: Field, scratch: Path, *tasks: tuple[str, dict[str, t.Any]], trace: bool = True) -> list[TaskResult]:
    """Modules on the node, one after another, whatever the one before said."""
    node = field.node
    python = {"ansible_python_interpreter": traced_python(node)} if trace else {}
    inventory = scratch / "node.json"
    inventory.write_text(json.dumps({"all": {"hosts": {NAME: node.host_vars(**python)}}}))
    written = [
        {
            "name": f"{number} {module}",
            f"cleanslate.sglang.{module}": arguments,
            "environment": node.environment,
            "ignore_errors": True,
        }
        for number, (module, arguments) in enumerate(tasks)
    ]
    play = scratch / "node.yml"
    play.write_text(json.dumps([{"hosts": NAME, "gather_facts": False, "tasks": written}]))
    run = run_playbook(play, scratch=scratch, deadline_s=BOUND_S + 60, inventory=inventory, env=ansible_env_of(node))
    assert len(run.tasks) == len(tasks), f"rc {run.rc}\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
    assert field.secret not in run.stdout + run.stderr
    return list(run.tasks)


def look_of(field: Field) -> dict[str, t.Any]:
    return {"container": str(field.mine.vmid), "device_major": LOOP_MAJOR, "devices": ["0"]}


def eviction(field: Field, **more: t.Any) -> tuple[str, dict[str, t.Any]]:
    """With the widest scope."""
    order = {"name": "chat", "port": PORT, "scope": "gpu", "deadlines": DEADLINES, **more}
    return "gpu_evict", {**look_of(field), **order}


def judgement(field: Field) -> tuple[str, dict[str, t.Any]]:
    order = {"samples": 1, "ports": [PORT], "allow_simulated": True, "user": "sglang"}
    return "clean_state", {**look_of(field), **order}


def assault(
    field: Field,
    scratch: Path,
    request: pytest.FixtureRequest,
    name: str,
    *,
    exact: bool = True,
    trace: bool = True,
    **more: t.Any,
) -> list[TaskResult]:
    """Judge, evict, judge again, and check all that must hold of any of it. ``exact``: nobody comes and goes by
    himself, so whoever was signalled was seen in the container before. ``trace``: without it, signals and changes are
    told by who lives and by the canaries alone; strace waits for each helper that hangs in a file system and was left.
    """
    with Whereabouts(field.mine) as seen, bounded(request, f"hostile: {name}", BOUND_S):
        done = on_node(field, scratch, judgement(field), eviction(field, **more), judgement(field), trace=trace)
    holding = field.still_held()
    if trace:
        found = check_signals(field)
        assert not exact or found <= seen.inside, found - seen.inside
        check_changes(field)
    field.check_untouched()
    for one in done:
        text = json.dumps(one.result)
        assert field.secret not in text and len(text) < SIZE_LIMIT, (one.task, len(text))
        assert not re.search(r"Traceback|unexpected", text), text[:4000]
    before, evicted, after = (one.result.get("verdict") for one in done)
    assert before in ("dirty", "unknown"), done[0].result
    if holding:
        # Who bears the name of a program that is left alone is, and is named; that the GPU is free nobody says.
        spared = {one["pid"] for one in done[1].result.get("spared", [])}
        assert evicted in ("failed", "unknown") or holding <= spared, (holding, done[1].result)
        assert after in ("dirty", "unknown"), done[2].result
    return done


def check_signals(field: Field) -> set[int]:
    """Nobody of the node's or of the neighbour's; who it was."""
    calls = re.compile(rf"\b({CALLS.replace(',', '|')})\b")
    text = "\n".join(line for line in traces_of(field.node).splitlines() if calls.search(line))
    targets = {one.target for one in parse_trace(text)}
    assert None not in targets
    # A helper of ours that did not answer in time goes with its session, before itself.
    helpers = {-one for one in targets if one is not None and one < 0}
    assert not helpers & set(field.spared.living), helpers & set(field.spared.living)
    found = {one for one in targets if one is not None and one > 0} - helpers
    assert not found & set(field.spared.living), found & set(field.spared.living)
    return found


def check_changes(field: Field) -> None:
    """No file was removed or renamed but leftovers by their names, in a folder that was opened before."""
    for line in traces_of(field.node).splitlines():
        call = re.match(rf"(?:\d+ +)?({CHANGES.replace(',', '|')})\((.*)\) += 0", line)
        if call is None or re.search(r"ansible|/__pycache__/|^\"/tmp/[a-z0-9_]{8}\"", call[2]):
            continue  # Ansible's own, and Python's, which tries out where temporary files may lie
        assert call[1] == "unlinkat" and re.match(r'\d+, "(sgl_shm_|sglang_loads_|nccl-)[^/"]*", 0$', call[2]), line


@contextlib.contextmanager
def field_of(node: Node, *, neighbour: bool = False, unprivileged: bool = False) -> t.Iterator[Field]:
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(node.guest(numbers=[129], unprivileged=unprivileged))
        other = stack.enter_context(node.guest(numbers=[130])) if neighbour else None
        yield Field(node, mine, other, stack)
