"""Nodes that answer are told from those that are gone, and nobody waits for these for long."""

import contextlib
import socket
import time
from pathlib import Path

from elastix.train.on_ray.answering_nodes import answering

FILES = Path("/proc/self/fd")


def test_who_listens_answers_and_who_is_gone_does_not():
    with (
        socket.create_server(("127.0.0.1", 0)) as there,
        socket.create_server(("127.0.0.1", 0)) as x,
    ):
        here, gone = there.getsockname()[:2], x.getsockname()[:2]
        x.close()
        assert answering([here, gone, here], 5.0) == {here}
        assert answering([], 5.0) == set()


def test_a_host_that_says_nothing_is_not_waited_for_longer_than_that():
    """A listener whose queue is full drops what comes: as if the host were off."""
    with socket.socket() as full, socket.create_server(("127.0.0.1", 0)) as there:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        silent, here = full.getsockname()[:2], there.getsockname()[:2]
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(silent)
        began = time.monotonic()
        assert answering([silent, here], 2.0) == {here}
        assert time.monotonic() - began < 60.0  # it alone would wait for two minutes
        for filler in fillers:
            filler.close()


def open_files():
    """Number and what it is; a socket's is its own. Whatever is closed meanwhile is left out."""
    found = set()
    for file in FILES.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add((file.name, str(file.readlink())))
    return found


def test_no_socket_is_left_open():
    with socket.create_server(("127.0.0.1", 0)) as there:
        before = open_files()
        for _ in range(20):
            answering([there.getsockname()[:2], ("127.0.0.1", 1), ("256.0.0.1", 1)], 0.05)
        assert open_files() <= before  # what earlier tests have open may be closed meanwhile
