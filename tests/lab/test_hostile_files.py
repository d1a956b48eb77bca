# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that a hostile container puts in the place of others, and that each defence of the node against it is needed:
without it a bystander dies, a file of the node is opened, or one is removed.
"""

from __future__ import annotations

import contextlib
import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch, apply_all
from ansible_collections.cleanslate.sglang.tests.harness.playbook import TaskResult
from ansible_collections.cleanslate.sglang.tests.harness.tree import copy_tree, using
from ansible_collections.cleanslate.sglang.tests.lab.hostile import DEAD_PID, Field, eviction, field_of, on_node
from ansible_collections.cleanslate.sglang.tests.lab.node import Node

pytestmark = [pytest.mark.lab, pytest.mark.long(40), pytest.mark.timeout(600)]

TWINS = 24


def twins_in_use(field: Field) -> set[int]:
    """Inodes of the files that somebody inside has open, wherever in its shared memory they are now."""
    found = set()
    for one in field.mine.box.processes().values():
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{one.outer_pid}/fd")
            found |= {os.stat(folder / name).st_ino for name in os.listdir(folder) if _is_twin(folder / name)}
    return found


def _is_twin(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return "/.twins/" in os.readlink(path) or "_twin" in os.readlink(path)
    return False


def in_shared_memory(field: Field) -> set[int]:
    """Inodes of all files there, whatever they are called."""
    top = field.mine.box.root / "dev/shm"
    return {os.lstat(Path(folder, name)).st_ino for folder, _names, files in os.walk(top) for name in files}


def exchange(field: Field, scratch: Path) -> set[int]:
    """Files in use that are put in the place of leftovers once these were looked at; which of them were removed."""
    field.attack("twins")
    used = twins_in_use(field)
    assert len(used) == TWINS
    (done,) = on_node(field, scratch, eviction(field), trace=False)
    assert done.result["verdict"] == "evicted", done.result
    return used - in_shared_memory(field)


def test_a_leftover_that_was_exchanged_for_a_file_in_use_stays(node: Node, tmp_path: Path) -> None:
    with field_of(node) as field:
        assert not exchange(field, tmp_path)
        field.check_untouched()


def evict_over_shared_folder(field: Field, scratch: Path) -> TaskResult:
    """An unprivileged container shows a folder of its node as its shared memory; in it is a file of the node's."""
    path = field.node.gpus.locks / f"sgl_shm_mm_{DEAD_PID}_shared"
    path.write_text(field.secret)
    field.keep(path)
    field.attack("shared")
    (done,) = on_node(field, scratch, eviction(field), trace=False)
    assert done.result["verdict"] == "evicted", done.result
    return done


def test_a_folder_of_the_node_is_no_shared_memory_of_its(node: Node, tmp_path: Path) -> None:
    with field_of(node, unprivileged=True) as field:
        done = evict_over_shared_folder(field, tmp_path)
        field.check_untouched()
        assert "none of the container's" in str(done.result["leftovers"]["kept"]), done.result["leftovers"]


# --- it can fail ------------------------------------------------------------------------------------------------------


MEMBERS = Patch(
    "plugins/module_utils/decide/guests.py", "return process.pid not in snapshot.guest.members", "return False"
)
INSIDE = (
    Patch("plugins/module_utils/observe/inside.py", "RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)", "0)"),
    Patch("plugins/module_utils/observe/inside.py", "os.fsencode(path)", 'os.fsencode(path.lstrip("/"))'),
)
INODE = Patch(
    "plugins/module_utils/act/leftovers.py",
    "(status.st_dev, status.st_ino) != (file.device, file.inode)",
    "file.inode is None",
)
OWNERS = Patch("plugins/module_utils/decide/leftovers.py", "if owners is not None and", "if owners and not owners and")


@contextlib.contextmanager
def without(directory: Path, *patches: Patch) -> t.Iterator[None]:
    """The product without one of its defences."""
    tree = copy_tree(directory / "copy")
    apply_all(tree, patches)
    with using(tree):
        yield


def test_without_membership_a_neighbour_dies(node: Node, tmp_path: Path) -> None:
    with field_of(node, neighbour=True) as field, without(tmp_path, MEMBERS):
        field.attack("names")
        on_node(field, tmp_path, eviction(field), trace=False)
        with pytest.raises(AssertionError, match="gone or replaced"):
            field.spared.check()


def test_without_its_own_root_a_link_opens_a_file_of_the_node(node: Node, tmp_path: Path) -> None:
    with field_of(node) as field:
        field.attack("astray")
        on_node(field, tmp_path, eviction(field), trace=False)
        field.check_untouched()
        with without(tmp_path, *INSIDE):
            on_node(field, tmp_path, eviction(field), trace=False)
        with pytest.raises(AssertionError, match=field.token):
            field.check_untouched()


def test_without_the_inode_a_file_in_use_is_removed(node: Node, tmp_path: Path) -> None:
    with field_of(node) as field, without(tmp_path, INODE):
        assert exchange(field, tmp_path)


def test_without_its_users_a_file_of_the_node_is_removed(node: Node, tmp_path: Path) -> None:
    with field_of(node, unprivileged=True) as field, without(tmp_path, OWNERS):
        evict_over_shared_folder(field, tmp_path)
        with pytest.raises((AssertionError, FileNotFoundError)):
            field.check_untouched()
