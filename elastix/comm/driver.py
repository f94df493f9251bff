"""The group protocol in a worker's training thread, over torch.distributed.

The shell around protocol.GroupProtocol: it carries out what that wants, and blocks where that waits
for peers or news. The hooks of a backward pass launch their buckets beside it, since between two
operations only this thread is at work.

Not here: a decision on what to do next (protocol), what an operation computes (reducer,
train.replica.evaluation), and who decides on generations (membership).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, TypeVar

import torch

from elastix.comm.network import model_layout as layouts
from elastix.comm.network import transfer
from elastix.comm.network.catch_up_stream import CatchUpReceiver, CatchUpSender
from elastix.comm.network.next_group import NextGroup
from elastix.comm.network.pending import Pending
from elastix.comm.network.place_watch import PlaceWatch
from elastix.comm.network.process_group import Alone, Builder, Group, Wiring
from elastix.comm.protocol import wants as want
from elastix.comm.protocol.catch_up_messages import CatchUpStream, Watched
from elastix.comm.protocol.crew import Crew, Word
from elastix.comm.protocol.follower import Follower
from elastix.comm.protocol.group_protocol import GroupProtocol
from elastix.comm.protocol.membership import Membership
from elastix.comm.protocol.operation import Operation, OperationOutcome
from elastix.comm.protocol.participant import (
    GroupListener,
    Joined,
    Participant,
    Recovery,
    Released,
)
from elastix.comm.protocol.recovery import Position
from elastix.comm.thread_safe_inbox import ThreadSafeInbox
from elastix.errors import TrainError

_T = TypeVar("_T")
_PREPARED, _FIRST = 1, 2
"""Positions of a place: when it has prepared, and before the first operation."""


class GroupDriver:
    """One worker's side of all operations. Used by one thread at a time.

    Attributes:
        waiting: this worker is blocked, and others have to move first.
        waited_s: how long it has been so, altogether.
        on_reduced: called from any thread with the number of a bucket whose reduction has ended.
        crew: what this worker's speaker has heard of its followers.
        watch: where the training thread is, of a process that is one of several.
    """

    def __init__(
        self,
        participant: Participant,
        inbox: ThreadSafeInbox,
        wiring: Wiring,
        min_workers: int = 1,
        redo: int = 0,
        crew: int = 1,
    ) -> None:
        self.on_reduced: Callable[[int], None] | None = None
        self.waiting = False
        self.waited_s = 0.0
        self.crew = Crew(crew)
        self.watch = PlaceWatch()
        self._check_within: Callable[[bool], None] | None = None
        self._protocol: GroupProtocol | Follower = (
            Follower(wiring.me, inbox)
            if wiring.place
            else GroupProtocol(wiring.me, inbox, min_members=min_workers, redo=redo, crew=self.crew)
        )
        self._say_to_crew: Callable[[Word], None] = _nobody_to_tell
        self._joiner = self._protocol.joiner
        self._participant = participant
        self._listener: GroupListener  # see tell
        self._inbox = inbox
        self._wiring = wiring
        self._begun: want.Course[OperationOutcome]  # the operation in hand, when it was suspended
        self._layout: list[str] = []
        self._catch_up: CatchUpSender | None = None
        self._builder: Builder | None = None  # of the group that is being built
        self._rebuilding_since = self._rebuild_s = 0.0
        self._subscribed = 0.0
        self._next_group = NextGroup(lambda: self._wiring, inbox.notify)
        inbox.on_proposal(self._next_group.begin)

    # ------------------------------------------------------------------ what the worker calls

    @property
    def follower(self) -> Follower | None:
        """What hears the speaker, if this process does not speak for its worker."""
        return self._protocol if isinstance(self._protocol, Follower) else None

    @property
    def broken(self) -> bool:
        """Whether a process of this worker is lost. Any thread may ask."""
        return self.crew.broken or (self.follower is not None and self.follower.broken)

    def break_up(self) -> None:
        """A process of this worker is lost: it is in no group any more. Any thread."""
        self.crew.broken = True
        if self.follower is not None:
            self.follower.broken = True
        self._unblock_before(math.inf)

    def doubt_within(self, check: Callable[[bool], None]) -> None:
        """What others of this worker have a part in may be wrong, and nothing says so; see Inside.

        Args:
            check: raises RuntimeError if it may be; waits until all is computed if given True.
        """
        self._check_within = check

    def check_within(self, *, wait: bool) -> None:
        """That what was computed up to here was computed with all processes of this worker.

        Args:
            wait: until it is computed. Else it is about what the CPU has the outcome of.

        Raises:
            RuntimeError: one of them is lost.
        """
        if self._check_within is not None:
            self._check_within(wait)

    def unblock(self) -> None:
        """A newer group is to be entered at once: what runs on GPUs in older ones has failed.

        In any thread. That which trains may wait in CUDA for those operations, and so hear nothing.
        """
        self._unblock_before(self._inbox.urgent.generation)

    def _unblock_before(self, newest: float) -> None:
        for one in (self.group, self._builder):
            if one is not None and one.generation < newest:
                one.unblock()
        self._next_group.unblock(newest)

    def leave(self) -> None:
        """This process is in no group any more."""
        group, self._protocol.group = self._protocol.group, None
        if isinstance(group, Group):
            group.abandon()
        self._next_group.end()

    def say_by(self, say: Callable[[Word], None]) -> None:
        """How words go to the other processes of this worker."""
        self._say_to_crew = say

    def tell(self, listener: GroupListener) -> None:
        """Who is told of this worker's way; to be said before it enters a group."""
        self._listener = listener

    def assemble(self) -> None:
        """Block until all processes of this worker are up to `prepare`."""
        self.watch.come(_PREPARED)
        self._drive(self._protocol.assemble())
        self.watch.go()

    @property
    def group(self) -> Group | None:
        """The process group in use; None before the first."""
        return self._protocol.group  # type: ignore[return-value]  # what _build has answered with

    @property
    def generation(self) -> int:
        """The newest generation that this worker entered or tries to enter."""
        return self._protocol.generation

    @property
    def operation(self) -> int:
        """Number of the operation in hand, or the next. Only with the State."""
        return self._protocol.hand.number

    @property
    def has_state(self) -> bool:
        """Whether this worker has the State. Any thread may ask."""
        return self._protocol.hand.has_state

    @property
    def holder(self) -> bool:
        """Whether it has the State of the group, and is in it. Any thread may ask."""
        return self._protocol.holder

    @property
    def lost_track(self) -> bool:
        """Whether this worker has followed others, and has no State any more."""
        return isinstance(self._protocol, GroupProtocol) and self._protocol.lost_track

    @property
    def call(self) -> tuple[int, int]:
        """Number and kind of the operation in hand; of kind 0 between operations."""
        return self._protocol.call

    @property
    def void(self) -> bool:
        """The operation in hand is done for nothing, since its step will be done again."""
        return self._protocol.hand.void

    @property
    def watching(self) -> bool:
        """Whether this worker is a joiner that follows the group from outside."""
        return self._joiner.following

    @property
    def shadow(self) -> bool:
        """Whether it does so for good, as a shadow."""
        return self.watching and self._joiner.shadow

    @property
    def planned(self) -> tuple[int, ...]:
        """The workers over which the next batch is split."""
        return self._protocol.planned

    @property
    def present(self) -> tuple[int, ...]:
        """Members of the group, or of the one that this joiner follows; empty before the first."""
        if self.watching:
            return self.planned
        return self._inbox.members.get(self.generation, ())

    @property
    def rank(self) -> int:
        """Place in the group; -1 for who is in none."""
        me, present = self._wiring.me, self.present
        return present.index(me) if me in present else -1

    @property
    def usable(self) -> bool:
        """Whether it is worth launching something in the present group.

        Not if that may be wrong yet: others count it, whatever this worker says in the end.
        """
        return self._protocol.usable and self._check_within is None

    def members(self, generation: int) -> tuple[int, ...]:
        """Members of a generation that was announced to this worker."""
        return self._inbox.members[generation]

    def meet_at(self, address: tuple[str, int]) -> None:
        """From now on groups meet at another Rendezvous. Any thread may say so."""
        self._wiring = replace(self._wiring, address=address)

    @property
    def shadowed(self) -> bool:
        """Whether this worker is followed by a shadow that can store States."""
        return self._catch_up is not None and self._catch_up.shadowed

    @property
    def has_shadow(self) -> bool:
        """Whether this worker is followed by a shadow that has a State."""
        return self._catch_up is not None and self._catch_up.has_shadow

    def catch_joiners_up(self, catch_up: CatchUpSender) -> None:
        """Tell joiners how operations end, from now on."""
        self._catch_up = catch_up
        self._wiring = replace(self._wiring, catch_up=catch_up.address)

    @property
    def device(self) -> torch.device:
        """Where large tensors lie when they go to other members."""
        return self._wiring.bulk

    @property
    def processors(self) -> tuple[int, ...]:
        """The kinds of processors in the group, each once."""
        protocol = self._protocol
        kinds = protocol.kinds if isinstance(protocol, GroupProtocol) else ()
        return tuple(sorted(set(kinds))) or (0,)

    def processors_of(self) -> Mapping[int, int]:
        """By member of the group in use, the kind of its processor."""
        protocol, group = self._protocol, self.group
        kinds = protocol.kinds if isinstance(protocol, GroupProtocol) else ()
        return dict(zip(group.members if group is not None else (), kinds, strict=True))

    @property
    def unlevel(self) -> bool:
        """Whether workers with processors of one kind may hold different things."""
        protocol = self._protocol
        return isinstance(protocol, GroupProtocol) and protocol.unlevel and len(self.processors) > 1

    def levelled(self) -> None:
        """All workers have gone on from one State."""
        if isinstance(self._protocol, GroupProtocol):
            self._protocol.unlevel = False

    def first_entry(self, layout: list[str], processor: int = 0) -> None:
        """Enter the group as a founder or a joiner; blocks until let in and given the State.

        Args:
            layout: one line per parameter and buffer; must be equal on all workers.
            processor: a number for what this one computes with.

        Raises:
            ConfigError: the layouts differ; names the first line that does.
        """
        self._layout = layout
        if isinstance(self._protocol, GroupProtocol):
            self._protocol.processor = processor
        self._participant.phase("wait", 0)
        self._drive(self._protocol.come_in())

    def run(self, operation: Operation) -> OperationOutcome:
        """Carry one operation through, whatever happens to the group. Collective.

        Blocks until all members of the group take part; has no timeout of its own.

        Raises:
            Fenced: this worker was taken out.
            TrainError: the others run something else.
        """
        self.watch.come(_FIRST + 2 * self.operation + 1)
        outcome = self._drive(self._protocol.run(operation))
        self.watch.go()
        return outcome

    def begin(self, operation: Operation) -> OperationOutcome | None:
        """The same for an operation that may lack something in a smaller group; see its `lacks`.

        Returns:
            None if that is to be computed first, before `resume`.
        """
        self.watch.come(_FIRST + 2 * self.operation + 1)
        self._begun = self._protocol.run(operation)
        return self.resume()

    def resume(self) -> OperationOutcome | None:
        """Go on with the operation that was begun; see `begin`."""
        self.watch.stay()
        outcome = self._advance(self._begun)
        self.watch.go()
        return outcome

    def step_left(self, outcome: OperationOutcome, proposal: int) -> None:
        """A step was left; see GroupProtocol.step_left."""
        self._protocol.step_left(outcome, proposal)

    def stand_by(self, without: Sequence[int]) -> None:
        """Block until there is a group without these workers; see GroupProtocol.stand_by."""
        self._drive(self._protocol.stand_by(without))

    def ask_digest(self) -> None:
        """Have the State of this shadow compared with that of the worker that it follows."""
        self._joiner.ask_digest()

    def say_able(self, able: bool) -> None:
        """Tell the worker that this shadow follows whether it can store States."""
        self._joiner.say_able(able)

    def differs(self) -> None:
        """What this shadow holds may be wrong, by what it was seen to hold, or the group."""
        self._joiner.differs()

    @property
    def equal(self) -> bool:
        """Whether this shadow, as far as it was compared last, holds what the group does."""
        return self._joiner.equal

    def await_succession(self) -> None:
        """Block until all members are lost and this shadow goes on in their place."""
        self._drive(self._protocol.succeed())

    def boundary(self) -> None:
        """Between two steps: let agreed joiners in; wait while fewer than the minimum are left.

        Raises:
            Released: this worker was to leave, and the others know that it does so here.
        """
        self.watch.come(_FIRST + 2 * self.operation, batch=True)
        self.check_within(wait=True)
        try:
            self._drive(self._protocol.boundary())
            self.watch.go()
        except Released as released:
            self._participant.phase("released", released.generation)
            raise

    def phase(self, name: str, detail: int) -> None:
        """Pass on where this worker is."""
        self._participant.phase(name, detail)

    def proposal(self) -> int:
        """Generation of the proposal that this worker could enter, 0 for none."""
        return self._protocol.vote(self._connected)

    def _connected(self, proposed: Membership) -> bool:
        builder = self._next_group.look(proposed.generation)
        if builder is None:
            return False
        if builder.failed is not None and self._protocol.doubts(proposed.generation):
            self._listener.doubt(proposed.generation, builder.failed, builder.unreachable)
        return builder.ready

    # ------------------------------------------------------------------ driving

    def _drive(self, course: want.Course[_T]) -> _T:
        """Carry out what a course wants until it is over."""
        return self._advance(course)  # type: ignore[return-value]  # what was begun lacks nothing

    def _advance(self, course: want.Course[_T]) -> _T | None:
        """Carry out what a course wants; whatever is raised is thrown into it.

        Returns:
            What it came to; None if it wants the train function to compute something.
        """
        self.check_within(wait=False)
        try:
            wanted = next(course)
            while not isinstance(wanted, want.Compute):
                try:
                    answer = _ANSWERS[type(wanted)](self, wanted)
                except BaseException as error:  # noqa: BLE001 - the course lets through what it does not know
                    wanted = course.throw(error)
                else:
                    wanted = course.send(answer)
        except StopIteration as over:
            result: _T = over.value
            return result
        return None

    def _await(self, wanted: want.Await) -> None:
        if wanted.phase:
            self._participant.phase(wanted.phase, wanted.detail)
        self._pass_time(wanted.until)

    def _pass_time(self, until: Callable[[], bool]) -> None:
        started = time.monotonic()
        self.waiting = True
        try:
            self._inbox.wait(until)
        finally:
            self.waiting = False
            self.waited_s += time.monotonic() - started

    def _wait(self, over: Callable[[], bool]) -> None:
        """Until `over()`; what is over counts, even if there is news as well."""
        self._pass_time(lambda: over() or self._protocol.superseded)
        if not over():
            raise want.Superseded

    def _finish(self, pending: Pending) -> None:
        if not pending.finished():
            pending.on_finish(self._inbox.notify)
            self._wait(pending.finished)
        error = pending.settle()
        if error is not None:
            raise want.Failed(error)

    def _gather(self, group: Group, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Everybody's numbers by rank; as many from each."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        everybody = [torch.empty_like(mine) for _ in range(group.size)]
        self._finish(group.all_gather(mine, everybody))
        return [tuple(row.tolist()) for row in everybody]

    # ------------------------------------------------------------------ a change of the group

    def _abandon(self, wanted: want.Abandon) -> None:
        wanted.group.abandon()  # type: ignore[attr-defined]  # what _build has answered with

    def _build(self, wanted: want.Build) -> Group:
        """Connected already if it was a proposal."""
        generation, members, scope, prepare = wanted
        wiring = replace(self._wiring, generation=generation, members=members, scope=scope)
        builder = None
        if scope == "all":
            self._rebuilding_since = time.monotonic()
            self._participant.phase("enter", generation)
            builder = self._next_group.take(generation)
        if len(members) == 1:
            return Alone(wiring)
        self._builder = builder = builder or Builder(wiring, self._inbox.notify)
        self.unblock()  # if there was news meanwhile
        try:
            if prepare is not None:
                prepare.prepare(generation)
            self._wait(lambda: builder.result is not None)
        except BaseException:
            builder.abandon()
            raise
        finally:
            self._builder = None
        return _built(builder)

    def _connect(self, wanted: want.Connect) -> None:
        """A rail: begun at once, since its members come to it one by one."""
        self._rebuilding_since = time.monotonic()
        self._participant.phase("enter", wanted.generation)
        self._next_group.connect(Membership(wanted.generation, wanted.members))

    def _await_connected(self, wanted: want.Connected) -> Group:
        generation, members = wanted.generation, self.members(wanted.generation)
        if len(members) == 1:
            return Alone(replace(self._wiring, generation=generation, members=members))
        builder = self._next_group.look(generation)
        if builder is None:
            raise want.Failed(RuntimeError(f"the rail of generation {generation} was left"))
        self._wait(lambda: builder.result is not None)
        self._next_group.take(generation)
        return _built(builder)

    def _meet(self, wanted: want.Meet) -> list[Position]:
        group: Any = wanted.group
        self._rebuild_s = time.monotonic() - self._rebuilding_since
        self._participant.phase("meet", group.generation)
        return [Position(*row) for row in self._gather(group, astuple(wanted.position))]

    def _compare_layouts(self, wanted: want.CompareLayouts) -> None:
        group: Any = wanted.group
        layouts.check(group, self._layout, self._finish)

    def _give_state(self, wanted: want.GiveState) -> None:
        group: Any = wanted.group
        self._participant.phase("give", group.generation)
        state = self._participant.give_state(founding=wanted.founding)
        transfer.give(group, state, self.device, self._finish)

    def _take_state(self, wanted: want.TakeState) -> Joined:
        group: Any = wanted.group
        started = time.monotonic()
        self._participant.phase("take", group.generation)
        with transfer.taking():
            state = transfer.take(group, wanted.root, self.device, self._finish)
            self._participant.adopt_state(state)
        return Joined(time.monotonic() - started, state.nbytes)

    def _all_have_state(self, wanted: want.AllHaveState) -> None:
        group: Any = wanted.group
        self._finish(group.all_reduce(torch.zeros(1, device="cpu")))

    def _pass_on(self, wanted: want.PassOn) -> torch.Tensor:
        group: Any = wanted.group
        buffer = wanted.held.to("cpu", copy=True)
        self._finish(group.broadcast(buffer, wanted.source))
        return buffer.to(wanted.held.device)

    # ------------------------------------------------------------------ one operation

    def _reduce_buckets(self, wanted: want.ReduceBuckets) -> None:
        group: Any = wanted.group
        self.unblock()  # if there was news while it was built
        self.check_within(wait=True)
        for pending in wanted.operation.launch(group):
            self._finish(pending)

    def _payload(self, wanted: want.Payload) -> tuple[torch.Tensor, int | None]:
        group: Any = wanted.group
        payload = wanted.operation.payload(group)
        self.check_within(wait=True)
        self._participant.phase("round", wanted.operation.kind)
        return payload, wanted.operation.detail()

    def _compare_calls(self, wanted: want.CompareCalls) -> list[tuple[int, ...]]:
        group: Any = wanted.group
        return self._gather(group, (wanted.kind, wanted.detail))

    def _reduce_payload(self, wanted: want.ReducePayload) -> torch.Tensor:
        group: Any = wanted.group
        result = wanted.payload.to("cpu", copy=True)  # so that no vote waits for kernels of a GPU
        self._finish(group.all_reduce(result, wanted.operation.reduce))
        self._participant.phase("left", wanted.operation.kind)
        return result.to(wanted.payload.device)

    def _conclude(self, wanted: want.Conclude) -> None:
        operation, outcome, number, plan = wanted
        operation.accept(outcome)
        if self._catch_up is not None and self._catch_up.watched:
            self._catch_up.tell(
                Watched(
                    operation=number,
                    kind=operation.kind,
                    plan=plan,
                    contributors=outcome.contributors,
                    complete=outcome.complete,
                    generation=outcome.generation,
                    result=outcome.result,
                    parts=tuple(operation.parts()),
                )
            )

    # ------------------------------------------------------------------ reports

    def _entered(self, wanted: want.TellEntered) -> None:
        self._listener.entered(wanted.generation, wanted.joined)

    def _recovered(self, wanted: want.TellRecovered) -> None:
        generation, kind, outcome, since = wanted
        stall_s = time.monotonic() - self._inbox.heard_at[since]
        self._listener.recovered(Recovery(generation, kind, outcome, self._rebuild_s, stall_s))

    def _doubt(self, wanted: want.Doubt) -> None:
        self._listener.doubt(wanted.generation, wanted.error, wanted.unreachable)

    def _announce_entry(self, wanted: want.AnnounceEntry) -> None:
        if self._catch_up is not None:
            self._catch_up.entering(wanted.generation, wanted.members)

    # ------------------------------------------------------------------ a joiner outside the group

    def _subscribe(self, wanted: want.Subscribe) -> CatchUpStream:
        self._subscribed = time.monotonic()
        wiring = self._wiring
        stream = CatchUpReceiver(
            wanted.donor, wiring.secret, wiring.me, self._inbox.notify, shadow=self._joiner.shadow
        )
        self._participant.phase("take", 0)
        return stream

    def _adopt(self, wanted: want.Adopt) -> Joined:
        given = wanted.given
        names = ["the group", f"worker {self._wiring.me}"]
        layouts.compare([given.layout, self._layout], names)
        with transfer.taking():
            self._participant.adopt_state(given.state)
        return Joined(time.monotonic() - self._subscribed, given.state.nbytes)

    def _take_digest(self, _wanted: want.TakeDigest) -> str:
        return self._participant.digest()

    def _imitate(self, wanted: want.Imitate) -> None:
        wanted.operation.imitate(wanted.watched)


def _built(builder: Builder) -> Group:
    if isinstance(builder.result, Group):
        return builder.result
    if isinstance(builder.failed, torch.AcceleratorError):
        raise builder.failed  # this worker's own
    raise want.Failed(builder.failed or RuntimeError("no group"), builder.unreachable)


def _nobody_to_tell(word: Word) -> None:
    raise TrainError(f"a worker that is one process said {word}; this is a bug in elastix.")


_ANSWERS: dict[type, Callable[[GroupDriver, Any], Any]] = {
    want.Await: GroupDriver._await,
    want.Build: GroupDriver._build,
    want.Connect: GroupDriver._connect,
    want.Connected: GroupDriver._await_connected,
    want.Say: lambda self, wanted: self._say_to_crew(wanted.word),
    want.Abandon: GroupDriver._abandon,
    want.Meet: GroupDriver._meet,
    want.CompareLayouts: GroupDriver._compare_layouts,
    want.GiveState: GroupDriver._give_state,
    want.TakeState: GroupDriver._take_state,
    want.AllHaveState: GroupDriver._all_have_state,
    want.PassOn: GroupDriver._pass_on,
    want.ReduceBuckets: GroupDriver._reduce_buckets,
    want.Payload: GroupDriver._payload,
    want.CompareCalls: GroupDriver._compare_calls,
    want.ReducePayload: GroupDriver._reduce_payload,
    want.Conclude: GroupDriver._conclude,
    want.StoreState: lambda self, _wanted: self._participant.store_state(),
    want.TellEntered: GroupDriver._entered,
    want.TellRecovered: GroupDriver._recovered,
    want.Doubt: GroupDriver._doubt,
    want.AnnounceEntry: GroupDriver._announce_entry,
    want.Subscribe: GroupDriver._subscribe,
    want.Adopt: GroupDriver._adopt,
    want.TakeDigest: GroupDriver._take_digest,
    want.Unequal: lambda self, wanted: self._listener.unequal(*wanted),
    want.Level: lambda self, wanted: self._listener.level(equal=wanted.equal),
    want.Lonely: lambda self, _wanted: self._listener.lonely(),
    want.Succeed: lambda self, wanted: self._listener.succeed(equal=wanted.equal),
    want.Imitate: GroupDriver._imitate,
}
"""What is done about each thing that a course wants. One table: drivers are made for each trial."""
