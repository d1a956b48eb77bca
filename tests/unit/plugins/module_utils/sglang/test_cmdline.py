# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import cmdline


@pytest.mark.parametrize(
    "argv",
    [
        ["python3", "-m", "sglang.launch_server", "--model-path", "m"],
        ["/opt/v/bin/python3.12", "-u", "-m", "sglang.launch_server"],
        ["python", "-X", "dev", "-W", "ignore", "-B", "-m", "sglang.launch_server"],
        ["python", "-Xdev", "-um", "sglang.launch_server"],
        ["python", "-msglang.launch_server"],
        ["/opt/v/bin/python", "/opt/v/bin/sglang", "serve", "--port", "1"],
        ["/opt/v/bin/python", "-s", "/src/python/sglang/launch_server.py", "--port", "1"],
        ["python3", "--check-hash-based-pycs", "always", "-m", "sglang.launch_server"],
        ["python3", "-m", "sglang.cli.main", "serve"],
    ],
)
def test_leaders(argv: list[str]) -> None:
    assert cmdline.is_leader(argv)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        [""],
        ["vim", "sglang/launch_server.py"],
        ["bash", "-c", "python -m sglang.launch_server --port 1"],
        ["grep", "-r", "sglang.launch_server", "."],
        ["tail", "-f", "/var/log/sglang/serve"],
        ["python3", "-c", "import sglang.launch_server"],
        ["python3", "-m", "pytest", "-m", "sglang.launch_server"],
        ["python3", "editor.py", "-m", "sglang.launch_server"],
        ["python3", "-m", "sglang.bench_serving"],
        ["python3", "-m", "sglang_router.launch_router"],
        ["python3", "-m", "sglang.launch_server_lookalike"],
        ["python3", "/opt/v/bin/sglang", "generate"],
        ["python3", "/opt/v/bin/sglang"],
        ["python3", "-m"],
        ["python3", "-"],
        ["python-notebook-server", "-m", "sglang.launch_server"],
        ["sglang::scheduler_TP0"],
        ["python3", "-B", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork"],
    ],
)
def test_no_leaders(argv: list[str]) -> None:
    assert not cmdline.is_leader(argv)


@pytest.mark.parametrize(
    ("title", "kind", "ranks", "number"),
    [
        ("sglang::scheduler", "scheduler", {}, None),
        ("sglang::scheduler_TP3", "scheduler", {"TP": 3}, None),
        ("sglang::scheduler_DP0_TP1_EP0", "scheduler", {"DP": 0, "TP": 1, "EP": 0}, None),
        ("sglang::scheduler_PP1_ATTN_CP2_MOE_DP0_TP11", "scheduler", {"PP": 1, "ATTN_CP": 2, "MOE_DP": 0, "TP": 11}, None),
        ("sglang::detokenizer", "detokenizer", {}, None),
        ("sglang::detokenizer_router", "detokenizer_router", {}, None),
        ("sglang::data_parallel_controller", "data_parallel_controller", {}, None),
        ("sglang::tokenizer_worker:4711", "tokenizer_worker", {}, 4711),
        ("sgl_diffusion::scheduler_TP0  ", "scheduler", {"TP": 0}, None),
    ],
)
def test_worker_roles(title: str, kind: str, ranks: dict[str, int], number: int | None) -> None:
    role = cmdline.worker_role(title)
    assert role is not None
    assert (role.kind, dict(role.ranks), role.number) == (kind, ranks, number)


@pytest.mark.parametrize("title", ["", "vim sglang::scheduler", "sglang::", "sglang::scheduler_TP0 extra", "sglang", "xsglang::scheduler"])
def test_no_worker_role(title: str) -> None:
    assert cmdline.worker_role(title) is None
