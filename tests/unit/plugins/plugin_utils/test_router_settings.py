# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import inventory, router_settings

SERVER = {
    "name": "chat",
    "port": 30000,
    "python": "/p",
    "user": "sglang",
    "host": "0.0.0.0",
    "flags": {"model_path": "/m"},
}
KEY = "sesame-5b8"


def problems(server: dict[str, t.Any] | None = None, **variables: t.Any) -> list[str]:
    values = {"sglang_servers": [{**SERVER, **(server or {})}], **variables}
    return inventory.host_problems("gpu01", list(values), values, True, ["gpu01", "ops1"])


def test_a_whole_inventory_has_no_problems() -> None:
    found = problems(
        {
            "worker_url": "http://gpu01:30000",
            "worker_aliases": ["10.0.0.1:30000"],
            "worker_give_key": True,
            "worker_settings": {"priority": 60, "cost": 2.0, "worker_type": "decode", "labels": {"rack": "a"}},
            "router_url": "http://r1:8000",
        },
        sglang_routers=[{"url": "http://r1:8000", "name": "east", "api_key": KEY}, {"url": "r2:8000"}],
        sglang_router_hooks=[{"name": "edge", "out": ["/bin/edge", "out"], "back": ["/bin/edge", "back"]}],
        sglang_router_host="ops1",
        sglang_router_validate_certs=True,
        sglang_router_ca_path="/etc/ca.pem",
    )
    assert found == []


@pytest.mark.parametrize(
    ("server", "variables", "words"),
    [
        ({}, {"sglang_routers": "http://r1"}, "sglang_routers must be a list of mappings"),
        ({}, {"sglang_routers": ["http://r1"]}, "sglang_routers must be a list of mappings"),
        ({}, {"sglang_routers": [{"name": "east"}]}, "sglang_routers[0]: missing required arguments: url"),
        ({}, {"sglang_routers": [{"url": "r1", "key": "x"}]}, "unknown key 'key'; did you mean 'api_key'?"),
        ({}, {"sglang_routers": [{"url": "ftp://r1"}]}, "sglang_routers[0]: url: "),
        ({}, {"sglang_routers": [{"url": "a", "name": "x"}, {"url": "b", "name": "x"}]}, "the name x is given twice"),
        ({}, {"sglang_routers": [{"url": "r1", "api_key": [KEY]}]}, "api_key must be a string"),
        ({}, {"sglang_router_hooks": [{"name": "e", "out": ["x"]}]}, "missing required arguments: back"),
        ({}, {"sglang_router_hooks": [{"name": "e", "out": [], "back": ["x"]}]}, "out is empty"),
        ({}, {"sglang_router_hooks": [{"name": "e", "out": ["x"], "back": ["x"], "list": []}]}, "list is empty"),
        ({}, {"sglang_router_hooks": [{"name": "e", "out": ["x"], "back": ["x"], "deadline_s": 0}]}, "deadline_s is 0"),
        ({}, {"sglang_router_host": "ops2"}, "'ops2' is no host of the inventory; did you mean 'ops1'?"),
        ({}, {"sglang_router": []}, "unknown variable 'sglang_router'; did you mean 'sglang_routers'?"),
        ({"worker_url": "gpu01:x"}, {}, "server 'chat': worker_url: "),
        ({"worker_aliases": ["ftp://x"]}, {}, "server 'chat': worker_aliases: "),
        ({"worker_settings": {"prio": 1}}, {}, "worker_settings: unknown key 'prio'"),
        ({"host": None}, {"sglang_routers": [{"url": "r1"}]}, "listens on 127.0.0.1 alone"),
        ({"host": "localhost"}, {"sglang_routers": [{"url": "r1"}]}, "listens on localhost alone"),
        ({"host": "::1", "router_url": "r1"}, {}, "listens on ::1 alone"),
    ],
)
def test_each_mistake_is_named(server: dict[str, t.Any], variables: dict[str, t.Any], words: str) -> None:
    found = problems(server, **variables)
    assert len(found) == 1 and words in found[0], found
    assert KEY not in found[0]


def test_a_router_s_key_is_not_shown_where_it_is_misplaced() -> None:
    found = problems(sglang_routers=[{"url": f"http://{KEY}@r1", "api_key": KEY}], sglang_router_host=KEY)
    assert len(found) == 2 and not any(KEY in problem for problem in found), found


def test_without_routers_a_server_may_listen_where_it_wants() -> None:
    assert problems({"host": "127.0.0.1"}) == []
    assert problems({"host": "127.0.0.1", "worker_url": "http://gw:1"}, sglang_routers=[{"url": "r1"}]) == []


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ({}, "http://10.0.0.9:30000"),
        ({"host": "::"}, "http://10.0.0.9:30000"),
        ({"host": "10.1.0.1"}, "http://10.1.0.1:30000"),
        ({"host": "fd00::1"}, "http://[fd00::1]:30000"),
        ({"flags": {"model_path": "/m", "ssl_certfile": "/c"}}, "https://10.0.0.9:30000"),
        ({"worker_url": "GPU01:30000/"}, "http://gpu01:30000"),
    ],
)
def test_the_url_under_which_routers_know_a_server(server: dict[str, t.Any], url: str) -> None:
    assert router_settings.worker_url({**SERVER, **server}, "10.0.0.9") == url


def test_a_wish() -> None:
    routers = [{"url": "http://r1:8000", "name": "east", "api_key": KEY}, {"url": "http://r2:8000"}]
    wish = router_settings.wish({**SERVER, "api_key": "sk", "drain": {"deadline_s": 9}}, routers, [], "gpu01")
    assert wish["routers"] == routers and (wish["out"], wish["drain_deadline_s"]) == ("drained", 9)
    assert wish["workers"] == [
        {"url": "http://gpu01:30000", "aliases": [], "api_key": "sk", "give_key": False, "settings": {}}
    ]
    one = router_settings.wish({**SERVER, "router_url": "R1:8000/"}, routers, [], "gpu01")
    assert one["routers"] == routers[:1]
    other = router_settings.wish({**SERVER, "router_url": "r9:8000"}, routers, [], "gpu01")
    assert other["routers"] == [{"url": "r9:8000"}]
    for how, out in (("auto", "drained"), ("loads", "drained"), ("connections", "absent"), ("none", "absent")):
        assert router_settings.wish({**SERVER, "drain": {"in_flight": how}}, routers, [], "gpu01")["out"] == out


def test_the_net_is_above_all_deadlines() -> None:
    wish = {"routers": [{}, {}], "hooks": [{"deadline_s": 30}]}
    assert router_settings.net_s(wish, {"request": 10, "removed": "30", "drain": 120, "healthy": 180}) > 30 + 120 + 180


def row(state: str) -> dict[str, t.Any]:
    view = {"state": state, "entries": []}
    return {"name": "r", "workers": [{"url": "http://w:1", "before": {"state": "healthy"}, "after": view}]}


@pytest.mark.parametrize(
    ("after", "present", "anywhere"),
    [
        (["healthy", "healthy"], True, True),
        (["healthy", "absent"], False, True),
        (["healthy", "unhealthy"], False, True),
        (["absent", "absent"], False, False),
        (["absent", "unknown"], None, True),
    ],
)
def test_an_answer(after: list[str], present: bool | None, anywhere: bool) -> None:
    raw = {"verdict": "listed", "problems": [], "routers": [row(state) for state in after]}
    answer = router_settings.answer(raw)
    assert (answer["present"], answer["anywhere"], answer["problem"]) == (present, anywhere, "")


@pytest.mark.parametrize(
    ("after", "missing", "present", "anywhere"),
    [
        ([], [], True, True),
        ([], ["http://w:1"], False, False),
        ([], None, None, True),
        (["healthy"], [], True, True),
        (["healthy"], ["http://w:1"], False, True),
        (["absent"], [], False, True),
        (["healthy"], None, None, True),
    ],
)
def test_a_hook_that_can_tell_is_asked_as_a_router(
    after: list[str], missing: list[str] | None, present: bool | None, anywhere: bool
) -> None:
    hooks = [{"name": "edge", "action": "list", "missing": missing}, {"name": "mute", "action": "back"}]
    raw = {"verdict": "listed", "problems": [], "routers": [row(state) for state in after], "hooks": hooks}
    answer = router_settings.answer(raw, not after)
    assert (answer["present"], answer["anywhere"]) == (present, anywhere)


def test_no_answer_is_no_success() -> None:
    assert router_settings.answer({}) == router_settings.answer({"skipped": True, "changed": False}) == {}
    late = router_settings.answer({"failed": True, "msg": "Timed out after 99 second(s)."})
    assert (late["verdict"], late["present"], late["anywhere"]) == ("unknown", None, True)
    assert late["problem"] == "Timed out after 99 second(s)."
    gone = router_settings.answer({"unreachable": True, "msg": "no route"})
    assert gone["problem"] == "no route"
    failed = router_settings.answer({"verdict": "failed", "problems": ["a", "b"], "routers": [row("absent")]})
    assert failed["problem"] == "a; b"


def test_lines_for_people() -> None:
    drained = {"in_flight_at_start": 3, "cut": None, "seconds": 2.0}
    hook = {"name": "edge", "action": "out", "result": "done", "seconds": 0.2}
    assert router_settings.lines({"routers": [row("absent")], "drained": drained, "hooks": [hook]}) == [
        "router r: http://w:1 healthy -> absent",
        "drained: 3 in flight, unknown cut off, 2.0 s",
        "hook edge (out): done, 0.2 s",
    ]
    assert router_settings.lines({}) == []
