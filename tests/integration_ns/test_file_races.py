# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Root works in folders that others may write to. Somebody puts links there, again and again, while it does: what lies
outside is neither removed nor written nor read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.act.leftovers import remove_leftover
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import ShmFile
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe import bounded
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.inside import open_inside
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.procfs import read_process
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.servers import read_launched
from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.shm import read_shm
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import record, record_files

SECONDS = 2.0
LAUNCH = "20260131T235959Z-1a2b"
NAME = "sgl_shm_mm_7_x"


@contextlib.contextmanager
def attacker(attack: Callable[[], None]) -> Iterator[None]:
    """``attack`` again and again, in a process of its own."""

    def forever() -> None:
        while True:
            with contextlib.suppress(OSError):
                attack()

    process = multiprocessing.get_context("fork").Process(target=forever, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join(10)


def swap(place: Path, target: Path) -> None:
    """Put a link into a place by a rename, then a plain file."""
    beside = place.with_name("." + place.name)
    beside.symlink_to(target)
    os.rename(beside, place)
    beside.write_text("plain")
    os.rename(beside, place)


def test_a_leftover_that_becomes_a_link_takes_nobody_with_it(tmp_path: Path) -> None:
    shm, victim = tmp_path / "shm", tmp_path / "victim"
    shm.mkdir()
    victim.write_text("precious")
    place = shm / NAME
    refused = 0
    with attacker(lambda: swap(place, victim)):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            # What was judged is the victim itself, had anybody followed the link.
            seen = victim.stat()
            judged = ShmFile(NAME, 0.0, seen.st_uid, 0.0, 7, False, (), (), seen.st_dev, seen.st_ino)
            refused += remove_leftover(str(shm), judged) is not None
            for file in read_shm(str(shm), proc=str(tmp_path)).files or ():
                assert file.inode != seen.st_ino
                remove_leftover(str(shm), file)
    assert victim.read_text() == "precious"
    assert refused


def test_a_folder_that_becomes_a_link_is_not_entered(tmp_path: Path) -> None:
    """/dev/shm itself, or what the caller names for it."""
    real, elsewhere, place = tmp_path / "real", tmp_path / "elsewhere", tmp_path / "shm"
    for folder in (real, elsewhere):
        folder.mkdir()
        (folder / NAME).write_text("x")
    kept = (elsewhere / NAME).stat()
    file = ShmFile(NAME, 0.0, kept.st_uid, 0.0, 7, False, (), (), kept.st_dev, kept.st_ino)

    def attack() -> None:
        place.symlink_to(elsewhere)
        place.unlink()
        os.rename(real, place)
        os.rename(place, real)

    with attacker(attack):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            remove_leftover(str(place), file)
    assert (elsewhere / NAME).read_text() == "x"


def test_a_record_is_never_written_through_a_link(tmp_path: Path) -> None:
    """current.json and the launch's folder become links to another's files while the record is written."""
    state, outside = tmp_path / "state", tmp_path / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_text("precious")
    folder = Path(record.create_launch_dir(str(state), "chat", LAUNCH))
    current = state / "chat" / record.CURRENT
    away = folder.with_name("away")
    one = record.Record("chat", LAUNCH, "starting", "detached")

    def attack() -> None:
        swap(current, victim)
        os.rename(folder, away)
        try:
            folder.symlink_to(outside)
            time.sleep(0.002)
            folder.unlink()
        finally:
            os.rename(away, folder)

    written = 0
    with attacker(attack):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(CleanSlateError, OSError):
                record.write_record(str(state), one)
                written += 1
            with contextlib.suppress(CleanSlateError, OSError):
                record_files.write_document(str(state), "chat", LAUNCH, "plan", {"a": 1})
    assert victim.read_text() == "precious"
    assert sorted(os.listdir(outside)) == ["victim"]
    assert written


def test_a_record_is_never_read_through_a_link(tmp_path: Path) -> None:
    state, outside = tmp_path / "state", tmp_path / "outside.json"
    record.create_launch_dir(str(state), "chat", LAUNCH)
    record.write_record(str(state), record.Record("chat", LAUNCH, "starting", "detached"))
    current = state / "chat" / record.CURRENT
    outside.write_text(current.read_text().replace("detached", "systemd"))
    with attacker(lambda: swap(current, outside)):
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            found = record.read_record(str(state), "chat").record
            assert found is None or found.launcher != "systemd"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_guest_s_link_leads_to_its_own_files_however_often_it_changes(tmp_path: Path) -> None:
    """Through /proc/PID/root of a process in a chroot, as a container's files are opened from the node."""
    guest = tmp_path / "guest"
    (guest / "etc").mkdir(parents=True)
    (guest / "etc" / "secret").write_text("the guest's")
    secret = tmp_path / "secret"
    secret.write_text("the node's")
    place = guest / "etc" / "link"

    def inside() -> None:
        os.chroot(guest)
        os.chdir("/")
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=inside, daemon=True)
    process.start()
    assert process.pid is not None
    try:
        deadline = time.monotonic() + 10
        while os.readlink(f"/proc/{process.pid}/root") != str(guest) and time.monotonic() < deadline:
            time.sleep(0.05)
        targets = ("/etc/secret", f"../../../../../..{secret}", "/proc/self/root" + str(secret))
        read = set()

        def attack() -> None:
            for target in targets:
                beside = place.with_name(".link")
                beside.symlink_to(target)
                os.rename(beside, place)

        with attacker(attack):
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                with contextlib.suppress(OSError):
                    fd = open_inside(process.pid, "/etc/link")
                    with os.fdopen(fd) as stream:
                        read.add(stream.read())
        assert read == {"the guest's"}
    finally:
        process.kill()
        process.join(10)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_how_a_guest_s_server_was_launched_is_read_from_its_own_files_alone(tmp_path: Path) -> None:
    """Its configuration, its interpreter and its SGLang are behind links that lead, from here, to files of ours."""
    guest, ours = tmp_path / "guest", tmp_path / "ours"
    site = "lib/python3.11/site-packages"
    for top, model, option in ((guest / "real", "theirs", "own"), (ours, "ours", "other")):
        (top / "venv" / site / "sglang/srt").mkdir(parents=True)
        (top / "venv" / site / "sglang-0.5.10.dist-info").mkdir()
        (top / "venv/pyvenv.cfg").touch()
        (top / "venv" / site / "sglang/srt/server_args.py").write_text(f'parser.add_argument("--{option}", type=int)\n')
        (top / "config.yaml").write_text(f"model-path: {model}\n")
    # Outside the name leads to our folder, inside it is a folder of theirs.
    inner = guest / str(ours).lstrip("/")
    inner.parent.mkdir(parents=True, exist_ok=True)
    os.rename(guest / "real", inner)
    (guest / "link").symlink_to(ours)
    words = ["/link/venv/bin/python", "-m", "sglang.launch_server", "--config", "/link/config.yaml"]

    def inside() -> None:
        os.chroot(guest)
        os.chdir("/")
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=inside, daemon=True)
    process.start()
    assert process.pid is not None
    try:
        deadline = time.monotonic() + 10
        while os.readlink(f"/proc/{process.pid}/root") != str(guest) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = read_process(process.pid)
        assert found is not None
        server = dataclasses.replace(found, argv=tuple(words))
        launched, why = bounded.fetch_launched(server)
        assert why is None and launched.flags is not None and launched.options is not None
        assert launched.flags.flags["model-path"] == "theirs"
        assert launched.options.names >= {"own"} and "other" not in launched.options.names
        # It makes a difference: without that root of its own the links lead to ours.
        led_astray = read_launched(server).flags
        assert led_astray is not None and led_astray.flags["model-path"] == "ours"
        # And nobody else is taken for it, once its number was given away.
        gone, why = bounded.fetch_launched(dataclasses.replace(server, start_ticks=server.start_ticks + 1))
        assert gone.flags is None and why is not None and "is gone" in why
        # The one who asked is where it was.
        assert Path("/").stat().st_ino == Path("/proc/self/root").stat().st_ino and ours.is_dir()
    finally:
        process.kill()
        process.join(10)
