"""The group protocol: what a member does from its founding, or its way in, to its end. Pure.

A member carries numbered operations through (see recovery). While it waits for the others it also
listens to the controller's memberships; when a new generation is announced it drops the operation,
meets the others there, learns where everybody is, and goes on with the same operation in the new
group. Nothing that is shared changes before an operation is left, so this may happen any number of
times.

No torch, no thread and no clock: each stretch of the protocol is a generator (`Course`) that asks
a driver for whatever lies outside (wants) and is sent the answers. `driver` drives it in a worker's
training thread, over torch.distributed; the tests drive thousands of members in one thread, in any
order of events that can be.

A member is an id, and nothing here asks what stands behind it: one process, or a crew of which this
one speaks (see crew).

Not here: what an operation computes (reducer, train.replica.evaluation), who decides on generations
(membership), and what survivors decide (recovery).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from elastix.comm.protocol import calls
from elastix.comm.protocol.catch_up_messages import Entering, Watched
from elastix.comm.protocol.crew import (
    Contribute,
    Crew,
    Go,
    Going,
    Gone,
    Meeting,
    Release,
    StoreHere,
    TakeOver,
)
from elastix.comm.protocol.in_group import InGroup
from elastix.comm.protocol.inbox import Inbox
from elastix.comm.protocol.joiner import Joiner
from elastix.comm.protocol.membership import Membership
from elastix.comm.protocol.operation import OperationOutcome
from elastix.comm.protocol.operation_in_hand import InHand, Recovering
from elastix.comm.protocol.participant import Broken, Fenced, Joined, Released
from elastix.comm.protocol.recovery import Decision, Position, decide
from elastix.comm.protocol.wants import (
    AllHaveState,
    AnnounceEntry,
    Await,
    Build,
    CompareCalls,
    CompareLayouts,
    Compute,
    Conclude,
    Course,
    GroupHandle,
    Meet,
    PassOn,
    Payload,
    ReduceBuckets,
    ReducePayload,
    StoreState,
    Succeed,
    Superseded,
    TellEntered,
    TellRecovered,
)
from elastix.errors import TrainError

if TYPE_CHECKING:
    import torch

    from elastix.comm.protocol.operation import Operation


class GroupProtocol(InGroup):
    """One member's side. Its courses are driven one at a time.

    Args:
        me: this member's id.
        inbox: what the controller tells this member.
        min_members: a smaller group waits at its next boundary until it has grown.
        redo: kind of operation that is not finished by survivors but done again; 0 for none.
        rule: what members do who have met; see recovery.decide.
        crew: the processes that this one speaks for; alone by default.

    Attributes:
        generation: the newest generation that this member entered or tries to enter.
        group: the group in use; None before the first.
        plan: the generation over whose members the next batch is split.
        hand: the operation in hand, or the next.
        joiner: this member's way in, while it follows the group from outside.
        processor: a number for what it computes with.
        kinds: the processors of the group's members, in rank order, as they said when they met.
        unlevel: somebody has come in since all kinds of processors went on from one State, so that
            even those of one kind may hold different things.
    """

    def __init__(
        self,
        me: int,
        inbox: Inbox,
        *,
        min_members: int = 1,
        redo: int = 0,
        rule: Callable[[Sequence[Position], Sequence[int]], Decision] = decide,
        crew: Crew | None = None,
    ) -> None:
        super().__init__()
        self.plan = 0
        self.hand = InHand()
        self.joiner = Joiner(me, inbox, self._called)
        self.processor = 0
        self.kinds: tuple[int, ...] = ()
        self.unlevel = False
        self._me = me
        self._inbox = inbox
        self._min_members = min_members
        self._redo = redo
        self._rule = rule
        self._crew = crew or Crew()
        self._agreed = 0  # the proposal to be entered at the next boundary
        self._founded = 0  # the generation in which this member was given the State as a founder
        self._result: torch.Tensor | None = None  # of the operation left last
        self._recovering = Recovering()

    # ------------------------------------------------------------------ at any time

    @property
    def superseded(self) -> bool:
        """Whether a newer membership must be entered at once; or there is nothing to go on with."""
        return self._inbox.urgent.generation > self.generation or self._crew.broken

    @property
    def usable(self) -> bool:
        """Whether it is worth launching something in the present group."""
        return self.group is not None and not self.superseded and not self.hand.void

    @property
    def holder(self) -> bool:
        """Whether it has the State of the group, and is in it. Any thread may ask."""
        urgent = self._inbox.urgent
        out = urgent.generation > self.generation and self._me not in urgent.members
        return self.hand.has_state and not (self.joiner.following or self.joiner.at_door or out)

    @property
    def lost_track(self) -> bool:
        """Whether it has followed others, and has no State any more: what it knows is void."""
        return self.joiner.has_followed and not self.hand.has_state

    @property
    def planned(self) -> tuple[int, ...]:
        """The members over which the next batch is split."""
        return self.joiner.plan if self.joiner.following else self._inbox.members[self.plan]

    @property
    def call(self) -> tuple[int, int]:
        """Number and kind of the operation in hand; of kind 0 between operations."""
        hand = self.hand
        return hand.number, hand.kind

    def vote(self, connected: Callable[[Membership], bool]) -> int:
        """Generation of the proposal that this member could enter, 0 for none.

        It goes into the round: only what all could enter is agreed on, so that nobody waits for
        connections at the boundary.

        Args:
            connected: whether the group that a proposal asks for is there.
        """
        proposed = self._inbox.proposed
        if not self._stands(proposed):
            return 0
        if self._me not in proposed.members or proposed.size == 1 or connected(proposed):
            return proposed.generation
        return 0

    def step_left(self, outcome: OperationOutcome, proposal: int) -> None:
        """A step was left: its successor is split over the members of the newest generation.

        Args:
            outcome: how it was left.
            proposal: generation of the proposal that all members know; 0 for none. It is entered
                at the next boundary.
        """
        if self.joiner.following:
            return  # its donor says where the group enters
        self._agreed = max(self._agreed, proposal)
        self.plan = max(self.plan, outcome.generation, proposal)

    # ------------------------------------------------------------------ courses

    def assemble(self) -> Course[None]:
        """Until all of this worker's crew are up to `prepare`."""
        yield Await(lambda: self._crew.prepared or self._crew.broken, phase="crew")
        if self._crew.broken:
            raise Broken(self._me)

    def come_in(self) -> Course[None]:
        """Until this member has the State: in a group, or from a peer that it goes on to follow."""
        while not self.hand.has_state:
            yield Await(self._addressed)
            newest = max(self._inbox.urgent, self._inbox.proposed, key=lambda m: m.generation)
            if self._crew.broken:
                raise Broken(self._me)
            if self._inbox.invitation and not self._called():
                number = yield from self.joiner.begin()
                if number is not None:
                    self.hand = InHand(number)
            elif self._me in newest.members:
                try:
                    yield from self._enter(newest)
                except Superseded:
                    continue
            else:
                yield from self._leave()
                self.generation = newest.generation

    def run(self, operation: Operation) -> Course[OperationOutcome]:
        """Carry one operation through, whatever happens to the group.

        Raises:
            Fenced: this member was taken out; Broken if one of its crew is lost.
            TrainError: the others run something else.
        """
        hand = self.hand
        if self.joiner.following:
            imitated = yield from self.joiner.imitate(operation, hand.number)
            if imitated is not None:
                self._result = imitated.result
                self.hand = InHand(hand.number + 1)
                return imitated
            yield from self.succeed()
        hand.operation = operation
        shares = self._inbox.members.get(self.plan, ())
        attempt: OperationOutcome | None = None
        while attempt is None:
            try:
                yield from self._catch_up()
                attempt = yield from self._attempt(operation)
            except Superseded:
                continue
        outcome = attempt
        if hand.passed is not None:  # the peer who passed it on may know of a newer plan
            self.plan = max(self.plan, outcome.generation)
        self._result = outcome.result
        self.hand = hand.after()
        yield from self._crew.say(Gone(hand.number, outcome))
        yield Conclude(operation, outcome, hand.number, shares)
        if self._recovering.since:
            yield from self._recovered(operation.kind)
        return outcome

    def stand_by(self, without: Sequence[int]) -> Course[None]:
        """Until there is a group without these members, as the controller was told to make one.

        It may have been told by a peer, and this member may be in that group already.
        """
        members = self.group.members if self.group is not None else ()
        if not set(without).isdisjoint(members):
            yield Await(lambda: self.superseded)

    def boundary(self) -> Course[None]:
        """Between two steps: let agreed joiners in; wait while fewer than the minimum are left.

        Raises:
            Released: this member was to leave, and the others know that it does so here.
        """
        while True:
            try:
                if self.joiner.following:
                    if (yield from self._follow()):
                        return
                elif self.superseded:
                    yield from self._catch_up()
                    self._recovering.outcome = "between steps"
                    yield from self._recovered(0)
                elif self._agreed > self.generation:
                    yield from self._enter_agreed()
                elif self._too_few():
                    yield from self._pause()
                else:
                    yield from self._say_go()
                    return
            except Superseded:
                continue

    def _enter_agreed(self) -> Course[None]:
        members = self._inbox.members[self._agreed]
        if self._me not in members:
            # The group stays up: others may still wait for what this member has sent there.
            yield from self._crew.say(Release(self._agreed))
            raise Released(self._agreed)
        yield AnnounceEntry(self._agreed, members)
        yield from self._enter(Membership(self._agreed, members, urgent=False))

    def _too_few(self) -> bool:
        """Whether to wait here; not if others are in the next operation and wait for us."""
        if self.group is None or self.hand.begun:
            return False
        return len(self.group.members) < self._min_members

    def _pause(self) -> Course[None]:
        """Too few to go on: all come to this boundary, so a proposal needs no agreement.

        Nor does it to store the State here, if all of them are to go before others come.
        """
        inbox = self._inbox
        yield Await(
            lambda: inbox.stores or inbox.dismissed is not None or self._addressed_by_membership(),
            phase="pause",
            detail=self.generation,
        )
        if inbox.dismissed is not None:
            raise inbox.dismissed
        if self.superseded:
            return
        if inbox.stores:
            yield from self._crew.say(StoreHere())
            yield StoreState()
            return
        self._agreed = inbox.proposed.generation

    # ------------------------------------------------------------------ a joiner outside the group

    def _stands(self, proposed: Membership) -> bool:
        """Whether nothing newer has come about since that proposal."""
        return proposed.generation > max(self.generation, self._inbox.urgent.generation)

    def _called(self) -> bool:
        """Whether a proposal that still stands has this member in it."""
        proposed = self._inbox.proposed
        return self._stands(proposed) and self._me in proposed.members

    def _addressed(self) -> bool:
        """Whether there is news for a member without the State."""
        return bool(self._inbox.invitation) or self._addressed_by_membership()

    def _addressed_by_membership(self) -> bool:
        heard = max(self._inbox.urgent.generation, self._inbox.proposed.generation)
        return heard > self.generation or self._crew.broken

    def _follow(self) -> Course[bool]:
        """At a boundary: whether there is an operation to imitate. If not, this joiner is in."""
        turn = yield from self.joiner.follow(self.hand.number)
        if isinstance(turn, Entering):
            yield from self._enter_from_outside(turn.generation)
        elif isinstance(turn, int):
            self.hand = InHand(turn)
        elif turn is None and self.joiner.summoned:
            yield from self.succeed()
        elif turn is None:
            self.hand = InHand()
            self.joiner.give_up()
            yield from self.come_in()
        return isinstance(turn, Watched)

    def succeed(self) -> Course[None]:
        """As soon as this shadow is summoned, it follows no longer: what is next is the group's."""
        yield Await(lambda: self.joiner.summoned)
        yield Succeed(self.joiner.equal)
        self.joiner.come_in()

    def _announced(self, generation: int) -> Course[Membership | None]:
        """That generation, as soon as the controller has told of it.

        None if it was killed before it could, and another one leads the run in a newer generation.
        """
        inbox = self._inbox
        yield Await(lambda: generation in inbox.members or inbox.urgent.generation > generation)
        members = inbox.members.get(generation)
        return None if members is None else Membership(generation, members, urgent=False)

    def _enter_from_outside(self, generation: int) -> Course[None]:
        if self.joiner.shadow:
            yield from self._enter_as_shadow(generation)
            return
        self.joiner.at_door = True
        joined = self.joiner.come_in()
        membership = yield from self._announced(generation)
        if joined is None or membership is None:
            self.hand = InHand()  # it goes without saying only if it was compared
        self.joiner.at_door = False
        try:
            if membership is None:
                raise Superseded
            yield from self._enter(membership, joined)
        except Superseded:
            if self.hand.has_state and self._me in self._inbox.urgent.members:
                return  # another controller has found it here, at the boundary of all the others
            self.hand = InHand()  # whoever has not confirmed is not in what came after
            yield from self.come_in()

    def _enter_as_shadow(self, generation: int) -> Course[None]:
        """It follows until it is in: should all others be lost on the way, it has the State.

        If its State has not been compared yet it is given that of the group, and keeps its own
        until then: it is at the same boundary.
        """
        plan, kept = self.plan, self.hand
        membership = yield from self._announced(generation)
        self.joiner.pass_entry()
        if membership is None:
            return
        if not self.joiner.keeps_state:
            self.hand = InHand()
        try:
            yield from self._enter(membership)
        except Superseded:
            if not self.hand.has_state:
                self.hand = kept
            self.plan = plan
            yield from self._leave()

    # ------------------------------------------------------------------ one operation

    def _attempt(self, operation: Operation) -> Course[OperationOutcome]:
        hand = self.hand
        if hand.passed is not None:
            return hand.passed
        group = cast("GroupHandle", self.group)  # whoever is not superseded is in one
        if not hand.complete:
            if not hand.void:
                yield from self._compute(group, operation)
                yield from self._ask(ReduceBuckets(group, operation))
            mine = hand.number, self.generation, operation.kind
            yield from self._await_crew(lambda: self._crew.held(*mine))
            hand.complete = self.generation
        if operation.together:
            yield from self._crew.say(Contribute(hand.number, self.generation, operation.kind))
        hand.payload, detail = yield Payload(group, operation)
        if detail is not None:
            yield from self._compare_calls(group, operation.kind, detail)
        result = yield from self._ask(ReducePayload(group, operation, hand.payload))
        contributors = self._inbox.members[hand.complete]
        return OperationOutcome(result, hand.complete, self.generation, contributors)

    def _compute(self, group: GroupHandle, operation: Operation) -> Course[None]:
        """Until this member has computed all that falls to it in this group.

        Nobody else can be through with the operation, or hold all of it, before that.
        """
        while operation.lacks(group.members):
            yield from self._crew.say(TakeOver(self.hand.number, self.generation))
            yield Compute(group.members)
            if self.superseded:
                raise Superseded

    def _compare_calls(self, group: GroupHandle, kind: int, detail: int) -> Course[None]:
        """Before a round alone: that all are in the same call, since payloads have other sizes.

        A gather, where steps begin with a reduction: of two that do not belong together neither
        takes the bytes of the other (gloo ends the process if there are too many), and both wait
        until the controller sees from their signs of life what they are in.
        """
        mine = kind, detail
        said = yield from self._ask(CompareCalls(group, *mine))
        if said.count(mine) == len(said):
            return
        by_member = dict(zip(group.members, said, strict=True))
        kinds = {member: kind for member, (kind, _) in by_member.items()}
        details = {member: detail for member, (_, detail) in by_member.items()}
        fault = calls.apart(self.hand.number, kinds) or calls.unlike(kind, details)
        if fault is not None:
            raise fault

    # ------------------------------------------------------------------ this worker's crew

    def _await_crew(self, there: Callable[[], bool]) -> Course[None]:
        """Until all places of this worker are so far.

        Raises:
            Superseded: there is something newer to do.
        """
        if self._crew.alone:
            return
        yield Await(lambda: there() or self.superseded, phase="crew", detail=self.hand.kind)
        if not there():
            raise Superseded

    def _say_go(self) -> Course[None]:
        members = self._inbox.members.get(self.plan, ())
        yield from self._crew.say(Go(self.hand.number, self.plan, members))

    def _say_going(self) -> Course[None]:
        hand = self.hand
        yield from self._crew.say(
            Going(self.generation, hand.number, hand.complete, hand.void, hand.next_void)
        )

    # ------------------------------------------------------------------ a change of the group

    def _catch_up(self) -> Course[None]:
        while self.superseded:
            if self._crew.broken:
                raise Broken(self._me)
            urgent = self._inbox.urgent
            self._recovering.since = self._recovering.since or urgent.generation
            yield from self._enter(urgent)

    def _enter(self, membership: Membership, joined: Joined | None = None) -> Course[None]:
        """Meet the members of a generation and agree on how to go on.

        Args:
            membership: the generation.
            joined: how this member has come by the State, if it brings it from outside.

        Raises:
            Superseded: there is a newer one.
        """
        if self._me not in membership.members:
            raise Fenced(f"worker {self._me} is not in generation {membership.generation}")
        yield from self._leave()
        hand = self.hand
        hand.passed = None
        self.generation = membership.generation
        if not membership.urgent:
            self.plan = membership.generation
            self._founded = 0  # others have gone on since; the State of the founding is stale
            self.unlevel = True
        self.group = group = yield from self._ask(
            Build(membership.generation, membership.members, prepare=self._to_prepare())
        )
        complete = hand.complete if hand.has_state else self._founded
        position = Position(hand.number, complete, self.plan, hand.kind, self.processor)
        positions = yield from self._ask(Meet(group, position))
        self.kinds = tuple(one.processor for one in positions)
        decision = self._rule(positions, membership.members)
        if decision.gone:
            self._look_if_gone(group, decision)
        if decision.founding and self.joiner.has_followed:
            raise Fenced(
                f"worker {self._me} has followed others, who are lost, and cannot begin the run "
                "with those that are at its beginning"
            )
        generation, members = membership.generation, membership.members
        yield from self._crew.say(Meeting(generation, members, decision.donor, decision.newcomers))
        if decision.donor is not None:
            yield from self._ask(CompareLayouts(group))
            mine, ranks = members.index(self._me), (decision.donor, *decision.newcomers)
            founding = not self.hand.has_state
            joined = yield from self._hand_over(group, mine, ranks, founding=founding)
            yield from self._await_crew(lambda: self._crew.there(generation))
        if decision.founding:
            # Like a commit round: whoever leaves it knows that all founders have the State.
            self._founded = membership.generation
            yield from self._ask(AllHaveState(group))
        yield from self._go_on(group, decision)
        joined = self.joiner.come_in() or joined
        yield TellEntered(membership.generation, joined)

    def _look_if_gone(self, group: GroupHandle, decision: Decision) -> None:
        """The others have gone on without some, which will be seen when these have ended.

        Raises:
            Released: this member is one of them, and was to leave.
            Fenced: it was taken out instead.
        """
        if group.members.index(self._me) not in decision.gone:
            return
        if self._me not in self._inbox.members.get(decision.plan, ()):
            raise Released(decision.plan)
        raise Fenced(
            f"worker {self._me} is in operation {self.hand.number} while others have gone on to "
            f"{decision.operation} without it"
        )

    def _to_prepare(self) -> Operation | None:
        """Others may be busy for as long as this takes; if the step stands, it was for nothing."""
        hand = self.hand
        return None if hand.complete or hand.kind == self._redo else hand.operation

    def _go_on(self, group: GroupHandle, decision: Decision) -> Course[None]:
        hand = self.hand
        if not hand.has_state:
            hand.number = decision.operation
            self.plan = 0  # it may have begun to enter a group that did not come about
        behind = hand.number < decision.operation
        void = decision.begun and decision.kind == self._redo and not decision.complete
        if decision.source is not None:
            # Whoever is ahead has the result of the operation before; the others need it.
            held = hand.payload if behind else self._result
            if held is None:
                raise TrainError(
                    f"worker {self._me} has no result of operation {decision.operation - 1} to "
                    "pass on or to receive. Nothing can be recovered; this is a bug in elastix."
                )
            told = yield from self._ask(PassOn(group, decision.source, held))
            if behind:
                contributors = self._inbox.members[hand.complete] if hand.complete else ()
                hand.passed = OperationOutcome(told, hand.complete, decision.plan, contributors)
        hand.begun = decision.begun
        hand.next_void = behind and void
        if behind:
            self._recovering.outcome = "passed on"
            yield from self._say_going()
            return
        if not decision.complete:  # else it is as void as it was, on all of them
            hand.void = void
        kept = "accepted" if decision.complete else "reduced again"
        self._recovering.outcome = "done again" if hand.void else kept
        hand.complete = decision.complete
        self.plan = max(self.plan, decision.plan) or self.generation
        yield from self._say_going()

    def _recovered(self, kind: int) -> Course[None]:
        through, self._recovering = self._recovering, Recovering()
        yield TellRecovered(self.generation, kind, through.outcome, through.since)
