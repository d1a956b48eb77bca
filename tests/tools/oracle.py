# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Our reading of SGLang's options against the parsers that SGLang's wheels build themselves:  oracle.py [VERSION ...]

For each version: the wheel from PyPI (kept in the cache), its own argparse parser in the engine's Python, every aspect
of every option compared, then random command lines and random flags: accepted by both or refused by both. Exit status
1 for any difference; versions that can't be had are skipped with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import typing as t
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import argv as argv_tools  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.flags_plan import judge_flags, words_of  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.errors import CleanSlateError  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.flags import render, to_yaml  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.option_table import OptionTable  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.options import read_options  # noqa: E402
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.rules import Rule, broken, read_rules  # noqa: E402
from ansible_collections.cleanslate.sglang.scripts.bootstrap import cache_dir  # noqa: E402
from ansible_collections.cleanslate.sglang.tests.oracle import compare, lines  # noqa: E402

VERSIONS = (
    *("0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15"),
    *("0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
RUNTIME = ROOT / "tests" / "oracle" / "runtime.py"
MARK = "@@oracle "
DOWNLOAD_DEADLINE_S = 120.0
IMPORT_DEADLINE_S = 180.0
ANSWER_DEADLINE_S = 30.0
LISTED = 20


class Unavailable(Exception):
    """A version can't be compared; the message says why."""


class Runtime:
    """SGLang's own parser in a process of its own; every wait has a deadline."""

    def __init__(self, python: Path, root: Path, stubs: t.Sequence[str], log: Path) -> None:
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [str(python), str(RUNTIME), str(root), *stubs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK.encode()):
                self._lines.put(line[len(MARK) :])
        self._lines.put(b"")

    def receive(self, deadline_s: float) -> dict[str, t.Any]:
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise Unavailable(f"no answer within {deadline_s:.0f} s") from None
        if not line:
            raise Unavailable("it ended")
        return t.cast("dict[str, t.Any]", json.loads(line))

    def ask(self, **asked: t.Any) -> dict[str, t.Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        return self.receive(ANSWER_DEADLINE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
        self._log.close()


@dataclass
class Counts:
    """What came out of one version."""

    version: str
    equal: dict[str, int] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    options: int = 0
    read_s: float = 0.0
    text_differs: list[str] = field(default_factory=list)
    accepted: int = 0
    refused: int = 0
    unjudged: int = 0
    disagreements: list[str] = field(default_factory=list)
    rules: str = ""
    unavailable: str = ""


def fetch_wheel(version: str, python: Path) -> Path:
    """The wheel of a version in the cache, from PyPI the first time. Its Python sources are the same for all tags."""
    folder = cache_dir() / "sglang-wheels"
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.glob(f"sglang-{version}-*.whl"))
    if not found:
        tags = ["--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_34_x86_64"]
        words = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", *tags]
        done = subprocess.run(
            [str(python), "-m", "pip", *words, "--dest", str(folder), f"sglang=={version}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_DEADLINE_S,
            check=False,
        )
        found = sorted(folder.glob(f"sglang-{version}-*.whl"))
        if not found:
            lines_ = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise Unavailable(f"no wheel: {(lines_ or ['pip gave none'])[-1][:160]}")
    return found[0]


def unpack(wheel: Path, target: Path) -> Path:
    """The sources of a wheel, without its tables of tuned kernels; the directory of its package."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if not name.endswith((".json", ".so"))])
    return target / "sglang"


def start_runtime(python: Path, root: Path, logs: Path, version: str) -> tuple[Runtime, dict[str, t.Any], str]:
    """The runtime and its description; without stubs if that works."""
    why = ""
    for stubs in ((), ("xgrammar",)):
        log = logs / f"oracle-{version}.log"
        runtime = Runtime(python, root, stubs, log)
        try:
            return runtime, runtime.receive(IMPORT_DEADLINE_S), " ".join(stubs)
        except Unavailable as error:
            runtime.close()
            tail = log.read_text(errors="replace").splitlines()
            why = f"{error}; {tail[-1][:160] if tail else 'no output'}"
    raise Unavailable(f"its parser can't be built in the engine's Python: {why}")


def compare_lines(table: OptionTable, runtime: Runtime, counts: Counts, number: int) -> None:
    """Random command lines, by the words alone."""
    for words in lines.command_lines(table, counts.version, number):
        parsed = argv_tools.parse(words, table)
        theirs = runtime.ask(argv=words)
        if parsed.unjudged and not parsed.problems:
            counts.unjudged += 1
        elif (not parsed.problems) != theirs["ok"]:
            ours = "; ".join(problem.message for problem in parsed.problems) or "accepted"
            counts.disagreements.append(f"{words}: ours: {ours}; its own: {theirs['why'] or 'accepted'}")
        else:
            counts.accepted += theirs["ok"]
            counts.refused += not theirs["ok"]


def compare_mappings(table: OptionTable, runtime: Runtime, counts: Counts, number: int) -> None:
    """Random flags as they would be launched: our verdict against SGLang's, and the words that it makes of the file."""
    for flags in lines.mappings(table, counts.version, number):
        findings, _canonical = judge_flags(flags, table, counts.version)
        denied = [finding for finding in findings if finding.severity == "deny"]
        unknown = [finding for finding in findings if finding.severity == "unknown"]
        try:
            rendered = render(flags, table)
        except CleanSlateError as error:  # it can't be launched at all
            if not denied:
                counts.disagreements.append(f"{flags}: accepted, and can't be written: {error}")
            continue
        theirs = runtime.ask(config=to_yaml(rendered.config), argv=list(rendered.argv))
        if theirs["words"] is not None and not denied and theirs["words"] != words_of(flags, table):
            counts.disagreements.append(f"{flags}: words {words_of(flags, table)}, its own {theirs['words']}")
        elif unknown and not denied:
            counts.unjudged += 1
        elif (not denied) != theirs["ok"]:
            ours = "; ".join(finding.message for finding in denied) or "accepted"
            counts.disagreements.append(f"{flags}: ours: {ours}; its own: {theirs['why'] or 'accepted'}")
        else:
            counts.accepted += theirs["ok"]
            counts.refused += not theirs["ok"]


def compare_rules(rules: t.Sequence[Rule], table: OptionTable, runtime: Runtime, counts: Counts) -> None:
    """Combinations that we deny or warn of, against SGLang's own checks on a CPU with the tiny model."""
    base = ["--model-path", str(cache_dir() / "tiny-model"), "--device", "cpu"]
    plain = runtime.ask(argv=base, resolve=True)
    if not plain["ok"]:
        counts.rules = f"{len(rules)} read; its own checks don't run here: {plain['why'][:120]}"
        return
    found = {"denied": 0, "warned": 0, "quiet": 0, "warned and accepted": 0}
    for rule in rules:
        words = lines.conflict(rule, table)
        if words is None:
            continue
        values = argv_tools.parse(words, table, required=False).values
        fired = [sure for _rule, sure in broken([rule], values, table)]
        kind = "quiet" if not fired else "denied" if fired[0] else "warned"
        found[kind] += 1
        if not fired or not runtime.ask(argv=[*base, *words], resolve=True)["ok"]:
            continue
        if kind == "denied":
            counts.disagreements.append(f"{words}: denied by {rule.place} ({rule.message}); its own: accepted")
        else:  # the warning says so: SGLang changed one of them itself before its check
            found["warned and accepted"] += 1
    counts.rules = ", ".join(f"{number} {kind}" for kind, number in found.items()) + f"; {len(rules)} read"


def judge(version: str, python: Path, logs: Path, number: int) -> Counts:
    counts = Counts(version)
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        try:
            package = unpack(fetch_wheel(version, python), Path(scratch))
        except (Unavailable, subprocess.TimeoutExpired, OSError, zipfile.BadZipFile) as error:
            counts.unavailable = f"skipped: {error}"
            return counts
        started = time.monotonic()
        table = read_options(str(package))
        counts.read_s = time.monotonic() - started
        if table is None:
            counts.differing.append("the reader found no options")
            return counts
        rules = read_rules(str(package), table)
        counts.options = len(table.options)
        counts.text_differs = sorted(table.names ^ compare.names_by_text(package))
        try:
            runtime, described, stubs = start_runtime(python, Path(scratch), logs, version)
        except (Unavailable, OSError) as error:
            counts.unavailable = f"runtime parser not available: {error}"
            return counts
        try:
            counts.equal, counts.differing = compare.differences(table, described)
            compare_lines(table, runtime, counts, number)
            compare_mappings(table, runtime, counts, number)
            compare_rules(rules, table, runtime, counts)
        finally:
            runtime.close()
        if stubs:
            counts.unavailable = f"with an empty {stubs}"
    return counts


def show(counts: Counts) -> None:
    equal = " ".join(f"{aspect} {counts.equal.get(aspect, 0)}" for aspect in compare.ASPECTS) if counts.equal else "-"
    print(f"{counts.version}: {counts.options} options read in {counts.read_s:.2f} s {counts.unavailable}".rstrip())
    if counts.options:
        print(
            f"  names by text: {'equal' if not counts.text_differs else 'different: ' + ' '.join(counts.text_differs)}"
        )
    if counts.equal:
        print(f"  equal: {equal}; not known to us {counts.equal['unread']}; different: {len(counts.differing)}")
        print(
            f"  lines: {counts.accepted} accepted by both, {counts.refused} refused by both, {counts.unjudged} not "
            f"judged; disagreements: {len(counts.disagreements)}"
        )
        print(f"  combinations: {counts.rules}")
    for line in [*counts.differing, *counts.disagreements][:LISTED]:
        print(f"    {line}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), help="default: 0.5.10 to 0.5.23")
    parser.add_argument("--lines", type=int, default=1000, help="random command lines, and as many mappings of flags")
    arguments = parser.parse_args()
    engine = cache_dir() / "engine" / "bin" / "python"
    logs = ROOT / "build" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if not engine.exists():
        print("no engine (make engine): runtime parsers are not available, names are compared by text alone")
    python = engine if engine.exists() else Path(sys.executable)
    results = []
    for version in arguments.versions:
        results.append(judge(version, python, logs, arguments.lines))
        show(results[-1])
    compared = [each for each in results if each.equal]
    bad = [each for each in results if each.differing or each.disagreements or each.text_differs]
    print(
        f"{len(compared)} of {len(results)} versions compared with their own parser; options "
        f"{sum(each.options for each in compared)}, differences {sum(len(each.differing) for each in results)}; lines "
        f"{sum(each.accepted + each.refused for each in results)}, "
        f"disagreements {sum(len(each.disagreements) for each in results)}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
