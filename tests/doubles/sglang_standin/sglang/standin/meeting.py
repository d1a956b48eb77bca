# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes of one server meet at --dist-init-addr before they load, as torch.distributed's store has them do.

Node 0 listens, the others connect, and nobody goes on before all are there. One that never comes is waited for without
a limit.
"""

from __future__ import annotations

import contextlib
import socket
import time

_AGAIN_S = 0.1


def meet(address: str, node_rank: int, nodes: int) -> None:
    """Return once the first rank of every node is here."""
    host, _colon, port = address.rpartition(":")
    if node_rank == 0:
        _receive((host, int(port)), nodes - 1)
    else:
        _come((host, int(port)))


def _receive(place: tuple[str, int], others: int) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(place, reuse_port=False))
        come = [stack.enter_context(listener.accept()[0]) for _unused in range(others)]
        for each in come:
            each.sendall(b"go")


def _come(place: tuple[str, int]) -> None:
    while True:
        try:
            with socket.create_connection(place, timeout=None) as connection:
                if connection.recv(2):
                    return
        except OSError:
            pass
        time.sleep(_AGAIN_S)
