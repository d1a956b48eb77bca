# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Case 32 for drift checks: no key in any report, artifact, message or line of output, whoever echoes it."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT, Completed
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.integration_ns.drift_runner_site import DriftFleet
from ansible_collections.cleanslate.sglang.tests.integration_ns.drift_site import ADMIN_KEY, KEY, TOKEN, Site
from ansible_collections.cleanslate.sglang.tests.unit.drift_builders import answer, row, server

pytestmark = pytest.mark.ns

BODY: dict[str, t.Any] = json.loads((ROOT / "tests/fixtures/answers/server_info.json").read_text())["body"]
MORE = {"ssl_keyfile_password": "pw-drift-Secret-4", "hf_token": "hf_drift_Secret_5"}
PLAIN = "sk-drift-Of-The-Environment-6"  # of the runner's own environment, which ansible-runner writes down
SECRETS = (KEY, ADMIN_KEY, TOKEN, BODY["api_key"], BODY["admin_api_key"], *MORE.values(), PLAIN)


def leaks(fleet: DriftFleet, done: Completed, *places: Path) -> list[str]:
    """Where a secret stands: in the outputs, or in any file below these places."""
    found = [f"output: {secret}" for secret in SECRETS if secret in done.stdout + done.stderr]
    files = [path for place in places for path in place.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    for path in files:
        content = path.read_bytes()
        found += [f"{path}: {secret}" for secret in SECRETS if secret.encode() in content]
    return found


def told(fleet: DriftFleet) -> str:
    """A hook that keeps what it is told."""
    hook = fleet.directory / "hook"
    hook.write_text(f"#!/bin/sh\ncat > {fleet.out}/told.json\nenv > {fleet.out}/told.env\n")
    hook.chmod(0o755)
    return str(hook)


def test_the_secrets_of_a_real_answer_are_in_no_report_and_no_artifact(ns: Namespace, tmp_path: Path) -> None:
    assert len(BODY) == 428
    info = tmp_path / "info.json"
    info.write_text(json.dumps({**BODY, **MORE}))
    site = Site(ns, tmp_path)
    site.launch(MORE_INFO=str(info))
    site.proved()
    # Each of the server's values is wanted otherwise, so that each could be shown.
    wanted = {name: "other" for name in BODY if name.isidentifier() and "key" not in name and name != "config"}
    known = {name: wanted[name] for name in wanted if name in ("log_level", "max_total_tokens", "stream_interval")}
    fleet = DriftFleet(tmp_path / "fleet", ns, scripted=False)
    fleet.hosts["gpu01"] = {}
    entry = {**site.settings, **site.secrets, "flags": {**site.settings["flags"], **known}}
    del entry["device"]
    fleet.variables["gpu01"] = {
        "sglang_state_dir": str(site.state),
        "sglang_expected_gpus": 0,
        "sglang_servers": [entry],
    }
    done = fleet.run("--keep-run", "--notify", told(fleet), "--", "-vvv", env={"MY_API_KEY": PLAIN})
    assert done.rc == 10, done
    found = fleet.host("gpu01")
    # It was really asked, with its key, and what it said was compared.
    assert (found["state"], found["servers"][0]["health"]) == ("answered", "ok"), found
    assert found["servers"][0]["engine_keys_compared"] >= 3
    assert (fleet.out / "told.json").stat().st_size > 100
    (fleet.out / "told.env").unlink()  # a hook has the environment of who started the runner
    kept = list((fleet.out / "runs").iterdir())
    assert len(kept) == 1 and list(kept[0].rglob("job_events/*.json"))
    assert leaks(fleet, done, fleet.out, fleet.directory / "ansible") == []


def test_a_module_that_lets_secrets_out_is_masked_once_more(ns: Namespace, tmp_path: Path) -> None:
    """All 428 keys of a real /get_server_info with their secrets, as a value, as text and as a command line."""
    leaking = {**BODY, **MORE}
    words = f"--api-key {KEY} --admin-api-key={ADMIN_KEY} HF_TOKEN={TOKEN}"
    rows = [
        row("a", wanted=leaking, found=json.dumps(leaking), remedy=words, reason=repr(leaking)),
        row("b", wanted=["--api-key", KEY, "--admin-api-key", ADMIN_KEY], found={"environment": {"HF_TOKEN": TOKEN}}),
        *(row(f"flag:{name}", wanted={name: value}, found=f"{name}={value!r}") for name, value in leaking.items()),
    ]
    fleet = DriftFleet(tmp_path, ns)
    fleet.hosts["gpu01"] = {"answer": answer([server("chat", rows, health=words)], summary=words)}
    fleet.hosts["gpu02"] = {"fail": f"can't start: {words} {leaking}"}
    done = fleet.run("--keep-run", "--notify", told(fleet), env={"MY_API_KEY": PLAIN})
    assert done.rc == 20, done
    (fleet.out / "told.env").unlink()
    assert len(fleet.host("gpu01")["servers"][0]["drift"]) > 200
    assert leaks(fleet, done, fleet.out, fleet.directory / "ansible") == []
