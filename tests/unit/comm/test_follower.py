"""A follower, word by word: what it asks its driver for, and when it waits. No simulation.

Its worker is 3, in a group of 3 and 5. What crews come to as a whole is in test_crew_schedules.
"""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

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
from elastix.comm.protocol.membership import Membership
from elastix.comm.protocol.operation import OperationOutcome
from elastix.comm.protocol.participant import Broken, Fenced, Released
from elastix.comm.protocol.recovery import STATELESS
from elastix.comm.protocol.wants import (
    Abandon,
    Await,
    CompareLayouts,
    Compute,
    Conclude,
    Connect,
    Connected,
    GiveState,
    Payload,
    ReduceBuckets,
    Say,
    Seat,
    StoreState,
    Superseded,
    TakeState,
)
from elastix.errors import TrainError

ME, MEMBERS, STEP = 3, (3, 5), 1


class Rail(NamedTuple):
    generation: int
    members: tuple[int, ...] = MEMBERS


@dataclass
class Step:
    """An operation."""

    kind: int = STEP
    lacking: bool = False

    def lacks(self, members):
        self.asked = members
        return self.lacking


class Driven:
    """A follower with the State, in generation 2 and before operation 4, and its driver."""

    def __init__(self, has_state=True, generation=2):
        self.inbox = Inbox()
        self.follower = Follower(ME, self.inbox)
        self.inbox.publish(Membership(2, MEMBERS))
        self.raises = {}  # by type of want, what meets it
        self.wants = []
        if has_state:
            self.follower.hand.number = 4
        self.follower.generation = generation
        self.follower.group = Rail(generation)
        if has_state:
            self.follower._open = generation

    def starts(self, course):
        self.course, self.answer = course, None
        return self.goes_on()

    def goes_on(self):
        """Until it waits, or is over: ("waits", phase) or ("over", what it came to)."""
        waiting = getattr(self, "waiting", None)
        if waiting is not None:
            if not waiting.until():
                return "waits", waiting.phase
            self.waiting = None
        try:
            wanted = self.course.send(self.answer)
            while True:
                self.answer = None
                if isinstance(wanted, Await):
                    if not wanted.until():
                        self.waiting = wanted
                        return "waits", wanted.phase
                    wanted = self.course.send(None)
                    continue
                self.wants.append(wanted)
                if isinstance(wanted, Compute):
                    return "computes", wanted.members
                error = self.raises.pop(type(wanted), None)
                if error is not None:
                    wanted = self.course.throw(error)
                    continue
                rail = Rail(wanted.generation) if isinstance(wanted, Connected) else None
                wanted = self.course.send(rail)
        except StopIteration as over:
            return "over", over.value

    def hears(self, *orders):
        for order in orders:
            self.follower.hear(order)
        return self.goes_on()

    def said(self):
        return [want.word for want in self.wants if isinstance(want, Say)]

    def asked(self):
        """The kinds of what it wanted since it was asked last."""
        kinds, self.wants = [type(want) for want in self.wants], []
        return kinds


@pytest.fixture
def driven():
    return Driven()


OUTCOME = OperationOutcome(torch.zeros(1), 2, 2, MEMBERS)


def gone(operation=4):
    return Gone(operation, OUTCOME)


def test_it_says_that_it_is_prepared(driven):
    assert driven.starts(driven.follower.assemble()) == ("over", None)
    assert driven.said() == [Prepared()]


# ---------------------------------------------------------------------------- an operation


def test_it_reduces_says_so_and_leaves_when_it_is_told(driven):
    operation = Step()
    assert driven.starts(driven.follower.run(operation)) == ("waits", "held")
    assert driven.asked() == [ReduceBuckets, Say]
    assert operation.asked == MEMBERS
    assert driven.follower.call == (4, STEP)
    assert driven.follower.hand.complete == 2
    assert driven.hears(gone()) == ("over", OUTCOME)
    assert driven.wants == [Conclude(operation, OUTCOME, 4, ())]
    assert driven.follower.call == (5, 0)


def test_what_it_holds_is_said_with_its_kind(driven):
    driven.starts(driven.follower.run(Step(kind=2)))
    assert driven.said() == [Held(4, 2, 2)]


def test_buckets_that_stand_are_not_reduced_again(driven):
    driven.starts(driven.follower.run(Step()))
    driven.asked()
    assert driven.hears(Going(2, 4, complete=2)) == ("waits", "held")
    assert driven.asked() == []


def test_buckets_that_do_not_stand_are_reduced_in_the_new_rail(driven):
    driven.starts(driven.follower.run(Step()))
    driven.asked()
    driven.inbox.publish(Membership(3, MEMBERS))
    assert driven.hears(Meeting(3, MEMBERS), Going(3, 4)) == ("waits", "held")
    assert driven.asked() == [Abandon, Connect, Connected, ReduceBuckets, Say]
    assert driven.follower.hand.complete == 3


def test_without_a_word_on_how_to_go_on_nothing_is_reduced_in_the_new_rail(driven):
    driven.starts(driven.follower.run(Step()))
    driven.asked()
    driven.inbox.publish(Membership(3, MEMBERS))
    assert driven.hears(Meeting(3, MEMBERS)) == ("waits", "held")
    assert driven.asked() == [Abandon, Connect]
    assert not driven.follower.usable


def test_a_void_operation_is_held_without_reducing(driven):
    driven.follower.hand.void = True
    driven.starts(driven.follower.run(Step(lacking=True)))
    assert driven.asked() == [Say]
    assert not driven.follower.usable


def test_void_and_what_comes_after_it_are_the_speakers_to_say(driven):
    driven.starts(driven.follower.run(Step()))
    driven.hears(Going(2, 4, complete=2, void=True, next_void=True))
    assert (driven.follower.hand.void, driven.follower.hand.next_void) == (True, True)
    driven.hears(gone())
    assert (driven.follower.hand.void, driven.follower.hand.next_void) == (True, False)


def test_news_ends_the_wait_for_the_rail_and_the_buckets_stay_until_a_word(driven):
    driven.raises[ReduceBuckets] = Superseded()
    driven.inbox.publish(Membership(3, MEMBERS))
    assert driven.starts(driven.follower.run(Step())) == ("waits", "")
    assert driven.follower.superseded
    assert driven.said() == []
    assert driven.hears(Meeting(3, MEMBERS), Going(3, 4)) == ("waits", "held")
    assert driven.said() == [Held(4, 3, STEP)]


def test_a_word_is_worth_more_than_the_rail(driven):
    assert not driven.follower.superseded
    driven.follower.hear(Going(2, 4))
    assert driven.follower.superseded


@pytest.mark.parametrize(
    "order",
    [
        gone(5),
        Going(3, 4),
        Going(2, 5),
        Going(2, 4, complete=1),
        Go(4, 2, MEMBERS),
        Release(3),
        Contribute(4, 2, STEP + 1),
        Contribute(5, 2, STEP),
        Contribute(4, 3, STEP),
        TakeOver(5, 2),
        TakeOver(4, 1),
        TakeOver(4, 2),  # it lacks nothing
    ],
)
def test_what_does_not_belong_here_says_that_the_places_have_parted(driven, order):
    driven.starts(driven.follower.run(Step()))
    driven.inbox.publish(Membership(1, MEMBERS))
    with pytest.raises(
        TrainError, match="of worker 3 have parted: one is in operation 4 of kind 1"
    ):
        driven.hears(order)


# ------------------------------------------------------------------ computed by all of a worker


def test_it_contributes_whatever_it_has_heard_since(driven):
    operation = Step(kind=2)
    driven.starts(driven.follower.run(operation))
    driven.asked()
    driven.inbox.publish(Membership(3, (3,)))
    driven.hears(Contribute(4, 2, 2))
    assert driven.wants == [Payload(Seat(2, MEMBERS, 0), operation)]


def test_slices_of_the_lost_are_computed_when_it_is_told(driven):
    operation = Step(lacking=True)
    assert driven.starts(driven.follower.run(operation)) == ("waits", "held")
    assert driven.asked() == []
    assert driven.follower.hand.complete == 0
    assert driven.hears(TakeOver(4, 2)) == ("computes", MEMBERS)
    operation.lacking = False
    driven.asked()
    assert driven.goes_on() == ("waits", "held")
    assert driven.asked() == [ReduceBuckets, Say]


@pytest.mark.parametrize("order", [TakeOver(5, 2), TakeOver(4, 1)])
def test_slices_of_another_operation_or_group_are_not_computed(driven, order):
    driven.starts(driven.follower.run(Step(lacking=True)))
    driven.inbox.publish(Membership(1, MEMBERS))
    with pytest.raises(TrainError, match="have parted"):
        driven.hears(order)


def test_outside_of_any_operation_no_slices_are_computed(driven):
    driven.starts(driven.follower.boundary())
    with pytest.raises(TrainError, match="have parted"):
        driven.hears(TakeOver(4, 2))


# ---------------------------------------------------------------------------- between operations


def test_at_a_boundary_it_waits_for_go_and_takes_the_plan_from_it(driven):
    assert driven.starts(driven.follower.boundary()) == ("waits", "")
    assert driven.hears(Go(4, 7, (3,))) == ("over", None)
    assert driven.follower.planned == (3,)
    assert driven.asked() == []  # its rail stands


def test_it_comes_to_a_rail_that_is_not_connected_at_the_boundary(driven):
    driven.follower.group = None
    driven.starts(driven.follower.boundary())
    assert driven.hears(Go(4, 2, MEMBERS)) == ("over", None)
    assert driven.asked() == [Connected]
    assert driven.follower.group == Rail(2)
    assert driven.follower.usable


def test_a_rail_that_is_superseded_at_a_boundary_is_seen_to_later(driven):
    driven.follower.group = None
    driven.raises[Connected] = Superseded()
    driven.starts(driven.follower.boundary())
    assert driven.hears(Go(4, 2, MEMBERS)) == ("over", None)
    assert not driven.follower.usable


def test_go_for_another_operation_says_that_the_places_have_parted(driven):
    driven.starts(driven.follower.boundary())
    with pytest.raises(TrainError, match="was told Go"):
        driven.hears(Go(5, 2, MEMBERS))


def test_it_is_released_when_its_worker_leaves(driven):
    driven.starts(driven.follower.boundary())
    with pytest.raises(Released):
        driven.hears(Release(3))


def test_it_stores_the_state_where_its_worker_stands_still(driven):
    driven.starts(driven.follower.boundary())
    assert driven.hears(StoreHere()) == ("waits", "")
    assert driven.asked() == [StoreState]
    assert driven.hears(Go(4, 2, MEMBERS)) == ("over", None)


def test_other_words_at_a_boundary_are_obeyed(driven):
    driven.starts(driven.follower.boundary())
    driven.inbox.publish(Membership(3, MEMBERS))
    assert driven.hears(Meeting(3, MEMBERS), Going(3, 4)) == ("waits", "")
    assert driven.follower.generation == 3
    assert driven.asked() == [Abandon, Connect]
    assert driven.hears(Go(4, 3, MEMBERS)) == ("over", None)


def test_nothing_else_is_its_affair(driven):
    follower = driven.follower
    assert follower.vote(lambda membership: True) == 0
    for course in (follower.stand_by((5,)), follower.succeed()):
        assert driven.starts(course) == ("over", None)
    follower.step_left(OUTCOME, 3)
    assert follower.plan == 0
    assert driven.asked() == []


# ---------------------------------------------------------------------------- the State


def newcomer():
    driven = Driven(has_state=False, generation=0)
    driven.follower.group = None
    assert not driven.follower.hand.has_state
    assert driven.starts(driven.follower.come_in()) == ("waits", "")
    return driven


def test_a_newcomer_takes_the_state_on_its_rail_and_knows_where_the_others_are():
    driven = newcomer()
    assert driven.hears(Meeting(2, (5, 3), donor=0, newcomers=(1,))) == ("waits", "")
    assert driven.asked() == [Connect, Connected, CompareLayouts, TakeState, Say]
    assert driven.hears(Going(2, 9)) == ("over", None)
    assert driven.follower.hand.number == 9
    assert driven.follower.usable


def test_nothing_is_reduced_in_the_first_generation_either_before_a_word():
    driven = newcomer()
    driven.inbox.urgent = Membership(1, MEMBERS)
    driven.hears(Meeting(1, MEMBERS, donor=1, newcomers=(0,)))
    assert driven.follower.group == Rail(1)
    assert not driven.follower.usable


def test_a_donor_gives_it_and_says_so(driven):
    driven.inbox.publish(Membership(3, (3, 5, 6)))
    driven.starts(driven.follower.boundary())
    driven.hears(Meeting(3, (3, 5, 6), donor=0, newcomers=(2,)))
    gives = [want for want in driven.wants if isinstance(want, GiveState)]
    assert [want.founding for want in gives] == [False]
    assert driven.said() == [There(3)]


def test_the_first_to_give_it_founds_the_run():
    driven = newcomer()
    driven.hears(Meeting(2, MEMBERS, donor=0, newcomers=(1,)))
    gives = [want for want in driven.wants if isinstance(want, GiveState)]
    assert [want.founding for want in gives] == [True]


def test_a_transfer_that_is_superseded_is_not_said_to_be_through(driven):
    driven.starts(driven.follower.boundary())
    driven.inbox.publish(Membership(3, MEMBERS))
    driven.raises[GiveState] = Superseded()
    assert driven.hears(Meeting(3, MEMBERS, donor=0, newcomers=(1,))) == ("waits", "")
    assert driven.said() == []


# ---------------------------------------------------------------------------- the end


def test_it_is_broken_with_its_worker(driven):
    driven.starts(driven.follower.run(Step()))
    driven.follower.broken = True
    assert driven.follower.superseded
    with pytest.raises(Broken):
        driven.goes_on()


def test_orders_come_before_the_end(driven):
    """What its speaker has said before it was lost counts."""
    driven.starts(driven.follower.run(Step()))
    driven.follower.broken = True
    assert driven.hears(gone()) == ("over", OUTCOME)
    with pytest.raises(Broken):
        driven.starts(driven.follower.boundary())


def test_one_whose_worker_was_taken_out_is_fenced(driven):
    driven.starts(driven.follower.boundary())
    driven.inbox.publish(Membership(3, (5,)))
    with pytest.raises(Fenced, match="worker 3 is not in generation 3") as raised:
        driven.goes_on()
    assert not isinstance(raised.value, Broken)


def test_a_newcomer_that_is_left_out_waits_for_a_later_generation():
    driven = newcomer()
    driven.inbox.publish(Membership(3, (5,)))
    assert driven.goes_on() == ("waits", "")


def test_whoever_waits_for_others_is_dismissed_if_none_comes(driven):
    driven.starts(driven.follower.boundary())
    driven.inbox.dismiss(LookupError("nobody comes"))
    with pytest.raises(LookupError):
        driven.goes_on()


def test_it_begins_without_anything():
    follower = Follower(ME, Inbox())
    assert (follower.plan, follower.generation, follower.group) == (0, 0, None)
    assert follower.hand.number == STATELESS
    assert not follower.broken
    assert not follower.superseded
    assert not follower.usable
    assert not follower.joiner.following


# ---------------------------------------------------------------------------- its speaker


def test_a_speaker_waits_for_all_places_and_for_what_they_hold_now():
    crew = Crew(3)
    assert not crew.alone
    assert not crew.broken
    for hear, there in (
        (lambda: Prepared(), lambda: crew.prepared),
        (lambda: Held(4, 2, STEP), lambda: crew.held(4, 2, STEP)),
        (lambda: There(2), lambda: crew.there(2)),
    ):
        for place in (1, 2):
            assert not there()
            crew.hear(place, hear())
        assert there()
    assert not crew.held(5, 2, STEP)
    assert not crew.held(4, 3, STEP)
    assert not crew.there(3)


def test_a_place_in_a_call_of_another_kind_has_parted():
    crew = Crew(2)
    crew.hear(1, Held(4, 2, 2))
    with pytest.raises(TrainError, match=r"in operation 4: place 0 is .*, place 1 "):
        crew.held(4, 2, STEP)
    assert not crew.held(5, 2, STEP)  # it has still to come there
    assert not crew.held(4, 3, STEP)


def test_one_process_says_nothing_and_waits_for_nobody():
    crew = Crew()
    assert crew.alone
    assert list(crew.say(Release(2))) == []
    assert crew.prepared
    assert crew.held(4, 2, STEP)
    assert crew.there(2)
    assert list(Crew(2).say(Release(2))) == [Say(Release(2))]
