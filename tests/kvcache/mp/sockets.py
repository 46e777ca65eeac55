"""The sockets of this process that lead to a port."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress


def sockets_to(port: int) -> Iterator[socket.socket]:
    """Every TCP socket of this process whose other end is `port`, as a duplicate."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.getpeername()[1] == port:
                yield duplicate


def patience(of: socket.socket) -> float:
    """Seconds that the system waits for an acknowledgement before it gives up a connection; 0: its own."""
    return of.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
