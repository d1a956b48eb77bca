# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Relaunch a real SGLang on this machine twice, the second time with another flag, ask it something, and take it down
again.

Where there is no GPU, SGLang runs on the CPU and two GPUs are simulated: a test double of NVML whose memory follows the
schedulers, so that the tables, the eviction and the verdicts have something to show.  Everything installed lies in the
cache outside of the checkout; nothing is left running, also after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import typing as t
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.cleanslate.sglang.scripts.bootstrap import cache_dir, newest_ansible_venv  # noqa: E402

INVENTORY = ROOT / "inventory" / "local"
SETUP_DEADLINE_S = 1500.0
# A net above the deadlines of the modules and tasks.
PLAYBOOK_DEADLINE_S = 900.0
QUIET_S = 10.0
# What the second launch changes: harmless on a CPU, and visible in the server's own answers.
CHANGED_FLAGS = {"max_total_tokens": 2048}


class DemoError(Exception):
    """A step of the demo went wrong; the message says which."""


@dataclass(frozen=True)
class Seen:
    """A process as it was seen: its pid counts as the same process only with the same start time."""

    pid: int
    start_ticks: int
    title: str


def say(text: str) -> None:
    print(f"\n==> {text}", flush=True)


def set_up() -> Path:
    """Make the newest Ansible venv and the engine, side by side; returns the venv."""
    bootstrap = str(ROOT / "scripts" / "bootstrap.py")
    running = [subprocess.Popen([sys.executable, bootstrap, what]) for what in ("newest-venv", "engine")]
    ends = time.monotonic() + SETUP_DEADLINE_S
    try:
        codes = [each.wait(timeout=max(1.0, ends - time.monotonic())) for each in running]
    except subprocess.TimeoutExpired:
        raise DemoError(f"the setup did not end within {SETUP_DEADLINE_S:.0f} s") from None
    finally:
        for each in running:
            if each.poll() is None:
                each.send_signal(signal.SIGINT)
                each.wait(timeout=30)
    venv = newest_ansible_venv()
    if any(codes) or venv is None:
        raise DemoError("the setup failed; see above")
    return venv


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the command's name (state is the first), or None where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def title(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return words.strip()[:70]
    return ""


def process_tree(leader: int) -> list[Seen]:
    """The leader and its descendants, as far as they are alive."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        fields = stat_fields(int(entry.name)) if entry.name.isdecimal() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[Seen] = []
    waiting = [leader]
    while waiting:
        pid = waiting.pop()
        ticks = start_ticks(pid)
        if ticks is not None:
            found.append(Seen(pid, ticks, title(pid)))
        waiting += children.get(pid, [])
    return found


class Playbooks:
    """Runs this checkout's playbooks on inventory/local."""

    def __init__(self, venv: Path, environment: dict[str, str]) -> None:
        self._venv = venv
        self._env = {
            **os.environ,
            **environment,
            "CLEANSLATE_CACHE": str(cache_dir()),
            "PATH": os.pathsep.join([str(venv / "bin"), os.environ.get("PATH", os.defpath)]),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_FORCE_COLOR": "1" if sys.stdout.isatty() else "0",
            "PYTHONUNBUFFERED": "1",
            "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "0",
            # ansible-core 2.21 warns of its own plugin loader where it copies a host's variables.
            "ANSIBLE_DEPRECATION_WARNINGS": "0",
        }

    def value(self, expression: str) -> t.Any:
        """What a Jinja expression gives for the inventory's one host."""
        message = f"msg={{{{ {{'value': {expression}}} | to_json }}}}"
        argv = [
            str(self._venv / "bin/ansible"),
            "all",
            "-i",
            str(INVENTORY),
            "-m",
            "ansible.builtin.debug",
            "-a",
            message,
        ]
        env = {**self._env, "ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
        done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        found = re.search(r"^[^|]*\| SUCCESS => (\{.*\})\s*$", done.stdout, re.DOTALL)
        if done.returncode or found is None:
            raise DemoError(f"{INVENTORY}: can't read {expression}: {done.stdout}{done.stderr}")
        return json.loads(json.loads(found[1])["msg"])["value"]

    def run(self, playbook: str, *extra: str) -> None:
        """Run one playbook; shows its output and, while it is silent, a progress line."""
        say(shlex.join(["ansible-playbook", "-i", "inventory/local", f"playbooks/{playbook}", *extra]))
        argv = [
            str(self._venv / "bin/ansible-playbook"),
            "-i",
            str(INVENTORY),
            str(ROOT / "playbooks" / playbook),
            *extra,
        ]
        process = subprocess.Popen(
            argv, env=self._env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        heard = [time.monotonic()]
        reader = threading.Thread(target=_copy_output, args=(process, heard), daemon=True)
        reader.start()
        started = said = time.monotonic()
        try:
            while process.poll() is None:
                now = time.monotonic()
                if now - started > PLAYBOOK_DEADLINE_S:
                    raise DemoError(f"{playbook}: no end after {PLAYBOOK_DEADLINE_S:.0f} s")
                if now - max(heard[0], said) > QUIET_S:
                    said = now
                    print(f"    ... {playbook} runs for {now - started:.0f} s", flush=True)
                time.sleep(0.2)
        finally:
            _end(process)
            reader.join(timeout=5)
        if process.returncode:
            raise DemoError(f"{playbook}: exit status {process.returncode}")


def _copy_output(process: subprocess.Popen[bytes], heard: list[float]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        heard[0] = time.monotonic()
        sys.stdout.write(line.decode(errors="replace"))
        sys.stdout.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a playbook like Ctrl-C would, then end it for good."""
    for sig, grace_s in ((signal.SIGINT, 15), (signal.SIGKILL, 5)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)


def has_gpu() -> bool:
    return Path("/dev/nvidia0").exists()


def simulated_gpus(work: Path) -> dict[str, str]:
    """Build the NVML double with two GPUs; returns the environment by which inventory/local finds them."""
    if shutil.which("gcc") is None:
        print("skipped: no gcc, so no simulated GPUs: the demo shows a host without any")
        return {}
    from ansible_collections.cleanslate.sglang.tests.doubles.nvml.double import Gpu, Hold, NvmlDouble

    try:
        double = NvmlDouble(directory=work / "nvml")
    except subprocess.CalledProcessError as error:
        raise DemoError(f"the simulated GPUs could not be built: {error}") from None
    double.write(
        Gpu(0),
        Gpu(1),
        # One scheduler without tensor parallelism, or one per rank.
        Hold(0, mib=20_000, title_is="sglang::scheduler"),
        Hold(0, mib=20_000, title="sglang::scheduler_TP0"),
        Hold(1, mib=20_000, title="sglang::scheduler_TP1"),
    )
    print("No GPU here: two SIMULATED GPUs (a test double of NVML), their memory follows SGLang's schedulers.")
    return {"CLEANSLATE_DEMO_NVML": str(double.library_dir), "CLEANSLATE_NVML_STATE": str(double.state)}


def chat(url: str, model: str) -> dict[str, t.Any]:
    """Ask for one chat completion; returns the parsed answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 24}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return t.cast("dict[str, t.Any]", json.load(answer))
    except (OSError, ValueError) as error:
        raise DemoError(f"no chat completion from {url}: {error}") from None


def show_chat(url: str, model: str) -> None:
    """Print what the server answers; an answer without tokens fails the demo."""
    print(f"POST {url}/v1/chat/completions  'Say hello.'")
    answer = chat(url, model)
    message = answer["choices"][0]["message"]
    for part in ("reasoning_content", "content"):
        print(f"    {part}: {message.get(part)!r}")
    tokens = answer["usage"]["completion_tokens"]
    print(f"    {tokens} tokens (a tiny model with random weights: the words mean nothing, the tokens are real)")
    if not tokens:
        raise DemoError("the server answered without a single token")


def main_prepared(venv: Path) -> int:
    """The demo itself, run by the venv's Python."""
    work = cache_dir() / "demo"
    work.mkdir(parents=True, exist_ok=True)
    playbooks = Playbooks(venv, {} if has_gpu() else simulated_gpus(work))
    server = playbooks.value("sglang_servers[0]")
    name, url = server["name"], f"http://127.0.0.1:{server['port']}"
    state_dir = Path(playbooks.value("sglang_state_dir | default('/var/lib/cleanslate')"))
    started = time.monotonic()
    try:
        say(f"1. Start the server '{name}' from whatever state this machine is in")
        playbooks.run("relaunch.yml")
        first = process_tree(record_of(state_dir, name)["pid"])
        say(f"2. Relaunch it with another flag: {CHANGED_FLAGS}")
        playbooks.run("relaunch.yml", "-e", json.dumps({"demo_flags": CHANGED_FLAGS}))
        say("3. What the second server answers")
        show_chat(url, server["flags"]["served_model_name"])
        say("4. What became of the first server's processes")
        show_gone(first)
    finally:
        say("5. Take it down again")
        playbooks.run("teardown.yml")
    print(f"\nDemo done in {time.monotonic() - started:.0f} s.  Next: inventory/example shows a small fleet.")
    return 0


def record_of(state_dir: Path, name: str) -> dict[str, t.Any]:
    path = state_dir / name / "current.json"
    try:
        return t.cast("dict[str, t.Any]", json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise DemoError(f"no record of the launch: {path}: {error}") from None


def show_gone(processes: Sequence[Seen]) -> None:
    """Print each process and that it is gone; one that is still there fails the demo."""
    alive = []
    for each in processes:
        gone = start_ticks(each.pid) != each.start_ticks
        print(f"    {'gone ' if gone else 'ALIVE'} {each.pid:>7}  {each.title}")
        if not gone:
            alive.append(each.pid)
    if alive or not processes:
        raise DemoError(f"processes of the first server are still there: {alive}" if alive else "no first server seen")


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if "--prepared" in sys.argv:
            venv = newest_ansible_venv()
            if venv is None:
                raise DemoError("no Ansible venv: run `make demo`")
            return main_prepared(venv)
        venv = set_up()
        python = str(venv / "bin" / "python")
        os.execv(python, [python, __file__, "--prepared"])
    except DemoError as error:
        print(f"\nerror: {error}", flush=True)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
        return 130


if __name__ == "__main__":
    sys.exit(main())
