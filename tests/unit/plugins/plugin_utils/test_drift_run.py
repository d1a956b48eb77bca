# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The runner's command line, what it reads of Ansible's output, and who is told when. Nothing is started here."""

from __future__ import annotations

import json
import os
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.spawn import Completed
from ansible_collections.cleanslate.sglang.plugins.plugin_utils import drift_notify, drift_run
from ansible_collections.cleanslate.sglang.plugins.plugin_utils.drift_notify import Hook
from ansible_collections.cleanslate.sglang.tests.harness.command import ROOT
from ansible_collections.cleanslate.sglang.tests.unit.drift_builders import answer, document, event, ok, row, server

LISTED = """
playbook: /x/drift.yml

  play #1 (sglang): Check for drift\tTAGS: []
    pattern: ['sglang']
    hosts (2):
      gpu01
      gpu02

  play #2 (all,localhost): See that somebody was checked\tTAGS: []
    pattern: ['all', 'localhost']
    hosts (3):
      gpu01
      gpu02
      pve1
"""


def test_the_hosts_that_must_answer_are_those_of_the_first_play() -> None:
    assert drift_run.listed_plays(LISTED) == [
        drift_run.Play("sglang", ("gpu01", "gpu02")),
        drift_run.Play("all,localhost", ("gpu01", "gpu02", "pve1")),
    ]
    nobody = drift_run.listed_plays(LISTED.replace("hosts (2):\n      gpu01\n      gpu02", "hosts (0):"))
    assert (nobody[0].hosts, len(nobody[1].hosts)) == ((), 3)
    many = "\n".join(f"      h{number}" for number in range(12))
    plays = "".join(f"  play #{n} (x): y\tTAGS: []\n    hosts (12):\n{many}\n" for n in range(1, 12))
    assert [len(each.hosts) for each in drift_run.listed_plays(plays)] == [12] * 11
    assert drift_run.listed_plays("") == []


@pytest.mark.parametrize(
    "words",
    [["-l", "a"], ["-la"], ["--limit", "a"], ["--limit=a"], ["--lim", "a"], ["--limit", "b", "-v", "-l", "a"]],
)
def test_a_limit_behind_the_two_dashes_is_one(words: list[str], tmp_path: Path) -> None:
    found = drift_run.parse(["-i", "x,", "--out", str(tmp_path), "--", *words])
    assert (found.limit, found.arguments) == ("a", tuple(words))


def test_what_looks_like_a_limit_and_is_none(tmp_path: Path) -> None:
    found = drift_run.parse(["-i", "x,", "--out", str(tmp_path), "--", "--list-tags", "-v", "--diff"])
    assert found.limit is None
    # Of two the last one counts, as for ansible-playbook.
    found = drift_run.parse(["-i", "x,", "--out", str(tmp_path), "-l", "b", "--", "-l", "a"])
    assert (found.limit, found.arguments) == ("a", ("--limit=b", "-l", "a"))


def listing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, everybody: str) -> drift_run._Site:
    """A site whose ansible-playbook lists these hosts where nothing limits it."""
    (tmp_path / "project").mkdir()
    site = object.__new__(drift_run._Site)
    site.directory, site.program, site.arguments = tmp_path, "ansible-playbook", ["-l", "a"]
    site.options = drift_run.parse(["-i", "x,", "--out", str(tmp_path)])

    def answers(argv: t.Sequence[str], *_rest: t.Any) -> Completed:
        assert argv[-3:-1] == ["--limit", "all"]
        plays = ""
        for number, names in enumerate((target, everybody), 1):
            hosts = "".join(f"      {name}\n" for name in names)
            plays += f"  play #{number} (x): y\tTAGS: []\n    pattern: ['x']\n    hosts ({len(names)}):\n{hosts}\n"
        return Completed(0, plays, "")

    monkeypatch.setattr(drift_run, "run_bounded", answers)
    return site


def test_only_who_left_the_inventory_leaves_the_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """a was asked; b is in its group too, c is in the inventory, d is not."""
    site = listing(monkeypatch, tmp_path, "ab", "abc")
    # A limit that nobody recognised as one, however it was written: b stays. c has left the group of all servers.
    assert site.gone(drift_run.Play("sglang", ("a",)), "abcd") == {"c", "d"}
    # A target is a part of the fleet.
    assert site.gone(drift_run.Play("a", ("a",)), "abcd") == {"d"}
    # Nobody is missing, or a limit was asked for: nothing to ask.
    monkeypatch.setattr(drift_run, "run_bounded", None)
    assert site.gone(drift_run.Play("sglang", ("a", "b")), "ab") == frozenset()
    site.options = drift_run.parse(["-i", "x,", "--out", str(tmp_path), "-l", "a"])
    assert site.gone(drift_run.Play("sglang", ("a",)), "ab") == frozenset()


def test_a_hook_s_words_are_in_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """curl names the address that it could not reach, and that of a chat's web hook is its key."""
    complaint = "curl: (22) https://chat.example/hooks/T0/B0/SecretPath-1 said 500"
    monkeypatch.setattr(drift_notify, "run_bounded", lambda *_arguments: Completed(22, complaint, complaint))
    told = drift_notify.tell(Hook(("/usr/local/bin/notify",)), drifted(), "/out", "2026-01-31T00:00:00Z")
    assert (told["ok"], told["rc"], told["problem"]) == (False, 22, "exit status 22")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("ERROR! the playbook: x could not be found\n", "ERROR! the playbook: x could not be found"),
        ("\x1b[0;31m[ERROR]: No vault\nsecrets found\x1b[0m\n\nmore", "[ERROR]: No vault secrets found"),
        ("[WARNING]: Unable to parse\n/x\n[WARNING]: No hosts\n", "[WARNING]: Unable to parse /x [WARNING]: No hosts"),
        ("Traceback\n  File x\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("", ""),
    ],
)
def test_ansible_s_own_words(output: str, words: str) -> None:
    assert drift_run.last_error(output) == words


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "-i inv -i a,b -l gpu* -c local -e @v.yml -f 9 --vault-password-file p --out out --notify"
    options = drift_run.parse([*words.split(), "mail -s 'two words'", "--", "-u", "root", "--", "x"])
    assert options.inventory == (str(tmp_path / "inv"), "a,b")
    assert options.arguments == ("-e", "@v.yml", "--vault-password-file", "p", "-c", "local", "-f", "9",
                                 "--limit=gpu*", "-u", "root", "--", "x")  # fmt: skip
    assert options.limit == "gpu*"
    assert (options.limit, options.out) == ("gpu*", tmp_path / "out")
    assert options.hook == Hook(("mail", "-s", "two words"))


@pytest.mark.parametrize(
    "wrong",
    [
        ["--timeout", "0"],
        ["--timeout", "inf"],
        ["--keep-days", "0"],
        ["--keep-mb", "nan"],
        ["--fresh-s", "-1"],
        ["--forks", "0"],
        ["--notify", ""],
        ["--notify", "'"],
        ["--no-such-option"],
        ["--time", "5"],
    ],
)
def test_a_command_line_that_makes_no_sense(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        drift_run.parse(["--out", "/x", *wrong])
    assert ended.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_the_version_is_that_of_the_checkout_or_of_the_installation(tmp_path: Path) -> None:
    assert drift_run.collection_version(ROOT) not in (None, "")
    assert drift_run.collection_version(tmp_path) is None
    (tmp_path / "MANIFEST.json").write_text('{"collection_info": {"version": "9.8.7"}}')
    assert drift_run.collection_version(tmp_path) == "9.8.7"


def test_a_kept_run_has_no_secrets(tmp_path: Path) -> None:
    events = tmp_path / "artifacts" / "run" / "job_events"
    events.mkdir(parents=True)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "cmdline").write_text("-e api_key=sk-1")
    (tmp_path / "artifacts" / "run" / "command").write_text('{"env": {"OTHER": "sk-2"}}')
    (tmp_path / "artifacts" / "run" / "stdout").write_text("--api-key sk-3\nfine\n")
    asked = {"module_args": {"servers": [{"environment": {"HF_TOKEN": "sk-4"}}]}}
    (events / "1-x.json").write_text(json.dumps({"event_data": {"res": {"invocation": asked}}}))
    (events / "2-partial.json").write_text('{"api_key": "sk-5"')
    told = {"text": json.dumps({"admin_api_key": "sk-known-6"}), "stdout": "escaped too often: sk-known-6"}
    (events / "3-y.json").write_text(json.dumps(told))
    (tmp_path / "link").symlink_to("/etc/hostname")
    drift_run.scrub(tmp_path)
    kept = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()}
    assert set(kept) == {"stdout", "1-x.json", "2-partial.json", "3-y.json"}
    assert "sk-" not in "".join(kept.values()) and "fine" in kept["stdout"]
    assert json.loads(kept["1-x.json"])["event_data"]["res"]


# --- who is told ------------------------------------------------------------------------------------------------------


def in_sync(previous: t.Any = None, **changes: t.Any) -> dict[str, t.Any]:
    return document(ok("a", answer([server()])), expected=["a"], previous=previous, **changes)


def drifted(previous: t.Any = None) -> dict[str, t.Any]:
    return document(ok("a", answer([server("chat", [row("user")])])), expected=["a"], previous=previous)


def test_somebody_is_told_of_what_is_new() -> None:
    hook = Hook(("mail",))
    first, second = in_sync(), drifted()
    assert not drift_notify.is_due(hook, first, None)
    assert drift_notify.is_due(hook, second, None)
    assert drift_notify.is_due(hook, drifted(first), first)
    assert not drift_notify.is_due(hook, drifted(second), second)
    assert drift_notify.is_due(hook, in_sync(second), second)  # it is well again
    gone = document(event("runner_on_unreachable", "a", {"msg": "x"}), expected=["a"], previous=first)
    assert drift_notify.is_due(hook, gone, first)


def test_what_could_not_be_delivered_is_told_again() -> None:
    second = drifted()
    second["notification"] = {"at": second["generated_at"], "command": "mail", "ok": False, "rc": 1, "problem": "x"}
    assert drift_notify.is_due(Hook(("mail",)), drifted(second), second)
    second["notification"]["ok"] = True
    assert not drift_notify.is_due(Hook(("mail",)), drifted(second), second)


def test_the_other_choices_of_when() -> None:
    quiet, bad = in_sync(), drifted()
    assert [drift_notify.is_due(Hook(("m",), "problem"), each, each) for each in (quiet, bad)] == [False, True]
    assert [drift_notify.is_due(Hook(("m",), "always"), each, each) for each in (quiet, bad)] == [True, True]


def test_a_message_fits_a_pipe_and_says_what_was_left_out() -> None:
    rows = [row(f"env:X{number}", wanted="w" * 500, found={"x": "f" * 500}) for number in range(60)]
    events = [ok(f"gpu{number:03d}", answer([server("chat", rows)])) for number in range(40)]
    found = document(*events, expected=[])
    raw = drift_notify.message(found, "/out")
    assert len(raw) <= 65536
    told = json.loads(raw)
    assert told["schema"] == drift_notify.SCHEMA and told["verdict"] == "drifted"
    assert told["hosts"] and told["hosts_cut"] == 40 - len(told["hosts"])
    assert (len(told["hosts"][0]["rows"]), told["hosts"][0]["rows_cut"]) == (20, 40)
    small = json.loads(drift_notify.message(drifted(), "/out"))
    assert [each["rows"][0]["item"] for each in small["hosts"]] == ["user"] and small["hosts_cut"] == 0


def test_environment_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANSIBLE_SSH_CONTROL_PATH_DIR", raising=False)
    site = object.__new__(drift_run._Site)
    site.program = "/opt/x/bin/ansible-playbook"
    site.directory = Path("/var/lib/cleanslate-drift/.runs/20260131T")
    found = site.environment()
    assert found["PATH"].split(os.pathsep, maxsplit=1)[0] == "/opt/x/bin"
    assert found["ANSIBLE_SSH_CONTROL_PATH_DIR"] == "/var/lib/cleanslate-drift/.runs/20260131T/cp"
    # A socket's path is short: in a deep directory ssh would fail, so its own place is taken.
    site.directory = tmp_path / ("d" * 80)
    assert "ANSIBLE_SSH_CONTROL_PATH_DIR" not in site.environment()
    site.directory = Path("/o")
    monkeypatch.setenv("ANSIBLE_SSH_CONTROL_PATH_DIR", "/mine")
    assert "ANSIBLE_SSH_CONTROL_PATH_DIR" not in site.environment()
