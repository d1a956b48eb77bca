# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One server's drift: every kind named exactly once, what can't be seen unknown, no secret shown."""

from __future__ import annotations

import dataclasses
import json
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.drift import Row, merge, verdict_of
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.drift_server import (
    Health,
    Place,
    Prints,
    SeenServer,
    UnitSeen,
    WantedServer,
    given_secrets,
    judge_server,
    same_python,
)
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.workers import Worker, Workers
from ansible_collections.cleanslate.sglang.plugins.module_utils.model import to_json
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.cmdline import launched_flags
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import MASK, Redactor
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT

WANTED = WantedServer(
    "chat",
    {"model_path": "/m", "tp_size": 1, "mem_fraction_static": 0.9, "max_total_tokens": "128k"},
    port=30000,
    environment={"NCCL_DEBUG": "INFO"},
    gpus=("GPU-1",),
    python="/venv/bin/python",
    user="sglang",
)
KEPT = {
    "group": "sglang",
    "launcher": "systemd",
    "unit": "sglang-chat.service",
    "unit_overrides": {},
    "limit_memlock": "infinity",
    "stop_timeout_s": 60,
    "restart": "no",
    "start_check": (),
    "enabled": False,
    "log": None,
    "workdir": None,
}
PRINT = {
    "sglang_version": "0.5.15",
    "driver_version": "580.1",
    "gpu_count": 8,
    "model_config": "sha256:aa",
    "model_index": "none",
}
UNIT = UnitSeen(
    "sglang-chat.service", "[Service]\nUser=sglang\n", "[Service]\nUser=sglang\n", False, "/u/x", "/u/x", (), False
)
UNIT_EDITED = dataclasses.replace(UNIT, text="[Service]\nUser=root\n", edited=True)
YOUNG = 30.0


def place(extra: str = "", drop: str = "", **changes: t.Any) -> Place:
    words = f"--model /m --tp 1 --mem-fraction-static=0.90 --max-total-tokens 128000 --port 30000 {extra}".split()
    argv = ["python3", "-m", "sglang.launch_server", *[word for word in words if not drop or drop not in word]]
    fine = Place(
        launched_flags(argv, lambda path: None),
        {"NCCL_DEBUG": "INFO", "PATH": "/bin"},
        ("GPU-1",),
        None,
        "/venv/bin/python3",
        "sglang",
    )
    return dataclasses.replace(fine, **changes)


def seen(**changes: t.Any) -> SeenServer:
    info = {"model_path": "/m", "tp_size": 1, "mem_fraction_static": 0.7, "max_total_tokens": 128000, "port": 30000}
    fine = SeenServer(
        file=place(),
        process=place(),
        pid=812,
        age_s=3600.0,
        by_record=True,
        port=30000,
        listens=True,
        workers=Workers(1, 1),
        held=("GPU-1",),
        info=info,
        health=Health("ok", "HTTP 200"),
        kept=KEPT,
        unit=UNIT,
        prints=Prints(PRINT, PRINT, {}, "0.5.15"),
    )
    return dataclasses.replace(fine, **changes)


def dead(**changes: t.Any) -> SeenServer:
    nothing: dict[str, t.Any] = dict.fromkeys(("process", "pid", "age_s", "workers", "info", "health", "held"))
    return seen(**{**nothing, "listens": False, "by_record": False, **changes})


def rows(found: SeenServer, wanted: WantedServer = WANTED) -> list[Row]:
    return list(merge(judge_server(wanted, found)[0]))


def prints(running: str | None = "0.5.15", **now: t.Any) -> Prints:
    return Prints(PRINT, {**PRINT, **now}, {}, running)


def want(**changes: t.Any) -> WantedServer:
    return dataclasses.replace(WANTED, **changes)


def test_the_same_by_meaning_is_no_drift_and_what_sglang_sets_itself_neither() -> None:
    found, compared = judge_server(WANTED, seen())
    assert found == ()
    assert compared == 5


T_STATE = Worker(9, "sglang::scheduler", "scheduler", "T")
STOPPED = Workers(1, 1, stopped=(T_STATE,), problem="pid 9 is stopped", hung=True)
KILLED = Workers(1, 0, dead=(Worker(9, "", "scheduler", "Z", zombie=True),), problem="pid 9 is dead")
MISSING = Workers(2, 1, problem="1 of 2 schedulers run")

KINDS: list[tuple[str, SeenServer]] = [
    ("flag:max-total-tokens", seen(process=place(drop="max-total"), file=place(drop="max-total"))),
    ("flag:tp-size", seen(process=place("--tp=2"))),
    ("flag:enable-metrics", seen(process=place("--enable-metrics"))),
    ("flag:max-total-tokens", seen(info={"max_total_tokens": 64000})),
    ("flag:host", seen(process=place("--host 0.0.0.0"))),
    ("env:NCCL_DEBUG", seen(process=place(environment={"NCCL_DEBUG": "WARN"}))),
    ("env:NCCL_DEBUG", seen(process=place(environment={}))),
    ("env:NCCL_ALGO", seen(process=place(environment={"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring"}))),
    ("gpus", seen(process=place(gpus=("GPU-2",)), file=place(gpus=("GPU-2",)))),
    ("gpus", seen(held=("GPU-1", "GPU-2"))),
    ("python", seen(process=place(python="/other/python"))),
    ("user", seen(process=place(user="root"))),
    ("setting:restart", seen(kept={**KEPT, "restart": "on-failure"})),
    ("setting:unit_overrides", seen(kept={**KEPT, "unit_overrides": {"Service": {"Nice": 5}}})),
    ("setting:enabled", seen(unit=dataclasses.replace(UNIT, enabled=True))),
    ("unit_file", seen(unit=UNIT_EDITED)),
    ("unit_file", seen(unit=dataclasses.replace(UNIT, text=None, path=None))),
    ("unit_file", seen(unit=dataclasses.replace(UNIT, path="/etc/systemd/system/x"))),
    ("unit_override", seen(unit=dataclasses.replace(UNIT, drop_ins=("/u/x.d/a.conf",)))),
    ("launch_files", seen(file=None, missing=("config.yaml",))),
    ("not_running", dead()),
    ("not_ours", dead(stranger="pid 7 (nginx)")),
    ("not_ours", seen(stranger="pid 7 (nginx)")),
    ("not_ours", seen(stranger="pid 7 (nginx)", listens=False, health=None, info=None)),
    ("restarted_by_hand", seen(by_record=False)),
    ("restarted_by_hand", seen(by_record=False, file=None, kept=None, unit=None, prints=Prints(launched=False))),
    ("started_before_change", seen(changed_after_start=("config.yaml",))),
    ("hung", seen(workers=STOPPED, health=None, info=None)),
    ("hung", seen(workers=STOPPED, health=None, info=None, age_s=YOUNG)),
    ("hung", seen(health=Health("timeout", "no answer"), info=None)),
    ("hung", seen(health=Health("unhealthy", "HTTP 503", 20.04), info=None)),
    ("hung", seen(health=Health("unhealthy", "HTTP 503", 20.04), info=None, age_s=YOUNG)),
    ("hung", seen(health=Health("unhealthy", "HTTP 503", 5.1, 5.0), info=None)),
    ("unhealthy", seen(health=Health("unhealthy", "HTTP 503", 0.1), info=None)),
    ("unhealthy", seen(workers=KILLED, health=None, info=None)),
    ("unhealthy", seen(workers=KILLED, health=None, info=None, age_s=YOUNG)),
    ("unhealthy", seen(workers=MISSING, health=None, info=None)),
    ("unhealthy", seen(listens=False, health=None, info=None)),
    ("sglang_version", seen(prints=prints(sglang_version="0.5.16"))),
    ("sglang_version", seen(prints=prints("0.5.16"))),
    ("sglang_version", seen(prints=prints("0.5.16", sglang_version="0.5.16"))),
    ("driver_version", seen(prints=prints(driver_version="580.2"))),
    ("gpu_count", seen(prints=prints(gpu_count=7))),
    ("model_config", seen(prints=prints(model_config="sha256:bb"))),
    ("model_index", seen(prints=prints(model_index="sha256:cc"))),
]


@pytest.mark.parametrize(("item", "found"), KINDS)
def test_each_kind_is_named_exactly_once(item: str, found: SeenServer) -> None:
    named = rows(found)
    assert [row.item for row in named] == [item]
    assert verdict_of(named) == "drifted"
    assert named[0].remedy


def test_a_flag_that_differs_in_all_places_is_one_row_of_the_deepest() -> None:
    (row,) = rows(seen(file=place("--tp 2"), process=place("--tp 2"), info={"tp_size": 2}))
    assert (row.item, row.wanted, row.where, row.also) == ("flag:tp-size", 1, "engine", ("file", "process"))


def test_an_edited_unit_says_which_lines() -> None:
    (row,) = rows(seen(unit=UNIT_EDITED))
    assert (row.wanted, row.found) == (["User=sglang"], ["User=root"])


def test_an_edited_unit_shows_no_key_that_stands_on_a_line_of_its_own() -> None:
    text = "[Service]\nExecStart=/x python \\\n# why\n  --api-key \\\n  sk-hand \\\n  --tp 2\n"
    unit = dataclasses.replace(UNIT_EDITED, kept="[Service]\nExecStart=/x python --tp 2\n", text=text)
    (row,) = rows(seen(unit=unit))
    assert Redactor().data(row.found) == [f"ExecStart=/x python  --api-key  {MASK}  --tp 2"]


def test_a_secret_within_unit_overrides_is_masked_on_both_sides() -> None:
    given = {"Service": {"ExecStartPre": "/usr/bin/curl -H X-Cred:key-1-of-9 http://u:pw@h"}}
    masked = {"Service": {"ExecStartPre": f"/usr/bin/curl -H X-Cred:{MASK} http://{MASK}@h"}}
    older = {"Service": {"ExecStartPre": f"/usr/bin/curl -H X-Cred:{MASK} http://u:pw@h"}}
    for kept in (masked, older):
        found = seen(kept={**KEPT, "unit_overrides": kept})
        assert rows(found, want(settings={"unit_overrides": given}, secrets=("key-1-of-9",))) == []
    (row,) = rows(
        seen(kept={**KEPT, "unit_overrides": masked}), want(settings={"unit_overrides": {}}, secrets=("key-1-of-9",))
    )
    assert row.item == "setting:unit_overrides"


def test_an_upgrade_that_the_server_has_not_seen_yet_says_so() -> None:
    (row,) = rows(seen(prints=prints(sglang_version="0.5.16")))
    assert row.found == "0.5.16 (the server still runs 0.5.15)"


@pytest.mark.parametrize(
    ("settings", "items"),
    [
        ({"restart": False}, []),  # as YAML reads a bare no
        ({"launcher": "auto", "stop_timeout_s": "60"}, []),
        ({"limit_memlock": "INFINITY"}, []),
        ({"limit_memlock": "65536"}, ["setting:limit_memlock"]),
        ({"launcher": "detached"}, ["setting:launcher"]),
        ({"group": "users"}, ["setting:group"]),
        ({"unit": "mine.service"}, ["setting:unit"]),
        ({"start_check": ["/bin/true"]}, ["setting:start_check"]),
    ],
)
def test_settings_around_the_flags(settings: dict[str, t.Any], items: list[str]) -> None:
    assert [row.item for row in rows(seen(), want(settings=settings))] == items


def test_a_detached_server_has_no_settings_of_systemd() -> None:
    kept = {**KEPT, "launcher": "detached", "unit": None}
    assert rows(seen(kept=kept, unit=None), want(settings={"restart": "on-failure"})) == []


# --- while it starts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"health": Health("unhealthy", "HTTP 503 after 0.0 s", 0.0)},
        {"health": None, "workers": MISSING, "listens": False},
        {"health": None, "listens": False},
    ],
)
def test_a_server_that_starts_is_a_note_and_no_drift(changes: dict[str, t.Any]) -> None:
    (row,) = rows(seen(info=None, age_s=YOUNG, **changes))
    assert (row.item, row.severity) == ("starting", "note")
    assert verdict_of([row]) == "in_sync"
    (row,) = rows(seen(info=None, age_s=YOUNG, **changes), want(start_s=20.0))
    assert row.item == "unhealthy"


def test_a_later_node_is_judged_by_its_processes_alone() -> None:
    assert rows(seen(first_node=False, listens=False, health=None, info=None)) == []
    assert [row.item for row in rows(seen(first_node=False, listens=False, health=None, workers=MISSING))] == [
        "unhealthy"
    ]


def test_systemd_s_own_restart_is_a_note() -> None:
    (row,) = rows(seen(again=True))
    assert (row.item, row.severity) == ("restarted_by_systemd", "note")


# --- what can't be seen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "changes"),
    [
        ("command_line", {"process": place(flags=None, problem="refused")}),
        ("environment", {"process": place(environment=None)}),
        ("launch_files", {"file": place(environment=None)}),
        ("gpus", {"process": place(gpus=None, gpus_problem="counted in CUDA's own order")}),
        ("health", {"health": Health("broken", "reset"), "info": None}),
        ("engine", {"info": None, "info_problem": "the API key is missing or wrong"}),
        ("record", {"unseen": (("record", "the record can't be used", "file"),)}),
        ("port", {"listens": None, "port_problem": "who it is can't be seen", "health": None, "info": None}),
        ("workers", {"workers": Workers(1, 0, unknown="can't be read")}),
        ("unit_file", {"unit": dataclasses.replace(UNIT, text=None, problem="can't be read")}),
        ("model_config", {"prints": Prints(PRINT, {**PRINT, "model_config": None}, {"model_config": "dead NFS"})}),
        ("sglang_version", {"prints": Prints(PRINT, {**PRINT, "sglang_version": None}, {"sglang_version": "gone"})}),
        ("driver_version", {"prints": Prints(PRINT, {**PRINT, "driver_version": None}, {"driver_version": "silent"})}),
    ],
)
def test_what_cannot_be_seen_is_unknown_and_no_drift(item: str, changes: dict[str, t.Any]) -> None:
    found = rows(seen(**changes))
    assert [(row.item, row.state) for row in found] == [(item, "unknown")]
    assert found[0].found
    assert verdict_of(found) == "unknown"


def test_without_a_fingerprint_a_note_and_no_drift() -> None:
    (row,) = rows(seen(prints=Prints(None, {"sglang_version": "0.5.16"}, {}, "0.5.16")))
    assert (row.item, row.severity) == ("fingerprint", "note")


def test_an_old_launch_knows_its_version_at_least() -> None:
    then = {"sglang_version": "0.5.15"}
    found = rows(seen(prints=Prints(then, {"sglang_version": "0.5.16", "model_config": "sha256:aa"}, {}, "0.5.16")))
    assert [(row.item, row.severity) for row in found] == [("sglang_version", "warning"), ("fingerprint", "note")]


def test_a_configuration_file_that_was_written_after_the_start_says_nothing_of_the_process() -> None:
    """What the process read is not what lies there now; the engine knows."""
    edited = place(partial=True, flags=launched_flags(
        ["python3", "-m", "sglang.launch_server", "--config", "/c", "--tp", "2"],
        lambda path: "model-path: /m\nmax-total-tokens: 1\nport: 30000\n",
    ))  # fmt: skip
    found = rows(seen(process=edited, file=place(drop="max-total")))
    assert [(row.item, row.where) for row in found] == [("flag:max-total-tokens", "file"), ("flag:tp-size", "process")]


def test_such_a_file_of_a_server_that_nobody_launched_hides_what_it_has_read() -> None:
    """No file of a launch stands for it, so what is not on the command line is unknown."""
    edited = place(partial=True, flags=launched_flags(
        ["python3", "-m", "sglang.launch_server", "--config", "/mine.yaml", "--model", "/m", "--port", "30000"],
        lambda path: "tp-size: 1\nmem-fraction-static: 0.9\nmax-total-tokens: 128k\n",
    ))  # fmt: skip
    for others in ({"file": None, "by_record": True}, {"by_record": False}):
        found = rows(seen(process=edited, **others))
        (row,) = [row for row in found if row.state == "unknown"]
        assert (row.item, row.where, "/mine.yaml" in row.found) == ("command_line", "process", True)
    assert rows(seen(process=edited)) == []


@pytest.mark.parametrize("info", [{}, {"internal_states": []}])
def test_an_answer_that_has_none_of_the_flags_tells_nothing(info: dict[str, t.Any]) -> None:
    (row,) = rows(seen(info=info))
    assert (row.item, row.state, row.where) == ("engine", "unknown", "engine")


def test_a_variable_that_was_chosen_at_the_launch_and_is_wanted_no_more() -> None:
    """Whatever its name is. Where it only stands beside others in a process, nobody knows who chose it."""
    both = {"NCCL_DEBUG": "INFO", "PATH": "/bin", "MY_SWITCH": "1"}
    chosen = frozenset({"NCCL_DEBUG", "MY_SWITCH"})
    (row,) = rows(seen(file=place(environment=both, chosen=chosen), process=place(environment=both)))
    assert (row.item, row.wanted, row.found, row.where) == ("env:MY_SWITCH", None, "1", "file")
    assert rows(seen(file=place(environment=both, chosen=chosen), process=place(environment=both)),
                want(environment={"NCCL_DEBUG": "INFO", "MY_SWITCH": "1"})) == []  # fmt: skip


def test_a_name_of_the_same_interpreter_is_no_drift() -> None:
    assert same_python("/v/bin/python", "/v/bin/python3.12")
    assert not same_python("/v/bin/python", "/w/bin/python")
    assert not same_python("/v/bin/python", "/v/bin/pypy")


# --- secrets ----------------------------------------------------------------------------------------------------------

KEYED = frozenset({"api-key"})


@pytest.mark.parametrize("shown", ["--api-key ********", "--api-key=sk-1", "--api-k sk-1"])
def test_whether_there_is_a_key_is_compared_and_no_more(shown: str) -> None:
    assert rows(seen(file=place(shown), process=place(shown)), want(secret_flags=KEYED)) == []
    (row,) = rows(seen(file=place(shown), process=place(shown)))
    assert (row.item, row.wanted, row.found, row.severity) == ("flag:api-key", "not set", "set", "critical")


def test_a_server_that_runs_open_though_it_should_have_a_key() -> None:
    (row,) = rows(seen(), want(secret_flags=KEYED))
    assert (row.item, row.wanted, row.found) == ("flag:api-key", "set", "not set")
    assert (row.where, row.also) == ("process", ("file",))
    # Where the command line is not known in full, silence of it says nothing.
    unread = launched_flags(["python3", "-m", "sglang.launch_server", "--config", "/c"], lambda path: None)
    found = rows(seen(process=place(flags=unread)), want(secret_flags=KEYED))
    assert [(one.item, one.where) for one in found if one.item == "flag:api-key"] == [("flag:api-key", "file")]


def test_given_secrets() -> None:
    flags = {"api_key": "********", "--admin-api": "x", "ssl_keyfile": "/k", "ssl-keyfile-password": "", "a": "x"}
    assert given_secrets(flags) == {"api-key", "admin-api-key"}


def test_secrets_are_neither_compared_nor_shown() -> None:
    names = frozenset({"MY_KEY", "HF_ENDPOINT"})  # whatever a variable is called, it may be given as a secret
    wanted = want(environment={**WANTED.environment, "HF_TOKEN": "hf_wanted"}, secret_names=names, secret_flags=KEYED)
    environment = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_other", "MY_KEY": "k", "HF_ENDPOINT": "hf_place"}
    info = {"api_key": "sk-2", "tp_size": 1}
    found = rows(seen(file=None, process=place("--api-key sk-1", environment=environment), info=info), wanted)
    assert [row.item for row in found] == ["env:HF_TOKEN"]
    for secret in ("hf_", "sk-"):
        assert secret not in repr(found)


def test_a_flag_that_is_masked_where_it_is_recorded_is_not_compared_there() -> None:
    """A word of the record's command line that held a secret was masked; whether it is the same nobody can see."""
    words = 'json-model-override-args {"auth_token":"x-1"}'
    shown = place('--json-model-override-args {"auth_token":"********"}')
    flags = {**WANTED.flags, words.split()[0].replace("-", "_"): words.split()[1]}
    assert rows(seen(file=shown, process=place(f"--{words}")), want(flags=flags)) == []


def test_no_secret_of_a_real_answer_gets_into_a_row() -> None:
    """All 428 keys of a real /get_server_info, each wanted otherwise, so that each could be shown."""
    info = json.loads((ROOT / "tests/fixtures/answers/server_info.json").read_text())["body"]
    secrets = [info["api_key"], info["admin_api_key"]]
    assert len(info) == 428 and all(secrets)
    names = [name for name in info if name not in ("api_key", "admin_api_key", "ssl_keyfile_password", "config")]
    flags = {name: "something else" for name in names if name.isidentifier()}
    found, compared = judge_server(want(flags=flags, host="h", port=1), seen(info=info, process=None, file=None))
    assert compared > 400
    assert len(found) > 200
    text = json.dumps(to_json(found))
    for secret in secrets:
        assert secret not in text
