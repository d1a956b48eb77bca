# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over a container and its Proxmox node: confirmations, rungs, devices, joined verdicts, how to reach it."""

from __future__ import annotations

import importlib.util
import typing as t

from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import connection_loader
from ansible.utils.vars import load_extra_vars

from ansible_collections.cleanslate.sglang.plugins.filter.inventory import plain_value
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import containers, inventory, verdicts

_ALLOWED = ("sglang_proxmox_host", "sglang_vmid", "sglang_host_rungs")


def _some(variables: t.Mapping[str, t.Any], names: t.Sequence[str]) -> dict[str, t.Any]:
    return {name: plain_value(variables[name]) for name in names if name in variables}


def allowed_node(variables: t.Mapping[str, t.Any]) -> str:
    """The Proxmox node that may be asked and may act for a host; empty where there is none."""
    return inventory.node_of(_some(variables, _ALLOWED))


def confirmation_problems(
    hostvars: t.Mapping[str, t.Any],
    hosts: t.Sequence[str],
    confirm_container_stop: t.Any = "",
    confirm_gpu_reset: t.Any = "",
    server_count: int = 1,
) -> list[str]:
    """Confirmations that don't fit one of these hosts, or that would count for more than one."""
    given = {
        "confirm_container_stop": plain_value(confirm_container_stop),
        "confirm_gpu_reset": plain_value(confirm_gpu_reset),
    }
    typed = load_extra_vars(DataLoader())
    kept = {
        host: [name for name in given if name not in typed and inventory.listed(plain_value(hostvars[host].get(name)))]
        for host in hosts
    }
    return inventory.confirmation_scope_problems(hosts, given, kept, server_count) + [
        problem
        for host in hosts
        for problem in inventory.confirmation_problems(
            host, _some(hostvars[host], _ALLOWED), *given.values()
        )
    ]


def connection_missing(name: str) -> str:
    """Why this connection plugin can't be used on this controller; empty where it can."""
    if not connection_loader.has_plugin(name):
        collection = ".".join(name.split(".")[:2])
        return (
            f"the connection plugin {name} is not installed on the controller (ansible-galaxy collection install "
            f"{collection}, or pip install ansible)"
        )
    if importlib.util.find_spec("paramiko") is None:
        return f"the connection plugin {name} needs paramiko on the controller (pip install paramiko)"
    return ""


def node_connection(hostvars: t.Mapping[str, t.Any], node: str, vmid: t.Any) -> dict[str, t.Any]:
    """Connection variables of a container that is reached by pct on its node."""
    return containers.node_connection(_some(hostvars[node], _CONNECTION), node, vmid)


_CONNECTION = (
    "ansible_host",
    "ansible_ssh_host",
    "ansible_user",
    "ansible_ssh_user",
    "ansible_port",
    "ansible_ssh_port",
    "ansible_private_key_file",
    "ansible_ssh_private_key_file",
    "ansible_password",
    "ansible_ssh_pass",
    "ansible_ssh_password",
    "ansible_host_key_checking",
    "ansible_ssh_host_key_checking",
    "ansible_paramiko_proxy_command",
    "proxmox_become_method",
)


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "allowed_node": allowed_node,
            "confirmation_problems": confirmation_problems,
            "connection_missing": connection_missing,
            "eviction_problem": verdicts.eviction_problem,
            "inside_rungs": inventory.inside_rungs,
            "join_verdicts": verdicts.join_verdicts,
            "listed": inventory.listed,
            "node_baselines": containers.node_baselines,
            "node_connection": node_connection,
            "node_devices": containers.node_devices,
            "node_problems": containers.node_problems,
            "node_rungs": inventory.node_rungs,
            "pct_problem": containers.pct_problem,
            "unreachable_problem": containers.unreachable_problem,
        }
