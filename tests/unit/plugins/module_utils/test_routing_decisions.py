# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import dataclasses
import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import routing
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.routing import Entry, Job, Wanted, parse_url
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError


def entry(url: str, healthy: bool = True, **more: t.Any) -> Entry:
    return Entry(f"id of {url}", url, healthy, model_id=more.pop("model_id", "m"), worker_type="regular", **more)


def wanted(url: str, *aliases: str) -> Wanted:
    return Wanted(parse_url(url), tuple(map(parse_url, aliases)))


@pytest.mark.parametrize(
    ("url", "written"),
    [
        ("http://GPU01:30000/", "http://gpu01:30000"),
        ("gpu01:30000", "http://gpu01:30000"),
        ("http://gpu01", "http://gpu01:80"),
        ("HTTPS://gpu01.", "https://gpu01:443"),
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("http://[0:0::1]:30000//", "http://[::1]:30000"),
        ("https://lb.example/east/", "https://lb.example:443/east"),
        (" http://10.0.0.1:30000 ", "http://10.0.0.1:30000"),
    ],
)
def test_a_url_is_written_in_one_way(url: str, written: str) -> None:
    assert str(parse_url(url)) == written
    assert parse_url(str(parse_url(url))) == parse_url(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://gpu01:30000", "the scheme is ftp"),
        ("grpc://gpu01:30000", "the scheme is grpc"),
        ("http://", "names no host"),
        ("http://gpu 01:30000", "names no host"),
        ("http://gpu01:0", "from 1 to 65535"),
        ("http://gpu01:99999", "can't be understood"),
        ("http://gpu01:x", "can't be understood"),
        ("http://gpu01:30000?x=1", "a query"),
        ("http://gpu01:30000/a b", "a path that is none"),
        ("http://gpu01:30000/a\r\nX: y", "a path that is none"),
    ],
)
def test_what_is_no_base_url_is_named(url: str, words: str) -> None:
    with pytest.raises(CleanSlateError, match=words):
        parse_url(url)


def test_a_key_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(CleanSlateError) as caught:
        parse_url("http://ops:sesame-1@gpu01:30000")
    assert "sesame" not in str(caught.value) and "gpu01" in str(caught.value)


@pytest.mark.parametrize(
    ("listed", "same"),
    [
        ("http://gpu01:30000", True),
        ("http://gpu01:30000/", True),
        ("https://GPU01:30000", True),
        ("gpu01:30000", True),
        ("http://gpu01:30000@1", True),
        ("http://gpu01:30001", False),
        ("http://gpu02:30000", False),
        ("http://gpu01:30000/other", False),
        ("http://gpu01", False),
        ("what ever", False),
        ("grpc://gpu01:30000", False),
    ],
)
def test_a_worker_is_known_by_its_address(listed: str, same: bool) -> None:
    assert wanted("http://gpu01:30000").is_it(listed) is same
    assert wanted("http://10.0.0.1:30000", "http://gpu01:30000").is_it(listed) is same


def test_every_spelling_is_found_and_one_that_is_unhealthy_counts() -> None:
    listing = [entry("http://w1:1"), entry("http://w1:1/", False), entry("http://w2:1")]
    found = routing.entries_of(wanted("http://w1:1"), listing)
    assert [one.url for one in found] == ["http://w1:1", "http://w1:1/"]
    assert routing.state_of(found) == "unhealthy"
    assert routing.state_of(found[:1]) == "healthy"
    assert routing.state_of(()) == "absent"


def keep(listing: list[Entry], leave: int = 1, url: str = "http://w1:1") -> list[str]:
    return routing.reasons_to_keep("r1", [wanted(url)], listing, leave)


def test_the_last_healthy_one_stays() -> None:
    both = [entry("http://w1:1"), entry("http://w2:1")]
    assert keep(both) == []
    assert "would have 0 healthy regular workers left for m" in keep(both[:1])[0]
    assert keep([both[0], entry("http://w2:1", False)]) and keep(both, 2)
    assert keep(both[:1], 0) == []
    assert keep([entry("http://w1:1", False)]) == [], "what is not healthy serves nobody"
    assert keep([entry("http://w2:1")]) == [], "what is not there is not taken out"


def test_others_count_only_once_and_only_for_the_same_model() -> None:
    assert keep([entry("http://w1:1"), entry("http://w2:1", model_id="other")])
    assert keep([entry("http://w1:1"), entry("http://w2:1", model_id="unknown")]) == []
    twice = [entry("http://w1:1"), entry("http://w2:1"), entry("http://w2:1/")]
    assert keep(twice) == [] and keep(twice, 2)
    prefill = dataclasses.replace(entry("http://w2:1"), worker_type="prefill")
    assert keep([entry("http://w1:1"), prefill])


def test_ranks_of_a_dp_aware_router_can_t_be_removed() -> None:
    listing = [entry("http://w1:1@0"), entry("http://w1:1@1"), entry("http://w2:1@0"), entry("http://w2:1@1")]
    assert len(keep(listing)) == 1 and "--dp-aware" in keep(listing)[0]


def test_another_spelling_that_leads_there_is_found_by_address() -> None:
    listing = [entry("http://gpu01:1"), entry("http://gpu02:1"), entry("http://gpu01:2"), entry("http://gpu03:2")]
    listing.append(entry("x y"))
    names = {"gpu01": ["10.0.0.1"], "gpu02": ["10.0.0.2"]}
    ours = wanted("http://10.0.0.1:1")
    assert routing.hosts_to_resolve([ours], listing) == ["gpu01", "gpu02"]
    assert routing.other_spellings(ours, listing, names) == ["http://gpu01:1"]
    assert routing.other_spellings(ours, listing, {}) == []
    assert routing.other_spellings(wanted("http://10.0.0.1:1", "http://gpu01:1"), listing, names) == []
    assert routing.other_spellings(wanted("http://gpu01:1"), [entry("http://10.0.0.1:1")], names) == ["http://10.0.0.1:1"]


def test_what_would_not_come_back_is_named() -> None:
    has = [dataclasses.replace(entry("http://w1:1"), priority=70, cost=1.0)]
    assert routing.settings_lost("r1", has, {"priority": 70}) == []
    (lost,) = routing.settings_lost("r1", has, {})
    assert "priority 70; added again it gets 50" in lost


def test_jobs() -> None:
    failed = Job("AddWorker", "failed", "no answer")
    assert routing.adding_failed(failed) == "no answer" and routing.removing_failed(failed) is None
    assert routing.adding_failed(Job("AddWorker", "failed", "Worker http://w already exists")) is None
    assert routing.removing_failed(Job("RemoveWorker", "failed")) == "it says no reason"
    assert routing.adding_failed(Job("AddWorker", "processing")) is None and routing.adding_failed(None) is None
    for judge in (routing.adding_failed, routing.removing_failed):
        with pytest.raises(CleanSlateError, match="status 'done-ish', which is none of pending"):
            judge(Job("AddWorker", "done-ish"))
