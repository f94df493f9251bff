"""A joiner on its way into the group: it has a peer's State, and does what the group agreed on.

A shadow is a joiner that stays outside, so that it has the State when all members are lost at
once: it enters a generation of its own then, at the boundary or in the operation that it is at. It
comes in when a seat is free and somebody else can be the shadow.
It takes no part in the group and nobody waits for it. It runs the same train function as all do,
but its operations end as its donor says, until that enters a generation with this worker in it.
Pure, as protocol is, which it is a part of.

Not here: what a donor tells (catch_up_messages), and how (catch_up_stream); the group that is
entered in the end (group_protocol).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastix.comm.protocol.calls import OperationKind, call
from elastix.comm.protocol.catch_up_messages import Digest, DigestMark, Entering, Given, Watched
from elastix.comm.protocol.inbox import Inbox
from elastix.comm.protocol.operation import OperationOutcome
from elastix.comm.protocol.participant import Fenced, Joined
from elastix.comm.protocol.wants import (
    Adopt,
    Await,
    Course,
    Imitate,
    Level,
    Lonely,
    Subscribe,
    TakeDigest,
    Unequal,
)
from elastix.errors import TrainError

if TYPE_CHECKING:
    from elastix.comm.protocol.catch_up_messages import CatchUpStream
    from elastix.comm.protocol.operation import Operation

_NEAR = 2
"""A joiner with so few operations left to do asks to be let in."""

_PATIENCE = 200
"""After so many it asks anyway: it is slower than the group, which has to wait for it."""

_FAILURES = 3
"""A joiner that was dropped so often is given the State in the group, which has to wait for it."""


@dataclass
class _Catchup:
    """How far it is with one donor.

    Attributes:
        joined: what the copy of the State has cost.
        plan: the workers over which the operation in hand was split.
        mine: digest of the State here at the donor's mark.
        equal: the donor's is the same.
        told: the controller knows that this joiner is level.
        followed: operations that it did as its donor said.
    """

    stream: CatchUpStream
    joined: Joined
    plan: tuple[int, ...] = ()
    mine: str = ""
    equal: bool = False
    told: bool = False
    followed: int = 0


class Joiner:
    """One worker's way in; of no use once it is in.

    Args:
        me: this worker's id.
        inbox: what the controller tells this worker.
        called: whether a proposal that still stands has this worker in it.

    Attributes:
        equal: the State was not found to differ from the donor's when it was compared last.
        at_door: it follows no longer, and has not been told yet what group it enters.
        has_followed: it was given a State once, and is past the beginning of the train function.
    """

    def __init__(self, me: int, inbox: Inbox, called: Callable[[], bool]) -> None:
        self._me = me
        self._inbox = inbox
        self._called = called
        self._catchup: _Catchup | None = None
        self._failures = 0
        self.equal = True
        self.at_door = False
        self.has_followed = False

    @property
    def shadow(self) -> bool:
        """Whether it follows for good."""
        return self._inbox.shadow

    @property
    def summoned(self) -> bool:
        """Whether all members are lost, and this shadow is to go on in their place."""
        return self.shadow and self._me in self._inbox.urgent.members

    @property
    def following(self) -> bool:
        """Whether it has a State and a donor."""
        return self._catchup is not None

    @property
    def plan(self) -> tuple[int, ...]:
        """The workers over which the operation in hand was split; empty before the first."""
        return self._catchup.plan if self._catchup is not None else ()

    def begin(self) -> Course[int | None]:
        """Be given the State by one of the peers that the controller has named, and follow it.

        Returns:
            Number of the next operation. None without a State: the group calls, or all donors are
            lost and the controller was asked for others.

        Raises:
            ConfigError: the donor's model is another one.
        """
        found = yield from self._find_donor()
        if found is not None:
            return (yield from self._adopt(*found))
        if not self._called():  # else the group stands still until it has more members
            yield from self._ask_again()
        return None

    def _find_donor(self) -> Course[tuple[CatchUpStream, Given] | None]:
        """Of the peers that the controller has named, the first that gives its State."""
        donors = self._inbox.invitation
        self._inbox.invite(())
        for donor in donors:
            stream: CatchUpStream = yield Subscribe(donor)
            yield Await(
                lambda s=stream: (  # type: ignore[misc]
                    s.given is not None or s.failed or self._called() or self.summoned
                )
            )
            given, stream.given = stream.given, None
            if given is not None:
                return stream, given
            stream.close()
            if self._called() or self.summoned:
                return None
        return None

    def _adopt(self, stream: CatchUpStream, given: Given) -> Course[int]:
        """Follow that donor, from the State that it gave; number of the next operation."""
        if self.equal:  # else it will differ again, and be copied again: not at every turn
            stream.ask_digest()
        joined: Joined = yield Adopt(given)
        self._catchup = _Catchup(stream, joined)
        self.has_followed = True
        if self.shadow:
            yield Level(equal=False)
        return given.operation

    def ask_digest(self) -> None:
        """Have the State compared with the donor's."""
        if self._catchup is not None:
            self._catchup.stream.ask_digest()

    def differs(self) -> None:
        """The State was seen to be another than the group's, or theirs to differ among themselves.

        A digest may say later that it is as it should be.
        """
        self.equal = False
        if self._catchup is not None:
            self._catchup.equal = False

    def say_able(self, able: bool) -> None:
        """Tell the donor whether this shadow can store States."""
        if self._catchup is not None:
            self._catchup.stream.say_able(able)

    def follow(self, operation: int) -> Course[Watched | Entering | int | None]:
        """At a boundary: what comes next, as soon as the donor says so.

        Args:
            operation: number of the next one.

        Returns:
            An operation to imitate, or the generation to enter; the number of the next operation
            if this shadow was given a newer State. None if this joiner is to follow no longer: it
            must be given the State again, or was summoned. It passes for one who follows until
            `give_up`, or what it has would pass for the State of the group meanwhile.
        """
        while self._catchup is not None:
            catchup, head = self._catchup, self._catchup.stream.head
            match head:
                case Watched():
                    catchup.plan = head.plan or catchup.plan
                    yield from self._tell_level(catchup)
                    return head
                case Entering():
                    return head
                case DigestMark():
                    catchup.mine = yield TakeDigest()
                case Digest() if head.digest == catchup.mine:
                    yield from self._found_equal(catchup)
                case Digest():
                    self.equal = False
                    yield Unequal(operation, catchup.followed, catchup.mine, head.digest)
                    if self.shadow:  # what it was told counts until it has another State
                        catchup.stream.pop()
                        catchup.stream.close()
                        continue
                    yield Level()  # in the group it is given the State as all are
                    return None
                case None if self.shadow:
                    stream = catchup.stream
                    yield Await(lambda s=stream: s.head is not None or s.failed)  # type: ignore[misc]
                    if stream.head is None:
                        found = yield from self._seek_donor()
                        return (yield from self._adopt(*found)) if found is not None else None
                    continue
                case None:
                    if not (yield from self._await_more(catchup)):
                        return None
                    continue
            catchup.stream.pop()
        return None

    def _found_equal(self, catchup: _Catchup) -> Course[None]:
        catchup.equal = self.equal = True
        if self.shadow and not catchup.told:
            catchup.told = True
            yield Level()

    def _await_more(self, catchup: _Catchup) -> Course[bool]:
        """All that was told is done: whether there is more."""
        stream = catchup.stream
        yield from self._tell_level(catchup)

        def cold() -> bool:  # the group wants this joiner as it is, and waits
            return self._called() and not catchup.told

        yield Await(lambda: stream.head is not None or stream.failed or cold())
        if stream.head is not None:
            return True
        if not cold():
            yield from self._ask_again()  # which takes as long as nobody leads the run
        return False

    def _tell_level(self, catchup: _Catchup) -> Course[None]:
        """Ask to be let in, if the State is as it should be and there is little left to do."""
        if self.shadow:
            return
        near = catchup.stream.backlog <= _NEAR or catchup.followed >= _PATIENCE
        if catchup.equal and near and not catchup.told:
            catchup.told = True
            yield Level()

    def _ask_again(self) -> Course[None]:
        """All donors are lost, or have dropped this joiner: others, or the State in the group."""
        self._failures += 1
        yield Lonely() if self.shadow or self._failures < _FAILURES else Level()

    def _seek_donor(self) -> Course[tuple[CatchUpStream, Given] | None]:
        """A shadow has lost its donor: another one, or None if it is summoned.

        It keeps its State meanwhile: there may be no other.
        """
        while not self.summoned:
            yield Lonely()
            yield Await(lambda: bool(self._inbox.invitation) or self.summoned)
            found = None if self.summoned else (yield from self._find_donor())
            if found is not None:
                return found
        return None

    def imitate(self, operation: Operation, number: int) -> Course[OperationOutcome | None]:
        """Instead of carrying an operation through: take over what the group agreed on.

        Returns:
            None if a shadow is to carry it through, as all members are lost.

        Raises:
            Fenced: the donor is lost before it has told how this one ended.
            TrainError: the group has done something else.
        """
        catchup = self._catchup
        if catchup is None:
            raise TrainError("this worker follows nobody; this is a bug in elastix.")
        stream = catchup.stream
        yield Await(lambda: stream.head is not None or stream.failed)
        head = stream.head
        if head is None and self.shadow and operation.kind != OperationKind.STEP:
            found = yield from self._seek_donor()
            if found is None:
                return None
            found[0].close()  # the others live, and are ahead
        if not isinstance(head, Watched):
            raise Fenced(
                f"worker {self._me} lost its donor in the middle of operation {number} and cannot "
                "go on from there"
            )
        if (head.kind, head.operation) != (operation.kind, number):
            raise TrainError(
                f"joiner {self._me} is {call(operation.kind)} (operation {number}), the group "
                f"was {call(head.kind)} (operation {head.operation}). All "
                "workers must make the same calls on ctx in the same order."
            )
        stream.pop()
        yield Imitate(operation, head)
        catchup.followed += 1
        return OperationOutcome(head.result, head.complete, head.generation, head.contributors)

    @property
    def keeps_state(self) -> bool:
        """Whether it comes in with what it has: the State was compared with the donor's."""
        return self.shadow and self._catchup is not None and self._catchup.equal

    def pass_entry(self) -> None:
        """The entry that the donor has told of was not to be."""
        if self._catchup is not None:
            self._catchup.stream.pop()

    def come_in(self) -> Joined | None:
        """Follow no longer. What the way in has cost; None if the State was not found equal."""
        catchup = self._catchup
        if catchup is None:
            return None
        self._stop(catchup)
        joined = Joined(0.0, 0) if self.shadow else catchup.joined
        return replace(joined, watched_steps=catchup.followed) if catchup.equal else None

    def give_up(self) -> None:
        """Follow no longer: what this joiner has is of no use."""
        if self._catchup is not None:
            self._stop(self._catchup)

    def _stop(self, catchup: _Catchup) -> None:
        catchup.stream.close()
        self._catchup = None
