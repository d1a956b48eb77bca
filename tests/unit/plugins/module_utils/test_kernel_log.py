# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import errno
import os
import typing as t
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import kernel_log
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.kernel_log import (
    KMSG,
    KmsgRecords,
    log_clock_s,
    read_kernel_log,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.xid import KernelLog, Xid, normal_bus_id

BOOT = b"6,0,0,-;Linux version 6.14.11-4-pve\n"
TIMEOUT = "Timeout after 45s of waiting for RPC response from GPU3 GSP! Expected function 76 (GSP_RM_CONTROL)."


def xid_record(text: str, at_s: float = 100.0, seq: int = 7, priority: int = 3) -> bytes:
    return f"{priority},{seq},{int(at_s * 1e6)},-;{text}\n".encode()


def read(tmp_path: Path, data: bytes) -> KernelLog:
    path = tmp_path / "kmsg"
    path.write_bytes(data)
    return read_kernel_log(str(path))


def only(log: KernelLog) -> Xid:
    assert log.xids is not None and len(log.xids) == 1
    return log.xids[0]


def words(log: KernelLog) -> str:
    return "; ".join(problem.message for problem in log.problems)


@pytest.mark.parametrize(
    ("line", "bus_id", "code", "pid", "text"),
    [
        (
            f"NVRM: Xid (PCI:0000:61:00): 119, pid=1234, name=python3, {TIMEOUT}",
            "00000000:61:00.0", 119, 1234, f"pid=1234, name=python3, {TIMEOUT}",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "00000000:3B:00.0", 79, None, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        ),
        ("NVRM: Xid (0000:61:00): 79, GPU is off the bus", "00000000:61:00.0", 79, None, "GPU is off the bus"),
        ("NVRM: Xid (PCI:0000:61:00.0): 48, pid='77', DBE", "00000000:61:00.0", 48, 77, "pid='77', DBE"),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 31, pid=5, MMU Fault", "00000000:01:00.0", 31, 5, "pid=5, MMU Fault"),
        ("NVRM: Xid (PCI:10000:01:00): 63", "00010000:01:00.0", 63, None, ""),
        ("NVRM: Xid (PCI:0000:83:00): 48", "00000000:83:00.0", 48, None, ""),
    ],
)  # fmt: skip
def test_lines_as_the_driver_prints_them(
    tmp_path: Path, line: str, bus_id: str, code: int, pid: int | None, text: str
) -> None:
    log = read(tmp_path, BOOT + xid_record(line, 12.5))
    assert only(log) == Xid(bus_id, code, 12.5, pid, text)
    assert (log.complete, log.problems, log.since_s) == (True, (), 0.0)


def test_other_records_and_properties_are_no_xids(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        BOOT
        + b"6,1,200,-,caller=T1;nvidia 0000:61:00.0: enabling device\n SUBSYSTEM=pci\n DEVICE=+pci:0000:61:00.0\n"
        + xid_record("NVRM: GPU at PCI:0000:61:00: GPU-c5b2")
        + xid_record("NVRM: GPU 0000:61:00.0: GPU has fallen off the bus."),
    )
    assert (log.xids, log.complete) == ((), True)


@pytest.mark.parametrize("priority", [11, 30, 14])
def test_what_a_program_wrote_into_the_log_is_not_the_drivers_word(tmp_path: Path, priority: int) -> None:
    line = "NVRM: Xid (PCI:0000:61:00): 79, GPU has fallen off the bus"
    assert read(tmp_path, BOOT + xid_record(line, priority=priority)).xids == ()
    assert only(read(tmp_path, BOOT + xid_record(line, priority=priority % 8))).code == 79


@pytest.mark.parametrize("line", ["NVRM: Xid 79, GPU has fallen off", "NVRM: Xid (PCI:0000:zz:00): 79", "NVRM: Xid"])
def test_a_report_that_is_not_understood_makes_the_log_incomplete(tmp_path: Path, line: str) -> None:
    log = read(tmp_path, BOOT + xid_record(line))
    assert (log.xids, log.complete) == ((), False)
    assert line in words(log)


def test_where_the_log_begins(tmp_path: Path) -> None:
    assert read(tmp_path, BOOT).since_s == 0.0
    assert read(tmp_path, xid_record("nvidia: loading", 42.0, seq=9) + xid_record("x", 50.0, seq=10)).since_s == 42.0


def test_a_kernel_log_without_any_record_is_none() -> None:
    # The kernel's own always has some; a recorded file may have none.
    log = KmsgRecords().log(KMSG, 1.0, may_be_empty=False)
    assert (log.xids, log.complete) == (None, False)
    assert KmsgRecords().log("recorded", 1.0, may_be_empty=True).xids == ()


def test_a_missing_log_is_not_an_empty_one(tmp_path: Path) -> None:
    log = read_kernel_log(str(tmp_path / "none"))
    assert (log.xids, log.complete) == (None, False)
    assert log.problems[0].code == errno.ENOENT


def test_a_refused_log_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> bytes:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "kmsg"
    path.write_bytes(BOOT)
    monkeypatch.setattr(kernel_log, "os", _os_with(read=refuse))
    log = read_kernel_log(str(path))
    assert (log.xids, log.complete, log.problems[0].code) == (None, False, errno.EPERM)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "."])
def test_something_else_in_its_place_is_not_an_empty_log(path: str) -> None:
    log = read_kernel_log(path)
    assert (log.xids, log.complete) == (None, False)
    assert log.problems


def test_a_pipe_in_its_place_holds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert read_kernel_log(str(path)).xids is None


@pytest.mark.parametrize("data", [b"[  12.3] NVRM: Xid (PCI:0000:61:00): 79, off\n", b"\x00\xff", b"," * 40_000])
def test_a_file_of_another_form_is_not_an_empty_log(tmp_path: Path, data: bytes) -> None:
    log = read(tmp_path, data)
    assert (log.xids, log.complete) == (None, False)
    assert "kmsg" in words(log)


def test_some_lines_of_another_form(tmp_path: Path) -> None:
    log = read(tmp_path, BOOT + b"-- cut --\n" + xid_record("NVRM: Xid (PCI:0000:61:00): 43, pid=1"))
    assert only(log).code == 43
    assert (log.complete, words(log)) == (False, "1 lines are no kmsg records")


def test_the_last_record_needs_no_newline(tmp_path: Path) -> None:
    assert only(read(tmp_path, BOOT + xid_record("NVRM: Xid (PCI:0000:61:00): 43").rstrip())).code == 43


def _os_with(**changes: t.Any) -> t.Any:
    """The os module with functions of ours, for the child that reads."""

    class Changed:
        def __getattr__(self, name: str) -> t.Any:
            return changes.get(name, getattr(os, name))

    return Changed()


def test_overwritten_records_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: t.Iterator[bytes | OSError] = iter([
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        xid_record("NVRM: Xid (PCI:0000:61:00): 119, pid=1", 50.0, seq=900),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        xid_record("NVRM: Xid (PCI:0000:61:00): 119, pid=1", 95.0, seq=990),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    ])  # fmt: skip

    def answer(fd: int, size: int) -> bytes:
        one = next(answers)
        if isinstance(one, OSError):
            raise one
        return one

    path = tmp_path / "kmsg"
    path.write_bytes(b"")
    monkeypatch.setattr(kernel_log, "os", _os_with(read=answer))
    log = read_kernel_log(str(path))
    assert [xid.at_s for xid in log.xids or ()] == [50.0, 95.0]
    assert (log.complete, log.since_s) == (False, 50.0)
    assert "overwritten" in words(log)


def test_a_log_without_an_end_costs_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(BOOT)
    record = xid_record("NVRM: Xid (PCI:0000:61:00): 119, pid=1")
    monkeypatch.setattr(kernel_log, "os", _os_with(read=lambda fd, size: record))
    monkeypatch.setattr(kernel_log, "MAX_BYTES", 4 * len(record))
    log = read_kernel_log(str(path))
    assert len(log.xids or ()) == 4
    assert (log.complete, "not read" in words(log)) == (False, True)

    monkeypatch.setattr(kernel_log, "os", _os_with(read=lambda fd, size: BOOT))
    monkeypatch.setattr(kernel_log, "MAX_BYTES", 10**15)
    log = read_kernel_log(str(path), deadline_s=2)
    assert (log.xids, log.complete, "not read" in words(log)) == ((), False, True)

    def hang(fd: int, size: int) -> bytes:
        reader, _writer = os.pipe()
        return os.read(reader, size)

    monkeypatch.setattr(kernel_log, "os", _os_with(read=hang))
    log = read_kernel_log(str(path), deadline_s=0.3)
    assert (log.xids, log.complete) == (None, False)
    assert "no answer within 0.3 s" in words(log)


def test_a_flood_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kmsg"
    count = kernel_log.MAX_XIDS + 5
    path.write_bytes(
        BOOT + b"".join(xid_record("NVRM: Xid (PCI:0000:61:00): 13, pid=1, " + "x" * 300, at) for at in range(count))
    )
    log = read_kernel_log(str(path))
    assert log.xids is not None and len(log.xids) == kernel_log.MAX_XIDS
    assert (log.xids[-1].at_s, log.complete) == (count - 1, False)
    assert len(log.xids[-1].text) == kernel_log.MAX_TEXT
    assert str(count) in words(log)


RECORD_PIECES = st.sampled_from([
    BOOT, b"3,", b"7,", b"100000000,", b"-;", b"\n", b" ", b"NVRM: Xid ", b"(PCI:0000:61:00)", b"(", b"): ", b"119",
    b"9" * 40, b", pid=", b"\xff\xfe", b"\\x0a", b"\0", b";", "ü\u2028".encode(), b"pid='", b"99999999999",
])  # fmt: skip


@settings(max_examples=400)
@given(pieces=st.lists(st.one_of(RECORD_PIECES, st.binary(max_size=60)), max_size=25), every=st.integers(1, 50))
def test_no_bytes_raise_and_pieces_do_not_matter(pieces: list[bytes], every: int) -> None:
    data = b"".join(pieces)
    whole, cut = KmsgRecords(), KmsgRecords()
    whole.feed(data)
    for start in range(0, len(data), every):
        cut.feed(data[start : start + every])
    log = whole.log("kmsg", 1.0, True)
    assert log == cut.log("kmsg", 1.0, True)
    assert log.complete == (not log.problems)
    for xid in log.xids or ():
        assert xid.text.isprintable() or xid.text == ""
        assert normal_bus_id(xid.bus_id) == xid.bus_id


@given(name=st.text(max_size=15))
def test_a_process_name_changes_neither_code_nor_gpu(name: str) -> None:
    records = KmsgRecords()
    line = f"NVRM: Xid (PCI:0000:61:00): 31, pid=9, name={name}, MMU Fault".replace("\n", "\\x0a")
    records.feed(xid_record(line))
    xid = only(records.log("kmsg", 1.0, True))
    assert (xid.bus_id, xid.code, xid.pid) == ("00000000:61:00.0", 31, 9)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("0000:61:00", "00000000:61:00.0"),
        ("00000000:3B:00.0", "00000000:3B:00.0"),
        ("3b:00.1", "00000000:3B:00.1"),
        ("10000:1:0", "00010000:01:00.0"),
        ("", None),
        ("61", None),
        ("0000:61:00.9", None),
        ("GPU-0", None),
    ],
)
def test_bus_ids(text: str, normal: str | None) -> None:
    assert normal_bus_id(text) == normal


def test_the_kernel_log_of_this_machine() -> None:
    try:
        os.close(os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as exc:
        pytest.skip(f"{KMSG} can't be read here: {exc}")
    log = read_kernel_log()
    if log.xids is None and os.stat(KMSG).st_rdev != os.makedev(*kernel_log.KMSG_NUMBERS):
        pytest.skip(f"{KMSG} is something else here: {words(log)}")
    assert log.xids is not None, words(log)
    assert not [one for one in log.problems if "no kmsg records" in one.message]
    assert 0 <= log.since_s <= log_clock_s() + 60
