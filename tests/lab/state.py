# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host's state after a scenario, asserted by pytest-testinfra over ssh: its own view, not one of our modules'."""

from __future__ import annotations

import typing as t

import testinfra

from .containers import Container
from .node import ADDRESS, Node

# testinfra finds its modules by name at run time, so there is no type to say.
Host = t.Any


def host_of(box: Container) -> Host:
    """A container, as testinfra sees it."""
    return _host(f"ssh://root@{box.address}", box.lab.ssh_options, str(box.lab.key))


def host_of_node(node: Node) -> Host:
    """The node, as testinfra sees it."""
    return _host(f"ssh://root@{ADDRESS}:{node.port}", node.lab.ssh_options, str(node.lab.key))


def _host(spec: str, options: str, key: str) -> Host:
    return testinfra.get_host(spec, ssh_extra_args=options, ssh_identity_file=key, controlpersist=0)


def assert_state(
    host: Host,
    *,
    running: t.Sequence[str] = (),
    not_running: t.Sequence[str] = (),
    listening: t.Sequence[int] = (),
    silent: t.Sequence[int] = (),
    living: t.Mapping[int, str] | None = None,
    gone: t.Collection[int] = (),
) -> None:
    """Services that run or don't, ports that are listened on or not, processes that live (pid: words of their command
    line) or are gone.
    """
    for name in running:
        assert host.service(name).is_running, f"{name} does not run"
    for name in not_running:
        assert not host.service(name).is_running, f"{name} runs"
    for port in listening:
        assert host.socket(f"tcp://127.0.0.1:{port}").is_listening, f"nobody listens on {port}"
    for port in silent:
        assert not host.socket(f"tcp://127.0.0.1:{port}").is_listening, f"somebody listens on {port}"
    found = {one.pid: one.args for one in host.process.filter()} if living or gone else {}
    for pid, words in (living or {}).items():
        assert words in found.get(pid, ""), f"pid {pid} ({words}): {found.get(pid, 'gone')}"
    for pid in gone:
        assert pid not in found, f"pid {pid} lives: {found[pid]}"
