"""What a run has told so far, as far as whoever leads it must know. Pure: a fold over events."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from elastix.events import (
    Event,
    GenerationFormed,
    ProcessorsDiffer,
    ReplicasCompared,
    ReplicasDiverged,
    Resumed,
    ResumedFromShadow,
    SamplesLeftOut,
    StateDropped,
    StateStored,
    StepCommitted,
    StopAsked,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerNotStarted,
    WorkerStarted,
)
from elastix.train.control.messages import OutcomeKind
from elastix.train.control.terms import Found


@dataclass
class RunState:
    """One run's, since its opening.

    Attributes:
        step: the last committed one.
        trained: a step was committed, whether or not it stands.
        taken: of committed steps that stand, from which on they were taken in which generation.
        sequence: the highest sequence number of an event that several workers may send.
        losses: workers lost.
        not_started: workers that could not be started.
        losses_in_a_row: of them, and of those that could not be started, since the last committed
            step.
        gone: workers that were lost or left, or could not be started, since the last committed
            step, and why.
        out: all workers that were lost or left, or could not be started, up to now; and those that
            are ended because workers had parted.
        generation: the newest that was formed.
        started: workers that were up to `prepare`.
        began: by worker that came into the group, the step after which it did.
        members: of the newest generation, but for those that were lost or left since.
        called: of the newest urgent generation and of those after it: nobody else is in the group.
        founding: members of a group of which no step was told yet, since it was to be founded.
        computes_with: by worker, on what its last bits depend; see Ready.
        kinds: of these, all that there have been.
        processors: of these, what was said to differ.
        stored: the step of the newest State that is in the store, was not taken for its score
            alone, and is not the final one.
        compared: steps of States in the store that all of the group were seen to hold then.
        left_out: steps after which the guard has left samples out.
        final: the train function has come to its end: the State is stored for good.
        parted: workers were found to hold different States, and all are to go back for it.
        unjudged: they were when States were compared at a boundary, and nothing was said to that.
            In an exact run this is.
        stopping: why the run was asked to end; empty if it was not.
        crews: by worker that is several processes, the node and the number of each; of those that
            are at work.
        crews_lost: the processes of those that were lost. Some may be of another one since.
    """

    step: int = 0
    trained: bool = False
    taken: list[tuple[int, int]] = field(default_factory=list)
    sequence: int = -1
    losses: int = 0
    not_started: int = 0
    losses_in_a_row: int = 0
    gone: dict[int, str] = field(default_factory=dict)
    out: set[int] = field(default_factory=set)
    generation: int = 0
    started: set[int] = field(default_factory=set)
    began: dict[int, int] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    called: set[int] = field(default_factory=set)
    founding: set[int] = field(default_factory=set)
    computes_with: dict[int, str] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()
    processors: frozenset[str] = frozenset()
    stored: int = 0
    compared: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)
    final: bool = False
    parted: ReplicasDiverged | None = None
    unjudged: ReplicasDiverged | None = None
    stopping: str = ""
    crews: dict[int, set[tuple[str, int]]] = field(default_factory=dict)
    crews_lost: set[tuple[str, int]] = field(default_factory=set)

    def knows(self, event: Event, sequence: int | None) -> bool:
        """Whether an event that several workers may send has come before.

        A lost worker may have told something alone, under the number of a step that came after it.
        """
        if sequence is None or (isinstance(event, StepCommitted) and event.step > self.step):
            return False
        return sequence <= self.sequence

    def take(  # noqa: C901 - a case per event
        self, event: Event, sequence: int | None = None
    ) -> None:
        """Count one more event."""
        if sequence is not None:
            self.sequence = max(self.sequence, sequence)
        match event:
            case StepCommitted():
                self._step_taken(event)
                self.founding.clear()
                self.losses_in_a_row = 0
                self.gone.clear()
                self.final = False
            case Resumed():
                self._give_up_from(event.step + 1)
                self.step, self.sequence = event.step, event.sequence - 1
                self.stored = event.step if event.ref else min(self.stored, event.step)
                self.compared = {step for step in self.compared if step < event.step}
                self.compared |= {event.step} if event.ref else set()  # all have begun from it
                self.left_out = {step for step in self.left_out if step <= event.step}
                self.parted, self.unjudged, self.final = None, None, False
            case ResumedFromShadow():
                if event.steps_lost:  # what it will send again is known, or void
                    self.sequence = event.sequence - 1
            case GenerationFormed():
                self.generation = event.generation
                self.members = set(event.members)
                self.called = self.members | (set() if event.urgent else self.called)
                begins = event.cause == "start" or (event.urgent and bool(self.founding))
                self.founding = set(event.members) if begins else set()
                self.began.update(dict.fromkeys(self.founding, self.step))
            case ProcessorsDiffer():
                self.processors |= event.kinds.keys()
            case WorkerStarted():
                self.started.add(event.worker)
                self.computes_with[event.worker] = event.computes_with
                self.kinds |= {event.computes_with} - {""}
                if event.mates:
                    self.crews[event.worker] = {(event.node, event.pid), *event.mates}
            case WorkerJoined():
                self.began[event.worker] = event.step
            case WorkerLost():
                self.crews_lost |= self.crews.get(event.worker, set())
                self.losses += 1
                self.losses_in_a_row += 1
                self._take_out(event)
            case WorkerNotStarted():
                self.not_started += 1
                # A node that comes with other code has that of all that are started there.
                self.losses_in_a_row += event.cause != OutcomeKind.OTHER_CODE
                self._take_out(event)
            case WorkerLeft():
                self._take_out(event)
            case StateStored():
                self.compared.discard(event.step)
                self.compared |= {event.step} if event.compared else set()
                if event.reason not in ("best", "final"):
                    self.stored = event.step
                self.final = self.final or event.reason in ("final", "paused")
            case SamplesLeftOut():
                self.left_out.add(event.step)
            case StateDropped():
                self.compared.discard(event.step)
            case ReplicasCompared() if not event.equal:
                self.unjudged = ReplicasDiverged(
                    step=event.step,
                    workers=event.workers,
                    apart=event.apart,
                    parts=event.parts,
                    cure="went back",
                    unseen=True,
                )
            case ReplicasDiverged() if event.cure == "went back":
                self.parted, self.unjudged = event, None
                # What any of them holds is of no use, even if nobody comes to end it.
                self.out |= self.started
                self.members, self.called, self.founding = set(), set(), set()
            case StopAsked():
                self.stopping = event.reason

    def _take_out(self, event: WorkerLost | WorkerNotStarted | WorkerLeft) -> None:
        self.members.discard(event.worker)
        self.crews.pop(event.worker, None)
        self.gone[event.worker] = event.cause
        self.out.add(event.worker)

    def copy(self) -> "RunState":
        """One that goes its own way."""
        return replace(
            self,
            gone=dict(self.gone),
            out=set(self.out),
            started=set(self.started),
            began=dict(self.began),
            members=set(self.members),
            called=set(self.called),
            founding=set(self.founding),
            computes_with=dict(self.computes_with),
            compared=set(self.compared),
            left_out=set(self.left_out),
            taken=list(self.taken),
            crews=dict(self.crews),
            crews_lost=set(self.crews_lost),
        )

    @property
    def sound(self) -> set[int] | None:
        """Steps of stored States to go back to, as workers had parted unseen; None: of any.

        Whoever had parted was seen to hold them as all did: it was as it should be until then. Of a
        State after whose step the guard has left samples out it is not known whether it came first.
        """
        if self.parted is None or not self.parted.unseen:
            return None
        return {step for step in self.compared - self.left_out if step <= self.parted.step}

    def takes(self, step: int, generation: int | None) -> bool:
        """Whether a step was committed, and in that generation; None: in any."""
        found = [taken for first, taken in self.taken if first <= step]
        return step <= self.step and generation in (None, *found[-1:])

    def _step_taken(self, event: StepCommitted) -> None:
        self._give_up_from(event.step)
        if not self.taken or self.taken[-1][1] != event.generation:
            self.taken.append((event.step, event.generation))
        self.step, self.trained = event.step, True

    def _give_up_from(self, step: int) -> None:
        while self.taken and self.taken[-1][0] >= step:
            self.taken.pop()

    def processors_of(self, members: Sequence[int]) -> ProcessorsDiffer | None:
        """What is to be said, once, if those who are to compute together round differently."""
        if len(self.kinds) < 2 or self.processors >= self.kinds:
            return None
        kinds: dict[str, list[int]] = {}
        for worker in members:
            kind = self.computes_with.get(worker)
            if kind:
                kinds.setdefault(kind, []).append(worker)
        if len(kinds) < 2 or self.processors >= kinds.keys():
            return None
        return ProcessorsDiffer(kinds={kind: tuple(who) for kind, who in kinds.items()})

    def unaccounted(self, present: Collection[int]) -> set[int]:
        """Workers that were members last, are not present, and whose end nobody has told.

        None when the train function has come to its end: they were through with it.
        """
        return set() if self.final else self.members - set(present)

    def of_use(self, found: Sequence[Found]) -> list[Found]:
        """Of the workers that are at work, those with whom another conductor goes on.

        Joiners in the making have lost whom they waited for, and spares know nothing that cannot be
        learnt again: where the State lives on, others are started in their place. Of those who
        found a group all have the State or none, as they will find out.
        """
        # Others may have gone on without these, and the old one may not have come to end them, or
        # to tell them.
        outdated = {one.worker for one in found if one.holder} - self.called
        # What is left out stands in the State. Of those who found the group anew each must know it.
        stateless = {one.worker for one in found if not (one.holder or one.shadow)} - self.founding
        outdated |= {one.worker for one in found if one.misinformed} & stateless
        present = [one for one in found if one.worker not in self.out | outdated]
        founders = [one for one in present if one.worker in self.founding]
        holders = [one for one in present if one.holder]
        if holders:
            return founders or holders
        # Who was called may be given the State at any moment, or was. Who said that it was ready to
        # somebody who wanted to end it does not say it again.
        waiting = {one.worker for one in present if one.operation < 0} & self.started - self.called
        if self.step and not any(one.shadow for one in present):
            # Whoever followed is in its loop, and those who found the group anew come from the
            # beginning.
            waiting = set()
        return [
            one
            for one in present
            if not one.ready or one.shadow or one in founders or one.worker in waiting
        ]
