"""What this process's connections have carried."""

import socket

import pytest

from elastix.comm.network import sockets


@pytest.mark.parametrize("who", ["accepted", "connected"])
def test_bytes_both_ways_are_counted_of_the_connections_that_are_asked_for(who):
    with socket.socket() as listener, socket.socket() as elsewhere:
        for one in (listener, elsewhere):
            one.bind(("127.0.0.1", 0))
            one.listen()
        port = listener.getsockname()
        asked = ({port}, ()) if who == "accepted" else ((), {port})
        with (
            socket.create_connection(port) as near,
            listener.accept()[0] as far,
            socket.create_connection(elsewhere.getsockname()) as other,
        ):
            before = sockets.carried(*asked)
            assert before is not None
            near.sendall(bytes(1000))
            far.recv(1000, socket.MSG_WAITALL)
            far.sendall(bytes(10))
            near.recv(10, socket.MSG_WAITALL)
            other.sendall(bytes(99))
            while (after := sockets.carried(*asked)) is None:  # the last is being acknowledged
                pass
            assert after - before in (1010, 1010 + 1)  # which may count the greeting of TCP
