"""The TCP sockets of this process, to shut those down that nobody else can. Linux.

gloo's abort and shutdown return and end nothing (torch 2.13). An operation that waits for a mate
who is alive, and waits itself, ends only when the connection does. Of each pair one process has
accepted the connection at a port of its own; the other knows that port if it was told.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

Port = tuple[str, int]
"""Host as a number, and port."""

_INFO_BYTES, _UNACKED, _ACKED_AND_RECEIVED = 136, 24, 120
"""Of the kernel's tcp_info: how much of it is asked for, and where in it."""


def _of_this_process() -> Iterator[socket.socket]:
    """Copies, to be closed by whoever looks at them."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed since
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            found = socket.socket(fileno=os.dup(number))
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found
            found.close()


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(name: tuple[str, int]) -> Port:
    return name[0].removeprefix("::ffff:"), name[1]


def listening() -> set[Port]:
    """Where this process listens."""
    ports = set()
    for found in _of_this_process():
        with contextlib.suppress(OSError):
            if _listens(found):
                ports.add(_port(found.getsockname()[:2]))
    return ports


def _connected(mine: Collection[Port], theirs: Collection[Port]) -> Iterator[socket.socket]:
    """What was accepted at these ports of ours, or connected to these of others."""
    numbers = {port for _, port in mine}  # a listener may be bound to all addresses
    for found in _of_this_process():
        with contextlib.suppress(OSError):
            if _listens(found):
                continue
            here, there = _port(found.getsockname()[:2]), _port(found.getpeername()[:2])
            if here[1] in numbers or there in theirs:
                yield found


def shut_down(mine: Collection[Port], theirs: Collection[Port]) -> int:
    """Shut down what was accepted at these ports of ours, or connected to these of others.

    Returns:
        How many connections.
    """
    shut = 0
    for found in _connected(mine, theirs):
        with contextlib.suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)
            shut += 1
    return shut


def carried(mine: Collection[Port], theirs: Collection[Port]) -> int | None:
    """Bytes that such connections have carried, both ways; None while some are on their way.

    Raises:
        OSError: the kernel does not say.
    """
    total, under_way = 0, False
    for found in _connected(mine, theirs):
        told = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        under_way = under_way or bool(struct.unpack_from("I", told, _UNACKED)[0])
        total += sum(struct.unpack_from("QQ", told, _ACKED_AND_RECEIVED))
    return None if under_way else total
