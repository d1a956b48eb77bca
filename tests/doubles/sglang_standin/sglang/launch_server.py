# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``python -m sglang.launch_server ...``: the older of SGLang's two entry points."""

from __future__ import annotations

import sys

# Imports stay below this line: multiprocessing's spawned children run this file too, under the name __mp_main__.
if __name__ == "__main__":
    from sglang.standin.leader import main

    main(sys.argv[1:])
