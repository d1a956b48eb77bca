# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A check for drift for people, and the options that it is called with."""

from __future__ import annotations

import datetime
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.filter.drift import FilterModule
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import inventory
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_accepted import acceptance_problems
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_settings import left_out
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_table import (
    calls_for_relaunch,
    drift_lines,
    drift_overview,
    drift_why,
)


def row(item: str, wanted: t.Any, found: t.Any, **changes: t.Any) -> dict[str, t.Any]:
    return {
        "server": "chat",
        "item": item,
        "wanted": wanted,
        "found": found,
        "where": "process",
        "also": [],
        "severity": "critical",
        "state": "drift",
        "remedy": "relaunch it",
        "reason": None,
        **changes,
    }


def result(*rows: dict[str, t.Any], **changes: t.Any) -> dict[str, t.Any]:
    """A module's result; rows without a server are the host's."""
    accepted = [each for each in rows if each["state"] == "accepted"]
    standing = [each for each in rows if each["state"] != "accepted"]
    drifted = any(each["state"] != "unknown" for each in standing)
    return {
        "verdict": "drifted" if drifted else "unknown" if standing else "in_sync",
        "summary": f"x: {len(standing)} drifted, 0 unknown, {len(accepted)} accepted",
        "servers": [
            {
                "name": "chat",
                "verdict": "drifted" if drifted else "in_sync",
                "running": True,
                "pid": 4711,
                "uptime_s": 90061.0,
                "health": "ok",
                "engine_keys_compared": 12,
                "launch_id": "20260131T235959Z-1a2b",
                "drift": [each for each in standing if each["server"]],
                "accepted": [each for each in accepted if each["server"]],
            }
        ],
        "host": {
            "verdict": "in_sync",
            "drift": [each for each in standing if not each["server"]],
            "accepted": [each for each in accepted if not each["server"]],
            "gpus": [{}, {}],
            "driver_version": "580.95.05",
            "memory": {"available_mib": 98765},
        },
        "seconds": 1.26,
        **changes,
    }


def squeezed(lines: t.Sequence[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


def test_a_host_in_sync() -> None:
    assert squeezed(drift_lines(result(), "gpu01")) == [
        "gpu01: in sync (0 drifted, 0 unknown, 0 accepted), 1.3 s",
        "chat: in sync: pid 4711, up 1 d 1 h, health ok, 12 of its flags as SGLang has them, launch",
        "20260131T235959Z-1a2b",
        "(host): in sync: 2 GPUs, driver 580.95.05, 98,765 MiB of memory available",
    ]


def test_each_row_with_its_mark_its_values_and_its_place() -> None:
    rows = [
        row("flag:mem-fraction-static", 0.88, 0.8, also=["file", "engine"]),
        row("flag:port", 30000, None, severity="warning"),
        row("flag:enable-metrics", None, True),
        row("flags", None, "its flags can't be read", state="unknown", severity="warning"),
        row("user", "sglang", "root", state="expired_acceptance", reason="ticket 12 (accepted until 2026-01-31)"),
        row("holder:7/python", "nobody else", "holds GPU 0", server=None, where="host", remedy="end it"),
        row("env:NCCL_DEBUG", "INFO", None, state="accepted", reason="ticket 13"),
    ]
    lines = squeezed(drift_lines(result(*rows), "gpu01"))
    for expected in (
        "CRITICAL chat flag:mem-fraction-static 0.88 0.8 process, file, engine",
        "warning chat flag:port 30000 (absent) process",
        "CRITICAL chat flag:enable-metrics (absent) true process",
        "unknown chat flags its flags can't be read process",
        "expired chat user sglang root process",
        "CRITICAL (host) holder:7/python nobody else holds GPU 0 host",
        "expired: chat: user: ticket 12 (accepted until 2026-01-31)",
        "accepted: chat: env:NCCL_DEBUG: wanted INFO, found (absent): ticket 13",
        "remedy: end it (holder:7/python)",
    ):
        assert expected in lines, (expected, lines)
    # A remedy that many rows share is told once.
    assert len([line for line in lines if line.startswith("remedy: relaunch it (chat: flag:mem-fraction-static")]) == 1


def test_notes_lines_and_what_could_not_be_seen() -> None:
    rows = [
        row("fingerprint", None, "none was kept", state="unknown", severity="note"),
        row("unit_file", ["[Service]", "Nice=5"], ["[Service]", "x" * 300], severity="warning"),
    ]
    seen = result(*rows, servers=[{**result(*rows)["servers"][0], "running": None}])
    seen["host"]["simulated"] = True
    text = "\n".join(squeezed(drift_lines(seen, "gpu01")))
    assert "chat: DRIFTED: whether it runs could not be seen, launch" in text, text
    assert "2 GPUs (SIMULATED)" in text
    assert "note chat fingerprint none was kept process" in text, text
    assert "warning chat unit_file [Service],Nice=5 [Service]," in text, text
    sentence = drift_why(seen, "gpu01")
    assert sentence.startswith("gpu01 has drifted: chat: unit_file: wanted [Service],Nice=5, found [Service],xxx")
    assert sentence.endswith("xxx...") and "fingerprint" not in sentence and len(sentence) < 250


def test_what_a_host_says_drives_no_terminal() -> None:
    text = "\n".join(drift_lines(result(row("holder:7/\x1b[31mred\x07", "a\nb", "\x1b]0;x\x07"), server=None), "gpu01"))
    assert "\x1b" not in text and "\x07" not in text
    assert "\x1b" not in drift_why(result(row("x", "\x1b[2J", 1)), "gpu01")


def test_a_task_that_failed_is_unknown_and_says_why() -> None:
    timed_out = {"failed": True, "msg": "Timed out after 330 second(s)."}
    assert drift_lines(timed_out, "gpu01") == ["gpu01: UNKNOWN: Timed out after 330 second(s)."]
    assert drift_why(timed_out, "gpu01") == "gpu01 is unknown: Timed out after 330 second(s)."
    empty: tuple[t.Any, ...] = ({}, None)
    for nothing in empty:
        assert drift_lines(nothing, "gpu01") == ["gpu01: UNKNOWN: it did not run"]
    # Another word than the three is none of ours.
    assert drift_lines(result(verdict="fine"), "gpu01")[0].startswith("gpu01: UNKNOWN")


def test_one_sentence() -> None:
    rows = [row(f"flag:f{number}", number, None) for number in range(7)]
    text = drift_why(result(*rows, row("engine", None, "told nothing", severity="note")), "gpu01")
    assert text.startswith("gpu01 has drifted: chat: flag:f0: wanted 0, found (absent); ")
    assert text.endswith("; and 2 more")
    unsure = drift_why(result(row("flags", None, "can't be read", state="unknown")), "gpu01")
    assert unsure == "gpu01 is unknown: chat: flags is unknown: can't be read"


@pytest.mark.parametrize(
    ("rows", "calls"),
    [
        ([], False),
        ([row("model_config", "sha256:1", "sha256:2", severity="warning")], True),
        ([row("engine", None, "told nothing", state="unknown", severity="warning")], True),
        ([row("fingerprint", None, "none was kept", severity="note")], False),
        ([row("user", "sglang", "root", state="accepted")], False),
        ([row("waiver_expired:x", "until 2026-01-31", "it ended", state="expired_acceptance")], False),
        ([row("holder:7/python", "nobody else", "holds GPU 0", server=None)], False),
    ],
)
def test_what_calls_for_a_relaunch(rows: list[dict[str, t.Any]], calls: bool) -> None:
    found = result(*rows)
    # The module's word for the server alone; of notes and of the host there is none in it.
    own = [each for each in rows if each["server"] and each["severity"] != "note" and each["state"] != "accepted"]
    found["servers"][0]["verdict"] = "drifted" if own else "in_sync"
    assert calls_for_relaunch(found, "chat") is calls
    assert calls_for_relaunch(found, "another") is True


def test_what_is_not_known_calls_for_a_relaunch() -> None:
    nothing: list[t.Any] = [{}, None, {"failed": True, "msg": "Timed out"}, result(servers=[])]
    for each in nothing:
        assert calls_for_relaunch(each, "chat") is True
    odd = result()
    odd["servers"][0]["verdict"] = "drifted"  # without any row
    assert calls_for_relaunch(odd, "chat") is True


def test_a_fleet_leaves_nobody_out() -> None:
    lines = drift_overview(
        {
            "gpu01": result(),
            "gpu02": result(row("user", "sglang", "root")),
            "gpu03": {"unreachable": True, "msg": "no route to host"},
            "gpu04": {},
            "gpu05": {"failed": True, "msg": "Timed out"},
        }
    )
    assert lines == [
        "5 hosts: 1 in sync, 1 drifted, 1 unknown, 1 unreachable, 1 not checked",
        "  gpu02 has drifted: chat: user: wanted sglang, found root",
        "  gpu05 is unknown: Timed out",
        "  gpu03 unreachable: no route to host",
        "  gpu04: not checked, see its error above",
    ]
    assert drift_overview({}) == ["no host was checked"]


# --- what the module is told ------------------------------------------------------------------------------------------

SECRET = "Sesame-51a7-do-not-show"
SERVER = {"name": "chat", "port": 30000, "python": "/p", "flags": {"model_path": "/m"}, "api_key": SECRET}
VARIABLES: dict[str, t.Any] = {
    "sglang_servers": [SERVER, {**SERVER, "name": "plain", "port": 30001, "api_key": None}],
    "sglang_server_defaults": {"user": "sglang", "secret_environment": {"HF_TOKEN": SECRET}, "flags": {"tp_size": 2}},
}


def filtered(name: str, **changes: t.Any) -> t.Any:
    return FilterModule().filters()[name]({**VARIABLES, **changes})


def test_settings_are_complete_and_without_secrets() -> None:
    options = filtered("drift_options")
    assert SECRET not in str(options)
    first = options["servers"][0]
    assert (first["user"], first["device"], first["flags"]) == ("sglang", "gpu", {"tp_size": 2, "model_path": "/m"})
    assert filtered("drift_secrets") == {
        "chat": {"secret_environment": {"HF_TOKEN": SECRET}, "api_key": SECRET},
        "plain": {"secret_environment": {"HF_TOKEN": SECRET}},
    }
    secret = {name for name, option in inventory.server_options().items() if option.get("no_log")}
    assert secret >= {"api_key", "secret_environment"} and not secret & set(first)


@pytest.mark.parametrize(
    ("given", "device", "expected"), [(None, "gpu", None), (8, "gpu", 8), (None, "cpu", 0), (2, "cpu", 2)]
)
def test_how_many_gpus_are_expected(given: int | None, device: str, expected: int | None) -> None:
    servers = [{**SERVER, "device": device}]
    options = filtered("drift_options", sglang_servers=servers, sglang_expected_gpus=given)
    assert options.get("expected_gpus") == expected
    # A host without servers may have GPUs all the same.
    assert "expected_gpus" not in filtered("drift_options", sglang_servers=[])


def test_acceptances_of_servers_that_are_elsewhere_are_left_out() -> None:
    entry = {"item": "user", "reason": "ticket 12", "until": datetime.date(2026, 1, 31)}
    given = [entry, {**entry, "server": "chat"}, {**entry, "server": "elsewhere"}]
    kept = filtered("drift_options", sglang_drift_accepted=given)["accepted"]
    assert kept == [{**entry, "server": name, "until": "2026-01-31"} for name in ("*", "chat")]


def test_the_net_grows_with_the_servers() -> None:
    one = filtered("drift_options", sglang_servers=[SERVER])["timeout_s"]
    assert filtered("drift_options")["timeout_s"] > one > 200
    assert filtered("drift_options", sglang_servers=[SERVER], sglang_nvml_deadline_s=60)["timeout_s"] == one + 150


@pytest.mark.parametrize(
    ("accepted", "words"),
    [
        ("user", "must be a list of mappings"),
        ([{"item": "user", "reason": "x"}], "gpu01: sglang_drift_accepted[0]: until is None"),
        ([{"item": "user", "reason": "x", "until": "soon"}], "until is 'soon'; write the last day like"),
        ([{"item": "*", "reason": "x", "until": "2026-01-31"}], "would accept everything"),
        ([{"item": "user", "reason": " ", "until": "2026-01-31"}], "reason is missing"),
        ([{"item": "user", "raison": "x", "until": "2026-01-31"}], "did you mean 'reason'?"),
    ],
)
def test_a_wrong_acceptance_is_named(accepted: t.Any, words: str) -> None:
    values = {"sglang_servers": [], "sglang_drift_accepted": accepted}
    for found in (
        acceptance_problems("gpu01", accepted),
        inventory.host_problems("gpu01", list(values), values, True, ["gpu01"]),
    ):
        assert any(words in each for each in found), found
    good = [{"item": "user", "reason": "x", "until": "2026-01-31"}]
    assert inventory.host_problems("gpu01", list(values), {**values, "sglang_drift_accepted": good}, True) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start_at_task": "x"}, "--start-at-task"),
        ({"skip_tags": ("x", "always")}, "--skip-tags always"),
        ({"skip_tags": ["tagged"]}, "--skip-tags tagged"),
        ({"skip_tags": ["all"], "tags": ["x"], "start_at_task": None}, None),
        ({}, None),
    ],
)
def test_what_would_leave_the_check_out_is_refused(arguments: dict[str, t.Any], words: str | None) -> None:
    problem = left_out(arguments)
    assert problem is None if words is None else words in str(problem)


def test_hosts_that_nothing_is_known_of_are_named() -> None:
    hostvars: dict[str, dict[str, t.Any]] = {
        "answered": {"drift_result": {"verdict": "in_sync"}},
        "unreachable": {"drift_result": {"unreachable": True, "msg": "no route"}},
        "refused": {"drift_refused": {"failed": True, "msg": "not checked"}},
        "skipped": {"drift_refused": {"skipped": True}, "drift_result": {"skipped": True}},
        "silent": {"drift_refused": {"skipped": True}},
        "nothing": {},
    }
    unasked = FilterModule().filters()["drift_unasked"]
    assert unasked(hostvars, list(hostvars)) == ["skipped", "silent", "nothing"]
