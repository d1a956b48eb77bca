# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a start failed, by the words of real logs and of those that nobody could make here."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import causes
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.causes import Kills

LOGS = next(parent for parent in Path(__file__).parents if (parent / "fixtures").is_dir()) / "fixtures" / "logs"


def real(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


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
    error = causes.last_error("[2026-02-23 09:59:00] server_args=ServerArgs()\n" + log)
    assert error is not None
    assert words in error
    assert "\n" not in error
    assert len(error) <= 400


@pytest.mark.parametrize(
    "line",
    [
        "/opt/sglang/bin/python: Error while finding module specification for 'sglang.launch_server' "
        "(ModuleNotFoundError: No module named 'sglang')",
        "/usr/bin/python3.11: No module named 'sglang'",
    ],
)
def test_an_interpreter_without_sglang(line: str) -> None:
    assert causes.last_error(f"{line}\n") == "the installation is not whole: No module named 'sglang'"


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last):\n"])
def test_no_error(text: str) -> None:
    assert causes.last_error(text) is None


def test_colours_do_not_hide_a_cause() -> None:
    assert causes.last_error("\x1b[31mValueError: bad\x1b[0m") == "ValueError: bad"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flag-ambiguous", "SGLang refuses its arguments: ambiguous option: --cuda-graph could match"),
        ("flag-unknown", "SGLang refuses its arguments: unrecognized arguments: --no-such-option 3"),
        ("model-folder-without-config", "the model is not whole: Unrecognized model in /usr/share"),
        ("model-hub-offline", "the model is not on this host and can't be fetched: We couldn't connect to"),
        ("node-1-of-2", "Scheduler or DataParallelController 19 terminated with -9: killed by SIGKILL"),
        ("port-taken", "a port is in use already: "),
        ("scheduler-killed-while-loading", "Rank 0 scheduler died during initialization (exit code: -9): killed"),
        ("tp2-without-binding", "no thread binding: tp_size is 2, and this machine has 1 NUMA node(s)"),
    ],
)
def test_real_logs_of_starts_that_failed(name: str, words: str) -> None:
    assert str(causes.last_error(real(name))).startswith(words)


@pytest.mark.parametrize("name", ["ready-tp1", "ready-dp2"])
def test_real_logs_of_healthy_starts_name_no_error(name: str) -> None:
    """Each warns of imports and of a generation configuration that is missing."""
    text = real(name)
    assert causes.last_error(text) is None
    assert causes.bind_error(text) is None
    assert not causes.is_fatal(text)


def test_the_real_log_of_a_taken_port_tells_it_before_the_server_ends() -> None:
    words = causes.bind_error(real("port-taken"))
    assert words is not None
    assert words.startswith("the port is in use already: error while attempting to bind on address")


def test_a_server_that_reports_its_end_is_known_by_its_log() -> None:
    assert causes.is_fatal(real("tp2-without-binding"))


def test_an_oom_says_what_was_tried_and_who_has_the_memory() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of"
        " 94.00 GiB of which 1.20 GiB is free. Process 812 has 40.00 GiB memory in use. Including non-PyTorch memory,"
        " this process has 50.00 GiB memory in use. Of the allocated memory 1 GiB is allocated by PyTorch\n"
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).\n"
    )
    assert causes.last_error(text) == (
        "out of GPU memory: Tried to allocate 2.50 GiB where 1.20 GiB of 94.00 GiB were free on GPU 1; this process has"
        " 50.00 GiB, process 812 has 40.00 GiB"
    )


def test_the_cause_goes_before_what_follows_from_it() -> None:
    text = (
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error\n"
        "ncclSystemError: System call failed\n"
        "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    )
    error = str(causes.last_error(text))
    assert error.startswith("NCCL failed: ")
    assert "ncclSystemError" in error


@pytest.mark.parametrize(
    "after",
    [
        "EOFError",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: [../pair.cc:534] Connection closed by peer [127.0.0.1]:3000",
    ],
)
def test_a_lost_connection_is_only_named_where_nothing_else_is(after: str) -> None:
    assert causes.last_error(f"ValueError: bad\n{after}\n") == "ValueError: bad"
    assert after.split(":")[0] in str(causes.last_error(f"{after}\n"))


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        (Kills(2, 5), "by the kernel's OOM killer, which struck 2 times in its control group"),
        (Kills(None, 1), "most likely by the kernel's OOM killer"),
        (Kills(0, 0), "not by the kernel's OOM killer, so somebody sent it"),
        (Kills(), "is not known"),
    ],
)
def test_a_kill_is_told_with_what_is_known_of_the_oom_killer(kills: Kills, words: str) -> None:
    text = "[2026-02-23 10:00:00] Rank 0 scheduler died during initialization (exit code: -9).\n"
    error = str(causes.last_error(text, kills))
    assert error.startswith("Rank 0 scheduler died")
    assert f"killed by SIGKILL, {words}" in error or ("killed by SIGKILL, whether" in error and words in error)
    assert words in causes.silent_end("", kills)


def test_other_signals_are_named() -> None:
    for code in ("-11", "139"):
        error = causes.last_error(f"Rank 3 scheduler died during initialization (exit code: {code}).")
        assert str(error).endswith("ended by SIGSEGV")
    assert causes.last_error("A child exited (exit code: 1).") == "A child exited (exit code: 1)"


def test_a_server_that_was_told_to_end_is_no_victim_of_the_oom_killer() -> None:
    assert "SIGTERM" in causes.silent_end(real("ready-tp1"), Kills(1, 1))
    assert "OOM" not in causes.silent_end(real("ready-tp1"), Kills(1, 1))


def test_a_missing_model_is_named_as_it_was_wanted() -> None:
    error = str(causes.last_error(real("model-hub-offline"), None, "org/name"))
    assert error.startswith("the model org/name is not on this host")
    assert causes.last_error("ValueError: bad", None, "org/name") == "ValueError: bad"


@pytest.mark.parametrize(
    "line",
    [
        "[2026-02-23 10:00:00] server_args=ServerArgs(served_model_name='CUDA out of memory')",
        "[2026-02-23 10:00:00] Ignore import error when loading x: No accelerator is available",
        "x.py:1: UserWarning: Bus error ahead",
    ],
)
def test_what_a_healthy_start_says_too_is_no_cause(line: str) -> None:
    assert causes.last_error(f"{line}\n") is None
    assert causes.last_error(f"{line}\nValueError: bad\n") == "ValueError: bad"
