# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What each module says of itself: check mode, diff mode, idempotence, action group."""

from __future__ import annotations


class ModuleDocFragment:
    # A module that uses this one alone must add `support` to each attribute itself.
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Can run in C(check_mode) and tell what would change without changing the target.
  diff_mode:
    description: Returns what changed (or would change in C(check_mode)) when in diff mode.
  idempotent:
    description: A second run with the same arguments, on a host that did not change in between, changes nothing.
"""

    INFO_MODULE = r"""
options: {}
attributes:
  check_mode:
    support: full
    details:
      - This module only looks; it changes nothing, in check mode or out of it.
  diff_mode:
    support: N/A
    details:
      - This module only looks; there is never a difference to show.
  idempotent:
    support: full
    details:
      - This module only looks; it never reports a change.
"""

    ACTIONGROUP_SGLANG = r"""
options: {}
attributes:
  action_group:
    description: Use C(group/cleanslate.sglang.sglang) in C(module_defaults) to set defaults for this module.
    support: full
    membership:
      - cleanslate.sglang.sglang
"""
