# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A callback that makes many runs in a row cheap: the controller loads our plugins once and not in each of its workers,
and keeps the packed modules in the directory that HARNESS_PACKED names. Nothing of a run is another by it.
"""

from __future__ import annotations

DOCUMENTATION = r"""
name: harness_preload
type: aggregate
short_description: Load the collection's plugins before workers are forked
description:
  - Imports the collection's plugins before the first task and keeps packed modules in the directory named by the
    environment variable E(HARNESS_PACKED), which must be empty once a module has changed.
requirements:
  - enable in configuration
"""

import importlib
import os
import typing as t
from pathlib import Path

from ansible import constants
from ansible.plugins.callback import CallbackBase

COLLECTION = "ansible_collections.cleanslate.sglang.plugins"


class CallbackModule(CallbackBase):
    """See DOCUMENTATION."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "harness_preload"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_start(self, playbook: t.Any) -> None:
        package = importlib.import_module(COLLECTION)
        for kind in ("filter", "action"):
            for path in sorted(Path(next(iter(package.__path__)), kind).glob("*.py")):
                importlib.import_module(f"{COLLECTION}.{kind}.{path.stem}")
        packed = os.environ.get("HARNESS_PACKED")
        if packed:
            own: str = vars(constants)["DEFAULT_LOCAL_TMP"]
            os.symlink(packed, os.path.join(own, "ansiballz_cache"))
