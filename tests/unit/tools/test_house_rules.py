# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The house rules find what they are for, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.tools.house_rules import check_header, check_layers

CORE = Path("plugins/module_utils")


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("decide/clean.py", "from ..observe import nvml", "decide imports observe"),
        ("decide/clean.py", "from ..observe.nvml import read", "decide imports observe"),
        ("decide/clean.py", "from ..act.signals import end", "decide imports act"),
        ("observe/nvml.py", "from ..act import signals", "observe imports act"),
        (
            "decide/clean.py",
            "from ansible_collections.cleanslate.sglang.plugins.module_utils.observe.nvml import read",
            "decide imports observe",
        ),
        ("model.py", "from ansible.module_utils.basic import AnsibleModule", "only modules may import Ansible"),
        ("observe/nvml.py", "import subprocess", "one place that spawns"),
    ],
)
def test_a_broken_layer_is_found(path: str, text: str, found: str) -> None:
    lines = list(check_layers(CORE / path, text + "\n"))
    assert len(lines) == 1
    assert found in lines[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("decide/clean.py", "from ..model import Gpu\nfrom .holders import killable"),
        ("spawn.py", "import subprocess"),
        ("act/climb.py", "from ..observe.nvml import read\nfrom ..decide.clean import judge"),
    ],
)
def test_a_kept_layer_passes(path: str, text: str) -> None:
    assert list(check_layers(CORE / path, text + "\n")) == []


def test_modules_may_import_ansible() -> None:
    assert list(check_layers(Path("plugins/modules/gpu_info.py"), "import ansible\n")) == []


def test_a_file_without_licence_is_found() -> None:
    assert len(list(check_header(Path("a.py"), "import os\n"))) == 1
    assert list(check_header(Path("a.py"), "# SPDX-License-Identifier: GPL-3.0-or-later\nimport os\n")) == []
    assert list(check_header(Path("__init__.py"), "")) == []
