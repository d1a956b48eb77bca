# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over a rollout: what was asked for, the batches, the stop rule, and the report."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.sglang.plugins.filter.inventory import plain_value
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import rollout, rollout_report

JSON = dict[str, t.Any]
_OF_PLAN = ("preflight_chosen", "preflight_units", "rollout_seen", "sglang_proxmox_host")
_OF_REPORT = ("rollout_seen", "rollout_results", "rollout_restored", "rollout_begun", "rollout_broke")


def _variables(hostvars: t.Mapping[str, t.Any], hosts: t.Iterable[str], names: t.Sequence[str]) -> dict[str, JSON]:
    """These variables of these hosts, each absent where it is not set."""
    found = {host: hostvars[host] for host in hosts}
    return {
        host: {name: plain_value(values[name]) for name in names if name in values} for host, values in found.items()
    }


def rollout_problems(options: t.Mapping[str, t.Any]) -> list[str]:
    """What is wrong with the variables of a rollout."""
    return rollout.option_problems(plain_value(options))


def rollout_seen(
    server: t.Mapping[str, t.Any],
    current: t.Any,
    trial: t.Any,
    verify: t.Any,
    routers: t.Any,
    options: t.Mapping[str, t.Any],
) -> JSON:
    """What was found of one server before anything is touched."""
    results = {"current": current, "trial": trial, "verify": verify, "routers": routers}
    return rollout.seen(plain_value(server), plain_value(results), plain_value(options))


def rollout_plan(hostvars: t.Mapping[str, t.Any], hosts: t.Sequence[str], options: t.Mapping[str, t.Any]) -> JSON:
    """The batches, and what stands against them."""
    variables = _variables(hostvars, hosts, _OF_PLAN)
    units, problems = rollout.units_of(hosts, variables)
    made = rollout.plan(units, plain_value(options))
    return {**made, "problems": problems + made["problems"] + rollout.spread_problems(made, variables)}


def rollout_mine(batch: t.Sequence[t.Mapping[str, t.Any]], host: str) -> list[str]:
    """What a host has to do at each slot of a batch."""
    return rollout.mine(plain_value(batch), host)


def rollout_answers(units: t.Any, host: str, server: str) -> bool:
    """Whether requests are sent to this host's part of a server."""
    return rollout.answers_requests(plain_value(units), host, server)


def rollout_judgement(batch: t.Sequence[t.Mapping[str, t.Any]], hostvars: t.Mapping[str, t.Any]) -> list[str]:
    """Why a batch did not go well; empty where every planned server is proved."""
    rows = plain_value(batch)
    found = _variables(hostvars, {row["host"] for row in rows}, ("rollout_results",))
    return rollout.judge_batch(rows, {host: values.get("rollout_results") for host, values in found.items()})


def rollout_too_few(
    batch: t.Sequence[t.Mapping[str, t.Any]], hostvars: t.Mapping[str, t.Any], least: t.Any = 1
) -> list[str]:
    """Why a batch may not be taken out of the routers as a whole."""
    rows = plain_value(batch)
    found = _variables(hostvars, {row["host"] for row in rows}, ("rollout_others",))
    answers = {host: values.get("rollout_others") or {} for host, values in found.items()}
    return rollout.too_few_left(rows, answers, int(least))


def rollout_result(results: t.Mapping[str, t.Any]) -> JSON:
    """What became of one server."""
    return rollout_report.unit_result(plain_value(results))


def rollout_plan_lines(
    plan: t.Mapping[str, t.Any], hostvars: t.Mapping[str, t.Any], hosts: t.Sequence[str]
) -> list[str]:
    """The batches for people."""
    return rollout_report.plan_lines(plain_value(plan), _variables(hostvars, hosts, ("rollout_seen",)))


def rollout_report_of(
    plan: t.Mapping[str, t.Any],
    hostvars: t.Mapping[str, t.Any],
    hosts: t.Sequence[str],
    run: t.Mapping[str, t.Any],
    times: t.Mapping[str, t.Any],
    stopped: t.Sequence[str] = (),
) -> JSON:
    """The report as data, without any secret of these hosts' servers."""
    variables = _variables(hostvars, hosts, _OF_REPORT)
    made = rollout_report.document(plain_value(plan), variables, plain_value(run), times, plain_value(stopped))
    given = _variables(hostvars, hosts, ("sglang_servers", "sglang_server_defaults")).values()
    secrets = [secret for each in given for secret in rollout_report.secrets_of(each)]
    return t.cast(JSON, rollout_report.without_secrets(made, secrets))


def rollout_lines(report: t.Mapping[str, t.Any]) -> list[str]:
    """The report for people."""
    return rollout_report.report_lines(plain_value(report))


def rollout_html(report: t.Mapping[str, t.Any]) -> str:
    """The report as one HTML file."""
    return rollout_report.report_html(plain_value(report))


def rollout_why(report: t.Mapping[str, t.Any]) -> str:
    """Why a rollout is not done, in one sentence."""
    return rollout_report.why_stopped(plain_value(report))


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "rollout_answers": rollout_answers,
            "rollout_html": rollout_html,
            "rollout_judgement": rollout_judgement,
            "rollout_lines": rollout_lines,
            "rollout_mine": rollout_mine,
            "rollout_plan": rollout_plan,
            "rollout_plan_lines": rollout_plan_lines,
            "rollout_problems": rollout_problems,
            "rollout_report": rollout_report_of,
            "rollout_result": rollout_result,
            "rollout_seen": rollout_seen,
            "rollout_too_few": rollout_too_few,
            "rollout_why": rollout_why,
        }
