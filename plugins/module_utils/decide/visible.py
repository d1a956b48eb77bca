# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs a launcher that holds none yet was given, by CUDA_VISIBLE_DEVICES and by its flags."""

from __future__ import annotations

import typing as t

from ..model import Gpu
from ..snapshot import Leader, Snapshot
from .gpus import names_gpu
from .guests import same_gpus


class Given(t.NamedTuple):
    """Indices of GPUs, and the words that could not be resolved: behind them may be any GPU."""

    indices: frozenset[int]
    unresolved: tuple[str, ...] = ()


def given_gpus(leader: Leader, snapshot: Snapshot) -> t.Optional[Given]:
    """What the launcher's CUDA_VISIBLE_DEVICES names; None where it is not set."""
    if leader.visible_devices is None:
        return None
    gpus = snapshot.reading.gpus or ()
    numbers = numbers_count(leader, snapshot)
    indices: set[int] = set()
    unresolved = []
    for word in (part.strip() for part in leader.visible_devices.split(",")):
        if word.startswith("-"):  # CUDA shows the GPUs before the first number that is none: -1 hides all
            break
        if not word:
            continue
        found = _named(gpus, word, numbers)
        if found is None:
            unresolved.append(word)
        else:
            indices.add(found)
    return Given(frozenset(indices), tuple(unresolved))


def gpus_by_flags(leader: Leader, snapshot: Snapshot) -> t.Optional[frozenset[int]]:
    """The indices that a launcher which sees all GPUs will take by its flags; None where they don't tell."""
    if leader.first_gpu is None or leader.gpu_count is None or not numbers_count(leader, snapshot):
        return None
    end = leader.first_gpu + leader.gpu_count
    return frozenset(gpu.index for gpu in snapshot.reading.gpus or () if leader.first_gpu <= gpu.index < end)


def numbers_count(leader: Leader, snapshot: Snapshot) -> bool:
    """Whether a GPU's number means the same to this launcher as to the driver.

    A container counts the GPUs that it was given. CUDA counts the fastest first unless it is told otherwise; where all
    are of one kind, that is the driver's order too.
    """
    guest = snapshot.guest
    if guest is not None and leader.process.pid in guest.members:
        if not same_gpus(guest, snapshot.reading.gpus or ()):
            return False
    elif leader.container != snapshot.own_container:
        return False
    names = {gpu.name for gpu in snapshot.reading.gpus or ()}
    return leader.pci_bus_order or (len(names) == 1 and None not in names)


def _named(gpus: t.Sequence[Gpu], word: str, numbers: bool) -> t.Optional[int]:
    if word.isdecimal():
        return next((gpu.index for gpu in gpus if numbers and names_gpu(gpu, word)), None)
    exact = [gpu.index for gpu in gpus if word.lower() in _uuids(gpu)]
    if exact or not word.lower().startswith("gpu-") or len(word) == len("GPU-"):
        return exact[0] if exact else None
    # CUDA takes the beginning of a UUID as well, where only one GPU's begins so.
    begun = [gpu.index for gpu in gpus if (gpu.uuid or "").lower().startswith(word.lower())]
    return begun[0] if len(begun) == 1 else None


def _uuids(gpu: Gpu) -> list[str]:
    """The GPU's own and those of its MIG slices."""
    return [uuid.lower() for uuid in [gpu.uuid, *(one.uuid for one in gpu.mig)] if uuid]
