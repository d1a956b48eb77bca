# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.plan_model import GIB
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.learned import host_pools_gb, learned_from_log

LOG = """\
[2026-11-30 01:19:40 TP1] Load weight begin. avail mem=139.13 GB
[2026-11-30 01:19:40 TP0] Load weight begin. avail mem=139.20 GB
[2026-11-30 01:19:40 TP0] Load weight end. elapsed=0.11 s, type=LlamaForCausalLM, avail mem=139.12 GB, mem usage=0.0 GB.
[2026-11-30 01:19:40 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 2000000, K size: 1.9 GB, V size: 1.9 GB
[2026-11-30 01:19:40 TP0] Memory pool end. avail mem=135.25 GB
[2026-11-30 01:19:40 TP0] Capture target decode CUDA graph end. elapsed=5 s, mem usage=1.50 GB, avail mem=133.75 GB
[2026-11-30 01:19:40 TP0] max_total_num_tokens=2000000, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=2048, available_gpu_mem=133.06 GB
[2026-11-30 01:19:41 TP0] Allocating 40.00 GB host memory for hierarchical KV cache.
"""


def test_the_figures_of_a_start() -> None:
    learned = learned_from_log(LOG, "launch A", True)
    assert learned.source == "launch A" and learned.same_weights
    assert learned.free_before_load_bytes == int(139.13 * GIB)  # of the rank with the least
    assert learned.free_after_load_bytes == int(139.12 * GIB)
    assert learned.free_after_pool_bytes == int(135.25 * GIB)
    assert learned.free_after_start_bytes == int(133.06 * GIB)
    assert learned.graph_bytes == int(1.5 * GIB)
    assert learned.max_total_num_tokens == 2_000_000


@pytest.mark.parametrize("text", ["", "max_total_num_tokens=x", "Load weight begin. avail mem=.. GB", "\0" * 100])
def test_a_log_without_figures_teaches_nothing(text: str) -> None:
    learned = learned_from_log(text, "launch B", False)
    assert learned == type(learned)("launch B")


def test_the_host_pools_of_old_and_new_logs() -> None:
    assert host_pools_gb(LOG) == (40.0,)
    newer = "[x] Allocating kv hierarchical KV host pool: 19531251 tokens, 40.00 GB host memory.\n"
    assert host_pools_gb(newer * 2) == (40.0, 40.0)
    assert host_pools_gb("Allocating 2.50 GB host memory for DSA indexer (layout=layer_first).") == (2.5,)
