# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the log of an earlier start says about memory: figures that the next plan needs not assume.

SGLang's log says GB and means GiB, except in the lines of HiCache's host pools. Of several ranks the one with the least
memory counts. A line that isn't there leaves its figure None.
"""

from __future__ import annotations

import re
import typing as t

from ..plan_model import GIB, Learned
from .phases import short_lines

_GB = r"(\d{1,7}(?:\.\d{1,4})?) GB"
_BEFORE = re.compile(rf"Load weight begin\. avail mem={_GB}")
_AFTER = re.compile(rf"Load weight end\..*?avail mem={_GB}")
_POOL = re.compile(rf"Memory pool end\. avail mem={_GB}")
_START = re.compile(rf"max_total_num_tokens=(\d{{1,15}}),.*?available_gpu_mem={_GB}")
_HOST_POOL = re.compile(rf"Allocating (?:.*?: \d{{1,15}} tokens, )?{_GB} host memory")
_GRAPH = re.compile(rf"Capture .*?graph end\..*?mem usage={_GB}", re.I)


def learned_from_log(text: str, source: str, same_weights: bool) -> Learned:
    """The figures of one start's log. A log of more than one start: of the last one that got as far.

    ``same_weights``: whether that start had the model, the ranks, and the graph settings of the one that is planned.
    """
    text = "\n".join(short_lines(text))
    start = _START.findall(text)
    graphs = [float(found) for found in _GRAPH.findall(text)]
    return Learned(
        source=source,
        free_before_load_bytes=_least(_BEFORE, text),
        free_after_load_bytes=_least(_AFTER, text),
        free_after_pool_bytes=_least(_POOL, text),
        free_after_start_bytes=int(float(start[-1][1]) * GIB) if start else None,
        graph_bytes=int(max(graphs) * GIB) if graphs else None,
        max_total_num_tokens=int(start[-1][0]) if start else None,
        same_weights=same_weights,
    )


def host_pools_gb(text: str) -> tuple[float, ...]:
    """Each HiCache host pool that the log names, in GB (1e9) as the log counts there."""
    return tuple(float(found) for line in short_lines(text) for found in _HOST_POOL.findall(line))


def _least(pattern: t.Pattern[str], text: str) -> t.Optional[int]:
    values = [float(found) for found in pattern.findall(text)]
    return int(min(values) * GIB) if values else None
