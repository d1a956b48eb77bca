# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand-in servers in a container as people start them: by hand-made units, by ``ssh host 'nohup ...'``; and questions
to them."""

from __future__ import annotations

import json
import shlex
import typing as t

from ..harness.waiting import wait_for
from .containers import Container, Seen
from .rootfs import DOUBLES, MODEL, PYTHON, SERVER_USER, SGLANG_PYTHON

READY_DEADLINE_S = 40
ASK_DEADLINE_S = 15
_ASK = """\
import sys, urllib.request, urllib.error
method, url, key, body = sys.argv[1:5]
request = urllib.request.Request(url, body.encode() or None, method=method)
request.add_header("Content-Type", "application/json")
if key:
    request.add_header("Authorization", "Bearer " + key)
try:
    answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=8)
    print(answer.status, answer.read().decode(), end="")
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode(), end="")
except OSError as error:
    print(0, error, end="")
"""


def standin_argv(port: int, *flags: str) -> list[str]:
    """A server's command line."""
    words = [SGLANG_PYTHON, "-m", "sglang.launch_server", "--model-path", MODEL, "--port", str(port)]
    return [*words, *flags]


def unit_file(
    argv: t.Sequence[str] | str, *, restart: str = "no", environment: t.Mapping[str, str] | None = None
) -> str:
    """A unit as an operator writes one. ``argv`` as text is taken as it is."""
    command = argv if isinstance(argv, str) else shlex.join(argv)
    lines = [f"Environment={name}={value}" for name, value in (environment or {}).items()]
    return "\n".join(
        [
            "[Service]",
            f"ExecStart={command}",
            f"User={SERVER_USER}",
            f"Restart={restart}",
            "RestartSec=1",
            *lines,
            "[Unit]",
            "StartLimitIntervalSec=0",
            "",
        ]
    )


def start_unit(box: Container, name: str, text: str) -> None:
    """Write a unit and start it."""
    (box.root / "etc/systemd/system" / name).write_text(text)
    box.run(["systemctl", "daemon-reload"], 30).check()
    box.run(["systemctl", "start", name], 30).check()


def unit_state(box: Container, name: str, *properties: str) -> dict[str, str]:
    """What ``systemctl show`` says."""
    done = box.run(["systemctl", "show", f"--property={','.join(properties)}", name], 30).check()
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def ask(box: Container, method: str, path: str, port: int, body: t.Any = None, *, key: str = "") -> tuple[int, str]:
    """HTTP from inside the container: status (0: no answer) and text."""
    text = "" if body is None else json.dumps(body)
    argv = [PYTHON, "-c", _ASK, method, f"http://127.0.0.1:{port}{path}", key, text]
    status, _unused, answer = box.run(argv, ASK_DEADLINE_S).check().stdout.partition(" ")
    return int(status), answer


def wait_serving(box: Container, port: int, *, key: str = "") -> None:
    """Until /health says 200."""
    wait_for(f"port {port} serves", lambda: ask(box, "GET", "/health", port, key=key)[0] == 200, READY_DEADLINE_S)


def leaders(box: Container, port: int | None = None) -> list[Seen]:
    """SGLang launchers inside, not the shells that name one; of one port where it is given on the command line."""
    wanted = "" if port is None else f"--port {port}"
    return [
        one for one in box.find("sglang.launch_server") if one.title.startswith(SGLANG_PYTHON) and wanted in one.title
    ]


def start_bystanders(box: Container, devices: t.Sequence[str]) -> dict[str, int]:
    """A notebook's kernel, an editor with sglang in its argv, persistenced, a DCGM exporter and more: kind -> pid."""
    log = "/run/bystanders.json"
    argv = [
        PYTHON,
        f"{DOUBLES}/fixtures/bystanders.py",
        "--directory",
        "/opt/bystanders",
        "--devices",
        ",".join(devices),
    ]
    words = ["systemd-run", "--unit=bystanders", f"--property=StandardOutput=file:{log}", "--quiet", "--", *argv]
    box.run(words, 60).check()
    path = box.root / log.lstrip("/")
    wait_for("bystanders started", lambda: path.exists() and path.read_text().endswith("\n"), 60)
    pids: dict[str, int] = json.loads(path.read_text())
    return pids
