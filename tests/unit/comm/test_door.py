"""Strangers at the ports of a run: they get nothing, and disturb nobody."""

import io
import json
import math
import os
import socket
import struct
import threading
import time
from contextlib import closing, contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from elastix.comm.network import catch_up_stream, door
from elastix.comm.network.catch_up_stream import CatchUpReceiver, CatchUpSender, _Subscriber
from elastix.comm.network.catch_up_wire import head_of, read_watched
from elastix.comm.network.door import (
    CATCH_UP,
    MEETING,
    Door,
    Refused,
    answers,
    draw_secret,
    enter,
    unreachable,
)
from elastix.comm.network.meeting import MeetingStore, Rendezvous
from elastix.comm.protocol.catch_up_messages import Watched
from elastix.state import State, raw_bytes

HOST = "127.0.0.1"
SECRET = draw_secret()
CHALLENGE_BYTES = 32


def connect(address):
    stranger = socket.create_connection(address, 10)
    stranger.settimeout(30)
    return stranger


def read_all(stranger):
    """Everything that a stranger ever gets."""
    read = b""
    try:
        while piece := stranger.recv(1 << 16):
            read += piece
    except ConnectionError:
        pass
    return read


def reset(address):
    """As a port scan does."""
    stranger = connect(address)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


def silent(address):
    return connect(address)


def half(address):
    stranger = connect(address)
    stranger.sendall(b"\0" * 50)
    return stranger


def garbage(address):
    stranger = connect(address)
    stranger.sendall(os.urandom(72))
    return stranger


def old_greeting(address):
    """What a joiner said before there was a secret: its id."""
    stranger = connect(address)
    stranger.sendall(b"7\n")
    return stranger


def endless_line(address):
    stranger = connect(address)

    def send():
        try:
            while True:
                stranger.sendall(b"x" * 65536)
        except OSError:
            pass

    threading.Thread(target=send, daemon=True).start()
    return stranger


ATTACKS = [reset, silent, half, garbage, old_greeting, endless_line]


@contextmanager
def under(attack, address, times=3):
    """While so many strangers do it; a port is attacked before and while it is used."""
    strangers = [found for _ in range(times) if (found := attack(address)) is not None]
    try:
        yield strangers
    finally:
        for stranger in strangers:
            stranger.close()


class Guests:
    """Who was let in."""

    def __init__(self):
        self.ids, self.come = [], threading.Event()

    def __call__(self, connection, worker):
        self.ids.append(worker)
        connection.sendall(b"welcome")
        connection.close()
        self.come.set()


@pytest.fixture
def quick(monkeypatch):
    """A short greeting, for those who never end theirs."""
    monkeypatch.setattr(door, "_GREETING_S", 0.5)


@pytest.mark.parametrize("attack", ATTACKS)
def test_workers_get_through_while_strangers_are_at_the_door(attack):
    guests = Guests()
    with closing(Door(HOST, CATCH_UP, SECRET, guests)) as there, under(attack, there.address):
        with closing(enter(there.address, CATCH_UP, SECRET, 7)) as connection:
            assert read_all(connection) == b"welcome"
        assert guests.ids == [7]


@pytest.mark.parametrize("attack", ATTACKS[1:])
def test_a_stranger_is_told_one_number_and_then_nothing(quick, attack):
    guests = Guests()
    with (
        closing(Door(HOST, CATCH_UP, SECRET, guests)) as there,
        under(attack, there.address) as strangers,
    ):
        told = [read_all(stranger) for stranger in strangers]
    assert [len(what) for what in told] == [CHALLENGE_BYTES] * 3
    assert len(set(told)) == 3
    assert guests.ids == []


def overhear(guests):
    """A greeting that succeeds, as somebody between the two sees it: what the caller has sent."""
    with closing(Door(HOST, CATCH_UP, SECRET, guests)) as there:
        between = socket.create_server((HOST, 0))
        heard = []

        def pass_on():
            caller, _ = between.accept()
            with caller, connect(there.address) as host:
                caller.sendall(host.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
                heard.append(caller.recv(72, socket.MSG_WAITALL))
                host.sendall(heard[0])
                caller.sendall(host.recv(32, socket.MSG_WAITALL))

        thread = threading.Thread(target=pass_on, daemon=True)
        thread.start()
        enter(between.getsockname(), CATCH_UP, SECRET, 7).close()
        thread.join()
        between.close()
        assert guests.come.wait(30)
    return heard[0]


def test_a_greeting_that_was_overheard_is_of_no_use(quick):
    guests = Guests()
    greeting = overhear(guests)
    assert guests.ids == [7]
    with closing(Door(HOST, CATCH_UP, SECRET, guests)) as there, connect(there.address) as stranger:
        stranger.sendall(greeting)
        assert len(read_all(stranger)) == CHALLENGE_BYTES
    assert guests.ids == [7]


@pytest.mark.parametrize(
    ("purpose", "secret"), [(CATCH_UP, draw_secret()), (MEETING, SECRET)], ids=["secret", "purpose"]
)
def test_another_secret_and_another_purpose_are_refused(purpose, secret):
    guests = Guests()
    with closing(Door(HOST, CATCH_UP, SECRET, guests)) as there:
        with pytest.raises(Refused):
            enter(there.address, purpose, secret, 7)
        assert not answers(there.address, purpose, secret)
        assert answers(there.address, CATCH_UP, SECRET)
    assert guests.ids == []


def test_whoever_listens_has_to_know_the_secret_too(quick):
    """A State is not taken from somebody who has got a worker's old port."""
    with socket.create_server((HOST, 0)) as impostor:

        def listen():
            caller, _ = impostor.accept()
            with caller:
                caller.sendall(os.urandom(CHALLENGE_BYTES))
                caller.recv(72, socket.MSG_WAITALL)
                caller.sendall(os.urandom(32))

        threading.Thread(target=listen, daemon=True).start()
        with pytest.raises(Refused):
            enter(impostor.getsockname(), CATCH_UP, SECRET, 7)


def test_bytes_that_trickle_in_do_not_put_the_deadline_off(quick):
    guests = Guests()
    with closing(Door(HOST, CATCH_UP, SECRET, guests)) as there, connect(there.address) as stranger:
        began = time.monotonic()
        stranger.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        try:
            while time.monotonic() < began + 30:
                stranger.sendall(b"x")
                time.sleep(0.01)
        except OSError:
            pass
        assert time.monotonic() < began + 30


def test_a_door_stays_open_when_the_system_has_no_thread_to_give(monkeypatch):
    let_in = threading.Event()
    with closing(Door(HOST, CATCH_UP, SECRET, lambda *_: let_in.set())) as there:
        started, refused = threading.Thread.start, threading.Event()

        def start(thread):
            if thread.name == f"{CATCH_UP}-greeting" and not refused.is_set():
                refused.set()
                raise RuntimeError("can't start new thread")
            started(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        assert not answers(there.address, CATCH_UP, SECRET)
        assert refused.is_set()
        enter(there.address, CATCH_UP, SECRET, 1).close()
        assert let_in.wait(30)


def test_more_strangers_than_there_are_places_keep_nobody_out():
    guests = Guests()
    with (
        closing(Door(HOST, CATCH_UP, SECRET, guests)) as there,
        under(silent, there.address, 200),
        closing(enter(there.address, CATCH_UP, SECRET, 7)) as connection,
    ):
        assert read_all(connection) == b"welcome"


def test_a_run_without_a_secret_opens_no_door():
    with pytest.raises(ValueError, match="32 bytes"):
        Door(HOST, CATCH_UP, b"", Guests())


def test_it_listens_at_its_host_alone():
    with (
        closing(Door(HOST, CATCH_UP, SECRET, Guests())) as there,
        pytest.raises(OSError),
        connect(("127.0.0.2", there.address[1])),
    ):
        pass


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_it_listens_at_an_ipv6_address():
    with closing(Door("::1", CATCH_UP, SECRET, Guests())) as there:
        assert answers(there.address, CATCH_UP, SECRET)


def test_who_does_not_answer_is_unreachable():
    with (
        closing(Door(HOST, CATCH_UP, SECRET, Guests())) as there,
        closing(Door(HOST, CATCH_UP, draw_secret(), Guests())) as other,
        socket.create_server((HOST, 0)) as closed,
    ):
        gone = closed.getsockname()
        closed.close()
        doors = {0: there.address, 1: other.address, 2: gone}
        assert unreachable(doors, CATCH_UP, SECRET) == {1, 2}
    assert unreachable({}, CATCH_UP, SECRET) == frozenset()


# ---------------------------------------------------------------------------- the feed


def give_until(feed, done):
    """Boundaries of a donor, one after the other."""
    deadline = time.monotonic() + 30
    state = State({"secret.weight": torch.ones(3)}, {"step": 1})
    while not done() and time.monotonic() < deadline:
        feed.boundary(lambda: lambda: state, 5, lambda _state: "digest")
        time.sleep(0.01)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_joiner_is_given_the_state_whoever_else_connects(attack):
    with (
        closing(CatchUpSender(HOST, ["layout"], SECRET)) as feed,
        under(attack, feed.address),
        closing(CatchUpReceiver(feed.address, SECRET, 7, lambda: None)) as watch,
    ):
        give_until(feed, lambda: watch.given or watch.failed)
        assert watch.given is not None
        assert torch.equal(watch.given.state.tensors["secret.weight"], torch.ones(3))


@pytest.mark.parametrize("attack", ATTACKS[1:])
def test_a_stranger_is_not_given_the_state(quick, attack):
    with (
        closing(CatchUpSender(HOST, ["layout"], SECRET)) as feed,
        under(attack, feed.address) as strangers,
    ):
        with closing(CatchUpReceiver(feed.address, SECRET, 7, lambda: None)) as watch:
            give_until(feed, lambda: watch.given or watch.failed)
        told = [read_all(stranger) for stranger in strangers]
    assert [len(what) for what in told] == [CHALLENGE_BYTES] * 3


def test_a_joiner_gives_up_a_donor_that_says_nothing(quick):
    with socket.create_server((HOST, 0)) as dumb:
        told = threading.Event()
        with closing(CatchUpReceiver(dumb.getsockname(), SECRET, 7, told.set)) as watch:
            assert told.wait(30)
            assert watch.failed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_joiner_without_memory_for_what_it_is_told_knows_that_it_follows_nobody():
    told = threading.Event()
    line = {"say": "operation", "operation": 5, "tensors": [["float32", 1 << 60]]}

    def tell(connection, _worker):
        connection.sendall(json.dumps(line).encode() + b"\n")
        connection.recv(1)

    with (
        closing(Door(HOST, CATCH_UP, SECRET, tell)) as donor,
        closing(CatchUpReceiver(donor.address, SECRET, 7, told.set)) as watch,
    ):
        assert told.wait(30)
        assert watch.failed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_donor_that_cannot_copy_its_state_lets_its_joiners_go():
    def out_of_memory():
        raise RuntimeError("not enough memory")

    with (
        closing(CatchUpSender(HOST, ["layout"], SECRET)) as feed,
        closing(CatchUpReceiver(feed.address, SECRET, 7, lambda: None)) as watch,
    ):
        deadline = time.monotonic() + 30
        while not watch.failed and time.monotonic() < deadline:
            feed.boundary(lambda: out_of_memory, 5, lambda _state: "digest")
            time.sleep(0.01)
        assert watch.failed
        feed.boundary(lambda: pytest.fail("nobody is left"), 6, lambda _state: "digest")
        assert not feed.watched


def step(elements):
    return Watched(5, 1, (0,), (0,), 1, 1, torch.zeros(5), (torch.ones(elements),))


def test_a_step_that_is_larger_than_the_queue_can_be_followed(monkeypatch):
    monkeypatch.setattr("elastix.comm.network.catch_up_stream.QUEUE_BYTES", 1 << 20)
    with (
        closing(CatchUpSender(HOST, ["layout"], SECRET)) as feed,
        closing(CatchUpReceiver(feed.address, SECRET, 7, lambda: None)) as watch,
    ):
        give_until(feed, lambda: watch.given or watch.failed)
        for _ in range(4):
            feed.tell(step(1 << 19))  # of 2 MiB
            deadline = time.monotonic() + 30
            while watch.head is None and not watch.failed and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not watch.failed
            assert torch.equal(watch.pop().parts[0], torch.ones(1 << 19))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_what_an_operation_gave_has_the_shape_that_it_had(shape):
    """A roll call gives a table, with a row for each member."""
    result = torch.arange(math.prod(shape)).reshape(shape)
    told = Watched(5, 1, (0,), (0,), 1, 1, result, (torch.zeros(shape), torch.ones(2)))
    head, tensors = head_of(told)
    stream = io.BytesIO(b"".join(raw_bytes(tensor).numpy().tobytes() for tensor in tensors))
    read, size = read_watched(json.loads(json.dumps(head)), stream)
    assert size == len(stream.getvalue())
    for ours, theirs in zip((read.result, *read.parts), tensors, strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)


def test_a_joiner_that_takes_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr("elastix.comm.network.catch_up_stream.QUEUE_BYTES", 1 << 20)
    with (
        closing(CatchUpSender(HOST, ["layout"], SECRET)) as feed,
        closing(CatchUpReceiver(feed.address, SECRET, 7, lambda: None)) as watch,
    ):
        give_until(feed, lambda: watch.given or watch.failed)
        told = 0
        while feed.watched and told < 200:  # what nobody uses: 200 MiB
            feed.tell(step(1 << 18))
            feed.boundary(lambda: pytest.fail("nobody asked"), 6, lambda _state: "digest")
            told += 1
        assert told < 200


# ---------------------------------------------------------------------------- the meeting


@pytest.mark.parametrize("attack", ATTACKS)
def test_members_meet_and_connect_whoever_else_comes(attack):
    rendezvous = Rendezvous(HOST, SECRET)
    results = {}

    def meet(rank):
        meeting = MeetingStore(rendezvous.address, SECRET, rank, "1-all")
        with closing(meeting):
            said = meeting.arrive(f"{rank}", b"%d" % rank, ["0", "1", "2"], lambda: False)
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
            options._timeout = timedelta(seconds=30)
            group = dist.ProcessGroupGloo(meeting, rank, 3, options)
            total = torch.ones(4)
            group.allreduce([total]).wait()
            results[rank] = (said, total.tolist(), meeting.writers())

    with closing(rendezvous), under(attack, rendezvous.address):
        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert results == dict.fromkeys(range(3), ([b"0", b"1", b"2"], [3.0] * 4, {0, 1, 2}))


def test_what_is_said_at_a_meeting():
    with closing(Rendezvous(HOST, SECRET)) as rendezvous:
        with closing(MeetingStore(rendezvous.address, SECRET, 0, "m")) as meeting:
            meeting.set("a", "1")
            assert meeting.get("a") == b"1"
            assert meeting.check(["a"])
            assert not meeting.check(["a", "b"])
            assert (meeting.add("n", 2), meeting.add("n", -5)) == (2, -3)
            assert meeting.compare_set("b", "", "x") == b"x"
            assert meeting.compare_set("b", "y", "z") == b"x"
            assert meeting.compare_set("b", "x", "z") == b"z"
            assert (meeting.num_keys(), meeting.delete_key("b"), meeting.delete_key("b")) == (
                3,
                True,
                False,
            )
            with pytest.raises(RuntimeError, match="nobody"):
                meeting.wait(["c"], timedelta(0))
            with closing(MeetingStore(rendezvous.address, SECRET, 1, "other")) as other:
                assert not other.check(["a"])
        deadline = time.monotonic() + 30
        forgotten = False
        while not forgotten and time.monotonic() < deadline:  # it learns of a guest's end by itself
            with closing(MeetingStore(rendezvous.address, SECRET, 0, "m")) as again:
                forgotten = not again.check(["a"])
        assert forgotten


def test_whoever_waits_at_a_meeting_can_leave_it():
    with closing(Rendezvous(HOST, SECRET)) as rendezvous:
        meeting = MeetingStore(rendezvous.address, SECRET, 0, "m")
        ended = threading.Event()

        def wait():
            with pytest.raises(OSError, match="left"):
                meeting.arrive("0", b"", ["0", "1"], lambda: False)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        with closing(MeetingStore(rendezvous.address, SECRET, 1, "m")) as other:
            other.wait(["0"])
        meeting.close()
        assert ended.wait(30)


def test_who_hangs_up_on_a_joiner_may_be_through_before_another_thread_begins(monkeypatch):
    def now(target, args=(), **_):
        return SimpleNamespace(start=lambda: target(*args))

    stand_in = SimpleNamespace(Thread=now, Condition=threading.Condition)
    monkeypatch.setattr(catch_up_stream, "threading", stand_in)
    ours, theirs = socket.socketpair()
    with theirs:
        subscriber = _Subscriber(ours, 3, lambda: None)
        subscriber.close()
        subscriber.start(0)
        assert ours.fileno() == -1
        assert not theirs.recv(1)
