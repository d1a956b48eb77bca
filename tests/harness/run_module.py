# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""usage: run_module.py NAME [--check] [--diff] < ARGUMENTS.json     run one of our modules and let it print its result.

No AnsiballZ: the module is imported from the collection and gets its arguments as a unit test would give them.
"""

from __future__ import annotations

import json
import runpy
import sys

from ansible.module_utils.testing import patch_module_args


def main() -> None:
    name, switches = sys.argv[1], sys.argv[2:]
    arguments = json.load(sys.stdin)
    arguments["_ansible_check_mode"] = "--check" in switches
    arguments["_ansible_diff"] = "--diff" in switches
    sys.argv[1:] = []
    with patch_module_args(arguments):
        runpy.run_module(
            f"ansible_collections.cleanslate.sglang.plugins.modules.{name}", run_name="__main__", alter_sys=True
        )


if __name__ == "__main__":
    main()
