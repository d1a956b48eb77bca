# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over the routers in front of a server."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.sglang.plugins.plugin_utils import router_settings

Row = dict[str, t.Any]


def router_wish(
    server: t.Mapping[str, t.Any],
    routers: t.Sequence[t.Mapping[str, t.Any]] | None = None,
    hooks: t.Sequence[t.Mapping[str, t.Any]] | None = None,
    address: str = "",
) -> Row:
    """The arguments of router_worker for one server."""
    return router_settings.wish(server, routers or (), hooks or (), str(address))


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "router_answer": router_settings.answer,
            "router_lines": router_settings.lines,
            "router_net_s": router_settings.net_s,
            "router_wish": router_wish,
        }
