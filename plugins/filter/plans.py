# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over guardrails and plans."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.sglang.plugins.filter.inventory import server_settings
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import guardrails, plan_report


def all_guardrails(own: t.Any, bases: t.Sequence[str] = ()) -> list[dict[str, t.Any]]:
    """The shipped rules with an inventory's own ones."""
    return guardrails.all_rules(own, bases)[0]


def guardrail_problems(own: t.Any, waivers: t.Any, where: str, bases: t.Sequence[str] = ()) -> list[str]:
    """What is wrong with an inventory's own rules and a server's waivers."""
    rules, problems = guardrails.all_rules(own, bases)
    return [*problems, *guardrails.waiver_problems(where, waivers, rules)]


def server_guardrail_problems(
    own: t.Any,
    names: t.Sequence[str],
    servers: t.Sequence[t.Mapping[str, t.Any]],
    defaults: t.Any,
    host: str,
    bases: t.Sequence[str] = (),
) -> list[str]:
    """The same for these servers of one host, each mistake once."""
    rules, problems = guardrails.all_rules(own, bases)
    problems = [f"{host}: {problem}" for problem in problems]
    for name in names:
        waivers = server_settings(servers, name, defaults).get("waivers")
        problems += guardrails.waiver_problems(f"{host}: server '{name}'", waivers, rules)
    return problems


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "guardrails": all_guardrails,
            "guardrail_problems": guardrail_problems,
            "server_guardrail_problems": server_guardrail_problems,
            "plan_lines": plan_report.plan_lines,
            "plan_why": plan_report.plan_why,
        }
