# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make what a checkout needs and git doesn't hold: the Ansible venvs, and a real SGLang for the CPU with a tiny model.

Everything lands outside of the checkout, in ``$CLEANSLATE_CACHE`` (default ``~/.cache/cleanslate``).  A directory's
name ends in a hash of what it was made from, its stamp is written last, and a link with the plain name points to the
current one:

    venv-2.19 -> venv-2.19-<hash>     ansible-core 2.19 on Python 3.11 with the test tools
    venv-2.21 -> venv-2.21-<hash>     ansible-core 2.21 on Python 3.12 or newer; skipped where there is none
    proxmox   -> proxmox-<hash>       a collections path with community.proxmox alone
    engine    -> engine-<hash>        SGLang 0.5.15 for the CPU (2.6 GB)
    tiny-model -> tiny-model-<hash>   a random Llama of 2 layers, tokenizer and chat template, no weights

Needs nothing but a Python 3.9+; every wait has a deadline and shows a progress line.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LOCK_DEADLINE_S = 1500.0
PIP_DEADLINE_S = 1200.0
NO_PYTHON = (
    "no Python that runs a supported ansible-core: install python3.11 with venv, or newer (Debian: python3-venv)"
)


class BootstrapError(Exception):
    """A step failed; the message says which and where its log is."""


@dataclass(frozen=True)
class Interpreter:
    """A Python that runs and can make a venv."""

    path: str
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return "{} ({})".format(self.path, ".".join(map(str, self.version)))


@dataclass(frozen=True)
class AnsibleVenv:
    """One supported ansible-core and the Python versions that its controller runs on, best first."""

    core: str
    pythons: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"venv-{self.core}"

    @property
    def requirements(self) -> tuple[Path, ...]:
        names = (f"core-{self.core}.txt", "drift.txt", "controller.txt", "dev.txt")
        return tuple(REQUIREMENTS / name for name in names)


ANSIBLE_VENVS = (AnsibleVenv("2.19", ("3.11", "3.12", "3.13")), AnsibleVenv("2.21", ("3.12", "3.13", "3.14")))
ENGINE_PYTHONS = ("3.11", "3.12")


def cache_dir() -> Path:
    """Where the venvs and the engine live: ``$CLEANSLATE_CACHE``, else below the user's cache directory."""
    named = os.environ.get("CLEANSLATE_CACHE")
    if named:
        return Path(named).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "cleanslate"


def _candidates(version: str) -> Iterator[str]:
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory, f"python{version}")
        if os.access(path, os.X_OK):
            yield path
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    for found in sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True):
        yield str(found)


def _probe(path: str, version: str) -> Interpreter | None:
    """The interpreter behind ``path``, or None where it does not start: a pyenv shim is a file even if its Python is
    gone.
    """
    code = "import ensurepip, sys, venv; print(*sys.version_info[:3], sys.executable)"
    try:
        done = subprocess.run(
            [path, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split(None, 3)
    if done.returncode or len(words) != 4 or ".".join(words[:2]) != version:
        return None
    return Interpreter(words[3].strip(), (int(words[0]), int(words[1]), int(words[2])))


def find_interpreter(versions: Sequence[str]) -> Interpreter | None:
    """The first Python of these minor versions that really runs, from PATH and from pyenv."""
    for version in versions:
        for path in _candidates(version):
            found = _probe(path, version)
            if found:
                return found
    return None


def say(text: str) -> None:
    print(text, flush=True)


def tree_mb(root: Path) -> float:
    """Size of the files below ``root`` in MB (10^6 bytes); files that vanish meanwhile don't count."""
    total = 0
    stack = [str(root)]
    while stack:
        with contextlib.suppress(OSError), os.scandir(stack.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total / 1e6


def end_group(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> None:
    """End a child that leads its own process group, and what it started."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)
            return


def run_logged(
    argv: Sequence[str], *, label: str, log: Path, grows: Path, deadline_s: float, env: dict[str, str] | None = None
) -> None:
    """Run one command with its output in ``log`` and a progress line (seconds, size of ``grows``) while it lasts."""
    every_s = 2.0 if sys.stdout.isatty() else 10.0
    started = time.monotonic()
    with log.open("ab") as out:
        out.write(f"$ {shlex.join(argv)}\n".encode())
        out.flush()
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env
        )
    try:
        while process.returncode is None:
            elapsed_s = time.monotonic() - started
            if elapsed_s > deadline_s:
                raise BootstrapError(f"{label}: no end after {deadline_s:.0f} s; log: {log}")
            try:
                process.wait(timeout=every_s)
            except subprocess.TimeoutExpired:
                progress(f"{label}: {time.monotonic() - started:.0f} s, {tree_mb(grows):.0f} MB so far")
    finally:
        if process.returncode is None:
            end_group(process)
    if process.returncode:
        tail = log.read_text(errors="replace").splitlines()[-15:]
        raise BootstrapError("\n".join([f"{label}: exit status {process.returncode}; the end of {log}:", *tail]))


def progress(text: str) -> None:
    """A progress line: rewritten in place on a terminal, a line of its own elsewhere."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\r\033[K  {text}")
        sys.stdout.flush()
    else:
        say(f"  {text}")


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of one built thing, so that two runs don't build it at the same time."""
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (cache / f".lock-{name}").open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited_s = time.monotonic() - started
                if waited_s > LOCK_DEADLINE_S:
                    raise BootstrapError(f"{name}: another run holds its lock for {waited_s:.0f} s") from None
                progress(f"{name}: another run is making it, waiting for {waited_s:.0f} s")
                time.sleep(2)
        yield


def digest(*parts: str) -> str:
    """A short hash of everything that a built thing depends on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def point(link: Path, target: Path) -> None:
    """Make ``link`` a relative link to its sibling ``target`` in one step, so that nobody sees it missing."""
    if link.is_symlink() and os.readlink(link) == target.name:
        return
    with tempfile.TemporaryDirectory(prefix=".link-", dir=link.parent) as scratch:
        fresh = Path(scratch) / "link"
        fresh.symlink_to(target.name)
        # The target is relative to the link's final place, one directory up.
        os.replace(fresh, link)


@contextlib.contextmanager
def built_once(name: str, key: str) -> Iterator[Path | None]:
    """Yield an empty directory's path to build ``name`` in, or None where it is complete; then stamp it and point the
    link.

    A venv can't be moved, so it is built in its final place; a directory without a stamp is a build that broke, and
    goes.
    """
    cache = cache_dir()
    target = cache / f"{name}-{key}"
    stamp = target / ".complete"
    with locked(name):
        if stamp.is_file():
            yield None
        else:
            if target.exists():
                shutil.rmtree(target)
            started = time.monotonic()
            yield target
            stamp.write_text(f"{key}\n")
            if sys.stdout.isatty():
                sys.stdout.write("\r\033[K")
            say(f"{name}: made in {time.monotonic() - started:.0f} s, {tree_mb(target):.0f} MB: {target}")
        point(cache / name, target)


def pip_install(venv: Path, label: str, arguments: Sequence[str]) -> None:
    """Install into a venv; pip's downloads are kept inside of it while they come in, so that the progress line sees
    them.
    """
    scratch = venv / ".tmp"
    scratch.mkdir(exist_ok=True)
    log = cache_dir() / f"{venv.name}.log"
    argv = [str(venv / "bin/python"), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
    try:
        run_logged(
            argv,
            label=label,
            log=log,
            grows=venv,
            deadline_s=PIP_DEADLINE_S,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def new_venv(python: Interpreter, target: Path, label: str) -> None:
    log = cache_dir() / f"{target.name}.log"
    log.write_text("")
    run_logged([python.path, "-m", "venv", str(target)], label=label, log=log, grows=target, deadline_s=180)


def make_ansible_venv(wanted: AnsibleVenv) -> bool:
    """Make one Ansible venv; False where no Python for it was found."""
    python = find_interpreter(wanted.pythons)
    if python is None:
        say(f"skipped: {wanted.name}: no working Python {' or '.join(wanted.pythons)} with venv on this machine")
        return False
    key = digest("1", str(python), *(path.read_text() for path in wanted.requirements))
    with built_once(wanted.name, key) as target:
        if target:
            say(f"{wanted.name}: ansible-core {wanted.core} on {python}")
            new_venv(python, target, f"{wanted.name}: venv")
            files = [part for path in wanted.requirements for part in ("-r", str(path))]
            pip_install(target, f"{wanted.name}: ansible-core and tools", files)
    return True


def proxmox_collections() -> Path:
    """A collections path with community.proxmox, once ``make venv`` has made it."""
    return cache_dir() / "proxmox"


def make_proxmox_collection() -> None:
    """Unpack community.proxmox from PyPI's ``ansible`` package: 1.4 MB of its 200; no Galaxy is asked."""
    pip = newest_ansible_venv()
    if pip is None:
        raise BootstrapError(NO_PYTHON)
    requirements = REQUIREMENTS / "proxmox.txt"
    with built_once("proxmox", digest("1", requirements.read_text())) as target:
        if not target:
            return
        target.mkdir()
        say("proxmox: community.proxmox; this loads 51 MB")
        log = cache_dir() / f"{target.name}.log"
        log.write_text("")
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=target) as scratch:
            # The wheel asks for a newer Python than the venv's may be; nothing of it is run by that Python.
            words = ["download", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--dest", scratch]
            argv = [str(pip / "bin/python"), "-m", "pip", "--no-input", "--disable-pip-version-check", *words]
            run_logged(
                [*argv, "-r", str(requirements)],
                label="proxmox: download",
                log=log,
                grows=target,
                deadline_s=PIP_DEADLINE_S,
            )
            with zipfile.ZipFile(next(Path(scratch).glob("ansible-*.whl"))) as wheel:
                prefix = "ansible_collections/community/proxmox/"
                wheel.extractall(target, [name for name in wheel.namelist() if name.startswith(prefix)])


def make_newest_ansible_venv() -> None:
    """Make the one Ansible venv that the demo uses: the newest core that has a Python here."""
    for each in reversed(ANSIBLE_VENVS):
        if find_interpreter(each.pythons) and make_ansible_venv(each):
            return
    raise BootstrapError(NO_PYTHON)


def newest_ansible_venv() -> Path | None:
    """The venv of the newest ansible-core that is complete in the cache."""
    paths = [cache_dir() / each.name for each in reversed(ANSIBLE_VENVS)]
    return next((path for path in paths if (path / ".complete").is_file()), None)


def make_engine() -> None:
    """Install SGLang for the CPU and write the tiny model."""
    python = find_interpreter(ENGINE_PYTHONS)
    if python is None:
        raise BootstrapError(f"engine: no working Python {' or '.join(ENGINE_PYTHONS)} with venv on this machine")
    spec = os.environ.get("CLEANSLATE_TORCH_SPEC", "")
    torch = shlex.split(spec) or ["-r", str(REQUIREMENTS / "torch.txt")]
    requirements = REQUIREMENTS / "engine.txt"
    shim = ROOT / "engine" / "shims" / "torchvision"
    torch_text = spec or (REQUIREMENTS / "torch.txt").read_text()
    # By content, not by path: every checkout of this version shares one engine.
    key = digest("2", str(python), torch_text, requirements.read_text(), (shim / "__init__.py").read_text())
    with built_once("engine", key) as target:
        if target:
            say(f"engine: SGLang for the CPU on {python}; this loads about 1 GB")
            new_venv(python, target, "engine: venv")
            pip_install(target, "engine: torch", torch)
            pip_install(target, "engine: sglang", ["--no-deps", "-r", str(requirements)])
            site = next((target / "lib").glob("python*/site-packages"))
            shutil.copytree(shim, site / "torchvision", dirs_exist_ok=True)
            check = "import sglang, torch, torchvision, transformers; print(sglang.__version__, torch.__version__)"
            log = cache_dir() / f"{target.name}.log"
            run_logged(
                [str(target / "bin/python"), "-c", check], label="engine: import", log=log, grows=target, deadline_s=180
            )
    maker = ROOT / "engine" / "make_tiny_model.py"
    with built_once("tiny-model", digest("1", key, maker.read_text())) as target:
        if target:
            log = cache_dir() / f"{target.name}.log"
            log.write_text("")
            argv = [str(cache_dir() / "engine/bin/python"), str(maker), str(target)]
            run_logged(argv, label="tiny-model", log=log, grows=target, deadline_s=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", nargs="+", choices=["venv", "newest-venv", "engine", "cache-dir", "venv-dir"])
    wanted = parser.parse_args().what
    try:
        if "cache-dir" in wanted:
            say(str(cache_dir()))
        if "venv-dir" in wanted:
            say(str(newest_ansible_venv() or cache_dir() / ANSIBLE_VENVS[0].name))
        if "venv" in wanted:
            made = [make_ansible_venv(each) for each in ANSIBLE_VENVS]
            if not any(made):
                raise BootstrapError(NO_PYTHON)
            make_proxmox_collection()
        if "newest-venv" in wanted:
            make_newest_ansible_venv()
        if "engine" in wanted:
            make_engine()
    except BootstrapError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted: the next run starts the unfinished part again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
