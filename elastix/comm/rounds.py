"""Operations that a group does together, and that survive a change of the group.

A worker runs numbered operations (see recovery). While it waits for peers it also listens to the
news; when a new generation is announced it drops the operation, meets the others there, learns
where everybody is, and goes on with the same operation in the new group. Nothing that is shared
changes before an operation is left, so this may happen any number of times.

Not here: what an operation computes (reducer, train.context), and who decides on generations.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from blake3 import blake3

from elastix.comm import transfer
from elastix.comm.feed import Digest, Entering, Feed, Mark, Watch, Watched
from elastix.comm.group import Alone, Builder, Group, Pending, Reduce, Wiring
from elastix.comm.membership import Membership
from elastix.comm.news import News
from elastix.comm.recovery import Decision, Position, decide
from elastix.errors import ConfigError, TrainError
from elastix.state import State

_NEAR = 2
"""A joiner with so few operations left to do asks to be let in."""

_PATIENCE = 200
"""After so many it asks anyway: it is slower than the group, which has to wait for it."""


_FAILURES = 3
"""A joiner that was dropped so often is given the State in the group, which has to wait for it."""


class Fenced(BaseException):
    """This worker was taken out of the group. Not an Exception: user code must not catch it."""


class Released(BaseException):
    """The others go on without this worker from here, as agreed: it was to leave."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"let go at the boundary of generation {generation}")
        self.generation = generation


class _Superseded(Exception):
    """Internal: a newer generation was announced while waiting."""


class Operation(Protocol):
    """One kind of operation. All its methods may be called again in a newer group."""

    @property
    def kind(self) -> int:
        """A positive number; differs between kinds, equal on all workers."""
        ...

    @property
    def reduce(self) -> Reduce:
        """How the payloads of the round add up."""
        ...

    def prepare(self, generation: int) -> None:
        """Do what can be done alone before the members of `generation` have met."""
        ...

    def launch(self, group: Group) -> Sequence[Pending]:
        """Start what is not yet started in `group`; return all that must be over first."""
        ...

    def payload(self, group: Group) -> torch.Tensor:
        """What this worker adds to the round; of the same shape on all."""
        ...

    def accept(self, left: "Left") -> None:
        """The operation was left: take over what was agreed."""
        ...

    def parts(self) -> Sequence[torch.Tensor]:
        """After `accept`: flat copies of what an onlooker needs to do the same."""
        ...

    def imitate(self, watched: Watched) -> None:
        """Instead of all of the above: take over what the others agreed on."""
        ...


@dataclass(frozen=True)
class Left:
    """How an operation ended: the same on all workers.

    Attributes:
        result: the reduced payload.
        complete: generation whose members contributed to the buckets.
        generation: the generation in which its round was left.
        contributors: the members of `complete`.
    """

    result: torch.Tensor
    complete: int
    generation: int
    contributors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recovery:
    """One worker's way through one or more changes of the group.

    Attributes:
        kind: of the operation that was in hand; 0 between operations.
        outcome: what became of it.
        rebuild_s: from the meeting's start to a working group, for the last change.
        stall_s: from the news to the end of the operation.
    """

    generation: int
    kind: int
    outcome: str
    rebuild_s: float
    stall_s: float


@dataclass(frozen=True)
class Joined:
    """How a worker came by the State.

    Attributes:
        copy_s: how long the copy took.
        copy_bytes: size of the State.
        watched_steps: operations that it followed before it came in; 0 if all waited for the copy.
    """

    copy_s: float
    copy_bytes: int
    watched_steps: int = 0


class Participant(Protocol):
    """What the worker around Rounds provides. Called in the training thread."""

    def give_state(self, founding: bool) -> State:
        """The State as it is, for newcomers. `founding`: the run begins here."""
        ...

    def adopt_state(self, state: State) -> None:
        """Become equal to the peer that gave `state`."""
        ...

    def digest(self) -> str:
        """Of the State as it is, equal for equal replicas."""
        ...

    def level(self) -> None:
        """This joiner has drawn level, or shall be given the State in the group instead."""
        ...

    def lonely(self) -> None:
        """This joiner has lost all its donors."""
        ...

    def entered(self, generation: int, joined: Joined | None) -> None:
        """In the group, with the State."""
        ...

    def recovered(self, recovery: Recovery) -> None:
        """An operation was left after the group changed in it."""
        ...

    def doubt(self, generation: int, error: BaseException) -> None:
        """An operation of `generation` failed. Ask the controller for a new one."""
        ...

    def phase(self, name: str, detail: int) -> None:
        """Where this worker is: for heartbeats, traces, and tests that kill it there."""
        ...


@dataclass
class Catchup:
    """How far a joiner is that follows the group from outside.

    Attributes:
        nbytes: size of the State it was given.
        plan: the workers over which the operation in hand was split.
        mine: digest of the State here at the donor's mark.
        equal: the donor's is the same.
        told: the controller knows that this joiner is level.
        followed: operations imitated.
    """

    watch: Watch
    nbytes: int
    copy_s: float = 0.0
    plan: tuple[int, ...] = ()
    mine: str = ""
    equal: bool = False
    told: bool = False
    followed: int = 0


class Rounds:
    """One worker's side of all operations. Used by one thread at a time.

    Attributes:
        group: the process group in use; None before the first.
        generation: the newest generation that this worker entered or tries to enter.
        operation: number of the operation in hand, or the next; -1 without the State.
        plan: the generation over whose members the next batch is split.
        void: the operation in hand is done for nothing, since its step will be done again.
        waiting: this worker is blocked, and others have to move first.
        waited_s: how long it has been so, altogether.
        on_reduced: called from any thread with the number of a bucket whose reduction has ended.
    """

    def __init__(
        self,
        participant: Participant,
        news: News,
        wiring: Wiring,
        device: torch.device,
        min_workers: int = 1,
        redo: int = 0,
    ) -> None:
        self.group: Group | None = None
        self.generation = 0
        self.operation = -1
        self.plan = 0
        self.layout: list[str] = []
        self.on_reduced: Callable[[int], None] | None = None
        self._participant = participant
        self._news = news
        self._wiring = wiring
        self._device = device if wiring.backend == "nccl" else torch.device("cpu")
        self._min_workers = min_workers
        self._complete = 0
        self._kind = 0
        self._in_hand: Operation | None = None
        self._agreed = 0
        self._begun = False
        self._given = 0
        self._result: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._passed: Left | None = None
        self._recovering_since = 0.0
        self._rebuild_s = 0.0
        self._outcome = ""
        self.void = False
        self._next_void = False  # those ahead have found the operation after this one void
        self._redo = redo  # kind of operation that is not finished by survivors but done again
        self.waiting = False
        self.waited_s = 0.0
        self._watch: Catchup | None = None  # of a joiner that follows the group from outside
        self._joined: Joined | None = None
        self._failures = 0
        self._feed: Feed | None = None
        self._ahead: Builder | None = None  # of the newest proposal; see _build_ahead
        self._ahead_lock = threading.Lock()
        news.on_proposal(self._build_ahead)

    # ------------------------------------------------------------------ what the worker calls

    def members(self, generation: int) -> tuple[int, ...]:
        """Members of a generation that was announced to this worker."""
        return self._news.members[generation]

    def meet_at(self, address: tuple[str, int]) -> None:
        """From now on groups meet at another Rendezvous. Any thread may say so."""
        self._wiring = replace(self._wiring, address=address)

    @property
    def watching(self) -> bool:
        """Whether this worker is a joiner that follows the group from outside."""
        return self._watch is not None

    @property
    def planned(self) -> tuple[int, ...]:
        """The workers over which the next batch is split."""
        return self._watch.plan if self._watch is not None else self.members(self.plan)

    def feed_joiners(self, feed: Feed) -> None:
        """Tell joiners how operations end, from now on."""
        self._feed = feed

    @property
    def usable(self) -> bool:
        """Whether it is worth launching something in the present group."""
        newest = self._news.urgent.generation <= self.generation
        return self.group is not None and newest and not self.void

    def first_entry(self, layout: list[str]) -> None:
        """Enter the group as a founder or a joiner; blocks until let in and given the State.

        Args:
            layout: one line per parameter and buffer; must be equal on all workers.

        Raises:
            ConfigError: the layouts differ; names the first line that does.
        """
        self.layout = layout
        self._participant.phase("wait", 0)
        self._come_in()

    def _come_in(self) -> None:
        """Until this worker has the State: in a group, or from a peer that it goes on to watch."""
        me = self._wiring.me
        while self.operation < 0:
            self._pass_time(self._addressed)
            newest = max(self._heard(), key=lambda m: m.generation)
            if self._news.invitation and not self._called(self._news.proposed):
                self._catch_up_outside()
            elif me in newest.members:
                try:
                    self._enter(newest)
                except _Superseded:
                    continue
            else:
                self._leave_group()
                self.generation = newest.generation

    def run(self, operation: Operation) -> Left:
        """Carry one operation through, whatever happens to the group. Collective.

        Blocks until all members of the group take part; has no timeout of its own.

        Raises:
            Fenced: this worker was taken out.
            TrainError: the others run something else.
        """
        if self._watch is not None:
            return self._imitate(operation)
        self._kind = operation.kind
        self._in_hand = operation
        plan = self._news.members.get(self.plan, ())
        left: Left | None = None
        while left is None:
            try:
                self._catch_up()
                left = self._attempt(operation)
            except _Superseded:
                continue
        if self._passed is not None:  # the peer who passed it on may know of a newer plan
            self.plan = max(self.plan, left.generation)
        else:
            self._begun = False
        self._kind = 0
        self._in_hand = None
        self._complete = 0
        self._passed = None
        self._result = left.result
        operation.accept(left)
        self.void, self._next_void = self._next_void, False
        if self._feed is not None and self._feed.watched:
            self._feed.tell(
                Watched(
                    operation=self.operation,
                    kind=operation.kind,
                    plan=plan,
                    contributors=left.contributors,
                    complete=left.complete,
                    generation=left.generation,
                    result=left.result,
                    parts=tuple(operation.parts()),
                )
            )
        self.operation += 1
        if self._recovering_since:
            self._tell_recovered(operation.kind)
        return left

    def step_left(self, left: Left, proposal: int) -> None:
        """A step was left: its successor is split over the members of the newest generation.

        Args:
            left: how it was left.
            proposal: generation of the proposal that all members know; 0 for none. It is entered
                at the next boundary.
        """
        if self._watch is not None:
            return  # its donor says where the group enters
        self._agreed = max(self._agreed, proposal)
        self.plan = max(self.plan, left.generation, proposal)

    def boundary(self) -> None:
        """Between two steps: let agreed joiners in; wait while fewer than the minimum are left.

        Raises:
            Released: this worker was to leave, and the others know that it does so here.
        """
        while True:
            try:
                if self._watch is not None:
                    self._follow(self._watch)
                    if self._watch is not None:
                        return
                elif self._news.urgent.generation > self.generation:
                    self._catch_up()
                    self._outcome = "between steps"
                    self._tell_recovered(0)
                elif self._agreed > self.generation:
                    self._enter_agreed()
                elif self._too_few():
                    self._pause()
                else:
                    return
            except _Superseded:
                continue

    def _enter_agreed(self) -> None:
        members = self._news.members[self._agreed]
        if self._wiring.me not in members:
            # The group stays up: others may still wait for what this worker has sent there.
            self._participant.phase("released", self._agreed)
            raise Released(self._agreed)
        if self._feed is not None:
            self._feed.entering(self._agreed, members)
        self._enter(Membership(self._agreed, members, urgent=False))

    def _too_few(self) -> bool:
        """Whether to wait here; not if others are in the next operation and wait for us."""
        return self.group is not None and self.group.size < self._min_workers and not self._begun

    def _pause(self) -> None:
        """Too few to go on: all come to this boundary, so a proposal needs no agreement."""
        now = self.generation
        news = self._news
        self._participant.phase("pause", now)
        self._pass_time(
            lambda: news.dismissed is not None or any(m.generation > now for m in self._heard())
        )
        if news.dismissed is not None:
            raise news.dismissed
        if news.urgent.generation <= now:
            self._agreed = news.proposed.generation

    def phase(self, name: str, detail: int) -> None:
        """Pass on where this worker is."""
        self._participant.phase(name, detail)

    def proposal(self) -> int:
        """Generation of the proposal that this worker could enter, 0 for none.

        Goes into the round: only what all could enter is agreed on, so that nobody waits for
        connections at the boundary.
        """
        proposed = self._news.proposed
        if proposed.generation <= max(self.generation, self._news.urgent.generation):
            return 0
        with self._ahead_lock:
            builder = self._ahead
        alone = self._wiring.me not in proposed.members or proposed.size == 1
        if alone or builder is None or builder.generation != proposed.generation:
            return proposed.generation if alone else 0
        if builder.failed is not None:
            self._participant.doubt(proposed.generation, builder.failed)
        return proposed.generation if builder.ready else 0

    # ------------------------------------------------------------------ a joiner outside the group

    def _called(self, proposed: Membership) -> bool:
        """Whether a proposal that still stands has this worker in it."""
        newest = max(self.generation, self._news.urgent.generation)
        return proposed.generation > newest and self._wiring.me in proposed.members

    def _addressed(self) -> bool:
        """Whether there is news for a worker without the State."""
        if self._news.invitation:
            return True
        return any(m.generation > self.generation for m in self._heard())

    def _catch_up_outside(self) -> None:
        """Be given the State by a peer, and watch the group from then on."""
        donors = self._news.invitation
        self._news.invite(())
        for donor in donors:
            started = time.monotonic()
            watch = Watch(donor, self._wiring.me, self._news.notify)
            self._participant.phase("take", 0)
            self._pass_time(
                lambda watch=watch: watch.given or watch.failed or self._called(self._news.proposed)  # type: ignore[misc]
            )
            given = watch.given
            if given is None:
                watch.close()
                if self._called(self._news.proposed):
                    return  # the group stands still until it has more members
                continue
            if given.layout != self.layout:
                raise ConfigError(_first_difference([given.layout, self.layout]))
            watch.ask_digest()
            self._participant.adopt_state(given.state)
            self.operation = given.operation
            self._watch = Catchup(watch, given.state.nbytes, time.monotonic() - started)
            watch.given = None
            return
        self._ask_again()

    def _ask_again(self) -> None:
        """All donors are lost, or have dropped this joiner: others, or the State in the group."""
        self._failures += 1
        if self._failures < _FAILURES:
            self._participant.lonely()
        else:
            self._participant.level()

    def _follow(self, catchup: Catchup) -> None:
        """At a boundary: until the next operation's end was told, or the group is entered."""
        while True:
            head = catchup.watch.head
            if isinstance(head, Watched):
                catchup.plan = head.plan or catchup.plan
                self._tell_level(catchup)
                return
            if isinstance(head, Entering):
                self._enter_from_outside(catchup, head.generation)
                return
            if isinstance(head, Mark):
                catchup.mine = self._participant.digest()
            elif isinstance(head, Digest):
                if head.digest != catchup.mine:
                    self._give_up(catchup, "unequal")
                    return
                catchup.equal = True
            if head is not None:
                catchup.watch.pop()
                continue
            self._wait_for_more(catchup)
            if self._watch is None:
                return

    def _wait_for_more(self, catchup: Catchup) -> None:
        """Nothing that was told is left to be done."""
        news, watch = self._news, catchup.watch
        self._tell_level(catchup)
        cold = self._called(news.proposed) and not catchup.told
        if watch.failed or cold:
            watch.close()
            self._watch = None
            self.operation = -1
            if not cold:
                self._ask_again()
            self._come_in()
            return
        self._pass_time(
            lambda: (
                watch.head is not None
                or watch.failed
                or (self._called(news.proposed) and not catchup.told)
            )
        )

    def _tell_level(self, catchup: Catchup) -> None:
        """Ask to be let in, if the State is as it should be and there is little left to do."""
        near = catchup.watch.backlog <= _NEAR or catchup.followed >= _PATIENCE
        if catchup.equal and near and not catchup.told:
            catchup.told = True
            self._participant.level()

    def _give_up(self, catchup: Catchup, why: str) -> None:
        """Be given the State in the group, where everybody waits for it."""
        self._participant.phase(why, self.operation)
        catchup.watch.close()
        self._watch = None
        self.operation = -1
        self._participant.level()
        self._come_in()

    def _enter_from_outside(self, catchup: Catchup, generation: int) -> None:
        catchup.watch.close()
        self._watch = None
        self._pass_time(lambda: generation in self._news.members)
        if catchup.equal:
            self._joined = Joined(catchup.copy_s, catchup.nbytes, catchup.followed)
        else:
            self.operation = -1  # it goes without saying only if it was compared
        try:
            self._enter(Membership(generation, self.members(generation), urgent=False))
        except _Superseded:
            self.operation = -1  # whoever has not confirmed is not in what came after
            self._come_in()

    def _imitate(self, operation: Operation) -> Left:
        """What `run` is for a joiner outside the group."""
        catchup = self._watch
        if catchup is None:
            raise TrainError("this worker watches nobody; this is a bug in elastix.")
        watch = catchup.watch
        self._pass_time(lambda: watch.head is not None or watch.failed)
        head = watch.head
        if not isinstance(head, Watched):
            raise Fenced(
                f"worker {self._wiring.me} lost its donor in the middle of operation "
                f"{self.operation} and cannot go on from there"
            )
        if (head.kind, head.operation) != (operation.kind, self.operation):
            raise TrainError(
                f"joiner {self._wiring.me} is in a call of kind {operation.kind} (operation "
                f"{self.operation}), the group was in one of kind {head.kind} (operation "
                f"{head.operation}). All workers must make the same calls on ctx in the same order."
            )
        watch.pop()
        operation.imitate(head)
        catchup.followed += 1
        self.operation += 1
        return Left(head.result, head.complete, head.generation, head.contributors)

    # ------------------------------------------------------------------ one operation

    def _attempt(self, operation: Operation) -> Left:
        if self._passed is not None:
            return self._passed
        group = self._present_group()
        if not self._complete:
            for pending in () if self.void else operation.launch(group):
                self._finish(pending)
            self._complete = self.generation
        self._sent = operation.payload(group)
        result = self._sent.to(self._device, copy=True)
        self._participant.phase("round", operation.kind)
        self._finish(group.all_reduce(result, operation.reduce))
        self._participant.phase("left", operation.kind)
        return Left(
            result.to(self._sent.device),
            self._complete,
            self.generation,
            self.members(self._complete),
        )

    def _finish(self, pending: Pending) -> None:
        if not pending.finished():
            pending.on_finish(self._news.notify)
            self._wait(pending.finished)
        error = pending.settle()
        if error is not None:
            # Only a hint: the controller knows who is dead, or starts a new generation.
            self._participant.doubt(self.generation, error)
            self._wait(lambda: False)

    def _wait(self, over: Callable[[], bool]) -> None:
        """Until `over()`; what is over counts, even if there is news as well."""
        self._pass_time(lambda: over() or self._news.urgent.generation > self.generation)
        if not over():
            raise _Superseded

    def _pass_time(self, until: Callable[[], bool]) -> None:
        started = time.monotonic()
        self.waiting = True
        try:
            self._news.wait(until)
        finally:
            self.waiting = False
            self.waited_s += time.monotonic() - started

    # ------------------------------------------------------------------ a change of the group

    def _heard(self) -> tuple[Membership, Membership]:
        return self._news.urgent, self._news.proposed

    def _catch_up(self) -> None:
        while self._news.urgent.generation > self.generation:
            urgent = self._news.urgent
            if not self._recovering_since:
                self._recovering_since = self._news.heard_at[urgent.generation]
            self._enter(urgent)

    def _present_group(self) -> Group:
        if self.group is None:
            raise _Superseded
        return self.group

    def _leave_group(self) -> None:
        if self.group is not None:
            self.group.abandon()
            self.group = None

    def _enter(self, membership: Membership) -> None:
        """Meet the members of a generation and agree on how to go on. May raise _Superseded."""
        me = self._wiring.me
        if me not in membership.members:
            raise Fenced(f"worker {me} is not in generation {membership.generation}")
        self._leave_group()
        self._passed = None
        self.generation = membership.generation
        if not membership.urgent:
            self.plan = membership.generation
            self._given = 0  # others have gone on since; the State of the founding is stale
        started = time.monotonic()
        self._participant.phase("enter", membership.generation)
        self.group = group = self._build(
            membership.generation, membership.members, meanwhile=self._prepare
        )
        self._rebuild_s = time.monotonic() - started
        self._participant.phase("meet", membership.generation)
        decision = decide(self._gather_positions(group))
        joined, self._joined = self._joined, None
        if decision.donor is not None:
            self._check_layout(group)
            joined = self._transfer(group, decision.donor, decision.newcomers)
        if self.operation < 0 and decision.founding:
            # Like a commit round: whoever leaves it knows that all founders have the State.
            self._given = membership.generation
            self._finish(group.all_reduce(torch.zeros(1, device=self._device)))
        self._go_on(group, decision)
        self._participant.entered(membership.generation, joined)

    def _prepare(self) -> None:
        """Others may be busy for as long as this takes; if the step stands, it was for nothing."""
        if self._in_hand is not None and not self._complete and self._kind != self._redo:
            self._in_hand.prepare(self.generation)

    def _build(
        self,
        generation: int,
        members: tuple[int, ...],
        scope: str = "all",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Group:
        wiring = replace(self._wiring, generation=generation, members=members, scope=scope)
        builder = self._take_ahead(generation) if scope == "all" else None
        if len(members) == 1:
            return Alone(wiring)
        if builder is None:
            builder = Builder(wiring, self._news.notify)
        try:
            meanwhile()
            self._wait(lambda: builder.result is not None)
        except BaseException:
            builder.abandon()
            raise
        if isinstance(builder.result, Group):
            return builder.result
        self._participant.doubt(generation, builder.result or RuntimeError("no group"))
        self._wait(lambda: False)
        raise _Superseded

    def _build_ahead(self, proposed: Membership) -> None:
        """Connect to the members of a proposal while training goes on in the present group.

        Called by the thread that brings the news.
        """
        wiring = replace(self._wiring, generation=proposed.generation, members=proposed.members)
        with self._ahead_lock:
            outdated = self._ahead
            if outdated is not None and outdated.generation >= proposed.generation:
                return
            mine = self._wiring.me in proposed.members and proposed.size > 1
            self._ahead = Builder(wiring, self._news.notify) if mine else None
        if outdated is not None:
            outdated.abandon()

    def _take_ahead(self, generation: int) -> Builder | None:
        """The builder of that generation, if it was begun; one of an older generation is ended."""
        with self._ahead_lock:
            builder = self._ahead
            if builder is None or builder.generation > generation:
                return None
            self._ahead = None
        if builder.generation == generation:
            return builder
        builder.abandon()
        return None

    def _gather_positions(self, group: Group) -> list[Position]:
        mine = torch.tensor(
            [
                self.operation,
                self._complete if self.operation >= 0 else self._given,
                self.plan,
                self._kind,
            ],
            dtype=torch.int64,
            device=self._device,
        )
        everybody = [torch.empty_like(mine) for _ in range(group.size)]
        self._finish(group.all_gather(mine, everybody))
        return [Position(*map(int, values.tolist())) for values in everybody]

    def _go_on(self, group: Group, decision: Decision) -> None:
        if self.operation < 0:
            self.operation = decision.operation
        behind = self.operation < decision.operation
        if decision.source is not None:
            # Whoever is ahead has the result of the operation before; the others need it.
            held = self._sent if behind else self._result
            if held is None:
                raise TrainError(
                    f"worker {self._wiring.me} has no result of operation {decision.operation - 1} "
                    "to pass on or to receive. Nothing can be recovered; this is a bug in elastix."
                )
            buffer = held.to(self._device, copy=True)
            self._finish(group.broadcast(buffer, decision.source))
            if behind:
                self._passed = Left(
                    buffer.to(held.device),
                    self._complete,
                    decision.plan,
                    self.members(self._complete) if self._complete else (),
                )
        self._begun = decision.begun
        void = decision.begun and decision.kind == self._redo and not decision.complete
        self._next_void = behind and void
        if behind:
            self._outcome = "passed on"
        else:
            if not decision.complete:  # else it is as void as it was, on all of them
                self.void = void
            kept = "accepted" if decision.complete else "reduced again"
            self._outcome = "done again" if self.void else kept
            self._complete = decision.complete
            self.plan = max(self.plan, decision.plan) or self.generation

    def _transfer(self, group: Group, donor: int, newcomers: tuple[int, ...]) -> Joined | None:
        """Give or take the State if that is on this rank; what it cost if it was taken."""
        ranks = (donor, *newcomers)
        if group.rank not in ranks:
            return None
        started = time.monotonic()
        circle = group
        if len(ranks) < group.size:  # nobody else need take part
            members = tuple(group.members[rank] for rank in ranks)
            circle = self._build(group.generation, members, scope="transfer")
        try:
            if group.rank == donor:
                self._participant.phase("give", group.generation)
                state = self._participant.give_state(founding=self.operation < 0)
                transfer.give(circle, state, self._device, self._finish)
                return None
            self._participant.phase("take", group.generation)
            state = transfer.take(
                circle, 0 if circle is not group else donor, self._device, self._finish
            )
            self._participant.adopt_state(state)
            return Joined(time.monotonic() - started, state.nbytes)
        finally:
            if circle is not group:
                circle.abandon()

    def _check_layout(self, group: Group) -> None:
        """Refuse workers whose parameters differ. Collective over the group."""
        text = json.dumps(self.layout).encode()
        digest = torch.frombuffer(bytearray(blake3(text).digest()), dtype=torch.int64)
        mine = torch.cat([digest, torch.tensor([len(text)])]).to(self._device)
        everybody = [torch.empty_like(mine) for _ in range(group.size)]
        self._finish(group.all_gather(mine, everybody))
        if all(torch.equal(other, everybody[0]) for other in everybody):
            return
        longest = max(int(other[-1].item()) for other in everybody)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = [torch.empty_like(padded, device=self._device) for _ in range(group.size)]
        self._finish(group.all_gather(padded.to(self._device), texts))
        layouts = [json.loads(bytes(t.cpu().tolist()).rstrip(b"\0")) for t in texts]
        raise ConfigError(_first_difference(layouts))

    def _tell_recovered(self, kind: int) -> None:
        stall_s = time.monotonic() - self._recovering_since
        self._recovering_since = 0.0
        self._participant.recovered(
            Recovery(self.generation, kind, self._outcome, self._rebuild_s, stall_s)
        )


def _first_difference(layouts: list[list[str]]) -> str:
    reference = layouts[0]
    for rank, layout in enumerate(layouts[1:], start=1):
        for place in range(max(len(reference), len(layout))):
            here = reference[place] if place < len(reference) else "nothing"
            there = layout[place] if place < len(layout) else "nothing"
            if here != there:
                return (
                    f"the workers did not prepare the same model: entry {place} is {here} on rank "
                    f"0 and {there} on rank {rank}. No step was taken. Build the model from "
                    "ctx.config alone, not from the rank or from unseeded random choices."
                )
    return "the workers did not prepare the same model."
