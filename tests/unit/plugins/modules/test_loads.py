# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a module loads before it does anything: Ansible compiles all of it at each start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
INSIDE = "ansible_collections.cleanslate.sglang.plugins"
# What only some orders, some hosts or some answers need.
HEAVY = {
    "gpu_evict": ("http.client", "ssl", "yaml", "act.lastrungs", "observe.guest", "observe.inflight", "sglang.options"),
    "gpu_info": ("http.client", "ssl", "yaml", "act", "observe.inflight", "sglang.options"),
    "clean_state": ("http.client", "ssl", "yaml", "act", "observe.inflight", "sglang.options"),
    "server_lease": ("http.client", "ssl", "yaml", "act", "observe.look", "sglang.options"),
}


def loaded_by(module: str) -> set[str]:
    """The names of what is loaded with a module, beyond what Ansible has loaded for any."""
    code = (
        "import json, sys\nimport ansible.module_utils.basic\nbefore = set(sys.modules)\n"
        f"import {INSIDE}.modules.{module}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT / ".collections", capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", sorted(HEAVY))
def test_a_module_loads_only_what_each_order_needs(module: str) -> None:
    loaded = {name.replace(f"{INSIDE}.module_utils.", "") for name in loaded_by(module)}
    assert "errors" in loaded
    assert sorted(loaded & set(HEAVY[module])) == []
