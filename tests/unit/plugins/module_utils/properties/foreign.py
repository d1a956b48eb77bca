# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Foreign text: every parser of it, with real samples, and the ways in which such text goes wrong."""

from __future__ import annotations

import contextlib
import json
import signal
import typing as t
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils import cgroups, lease, proxmox, xid
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import devicerules, routing
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import (
    cgroupfs,
    devices,
    inflight,
    kernel_log,
    memory,
    nvidia_smi,
    ports,
    procfs,
    shm,
    systemd,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import clients as seen_clients
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import (
    causes,
    cmdline,
    configfile,
    documents,
    evidence,
    flags,
    install,
    kept,
    learned,
    logs,
    phases,
    proof,
    record,
    redact,
    router,
    watch,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Response, info_of

FIXTURES = Path(__file__).resolve().parents[4] / "fixtures"
CPU_SECONDS = 20


@dataclass(frozen=True)
class Parser:
    """``read`` gets text. ``refuses``: the errors by which it says that it is not what it should be."""

    name: str
    read: Callable[[str], t.Any]
    samples: tuple[str, ...] = ()
    refuses: tuple[type[Exception], ...] = ()

    def try_it(self, text: str) -> t.Any:
        """What it makes of the text; None where it refuses it."""
        with contextlib.suppress(*self.refuses):
            return self.read(text)
        return None


def _bytes(read: Callable[[bytes], t.Any]) -> Callable[[str], t.Any]:
    return lambda text: read(text.encode("utf-8", "surrogatepass"))


def _answer(judge: Callable[[Response], t.Any]) -> Callable[[str], t.Any]:
    return lambda text: judge(Response(200, text.encode("utf-8", "surrogatepass"), 0.1))


def _kmsg(text: str) -> t.Any:
    records = kernel_log.KmsgRecords()
    records.feed(text.encode("utf-8", "surrogatepass"))
    return records.log("kmsg", 1.0, may_be_empty=True)


def _router(text: str) -> t.Any:
    answer = Response(200, text.encode("utf-8", "surrogatepass"), 0.1)
    access = router.Access(routing.parse_url("http://127.0.0.1:1"))
    return router.Router("r", access, ask=lambda *_words: answer).workers()


def _leader(text: str) -> t.Any:
    argv = ("python3", "-m", "sglang.launch_server", *text.split("\0"))
    return cmdline.launched_flags(argv, lambda _path: text)


def _proxmox_config(text: str) -> t.Any:
    config = proxmox.parse_config(text)
    return config, config.device_nodes, config.device_rules, config.lock, config.unprivileged


def _stacks(text: str) -> t.Any:
    lines = evidence.parse_py_spy(text)
    return lines, evidence.top_frames(lines), [evidence.kernel_line(line) for line in text.splitlines()[:50]]


def _json_data(text: str) -> t.Any:
    """JSON of SGLang on its way into a document."""
    data = Response(200, text.encode("utf-8", "surrogatepass"), 0.1).json()
    return documents.document_text({"answer": redact.Redactor(["geheim"]).data(data)})


def _watch(text: str) -> t.Any:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("no object")
    return watch.from_data(data, "x", None, 1.0)


LOGS = tuple(path.read_text(errors="replace") for path in sorted((FIXTURES / "logs").glob("*.log")))
ANSWERS = tuple(path.read_text(errors="replace") for path in sorted((FIXTURES / "answers").glob("*.json")))
_NO_JSON = (ValueError, RecursionError)  # what the readers of these files catch and turn into a sentence

_STAT = "4711 (sglang::sched) S 1 4711 4711 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 3 0 123456 1 1 18446744073709551615"
_STATUS = "Name:\tpython3\nUmask:\t0022\nState:\tS (sleeping)\nNSpid:\t4711\t12\nRssShmem:\t    2048 kB\nThreads:\t3\n"
_MAPS = (
    "7f0000000000-7f0000200000 rw-s 00000000 00:05 1042 /dev/nvidia0\n"
    "7f0000200000-7f0000210000 -w-s 00000000 00:05 1042 /dev/nvidia0 (deleted)\n"
)
_MEMINFO = "MemTotal:       460000000 kB\nMemAvailable:   400000000 kB\nHugepagesize: 2048 kB\n"
_TCP = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0 100 0 0 10 0\n"
)
_MOUNTS = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n31 24 0:27 /a\\040b /x rw - cgroup none rw,memory\n"
_XML = (
    '<?xml version="1.0" ?><!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd"><nvidia_smi_log>'
    "<driver_version>580.159</driver_version><attached_gpus>1</attached_gpus><gpu id='00000000:01:00.0'>"
    "<uuid>GPU-1</uuid><minor_number>0</minor_number><fb_memory_usage><total>143771 MiB</total><used>0 MiB</used>"
    "</fb_memory_usage><utilization><gpu_util>[N/A]</gpu_util></utilization><processes><process_info><pid>7</pid>"
    "<type>C</type><used_memory>ERR!</used_memory></process_info></processes></gpu></nvidia_smi_log>"
)
_KMSG = (
    "4,1,100,-;NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
    " SUBSYSTEM=pci\n"
)
_PVE = (
    "arch: amd64\nlock: backup\ndev0: /dev/nvidia0,mode=0666\nlxc.cgroup2.devices.allow: c 195:* rwm\n"
    "lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind 0 0\n[snap]\nunprivileged: 1\n"
)
_CONFIG = "model-path: /models/x\ntp-size: 2\napi-key: 'geheim'\nlora-paths:\n- a\n- b\nratio: 0.9 # so\n"
_PY_SPY = 'Thread 812 (idle): "MainThread"\n    recv (multiprocessing/connection.py:250)\n    wait (engine.py:1370)\n'
_PROCESS_TITLE = "sglang::scheduler_DP0_TP1"
_LEADER = "--config\0/etc/x.yaml\0--tp\x002\0--api-key=geheim\0--json-model-override-args\0{\"a\": 1}"
_RECORD = json.dumps(
    {
        **{"name": "chat", "launch_id": "20260131T235959Z-1a2b", "state": "started", "launcher": "systemd"},
        **{"pid": 4711, "start_ticks": 9, "sid": 4711, "port": 30000, "gpus": ["GPU-1"], "argv": ["python3"]},
        **{"flags": {"tp-size": 2}, "environment": {"A": "b"}, "boot_id": "x"},
    }
)
_LEASE = json.dumps(
    {
        **{"name": "chat", "run_id": "r1", "taken_at": 1.0, "renewed_at": 1.0, "expires_at": 61.0, "pid": 3},
        **{"renewed_since_boot": 1.0, "expires_since_boot": 61.0, "start_ticks": 4, "boot_id": "x"},
    }
)
_REQUEST = kept.request_text(kept.KeptRequest("chat", "20260131T235959Z-1a2b", "/p", "u", "g", "systemd"))
_WORKERS = json.dumps(
    {
        "workers": [
            {"id": "w1", "url": "http://a:1", "is_healthy": True, "load": 0, "priority": 50, "cost": 1},
            {"id": "w2", "url": "b", "is_healthy": False, "job_status": {"job_type": "AddWorker", "status": "x"}},
        ]
    }
)
_UNIT = "Id=x.service\nMainPID=7\nRestart=no\nActiveState=active\nLoadState=loaded\nControlGroup=/a/x.service\n"

_CGROUP_PATTERNS = (cgroups.UNIT_PATTERN, cgroups.DOCKER_PATTERN, cgroups.LXC_PATTERN, cgroups.GUEST_PATTERN)
PARSERS: tuple[Parser, ...] = (
    Parser("stat", procfs.parse_stat, (_STAT,)),
    Parser("status", procfs.parse_status, (_STATUS,)),
    Parser("cmdline", _bytes(procfs.parse_cmdline), (_PROCESS_TITLE + "\0\0\0", _LEADER)),
    Parser("cgroup", procfs.parse_cgroups, ("0::/system.slice/x.service\n1:name=systemd:/lxc/129/x\n",)),
    Parser("cgroup names", lambda text: [each.search(text) for each in _CGROUP_PATTERNS], ("/lxc/129/x.service",)),
    Parser("maps", devices.parse_maps, (_MAPS,)),
    Parser("meminfo", _bytes(memory.parse_meminfo), (_MEMINFO,)),
    Parser("memory of status", _bytes(lambda data: memory.parse_status_memory(1, "x", data)), (_STATUS,)),
    Parser("tcp", _bytes(lambda data: ports.parse_table(data, {30000})), (_TCP,)),
    Parser("mountinfo", _bytes(cgroupfs.parse_mounts), (_MOUNTS,)),
    Parser("shm name", shm.creator_pid, ("sgl_shm_mm_4711_x", "sem.loky-12-a")),
    Parser("kmsg", _kmsg, (_KMSG,)),
    Parser("bus id", xid.normal_bus_id, ("00000000:01:00.0",)),
    Parser("nvidia-smi", nvidia_smi.parse_xml, (_XML,)),
    Parser("systemctl show", systemd.parse_unit, (_UNIT,)),
    Parser("systemctl show of a client", seen_clients.parse_client_unit, (_UNIT + "FreezerState=running\n",)),
    Parser("pve config", _proxmox_config, (_PVE,)),
    Parser("ha resources", proxmox.parse_resources, ("ct: 129\n\tstate started\n",)),
    Parser("pct status", proxmox.parse_status, ("status: running\n",)),
    Parser("device rules", lambda text: devicerules.device_rule_problems(text, [text], [text]), (_PVE,)),
    Parser("title", cmdline.worker_role, (_PROCESS_TITLE, "sglang::tokenizer_worker:4711")),
    Parser("leader", _leader, (_LEADER,)),
    Parser("configuration", configfile.read_config, (_CONFIG,)),
    Parser("configuration without PyYAML", configfile.read_subset, (_CONFIG,), (configfile.NotUnderstood,)),
    Parser("flag's value", flags.meaning, ("1Ki", "0.9", "true", '{"a": 1}')),
    Parser("version", install.version_tuple, ("0.5.12.post1",)),
    Parser("log: progress", lambda text: phases.progress(text, phases.Clock(1.0, 2.0)), LOGS),
    Parser("log: error", causes.last_error, LOGS),
    Parser("log: bind", causes.bind_error, LOGS),
    Parser("log: headroom", logs.headroom_mib, LOGS),
    Parser("log: tokens", logs.total_tokens, LOGS),
    Parser("log: learned", lambda text: learned.learned_from_log(text, "x", True), LOGS),
    Parser("log: host pools", learned.host_pools_gb, LOGS),
    Parser("redacted text", redact.Redactor(["geheim"]).text, (*LOGS, _CONFIG, _LEADER)),
    Parser("redacted words", lambda text: redact.Redactor().argv(text.split("\0")), (_LEADER,)),
    Parser("redacted JSON", _json_data, ANSWERS),
    Parser("py-spy", _stacks, (_PY_SPY,)),
    Parser("server_info", _answer(info_of), ANSWERS),
    Parser("tokens", _answer(lambda answer: proof.judge_tokens(0, 2, answer)), ANSWERS),
    Parser("reasoning", _answer(proof.judge_reasoning), ANSWERS),
    Parser("tools", _answer(proof.judge_tools), ANSWERS),
    Parser("loads", _answer(inflight.loads_of), ('{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0}]}',)),
    Parser("router", _router, (_WORKERS,), (CleanSlateError,)),
    Parser("URL", routing.parse_url, ("http://h:1/x", "[::1]:80"), (CleanSlateError,)),
    Parser("record", record.parse, (_RECORD,), _NO_JSON),
    Parser("request", kept.parse_request, (_REQUEST,), _NO_JSON),
    Parser("env file", kept.environment_of, ('A="b"\nC="\\"d"\n',), (ValueError,)),
    Parser("lease", lease.parse, (_LEASE,), _NO_JSON),
    Parser("watch", _watch, (), (ValueError, RecursionError, CleanSlateError)),
)

# What texts go wrong by: numbers without end, quotes that never close, signs that end a line for some, cut pairs.
PIECES = (
    *("\0", "\n", "\r", "\x0b", "\x85", "\u2028", "\ud800", "\x1b[", '"', "'", "\\", "{", "}", "[", "]", "(", ")"),
    *("9" * 5000, "-1", "1e999", "NaN", "Infinity", "\u00b2", "\u0663", "0x", "null", "true", " " * 300, "[" * 2000),
    *('{"a":' * 2000, "<!DOCTYPE", "&a;", "%", ":", "=", "--", "died exit code: ", "TP", "::", "key", "\\U00110000"),
)


@st.composite
def mutated(draw: st.DrawFn, samples: t.Sequence[str]) -> str:
    """A real text with some of it cut out, doubled, moved, or replaced."""
    text = draw(st.sampled_from(samples))
    if len(text) > 4000:
        start = draw(st.integers(0, len(text) - 4000))
        text = text[start : start + 4000]
    for _round in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 60)))
        piece = draw(st.sampled_from(PIECES) | st.text(max_size=20))
        how = draw(st.sampled_from(("cut", "delete", "insert", "replace", "double", "number")))
        if how == "cut":
            text = text[:end]
        elif how == "delete":
            text = text[:start] + text[end:]
        elif how == "insert":
            text = text[:start] + piece + text[start:]
        elif how == "replace":
            text = text[:start] + piece + text[end:]
        elif how == "double":
            text = text[:end] + text[start:end] * 5 + text[end:]
        else:
            number = draw(st.sampled_from(("9" * 5000, "9" * 400, "-1", "0", "1e400", "18446744073709551616")))
            text = "".join(number if sign.isdigit() and start <= at < end else sign for at, sign in enumerate(text))
    return text


class TooLong(Exception):
    """It was still working when its processor time was over."""


@contextlib.contextmanager
def limited(seconds: float = CPU_SECONDS) -> Iterator[None]:
    """Raises TooLong after so much processor time of ours: how busy the machine is does not count."""

    def over(_signal: int, _frame: t.Any) -> None:
        raise TooLong(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
