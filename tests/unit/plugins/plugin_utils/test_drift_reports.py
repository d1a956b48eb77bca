# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Metrics, JUnit and the page: read by the parsers of others, nothing missing, and hostile names are only text."""

from __future__ import annotations

import re
import typing as t
from html.parser import HTMLParser

import pytest
from junitparser import Error, Failure, JUnitXml, TestSuite
from prometheus_client.parser import text_string_to_metric_families

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import (
    drift_history,
    drift_junit,
    drift_metrics,
    drift_page,
)
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_history import HostHistory
from ansible_collections.cleanslate.sglang.tests.unit.drift_builders import (
    NOW,
    answer,
    document,
    event,
    gpu,
    ok,
    row,
    server,
)

GONE = {"unreachable": True, "msg": "no route to host"}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "</style><b>x",
    "]]>&amp;<!--",
    'back\\slash "quoted"\nnew line',
    "javascript:alert(1)",
    "\u202egpj.exe",
)


def fleet() -> dict[str, t.Any]:
    """In sync, drifted, unknown in part, and gone."""
    drifted = answer(
        [
            server("chat", [row("flag:tp-size", wanted=8, found=4), row("env:X", severity="note")]),
            server("embed", accepted=[row("user", "embed", state="accepted", reason="ticket 12")]),
        ],
        [row("leftovers", None, state="unknown", severity="warning", found="not read in time")],
    )
    before = document(ok("c", answer([server("chat", [row("env:OLD")])])), expected=["c"], finished=NOW - 7200)
    return document(
        ok("a", answer([server("chat")])),
        ok("b", drifted),
        event("runner_on_unreachable", "c", GONE),
        expected=["a", "b", "c"],
        previous=before,
    )


def hostile() -> dict[str, t.Any]:
    events = []
    for number, words in enumerate(HOSTILE):
        raw = answer(
            [server(words, [row(words, words, wanted=words, found=[words], remedy=words)], health=words)],
            [row(f"holder:1/{words}", None, state="unknown", found=words)],
            summary=words,
        )
        raw["host"]["gpus"] = [gpu(0, name=words, uuid=words, holders=[{"pid": 1, "title": words}])]
        raw["host"]["driver_version"] = words
        events += [ok(words, raw), event("runner_on_unreachable", f"{number}{words}", {"msg": words})]
    notified = document(
        *events,
        expected=[each["event_data"]["host"] for each in events],
        inventory=HOSTILE,
        limit=HOSTILE[0],
        problems=HOSTILE,
        notes=HOSTILE,
    )
    notified["notification"] = {"at": notified["generated_at"], "command": HOSTILE[0], "ok": False, "rc": 1,
                                "problem": HOSTILE[1]}  # fmt: skip
    return notified


# --- metrics ----------------------------------------------------------------------------------------------------------


def samples(found: dict[str, t.Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """By a real parser; the same series twice is an error, as for Prometheus."""
    result: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(drift_metrics.render(found)):
        assert family.name.startswith("cleanslate_drift_") and family.documentation and family.type == "gauge"
        for sample in family.samples:
            assert sample.timestamp is None
            key = (sample.name.removeprefix("cleanslate_drift_"), tuple(sorted(sample.labels.items())))
            assert key not in result, key
            result[key] = sample.value
    return result


def test_metrics_tell_of_each_host_and_server() -> None:
    found = samples(fleet())
    assert found["run_exit_code", ()] == 20
    assert found["run_timestamp_seconds", ()] == NOW
    assert {key[1][0][1]: value for key, value in found.items() if key[0] == "hosts"} == {
        "in_sync": 1.0,
        "drifted": 1.0,
        "unknown": 1.0,
    }
    verdicts = {
        (dict(labels)["host"], dict(labels).get("server"), dict(labels)["verdict"])
        for (name, labels), value in found.items()
        if name in ("host_verdict", "server_verdict") and value == 1
    }
    assert verdicts == {
        ("a", None, "in_sync"), ("a", "chat", "in_sync"),
        ("b", None, "drifted"), ("b", "chat", "drifted"), ("b", "embed", "in_sync"),
        ("c", None, "unknown"), ("c", "chat", "unknown"),
    }  # fmt: skip
    rows = {labels: value for (name, labels), value in found.items() if name == "rows" and value}
    assert rows == {
        (("host", "b"), ("server", "chat"), ("severity", "critical")): 1,
        (("host", "b"), ("server", "chat"), ("severity", "note")): 1,
    }
    assert found["unknown_rows", (("host", "b"), ("server", ""))] == 1
    assert found["accepted_rows", (("host", "b"), ("server", "embed"))] == 1
    assert found["host_answered", (("host", "c"),)] == 0
    assert found["gpu_memory_used_bytes", (("gpu", "0"), ("host", "a"), ("uuid", "GPU-00000000"))] == 76_109 * 2**20


def test_a_host_that_is_gone_keeps_the_time_of_its_last_answer() -> None:
    found = samples(fleet())
    assert found["host_last_answer_timestamp_seconds", (("host", "c"),)] < NOW - 3600
    assert found["last_success_timestamp_seconds", ()] == NOW - 7200
    # Of its rows nothing is known: no series says zero.
    assert ("rows", (("host", "c"), ("server", "chat"), ("severity", "critical"))) not in found


def test_what_is_not_known_is_no_sample() -> None:
    never = samples(document(event("runner_on_unreachable", "a", GONE), expected=["a"]))
    assert not [name for name, _labels in never if name.startswith(("last_success", "host_last_answer", "gpu"))]
    raw = answer([server()])
    raw["host"]["gpus"] = [gpu(0, None), gpu(1, 0), gpu(1, 5)]
    found = samples(document(ok("a", raw), expected=["a"]))
    assert [value for (name, _labels), value in found.items() if name == "gpu_memory_used_bytes"] == [0]


def test_metrics_of_hostile_names_are_valid_and_whole() -> None:
    found = samples(hostile())
    assert {dict(labels)["host"] for name, labels in found if name == "host_verdict"} >= set(HOSTILE)
    twice = document(ok("a", answer([server("chat"), server("chat")])), expected=["a"])
    assert samples(twice)


def test_gpus_that_metrics_can_t_tell_apart_are_one_series() -> None:
    """No UUID and an empty one are the same label, and two samples of one series make the whole file invalid."""
    found = document(ok("a", answer([server()])), expected=["a"])
    found["hosts"][0]["host"]["gpus"] = [gpu(0, uuid=None), gpu(0, uuid=""), gpu(1)]
    lines = [line for line in drift_metrics.render(found).splitlines() if "_gpu_memory_used_bytes{" in line]
    assert len(lines) == 2 and len({line.rpartition(" ")[0] for line in lines}) == 2, lines


def test_metrics_of_a_run_that_found_nobody() -> None:
    found = samples(document(problems=("no host to check",)))
    assert (found["run_failed", ()], found["run_exit_code", ()], found["run_hosts", ()]) == (1, 20, 0)


# --- JUnit ------------------------------------------------------------------------------------------------------------


def cases(found: dict[str, t.Any]) -> dict[tuple[str, str], tuple[type | None, str]]:
    xml = JUnitXml.fromstring(drift_junit.render(found).encode())
    assert isinstance(xml, JUnitXml)
    result = {}
    for suite in xml:
        assert isinstance(suite, TestSuite)
        assert suite.tests == len(list(suite))
        for case in suite:
            outcome = case.result[0] if case.result else None
            assert len(case.result) <= 1
            result[(suite.name, case.name)] = (type(outcome) if outcome else None, outcome.message if outcome else "")
    return result


def test_junit_has_a_case_for_each_host_and_server() -> None:
    assert cases(fleet()) == {
        ("a", "host"): (None, ""),
        ("a", "chat"): (None, ""),
        ("b", "host"): (Error, "leftovers"),
        ("b", "chat"): (Failure, "flag:tp-size"),
        ("b", "embed"): (None, ""),
        ("c", "host"): (Error, "unreachable: no route to host"),
        ("c", "chat"): (Error, "the host was not seen: no route to host"),
    }
    text = drift_junit.render(fleet())
    assert "wanted 8, found 4" in text and "accepted: user" in text and "ticket 12" in text


def test_junit_of_a_run_that_failed() -> None:
    found = cases(document(problems=("no host to check",)))
    assert found == {("run", "run"): (Error, "no host to check")}


def test_junit_of_hostile_names_is_valid_and_whole() -> None:
    found = cases(hostile())
    # XML takes a new line in an attribute for a space.
    assert {" ".join(suite.split()) for suite, _case in found} >= {" ".join(words.split()) for words in HOSTILE}


# --- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Every tag, attribute and text of a page; an end tag that fits nothing is an error."""

    VOID = ("meta", "link", "input", "br", "path", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def page_of(found: dict[str, t.Any], *lines: bytes) -> Page:
    return Page(drift_page.render(found, lines, NOW))


def test_the_page_shows_each_host_and_each_difference() -> None:
    page = page_of(fleet())
    shown = (
        "1 drifted and 1 unknown of 3 hosts",
        "flag:tp-size",
        "no route to host",
        "drifted (chat: env:OLD)",
        "not read in time",
        "ticket 12",
        "74.3 of 140.4 GiB",
        "sglang::scheduler_TP0 (pid 812)",
        "580.95.05",
    )
    for words in shown:
        assert words in page.text, words
    anchors = [value for _tag, name, value in page.attributes if name == "href" and value.startswith("#")]
    ids = [value for _tag, name, value in page.attributes if name == "id"]
    assert sorted(anchors) == ["#h0", "#h1", "#h2"] and len(ids) == len(set(ids)) and {"h0", "h1", "h2"} <= set(ids)


@pytest.mark.parametrize("make", [fleet, hostile])
def test_the_page_refers_to_nothing_outside_of_it(make: t.Callable[[], dict[str, t.Any]]) -> None:
    found = make()
    text = drift_page.render(found, [drift_history.dump(drift_history.line_of(found))], NOW)
    page = Page(text)
    assert not {"script", "iframe", "img", "object", "embed", "base", "form", "audio", "video"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "background"):
            assert value.startswith(("#h", "data:image/svg+xml,")), (tag, name, value)
        if name == "style":
            assert re.fullmatch(r"(width:[0-9.]+%|flex-basis:100%|margin-top:14px|height:14px)", value), value
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert "url(" not in style and "@import" not in style and len(re.findall("<style>", text)) == 1
    assert "default-src 'none'" in text


def test_hostile_names_are_only_text() -> None:
    found = hostile()
    plain = Page(drift_page.render(found, [], NOW))
    tags = set(plain.tags)
    harmless = set(page_of(fleet()).tags) | set(page_of(document(problems=("x",), notes=("y",))).tags)
    assert tags <= harmless | {"fieldset", "input", "label"}, tags - harmless
    shown = " ".join(plain.text.split())
    for words in HOSTILE:
        assert " ".join(words.split()) in shown, words


def test_the_page_of_many_hosts_has_small_tiles_and_a_filter() -> None:
    few = page_of(document(*[ok(f"h{n}", answer()) for n in range(5)], expected=[]))
    many = page_of(document(*[ok(f"gpu{n}", answer()) for n in range(60)], expected=[]))
    kinds = {value.split()[0] for _tag, name, value in few.attributes if name == "class"}
    assert "tile" in kinds and "square" not in kinds and "input" not in few.tags
    kinds = {value.split()[0] for _tag, name, value in many.attributes if name == "class"}
    assert "square" in kinds and "tile" not in kinds and many.tags.count("input") == 4
    order = [value for tag, name, value in many.attributes if tag == "a" and name == "title"]
    assert order[:3] == ["gpu0: in sync", "gpu1: in sync", "gpu2: in sync"] and order[10] == "gpu10: in sync"


def test_the_page_says_what_went_wrong_with_the_run() -> None:
    found = document(problems=("the inventory did not answer",))
    at = found["generated_at"]
    found["notification"] = {"at": at, "command": "mail", "ok": False, "rc": 3, "problem": "status 3"}
    text = page_of(found).text
    assert "No host was checked" in text and "The run could not do its work: the inventory did not answer" in text
    assert "Nobody was notified: mail: status 3" in text


def test_what_could_not_be_read_is_no_empty_bar() -> None:
    raw = answer([server()])
    raw["host"]["gpus"] = [gpu(0, None), gpu(1, 0)]
    page = page_of(document(ok("a", raw), expected=["a"]))
    assert "memory could not be read" in page.text and "0.0 of 140.4 GiB" in page.text
    assert ("span", "class", "bar unread") in page.attributes
    assert drift_page.bars([None, 0.0, 0.1, 100.0])["unread"].startswith("M0 ")
    assert drift_page.bars([0.0])["used"] == "" and drift_page.bars([0.1])["used"] == "M0 18v-1h5v1z"


def test_a_strip_has_a_box_for_each_run_of_days() -> None:
    days = [None, "in_sync", "in_sync", "drifted", None, "unknown"]
    assert drift_page.strip(days) == {
        "in_sync": "M4 18v-6h8v6z",
        "drifted": "M12 18v-18h4v18z",
        "unknown": "M20 18v-12h4v12z",
    }
    assert HostHistory(list(days), []).days == days


def test_values_are_shown_as_people_read_them() -> None:
    assert drift_junit.shown(None) == "not set"
    assert (drift_junit.shown(True), drift_junit.shown(0), drift_junit.shown("")) == ("true", "0", '""')
    assert drift_junit.shown(["GPU-a", "GPU-b"]) == "GPU-a, GPU-b"
    assert drift_junit.shown(["- old line", "+ new line"]) == "- old line\n+ new line"
    assert drift_junit.shown({"a": [1]}) == '{"a": [1]}'
