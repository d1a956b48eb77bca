# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""server_drift on simulated GPUs: holders nobody declared, other GPUs, a silent driver; and secrets."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Fault, Hold, System
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.harness.devices import LOOP_MAJOR
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.drift_site import (
    ADMIN_KEY,
    KEY,
    Site,
    named,
    row_of,
    rows,
)
from ansible_collections.cleanslate.sglang.tests.integration_ns.evicting import Host

pytestmark = pytest.mark.ns
DRIVER = "580.1.1"


@pytest.fixture
def site(host: Host, tmp_path: Path) -> Site:
    """A server that serves on GPU 0 of two."""
    host.memory_follows_mappings(System(driver=DRIVER))
    site = Site(host.ns, tmp_path, host.nvml.env())
    site.options = {"expected_gpus": 2, "device_major": LOOP_MAJOR}
    site.settings.update({"device": "gpu", "gpus": ["0"]})
    del site.settings["flags"]["device"]
    site.launch(DEVICES=",".join(map(str, host.nodes[:1])))
    site.serves()
    return site


def drifted(site: Site, server: str | None, item: str, **options: t.Any) -> dict[str, t.Any]:
    found = site.check(**options)
    assert (found["verdict"], named(found)) == ("drifted", [(server, item)]), found
    return row_of(found, item)


@pytest.mark.promise
def test_a_holder_that_nobody_declared(host: Host, site: Site) -> None:
    found = site.check()
    assert (found["verdict"], named(found)) == ("in_sync", []), found
    assert found["host"]["driver_version"] == DRIVER
    assert [gpu["used_mib"] > 0 for gpu in found["host"]["gpus"]] == [True, False]
    node = str(host.nodes[1])
    holder = host.hold("--map", node)
    wait_for("the mapping", lambda: node in (host.ns.proc / str(holder.pid) / "maps").read_text())
    (row,) = rows(site.check())
    assert row["item"].startswith(f"holder:{holder.pid}/python"), row
    assert (row["server"], row["state"], row["found"].endswith(" holds GPU 1")) == (None, "drift", True)
    accepted = [{"item": "holder:*/* hold_device.py", "reason": "the indexer, ticket 12", "until": "2999-12-31"}]
    found = site.check(accepted=accepted)
    assert (found["verdict"], named(found), len(found["host"]["accepted"])) == ("in_sync", [], 1), found


def test_memory_that_nobody_who_is_seen_holds(host: Host, site: Site) -> None:
    host.memory_follows_mappings(System(driver=DRIVER), Hold(1, mib=5000, always=True))
    assert drifted(site, None, "memory_unexplained:1")["found"] == "5000 MiB in use"
    assert named(site.check({"baselines_mib": {"1": 5000}})) == []
    assert named(site.check(max_used_mib=5000)) == []


def test_gpus_of_another_number_other_gpus_another_driver(host: Host, site: Site) -> None:
    row = drifted(site, None, "gpu_count", expected_gpus=3)
    assert (row["wanted"], row["found"]) == (3, 2)
    found = site.check({"gpus": ["1"]})
    assert named(found) == [("main", "gpus")], found
    assert (row_of(found, "gpus")["where"], row_of(found, "gpus")["also"]) == ("process", ["file"])
    found = site.check({"gpus": ["7"]})
    assert (found["verdict"], named(found)) == ("unknown", [("main", "gpus")]), found
    host.memory_follows_mappings(System(driver="580.2.2"))
    row = drifted(site, "main", "driver_version")
    assert (row["wanted"], row["found"]) == (DRIVER, "580.2.2")
    # Where the inventory does not say how many GPUs there are, the launch does.
    host.nvml.write(System(driver=DRIVER), *host.gpus()[:1], Hold(0, mib=20000, device=str(host.nodes[0])))
    found = site.check(expected_gpus=None)
    assert named(found) == [("main", "gpu_count")], found


def test_a_driver_that_does_not_answer_is_unknown(host: Host, site: Site) -> None:
    host.memory_follows_mappings(System(driver=DRIVER), Fault("nvmlInit*", hang=True))
    found = site.check(nvml_deadline_s=1)
    assert found["verdict"] == "unknown", found
    assert sorted(named(found), key=str) == [("main", "gpus"), (None, "gpu_count")], found
    assert found["host"]["gpus"] == []


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_no_secret_of_a_whole_answer_is_in_the_result(ns: Namespace, tmp_path: Path) -> None:
    """All 428 keys of a real /get_server_info, and each of them wanted otherwise."""
    body = json.loads((ROOT / "tests/fixtures/answers/server_info.json").read_text())["body"]
    assert len(body) == 428
    info = tmp_path / "info.json"
    more = {"ssl_keyfile_password": "pw-drift-Secret-4", "hf_token": "hf_drift_Secret_5"}
    info.write_text(json.dumps({**body, **more}))
    site = Site(ns, tmp_path)
    site.launch(MORE_INFO=str(info))
    site.proved()
    wanted = {name: "other" for name in body if name.isidentifier() and "key" not in name and name != "config"}
    result = site.check({"flags": wanted})
    assert result["servers"][0]["engine_keys_compared"] > 380
    assert len(rows(result)) > 150
    text = json.dumps(result)
    for secret in (KEY, ADMIN_KEY, body["api_key"], body["admin_api_key"], *more.values()):
        assert secret not in text
    # They were there to be seen: the server's own log has them, and so has its answer.
    assert KEY in (site.launch_dir / "server.log").read_text()
