# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How hard hypothesis tries. The same examples in every run, unless ``HYPOTHESIS_PROFILE=deep`` asks for many new ones.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Drawing whole hosts is slow on a busy machine; that is no fault of what is drawn.
_CALM = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)

settings.register_profile(
    "same", derandomize=True, max_examples=40, deadline=None, database=None, suppress_health_check=_CALM
)
settings.register_profile("deep", deadline=None, max_examples=5000, database=None, suppress_health_check=_CALM)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "same")
