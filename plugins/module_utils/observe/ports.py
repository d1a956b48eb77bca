# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""TCP sockets on the ports that a server wants, from /proc/net/tcp and tcp6, and the processes that own them.

The tables are those of the network namespace that ``<proc>/net`` shows (ours, for /proc). A socket that is bound but
neither listens nor is connected stands in neither table.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import sys
import typing as t

from ..model import PortUse
from .procfs import list_pids

# include/net/tcp_states.h
_STATES = {
    1: "ESTABLISHED",
    2: "SYN_SENT",
    3: "SYN_RECV",
    4: "FIN_WAIT1",
    5: "FIN_WAIT2",
    6: "TIME_WAIT",
    7: "CLOSE",
    8: "CLOSE_WAIT",
    9: "LAST_ACK",
    10: "LISTEN",
    11: "CLOSING",
    12: "NEW_SYN_RECV",
}
_ROW = re.compile(
    rb"^\s*\d+:\s+([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4})\s+([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4})\s+([0-9A-F]{2})"
    rb"\s+\S+\s+\S+\s+\S+\s+(\d{1,10})\s+\d+\s+(\d{1,20})(?:\s|$)"
)
_SOCKET = re.compile(r"^socket:\[(\d{1,20})\]$")


def read_ports(
    proc: str = "/proc", ports: t.Sequence[int] = (), network_of: t.Optional[int] = None
) -> t.Optional[tuple[PortUse, ...]]:
    """All TCP sockets whose local port is one of ``ports``, with their owners where those can be seen.

    None if the table can't be read or holds a row that can't be understood: then nobody knows whether a port is free. A
    missing tcp6 is a host without IPv6. ``network_of``: the pid in whose network namespace to look; None: in ours.
    /proc is only searched for owners if a socket has one (TIME_WAIT has none).
    """
    uses: list[PortUse] = []
    where = "net" if network_of is None else f"{network_of}/net"
    for name in ("tcp", "tcp6"):
        try:
            with open(os.path.join(proc, where, name), "rb") as stream:
                found = parse_table(stream.read(), frozenset(ports))
        except FileNotFoundError:
            if name == "tcp":
                return None
            continue
        except OSError:
            return None
        if found is None:
            return None
        uses.extend(found)
    owners = _owners({use.inode for use in uses if use.inode}, proc)
    return tuple(dataclasses.replace(use, pids=tuple(sorted(owners.get(use.inode, ())))) for use in uses)


def parse_table(data: bytes, ports: t.AbstractSet[int]) -> t.Optional[list[PortUse]]:
    """The rows of /proc/net/tcp or tcp6 with one of these local ports; None if a row can't be understood."""
    lines = data.split(b"\n")
    if not lines[0].lstrip().startswith(b"sl ") or lines[-1]:  # no table, or one that was cut within a row
        return None
    found = []
    for line in lines[1:]:
        if not line.strip():
            continue
        row = _ROW.match(line)
        if row is None:
            return None
        port = int(row.group(2), 16)
        if port not in ports:
            continue
        state = int(row.group(5), 16)
        found.append(
            PortUse(
                port=port,
                address=_address(row.group(1)),
                state=_STATES.get(state, f"state {state}"),
                inode=int(row.group(7)),
                uid=int(row.group(6)),
                peer=None if state == 10 else f"{_address(row.group(3), brackets=True)}:{int(row.group(4), 16)}",
            )
        )
    return found


def _address(digits: bytes, brackets: bool = False) -> str:
    """The kernel prints each 32-bit word of an address in the host's byte order."""
    words = [int(digits[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"[{address}]" if brackets and address.version == 6 else str(address)


def _owners(inodes: t.AbstractSet[int], proc: str) -> dict[int, set[int]]:
    """Pids by socket inode. Processes that can't be read are passed over: an owner is a help, not a proof."""
    owners: dict[int, set[int]] = {}
    if not inodes:
        return owners
    try:
        pids = list_pids(proc)
    except OSError:
        return owners
    for pid in pids:
        for inode in _sockets(f"{proc}/{pid}/fd"):
            if inode in inodes:
                owners.setdefault(inode, set()).add(pid)
    return owners


def _sockets(directory: str) -> t.Iterator[int]:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            match = _SOCKET.match(os.readlink(f"{directory}/{name}"))
        except OSError:  # closed since it was listed
            continue
        if match:
            yield int(match.group(1))
