"""A joiner on its way into the group: it has a peer's State, and does what the group agreed on.

It takes no part in the group and nobody waits for it. It runs the same train function as all do,
but its operations end as its donor says, until that enters a generation with this worker in it.

Not here: what a donor tells, and how (feed); the group that is entered in the end (rounds).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from elastix.comm import layout as layouts
from elastix.comm.calls import call
from elastix.comm.feed import Digest, Entering, Given, Mark, Watch, Watched
from elastix.comm.news import News
from elastix.comm.operation import Left, Operation
from elastix.comm.participant import Fenced, Joined, Participant
from elastix.errors import TrainError

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
        plan: the workers over which the operation in hand was split.
        mine: digest of the State here at the donor's mark.
        equal: the donor's is the same.
        told: the controller knows that this joiner is level.
    """

    watch: Watch
    nbytes: int
    copy_s: float
    plan: tuple[int, ...] = ()
    mine: str = ""
    equal: bool = False
    told: bool = False
    followed: int = 0


class Joiner:
    """One worker's way in. Used in the training thread; of no use once it is in.

    Args:
        me: this worker's id.
        secret: of the run.
        called: whether a proposal that still stands has this worker in it.
        pass_time: blocks until what it is given holds.
    """

    def __init__(
        self,
        me: int,
        secret: bytes,
        participant: Participant,
        news: News,
        called: Callable[[], bool],
        pass_time: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._me = me
        self._secret = secret
        self._participant = participant
        self._news = news
        self._called = called
        self._pass_time = pass_time
        self._catchup: _Catchup | None = None
        self._failures = 0

    @property
    def following(self) -> bool:
        """Whether it has a State and a donor."""
        return self._catchup is not None

    @property
    def plan(self) -> tuple[int, ...]:
        """The workers over which the operation in hand was split; empty before the first."""
        return self._catchup.plan if self._catchup is not None else ()

    def begin(self, layout: list[str]) -> int | None:
        """Be given the State by one of the peers that the controller has named, and follow it.

        Args:
            layout: of the model here; see layout.

        Returns:
            Number of the next operation. None without a State: the group calls, or all donors are
            lost and the controller was asked for others.

        Raises:
            ConfigError: the donor's model is another one.
        """
        donors = self._news.invitation
        self._news.invite(())
        for donor in donors:
            started = time.monotonic()
            watch = Watch(donor, self._secret, self._me, self._news.notify)
            self._participant.phase("take", 0)
            given = self._await_state(watch)
            if given is not None:
                layouts.compare([given.layout, layout])
                watch.ask_digest()
                self._participant.adopt_state(given.state)
                copy_s = time.monotonic() - started
                self._catchup = _Catchup(watch, given.state.nbytes, copy_s)
                return given.operation
            watch.close()
            if self._called():
                return None  # the group stands still until it has more members
        self._ask_again()
        return None

    def _await_state(self, watch: Watch) -> Given | None:
        self._pass_time(lambda: watch.given is not None or watch.failed or self._called())
        given, watch.given = watch.given, None
        return given

    def follow(self, operation: int) -> Watched | Entering | None:
        """At a boundary: what comes next, as soon as the donor says so.

        Args:
            operation: number of the next one.

        Returns:
            An operation to imitate, or the generation to enter. None if this joiner follows
            nobody any longer: it must be given the State again.
        """
        while self._catchup is not None:
            catchup, head = self._catchup, self._catchup.watch.head
            match head:
                case Watched():
                    catchup.plan = head.plan or catchup.plan
                    self._tell_level(catchup)
                    return head
                case Entering():
                    return head
                case Mark():
                    catchup.mine = self._participant.digest()
                case Digest() if head.digest == catchup.mine:
                    catchup.equal = True
                case Digest():
                    self._participant.phase("unequal", operation)
                    self._stop(catchup)
                    self._participant.level()  # in the group it is given the State as all are
                    continue
                case None:
                    self._await_more(catchup)
                    continue
            catchup.watch.pop()
        return None

    def _await_more(self, catchup: _Catchup) -> None:
        """All that was told is done."""
        watch = catchup.watch
        self._tell_level(catchup)

        def cold() -> bool:  # the group wants this joiner as it is, and waits
            return self._called() and not catchup.told

        self._pass_time(lambda: watch.head is not None or watch.failed or cold())
        if watch.head is None:
            lost = not cold()
            self._stop(catchup)
            if lost:
                self._ask_again()

    def _tell_level(self, catchup: _Catchup) -> None:
        """Ask to be let in, if the State is as it should be and there is little left to do."""
        near = catchup.watch.backlog <= _NEAR or catchup.followed >= _PATIENCE
        if catchup.equal and near and not catchup.told:
            catchup.told = True
            self._participant.level()

    def _ask_again(self) -> None:
        """All donors are lost, or have dropped this joiner: others, or the State in the group."""
        self._failures += 1
        if self._failures < _FAILURES:
            self._participant.lonely()
        else:
            self._participant.level()

    def imitate(self, operation: Operation, number: int) -> Left:
        """Instead of carrying an operation through: take over what the group agreed on.

        Raises:
            Fenced: the donor is lost before it has told how this one ended.
            TrainError: the group has done something else.
        """
        catchup = self._catchup
        if catchup is None:
            raise TrainError("this worker follows nobody; this is a bug in elastix.")
        watch = catchup.watch
        self._pass_time(lambda: watch.head is not None or watch.failed)
        head = watch.head
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
        watch.pop()
        operation.imitate(head)
        catchup.followed += 1
        return Left(head.result, head.complete, head.generation, head.contributors)

    def come_in(self) -> Joined | None:
        """Follow no longer. What the way in has cost; None if the State was not found equal."""
        catchup = self._catchup
        if catchup is None:
            return None
        self._stop(catchup)
        if not catchup.equal:
            return None
        return Joined(catchup.copy_s, catchup.nbytes, catchup.followed)

    def _stop(self, catchup: _Catchup) -> None:
        catchup.watch.close()
        self._catchup = None
