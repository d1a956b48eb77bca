# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a router's list says of a worker, and whether the worker may be taken out.

A worker's id changes each time it is added, and the router takes every spelling of a URL for a worker of its own. So a
worker is known by its address: host, port and path of the URL, written in one way. Scheme, letter case, a closing slash
and default ports make no difference.
"""

from __future__ import annotations

import ipaddress
import re
import typing as t
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import CleanSlateError

HEALTHY, UNHEALTHY, ABSENT, UNKNOWN = "healthy", "unhealthy", "absent", "unknown"
JOB_WORDS = ("pending", "processing", "failed")
ADDING, REMOVING = "AddWorker", "RemoveWorker"
# What a worker gets that is added without settings of its own.
DEFAULTS: t.Mapping[str, t.Any] = {"priority": 50, "cost": 1.0, "worker_type": "regular"}

_DEFAULT_PORTS = {"http": 80, "https": 443}
_RANK = re.compile(r"@(?P<rank>[0-9]+)$")
_HOST = re.compile(r"[A-Za-z0-9_.-]+$")
_PATH = re.compile(r"[A-Za-z0-9._~/%-]*$")


@dataclass(frozen=True)
class Url:
    """A base URL in parts; ``host`` without brackets, ``path`` without a closing slash."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def place(self) -> tuple[str, int, str]:
        """What makes two spellings the same."""
        return (self.host, self.port, self.path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True)
class Job:
    """The last thing that the router was asked to do with a worker, where it is not done."""

    kind: str
    status: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.status}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True)
class Entry:
    """One worker in a router's list. ``url`` as the router writes it."""

    id: str
    url: str
    healthy: bool
    load: t.Optional[int] = None
    model_id: t.Optional[str] = None
    worker_type: t.Optional[str] = None
    priority: t.Optional[int] = None
    cost: t.Optional[float] = None
    job: t.Optional[Job] = None

    @property
    def rank(self) -> t.Optional[int]:
        """The data parallel rank, where the router lists each on its own (--dp-aware)."""
        found = _RANK.search(self.url)
        return int(found["rank"]) if found else None


@dataclass(frozen=True)
class Wanted:
    """The worker that is meant: its URL, and other spellings under which a router may know it."""

    url: Url
    aliases: tuple[Url, ...] = ()

    def is_it(self, url: str) -> bool:
        """Whether a router's entry of this URL is this worker."""
        try:
            place = parse_url(_RANK.sub("", url)).place
        except CleanSlateError:
            return False  # a router takes anything for a URL; what can't be understood is not ours
        return place in {each.place for each in (self.url, *self.aliases)}


def parse_url(text: str) -> Url:
    """A base URL; http where no scheme is given.

    Raises:
        CleanSlateError: it is none, or holds what does not belong there. Its text is not shown where it may hold a
            key.
    """
    whole = text.strip()
    if "://" not in whole:
        whole = f"http://{whole}"
    try:
        parts = urlsplit(whole)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise CleanSlateError(f"a URL can't be understood ({error}); it must be like http://HOST:PORT") from error
    if parts.username is not None or parts.password is not None:
        raise CleanSlateError(
            f"the URL of {host or 'a host'} holds a user or a key before an '@'; keys have their own place (api_key)"
        )
    if parts.query or parts.fragment or "?" in whole or "#" in whole:
        raise CleanSlateError(f"the URL of {host or 'a host'} has a query or a fragment; it must be like http://HOST:PORT")
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS:
        raise CleanSlateError(f"'{whole}': the scheme is {scheme}, but must be http or https")
    if port == 0:
        raise CleanSlateError(f"'{whole}': the port must be from 1 to 65535")
    if not _PATH.match(parts.path):
        raise CleanSlateError(f"the URL of {host or 'a host'} has a path that is none")
    return Url(scheme, _host(host, whole), port or _DEFAULT_PORTS[scheme], parts.path.rstrip("/"))


def _host(host: str, whole: str) -> str:
    plain = host.lower().rstrip(".")
    try:
        return str(ipaddress.ip_address(plain))
    except ValueError:
        if not _HOST.match(plain):
            raise CleanSlateError(f"'{whole}': it names no host; it must be like http://HOST:PORT") from None
        return plain


def entries_of(wanted: Wanted, listing: t.Iterable[Entry]) -> tuple[Entry, ...]:
    """What a router lists of this worker: nothing, one, or several where it knows several spellings or ranks."""
    return tuple(entry for entry in listing if wanted.is_it(entry.url))


def state_of(entries: t.Sequence[Entry]) -> str:
    """healthy, unhealthy (one of them is) or absent."""
    if not entries:
        return ABSENT
    return HEALTHY if all(entry.healthy for entry in entries) else UNHEALTHY


def reasons_to_keep(
    router: str, wanted: t.Sequence[Wanted], listing: t.Sequence[Entry], leave_healthy: int
) -> list[str]:
    """Why the workers must not be taken out of this router, one sentence each."""
    ours = [entry for each in wanted for entry in entries_of(each, listing)]
    reasons = []
    ranked = sorted({_RANK.sub("", entry.url) for entry in ours if entry.rank is not None})
    for url in ranked:
        reasons.append(
            f"router {router} lists {url} once for each data parallel rank (--dp-aware), and can't remove such an "
            "entry; run the router without --dp-aware, or take the server out of it by a restart of the router"
        )
    for kind in sorted({_kind(entry) for entry in ours if entry.healthy}):
        others = {
            _RANK.sub("", entry.url).rstrip("/")
            for entry in listing
            if entry.healthy and entry not in ours and _serves(entry, kind)
        }
        if len(others) < leave_healthy:
            model, role = kind
            reasons.append(
                f"router {router} would have {len(others)} healthy {role} worker{'s' * (len(others) != 1)} left for "
                f"{model or 'this model'}, and leave_healthy is {leave_healthy}; requests would fail"
            )
    return reasons


def _kind(entry: Entry) -> tuple[str, str]:
    return (_model(entry), entry.worker_type or "regular")


def _model(entry: Entry) -> str:
    return "" if entry.model_id in (None, "unknown") else str(entry.model_id)


def _serves(entry: Entry, kind: tuple[str, str]) -> bool:
    """Whether this one may take over. A router that could not ask a worker for its model sends it any request."""
    model, role = _kind(entry)
    return role == kind[1] and (not model or not kind[0] or model == kind[0])


def other_spellings(
    wanted: Wanted, listing: t.Iterable[Entry], addresses: t.Mapping[str, t.Collection[str]]
) -> list[str]:
    """URLs of the list that are none of the worker's spellings and yet lead to its address and port.

    ``addresses``: of each host name (those of a literal address are that alone); a name that is missing is not known.
    """

    def of(host: str) -> frozenset[str]:
        return frozenset([host, *addresses.get(host, ())])

    ours = [(of(url.host), url.port) for url in (wanted.url, *wanted.aliases)]
    found = []
    for entry in listing:
        if wanted.is_it(entry.url):
            continue
        try:
            url = parse_url(_RANK.sub("", entry.url))
        except CleanSlateError:
            continue
        if any(url.port == port and of(url.host) & hosts for hosts, port in ours):
            found.append(entry.url)
    return found


def hosts_to_resolve(wanted: t.Sequence[Wanted], listing: t.Iterable[Entry]) -> list[str]:
    """Names that must be looked up to tell whether an entry is another spelling of a worker: those on its port."""
    ports = {url.port for each in wanted for url in (each.url, *each.aliases)}
    hosts = {url.host for each in wanted for url in (each.url, *each.aliases)}
    for entry in listing:
        try:
            url = parse_url(_RANK.sub("", entry.url))
        except CleanSlateError:
            continue
        if url.port in ports and not any(each.is_it(entry.url) for each in wanted):
            hosts.add(url.host)
    return sorted(host for host in hosts if not _is_address(host))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def settings_lost(router: str, entries: t.Sequence[Entry], settings: t.Mapping[str, t.Any]) -> list[str]:
    """What a worker has in a router that it would not get again when it is added with these settings."""
    lost = []
    for entry in entries:
        for name, default in DEFAULTS.items():
            has, gets = getattr(entry, name), settings.get(name, default)
            if has is not None and has != gets:
                lost.append(
                    f"router {router} has {entry.url} with {name} {has}; added again it gets {gets}, unless the "
                    "worker's settings say so"
                )
    return lost


def adding_failed(job: t.Optional[Job]) -> t.Optional[str]:
    """Why an addition will not come to an end, or None where it still may.

    Raises:
        CleanSlateError: the job has a status that is not known.
    """
    if job is None:
        return None
    check_job(job)
    # An addition of what is there already fails with these words; what is there counts, not the job.
    if job.kind == ADDING and job.status == "failed" and "already exists" not in job.message:
        return job.message or "it says no reason"
    return None


def removing_failed(job: t.Optional[Job]) -> t.Optional[str]:
    """The same for a removal."""
    if job is None:
        return None
    check_job(job)
    return (job.message or "it says no reason") if job.kind == REMOVING and job.status == "failed" else None


def check_job(job: Job) -> None:
    """Raises CleanSlateError for a status that this version does not know."""
    if job.status not in JOB_WORDS:
        known = ", ".join(JOB_WORDS)
        raise CleanSlateError(f"the router's job {job.kind} has the status '{job.status}', which is none of {known}")
