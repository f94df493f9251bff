"""Which nodes answer now: asked directly, as Ray hears of one that is gone ten seconds later.

A connection is made to the daemon of each and closed again. The kernel refuses it if the daemon is
gone, and nobody says anything if the host is. A daemon that is stopped passes for one that answers.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Collection

Address = tuple[str, int]
"""Host, as a number, and port."""


def answering(addresses: Collection[Address], timeout_s: float) -> set[Address]:
    """Those that take a connection within the timeout; all are asked at the same time."""
    found: set[Address] = set()
    asked: dict[int, tuple[socket.socket, Address]] = {}
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as waiting:
        for host, port in set(addresses):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            line = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            line.setblocking(False)
            with contextlib.suppress(OSError):  # no such host
                line.connect_ex((host, port))
            waiting.register(line, selectors.EVENT_WRITE)
            asked[line.fileno()] = line, (host, port)
        while asked and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                line, address = asked.pop(key.fd)
                waiting.unregister(line)
                with contextlib.suppress(OSError):  # it was refused
                    line.getpeername()
                    found.add(address)
    return found
