# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The looking playbooks by ssh: from the checkout's root, from playbooks/, and installed, by their full names."""

from __future__ import annotations

import os
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT, run_command
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.lab.containers import Container
from ansible_collections.cleanslate.sglang.tests.lab.gpus import USED_MIB, Gpus
from ansible_collections.cleanslate.sglang.tests.lab.inventory import host_vars, run_on, server, write_inventory
from ansible_collections.cleanslate.sglang.tests.lab.rootfs import DOUBLES, PYTHON, SERVER_USER

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

PORT = 30000


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of collections that holds ours as ``ansible-galaxy`` built and installed it."""
    scratch = tmp_path_factory.mktemp("built")
    galaxy = str(Path(sys.executable).parent / "ansible-galaxy")
    env = {**os.environ, "ANSIBLE_HOME": str(scratch / "home"), "ANSIBLE_NOCOLOR": "1"}
    build = [galaxy, "collection", "build", "--output-path", str(scratch), str(ROOT)]
    run_command(build, 240, env=env, cwd=scratch).check()
    archive = next(scratch.glob("cleanslate-sglang-*.tar.gz"))
    install = [galaxy, "collection", "install", "--offline", "-p", str(scratch / "collections"), str(archive)]
    run_command(install, 240, env=env, cwd=scratch).check()
    return scratch / "collections"


def run_from(where: str, name: str, box: Container, inventory: Path, scratch: Path, installed: Path) -> PlaybookRun:
    """A looking playbook as people start it from that place."""
    checkout = {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")}
    ways: dict[str, tuple[Path | str, Path, dict[str, str]]] = {
        "root": (Path("playbooks") / f"{name}.yml", ROOT, checkout),
        # Without the checkout's ansible.cfg and without a path to collections: the link beside the playbooks is enough.
        "playbooks": (Path(f"{name}.yml"), ROOT / "playbooks", {"ANSIBLE_COLLECTIONS_PATH": str(scratch / "none")}),
        "name": (f"cleanslate.sglang.{name}", scratch, {"ANSIBLE_COLLECTIONS_PATH": str(installed)}),
    }
    playbook, directory, env = ways[where]
    arguments = ["-e", "server=chat"] if name == "assert_clean" else []
    return run_on(box, playbook, inventory, scratch, *arguments, cwd=directory, env=env)


@pytest.mark.parametrize("where", ["root", "playbooks", "name"])
def test_dirty_is_failed_and_shown(
    box: Container, gpus: Gpus, tmp_path: Path, installed: Path, where: t.Literal["root", "playbooks", "name"]
) -> None:
    inventory = write_inventory(tmp_path / "hosts.json", {box.name: host_vars(box, [server("chat", PORT, 0)])})
    clean = run_from(where, "assert_clean", box, inventory, tmp_path, installed).check()
    assert clean.of_action("clean_state")[0].result["verdict"] == "clean"

    program = f"{DOUBLES}/fixtures/hold_device.py"
    command = ["systemd-run", "--quiet", "--unit=holder", f"--uid={SERVER_USER}", "--"]
    box.run([*command, PYTHON, program, "--map", "/dev/nvidia0"], 60).check()
    holder = wait_for("a holder", lambda: gpus.holders(0), 30).pop()

    dirty = run_from(where, "assert_clean", box, inventory, tmp_path, installed)
    assert dirty.rc == 2 and dirty.of_action("clean_state")[0].result["verdict"] == "dirty"
    assert f"pid {holder}" in dirty.stdout

    shown = run_from(where, "inspect", box, inventory, tmp_path, installed).check()
    row = next(line for line in shown.stdout.splitlines() if f"{USED_MIB:,} / " in line)
    assert f" {holder}  holder " in row, row
    held = shown.of_action("gpu_info")[0].result["gpus"][0]["holders"]
    assert [(one["pid"], one["unit"], one["user"]) for one in held] == [(holder, "holder.service", SERVER_USER)]
    assert holder in gpus.holders(0)
