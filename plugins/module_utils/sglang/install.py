# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where an interpreter's SGLang lies and which version it is, by names of directories: nobody else's code is run."""

from __future__ import annotations

import os
import re
import typing as t
from dataclasses import dataclass

_DIST_INFO = re.compile(r"sglang-(?P<version>\d[\w.+!]*)\.dist-info")
_PYTHON_DIR = re.compile(r"python3\.\d+")


@dataclass(frozen=True)
class Install:
    """``package``: the directory `sglang` with its sources (None for an editable install); ``version`` by its
    dist-info."""

    package: t.Optional[str]
    version: t.Optional[str]


def find_install(python: str, python_path: str = "", root: str = "") -> t.Optional[Install]:
    """The SGLang that ``python`` (an absolute path) would import; None if it isn't found.

    ``python_path``: the server's PYTHONPATH, which goes first. ``root``: put before every path, e.g. /proc/PID/root.
    """
    places = [place for place in python_path.split(":") if place.startswith("/")]
    for place in [*places, *_site_dirs(python, root)]:
        found = _look(root + place, place)
        if found is not None:
            return found
    return None


def _site_dirs(python: str, root: str) -> t.Iterator[str]:
    """site-packages of the interpreter's own prefix (a virtual environment's python is a link, and is not followed)."""
    prefixes = [os.path.dirname(os.path.dirname(python))]
    if not os.path.exists(f"{root}{prefixes[0]}/pyvenv.cfg"):
        if prefixes[0] == "/usr":
            prefixes.insert(0, "/usr/local")
        prefixes.append(os.path.dirname(os.path.dirname(os.path.realpath(root + python)[len(root) :])))
    for prefix in dict.fromkeys(prefixes):
        for lib in ("lib", "lib64"):
            for name in _listed(f"{root}{prefix}/{lib}"):
                if _PYTHON_DIR.fullmatch(name) or name == "python3":
                    yield f"{prefix}/{lib}/{name}/site-packages"
                    yield f"{prefix}/{lib}/{name}/dist-packages"


def _look(place: str, shown: str) -> t.Optional[Install]:
    names = _listed(place)
    versions = [match.group("version") for match in map(_DIST_INFO.fullmatch, names) if match]
    package = f"{shown}/sglang" if os.path.isdir(f"{place}/sglang/srt") else None
    if package is None and not versions:
        return None
    return Install(package, versions[0] if len(versions) == 1 else None)


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def version_tuple(version: t.Optional[str]) -> t.Optional[tuple[int, ...]]:
    """The leading numbers of a version: 0.5.12.post1 -> (0, 5, 12); None where there are none."""
    numbers = re.match(r"\d{1,9}(?:\.\d{1,9})*", version or "")
    return tuple(int(part) for part in numbers.group(0).split(".")) if numbers else None
