"""Groups that are built beside the present one, in one process: who waits is always told."""

import threading
from contextlib import closing

import pytest
import torch

from elastix.comm.network import process_group
from elastix.comm.network.door import draw_secret
from elastix.comm.network.meeting import Rendezvous
from elastix.comm.network.next_group import NextGroup
from elastix.comm.network.process_group import Builder, Wiring
from elastix.comm.protocol.membership import Membership

HOST = "127.0.0.1"


def wiring(rendezvous, me, **fields):
    return Wiring(
        address=rendezvous.address, interface=HOST, backend="gloo", me=me, secret=SECRET, **fields
    )


SECRET = draw_secret()
MEMBERS = (0, 1)


class Told(threading.Event):
    """Set whenever a builder is through; waits until something holds."""

    def until(self, holds):
        while not holds():
            self.clear()
            if not holds():
                assert self.wait(60), "nobody was told"


@pytest.fixture
def rendezvous():
    with closing(Rendezvous(HOST, SECRET)) as there:
        yield there


def test_a_proposal_that_was_agreed_on_stays_when_the_next_one_comes(rendezvous):
    """Else one has built it and the other begins anew, and neither gets through."""
    told = Told()
    sides = [NextGroup(lambda me=me: wiring(rendezvous, me), told.set) for me in MEMBERS]
    for side in sides:
        side.begin(Membership(1, MEMBERS, urgent=False))
    told.until(lambda: all(side.look(1).ready for side in sides))
    sides[0].begin(Membership(2, MEMBERS, urgent=False))
    builders = [side.take(1) for side in sides]
    totals = [torch.ones(3), torch.ones(3)]
    pending = [b.result.all_reduce(t) for b, t in zip(builders, totals, strict=True)]
    for operation in pending:
        over = threading.Event()
        operation.on_finish(over.set)
        assert over.wait(60)
        assert operation.settle() is None
    assert totals[0].tolist() == totals[1].tolist() == [2.0] * 3
    sides[1].begin(Membership(2, MEMBERS, urgent=False))
    told.until(lambda: all(side.look(2).ready for side in sides))
    for side in sides:
        side.take(3)  # an urgent one; what was built for older ones is ended
        assert side.look(2) is None
    for builder in builders:
        builder.result.abandon()


@pytest.mark.parametrize("error", [KeyError("gone"), OSError("unreachable"), TypeError("what")])
def test_whatever_goes_wrong_is_told(rendezvous, monkeypatch, error):
    def refuse(*_args):
        raise error

    monkeypatch.setattr(process_group, "MeetingStore", refuse)
    told = threading.Event()
    builder = Builder(wiring(rendezvous, 0, generation=1, members=MEMBERS), told.set)
    assert told.wait(60)
    assert builder.failed is error
    assert not builder.ready
    assert builder.unreachable == {0}


def test_one_that_waits_for_others_ends_when_nobody_wants_it(rendezvous):
    told = threading.Event()
    builder = Builder(wiring(rendezvous, 0, generation=1, members=MEMBERS), told.set)
    builder.abandon()
    assert told.wait(60)
    assert builder.failed is not None
