# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import typing as t

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import proof
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.http import Endpoint, Response


@pytest.mark.parametrize(
    ("version", "ranks", "names"),
    [
        ("0.5.15", 1, set()),
        ("0.5.15", 2, {"routed_dp_rank"}),
        ("0.5.12.post1", 2, {"routed_dp_rank"}),
        ("0.5.11", 2, {"data_parallel_rank"}),
        (None, 2, {"routed_dp_rank", "data_parallel_rank"}),
        ("main", 2, {"routed_dp_rank", "data_parallel_rank"}),
    ],
)
def test_the_rank_is_named_as_the_version_knows_it(
    monkeypatch: pytest.MonkeyPatch, version: str | None, ranks: int, names: set[str]
) -> None:
    sent: list[dict[str, t.Any]] = []

    def keep(_endpoint: Endpoint, _method: str, _path: str, _deadline_s: float, body: dict[str, t.Any]) -> Response:
        sent.append(body)
        return Response(200, b"", 0.0)

    monkeypatch.setattr(proof, "request", keep)
    proof.generate(Endpoint("h", 1), 1, ranks, version, 5)
    assert {name for name in sent[0] if name.endswith("dp_rank") or name.endswith("parallel_rank")} == names
    assert {sent[0][name] for name in names} <= {1}
