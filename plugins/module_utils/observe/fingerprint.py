# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a launch finds on its host beside the flags, kept in its record so that a later change can be seen.

    sglang_version   of the interpreter's SGLang
    driver_version   of the GPU driver     } null for a server that uses no GPU
    gpu_count        how many GPUs it shows }
    model_config     of the model's config.json
    model_index      of all its *.index.json, which name the weights' files
    unit             of the systemd unit's text; null without one

Files count by the hash of their bytes. A value is null where it could not be read, and ``none`` where there is no such
file, which is something to compare with. A model of a hub is looked for in the hub's cache, by its revision.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import typing as t
from dataclasses import dataclass

from ..sglang.files import open_regular
from ..spawn import fetch_bounded
from .nvml import read_gpus

FILES_DEADLINE_S = 20.0
NONE = "none"
_CONFIG = "config.json"
_INDEX = ".index.json"
_LIMIT_BYTES = 64 << 20  # the index of a model of a trillion parameters has 8 MB
_MOST_FILES = 5000
_MOST_INDICES = 50
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_FILE = (errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True)
class ModelPrint:
    """Hashes of a model's files. None: not known, and ``problem`` says why."""

    config: t.Optional[str] = None
    index: t.Optional[str] = None
    problem: t.Optional[str] = None


def fetch_model_print(
    model: t.Optional[str],
    environment: t.Mapping[str, str],
    revision: t.Optional[str] = None,
    deadline_s: float = FILES_DEADLINE_S,
) -> ModelPrint:
    """The hashes, read in a child: a model may lie on a file server that is dead. Never raises for what lies there."""
    if not model or "\0" in model:
        return ModelPrint(problem="the flags name no model")
    called = fetch_bounded(lambda: read_model_print(model, environment, revision), deadline_s)
    if called.timed_out:
        return ModelPrint(problem=f"{model} was not read within {deadline_s:g} s (a dead file server?)")
    return t.cast(ModelPrint, called.value) if called.ok else ModelPrint(problem=f"{model}: {called.error}")


def read_model_print(
    model: str, environment: t.Mapping[str, str], revision: t.Optional[str] = None
) -> ModelPrint:
    """The same without a deadline."""
    folder: t.Optional[str] = model
    if not model.startswith("/"):
        folder = None if _HUB_NAME.fullmatch(model) is None else _in_hub(model, environment, revision)
        if folder is None:
            return ModelPrint(problem=f"{model} is no absolute path, and no model in the hub's cache on this host")
    try:
        return ModelPrint(_print(os.path.join(str(folder), _CONFIG)), _index_print(str(folder)))
    except OSError as error:
        return ModelPrint(problem=f"{error.filename or folder}: {error.strerror or error}")
    except ValueError as error:
        return ModelPrint(problem=str(error))


def _index_print(folder: str) -> str:
    """One hash for all indices, by their names and hashes."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for _number, entry in zip(range(_MOST_FILES + 1), entries)]
    except OSError as error:
        if error.errno in _NO_FILE:
            return NONE
        raise
    if len(names) > _MOST_FILES:
        raise ValueError(f"{folder} has more than {_MOST_FILES} files")
    indices = sorted(name for name in names if name.endswith(_INDEX))
    if len(indices) > _MOST_INDICES:
        raise ValueError(f"{folder} has more than {_MOST_INDICES} files *{_INDEX}")
    rows = "".join(f"{name}\0{_print(os.path.join(folder, name))}\n" for name in indices)
    return _sha256(rows.encode("utf-8", "surrogateescape")) if rows else NONE


def _print(path: str) -> str:
    """Links are followed: a hub's cache is made of links."""
    try:
        fd = open_regular(path, follow=True)
    except OSError as error:
        if error.errno in _NO_FILE:
            return NONE
        raise
    with os.fdopen(fd, "rb") as stream:
        data = stream.read(_LIMIT_BYTES + 1)
    if len(data) > _LIMIT_BYTES:
        raise ValueError(f"{path} is larger than {_LIMIT_BYTES >> 20} MiB")
    return _sha256(data)


def _sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# --- a hub's cache ----------------------------------------------------------------------------------------------------


def _in_hub(model: str, environment: t.Mapping[str, str], revision: t.Optional[str]) -> t.Optional[str]:
    """The folder of a model's snapshot, as huggingface_hub lays out its cache; None where it is not there."""
    cache = _hub_cache(environment)
    if cache is None:
        return None
    place = os.path.join(cache, "models--" + model.replace("/", "--"))
    wanted = revision or "main"
    commit: t.Optional[str] = wanted if _COMMIT.fullmatch(wanted) else _ref(place, wanted)
    folder = None if commit is None else os.path.join(place, "snapshots", commit)
    return folder if folder is not None and os.path.isdir(folder) else None


def _hub_cache(environment: t.Mapping[str, str]) -> t.Optional[str]:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(name):
            return environment[name]
    if environment.get("HF_HOME"):
        return os.path.join(environment["HF_HOME"], "hub")
    cache = environment.get("XDG_CACHE_HOME")
    if not cache and environment.get("HOME"):
        cache = os.path.join(environment["HOME"], ".cache")
    return os.path.join(cache, "huggingface", "hub") if cache else None


def _ref(place: str, revision: str) -> t.Optional[str]:
    if revision.startswith("/") or ".." in revision.split("/"):
        return None
    try:
        fd = open_regular(os.path.join(place, "refs", revision))
    except OSError:
        return None
    with os.fdopen(fd, "rb") as stream:
        commit = stream.read(41).decode("ascii", "replace").strip()
    return commit if _COMMIT.fullmatch(commit) else None


# --- of a launch ------------------------------------------------------------------------------------------------------


def read_fingerprint(
    *,
    model: t.Optional[str],
    revision: t.Optional[str],
    environment: t.Mapping[str, str],
    version: t.Optional[str],
    uses_gpu: bool,
    unit: t.Optional[str],
    nvml_deadline_s: float,
) -> dict[str, t.Any]:
    """The fingerprint of a launch, before it starts. What can't be read is null, and is no reason not to start.
    ``unit``: the hash of its text."""
    found = fetch_model_print(model, environment, revision)
    reading = read_gpus(nvml_deadline_s) if uses_gpu else None
    return {
        "sglang_version": version,
        "driver_version": None if reading is None else reading.driver_version,
        "gpu_count": None if reading is None or reading.gpus is None else len(reading.gpus),
        "model_config": found.config,
        "model_index": found.index,
        "unit": unit,
    }
