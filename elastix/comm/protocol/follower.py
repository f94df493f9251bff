"""What a follower does: what the group protocol is to its worker's speaker, at another place. Pure.

It obeys its speaker's words, in order, and never leaves an operation by itself. So it may be asked
for whatever a GroupProtocol is asked for; the answers are its speaker's. See crew for why, and for
what must hold.

It waits for its rail and for its speaker. As soon as it hears of a newer generation, or there is a
word, it stops waiting for the rail; its buckets stay as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastix.comm.protocol.crew import (
    Contribute,
    Go,
    Going,
    Gone,
    Held,
    Meeting,
    Order,
    Prepared,
    Release,
    StoreHere,
    TakeOver,
    There,
)
from elastix.comm.protocol.in_group import InGroup
from elastix.comm.protocol.inbox import Inbox
from elastix.comm.protocol.joiner import Joiner
from elastix.comm.protocol.operation import OperationOutcome
from elastix.comm.protocol.operation_in_hand import InHand
from elastix.comm.protocol.participant import Broken, Fenced, Released
from elastix.comm.protocol.wants import (
    Await,
    CompareLayouts,
    Compute,
    Conclude,
    Connect,
    Connected,
    Course,
    GroupHandle,
    Payload,
    ReduceBuckets,
    Say,
    Seat,
    StoreState,
    Superseded,
)
from elastix.errors import TrainError

if TYPE_CHECKING:
    from elastix.comm.protocol.membership import Membership
    from elastix.comm.protocol.operation import Operation


class Follower(InGroup):
    """One follower's side. Its courses are driven one at a time.

    Args:
        me: the id of its worker.
        inbox: what the controller tells it.

    Attributes:
        generation: the newest one in which its speaker has met others.
        group: its rail there; None while it is not connected.
        plan: the generation over whose members the next batch is split.
        hand: the operation in hand, or the next.
        joiner: follows nobody outside.
        broken: the speaker is lost, or says that another process of the worker is.
    """

    def __init__(self, me: int, inbox: Inbox) -> None:
        super().__init__()
        self.plan = 0
        self.hand = InHand()
        self.broken = False
        self.joiner = Joiner(me, inbox, lambda: False)
        self._me = me
        self._inbox = inbox
        self._orders: deque[Order] = deque()
        self._open = 0  # the generation in which buckets may be reduced

    # ------------------------------------------------------------------ at any time

    def hear(self, order: Order) -> None:
        """The speaker says something."""
        self._orders.append(order)

    @property
    def superseded(self) -> bool:
        """Whether it is not worth waiting for the rail any longer."""
        return bool(self._orders) or self._lost or self._outdated

    @property
    def _outdated(self) -> bool:
        return self._inbox.urgent.generation > self.generation

    @property
    def _lost(self) -> bool:
        """Whether there will be no further word that counts."""
        fenced = self._outdated and self._me not in self._inbox.urgent.members
        # A newcomer that was left out of a generation is let in by a later one.
        return self.broken or (fenced and self.hand.has_state)

    @property
    def usable(self) -> bool:
        """Whether it is worth launching something in the present rail."""
        opened = self._open == self.generation and not self.hand.void
        return self.group is not None and opened and not self._outdated

    @property
    def holder(self) -> bool:
        """Whether this place has the State. Any thread may ask."""
        return self.hand.has_state

    @property
    def planned(self) -> tuple[int, ...]:
        """The members over which the next batch is split."""
        return self._inbox.members[self.plan]

    @property
    def call(self) -> tuple[int, int]:
        """Number and kind of the operation in hand; of kind 0 between operations."""
        return self.hand.number, self.hand.kind

    def vote(self, connected: Callable[[Membership], bool]) -> int:
        """Followers do not vote."""
        del connected
        return 0

    def step_left(self, outcome: OperationOutcome, proposal: int) -> None:
        """What follows from that is the speaker's affair."""

    # ------------------------------------------------------------------ courses

    def assemble(self) -> Course[None]:
        """Say that this place is up to `prepare`."""
        yield Say(Prepared())

    def come_in(self) -> Course[None]:
        """Until this place has the State."""
        while not self.hand.has_state:
            yield from self._obey((yield from self._next_order()))

    def run(self, operation: Operation) -> Course[OperationOutcome]:
        """Reduce its buckets as often as it takes, and leave when the speaker says so.

        Raises:
            Fenced: the worker was taken out; Broken if one of its processes is lost.
            TrainError: the speaker does something else.
        """
        hand = self.hand
        hand.operation = operation
        while (outcome := (yield from self._obey_until_gone())) is None:
            try:
                yield from self._attempt(operation)
            except Superseded:  # by news, perhaps, of which the speaker has not spoken yet
                yield Await(lambda: bool(self._orders) or self._lost)
        self.hand = hand.after()
        yield Conclude(operation, outcome, hand.number, self._inbox.members.get(self.plan, ()))
        return outcome

    def boundary(self) -> Course[None]:
        """Between two steps: until the speaker goes on.

        Raises:
            Released: the worker was to leave, and does so here.
        """
        while True:
            order = yield from self._next_order()
            match order:
                case Go(operation, plan, members):
                    if operation != self.hand.number:
                        raise self._astray(order)
                    self._inbox.learn(plan, members)
                    self.plan = plan
                    yield from self._come_to_rail()
                    return
                case Release(generation):
                    raise Released(generation)
                case StoreHere():
                    yield StoreState()
                case _:
                    yield from self._obey(order)

    def stand_by(self, without: Sequence[int]) -> Course[None]:
        """The speaker waits; what comes of it is said in the next operation."""
        del without
        yield from ()

    def succeed(self) -> Course[None]:
        """A follower is no shadow."""
        yield from ()

    # ------------------------------------------------------------------ words

    def _next_order(self) -> Course[Order]:
        inbox = self._inbox
        yield Await(lambda: bool(self._orders) or self._lost or inbox.dismissed is not None)
        if self._orders:
            return self._orders.popleft()
        if self._lost:
            raise self._end()
        assert inbox.dismissed is not None  # noqa: S101 - what else it has waited for
        raise inbox.dismissed

    def _end(self) -> Fenced:
        if self.broken:
            return Broken(self._me)
        return Fenced(f"worker {self._me} is not in generation {self._inbox.urgent.generation}")

    def _astray(self, order: Order) -> TrainError:
        number, kind = self.call
        return TrainError(
            f"the places of worker {self._me} have parted: one is in operation {number} of kind "
            f"{kind}, and was told {order}. Nothing can be recovered; the run was stopped. All "
            "places must make the same calls on ctx in the same order."
        )

    def _obey_until_gone(self) -> Course[OperationOutcome | None]:
        """Obey what was said so far: how the operation ended, if that is among it."""
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, Gone):
                if order.operation != self.hand.number:
                    raise self._astray(order)
                return order.outcome
            yield from self._obey(order)
        if self._lost:
            raise self._end()
        return None

    def _obey(self, order: Order) -> Course[None]:
        match order:
            case Meeting():
                try:
                    yield from self._meet(order)
                except Superseded:
                    return  # the speaker will say how it goes on
            case Going():
                self._go_on(order)
            case Contribute():
                yield from self._contribute(order)
            case TakeOver():
                yield from self._take_over(order)
            case _:
                raise self._astray(order)

    def _meet(self, order: Meeting) -> Course[None]:
        """Leave the old rail and begin to connect the new; give or take the State there."""
        yield from self._leave()
        self.generation = order.generation
        self._inbox.learn(order.generation, order.members)
        yield Connect(order.generation, order.members)
        if order.donor is not None:
            rail = yield from self._rail()
            yield from self._ask(CompareLayouts(rail))
            mine, ranks = order.members.index(self._me), (order.donor, *order.newcomers)
            founding = not self.hand.has_state
            yield from self._hand_over(rail, mine, ranks, founding=founding)
            yield Say(There(order.generation))

    def _go_on(self, order: Going) -> None:
        hand = self.hand
        if not hand.has_state:
            hand.number = order.operation
        if order.generation != self.generation or order.operation != hand.number:
            raise self._astray(order)
        self._open = order.generation
        if order.complete and order.complete != hand.complete:
            raise self._astray(order)
        hand.complete, hand.void, hand.next_void = order.complete, order.void, order.next_void

    def _contribute(self, order: Contribute) -> Course[None]:
        """Compute with the others of this worker; what comes of it is the speaker's to tell.

        Without looking for news: the others wait for this place, and for nobody outside.
        """
        number, generation, operation = self.hand.number, self.generation, self.hand.operation
        if operation is None or order != Contribute(number, generation, operation.kind):
            raise self._astray(order)
        members = self._inbox.members[generation]
        yield Payload(Seat(generation, members, members.index(self._me)), operation)

    def _take_over(self, order: TakeOver) -> Course[None]:
        """Have the train function compute with this worker's others, without looking for news."""
        number, generation, operation = self.hand.number, self.generation, self.hand.operation
        members = self._inbox.members[generation]
        if operation is None or order != TakeOver(number, generation):
            raise self._astray(order)
        if not operation.lacks(members):
            raise self._astray(order)
        yield Compute(members)

    # ------------------------------------------------------------------ the rail

    def _attempt(self, operation: Operation) -> Course[None]:
        """Reduce what is not reduced, and say so; then wait for a word."""
        hand, generation = self.hand, self.generation
        # What it lacks the speaker is going to say.
        lacks = not hand.void and operation.lacks(self._inbox.members[generation])
        if not hand.complete and self._open == generation and not lacks:
            if not hand.void:
                rail = yield from self._rail()
                yield from self._ask(ReduceBuckets(rail, operation))
            hand.complete = generation
            yield Say(Held(hand.number, generation, hand.kind))
        yield Await(lambda: bool(self._orders) or self._lost, phase="held", detail=hand.kind)

    def _rail(self) -> Course[GroupHandle]:
        """The group of this generation, connected."""
        if self.group is None:
            self.group = yield from self._ask(Connected(self.generation))
        return self.group

    def _come_to_rail(self) -> Course[None]:
        """At a boundary: have it connected, so that buckets can be reduced while backward runs."""
        try:
            yield from self._rail()
        except Superseded:
            return  # `run` sees to it
