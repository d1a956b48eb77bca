# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Builds the NVML double and writes its state (README.md: what each line means).

    with NvmlDouble() as nvml:
        nvml.write(Gpu(0), Hold(0, mib=20_000, pid=child.pid))
        subprocess.run([...], env={**os.environ, **nvml.env()})

The state is read anew at every NVML call, so a test changes it under the feet of the program that it tests.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import typing as t
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
STATE_ENV = "CLEANSLATE_NVML_STATE"
DEFAULT_STATE = Path("/run/cleanslate-nvml-double/state")
LIBRARY = "libnvidia-ml.so.1"
NAME = "Simulated GPU (Clean Slate double)"

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden")
_NEEDS = ("state.c", "processes.c", "clients.c", "nvml_double.c", "state.h", "processes.h", "clients.h")


class Variant(enum.Enum):
    """Libraries that differ in their symbols, which no state file can switch."""

    FULL = ""
    WITHOUT_MEMORY_V2 = "WITHOUT_MEMORY_V2"
    WITHOUT_V3 = "WITHOUT_V3"
    WIDE_V3 = "WIDE_V3"


class NotAvailable(enum.Enum):
    """The query answers Not Supported."""

    NA = "na"


NA = NotAvailable.NA
Number = t.Union[int, NotAvailable]


def _render(keyword: str, values: t.Mapping[str, object]) -> str:
    words = [keyword]
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, enum.Enum):
            text = str(value.value)
        elif isinstance(value, (tuple, list)):
            text = ",".join(str(item) for item in value)
        else:
            text = str(value)
        if "\n" in text or "\r" in text:
            raise ValueError(f"{key}: a value is one line")
        if not text or any(letter in text for letter in ' \t"\\'):
            text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
        words.append(f"{key}={text}")
    return " ".join(words)


class _Line:
    """A line of the state file; a field that is None is left out, and the library's default applies."""

    keyword: t.ClassVar[str]

    def render(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(t.cast(t.Any, self))}
        return _render(self.keyword, values)


@dataclasses.dataclass(frozen=True)
class System(_Line):
    keyword = "system"
    driver: str | None = None
    nvml: str | None = None
    cuda: int | None = None
    smi_handle_rc: int | None = None


@dataclasses.dataclass(frozen=True)
class Gpu(_Line):
    """One GPU; indices count up from 0. What is None is like an idle H200."""

    keyword = "gpu"
    index: int
    uuid: str | None = None
    bus: str | None = None
    minor: int | None = None
    name: str | None = None
    serial: str | None = None
    total_mib: int | None = None
    reserved_mib: int | None = None
    cc: str | None = None
    extra_mib: int | None = None
    extra_mib_seq: tuple[int, ...] | None = None
    extra_cycle: bool | None = None
    util: Number | None = None
    mem_util: Number | None = None
    temp_c: Number | None = None
    power_mw: Number | None = None
    power_limit_mw: Number | None = None
    persistence: Number | None = None
    throttle: Number | None = None
    retired_pending: Number | None = None
    remap_cor: Number | None = None
    remap_unc: Number | None = None
    remap_pending: Number | None = None
    remap_failure: Number | None = None
    recovery: Number | None = None
    mig_mode: Number | None = None
    smi_reset: str | None = None


@dataclasses.dataclass(frozen=True)
class Mig(_Line):
    """One MIG instance of a GPU; turns that GPU's MIG mode on."""

    keyword = "mig"
    gpu: int
    mig: int
    uuid: str | None = None
    name: str | None = None
    total_mib: int | None = None
    gi: int | None = None
    ci: int | None = None


@dataclasses.dataclass(frozen=True)
class Hold(_Line):
    """Memory that belongs to live processes. Exactly one of pid, title, title_is, device, device_fd, lock, always."""

    keyword = "hold"
    gpu: int
    mib: int
    pid: int | None = None
    title: str | None = None
    title_is: str | None = None
    device: str | None = None
    device_fd: str | None = None
    lock: str | None = None
    always: bool | None = None
    mig: int | None = None
    start: int | None = None
    kept_by: tuple[int, ...] | None = None
    list_pid: tuple[int, ...] | None = None
    list_mib: int | None = None
    listed: str | None = None
    type: str | None = None
    release_s: float | None = None
    pidns: int | None = None
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class Fault(_Line):
    """What happens at calls whose C name matches the glob `call`."""

    keyword = "fault"
    call: str
    gpu: int | None = None
    mig: int | None = None
    code: int | None = None
    slow_ms: int | None = None
    hang: bool | None = None
    after: int | None = None
    times: int | None = None
    until_reset: bool | None = None


@dataclasses.dataclass(frozen=True)
class Field(_Line):
    """One answer of nvmlDeviceGetFieldValues, with its own return code."""

    keyword = "field"
    gpu: int
    id: int
    value: int = 0
    code: int = 0


Line = t.Union[System, Gpu, Mig, Hold, Fault, Field]


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cleanslate" / "nvml-double"


def build(variant: Variant = Variant.FULL, cc: str = "gcc", cache: Path | None = None) -> Path:
    """A directory with libnvidia-ml.so.1 and bin/nvidia-smi, compiled once per content of the sources.

    Raises subprocess.CalledProcessError with the compiler's output shown, FileNotFoundError without a compiler.
    """
    flags = [*_FLAGS, *([f"-D{variant.value}"] if variant.value else [])]
    digest = hashlib.sha256(" ".join([cc, sys.executable, *flags]).encode())
    for name in (*_NEEDS, "nvidia_smi.py"):
        digest.update((SOURCES / name).read_bytes())
    root = cache or default_cache()
    done = root / digest.hexdigest()[:16]
    if done.is_dir():
        return done
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root, prefix="build-"))
    try:
        sources = [str(SOURCES / name) for name in _NEEDS if name.endswith(".c")]
        command = [cc, *flags, f"-Wl,-soname,{LIBRARY}", "-o", str(made / LIBRARY), *sources]
        subprocess.run(command, check=True, timeout=120)
        _write_smi(made / "bin" / "nvidia-smi", sys.executable)
        made.chmod(0o755)
        try:
            made.rename(done)
        except OSError:
            # Another process was faster; what it made has the same content.
            if not done.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return done


def _write_smi(target: Path, python: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"#!{python}\n" + (SOURCES / "nvidia_smi.py").read_text())
    target.chmod(0o755)


def install(root: Path, variant: Variant = Variant.FULL, python: str = "/usr/bin/python3") -> None:
    """Puts the double into the loader's own path of a container's root: it is found there even where sudo drops the
    environment. The state then lies at DEFAULT_STATE; `python` (inside) must have nvidia-ml-py for nvidia-smi.
    """
    library = root / "usr/local/lib" / LIBRARY
    library.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(build(variant) / LIBRARY, library)
    _write_smi(root / "usr/local/bin/nvidia-smi", python)
    (root / DEFAULT_STATE.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["ldconfig", "-r", str(root)], check=True, timeout=60)


def write_state(path: Path, lines: t.Iterable[Line]) -> None:
    """Replaces the state in one step: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".state-")
    with os.fdopen(handle, "w") as file:
        file.writelines(line.render() + "\n" for line in lines)
    os.chmod(name, 0o644)
    os.replace(name, path)


class NvmlDouble:
    """A built library and a state file of its own. `directory` None: a temporary one, removed at the end."""

    def __init__(self, directory: Path | None = None, variant: Variant = Variant.FULL) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="nvml-double-") if directory is None else None
        base = Path(self._temporary.name) if self._temporary is not None else t.cast(Path, directory)
        self.state = base / "state"
        self.library_dir = build(variant)
        self.lines: tuple[Line, ...] = ()
        if self._temporary is not None:
            base.chmod(0o755)
        # Side records are written by whoever queries, be it a become user: like /tmp.
        self.records = base / "state.d"
        self.records.mkdir(parents=True, exist_ok=True)
        self.records.chmod(0o1777)

    def write(self, *lines: Line) -> None:
        self.lines = lines
        write_state(self.state, lines)

    def add(self, *lines: Line) -> None:
        self.write(*self.lines, *lines)

    def remove(self, *lines: Line) -> None:
        self.write(*(line for line in self.lines if line not in lines))

    def forget(self) -> None:
        """Drops what the library remembers between queries (releases under way, places in sequences)."""
        for record in self.records.iterdir():
            record.unlink()

    def actions(self) -> list[str]:
        """What the stand-in of nvidia-smi was made to do, in order: `pm GPU 0|1`, `reset GPU`, `refused GPU`."""
        log = self.records / "smi.log"
        return log.read_text().splitlines() if log.exists() else []

    def env(self, smi: bool = True) -> dict[str, str]:
        """What a program needs in its environment to find this double, its state and its nvidia-smi."""
        libraries = [str(self.library_dir), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        values = {STATE_ENV: str(self.state), "LD_LIBRARY_PATH": ":".join(libraries)}
        if smi:
            values["PATH"] = f"{self.library_dir / 'bin'}:{os.environ.get('PATH', os.defpath)}"
        return values

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> NvmlDouble:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.close()
