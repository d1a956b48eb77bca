#!/usr/bin/python
# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: memory_info
version_added: 0.1.0
short_description: Show a host's memory as the next server will find it
description:
  - Shows RAM, swap, hugepages and page cache apart, the limit of the memory cgroup, the memory that SGLang's
    processes keep pinned,
    and C(/dev/shm) file by file with the processes that made and use them.
  - A figure that could not be read is C(null), never zero, and RV(problems) says why.
  - Reading is bounded by O(deadline_s), since C(/proc/meminfo) of a container whose lxcfs died, or the maps of a
    stuck process, can hang.
author:
  - Clean Slate contributors (@cleanslate)
extends_documentation_fragment:
  - cleanslate.sglang.attributes
  - cleanslate.sglang.attributes.info_module
  - cleanslate.sglang.attributes.actiongroup_sglang
options:
  proc_root:
    description:
      - Where the C(proc) file system is found. Other values serve recorded trees.
    type: path
    default: /proc
  sys_root:
    description:
      - Where C(/sys) is found, for the memory cgroup. Other values serve recorded trees.
    type: path
    default: /sys
  shm_dir:
    description:
      - The directory of POSIX shared memory.
    type: path
    default: /dev/shm
  deadline_s:
    description:
      - How long, in seconds, all readings together may take. Memory, processes and shared memory get a third each; what
        was not read by then is C(null).
    type: float
    default: 30
notes:
  - Run it as root. Other users see neither the mappings nor the open files of foreign processes, and then
    RV(shm.scan_complete) is V(false).
seealso:
  - module: cleanslate.sglang.clean_state
  - module: cleanslate.sglang.gpu_info
"""

EXAMPLES = r"""
- name: Look at the memory
  cleanslate.sglang.memory_info:
  register: memory

- name: Show it as free -g does
  ansible.builtin.debug:
    msg: "{{ memory.free_g.splitlines() }}"

- name: Demand room for a HiCache pool of 8 ranks with 48 GB each
  ansible.builtin.assert:
    that:
      - memory.available_mib is not none
      - memory.available_mib > (8 * 48 + 40) * 1000 ** 3 // 1024 ** 2
"""

RETURN = r"""
meminfo:
  description: C(/proc/meminfo) in MiB. V(null) if it could not be read in time.
  returned: success
  type: dict
  sample:
    mem_total_mib: 459776
    mem_available_mib: 454656
    mem_free_mib: 403456
    buffers_mib: 210
    cached_mib: 50176
    shmem_mib: 12
    sreclaimable_mib: 900
    unevictable_mib: 18
    mlocked_mib: 17
    swap_total_mib: 0
    swap_free_mib: 0
    hugepages_total: 0
    hugepages_free: 0
    hugepage_size_kib: 2048
    hugepages_mib: 0
  contains:
    mem_total_mib:
      description: RAM of the host, or the limit of the container where lxcfs says so.
      type: int
    mem_available_mib:
      description: What programs can get without swapping. Page cache counts as available, reserved hugepages do not.
      type: int
    mem_free_mib:
      description: RAM that holds nothing at all.
      type: int
    buffers_mib:
      description: Cache of block devices.
      type: int
    cached_mib:
      description: Page cache, including shared memory.
      type: int
    shmem_mib:
      description: Shared memory and tmpfs. Some versions of lxcfs show the host's figure, which can exceed the total.
      type: int
    sreclaimable_mib:
      description: Kernel memory that can be reclaimed.
      type: int
    unevictable_mib:
      description: Memory that can't be swapped out or dropped.
      type: int
    mlocked_mib:
      description: Memory locked by C(mlock).
      type: int
    swap_total_mib:
      description: Size of the swap.
      type: int
    swap_free_mib:
      description: Unused swap.
      type: int
    hugepages_total:
      description: Number of hugepages of the default size.
      type: int
    hugepages_free:
      description: Number of those that nobody uses. They are of no use to programs that do not ask for hugepages.
      type: int
    hugepage_size_kib:
      description: The default size of a hugepage in KiB.
      type: int
    hugepages_mib:
      description: RAM reserved for hugepages of every size, used or not.
      type: int
cgroup:
  description:
    - The memory limit that binds first of those set on this process's cgroups that can be seen from here. V(null) if
      it could not be read in time.
    - In a container the levels above the container's own root can't be seen.
  returned: success
  type: dict
  sample:
    version: 2
    path: /system.slice/sglang-main.service
    limit_mib: 262144
    current_mib: 12000
    headroom_mib: 258000
    readable: true
  contains:
    version:
      description: V(1) or V(2); V(null) without a memory cgroup.
      type: int
    path:
      description: The cgroup that sets the limit, or our own if there is none.
      type: str
    limit_mib:
      description: The limit, V(null) if there is none.
      type: int
    current_mib:
      description: What that cgroup uses, page cache included.
      type: int
    headroom_mib:
      description: The limit, less what is used, plus file pages that can be reclaimed. V(null) if there is no limit.
      type: int
    readable:
      description: V(false) if there may be a limit that could not be read.
      type: bool
available_mib:
  description: What a new server can get, the smaller of C(mem_available_mib) and the cgroup's headroom. V(null) if it
    is not known.
  returned: success
  type: int
  sample: 454656
free_g:
  description: What C(free -g) would print.
  returned: success
  type: str
  sample: |2-
                       total        used        free      shared  buff/cache   available
    Mem:             449           4         394           0          50         444
    Swap:              0           0           0
sglang:
  description: SGLang's leaders and workers with the memory that they pin. V(null) if the processes could not be read.
  returned: success
  type: list
  elements: dict
  sample:
    - pid: 4711
      title: sglang::scheduler_TP0
      rss_shmem_mib: 9589
      vm_pin_mib: 0
      vm_lck_mib: 0
  contains:
    pid:
      description: The process id.
      type: int
    title:
      description: The worker's title, or the leader's command line without secrets.
      type: str
    rss_shmem_mib:
      description: Resident shared memory. SGLang's host pool (HiCache) shows here.
      type: int
    vm_pin_mib:
      description: Pinned memory.
      type: int
    vm_lck_mib:
      description: Locked memory.
      type: int
pinned_mib:
  description:
    - The sum, over these processes, of the largest of the three figures. The kernel needs 0.22 to 0.24 s per GB to
      release it after a kill.
    - Shared segments count once for each process that maps them. V(null) if a process could not be read.
  returned: success
  type: int
  sample: 9589
shm:
  description: The shared memory directory.
  returned: success
  type: dict
  sample:
    path: /dev/shm
    total_mib: 65536
    free_mib: 47104
    free_inodes: 8200000
    file_count: 852
    files_mib: 18432.0
    stale_count: 851
    stale_mib: 18408.0
    scan_complete: true
    files: []
    files_left_out: 0
    deleted_but_mapped: []
  contains:
    path:
      description: The directory.
      type: str
    total_mib:
      description: Its size. V(null) if it could not be read.
      type: int
    free_mib:
      description: The room that is left.
      type: int
    free_inodes:
      description: How many more files fit. V(null) if it is not known or not limited.
      type: int
    file_count:
      description: The number of regular files, one level of directories included.
      type: int
    files_mib:
      description: The room that they take.
      type: float
    stale_count:
      description: The number of files that RV(shm.files[].stale) says are left over.
      type: int
    stale_mib:
      description: The room that these take.
      type: float
    scan_complete:
      description: Whether every process that could use a file was looked at. If not, no file counts as stale.
      type: bool
    files:
      description: The files, at most 5000, the largest first. V(null) if the directory could not be listed.
      type: list
      elements: dict
      contains:
        name:
          description: The name below the directory.
          type: str
        size_mib:
          description: The room that it takes.
          type: float
        uid:
          description: The owner.
          type: int
        creator_pid:
          description: The process id that its name carries.
          type: int
        creator_alive:
          description: Whether that process lives. V(null) if the name carries none or it can't be known from here.
          type: bool
        mapped_by:
          description: The processes that map it.
          type: list
          elements: int
        opened_by:
          description: The processes that have it open.
          type: list
          elements: int
        age_s:
          description: Seconds since it was last written.
          type: float
        stale:
          description:
            - Whether it surely is a leftover of a dead server.
            - Files whose name carries no process id are never stale here, since which server they belong to is not
              asked.
          type: bool
        why:
          description: Why it is stale or not.
          type: str
    files_left_out:
      description: How many files are not listed for their number.
      type: int
    deleted_but_mapped:
      description: Files without a name that still take room, since a process maps them.
      type: list
      elements: dict
      contains:
        path:
          description: The name that it had.
          type: str
        pid:
          description: The process that maps it.
          type: int
problems:
  description: What could not be read, and why.
  returned: success
  type: list
  elements: dict
  sample:
    - call: read maps and fds
      code: null
      message: "processes that could not be read: 3 (pid 1, 212, 214); run as root"
  contains:
    call:
      description: What was tried.
      type: str
    code:
      description: The system's error number, if there was one.
      type: int
    message:
      description: What it said.
      type: str
seconds:
  description: How long the readings took.
  returned: success
  type: float
  sample: 0.08
"""

import os
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.leftovers import judge_leftover
from ansible_collections.cleanslate.sglang.plugins.module_utils.defects import Told
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import (
    Problem,
    Process,
    ShmFile,
    ShmReading,
    to_json,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.memory import (
    available_mib,
    free_table,
    read_cgroup_limit,
    read_meminfo,
    read_pinned,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_processes
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.shm import read_shm
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.cmdline import is_leader, worker_role
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import Redactor
from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import Called, call_bounded

_MOST_FILES = 5000


def memory_facts(proc: str, sys: str) -> dict[str, t.Any]:
    """RAM and the cgroup's limit."""
    memory = read_meminfo(proc)
    cgroup = read_cgroup_limit(proc, sys)
    problems = []
    if memory.mem_available_mib is None:
        problems.append(Problem(f"read {proc}/meminfo", None, "MemAvailable is not told"))
    if not cgroup.readable:
        problems.append(Problem("read the memory cgroup", None, "whether a cgroup limits the memory is not known"))
    return {
        "meminfo": to_json(memory),
        "cgroup": to_json(cgroup),
        "available_mib": available_mib(memory, cgroup),
        "free_g": free_table(memory),
        "problems": to_json(problems),
    }


def is_sglang(process: Process) -> bool:
    return is_leader(process.argv) or worker_role(process.title) is not None


def pinned_facts(proc: str) -> dict[str, t.Any]:
    """Pinned memory of SGLang's processes."""
    redactor = Redactor()
    processes = [process for process in read_processes(proc).values() if is_sglang(process) and not process.dead]
    pins = read_pinned(processes, proc, lambda process: " ".join(redactor.argv(process.argv)).strip())
    sizes = [pin.pinned_mib for pin in pins]
    unknown = [pin.pid for pin, size in zip(pins, sizes) if size is None]
    return {
        "sglang": to_json(pins),
        "pinned_mib": None if unknown else sum(size for size in sizes if size is not None),
        "problems": to_json([Problem(f"read {proc}/{pid}/status", None, "its memory is not told") for pid in unknown]),
    }


def shm_facts(shm_dir: str, proc: str, now: float) -> dict[str, t.Any]:
    """The shared memory directory; ``now`` in seconds since the epoch."""
    reading = read_shm(shm_dir, proc)
    files = None if reading.files is None else [_file_facts(file, reading, now) for file in reading.files]
    shm = {
        "path": reading.path,
        "total_mib": reading.total_mib,
        "free_mib": reading.free_mib,
        "free_inodes": reading.free_inodes,
        "scan_complete": reading.scan_complete,
        "deleted_but_mapped": [{"path": path, "pid": pid} for path, pid in reading.deleted_mapped],
        **_totals(files),
    }
    return {"shm": shm, "problems": to_json(reading.problems)}


def _totals(files: t.Optional[list[dict[str, t.Any]]]) -> dict[str, t.Any]:
    if files is None:
        return dict.fromkeys(("file_count", "files_mib", "stale_count", "stale_mib", "files", "files_left_out"))
    stale = [file for file in files if file["stale"]]
    files = sorted(files, key=lambda file: (-file["size_mib"], file["name"]))
    return {
        "file_count": len(files),
        "files_mib": round(sum(file["size_mib"] for file in files), 3),
        "stale_count": len(stale),
        "stale_mib": round(sum(file["size_mib"] for file in stale), 3),
        "files": files[:_MOST_FILES],
        "files_left_out": max(len(files) - _MOST_FILES, 0),
    }


def _file_facts(file: ShmFile, reading: ShmReading, now: float) -> dict[str, t.Any]:
    judged = judge_leftover(file, server_uid=None, leader_died_at=None, scan_complete=reading.scan_complete)
    return {
        # A name is bytes; what is no UTF-8 must not break the JSON that Ansible reads.
        "name": os.fsencode(file.name).decode("utf-8", "backslashreplace"),
        "size_mib": file.size_mib,
        "uid": file.uid,
        "creator_pid": file.creator_pid,
        "creator_alive": file.creator_alive,
        "mapped_by": list(file.mapped_by),
        "opened_by": list(file.opened_by),
        "age_s": round(max(now - file.mtime, 0.0), 1),
        "stale": judged.removable,
        "why": judged.why,
    }


def _failure(call: str, called: Called, deadline_s: float) -> dict[str, t.Any]:
    if not called.timed_out:
        return to_json(Problem(call, None, called.error or "no answer"))
    stuck = ""
    if called.stuck_pid is not None:
        where = f"pid {called.stuck_pid}, state {called.stuck_state}, waits on {called.stuck_wchan}"
        stuck = f"; the helper ({where}) can't be killed"
    return to_json(Problem(call, None, f"no answer within {deadline_s:g} s{stuck}"))


def collect(proc: str, sys: str, shm_dir: str, deadline_s: float) -> dict[str, t.Any]:
    """All facts; a part that failed or did not answer in time is null and has an entry in ``problems``.

    Raises:
        CleanSlateError: ``proc`` is no directory.
    """
    if not os.path.isdir(proc):
        raise CleanSlateError(f"proc_root: {proc} is not a directory")
    began = time.monotonic()
    now = time.time()
    result: dict[str, t.Any] = dict.fromkeys(
        ("meminfo", "cgroup", "available_mib", "free_g", "sglang", "pinned_mib", "shm")
    )
    problems: list[dict[str, t.Any]] = []
    parts: t.Sequence[tuple[str, t.Callable[[], dict[str, t.Any]]]] = (
        ("read memory and cgroup", lambda: memory_facts(proc, sys)),
        ("read processes", lambda: pinned_facts(proc)),
        ("read shared memory", lambda: shm_facts(shm_dir, proc, now)),
    )
    share_s = deadline_s / len(parts)  # a part that hangs must leave time for the others
    for call, function in parts:
        called = call_bounded(function, share_s)
        if called.ok:
            facts = dict(called.value)
            problems.extend(facts.pop("problems"))
            result.update(facts)
        else:
            problems.append(_failure(call, called, share_s))
    return {**result, "problems": problems, "seconds": round(time.monotonic() - began, 3)}


def main() -> t.NoReturn:
    module = AnsibleModule(
        argument_spec={
            "proc_root": {"type": "path", "default": "/proc"},
            "sys_root": {"type": "path", "default": "/sys"},
            "shm_dir": {"type": "path", "default": "/dev/shm"},
            "deadline_s": {"type": "float", "default": 30.0},
        },
        supports_check_mode=True,
    )
    params = module.params
    if params["deadline_s"] <= 0:
        module.fail_json(msg=f"deadline_s must be greater than 0, not {params['deadline_s']:g}")
    with Told(module):
        try:
            result = collect(params["proc_root"], params["sys_root"], params["shm_dir"], params["deadline_s"])
        except CleanSlateError as exc:
            module.fail_json(msg=str(exc))
        module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
