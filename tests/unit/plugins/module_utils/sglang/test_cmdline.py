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
        (
            "sglang::scheduler_PP1_ATTN_CP2_MOE_DP0_TP11",
            "scheduler",
            {"PP": 1, "ATTN_CP": 2, "MOE_DP": 0, "TP": 11},
            None,
        ),
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


@pytest.mark.parametrize(
    "title",
    [
        "",
        "vim sglang::scheduler",
        "sglang::",
        "sglang::scheduler_TP0 extra",
        "sglang",
        "xsglang::scheduler",
        "sglang::router",  # the gateway in front of servers
    ],
)
def test_no_worker_role(title: str) -> None:
    assert cmdline.worker_role(title) is None


def launched(*words: str, files: dict[str, str] | None = None) -> cmdline.LaunchedFlags:
    found = cmdline.launched_flags(["python3", "-m", "sglang.launch_server", *words], (files or {}).get)
    assert found is not None
    return found


def test_flags_of_a_command_line() -> None:
    found = launched(
        *(
            "--model",
            "/m",
            "--tp",
            "2",
            "--mem-fraction-static=0.9",
            "--trust-remote-code",
            "--lora-target-modules",
            "q",
            "k",
        ),
        *("--random-seed", "-1", "--mem-frac", "0.8", "--chat-template", "a b", "--unknown-new", "x", "--unknown-bare"),
    )
    assert found.flags == {
        "model-path": "/m",
        "tp-size": "2",
        "mem-fraction-static": "0.8",
        "trust-remote-code": True,
        "lora-target-modules": ["q", "k"],
        "random-seed": "-1",
        "chat-template": "a b",
        "unknown-new": "x",
        "unknown-bare": True,
    }
    assert set(found.sources.values()) == {"command line"}
    assert (found.complete, found.problems) == (True, ())


def test_the_config_file_comes_before_the_command_line() -> None:
    found = launched(
        *("--config", "/c.yaml", "--port", "2"),
        files={"/c.yaml": "port: 1\ntp_size: 4\napi-key: secret-1\nenable-metrics: false\n"},
    )
    assert found.flags == {"port": "2", "tp-size": 4, "api-key": "********"}
    assert found.sources == {"port": "command line", "tp-size": "/c.yaml", "api-key": "/c.yaml"}
    assert found.config_path == "/c.yaml"


@pytest.mark.parametrize("files", [{}, {"/c.yaml": "a: [1"}, {"/c.yaml": "- 1"}])
def test_a_config_file_that_cannot_be_read_leaves_flags_unknown(files: dict[str, str]) -> None:
    found = launched("--config", "/c.yaml", "--port", "2", files=files)
    assert not found.complete
    assert "/c.yaml" in found.problems[0]
    assert found.flags == {"port": "2"}


@pytest.mark.parametrize("words", [["--config=/c.yaml"], ["--conf", "/c.yaml"]])
def test_the_ignored_forms_of_config_are_named_and_not_followed(words: list[str]) -> None:
    found = launched(*words, "--port", "2", files={"/c.yaml": "port: 1\ntp-size: 8\n"})
    assert found.flags == {"port": "2"}
    assert "ignores" in found.problems[0]


@pytest.mark.parametrize(
    "words", [["--api-key", "sk-1"], ["--api-key=sk-1"], ["--api", "sk-1"], ["--admin-api-key", "sk-1"]]
)
def test_secrets_never_come_out(words: list[str]) -> None:
    assert "sk-1" not in str(launched(*words))


def test_no_leader_has_no_flags() -> None:
    assert cmdline.launched_flags(["vim", "--port", "1"], lambda _path: None) is None


def test_of_a_command_line_that_was_cut_no_flag_is_known() -> None:
    """The last word wins, and it may stand behind what was read."""
    argv = ("python3", "-m", "sglang.launch_server", "--port", "30000")
    whole = cmdline.launched_flags(argv, lambda path: None)
    cut = cmdline.launched_flags(argv, lambda path: None, cut=True)
    assert whole is not None and (whole.flags, whole.complete) == ({"port": "30000"}, True)
    assert cut is not None and (cut.flags, cut.complete) == ({}, False)
