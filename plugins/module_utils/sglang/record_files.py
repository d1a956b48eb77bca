# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What lies beside a launch's record: documents of what was planned, done and proved, and the links to launches.

    <state_dir>/<server>/current, last_good -> launches/<launch id>     relative, put in place by a rename
    <launch>/plan.json, evict.json, clean.json, phases.json, proof.json, summary.txt     0600

Documents are redacted here, by names and by the very secrets of the launch, and are bounded in size (documents.py).
Links are for people: what they say is read (readlink) and must be exactly launches/<launch id>, and nothing is ever
opened through one. Which launch is the current one says current.json; a run that is killed between the two leaves an
old link, which the next launch sets right.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import typing as t
from dataclasses import dataclass

from ..errors import CleanSlateError, NotPermitted
from .configfile import read_config
from .documents import document_text
from .kept import REQUEST, environment_of, parse_request
from .record import (
    LAUNCHES,
    Record,
    is_launch_id,
    launch_dir,
    opened_folder,
    opened_launch,
    parse,
    read_small,
    server_dir,
    write_file,
)
from .redact import Redactor, is_secret_flag, is_secret_variable
from .summary import summary_text

What = t.Literal["plan", "evict", "clean", "phases", "proof"]
Which = t.Literal["current", "last_good"]
DOCUMENTS: tuple[What, ...] = ("plan", "evict", "clean", "phases", "proof")
LINKS: tuple[Which, ...] = ("current", "last_good")
SUMMARY = "summary.txt"
_SHORTEST_BY_NAME = 8


@dataclass(frozen=True)
class Link:
    """Where a link points. Neither: there is none. ``problem``: there is one, and it can't be trusted, and why."""

    launch_id: t.Optional[str] = None
    problem: t.Optional[str] = None


# --- documents --------------------------------------------------------------------------------------------------------


def write_document(
    state_dir: str,
    name: str,
    launch_id: str,
    what: What,
    data: t.Mapping[str, t.Any],
    redactor: t.Optional[Redactor] = None,
) -> str:
    """Write a document into a launch's folder, without its secrets, and cut where it is too large. Returns its path.

    ``redactor``: what knows the launch's secrets; if not given, they are read from its private files.

    Raises:
        CleanSlateError: there is no such launch, or it can't be written.
    """
    if what not in DOCUMENTS:
        raise CleanSlateError(f"{what!r} is no document of a launch; they are {', '.join(DOCUMENTS)}")
    known = redactor or launch_redactor(state_dir, name, launch_id)
    return _write(state_dir, name, launch_id, f"{what}.json", document_text(known.data(dict(data))))


def read_document(state_dir: str, name: str, launch_id: str, what: What) -> t.Optional[dict[str, t.Any]]:
    """A document, None where there is none. Raises CleanSlateError for one that can't be used."""
    path = f"{launch_dir(state_dir, name, launch_id)}/{what}.json"
    try:
        text = read_text(state_dir, name, launch_id, f"{what}.json")
        data = None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CleanSlateError(f"{path} is no JSON ({error})") from error
    if data is not None and not isinstance(data, dict):
        raise CleanSlateError(f"{path} is no JSON object")
    return data


def read_text(
    state_dir: str, name: str, launch_id: str, file: str, owners: t.Collection[int] = ()
) -> t.Optional[str]:
    """A file of a launch, None where there is none. Raises CleanSlateError where it can't be read or trusted."""
    path = f"{launch_dir(state_dir, name, launch_id)}/{file}"
    try:
        with opened_launch(state_dir, name, launch_id) as dir_fd:
            return read_small(file, dir_fd, owners)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotPermitted(f"{path} can't be read: {error.strerror}") from error
    except NotPermitted as error:
        raise NotPermitted(f"{path} can't be used: {error}") from error


def read_kept_record(state_dir: str, name: str, launch_id: str) -> Record:
    """The record in a launch's own folder. Raises CleanSlateError where it is missing or can't be used."""
    path = f"{launch_dir(state_dir, name, launch_id)}/record.json"
    text = read_text(state_dir, name, launch_id, "record.json")
    if text is None:
        raise CleanSlateError(f"{path} is missing: the launch was interrupted, or is being written")
    try:
        record = parse(text)
    except (ValueError, RecursionError) as error:
        raise CleanSlateError(f"{path} can't be used: {error}") from error
    if (record.name, record.launch_id) != (name, launch_id):
        raise CleanSlateError(f"{path} can't be used: it is of {record.name!r}, launch {record.launch_id}")
    return record


def launch_redactor(state_dir: str, name: str, launch_id: str) -> Redactor:
    """Knows the secrets of a launch by its private files; where these can't be read, by names alone."""
    known: list[t.Optional[str]] = []
    with contextlib.suppress(CleanSlateError):
        config = read_config(read_config_text(state_dir, name, launch_id) or "") or {}
        known += [str(value) for flag, value in config.items() if is_secret_flag(flag) and value is not None]
    with contextlib.suppress(CleanSlateError, ValueError):
        given = _secret_environment(state_dir, name, launch_id)
        environment = environment_of(read_text(state_dir, name, launch_id, "env") or "")
        known += [value for key, value in environment.items() if key in given or _is_secret(key, value)]
    return Redactor(known)


def _secret_environment(state_dir: str, name: str, launch_id: str) -> tuple[str, ...]:
    with contextlib.suppress(CleanSlateError, ValueError, RecursionError):
        text = read_text(state_dir, name, launch_id, REQUEST)
        return () if text is None else parse_request(text).secret_environment
    return ()


def _is_secret(name: str, value: str) -> bool:
    """By its name; a value like 1 would be masked wherever that number stands."""
    return is_secret_variable(name) and len(value) >= _SHORTEST_BY_NAME


def read_config_text(state_dir: str, name: str, launch_id: str) -> t.Optional[str]:
    """config.yaml, which is the server's own: whoever its owner is, the folder it lies in is ours."""
    try:
        with opened_launch(state_dir, name, launch_id) as dir_fd:
            owner = os.stat("config.yaml", dir_fd=dir_fd, follow_symlinks=False).st_uid
    except FileNotFoundError:
        return None
    except OSError as error:
        path = f"{launch_dir(state_dir, name, launch_id)}/config.yaml"
        raise NotPermitted(f"{path} can't be read: {error.strerror}") from error
    return read_text(state_dir, name, launch_id, "config.yaml", (owner,))


def _write(state_dir: str, name: str, launch_id: str, file: str, text: str) -> str:
    folder = launch_dir(state_dir, name, launch_id)
    try:
        with opened_launch(state_dir, name, launch_id):
            pass
    except FileNotFoundError:
        raise CleanSlateError(f"there is no launch {launch_id} of {name!r}: {folder} is missing") from None
    except OSError as error:
        raise NotPermitted(f"{folder} can't be used: {error.strerror}") from error
    return write_file(folder, file, text.encode())


# --- links ------------------------------------------------------------------------------------------------------------


def look_link(state_dir: str, name: str, which: Which) -> Link:
    """Where a link points, without following it. Never raises for what lies on the disk."""
    folder = server_dir(state_dir, name)
    path = os.path.join(folder, which)
    try:
        with opened_folder(folder) as dir_fd:
            status = os.lstat(which, dir_fd=dir_fd)
            if not stat.S_ISLNK(status.st_mode):
                return Link(problem=f"{path} is no link; move it away")
            if status.st_uid not in (0, os.geteuid()):
                return Link(problem=f"{path} was made by uid {status.st_uid}; remove it")
            target = os.readlink(which, dir_fd=dir_fd)
            parent, _slash, launch_id = target.partition("/")
            if parent != LAUNCHES or not is_launch_id(launch_id):
                return Link(problem=f"{path} points to {target!r} and not to a launch here; remove it")
    except FileNotFoundError:
        return Link()
    except (OSError, CleanSlateError) as error:
        return Link(problem=f"{path} can't be read: {error}")
    try:
        with opened_launch(state_dir, name, launch_id):
            return Link(launch_id)
    except (OSError, CleanSlateError):
        return Link(problem=f"{path} names the launch {launch_id}, which is not here")


def read_link(state_dir: str, name: str, which: Which) -> t.Optional[str]:
    """The launch that a link names, None where there is no link. Raises CleanSlateError for one that can't be used."""
    link = look_link(state_dir, name, which)
    if link.problem is not None:
        raise CleanSlateError(link.problem)
    return link.launch_id


def check_links(state_dir: str, name: str) -> None:
    """Raise CleanSlateError where something that is no link stands in a link's place: it could not be replaced."""
    for which in LINKS:
        path = os.path.join(server_dir(state_dir, name), which)
        if os.path.lexists(path) and not os.path.islink(path):
            raise CleanSlateError(f"{path} is no link, and the record needs that place; move it away")


def set_link(state_dir: str, name: str, which: Which, launch_id: str) -> str:
    """Let a link name a launch, by a rename. Returns its path."""
    folder = server_dir(state_dir, name)
    launch_dir(state_dir, name, launch_id)  # refuses what is no id
    path = os.path.join(folder, which)
    temporary = f".{which}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with opened_folder(folder) as dir_fd:
            os.symlink(f"{LAUNCHES}/{launch_id}", temporary, dir_fd=dir_fd)
            try:
                os.rename(temporary, which, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=dir_fd)
                raise
            os.fsync(dir_fd)
    except OSError as error:
        raise NotPermitted(f"can't set the link {path}: {error.strerror}") from error
    return path


def mark_good(state_dir: str, name: str, launch_id: str) -> str:
    """Let last_good name this launch, whose proof lies beside it and says ready. Returns the link's path.

    Raises:
        CleanSlateError: it was not proved, or the link can't be set.
    """
    read_kept_record(state_dir, name, launch_id)
    proof = read_document(state_dir, name, launch_id, "proof")
    if proof is None or proof.get("verdict") != "ready":
        said = "has no proof" if proof is None else f"is {proof.get('verdict')!r} by its proof"
        raise CleanSlateError(f"the launch {launch_id} of {name!r} {said}: it can't become last_good")
    return set_link(state_dir, name, "last_good", launch_id)


# --- for people -------------------------------------------------------------------------------------------------------


def write_summary(state_dir: str, name: str, launch_id: str) -> str:
    """Write what is known of a launch in plain words, from its record and documents. Returns the path."""
    record = read_kept_record(state_dir, name, launch_id)
    documents: dict[str, t.Mapping[str, t.Any]] = {}
    problems = []
    for what in DOCUMENTS:
        try:
            data = read_document(state_dir, name, launch_id, what)
        except CleanSlateError as error:
            problems.append(str(error))
            continue
        if data is not None:
            documents[what] = data
    text = launch_redactor(state_dir, name, launch_id).text(summary_text(record, documents, problems))
    return _write(state_dir, name, launch_id, SUMMARY, text)
