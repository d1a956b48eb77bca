# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""relaunch over a real ssh connection that is lost at each of its steps, and with a controller that is killed at each.

What is right is the same everywhere: nothing is claimed of what nobody saw, nobody dies but the named server, what was
begun on the host ends by itself, and the next run brings the server up.
"""

from __future__ import annotations

import functools
import time
import typing as t

from ansible_collections.cleanslate.sglang.tests.faults.light_site import LightSite, Running, where_it_ended
from ansible_collections.cleanslate.sglang.tests.faults.model import Answer, Row
from ansible_collections.cleanslate.sglang.tests.faults.patches import Patch
from ansible_collections.cleanslate.sglang.tests.faults.rows_runs import NOT_JUDGED, SILENT
from ansible_collections.cleanslate.sglang.tests.harness.playbook import PlaybookRun

BACK_AFTER_S = 5
BEFORE_ANYTHING = ("plan", "lease")  # steps in which the old server must still be there
BOUND_S = 420.0


def again(site: LightSite, codes: t.Iterable[str], verdict: str, until: float) -> Answer:
    """The next run, once the modules of the first one are at their end: ``verdict`` if it makes one server serve."""
    if not site.modules_end():
        return Answer("kept running", frozenset(codes), f"modules {site.modules()}")
    second = site.begin().end(until - time.monotonic())
    leaders = site.leaders()
    if second.rc != 0 or "SERVING" not in second.stdout:
        return Answer("stuck", frozenset(codes), f"the next run: rc {second.rc}: {second.stdout[-1500:]}")
    if leaders != {site.recorded()}:
        return Answer("two servers", frozenset(codes), f"leaders {leaders}, recorded {site.recorded()}")
    return Answer(verdict, frozenset(codes))


def left_alone(site: LightSite, old: set[int], step: str) -> Answer | None:
    """None, or what is wrong: before anything may be touched the old server is there, by its record and alone."""
    if step in BEFORE_ANYTHING and (site.leaders() != old or {site.recorded()} != old):
        seen = f"leaders {site.leaders()}, recorded {site.recorded()}"
        return Answer("touched", text=f"in the step {step}: {seen} instead of {old}")
    return None


def claim_of(run: PlaybookRun) -> str:
    """``unknown`` where the run claims nothing."""
    if run.rc == 0:
        return "serving" if "SERVING" in run.stdout else "done"
    return "unknown"


def lost(step: str, back: bool, site: LightSite) -> None:
    """The host is gone with all its connections; it is back after some seconds, or only after the run."""
    site.old_server()
    old = site.leaders()

    def run() -> Answer:
        until = time.monotonic() + site.deadline_s
        first = site.begin()
        site.reach(first, step)
        site.gone()
        if back:
            time.sleep(BACK_AFTER_S)
            site.host.find()
        done = first.end(until - time.monotonic())
        if not back:
            site.host.find()
        site.network.wait_answers(site.host)
        claim, codes = claim_of(done), [where_it_ended(done)]
        if claim != "unknown" or codes != [step]:
            return Answer(claim, frozenset(codes), done.stdout[-800:])
        return left_alone(site, old, step) or again(site, codes, claim, until)

    site.look(run)


def killed(step: str, site: LightSite) -> None:
    """The controller dies with all that it started there."""
    site.old_server()
    old = site.leaders()

    def run() -> Answer:
        until = time.monotonic() + site.deadline_s
        first: Running = site.begin()
        site.reach(first, step)
        site.kill_controller()
        if not site.modules_end():
            return Answer("kept running", text=f"modules {site.modules()}")
        return left_alone(site, old, step) or again(site, [], "serving", until)

    site.look(run)


def sshd_hangs(site: LightSite) -> None:
    """Its port accepts, and nobody says a word."""
    site.old_server()
    listener = next(pid for pid, title in site.host.ns.titles().items() if "[listener]" in title)
    site.host.ns.run(["kill", "-STOP", str(listener)], 10).check()

    def run() -> Answer:
        done = site.begin("drift.yml").end(site.deadline_s)
        verdict = {0: "in_sync", 2: "not in sync", 4: "unreachable"}.get(done.rc, f"rc {done.rc}")
        return Answer(verdict, text=done.stdout[-600:])

    site.look(run)


# --- what takes the defence of each step away -------------------------------------------------------------------------

PLAN, VERIFY = "roles/plan/tasks/main.yml", "roles/verify/tasks/main.yml"
CLEAN = "clean_state_result.verdict | default('none') != 'clean'\n"
CLEAN_BY_DEFAULT = "clean_state_result.verdict | default('clean') != 'clean'\n"
BREAKS: dict[str, tuple[Patch, ...]] = {
    "plan": (
        Patch(PLAN, "  register: plan_result\n", "  register: plan_result\n  ignore_unreachable: true\n"),
        Patch(PLAN, "    - plan_fails | bool\n", "    - false\n"),
    ),
    "lease": (Patch("playbooks/tasks/lease_take.yml", "    - lease_refused | length > 0\n", "    - false\n"),),
    "evict": (
        Patch("roles/teardown/tasks/container.yml", "    - teardown_result.verdict | default('none') not in",
              "    - teardown_result.verdict | default('evicted') not in"),
    ),
    "clean": (
        Patch("roles/clean_state/tasks/main.yml", f"    - {CLEAN}    - clean_state_fails",
              f"    - {CLEAN_BY_DEFAULT}    - clean_state_fails"),
        Patch("playbooks/tasks/evict_and_prove.yml", f"      {CLEAN}      or escalation_node != '' and",
              f"      {CLEAN_BY_DEFAULT}      or escalation_node != '' and"),
    ),
    "launch": (
        Patch("plugins/plugin_utils/results.py", 'and result.get("config_hash") else failure(result)',
              'and (result.get("config_hash") or result.get("unreachable") or cut_off(result)) else failure(result)'),
    ),
    "proof": (
        Patch(VERIFY, "    - verify_result.ready | default(false) is not true\n", "    - false\n"),
    ),
}  # fmt: skip
# The trial in the preflight is a start, beside the server that runs.
NO_TRIAL = (
    Patch(
        "roles/launch/tasks/main.yml",
        '  check_mode: "{{ launch_trial | bool or ansible_check_mode }}"\n',
        '  check_mode: "{{ ansible_check_mode | bool }}"\n',
    ),
    Patch(
        "plugins/module_utils/act/launch.py",
        "    if alive is not None and not may_run:\n",
        "    if False:\n",
    ),
)
# A run that is dead keeps its lease.
NEVER_EXPIRES = Patch(
    "plugins/module_utils/lease.py",
    'return Standing(True, False, f"it expired',
    'return Standing(False, False, f"it expired',
)
WORDS = {
    "plan": "while it plans",
    "lease": "while it takes the lease",
    "evict": "during the eviction",
    "clean": "while it proves the host clean",
    "launch": "during the start",
    "proof": "during the proof",
}


def lost_row(step: str, back: bool) -> Row:
    return Row(
        f"light-{'blink' if back else 'lost'}-{step}",
        f"the host is gone {WORDS[step]}, and {f'back after {BACK_AFTER_S} s' if back else 'stays away'}",
        "relaunch",
        ("unknown",),
        functools.partial(lost, step, back),
        BREAKS[step],
        codes=(step,),
        may_die=("server",),
        bound_s=BOUND_S,
        quick=False,
        world="light",
    )


def killed_row(step: str) -> Row:
    return Row(
        f"light-killed-{step}",
        f"the controller is killed {WORDS[step]}",
        "relaunch",
        ("serving",),
        functools.partial(killed, step),
        NO_TRIAL if step == "plan" else (NEVER_EXPIRES,),
        may_die=("server",),
        bound_s=BOUND_S,
        quick=False,
        world="light",
    )


LOST = tuple(lost_row(step, False) for step in WORDS)
# Where the run could go on, were it to believe what it can't know.
BLINKS = tuple(lost_row(step, True) for step in ("lease", "evict", "launch"))
KILLED = tuple(killed_row(step) for step in WORDS)
SSHD = (
    Row(
        "light-sshd-hangs", "sshd accepts and never says a word", "drift", ("unreachable",), sshd_hangs,
        (*NOT_JUDGED, SILENT), bound_s=90, quick=False, world="light",
    ),
)  # fmt: skip
ROWS = (*LOST, *BLINKS, *KILLED, *SSHD)
