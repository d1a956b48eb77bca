# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who gets an API key of the inventory: the server that is known, where its own tree listens, and nobody else."""

from __future__ import annotations

import sys
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.harness.modules import run_module
from ansible_collections.cleanslate.sglang.tests.harness.namespace import Namespace
from ansible_collections.cleanslate.sglang.tests.harness.waiting import wait_for
from ansible_collections.cleanslate.sglang.tests.integration_ns.drift_site import PORT, Site, named, row_of

pytestmark = pytest.mark.ns

NOBODY = 65534
OTHER_ADDRESS = "127.0.0.9"
# It looks like a server, with workers titled as SGLang titles its own, and writes down what it is told.
LISTENER = f"""
import http.server, os, socketserver, subprocess
if os.environ.get("UID_WANTED"):
    os.setgid(int(os.environ["UID_WANTED"]))
    os.setuid(int(os.environ["UID_WANTED"]))
for name in ("sglang::scheduler", "sglang::detokenizer") if os.environ.get("WORKERS") else ():
    subprocess.Popen([name], executable="/bin/cat", stdin=subprocess.PIPE)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("ASKED", os.getuid(), self.path, self.headers.get("Authorization"), flush=True)
        body = os.environ["ANSWER"].encode() if "info" in self.path else b""
        self.send_response(int(os.environ.get("STATUS", "200")))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass
socketserver.ThreadingTCPServer.allow_reuse_address = True
server = socketserver.ThreadingTCPServer((os.environ["BIND"], {PORT}), Handler)
print("LISTENS", flush=True)
server.serve_forever()
"""


class Pretender:
    """A process that `python -m sglang.launch_server` has started, though it is none of SGLang. Without ``words``: one
    that only listens."""

    def __init__(self, site: Site, folder: Path, *words: str, bind: str = "127.0.0.1", **env: str) -> None:
        package = folder / f"pretender-{bind}" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        script = package / ("launch_server.py" if words else "listener.py")
        script.write_text(LISTENER)
        self.log = folder / f"pretender-{bind}.log"
        argv = ["-m", "sglang.launch_server", *words] if words else [str(script)]
        given = {"PYTHONPATH": str(package.parent), "BIND": bind, "ANSWER": "{}", **env}
        site.ns.popen([sys.executable, *argv], given, detached=True, output=self.log)
        wait_for("it listens", lambda: "LISTENS" in self.log.read_text(errors="replace"), 30)

    def asked(self) -> list[tuple[str, ...]]:
        """(uid, path, key) of every request."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [tuple(line.split(" ", 3)[1:]) for line in lines if line.startswith("ASKED")]


@pytest.fixture
def site(ns: Namespace, tmp_path: Path) -> Site:
    return Site(ns, tmp_path)


def arguments(site: Site) -> tuple[str, ...]:
    return ("--port", str(PORT), "--model", str(site.model), "--device", "cpu")


@pytest.mark.parametrize(
    ("status", "health", "hidden"), [("200", "ok", "engine"), ("401", "broken", "health"), ("503", "unhealthy", None)]
)
def test_a_process_of_another_user_gets_no_key(
    site: Site, tmp_path: Path, status: str, health: str, hidden: t.Optional[str]
) -> None:
    """Any local user can listen on the port of a server that is down, and call itself SGLang."""
    pretender = Pretender(site, tmp_path, *arguments(site), WORKERS="1", UID_WANTED=str(NOBODY), STATUS=status)
    found = site.check()
    assert pretender.asked() == [(str(NOBODY), "/health", "None")]
    assert {("main", "restarted_by_hand"), ("main", "user")} <= set(named(found)), found
    assert found["servers"][0]["health"] == health
    if hidden is not None:
        assert row_of(found, hidden)["state"] == "unknown", found
    # Where it is the account that is wanted, the key is its own.
    site.check({"user": str(NOBODY)})
    (_first, (_uid, path, key), *_others) = pretender.asked()
    assert (path, key) == ("/health", f"Bearer {site.secrets['api_key']}")


def test_a_key_goes_only_where_the_server_was_seen_to_listen(site: Site, tmp_path: Path) -> None:
    """--host of a command line may name any machine; here another process listens there."""
    other = Pretender(site, tmp_path, bind=OTHER_ADDRESS)
    server = Pretender(site, tmp_path, *arguments(site), "--host", OTHER_ADDRESS, WORKERS="1")
    found = site.check()
    assert other.asked() == []
    assert [path for _uid, path, _key in server.asked()] == ["/health", "/server_info"]
    # An answer that tells nothing is no proof of anything.
    assert row_of(found, "engine")["state"] == "unknown", found


def info_of(site: Site) -> dict[str, t.Any]:
    """What server_info tells of the one server on our port, with the inventory's key at hand."""
    key = site.secrets["api_key"]
    found = run_module("server_info", {"port": PORT, "state_dir": str(site.state), "api_key": key}, 90, ns=site.ns)
    assert not found.failed, found.json
    (server,) = found.json["servers"]
    return t.cast("dict[str, t.Any]", server)


def test_server_info_gives_no_key_to_a_process_of_another_user(site: Site, tmp_path: Path) -> None:
    pretender = Pretender(site, tmp_path, *arguments(site), WORKERS="1", UID_WANTED=str(NOBODY))
    server = info_of(site)
    assert pretender.asked() == [(str(NOBODY), "/health", "None")]
    assert (server["health"]["status"], server["resolved"]) == ("ok", None), server
    assert "gets no API key" in server["resolved_error"]


def test_server_info_asks_where_the_server_was_seen_to_listen(site: Site, tmp_path: Path) -> None:
    other = Pretender(site, tmp_path, bind=OTHER_ADDRESS)
    server = Pretender(site, tmp_path, *arguments(site), "--host", OTHER_ADDRESS, WORKERS="1")
    info_of(site)
    assert other.asked() == []
    assert [(path, key) for _uid, path, key in server.asked()] == [
        (path, f"Bearer {site.secrets['api_key']}") for path in ("/health", "/server_info")
    ]


@pytest.mark.parametrize("bind", ["0.0.0.0", OTHER_ADDRESS])
def test_a_server_on_all_addresses_or_on_one_is_asked_there(site: Site, tmp_path: Path, bind: str) -> None:
    server = Pretender(site, tmp_path, *arguments(site), "--host", bind, bind=bind, WORKERS="1")
    site.check()
    assert [path for _uid, path, _key in server.asked()] == ["/health", "/server_info"]


def test_a_key_that_the_inventory_has_and_the_server_has_not(site: Site) -> None:
    keys = dict(site.secrets)
    site.secrets = {}
    site.launch()
    site.serves()
    assert named(site.check()) == []
    site.secrets = {name: value for name, value in keys.items() if name != "secret_environment"}
    found = site.check()
    assert named(found) == [("main", "flag:api-key"), ("main", "flag:admin-api-key")], found
    row = row_of(found, "flag:api-key")
    assert (row["wanted"], row["found"], row["where"], row["also"]) == ("set", "not set", "process", ["file"])


def test_variables_that_the_inventory_has_no_more(site: Site) -> None:
    site.settings["environment"].update({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "MY_SWITCH": "1"})
    site.launch()
    site.serves()
    assert named(site.check()) == []
    found = site.check(site.environment(PYTORCH_CUDA_ALLOC_CONF=None, MY_SWITCH=None))
    assert sorted(named(found)) == [("main", "env:MY_SWITCH"), ("main", "env:PYTORCH_CUDA_ALLOC_CONF")], found
    assert row_of(found, "env:PYTORCH_CUDA_ALLOC_CONF")["where"] == "process"
    assert row_of(found, "env:MY_SWITCH")["where"] == "file"
