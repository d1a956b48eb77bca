# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What follows after a failure: nothing, leave it, stop it, or go back to a launch that was proved to serve.

Pure functions over registered results. Only what was started by this run is ever stopped here, and nothing at all where
this run may no longer act (its lease is lost) or can't see what it did (the connection was lost).
"""

from __future__ import annotations

import typing as t

from .results import Result, cut_off, failure, items, launch_problem, mapping, ran, rows, why

JSON = dict[str, t.Any]
_LOST = "is no longer ours"
# Of a server's entry these hold for whatever is launched under its name; flags, model and keys are the record's.
_KEPT_SETTINGS = (
    "name",
    "unit",
    "scope",
    "protect",
    "rungs",
    "deadlines",
    "max_used_mib",
    "baselines_mib",
    "min_available_mib",
    "shm_required_mib",
    "settle_s",
    "ready_deadline_s",
    "min_gpu_headroom_mib",
    "soak",
    "hung_after",
    "keep_launches",
    "clients",
)


def lease_lost(*results: t.Any) -> bool:
    """Whether one of these results says that the lease of this run is another one's by now."""
    told = [each for each in results if isinstance(each, t.Mapping)]
    codes = {str(reason.get("code")) for each in told for reason in rows(each, "reasons")}
    return "lease_lost" in codes or any(
        each.get("lease_lost") is True or _LOST in str(each.get("msg")) for each in told
    )


def connection_lost(result: t.Any) -> bool:
    """Whether what became of a task is not known, since its host did not answer to the end."""
    return isinstance(result, t.Mapping) and (bool(result.get("unreachable")) or cut_off(result))


def after_failure(results: Result, on_failure: str, message: t.Any = "") -> JSON:
    """The next step after a failed path: {"step": nothing | leave | stop | rollback, "why": a sentence or ''}.

    ``results``: teardown, teardown_host, clean, launch and verify as registered, each empty where it did not run.
    ``message``: the error that ended the path.
    """
    launch, verify = results.get("launch"), results.get("verify")
    steps = [results.get(key) for key in ("lease", "teardown", "teardown_host", "clean", "launch", "verify")]
    if lease_lost(*steps, {"msg": message}):
        return _without_lease()
    if not ran(launch):
        return {"step": "nothing", "why": ""}
    for word, result in (("start", launch), ("proof", verify)):
        if ran(result) and connection_lost(result):
            lost = f"the connection was lost in the {word}, so what became of it is not known"
            return {"step": "leave", "why": f"{lost}, and nothing more was done"}
    return {"step": on_failure, "why": ""}


def _without_lease() -> JSON:
    why_not = "this run no longer has the lease, so it ends and starts nothing more"
    return {"step": "nothing", "why": why_not, "lost": True}


def after_trial(failed_hash: t.Any, trial: t.Any) -> JSON:
    """Whether to go back: the next step after the kept launch was tried in check mode.

    ``failed_hash``: the configuration that just failed, where it is known. ``trial``: the result of server_launch.
    """
    problem = launch_problem(trial)
    if lease_lost(trial):
        return _without_lease()
    if problem:
        return {"step": "stop", "why": f"there is nothing to go back to: {problem}"}
    same = failed_hash and trial.get("config_hash") == failed_hash
    # The configuration's hash leaves secrets out: other keys are another configuration.
    if same and trial.get("secrets_changed") is not True:
        same_one = f"launch {came_from(trial)} has the configuration that just failed"
        return {"step": "stop", "why": f"there is nothing else to go back to: {same_one}"}
    return {"step": "rollback", "why": ""}


def came_from(trial: t.Any) -> str:
    """The kept launch that a launch was, or would be, made from."""
    if not isinstance(trial, t.Mapping):
        return "unknown"
    return str(trial.get("from_launch") or mapping(trial, "record").get("from_launch") or "unknown")


def old_settings(server: Result, trial: Result) -> JSON:
    """Settings for a kept launch: what it is launched with by its record, the rest by the server's entry.

    Flags, interpreter and keys stay on the host, where server_launch finds them.
    """
    record = mapping(trial, "record")
    settings = {key: server[key] for key in _KEPT_SETTINGS if key in server}
    given = {
        "port": record.get("port") or server.get("port"),
        "host": record.get("host"),
        "user": record.get("user"),
        "unit": record.get("unit") or server.get("unit"),
        "gpus": [str(gpu) for gpu in items(record, "gpus")],
        "device": "cpu" if _without_gpus(server, record) else "gpu",
    }
    return {**settings, **{key: value for key, value in given.items() if value is not None}}


def way_back(trial: t.Any, server: Result, failed_hash: t.Any = "") -> JSON:
    """A kept launch as a way back: its id, the settings for its path, and the next step.

    ``trial``: the result of server_launch in check mode for it.
    """
    follow = after_trial(failed_hash, trial)
    usable = not launch_problem(trial)
    return {
        "launch_id": came_from(trial) if usable else "",
        "settings": old_settings(server, trial) if usable else {},
        "config_hash": trial.get("config_hash") if usable else None,
        "problem": launch_problem(trial),
        "next": follow,
    }


def clients_go_on(verify: t.Any, teardown: t.Any, node: t.Any, launch: t.Any) -> bool:
    """Whether held clients may go on: a server is proved to serve, or nothing at all was touched."""
    if ran(verify):
        return verify.get("ready") is True
    if ran(launch) or ran(node):
        return False
    return not ran(teardown) or (not teardown.get("changed") and not connection_lost(teardown))


def _without_gpus(server: Result, record: Result) -> bool:
    """SGLang may compute on the CPU with GPUs planned all the same (simulated ones): both must say that it has none."""
    return record.get("device") == "cpu" and not record.get("gpus") and server.get("device") == "cpu"


# --- choosing by hand -------------------------------------------------------------------------------------------------


def choose_launch(launches: t.Any, wanted: str) -> JSON:
    """Which kept launch to go back to: {"launch_id": ..., "problem": ...}.

    ``wanted``: an id, last_good, previous, or '' for the last proved one that is not current.
    """
    given = launches if isinstance(launches, (list, tuple)) else ()
    kept = [each for each in given if isinstance(each, t.Mapping) and each.get("launch_id")]
    if not kept:
        return _none("no launch of it is kept on the host, so there is nothing to go back to")
    sound = [each for each in kept if not each.get("problem")]
    proved = [each for each in sound if each.get("verdict") == "ready" or each.get("last_good")]
    others = [each for each in proved if not each.get("current")]
    last_good = next((each for each in proved if each.get("last_good")), None)
    if wanted == "last_good":
        return _some(last_good) if last_good else _none(f"no launch of it was ever proved to serve; {_kept(kept)}")
    if wanted in ("", "auto", "previous"):
        first = last_good if wanted != "previous" and last_good and not last_good.get("current") else None
        found = first or (others[0] if others else None)
        return _some(found) if found else _none(f"no other launch of it was proved to serve; {_kept(kept)}")
    found = next((each for each in kept if each["launch_id"] == wanted), None)
    return _some(found) if found else _none(f"launch '{wanted}' is not kept on the host; {_kept(kept)}")


def _some(launch: Result) -> JSON:
    return {"launch_id": str(launch["launch_id"]), "problem": ""}


def _none(problem: str) -> JSON:
    return {"launch_id": "", "problem": problem}


def _kept(kept: t.Sequence[Result]) -> str:
    words = [f"{each['launch_id']} ({each.get('verdict') or 'never judged'})" for each in kept[:10]]
    return f"kept are {', '.join(words)}"


def launches_of(info: t.Any, name: str) -> list[t.Any]:
    """The kept launches of one server in a result of server_info."""
    if not isinstance(info, t.Mapping):
        return []
    for key in ("servers", "records"):
        for server in items(info, key):
            if isinstance(server, t.Mapping) and server.get("name") == name and server.get("launches"):
                return items(server, "launches")
    return []


# --- sentences --------------------------------------------------------------------------------------------------------


def path_problem(results: Result, message: t.Any = "") -> str:
    """Why a path failed, in one sentence without its heading: by the last step that ran."""
    verify, launch, clean = (results.get(key) for key in ("verify", "launch", "clean"))
    if ran(verify):
        verdict = verify.get("verdict") or "no verdict"
        return f"{verdict}: {verify.get('error') or failure(verify)}"
    if ran(launch) and launch_problem(launch):
        return f"it was not started: {launch_problem(launch)}"
    if ran(clean) and clean.get("verdict") != "clean":
        return f"the host is not clean ({clean.get('verdict') or 'no verdict'}): {why(clean)}"
    return " ".join(str(message or "it broke off").split())


def clean_words(results: t.Any) -> str:
    """Whether a host was proved clean after an eviction, for the end of a sentence."""
    clean = results.get("clean") if isinstance(results, t.Mapping) else None
    if ran(clean):
        if clean.get("verdict") == "clean":
            return "the host is clean"
        return f"the host is not proved clean ({clean.get('verdict') or 'no verdict'}: {why(clean)})"
    reason = str((results or {}).get("message") or "") if isinstance(results, t.Mapping) else ""
    if not reason and isinstance(results, t.Mapping) and ran(results.get("teardown")):
        reason = why(results["teardown"])
    return f"the host is not proved clean ({reason or 'it was not judged'})"


def outcome(results: Result) -> str:
    """The whole story of a failed run, in one sentence for its error.

    ``results``: server, host, message, next (of after_failure), target (the launch of the way back), and the results of
    the failed path, of the way back and of the last eviction as first, second and stopped, each empty where there was
    none.
    """
    who = f"{results.get('server')} on {results.get('host')}"
    first, second, stopped = (mapping(results, key) for key in ("first", "second", "stopped"))
    follow = mapping(results, "next")
    step, reason = follow.get("step"), str(follow.get("why") or "")
    if step == "nothing":
        text = " ".join(str(results.get("message") or "it broke off").split())
        return f"{text}; {reason}" if reason else text
    what = f"launch {results['from_launch']}" if results.get("from_launch") else "the new configuration"
    head = f"{who}: {what} failed ({path_problem(first, results.get('message'))})"
    because = f"; {reason}" if reason else ""
    if step == "leave":
        return f"{head}{because}; {_left(first, 'on_failure: leave' if not reason else '')}"
    if step == "stop":
        return f"{head}{because}; stopped, {clean_words(stopped)}"
    target = results.get("target")
    if mapping(second, "verify").get("ready") is True:
        return f"{head}; rolled back to {target}: serving"
    again = path_problem(second, second.get("message"))
    return f"{head}; the rollback to {target} failed too ({again}): {_ended(second, stopped)}"


def _ended(second: Result, stopped: Result) -> str:
    """How a failed way back ended."""
    follow = mapping(second, "next")
    if follow.get("step") == "stop":
        return f"stopped, {clean_words(stopped)}"
    if follow.get("step") == "leave":
        return str(follow.get("why"))
    if follow.get("why"):
        return str(follow["why"])
    return f"nothing was started, {clean_words(second)}"


def _left(first: Result, choice: str) -> str:
    verify, launch = mapping(first, "verify"), mapping(first, "launch")
    pid = verify.get("pid") if ran(verify) else None
    by = f" ({choice})" if choice else ""
    if pid is not None:
        return f"it was left as it is{by}: pid {pid} still runs"
    if ran(verify) and verify.get("verdict") == "failed":
        return f"it was left as it is{by}: its process is gone"
    if launch.get("launch_id"):
        return f"it was left as it is{by}: whether it still runs was not seen"
    return f"nothing was started that could be left{by}" if not connection_lost(launch) else f"it was left as it is{by}"


def documents(results: Result) -> JSON:
    """What the launch's folder keeps of the steps before it: plan, evict and clean, without Ansible's own keys."""
    evict = {key: _bare(results.get(name)) for key, name in (("inside", "teardown"), ("node", "teardown_host"))}
    evict = {key: value for key, value in evict.items() if value}
    found = {"plan": _bare(results.get("plan")), "evict": evict, "clean": _bare(results.get("clean"))}
    return {key: value for key, value in found.items() if value}


_NOISE = ("invocation", "ansible_facts", "warnings", "deprecations", "failed_when_result", "exception", "diff")


def _bare(result: t.Any) -> JSON:
    return {str(key): value for key, value in result.items() if key not in _NOISE} if ran(result) else {}
