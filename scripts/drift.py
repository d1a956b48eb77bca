# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check a fleet for drift and write reports: from a checkout, or from where the collection is installed.

    python3 scripts/drift.py -i inventory/mine --out /var/lib/cleanslate-drift

The work is in plugins/plugin_utils/drift_run.py; docs/drift-reports.md tells about it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def collections_path() -> Path:
    """The directory that holds ansible_collections: that of the installation, or the checkout's own."""
    root = Path(__file__).resolve().parent.parent
    if (root.parent.name, root.parent.parent.name) == ("cleanslate", "ansible_collections"):
        return root.parents[2]
    return root / ".collections"


if __name__ == "__main__":
    # In place of this file's own directory, which a program's imports have no business with.
    sys.path[0] = str(collections_path())
    from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_run import main

    sys.exit(main())
