"""The lines within a crew: words there and back bit by bit, and what strangers and nonsense get."""

import math
import socket
import threading

import pytest
import torch

from elastix.comm.network import crew_line
from elastix.comm.network.crew_line import (
    FollowersLine,
    SpeakersLines,
    decoded,
    encoded,
)
from elastix.comm.network.door import CREW, MEETING, draw_secret, enter
from elastix.comm.protocol.crew import (
    Contribute,
    Crew,
    Go,
    Going,
    Gone,
    Held,
    Meeting,
    Prepared,
    Release,
    StoreHere,
    TakeOver,
    There,
)
from elastix.comm.protocol.follower import Follower
from elastix.comm.protocol.inbox import Inbox
from elastix.comm.protocol.operation import OperationOutcome

HOST = "127.0.0.1"
WAIT_S = 10.0


@pytest.mark.parametrize(
    "word",
    [
        Meeting(3, (0, 2, 5), 0, (2, 5)),
        Meeting(3, (0,)),
        Going(3, 17, 2, void=True, next_void=False),
        Go(17, 3, tuple(range(4000))),
        Release(4),
        StoreHere(),
        Prepared(),
        Contribute(17, 3, 2),
        TakeOver(17, 3),
        Held(17, 3, 1),
        There(3),
    ],
    ids=lambda word: type(word).__name__,
)
def test_a_word_comes_as_it_was_said(word):
    line = encoded(word)
    assert line.count(b"\n") == 1
    assert decoded(line) == word


@pytest.mark.parametrize(
    "result",
    [
        torch.tensor([-(2**63), 2**63 - 1, 0]),
        torch.tensor([math.nan, math.inf, -0.0, 5e-324, 0.1], dtype=torch.float64),
        torch.tensor([[1.5, 2.5]], dtype=torch.float32),
        torch.zeros(0),
        torch.full((3, 2), 7),
    ],
    ids=lambda result: f"{result.dtype}{list(result.shape)}",
)
def test_the_result_of_a_round_comes_bit_by_bit(result):
    gone = decoded(encoded(Gone(9, OperationOutcome(result, 2, 3, (0, 1)))))
    assert isinstance(gone, Gone)
    outcome = gone.outcome
    assert (gone.operation, outcome.complete, outcome.generation) == (9, 2, 3)
    assert outcome.contributors == (0, 1)
    assert outcome.result.dtype == result.dtype
    assert outcome.result.shape == result.shape
    assert outcome.result.numpy().tobytes() == result.numpy().tobytes()


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b"[]\n",
        b'"Go"\n',
        b'{"word": "Bye"}\n',
        b'{"word": "Held"}\n',
        b'{"word": "Held", "operation": 1, "generation": 2, "more": 3}\n',
        b'{"word": "Gone", "operation": 1, "result": {"dtype": "os", "shape": [], "bytes": ""}}\n',
        b'{"word": "Gone", "operation": 1, "result": null}\n',
        b'{"word": {}}\n',
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_word_is_refused(line):
    with pytest.raises(ValueError):
        decoded(line)


class Ends:
    """A speaker of three places, and what its lines have told."""

    def __init__(self):
        self.secret = draw_secret()
        self.crew = Crew(3)
        self.broken = threading.Event()
        self.news = threading.Condition()
        self.lines = SpeakersLines(HOST, self.secret, self.crew, self.notify, self.broken.set)

    def notify(self):
        with self.news:
            self.news.notify_all()

    def follower(self, place):
        follower = Follower(0, Inbox())
        broken = threading.Event()
        to = (self.lines.address, self.secret, place, follower, self.notify, broken.set)
        return FollowersLine(*to), follower, broken

    def comes_to(self, until):
        with self.news:
            assert self.news.wait_for(until, WAIT_S)


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.lines.close()


def test_words_go_both_ways(ends):
    first, follower, _ = ends.follower(1)
    second, other, _ = ends.follower(2)
    first.say(Prepared())
    second.say(Prepared())
    ends.comes_to(lambda: ends.crew.prepared)
    ends.lines.say(Release(4))
    ends.comes_to(lambda: bool(follower._orders) and bool(other._orders))
    assert list(follower._orders) == [Release(4)]
    first.say(Held(5, 2, 1))
    second.say(Held(5, 2, 1))
    ends.comes_to(lambda: ends.crew.held(5, 2, 1))
    assert not ends.crew.held(5, 3, 1)
    first.close()
    second.close()


def test_a_line_that_ends_breaks_the_crew(ends):
    first, _, _ = ends.follower(1)
    _, follower, told = ends.follower(2)
    first.close()
    assert ends.broken.wait(WAIT_S)
    assert ends.crew.broken
    ends.lines.close()
    assert told.wait(WAIT_S)
    assert follower.broken


def test_a_word_may_be_as_long_as_the_round_of_an_exact_evaluation(ends):
    """Of 700,000 batches; longer ones than a line takes would count as the loss of the worker."""
    line, follower, _ = ends.follower(1)
    line.say(Prepared())
    ends.comes_to(lambda: ends.crew._prepared == {1})
    result = torch.arange(700_000 * 2, dtype=torch.float64)
    ends.lines.say(Gone(9, OperationOutcome(result, 2, 3, (0, 1))))
    ends.comes_to(lambda: bool(follower._orders) or follower.broken)
    (gone,) = follower._orders
    assert torch.equal(gone.outcome.result, result)
    line.close()


@pytest.mark.parametrize("said", [b"nonsense\n", b"x" * 4098, b'{"word": "Go"}\n'])
def test_nonsense_breaks_the_crew(ends, said, monkeypatch):
    monkeypatch.setattr(crew_line, "MOST_BYTES", 4096)
    connection = enter(ends.lines.address, CREW, ends.secret, 1)
    with connection:
        connection.sendall(said)
        assert ends.broken.wait(WAIT_S)


def test_strangers_and_wrong_places_get_nothing(ends):
    with socket.create_connection(ends.lines.address, WAIT_S) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.sendall(b"\0" * 200)
        assert len(stranger.recv(4096)) <= 32  # the drawn number
        assert stranger.recv(4096) == b""
    with pytest.raises(ConnectionError):
        enter(ends.lines.address, CREW, draw_secret(), 1)
    with pytest.raises(ConnectionError):
        enter(ends.lines.address, MEETING, ends.secret, 1)
    for place in (0, 3, -1):
        with enter(ends.lines.address, CREW, ends.secret, place) as nobody:
            nobody.settimeout(WAIT_S)
            assert nobody.recv(1) == b""
    assert not ends.broken.is_set()


def test_a_place_is_taken_once(ends):
    line, _, _ = ends.follower(1)
    line.say(Prepared())
    ends.comes_to(lambda: ends.crew._prepared == {1})
    with enter(ends.lines.address, CREW, ends.secret, 1) as double:
        double.settimeout(WAIT_S)
        assert double.recv(1) == b""
    assert not ends.broken.is_set()
    line.close()
