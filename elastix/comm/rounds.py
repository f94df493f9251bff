"""Operations that a group does together, and that survive a change of the group.

A worker runs numbered operations (see recovery). While it waits for peers it also listens to the
news; when a new generation is announced it drops the operation, meets the others there, learns
where everybody is, and goes on with the same operation in the new group. Nothing that is shared
changes before an operation is left, so this may happen any number of times.

Not here: what an operation computes (reducer, train.context), and who decides on generations.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from elastix.comm import calls, transfer
from elastix.comm import layout as layouts
from elastix.comm.ahead import Ahead
from elastix.comm.feed import Entering, Feed, Watched
from elastix.comm.group import Alone, Builder, Group, Pending, Wiring
from elastix.comm.joiner import Joiner
from elastix.comm.membership import Membership
from elastix.comm.news import News
from elastix.comm.operation import Left, Operation
from elastix.comm.participant import Fenced, Joined, Participant, Recovery, Released
from elastix.comm.recovery import Decision, Position, decide
from elastix.errors import TrainError


class _Superseded(Exception):
    """Internal: a newer generation was announced while waiting."""


class Rounds:
    """One worker's side of all operations. Used by one thread at a time.

    Attributes:
        group: the process group in use; None before the first.
        generation: the newest generation that this worker entered or tries to enter.
        operation: number of the operation in hand, or the next; -1 without the State.
        plan: the generation over whose members the next batch is split.
        call: number and kind of the operation in hand; of kind 0 between operations.
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
        self.call = (-1, 0)
        self._in_hand: Operation | None = None
        self._agreed = 0
        self._begun = False
        self._given = 0
        self._result: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        self._passed: Left | None = None
        self._recovering_since = 0.0
        self._rebuild_s = 0.0
        self._doubted = 0
        self._outcome = ""
        self.void = False
        self._next_void = False  # those ahead have found the operation after this one void
        self._redo = redo  # kind of operation that is not finished by survivors but done again
        self.waiting = False
        self.waited_s = 0.0
        self._joiner = Joiner(
            wiring.me, wiring.secret, participant, news, self._called, self._pass_time
        )
        self._joined: Joined | None = None
        self._feed: Feed | None = None
        self._ahead = Ahead(lambda: self._wiring, news.notify)
        news.on_proposal(self._ahead.begin)

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
        return self._joiner.following

    @property
    def planned(self) -> tuple[int, ...]:
        """The workers over which the next batch is split."""
        return self._joiner.plan if self.watching else self.members(self.plan)

    def feed_joiners(self, feed: Feed) -> None:
        """Tell joiners how operations end, from now on."""
        self._feed = feed
        self._wiring = replace(self._wiring, feed=feed.address)

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
            if self._news.invitation and not self._called():
                given = self._joiner.begin(self.layout)
                self.operation = self.operation if given is None else given
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
        if self.watching:
            imitated = self._joiner.imitate(operation, self.operation)
            self.operation += 1
            return imitated
        self._kind = operation.kind
        self.call = (self.operation, operation.kind)
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
        self.call = (self.operation + 1, 0)
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
        if self.watching:
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
                if self.watching:
                    if self._follow():
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
        if self._wiring.me not in proposed.members or proposed.size == 1:
            return proposed.generation
        builder = self._ahead.look(proposed.generation)
        if builder is None:
            return 0
        if builder.failed is not None:
            self._doubt(proposed.generation, builder.failed, builder.unreachable)
        return proposed.generation if builder.ready else 0

    # ------------------------------------------------------------------ a joiner outside the group

    def _called(self) -> bool:
        """Whether a proposal that still stands has this worker in it."""
        newest = max(self.generation, self._news.urgent.generation)
        proposed = self._news.proposed
        return proposed.generation > newest and self._wiring.me in proposed.members

    def _addressed(self) -> bool:
        """Whether there is news for a worker without the State."""
        if self._news.invitation:
            return True
        return any(m.generation > self.generation for m in self._heard())

    def _follow(self) -> bool:
        """At a boundary: whether there is an operation to imitate. If not, this joiner is in."""
        turn = self._joiner.follow(self.operation)
        if isinstance(turn, Entering):
            self._enter_from_outside(turn.generation)
        elif turn is None:
            self.operation = -1
            self._come_in()
        return isinstance(turn, Watched)

    def _enter_from_outside(self, generation: int) -> None:
        self._joined = self._joiner.come_in()
        self._pass_time(lambda: generation in self._news.members)
        if self._joined is None:
            self.operation = -1  # it goes without saying only if it was compared
        try:
            self._enter(Membership(generation, self.members(generation), urgent=False))
        except _Superseded:
            self.operation = -1  # whoever has not confirmed is not in what came after
            self._come_in()

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
        self._compare_calls(group, operation)
        self._finish(group.all_reduce(result, operation.reduce))
        self._participant.phase("left", operation.kind)
        return Left(
            result.to(self._sent.device),
            self._complete,
            self.generation,
            self.members(self._complete),
        )

    def _compare_calls(self, group: Group, operation: Operation) -> None:
        """Before a round alone: that all are in the same call, since payloads have other sizes.

        A gather, where steps begin with a reduction: of two that do not belong together neither
        takes the bytes of the other (gloo ends the process if there are too many), and both wait
        until the controller sees from their signs of life what they are in.
        """
        detail = operation.detail()
        if detail is None:
            return
        mine = torch.tensor([operation.kind, detail], dtype=torch.int64, device=self._device)
        everybody = [torch.empty_like(mine) for _ in range(group.size)]
        self._finish(group.all_gather(mine, everybody))
        said = dict(zip(group.members, (row.tolist() for row in everybody), strict=True))
        fault = calls.apart(self.operation, {worker: kind for worker, (kind, _) in said.items()})
        fault = fault or calls.unlike({w: about for w, (_, about) in said.items()})
        if fault is not None:
            raise fault

    def _finish(self, pending: Pending) -> None:
        if not pending.finished():
            pending.on_finish(self._news.notify)
            self._wait(pending.finished)
        error = pending.settle()
        if error is not None:
            # Only a hint: the controller knows who is dead, or starts a new generation.
            self._doubt(self.generation, error)
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

    def _doubt(
        self, generation: int, error: BaseException, unreachable: frozenset[int] = frozenset()
    ) -> None:
        """Once for each generation, however often a proposal is looked at that cannot be had."""
        if generation > self._doubted:
            self._doubted = generation
            self._participant.doubt(generation, error, unreachable)

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
        decision = decide(self._gather_positions(group), membership.members)
        joined, self._joined = self._joined, None
        if decision.donor is not None:
            layouts.check(group, self.layout, self._device, self._finish)
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
        builder = self._ahead.take(generation) if scope == "all" else None
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
        error = builder.failed or RuntimeError("no group")
        self._doubt(generation, error, builder.unreachable)
        self._wait(lambda: False)
        raise _Superseded

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

    def _tell_recovered(self, kind: int) -> None:
        stall_s = time.monotonic() - self._recovering_since
        self._recovering_since = 0.0
        self._participant.recovered(
            Recovery(self.generation, kind, self._outcome, self._rebuild_s, stall_s)
        )
