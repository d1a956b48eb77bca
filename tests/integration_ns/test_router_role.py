# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role router as plays use it: a server's settings and the host's routers in, one answer out, and no key shown."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun, run_playbook
from ansible_collections.cleanslate.sglang.tests.harness.router import start_router, why_not

from .routed import ROUTER_PORT, WORKER_PORTS, Fleet, url_of

pytestmark = [pytest.mark.ns, pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
ROUTER_KEY, SERVER_KEY = "sesame-router-1f3", "sesame-server-7c2"
FIRST, SECOND = WORKER_PORTS[:2]
LINES = "{{ router_result | cleanslate.sglang.router_lines }}"
# Answers with the pool in the file that is its first argument.
POOL = "import sys; print(open(sys.argv[1]).read())"
# Writes down what it was given; ends as its first argument says.
HOOK = "import sys; open(sys.argv[2], 'a').write(sys.stdin.read()); sys.exit(int(sys.argv[1]))"


@dataclasses.dataclass
class Site:
    ns: Namespace
    scratch: Path
    variables: dict[str, t.Any]

    def run(self, entry: str, check: bool = False, *words: str, **given: t.Any) -> PlaybookRun:
        server = {
            "name": "chat",
            "port": FIRST,
            "host": "0.0.0.0",
            "api_key": "{{ vault_server_key }}",
            "drain": {"deadline_s": 30},
            **given.pop("server", {}),
        }
        play = {
            "hosts": "gpu01",
            "gather_facts": False,
            "vars": {"vault_server_key": SERVER_KEY, "vault_router_key": ROUTER_KEY},
            "tasks": [
                {
                    "name": "The role",
                    "ansible.builtin.include_role": {"name": "cleanslate.sglang.router", "tasks_from": f"{entry}.yml"},
                    "vars": {"router_server": server, "router_healthy_deadline_s": 30, **given},
                },
                {"name": "Answer", "ansible.builtin.debug": {"var": "router_result"}},
                {"name": "Lines", "ansible.builtin.debug": {"msg": LINES}},
            ],
        }
        host = {
            "ansible_connection": "local",
            "ansible_host": "127.0.0.1",
            "ansible_python_interpreter": sys.executable,
            **self.variables,
        }
        book, inventory = self.scratch / "play.yml", self.scratch / "hosts.yml"
        book.write_text(json.dumps([play]))
        inventory.write_text(json.dumps({"all": {"hosts": {"gpu01": host}}}))
        run = run_playbook(
            book, "-vvv", *words, scratch=self.scratch, deadline_s=120, inventory=inventory, check=check, ns=self.ns
        )
        shown = run.stdout + run.stderr + json.dumps([dataclasses.asdict(task) for task in run.tasks])
        assert ROUTER_KEY not in shown and SERVER_KEY not in shown
        return run

    def answer(self, run: PlaybookRun) -> dict[str, t.Any]:
        return t.cast("dict[str, t.Any]", run.check().named("Answer")[0].result["router_result"])


@pytest.fixture
def site(ns: Namespace, tmp_path: Path) -> Site:
    fleet = Fleet(ns)
    for port in (FIRST, SECOND):
        fleet.start(port, "--api-key", SERVER_KEY)
    keyed = ("--control-plane-api-keys", f"ops:ops:admin:{ROUTER_KEY}")
    urls = (url_of(FIRST), url_of(SECOND))
    east = start_router(ns, ROUTER_PORT, *urls, flags=keyed, key=ROUTER_KEY)
    west = start_router(ns, ROUTER_PORT + 100, *urls)
    calls = tmp_path / "hook.calls"
    command = [sys.executable, "-c", HOOK]
    hooks = [{"name": "edge", "out": [*command, "0", str(calls)], "back": [*command, "0", str(calls)]}]
    routers = [
        {"name": "east", "url": east.url, "api_key": "{{ vault_router_key }}"},
        {"name": "west", "url": f"{west.url}/"},
    ]
    return Site(ns, tmp_path, {"sglang_routers": routers, "sglang_router_hooks": hooks})


def test_out_and_back_by_the_role(site: Site) -> None:
    seen = site.answer(site.run("list"))
    assert (seen["verdict"], seen["present"], seen["problem"], seen["changed"]) == ("listed", True, "", False)
    planned = site.answer(site.run("out", check=True))
    assert (planned["verdict"], planned["changed"]) == ("planned", True) and len(planned["plan"]) == 4, planned

    run = site.run("out", False, "--diff")
    out = site.answer(run)
    assert (out["verdict"], out["present"], out["anywhere"], out["changed"]) == ("drained", False, False, True)
    assert out["drained"]["cut"] == 0 and out["drained"]["source"] == "loads"
    assert f"-east {url_of(FIRST)}: healthy" in run.stdout and f"+west {url_of(FIRST)}: absent" in run.stdout
    lines = run.named("Lines")[0].result["msg"]
    assert lines[0] == f"router east: {url_of(FIRST)} healthy -> absent"
    assert lines[-1].startswith("hook edge (out): done")

    back = site.answer(site.run("back"))
    assert (back["verdict"], back["present"]) == ("present", True)
    again = site.answer(site.run("back", router_hooks=[]))
    assert (again["present"], again["changed"]) == (True, False)
    calls = [json.loads(line) for line in (site.scratch / "hook.calls").read_text().splitlines()]
    assert [call["action"] for call in calls] == ["out", "back"]
    assert calls[0]["workers"] == [{"url": url_of(FIRST)}]


def test_a_failure_is_one_sentence_or_left_to_the_caller(site: Site) -> None:
    last = site.run("out", router_leave_healthy=2)
    assert last.rc == 2
    message = last.named("Say what went wrong")[0].result["msg"]
    assert message.startswith("chat on gpu01: router east would have 1 healthy regular worker left"), message
    assert "nothing was changed" in message and not (site.scratch / "hook.calls").exists()
    answer = site.answer(site.run("out", router_leave_healthy=2, router_fails=False))
    assert (answer["verdict"], answer["present"]) == ("failed", True) and answer["problem"] in message

    hook = {**site.variables["sglang_router_hooks"][0], "out": [sys.executable, "-c", HOOK, "3", "/dev/null"]}
    answer = site.answer(site.run("out", router_hooks=[hook], router_fails=False))
    assert answer["verdict"] == "failed" and "hook edge (out): it ended with status 3" in answer["problem"]
    assert (answer["present"], answer["anywhere"], answer["drained"]) == (False, False, None)


def test_one_router_of_several_no_router_and_other_ways_to_count(site: Site) -> None:
    answer = site.answer(site.run("out", server={"router_url": url_of(ROUTER_PORT + 100)}, router_hooks=[]))
    assert [router["name"] for router in answer["routers"]] == ["west"] and answer["verdict"] == "drained"
    answer = site.answer(site.run("back", router_hooks=[]))
    assert answer["present"] is True
    assert [one["workers"][0]["action"] for one in answer["routers"]] == ["none", "added"]
    answer = site.answer(site.run("out", server={"drain": {"in_flight": "connections"}}, router_hooks=[]))
    assert (answer["verdict"], answer["drained"]) == ("absent", None)
    assert site.answer(site.run("out", router_routers=[], router_hooks=[])) == {}


def test_a_load_balancer_that_can_tell_what_it_has(site: Site) -> None:
    """What is not in its pool is not present, whatever the routers say."""
    pool = site.scratch / "pool.json"
    hook = {**site.variables["sglang_router_hooks"][0], "list": [sys.executable, "-c", POOL, str(pool)]}
    for urls, present in (([url_of(FIRST)], True), ([url_of(SECOND)], False)):
        pool.write_text(json.dumps({"workers": [{"url": url} for url in urls]}))
        assert site.answer(site.run("list", router_hooks=[hook]))["present"] is present
    assert site.answer(site.run("list", router_routers=[], router_hooks=[hook]))["present"] is False
    pool.write_text("the pool is empty")
    answer = site.answer(site.run("list", router_hooks=[hook], router_fails=False))
    assert answer["present"] is None and "hook edge (list): its answer is not" in answer["problem"]
