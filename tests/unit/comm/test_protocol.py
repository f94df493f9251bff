"""The group protocol by hand: what one member wants, and how it takes the answers."""

from types import SimpleNamespace

import pytest

from elastix.comm.protocol import joiner as joining
from elastix.comm.protocol.catch_up_messages import Digest, DigestMark, Entering, Given, Watched
from elastix.comm.protocol.crew import Crew, StoreHere
from elastix.comm.protocol.group_protocol import GroupProtocol
from elastix.comm.protocol.inbox import Inbox
from elastix.comm.protocol.membership import Membership
from elastix.comm.protocol.operation import OperationOutcome
from elastix.comm.protocol.participant import Fenced, Joined, Released
from elastix.comm.protocol.recovery import Position
from elastix.comm.protocol.wants import (
    Abandon,
    Adopt,
    AllHaveState,
    AnnounceEntry,
    Await,
    Build,
    CompareCalls,
    CompareLayouts,
    Compute,
    Conclude,
    Doubt,
    Failed,
    GiveState,
    Imitate,
    Level,
    Lonely,
    Meet,
    PassOn,
    Payload,
    ReduceBuckets,
    ReducePayload,
    Say,
    StoreState,
    Subscribe,
    Succeed,
    Superseded,
    TakeDigest,
    TakeState,
    TellEntered,
    TellRecovered,
    Unequal,
)
from elastix.errors import TrainError

STEP = SimpleNamespace(kind=1, lacks=lambda members: False, together=False)
EVALUATION = SimpleNamespace(kind=2, lacks=lambda members: False, together=True)


def group(generation, *members):
    return SimpleNamespace(generation=generation, members=members)


class Played:
    """A course, and the answers to what it wants, in the order in which it should want them."""

    def __init__(self, course):
        self.course = course
        self.wanted = None
        self.over = False
        self.result = None
        self._step(lambda: next(course))

    def _step(self, go):
        try:
            self.wanted = go()
        except StopIteration as end:
            self.over, self.result = True, end.value

    def __call__(self, kind, answer=None):
        """It wants this, and is answered so; an exception is thrown."""
        wanted = self.wanted
        assert isinstance(wanted, kind), wanted
        if isinstance(answer, BaseException):
            self._step(lambda: self.course.throw(answer))
        else:
            self._step(lambda: self.course.send(answer))
        return wanted


def at(operation, complete=0, plan=1, kind=0):
    return Position(operation, complete, plan, kind)


def member(me=0, members=(0, 1), operation=5, **options):
    """A member between two steps in a group of generation 1."""
    inbox = Inbox()
    inbox.publish(Membership(1, members))
    protocol = GroupProtocol(me, inbox, **options)
    protocol.generation = protocol.plan = 1
    protocol.group = group(1, *members)
    protocol.hand.number = operation
    return protocol, inbox


def enters(play, generation, *members, positions, first=True):
    """Up to what follows from the meeting; which group, and what was told there."""
    if first:
        play(Abandon)
    built = group(generation, *members)
    build = play(Build, built)
    assert (build.generation, build.members, build.scope) == (generation, members, "all")
    return build, play(Meet, positions).position


def runs(play, number, left_in=1):
    """A step without a change of the group."""
    play(ReduceBuckets)
    play(Payload, ("mine", None))
    play(ReducePayload, "agreed")
    concluded = play(Conclude)
    assert concluded.number == number
    assert concluded.outcome == OperationOutcome("agreed", left_in, left_in, (0, 1))


# ---------------------------------------------------------------------------- standing by


def test_who_stands_by_waits_for_a_group_without_those_who_have_parted():
    protocol, inbox = member(members=(0, 1, 2))
    play = Played(protocol.stand_by([1]))
    assert not play.wanted.until()
    inbox.publish(Membership(2, (0, 1, 2, 3), urgent=False))  # a proposal is no such group
    assert not play.wanted.until()
    inbox.publish(Membership(3, (0, 2)))
    assert play.wanted.until()
    play(Await)
    assert play.over


def test_nobody_stands_by_in_the_group_that_is_wanted():
    protocol, _ = member(members=(0, 2))
    assert Played(protocol.stand_by([1])).over
    protocol.group = None
    assert Played(protocol.stand_by([1])).over


# ---------------------------------------------------------------------------- the vote


@pytest.mark.parametrize(
    ("proposed", "connected", "vote"),
    [
        (Membership(2, (0, 1, 2), urgent=False), True, 2),
        (Membership(2, (0, 1, 2), urgent=False), False, 0),
        (Membership(2, (0, 1), urgent=False), False, 0),
        (Membership(2, (1, 2), urgent=False), False, 2),  # it is to leave
        (Membership(2, (0,), urgent=False), False, 2),  # there is nobody to connect to
        (Membership(1, (0, 1, 2), urgent=False), True, 0),  # it is in there
    ],
)
def test_a_proposal_is_voted_for_when_it_could_be_entered(proposed, connected, vote):
    protocol, inbox = member()
    inbox.publish(proposed)
    assert protocol.vote(lambda _: connected) == vote


def test_a_proposal_older_than_urgent_news_is_not_voted_for():
    protocol, inbox = member()
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    inbox.publish(Membership(3, (0, 1)))
    assert protocol.vote(lambda _: True) == 0


def test_a_generation_is_doubted_once():
    protocol, _ = member()
    assert [protocol.doubts(g) for g in (1, 1, 2, 1, 2, 4)] == [
        True,
        False,
        True,
        False,
        False,
        True,
    ]


def test_the_next_batch_is_split_over_the_newest_generation_that_all_know():
    protocol, inbox = member()
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    protocol.step_left(OperationOutcome(None, 1, 1), 2)
    assert (protocol.plan, protocol.planned) == (2, (0, 1, 2))
    protocol.step_left(OperationOutcome(None, 1, 1), 0)
    assert protocol.plan == 2


# ---------------------------------------------------------------------------- an operation


def test_a_step_is_reduced_agreed_and_concluded():
    protocol, _ = member()
    play = Played(protocol.run(STEP))
    assert protocol.call == (5, 1)
    runs(play, 5)
    assert play.over
    assert protocol.call == (6, 0)


def test_a_round_alone_compares_calls_before_payloads_meet():
    protocol, _ = member()
    play = Played(protocol.run(EVALUATION))
    play(ReduceBuckets)
    play(Payload, ("mine", 7))
    assert play(CompareCalls, [(2, 7), (2, 7)])[1:] == (2, 7)
    play(ReducePayload, "sum")
    play(Conclude)
    assert play.over


@pytest.mark.parametrize(
    ("other", "message"),
    [((3, 7), "operation 5.*worker 0 in ctx.evaluate; worker 1 at the end"), ((2, 8), "worker 0")],
)
def test_whoever_is_in_another_call_is_named(other, message):
    protocol, _ = member()
    play = Played(protocol.run(EVALUATION))
    play(ReduceBuckets)
    play(Payload, ("mine", 7))
    with pytest.raises(TrainError, match=message):
        play(CompareCalls, [(2, 7), other])


def test_a_failure_is_told_and_the_member_waits_for_a_new_generation():
    protocol, inbox = member()
    play = Played(protocol.run(STEP))
    error = OSError("reset")
    play(ReduceBuckets, Failed(error, frozenset({1})))
    assert play(Doubt) == (1, error, frozenset({1}))
    assert not play.wanted.until()
    inbox.publish(Membership(2, (0, 1)))
    assert play.wanted.until()
    play(Await)
    enters(play, 2, 0, 1, positions=[at(5, kind=1), at(5, kind=1)])
    play(TellEntered)
    play(ReduceBuckets, Failed(error))
    play(Doubt)


def test_what_fails_twice_in_a_generation_is_told_once():
    protocol, _inbox = member()
    assert protocol.doubts(1)
    play = Played(protocol.run(STEP))
    play(ReduceBuckets, Failed(OSError()))
    assert isinstance(play.wanted, Await)


# ---------------------------------------------------------------------------- a recovery


def test_who_is_superseded_meets_the_others_and_goes_on():
    protocol, inbox = member(0, (0, 1, 2))
    play = Played(protocol.run(STEP))
    inbox.publish(Membership(2, (0, 2)))
    old = protocol.group
    assert play(ReduceBuckets, Superseded()) == (old, STEP)
    assert play.wanted.group is old
    build, told = enters(play, 2, 0, 2, positions=[at(5, kind=1), at(5, kind=1)])
    assert build.prepare is STEP  # its buckets are to be filled again
    assert told == at(5, kind=1)
    assert play(TellEntered) == (2, None)
    play(ReduceBuckets)
    play(Payload, ("mine", None))
    play(ReducePayload, "agreed")
    concluded = play(Conclude)
    assert concluded.outcome == OperationOutcome("agreed", 2, 2, (0, 2))
    assert concluded.plan == (0, 1, 2)
    assert play(TellRecovered) == (2, 1, "reduced again", 2)
    assert play.over


def test_buckets_that_all_hold_are_accepted_and_only_the_round_is_repeated():
    protocol, inbox = member(0, (0, 1, 2))
    play = Played(protocol.run(STEP))
    play(ReduceBuckets)
    play(Payload, ("mine", None))
    inbox.publish(Membership(2, (0, 2)))
    play(ReducePayload, Superseded())
    build, told = enters(play, 2, 0, 2, positions=[at(5, 1, kind=1), at(5, 1, kind=1)])
    assert build.prepare is None
    assert told == at(5, 1, kind=1)
    play(TellEntered)
    play(Payload, ("mine", None))
    play(ReducePayload, "agreed")
    assert play(Conclude).outcome == OperationOutcome("agreed", 1, 2, (0, 1, 2))
    assert play(TellRecovered).outcome == "accepted"


def test_who_is_behind_is_told_the_result():
    protocol, inbox = member(0, (0, 1, 2))
    play = Played(protocol.run(STEP))
    play(ReduceBuckets)
    play(Payload, ("mine", None))
    inbox.publish(Membership(2, (0, 2)))
    play(ReducePayload, Superseded())
    enters(play, 2, 0, 2, positions=[at(5, 1, kind=1), at(6, plan=4)])
    assert play(PassOn, "told")[1:] == (1, "mine")
    play(TellEntered)
    assert play(Conclude).outcome == OperationOutcome("told", 1, 4, (0, 1, 2))
    assert play(TellRecovered).outcome == "passed on"
    assert protocol.plan == 4
    assert protocol.hand.number == 6


def test_who_is_ahead_passes_its_last_result_on():
    protocol, inbox = member()
    runs(Played(protocol.run(STEP)), 5)
    inbox.publish(Membership(2, (0, 1)))
    play = Played(protocol.boundary())
    enters(play, 2, 0, 1, positions=[at(6), at(5, 1, kind=1)])
    assert play(PassOn, "agreed")[1:] == (0, "agreed")
    play(TellEntered)
    assert play(TellRecovered) == (2, 0, "between steps", 2)
    assert play.over


def test_a_result_that_was_passed_on_counts_only_in_the_generation_in_which_it_was():
    protocol, inbox = member(0, (0, 1, 2))
    play = Played(protocol.run(STEP))
    play(ReduceBuckets)
    play(Payload, ("mine", None))
    inbox.publish(Membership(2, (0, 1, 2)))
    play(ReducePayload, Superseded())
    enters(play, 2, 0, 1, 2, positions=[at(5, 1, kind=1), at(5, 1, kind=1), at(6)])
    play(PassOn, "told")
    inbox.publish(Membership(3, (0, 1)))  # who told it is dead, and worker 1 was not told
    play(TellEntered)
    enters(play, 3, 0, 1, positions=[at(5, 1, kind=1), at(5, 1, kind=1)])
    play(TellEntered)
    play(Payload, ("mine", None))
    play(ReducePayload, "agreed")
    assert play(Conclude).outcome.result == "agreed"


def test_whoever_has_nothing_to_pass_on_says_that_it_is_a_bug():
    protocol, inbox = member()
    inbox.publish(Membership(2, (0, 1)))
    play = Played(protocol.boundary())
    play(Abandon)
    play(Build, group(2, 0, 1))
    with pytest.raises(TrainError, match="worker 0 has no result of operation 4"):
        play(Meet, [at(5), at(4, 1, kind=1)])


def test_news_that_comes_during_a_meeting_is_followed_before_anything_else():
    protocol, inbox = member(0, (0, 1, 2))
    inbox.publish(Membership(2, (0, 1)))
    play = Played(protocol.run(STEP))
    play(Abandon)
    play(Build, group(2, 0, 1))
    inbox.publish(Membership(3, (0,)))
    play(Meet, Superseded())
    enters(play, 3, 0, positions=[at(5, kind=1)])
    play(TellEntered)
    play(ReduceBuckets)
    play(Payload, ("mine", None))
    play(ReducePayload, "agreed")
    play(Conclude)
    assert play(TellRecovered).since == 2  # the stall began with the first of them


def test_a_void_step_is_carried_to_its_end_without_a_reduction():
    protocol, inbox = member(redo=1)
    play = Played(protocol.run(STEP))
    inbox.publish(Membership(2, (0,)))
    play(ReduceBuckets, Superseded())
    build, _ = enters(play, 2, 0, positions=[at(5, kind=1)])
    assert build.prepare is None
    play(TellEntered)
    assert protocol.hand.void
    assert not protocol.usable
    play(Payload, ("void", None))
    play(ReducePayload, "agreed")
    play(Conclude)
    assert play(TellRecovered).outcome == "done again"
    assert not protocol.hand.void
    assert protocol.usable


def test_who_was_taken_out_is_fenced_by_name():
    protocol, inbox = member()
    inbox.publish(Membership(2, (1,)))
    with pytest.raises(Fenced, match="worker 0 is not in generation 2"):
        Played(protocol.boundary())


def two_behind(*, leaves):
    """A member whose last round failed here alone, and did not for the others, who went on."""
    protocol, inbox = member(0, (0, 1, 2))
    play = Played(protocol.run(STEP))
    play(ReduceBuckets)
    play(Payload, ("mine", None))
    inbox.publish(Membership(2, (1, 2) if leaves else (0, 1, 2), urgent=False))
    play(ReducePayload, Failed(OSError()))
    play(Doubt)
    inbox.publish(Membership(3, (0, 1, 2)))
    play(Await)
    enters(play, 3, 0, 1, 2, positions=[at(5, 1, kind=1), at(7, plan=2), at(7, plan=2)])


def test_who_was_to_leave_and_is_two_behind_is_released():
    with pytest.raises(Released) as released:
        two_behind(leaves=True)
    assert released.value.generation == 2


def test_who_was_taken_out_and_has_not_heard_of_it_ends():
    with pytest.raises(Fenced, match="worker 0 is in operation 5 while others have gone on to 7"):
        two_behind(leaves=False)


def test_the_others_go_on_without_one_that_is_two_behind():
    protocol, inbox = member()
    inbox.publish(Membership(2, (0, 1)))
    play = Played(protocol.boundary())
    enters(play, 2, 0, 1, positions=[at(5), at(3, 1, kind=1)])
    play(TellEntered)
    play(TellRecovered)
    assert play.over


# ---------------------------------------------------------------------------- between steps


def test_an_agreed_proposal_is_entered_and_told_to_joiners():
    protocol, inbox = member()
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    protocol.step_left(OperationOutcome(None, 1, 1), 2)
    play = Played(protocol.boundary())
    assert play(AnnounceEntry) == (2, (0, 1, 2))
    _, told = enters(play, 2, 0, 1, 2, positions=[at(5, plan=2), at(5, plan=2), Position(-1)])
    assert told.plan == 2
    play(CompareLayouts)
    circle = group(2, 0, 2)
    assert play(Build, circle) == (2, (0, 2), "transfer", None)
    assert play(GiveState) == (circle, False)
    assert play(Abandon).group is circle
    assert play(TellEntered) == (2, None)
    assert play.over


def test_a_circle_that_is_superseded_is_abandoned_with_its_group():
    protocol, inbox = member()
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    protocol.step_left(OperationOutcome(None, 1, 1), 2)
    play = Played(protocol.boundary())
    play(AnnounceEntry)
    enters(play, 2, 0, 1, 2, positions=[at(5, plan=2), at(5, plan=2), Position(-1)])
    play(CompareLayouts)
    whole, circle = protocol.group, group(2, 0, 2)
    play(Build, circle)
    inbox.publish(Membership(3, (0, 1)))
    play(GiveState, Superseded())
    assert [play(Abandon).group, play(Abandon).group] == [whole, circle]
    assert play.wanted.generation == 3


def test_who_is_not_in_the_agreed_generation_is_released_there():
    protocol, inbox = member()
    inbox.publish(Membership(2, (1,), urgent=False))
    protocol.step_left(OperationOutcome(None, 1, 1), 2)
    with pytest.raises(Released) as released:
        Played(protocol.boundary())
    assert released.value.generation == 2
    assert protocol.group is not None  # others may wait for what it has sent there


@pytest.mark.parametrize(("size", "waits"), [(1, True), (2, False), (3, False)])
def test_a_group_below_its_minimum_waits(size, waits):
    protocol, _ = member(0, tuple(range(size)), min_members=2)
    assert Played(protocol.boundary()).over == (not waits)


def test_a_pause_ends_with_a_proposal_with_urgent_news_or_when_nobody_will_come():
    protocol, inbox = member(0, (0,), min_members=2)
    play = Played(protocol.boundary())
    assert (play.wanted.phase, play.wanted.detail) == ("pause", 1)
    assert not play.wanted.until()
    inbox.publish(Membership(2, (0, 1), urgent=False))
    assert play.wanted.until()
    play(Await)
    assert play(AnnounceEntry).generation == 2

    protocol, inbox = member(0, (0,), min_members=2)
    play = Played(protocol.boundary())
    inbox.dismiss(TrainError("nobody"))
    assert play.wanted.until()
    with pytest.raises(TrainError, match="nobody"):
        play(Await)


def test_who_waits_for_others_stores_the_state_if_all_are_to_go():
    protocol, inbox = member(0, (0,), min_members=2, crew=Crew(2))
    play = Played(protocol.boundary())
    inbox.store_soon()
    assert play.wanted.until()
    play(Await)
    assert play(Say).word == StoreHere()
    inbox.stores = False  # as it is on its way
    play(StoreState)
    assert play.wanted.phase == "pause"
    assert not play.wanted.until()


def test_news_of_the_group_comes_before_a_state_that_is_to_be_stored():
    protocol, inbox = member(0, (0,), min_members=2)
    play = Played(protocol.boundary())
    inbox.store_soon()
    inbox.publish(Membership(2, (0,)))
    play(Await)
    assert isinstance(play.wanted, Abandon)


def test_nobody_waits_before_an_operation_that_another_is_in():
    protocol, inbox = member(0, (0, 1), min_members=3)
    inbox.publish(Membership(2, (0, 1)))
    play = Played(protocol.boundary())
    enters(play, 2, 0, 1, positions=[at(5), at(5, kind=1)])
    play(TellEntered)
    play(TellRecovered)
    assert play.over


# ---------------------------------------------------------------------------- the founding


def newcomer(me=1):
    inbox = Inbox()
    protocol = GroupProtocol(me, inbox)
    play = Played(protocol.come_in())
    assert not play.wanted.until()
    return protocol, inbox, play


def test_founders_are_given_the_state_and_see_that_all_have_it():
    protocol, inbox, play = newcomer()
    inbox.publish(Membership(1, (0, 1), cause="start"))
    assert play.wanted.until()
    play(Await)
    _, told = enters(play, 1, 0, 1, positions=[Position(-1), Position(-1)], first=False)
    assert told == Position(-1)
    play(CompareLayouts)
    joined = Joined(0.1, 8)
    assert play(TakeState, joined).root == 0
    inbox.publish(Membership(2, (0, 1)))
    play(AllHaveState, Superseded())
    play(Await)
    _, told = enters(play, 2, 0, 1, positions=[Position(0), Position(-1, 1)])
    assert told == Position(-1, 1)  # it has the State, and does not know who else has it
    assert play(TellEntered) == (2, None)
    assert play.over
    assert (protocol.hand.number, protocol.plan) == (0, 2)


def test_the_state_of_a_founding_is_stale_when_the_run_has_gone_on():
    _protocol, inbox, play = newcomer()
    inbox.publish(Membership(1, (0, 1), cause="start"))
    play(Await)
    enters(play, 1, 0, 1, positions=[Position(-1), Position(-1)], first=False)
    play(CompareLayouts)
    play(TakeState, Joined(0.1, 8))
    play(AllHaveState, Superseded())
    inbox.publish(Membership(3, (0, 1), urgent=False))
    play(Await)
    _, told = enters(play, 3, 0, 1, positions=[at(4, plan=3), Position(-1, plan=3)])
    assert told == Position(-1, plan=3)


def test_a_newcomer_that_is_not_meant_waits_for_newer_news():
    protocol, inbox, play = newcomer(me=5)
    inbox.publish(Membership(1, (0, 1)))
    play(Await)
    assert not play.wanted.until()
    assert protocol.generation == 1
    inbox.publish(Membership(2, (0, 1, 5), urgent=False))
    assert play.wanted.until()


def test_a_newcomer_among_others_takes_the_state_in_a_circle():
    protocol, inbox, play = newcomer(me=2)
    inbox.publish(Membership(4, (0, 1, 2, 3), urgent=False))
    play(Await)
    there = [at(5, plan=4), at(5, plan=4), Position(-1), at(5, plan=4)]
    enters(play, 4, 0, 1, 2, 3, positions=there, first=False)
    play(CompareLayouts)
    play(Build, group(4, 0, 2))
    joined = Joined(0.1, 8)
    assert play(TakeState, joined).root == 0  # of the circle
    play(Abandon)
    assert play(TellEntered) == (4, joined)
    assert protocol.hand.number == 5


def test_who_neither_gives_nor_takes_goes_on_at_once():
    protocol, inbox = member(1, (0, 1))
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    protocol.step_left(OperationOutcome(None, 1, 1), 2)
    play = Played(protocol.boundary())
    play(AnnounceEntry)
    enters(play, 2, 0, 1, 2, positions=[at(5, plan=2), at(5, plan=2), Position(-1)])
    play(CompareLayouts)
    play(TellEntered)
    assert play.over


# ---------------------------------------------------------------------------- a joiner


class Stream:
    """What a donor tells, as the test has it."""

    def __init__(self, given=None):
        self.given = given
        self.failed = self.closed = self.asked = False
        self.told = []

    @property
    def head(self):
        return self.told[0] if self.told else None

    @property
    def backlog(self):
        return len(self.told)

    def pop(self):
        return self.told.pop(0)

    def say_able(self, able):
        self.able = able

    def ask_digest(self):
        self.asked = True

    def close(self):
        self.closed = True


def watched(number, kind=1, plan=(0, 1)):
    return Watched(number, kind, plan, plan, 1, 1, f"result {number}")


def follower(stream=None, me=2):
    """A joiner with the State before operation 5."""
    protocol, inbox, play = newcomer(me)
    inbox.publish(Membership(1, (0, 1)))
    play(Await)
    inbox.invite(("donor", "other"))
    play(Await)
    stream = stream or Stream()
    assert play(Subscribe, stream).donor == "donor"
    assert inbox.invitation == ()
    assert not play.wanted.until()
    stream.given = Given(5, ["layout"], "State")
    assert play.wanted.until()
    play(Await)
    assert play(Adopt, Joined(0.5, 80)).given.state == "State"
    assert play.over
    assert stream.asked
    assert (protocol.hand.number, protocol.joiner.following) == (5, True)
    return protocol, inbox, stream


def follow(protocol, stream, *told):
    """A boundary, at which this comes next."""
    stream.told += told
    return Played(protocol.boundary())


def level(protocol, stream):
    """Once it has compared its State with the donor's."""
    play = follow(protocol, stream, DigestMark(), Digest("same"), watched(5))
    play(TakeDigest, "same")
    play(Level)
    assert play.over
    play = Played(protocol.run(STEP))
    assert not play.wanted.until() or stream.head
    play(Await)
    assert play(Imitate).watched.operation == 5
    assert play.over
    assert play.result == OperationOutcome("result 5", 1, 1, (0, 1))
    assert protocol.hand.number == 6


def test_a_joiner_follows_its_donor_into_the_group():
    protocol, inbox, stream = follower()
    assert protocol.planned == ()
    level(protocol, stream)
    assert protocol.planned == (0, 1)
    protocol.step_left(OperationOutcome(None, 1, 1), 9)  # its donor says where the group enters
    assert protocol.plan == 0
    play = follow(protocol, stream, Entering(2))
    assert stream.closed
    assert not play.wanted.until()
    assert not protocol.holder
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    assert play.wanted.until()
    play(Await)
    there = [at(6, plan=2)] * 3
    _, told = enters(play, 2, 0, 1, 2, positions=there, first=False)
    assert told == at(6, plan=2)
    assert play(TellEntered) == (2, Joined(0.5, 80, 1))
    assert play.over
    assert not protocol.joiner.following
    assert protocol.holder


def test_a_joiner_whose_controller_is_killed_before_it_tells_of_its_entry_waits_for_another():
    protocol, inbox, stream = follower()
    level(protocol, stream)
    play = follow(protocol, stream, Entering(2))
    assert not play.wanted.until()
    assert not protocol.holder
    inbox.publish(Membership(3, (0, 1)))
    assert play.wanted.until()
    play(Await)
    assert not protocol.hand.has_state
    play(Await)
    assert not play.wanted.until()
    assert protocol.generation == 3


def test_a_joiner_that_another_controller_finds_at_the_door_goes_on_with_what_it_has():
    protocol, inbox, stream = follower()
    level(protocol, stream)
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    play = follow(protocol, stream, Entering(2))
    play(Await)
    assert protocol.holder
    inbox.publish(Membership(3, (1, 2)))
    play(Build, Superseded())
    # One of the others may not have heard how the operation before ended.
    there = [at(5, complete=1, kind=1), at(6, plan=2)]
    _, told = enters(play, 3, 1, 2, positions=there, first=False)
    assert told == at(6, plan=2)
    assert play(PassOn).held == "result 5"
    play(TellEntered)
    play(TellRecovered)
    assert play.over
    assert protocol.hand.number == 6


def test_a_shadow_whose_controller_is_killed_before_it_tells_of_its_entry_goes_on_alone():
    protocol, inbox, stream = follower()
    inbox.shadow = True
    play = follow(protocol, stream, Entering(2))
    assert not play.wanted.until()
    stream.failed = True
    inbox.publish(Membership(3, (2,)))
    assert play.wanted.until()
    play(Await)
    assert protocol.hand.number == 5
    assert play.wanted.until()
    play(Await)
    assert play.wanted.until()
    play(Await)
    assert play(Succeed).equal
    assert protocol.hand.has_state


def test_a_joiner_that_was_not_compared_is_given_the_state_in_the_group():
    protocol, inbox, stream = follower()
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    play = follow(protocol, stream, Entering(2))
    play(Await)
    _, told = enters(play, 2, 0, 1, 2, positions=[at(5), at(5), Position(-1)], first=False)
    assert told.operation == -1


def test_a_joiner_that_is_superseded_at_the_door_starts_over():
    protocol, inbox, stream = follower()
    level(protocol, stream)
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    play = follow(protocol, stream, Entering(2))
    play(Await)
    play(Build, group(2, 0, 1, 2))
    inbox.publish(Membership(3, (0, 1)))
    play(Meet, Superseded())
    assert not protocol.hand.has_state
    play(Await)
    play(Abandon)
    assert not play.wanted.until()
    assert protocol.generation == 3


def test_a_joiner_with_another_state_asks_for_it_in_the_group():
    protocol, _inbox, stream = follower()
    play = follow(protocol, stream, DigestMark(), Digest("theirs"))
    play(TakeDigest, "mine")
    assert play(Unequal).operation == 5
    play(Level)
    assert stream.closed
    assert not protocol.hand.has_state
    assert not play.wanted.until()


def test_a_joiner_asks_to_be_let_in_only_when_little_is_left_to_do():
    protocol, _, stream = follower()
    stream.told = [
        DigestMark(),
        Digest("same"),
        *(watched(5 + n) for n in range(joining._NEAR + 1)),
    ]
    play = Played(protocol.boundary())
    play(TakeDigest, "same")
    assert play.over  # not yet
    play = Played(protocol.run(STEP))
    play(Await)
    play(Imitate)
    play = Played(protocol.boundary())
    play(Level)
    assert play.over
    play = Played(protocol.run(STEP))
    play(Await)
    play(Imitate)
    assert Played(protocol.boundary()).over  # it has asked


def test_a_joiner_that_never_gets_near_asks_anyway(monkeypatch):
    monkeypatch.setattr(joining, "_PATIENCE", 2)
    protocol, _, stream = follower()
    stream.told = [DigestMark(), Digest("same"), *(watched(5 + n) for n in range(20))]
    play = Played(protocol.boundary())
    play(TakeDigest, "same")
    for asks in (False, True):
        assert play.over
        play = Played(protocol.run(STEP))
        play(Await)
        play(Imitate)
        play = Played(protocol.boundary())
        assert isinstance(play.wanted, Level) == asks


def test_a_joiner_whose_donor_is_lost_asks_for_others_and_at_last_for_the_state_in_the_group():
    protocol, inbox, stream = follower()
    play = follow(protocol, stream)
    assert not play.wanted.until()
    stream.failed = True
    assert play.wanted.until()
    play(Await)
    # Nobody may lead the run. A new controller is told by this who has the State of the group.
    assert protocol.joiner.following
    play(Lonely)
    assert stream.closed
    assert not protocol.hand.has_state
    for asks in (Lonely, Level):
        inbox.invite(("donor", "other"))
        assert play.wanted.until()
        play(Await)
        for donor in ("donor", "other"):
            gone = Stream()
            assert play(Subscribe, gone).donor == donor
            gone.failed = True
            assert play.wanted.until()
            play(Await)
            assert gone.closed
        play(asks)
    assert isinstance(play.wanted, Await)


def test_a_joiner_that_the_group_calls_leaves_its_donor():
    protocol, inbox, stream = follower()
    play = follow(protocol, stream)
    assert not play.wanted.until()
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    assert play.wanted.until()  # cold: the group waits
    play(Await)
    assert stream.closed
    assert not protocol.hand.has_state
    play(Await)
    assert play.wanted.members == (0, 1, 2)


def test_a_joiner_that_is_called_while_it_waits_for_the_state_is_given_it_in_the_group():
    _protocol, inbox, play = newcomer(me=2)
    inbox.invite(("donor", "other"))
    play(Await)
    stream = Stream()
    play(Subscribe, stream)
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    assert play.wanted.until()
    play(Await)
    assert stream.closed
    play(Await)
    assert play.wanted.members == (0, 1, 2)


def test_a_joiner_follows_a_donor_while_the_group_calls_others_or_has_moved_on():
    _, inbox, play = newcomer(me=2)
    inbox.publish(Membership(1, (0, 1)))
    play(Await)
    inbox.publish(Membership(2, (0, 1, 3), urgent=False))
    inbox.invite(("donor",))
    play(Await)
    assert isinstance(play.wanted, Subscribe)

    _, inbox, play = newcomer(me=2)
    inbox.publish(Membership(1, (0, 1, 2), urgent=False))
    inbox.publish(Membership(2, (0, 1)))
    inbox.invite(("donor",))
    play(Await)
    assert isinstance(play.wanted, Subscribe)


def test_a_joiner_that_has_asked_is_not_called_away_before_its_donor_enters():
    protocol, inbox, stream = follower()
    level(protocol, stream)
    play = follow(protocol, stream)
    inbox.publish(Membership(2, (0, 1, 2), urgent=False))
    assert not play.wanted.until()
    stream.told.append(Entering(2))
    assert play.wanted.until()


def test_a_joiner_that_loses_its_donor_in_an_operation_ends():
    protocol, _, stream = follower()
    play = Played(protocol.run(STEP))
    assert not play.wanted.until()
    stream.failed = True
    assert play.wanted.until()
    with pytest.raises(Fenced, match="worker 2 lost its donor in the middle of operation 5"):
        play(Await)


def test_a_joiner_whose_donor_is_lost_does_not_begin_the_run():
    """It is in its loop. Another controller had not heard so when it called it."""
    protocol, inbox, stream = follower()
    play = follow(protocol, stream)
    stream.failed = True
    play(Await)
    play(Lonely)
    inbox.publish(Membership(3, (2, 4), cause="start"))
    play(Await)
    assert protocol.lost_track  # the steps that it knows are not the journal's
    there = [Position(-1), Position(-1)]
    with pytest.raises(Fenced, match="worker 2 has followed others, who are lost"):
        enters(play, 3, 2, 4, positions=there, first=False)


@pytest.mark.parametrize("told", [watched(5, kind=2), watched(6)])
def test_a_joiner_that_does_something_else_than_the_group_says_what(told):
    protocol, _, stream = follower()
    stream.told.append(told)
    play = Played(protocol.run(STEP))
    with pytest.raises(TrainError, match=r"joiner 2 is in a backward pass \(operation 5\)"):
        play(Await)


# ---------------------------------------------------------------------------- the inbox


def test_old_news_changes_nothing():
    inbox = Inbox()
    for generation, urgent in ((3, True), (2, True), (5, False), (4, False)):
        inbox.publish(Membership(generation, (generation,), urgent))
    assert (inbox.urgent.generation, inbox.proposed.generation) == (3, 5)
    assert sorted(inbox.members) == [2, 3, 4, 5]
    assert [inbox.fresh(Membership(g, ())) for g in (3, 5, 6)] == [False, False, True]


# ---------------------------------------------------------------------------- slices of the lost


class Sliced:
    """A step in which this member computes two of three slices if it is alone."""

    kind = 1
    together = False

    def __init__(self):
        self.computed = 1

    def lacks(self, members):
        return self.computed < (2 if len(members) < 3 else 1)


def test_what_falls_to_a_member_is_computed_before_buckets_are_reduced_again():
    protocol, inbox = member(members=(0, 1, 2))
    operation = Sliced()
    play = Played(protocol.run(operation))
    inbox.publish(Membership(2, (0, 1)))
    play(ReduceBuckets, Superseded())
    enters(play, 2, 0, 1, positions=[at(5, kind=1), at(5, kind=1)])
    play(TellEntered)
    operation.computed += 1
    assert play(Compute).members == (0, 1)
    play(ReduceBuckets)
    play(Payload, ("mine", None))
    play(ReducePayload, "agreed")
    assert play(Conclude).outcome.contributors == (0, 1)


def test_nothing_is_computed_for_a_step_that_stands():
    protocol, inbox = member(members=(0, 1, 2))
    play = Played(protocol.run(Sliced()))
    play(ReduceBuckets)
    play(Payload, ("mine", None))
    inbox.publish(Membership(2, (0, 1)))
    play(ReducePayload, Superseded())
    enters(play, 2, 0, 1, positions=[at(5, complete=1, kind=1), at(5, complete=1, kind=1)])
    play(TellEntered)
    play(Payload, ("mine", None))


def test_news_while_a_member_computes_come_first_when_it_is_through():
    protocol, inbox = member(members=(0, 1, 2))
    operation = Sliced()
    play = Played(protocol.run(operation))
    inbox.publish(Membership(2, (0, 1)))
    play(ReduceBuckets, Superseded())
    enters(play, 2, 0, 1, positions=[at(5, kind=1), at(5, kind=1)])
    play(TellEntered)
    operation.computed += 1
    inbox.publish(Membership(3, (0,)))
    play(Compute)
    enters(play, 3, 0, positions=[at(5, kind=1)])


def test_a_shadow_that_is_summoned_follows_nobody_any_longer():
    protocol, inbox, stream = follower()
    inbox.invite((), shadow=True)
    play = Played(protocol.succeed())
    assert not play.wanted.until()
    inbox.publish(Membership(2, (2,)))
    assert play.wanted.until()
    play(Await)
    play(Succeed)
    assert play.over
    assert stream.closed
    assert not protocol.joiner.following


def test_a_shadow_goes_on_at_the_boundary_when_all_others_are_lost():
    """With what it has; but first it does what it was told."""
    protocol, inbox, stream = follower()
    inbox.invite((), shadow=True)
    inbox.publish(Membership(2, (2,)))
    stream.failed = True
    assert follow(protocol, stream, watched(5)).over
    stream.pop()
    play = Played(protocol.boundary())
    play(Await)  # there is no more
    play(Await)
    play(Succeed)
    assert protocol.hand.number == 5
    build = play(Build, group(2, 2))
    assert build.members == (2,)


def test_what_a_joiner_asks_and_says_goes_to_its_donor_while_it_has_one():
    protocol, _, stream = follower()
    joiner = protocol.joiner
    stream.asked = False
    joiner.ask_digest()
    joiner.say_able(True)
    assert (stream.asked, stream.able) == (True, True)
    assert joiner.come_in() is None  # it was not compared
    assert stream.closed
    stream.asked = stream.able = None
    joiner.ask_digest()
    joiner.say_able(True)
    assert (stream.asked, stream.able) == (None, None)
    assert joiner.come_in() is None
