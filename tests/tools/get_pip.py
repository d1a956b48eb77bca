# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stands in for get-pip.py, which ansible-test would load from a server of its own for each sanity test's venv.

ansible_test.py puts it where ansible-test looks for an earlier download.  It takes the interpreter's bundled pip and
then installs what was asked for from the configured package index.
"""

from __future__ import annotations

import os
import subprocess
import sys

# In a child: ensurepip points PIP_CONFIG_FILE at /dev/null in its own process, and the index's settings would be lost.
subprocess.check_call([sys.executable, "-m", "ensurepip"], stdout=subprocess.DEVNULL)
wanted = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
os.execv(
    sys.executable,
    [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--root-user-action=ignore", *wanted],
)
