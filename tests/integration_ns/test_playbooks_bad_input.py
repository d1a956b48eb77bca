# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bad input: one clear error that names it, before anything was touched."""

from __future__ import annotations

import shutil
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.tests.integration_ns.playbook_host import PlaybookHost, refusal_of

SECRET = "Sesame-51a7-do-not-show"
SYSTEM_PYTHON = Path("/usr/bin/python3")


@pytest.fixture
def host(tmp_path: Path) -> PlaybookHost:
    one = PlaybookHost(tmp_path)
    one.servers = [one.server("chat", 31000, gpus=[0])]
    return one


def untouched(host: PlaybookHost, run: t.Any) -> None:
    """Not even connected to: every task that ran is one of the controller's own."""
    assert not run.of_action("command"), run.stdout
    assert not (host.directory / "state").exists()


@pytest.mark.parametrize(
    ("variables", "server", "words"),
    [
        ({"sglang_max_usd_mib": 64}, {}, ["gpu01", "'sglang_max_usd_mib'", "did you mean 'sglang_max_used_mib'?"]),
        ({}, {"prot": 31001}, ["server 'chat'", "unknown key 'prot'", "did you mean 'port'?"]),
        ({}, {"deadlines": {"trem": 3}}, ["server 'chat'", "deadlines", "'trem'", "did you mean 'term'?"]),
        ({}, {"port": "http"}, ["server 'chat'", "port", "int"]),
        ({}, {"port": 131000}, ["server 'chat'", "131000"]),
        ({}, {"scope": "all"}, ["server 'chat'", "scope", "server, sglang, gpu"]),
        ({}, {"name": "../etc"}, ["'../etc'"]),
        ({}, {"gpus": [0, "0"]}, ["server 'chat'", "GPU 0 is listed twice"]),
        ({}, {"gpus": [0], "device": "cpu"}, ["server 'chat'", "device is cpu"]),
        ({}, {"flags": {"tp_size": 1}}, ["server 'chat'", "'model_path' is missing"]),
        ({}, {"flags": {"model_path": "/m", "port": 1}}, ["server 'chat'", "'port'", "not as a flag"]),
        (
            {},
            {"flags": {"model_path": "/m", "tp_size": 1, "tp-size": 2}},
            ["server 'chat'", "'tp_size' is given twice"],
        ),
        ({"sglang_servers": "chat"}, {}, ["gpu01", "sglang_servers must be a list"]),
        ({"sglang_servers": []}, {}, ["no server is in play"]),
        ({"sglang_max_used_mib": "little"}, {}, ["gpu01", "sglang_max_used_mib", "int"]),
        ({"sglang_state_dir": "{{ state_folder }}"}, {}, ["gpu01", "sglang_state_dir", "'state_folder' is undefined"]),
    ],
    ids=lambda value: (
        None if isinstance(value, list) else (next(iter(value), "-") if isinstance(value, dict) else None)
    ),
)
def test_a_wrong_inventory_is_named_before_any_connection(
    host: PlaybookHost, variables: dict[str, t.Any], server: dict[str, t.Any], words: list[str]
) -> None:
    host.servers[0].update(server)
    host.variables.update(variables)
    run = host.run("relaunch.yml")
    message = refusal_of(run)
    for word in words:
        assert word in message, message
    untouched(host, run)


def test_all_mistakes_are_named_at_once(host: PlaybookHost) -> None:
    host.servers.append(host.server("chat", 31000, gpus=[1], colour="red"))
    message = refusal_of(host.run("relaunch.yml"))
    assert "name chat is used by more than one server" in message
    assert "port 31000 is used by more than one server" in message
    assert "unknown key 'colour'" in message


@pytest.mark.parametrize("wrong", [{"api_key": [SECRET]}, {"api_key": SECRET, "port": SECRET}])
def test_a_wrong_inventory_does_not_show_its_keys(host: PlaybookHost, wrong: dict[str, t.Any]) -> None:
    host.servers[0].update(wrong)
    run = host.run("relaunch.yml", "-vvv")
    refusal_of(run)
    assert SECRET not in run.stdout + run.stderr


@pytest.mark.parametrize("role", ["teardown", "clean_state", "launch", "verify"])
def test_a_role_called_wrongly_does_not_show_its_keys(host: PlaybookHost, role: str, tmp_path: Path) -> None:
    playbook = tmp_path / "wrong.yml"
    playbook.write_text(
        "- hosts: all\n  gather_facts: false\n  tasks:\n"
        f"    - ansible.builtin.include_role: {{name: cleanslate.sglang.{role}}}\n"
        f"      vars: {{{role}_server: ['{SECRET}'], {role}_become: maybe}}\n"
    )
    run = host.run(str(playbook))
    assert run.rc == 2, run.stdout
    assert f"{role}_become" in run.stdout, run.stdout
    assert SECRET not in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"server": "chta"}, ["'chta'", "did you mean 'chat'?", "gpu01/chat"]),
        ({"server": "gpu02/chat"}, ["'gpu02/chat'", "gpu01/chat"]),
        ({"relaunch_when": "chnaged"}, ["relaunch_when", "'chnaged'", "always, changed"]),
        ({"scope": "everything"}, ["scope", "'everything'", "server, sglang, gpu"]),
        ({"target": "gpus"}, ["'gpus'", "-e target=NAME"]),
    ],
)
def test_a_wrong_word_on_the_command_line_is_named(host: PlaybookHost, extra: dict[str, str], words: list[str]) -> None:
    run = host.run("relaunch.yml", extra_vars=extra)
    message = refusal_of(run)
    for word in words:
        assert word in message, message
    untouched(host, run)


def test_several_servers_are_refused_without_a_choice(host: PlaybookHost) -> None:
    host.servers.append(host.server("embed", 31001, gpus=[1]))
    run = host.run("relaunch.yml")
    message = refusal_of(run)
    for word in ("2 servers are in play", "gpu01/chat", "gpu01/embed", "-e server=", "-e all=true", "rollout"):
        assert word in message, message
    untouched(host, run)


def test_a_name_on_two_hosts_is_refused_without_a_host(host: PlaybookHost) -> None:
    host.other_hosts["gpu02"] = {"ansible_connection": "local", "sglang_servers": host.servers}
    message = refusal_of(host.run("relaunch.yml", extra_vars={"server": "chat"}))
    for word in ("2 servers are in play", "gpu01/chat", "gpu02/chat", "-e all=true"):
        assert word in message, message


def test_a_missing_gpu_is_named(host: PlaybookHost) -> None:
    host.servers[0]["gpus"] = [0, 7]
    message = refusal_of(host.run("relaunch.yml"))
    assert "server 'chat': there is no GPU 7; the host shows 0 (" in message
    assert "Nothing was touched" in message


def test_a_gpu_of_two_servers_is_named(host: PlaybookHost) -> None:
    host.servers.append(host.server("embed", 31001, gpus=["GPU-00000000-0000-0000-0000-000000000000"]))
    message = refusal_of(host.run("relaunch.yml", extra_vars={"server": "chat"}))
    assert "'chat' and 'embed' both use GPU 0" in message


def test_gpus_that_cannot_be_read_are_named(host: PlaybookHost) -> None:
    host.nvml.state.unlink()
    message = refusal_of(host.run("relaunch.yml"))
    assert "the GPUs can't be read" in message
    assert "Driver Not Loaded" in message


@pytest.mark.parametrize(("kind", "words"), [("absent", "is missing"), ("plain", "is not executable")])
def test_a_missing_interpreter_of_sglang_is_named(host: PlaybookHost, kind: str, words: str) -> None:
    python = host.directory / "python"
    if kind == "plain":
        python.write_text("not a program")
    host.servers[0]["python"] = str(python)
    message = refusal_of(host.run("relaunch.yml"))
    assert f"gpu01: server 'chat': python: {python} {words}" in message


def test_a_missing_account_is_named(host: PlaybookHost) -> None:
    host.servers[0]["user"] = "nobody-of-this-name"
    message = refusal_of(host.run("relaunch.yml"))
    assert "server 'chat'" in message
    assert "nobody-of-this-name" in message


def test_a_missing_interpreter_of_the_modules_is_named(host: PlaybookHost) -> None:
    host.variables["ansible_python_interpreter"] = "/opt/nowhere/bin/python3"
    message = refusal_of(host.run("relaunch.yml"))
    assert "gpu01: the Python interpreter for Ansible's modules is missing" in message
    assert "/opt/nowhere/bin/python3" in message


def test_a_missing_sudo_is_named(host: PlaybookHost) -> None:
    host.variables.update({"sglang_become": True, "ansible_become_exe": "/opt/nowhere/sudo"})
    # Root that becomes root needs no sudo; here it is asked for all the same.
    run = host.run("relaunch.yml", env={"ANSIBLE_BECOME_ALLOW_SAME_USER": "1"})
    assert run.rc == 2, run.stdout
    message = [task.result["msg"] for task in run.tasks if task.status == "failed"][-1]
    assert message.startswith("gpu01: there is no sudo to become root with"), message
    assert "sglang_become: false" in message
    assert not run.of_action("gpu_info"), run.stdout


@pytest.mark.skipif(shutil.which("su") is None or not SYSTEM_PYTHON.exists(), reason="needs su and /usr/bin/python3")
def test_a_lack_of_permission_is_named(host: PlaybookHost) -> None:
    host.variables.update(
        {
            "sglang_become": True,
            "ansible_become_method": "ansible.builtin.su",
            "ansible_become_user": "nobody",
            "ansible_become_flags": "-s /bin/sh",
            "ansible_python_interpreter": str(SYSTEM_PYTHON),
        }
    )
    message = refusal_of(host.run("relaunch.yml", env={"ANSIBLE_PIPELINING": "1"}))
    assert "gpu01: no permission: the tasks run as uid 65534" in message


UNREACHABLE = {
    "ansible_connection": "ssh",
    "ansible_host": "127.0.0.1",
    "ansible_port": 1,
    "ansible_ssh_common_args": "-o ConnectTimeout=5 -o BatchMode=yes",
}


def test_an_unreachable_host_is_named(host: PlaybookHost) -> None:
    host.variables.update(UNREACHABLE)
    message = refusal_of(host.run("relaunch.yml"))
    assert "gpu01: unreachable" in message
    assert "127.0.0.1 port 1" in message


def test_one_unreachable_host_keeps_the_others_untouched(host: PlaybookHost) -> None:
    host.other_hosts["gpu02"] = {"sglang_servers": host.servers, "sglang_become": False, **UNREACHABLE}
    run = host.run("relaunch.yml", extra_vars={"all": True})
    assert run.rc == 2, run.stdout
    first, second = (task for task in run.tasks if task.status == "failed" and not task.ignored)
    assert first.host == "gpu02"
    assert "gpu02: unreachable" in first.result["msg"]
    assert second.host == "gpu01"
    assert "Nothing was touched, since these hosts of the play failed their checks: gpu02" in second.result["msg"]
    assert not run.of_action("gpu_evict"), run.stdout
