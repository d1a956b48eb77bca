# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.act import leftovers
from ansible_collections.cleanslate.sglang.plugins.module_utils.act.leftovers import remove_leftover
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.leftovers import Leftover, judge_leftover
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import ShmFile

SERVER_UID = 1000
DIED_AT = 2000.0


def shm_file(name: str, **changes: object) -> ShmFile:
    file = ShmFile(
        name=name,
        size_mib=24.0,
        uid=SERVER_UID,
        mtime=1000.0,
        creator_pid=None,
        creator_alive=None,
        mapped_by=(),
        opened_by=(),
        device=1,
        inode=2,
    )
    return dataclasses.replace(file, **changes)  # type: ignore[arg-type]


def stamped(**changes: object) -> ShmFile:
    file = shm_file("sgl_shm_mq_777_ab", creator_pid=777, creator_alive=False)
    return dataclasses.replace(file, **changes)  # type: ignore[arg-type]


def judge(
    file: ShmFile,
    server_uid: int | None = SERVER_UID,
    leader_died_at: float | None = DIED_AT,
    scan_complete: bool = True,
    owners: tuple[range, ...] | None = None,
) -> Leftover:
    return judge_leftover(
        file, server_uid=server_uid, leader_died_at=leader_died_at, scan_complete=scan_complete, owners=owners
    )


@pytest.mark.parametrize("name", ["sgl_shm_mm_7_a", "sgl_shm_nodecheck_7_a", "multi_tokenizer_args_7", "sem.loky-7-a"])
def test_a_stamped_file_of_a_dead_creator_is_one(name: str) -> None:
    file = stamped(name=name, creator_pid=7, uid=0, mtime=9e9)
    judged = judge(file, server_uid=None, leader_died_at=None)
    assert judged.removable
    assert "pid 7" in judged.why


@pytest.mark.parametrize("uid", [0, 99_999, 165_536])
@pytest.mark.parametrize("name", ["sgl_shm_mm_7_a", "sglang_loads_1"])
def test_of_a_container_nothing_goes_that_belongs_to_others(name: str, uid: int) -> None:
    file = stamped(name=name, creator_pid=7, uid=uid)
    assert judge(file, server_uid=uid).removable
    judged = judge(file, server_uid=uid, owners=(range(100_000, 165_536),))
    assert not judged.removable and "none of the container's" in judged.why
    assert not judge(file, server_uid=uid, owners=()).removable
    own = dataclasses.replace(file, uid=100_000)
    assert judge(own, server_uid=100_000, owners=(range(100_000, 165_536),)).removable


def test_of_many_users_five_are_named() -> None:
    assert judge(stamped(mapped_by=(1, 2, 3, 4, 5))).why == "in use by pid 1, 2, 3, 4, 5"
    assert judge(stamped(mapped_by=(1, 2, 3, 4), opened_by=(4, 5, 6))).why == "in use by pid 1, 2, 3, 4, 5 and 1 more"


@pytest.mark.parametrize("name", ["sglang_loads_0a_1b.shm", "nccl-AbCdEf", "sglang_host_pool_x.mmap"])
def test_an_unstamped_file_of_the_servers_user_that_is_older_than_the_death_goes(name: str) -> None:
    assert judge(shm_file(name)).removable


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (stamped(creator_alive=True), "777 lives"),
        (stamped(creator_alive=None), "not known"),
        (stamped(creator_pid=None), "not known"),
        (stamped(mapped_by=(5, 6)), "in use by pid 5, 6"),
        (stamped(opened_by=(5,)), "in use by pid 5"),
        (stamped(uid=1001), "uid 1001"),
        (stamped(uid=0), "uid 0"),
        (shm_file("sem.H7nNiy"), "any program"),
        (stamped(mapped_by=tuple(range(1, 9))), "1, 2, 3, 4, 5 and 3 more"),
        (shm_file("nccl-a", mapped_by=(5,)), "in use by pid 5"),
        (shm_file("nccl-a", opened_by=(5,)), "in use by pid 5"),
        (shm_file("nccl-a", uid=1001), "uid 1001"),
        (shm_file("nccl-a", mtime=DIED_AT), "younger"),
        (shm_file("nccl-a", mtime=DIED_AT + 1), "younger"),
        (shm_file("nccl-a", mtime=float("nan")), "younger"),
        (shm_file("psm_1a2b3c"), "any program"),
        (shm_file("cuda.shm.0.1.2"), "any program"),
        (shm_file("my-nccl-a"), "any program"),
        (shm_file("pool/nccl-a"), "any program"),
        (shm_file("pool/sgl_shm_mq_7_a", creator_pid=7, creator_alive=False), "any program"),
        (shm_file(""), "any program"),
    ],
)
def test_everything_else_stays_and_says_why(file: ShmFile, words: str) -> None:
    judged = judge(file)
    assert not judged.removable
    assert words in judged.why


def test_without_the_servers_user_or_its_death_an_unstamped_file_stays() -> None:
    file = shm_file("sglang_loads_0a_1b.shm")
    assert "user is not known" in judge(file, server_uid=None).why
    assert "died is not known" in judge(file, leader_died_at=None).why
    assert not judge(file, server_uid=None).removable
    assert not judge(file, leader_died_at=None).removable


@pytest.mark.parametrize("file", [stamped(), shm_file("nccl-a")])
def test_nothing_goes_after_an_incomplete_scan(file: ShmFile) -> None:
    assert judge(file).removable
    assert not judge(file, scan_complete=False).removable


NAMES = ["sgl_shm_mq_7_a", "sem.loky-7-a", "nccl-a", "psm_a", "sem.x", "a/nccl-b"]


@given(
    name=st.one_of(st.text(), st.sampled_from(NAMES)),
    users=st.tuples(st.lists(st.integers(1, 9)), st.lists(st.integers(1, 9))),
    alive=st.sampled_from([True, False, None]),
    uid=st.integers(0, 2),
    server_uid=st.one_of(st.none(), st.integers(0, 2)),
    died_at=st.one_of(st.none(), st.floats(0, 10)),
    mtime=st.floats(0, 10),
    complete=st.booleans(),
)
def test_no_file_in_use_or_without_proof_is_ever_removable(
    name: str,
    users: tuple[list[int], list[int]],
    alive: bool | None,
    uid: int,
    server_uid: int | None,
    died_at: float | None,
    mtime: float,
    complete: bool,
) -> None:
    file = shm_file(
        name,
        mapped_by=tuple(users[0]),
        opened_by=tuple(users[1]),
        creator_pid=7,
        creator_alive=alive,
        uid=uid,
        mtime=mtime,
    )
    judged = judge(file, server_uid, died_at, complete)
    assert judged.why
    if judged.removable:
        assert complete
        assert not users[0] and not users[1]
        assert name.startswith(("sgl_shm_", "multi_tokenizer_args_", "sglang_", "nccl-", "sem.loky-"))
        assert server_uid in (None, uid)
        own_and_old = uid == server_uid and died_at is not None and mtime < died_at
        assert alive is False or own_and_old
        assert not judge(file, server_uid, died_at, False).removable


# --- removing ---


def on_disk(directory: Path, name: str = "nccl-a") -> ShmFile:
    path = directory / name
    path.write_bytes(b"x")
    status = path.stat()
    return shm_file(name, device=status.st_dev, inode=status.st_ino, uid=status.st_uid)


def test_the_judged_file_is_removed_and_nothing_else(tmp_path: Path) -> None:
    file = on_disk(tmp_path)
    on_disk(tmp_path, "nccl-b")
    assert remove_leftover(str(tmp_path), file) is None
    assert os.listdir(tmp_path) == ["nccl-b"]


def test_a_file_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    file = on_disk(tmp_path)
    (tmp_path / "nccl-a").unlink()
    assert remove_leftover(str(tmp_path), file) is None


def test_another_file_that_took_the_name_stays(tmp_path: Path) -> None:
    file = on_disk(tmp_path)
    (tmp_path / "nccl-a").rename(tmp_path / "kept")  # the inode stays in use, so that it can't come again
    (tmp_path / "nccl-a").write_bytes(b"y")
    assert "another file" in (remove_leftover(str(tmp_path), file) or "")
    assert sorted(os.listdir(tmp_path)) == ["kept", "nccl-a"]


def test_a_symbolic_link_that_took_the_name_stays_and_so_does_its_target(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    file = on_disk(tmp_path, "nccl-a")
    (shm / "nccl-a").symlink_to(tmp_path / "nccl-a")
    assert "no regular file" in (remove_leftover(str(shm), file) or "")
    assert (shm / "nccl-a").is_symlink()
    assert (tmp_path / "nccl-a").exists()


def test_what_is_mounted_over_a_name_is_not_judged_for_it(tmp_path: Path) -> None:
    place = tmp_path / "sgl_shm_mm_7_a"
    place.touch()
    status = place.stat()
    file = stamped(name=place.name, device=status.st_dev, inode=status.st_ino, uid=status.st_uid)
    assert leftovers._changed(file, status, status.st_dev) is None
    assert "mounted" in (leftovers._changed(file, status, status.st_dev + 1) or "")


def test_a_changed_owner_stays(tmp_path: Path) -> None:
    file = on_disk(tmp_path)
    assert "owner changed" in (remove_leftover(str(tmp_path), dataclasses.replace(file, uid=file.uid + 1)) or "")
    assert (tmp_path / "nccl-a").exists()


def test_a_directory_behind_a_symbolic_link_is_not_entered(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    file = on_disk(real)
    (tmp_path / "shm").symlink_to(real)
    assert "cannot open" in (remove_leftover(str(tmp_path / "shm"), file) or "")
    assert (real / "nccl-a").exists()


@pytest.mark.parametrize("name", ["../nccl-a", "sub/nccl-a", "/etc/passwd", "", ".", "..", "a\0b"])
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path: Path, name: str) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    file = dataclasses.replace(on_disk(tmp_path), name=name)
    assert "plain file name" in (remove_leftover(str(shm), file) or "")
    assert (tmp_path / "nccl-a").exists()


def test_a_file_whose_inode_nobody_noted_is_refused(tmp_path: Path) -> None:
    file = on_disk(tmp_path)
    assert remove_leftover(str(tmp_path), dataclasses.replace(file, inode=None)) is not None
    assert remove_leftover(str(tmp_path), dataclasses.replace(file, device=None)) is not None
    assert (tmp_path / "nccl-a").exists()
