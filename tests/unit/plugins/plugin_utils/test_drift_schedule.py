# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The schedule's command, its quoting for systemd and cron, and what is said of one that would not run."""

from __future__ import annotations

import shlex
import typing as t

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.cleanslate.sglang.plugins.filter.drift import FilterModule
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import drift_schedule

SETTINGS: dict[str, t.Any] = {
    "host": "gpu01",
    "kind": "systemd",
    "name": "cleanslate-drift",
    "pull": False,
    "collection": "/opt/cs",
    "python": "/opt/venv/bin/python",
    "inventory": ["/etc/cs/inventory"],
    "target": "",
    "limit": "",
    "vault_password_file": "",
    "user": "watch",
    "out": "/var/lib/cs",
    "on_calendar": ["hourly"],
    "random_delay": "5min",
    "cron": "7 * * * *",
    "timeout_s": 900,
    "forks": 0,
    "metrics": "",
    "keep_days": 0,
    "keep_mb": 0,
    "fresh_s": 0,
    "notify": "",
    "notify_when": "",
    "arguments": [],
    "environment": {},
    "on_failure": [],
}
WELL = {"rc": 0}
LOOKED: dict[str, t.Any] = {
    "user": WELL,
    "systemd": {"stat": {"exists": True}},
    "calendar": {"results": [{**WELL, "item": "hourly"}]},
    "packages": WELL,
    "runner": WELL,
    "files": {"results": [{**WELL, "item": ["inventory", "/etc/cs/inventory"]}]},
}


def command(**changes: t.Any) -> list[str]:
    return drift_schedule.command({**SETTINGS, **changes})


def problems(looked: dict[str, t.Any] | None = None, **changes: t.Any) -> list[str]:
    return drift_schedule.problems({**SETTINGS, **changes}, {**LOOKED, **(looked or {})})


def test_the_command_of_a_control_node() -> None:
    words = command()
    assert words[:4] == ["/opt/venv/bin/python", "/opt/cs/scripts/drift.py", "-i", "/etc/cs/inventory"]
    assert words[4:] == ["--out", "/var/lib/cs", "--timeout", "900"]
    more = command(
        inventory=["/a", "/b"],
        limit="gpu*",
        target="lab",
        vault_password_file="/etc/cs/vault",
        notify="/usr/local/bin/tell --to 'the team'",
        notify_when="always",
        keep_days=30,
        forks=50,
        arguments=["--keep-run"],
    )
    text = " ".join(more)
    for each in ("-i /a -i /b", "--limit gpu*", "-e target=lab", "--vault-password-file /etc/cs/vault"):
        assert each in text, text
    assert more[more.index("--notify") + 1] == "/usr/local/bin/tell --to 'the team'"
    assert "--notify-when always" in text
    assert ("--keep-days 30" in text, "--forks 50" in text, more[-1]) == (True, True, "--keep-run")
    assert "--metrics" not in more and "--keep-mb" not in more


def test_a_host_that_checks_itself_asks_nobody_else() -> None:
    words = command(pull=True, limit="all")
    assert words[4:8] == ["--limit", "gpu01", "-e", "ansible_connection=local"]
    assert words.count("--limit") == 1


def test_systemd_expands_nothing() -> None:
    filters = FilterModule().filters()
    words = ["/bin/echo", "100 %h", "$HOME", 'a "b"', "c\\d", "plain"]
    text = filters["systemd_words"](words)
    assert text == '/bin/echo "100 %%h" "$$HOME" "a \\"b\\"" "c\\\\d" plain'
    with pytest.raises(AnsibleFilterError, match="control character"):
        filters["systemd_words"](["a\nExecStart=/bin/other"])
    lines = filters["systemd_environment"]({"B": 'x "y" 5% $Z', "A": 1})
    assert lines == ['"A=1"', '"B=x \\"y\\" 5%% $Z"']


def test_cron_has_a_deadline_and_takes_percent_literally() -> None:
    line = drift_schedule.cron_command(["/bin/run", "5 %"], {"NAME": "a b"}, 900, "cleanslate-drift")
    assert "\\%" in line and "%" not in line.replace("\\%", "")
    words = shlex.split(line.replace("\\%", "%"))
    assert words[:3] == ["timeout", "--kill-after=90", "1080"]
    assert words[3:7] == ["env", "NAME=a b", "/bin/run", "5 %"]
    assert words[7:] == ["2>&1", "|", "logger", "-t", "cleanslate-drift"]


def test_what_would_run_has_no_problem() -> None:
    assert problems() == []
    assert problems({"systemd": {"stat": {"exists": False}}, "calendar": {"results": []}}, kind="cron") == []


@pytest.mark.parametrize(
    ("looked", "changes", "words"),
    [
        ({"user": {"rc": 1}}, {}, "there is no account 'watch'"),
        ({"systemd": {"stat": {"exists": False}}, "calendar": {"results": [{"skipped": True}]}}, {}, "kind: cron"),
        (
            {"calendar": {"results": [{"rc": 1, "item": "often", "stderr": "Failed to parse 'often'"}]}},
            {},
            "systemd does not understand 'often': Failed to parse 'often'",
        ),
        (
            {"packages": {"rc": 1, "stderr": "Traceback\nModuleNotFoundError: No module named 'ansible_runner'"}},
            {},
            "No module named 'ansible_runner'; install requirements/drift.txt",
        ),
        ({"packages": {"failed": True, "msg": "No such file: /opt/venv/bin/python"}}, {}, "No such file"),
        ({"runner": {"rc": 2, "stderr": "can't open file"}}, {}, "/opt/cs/scripts/drift.py can't be run by watch"),
        (
            {"files": {"results": [{"rc": 1, "item": ["vault_password_file", "/etc/cs/vault"]}]}},
            {},
            "vault_password_file: watch can't read /etc/cs/vault",
        ),
        ({}, {"name": "../x"}, "no name of a unit"),
        ({}, {"out": "reports"}, "absolute path"),
        ({}, {"timeout_s": 0}, "above 0 seconds"),
        ({}, {"cron": "* * *"}, "no time of cron"),
        ({}, {"cron": "* * * * *\n* * * * * root evil"}, "no time of cron"),
        ({}, {"inventory": []}, "inventory: say which"),
        ({}, {"environment": {"A-B": 1}}, "'A-B' is no name of a variable"),
        ({}, {"environment": {"A": "x\ny"}}, "line break"),
        ({}, {"on_calendar": ["hourly\nExecStart=x"]}, "line break"),
    ],
)
def test_what_would_not_run_is_named(looked: dict[str, t.Any], changes: dict[str, t.Any], words: str) -> None:
    found = problems(looked, **changes)
    assert any(words in each for each in found), found


def test_files_to_read_leave_out_lists_of_hosts() -> None:
    settings = {**SETTINGS, "inventory": ["gpu01,gpu02", "/etc/cs/inventory"], "vault_password_file": "/etc/cs/vault"}
    found = drift_schedule.files(settings)
    assert found == [["inventory", "/etc/cs/inventory"], ["vault_password_file", "/etc/cs/vault"]]
