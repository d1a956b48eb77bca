# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters of the check for drift: what the module is told, what it found, and its schedule."""

from __future__ import annotations

import typing as t

from ansible import context
from ansible.errors import AnsibleFilterError

from ansible_collections.cleanslate.sglang.plugins.filter.inventory import plain_value
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import (
    drift_schedule,
    drift_settings,
    drift_table,
    inventory,
)

Variables = t.Mapping[str, t.Any]


def _servers(variables: Variables) -> tuple[t.Any, t.Any]:
    return plain_value(variables["sglang_servers"]), plain_value(variables.get("sglang_server_defaults") or {})


def _of(variables: Variables, name: str) -> t.Any:
    return plain_value(variables.get(name))


def drift_options(variables: Variables) -> dict[str, t.Any]:
    """A host's variables as the module's options ``servers``, ``accepted`` and ``expected_gpus``, without secrets; and
    ``timeout_s``, the net above them."""
    servers, defaults = _servers(variables)
    expected = drift_settings.expected_gpus(_of(variables, "sglang_expected_gpus"), servers, defaults)
    options: dict[str, t.Any] = {
        "servers": drift_settings.settings_of(servers, defaults),
        "accepted": drift_settings.accepted_of(_of(variables, "sglang_drift_accepted") or [], servers),
        "timeout_s": drift_settings.timeout_s(servers, float(_of(variables, "sglang_nvml_deadline_s") or 10)),
    }
    return options if expected is None else {**options, "expected_gpus": expected}


def drift_secrets(variables: Variables) -> dict[str, dict[str, t.Any]]:
    """The secrets of a host's servers by their names."""
    return drift_settings.secrets_of(*_servers(variables))


def drift_hosts(hosts: t.Sequence[str]) -> str:
    """`3 hosts`, for the name of a task. The controller itself makes a name; all else of a task is done by a process
    for each host, and what is loaded for the name they need not load again (0.3 s of CPU time each)."""
    inventory.host_options()
    return f"{len(hosts)} host" + ("" if len(hosts) == 1 else "s")


def drift_overview(hostvars: t.Mapping[str, t.Any], hosts: t.Sequence[str], name: str = "drift_result") -> list[str]:
    """A fleet in a few lines, from what each of its hosts has registered."""
    return drift_table.drift_overview({host: hostvars[host].get(name, {}) for host in hosts})


def drift_target(target: str) -> str:
    """The target as it is. Raises where the command line would leave tasks out of drift.yml: a check of nothing would
    end as one that found nothing."""
    problem = drift_settings.left_out(context.CLIARGS)
    if problem is not None:
        raise AnsibleFilterError(problem)
    return target


def drift_unasked(hostvars: t.Mapping[str, t.Any], hosts: t.Sequence[str]) -> list[str]:
    """The hosts on which the check neither ran nor said why not."""
    return [host for host in hosts if not drift_table.was_asked(hostvars[host])]


def schedule_command(settings: Variables) -> list[str]:
    """The words of the scheduled command."""
    return drift_schedule.command(plain_value(settings))


def schedule_files(settings: Variables) -> list[list[str]]:
    """What the schedule's user must be able to read."""
    return drift_schedule.files(plain_value(settings))


def schedule_problems(settings: Variables, looked: Variables) -> list[str]:
    """Why the schedule would not run."""
    return drift_schedule.problems(plain_value(settings), plain_value(looked))


def systemd_words(words: t.Sequence[str]) -> str:
    """A command as ExecStart= takes it."""
    try:
        return drift_schedule.systemd_words(words)
    except CleanSlateError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "cron_command": drift_schedule.cron_command,
            "drift_calls_for_relaunch": drift_table.calls_for_relaunch,
            "drift_hosts": drift_hosts,
            "drift_lines": drift_table.drift_lines,
            "drift_options": drift_options,
            "drift_overview": drift_overview,
            "drift_schedule_command": schedule_command,
            "drift_schedule_files": schedule_files,
            "drift_schedule_problems": schedule_problems,
            "drift_secrets": drift_secrets,
            "drift_target": drift_target,
            "drift_unasked": drift_unasked,
            "drift_why": drift_table.drift_why,
            "systemd_environment": drift_schedule.systemd_environment,
            "systemd_words": systemd_words,
        }
