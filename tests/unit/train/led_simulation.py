"""The world of group_simulation under the conductor that ships, which is killed at any moment.

Conductor, RunState, Shadows, Roster and GroupProtocol are those that ship, and so is what workers
tell the journal (ReplicatedEvents). Made up are the network, processes, what is stored, and the
time. What a worker says must arrive (messages.MUST_ARRIVE) is said until somebody has heeded it;
whatever else it says may be lost with a conductor, or be heard by the next one, and all that a
conductor says may be lost. A worker that is taken for lost may live, and go on for a while.

Each State has with it what it comes from: the steps that were taken, and the samples. So that
nothing is lost or doubled is seen from the journal and from the States themselves, whatever became
of the groups between.
"""

from collections import deque
from dataclasses import replace

from elastix.comm.protocol import wants
from elastix.comm.protocol.membership import Membership
from elastix.comm.protocol.participant import Fenced, Joined
from elastix.comm.protocol.wants import Await, Failed
from elastix.config import FailureConfig
from elastix.data.left_out import LeftOut
from elastix.errors import QuorumLost, ReplicasDiffer
from elastix.events import (
    ReplicasCompared,
    ReplicasDiverged,
    Resumed,
    RunStarted,
    SamplesLeftOut,
    StateStored,
    StepCommitted,
)
from elastix.train.control.actions import (
    EndWorker,
    KillWorker,
    StartWorker,
    Tell,
    Vacate,
    Vacated,
    Write,
)
from elastix.train.control.conductor import Conductor
from elastix.train.control.messages import (
    CatchUp,
    CaughtUp,
    Dismiss,
    Diverged,
    Entered,
    Heartbeat,
    Leave,
    Outcome,
    OutcomeKind,
    Ready,
    RecordEvents,
    Started,
    StoreSoon,
    Succeeded,
    Suspect,
)
from elastix.train.control.run_state import RunState
from elastix.train.control.terms import Found, Phase, RunTerms
from elastix.train.replica.replicated_events import ReplicatedEvents
from tests.unit.comm.group_simulation import Collective, Simulation, Violation, Worker, committed

_MUST_ARRIVE = {"started", "ready", "succeeded", "diverged", "leave", "record"}
_MESSAGES = {
    "started": lambda me, _: Started(pid=me + 1),
    "ready": lambda me, operation: Ready(me, operation=operation),
    "level": lambda _, equal: CaughtUp(equal=bool(equal)),
    "entered": lambda _, generation: Entered(generation),
    "doubt": lambda _, generation: Suspect(generation, ""),
    "leave": lambda *_: Leave("notice"),
    "succeeded": lambda _, said: Succeeded(**said),
    "diverged": lambda _, said: said,
    "record": lambda _, entry: RecordEvents((entry,)),
}
_EVER = 1e9
_QUIET = 400  # seconds in which nothing happens any more


class LedWorker(Worker):
    """One whose State tells where it comes from."""

    def __init__(self, simulation: "LedSimulation", me: int) -> None:
        self.reaped = False  # its conductor has ended it
        self.noticed = self.said_ready = self.fenced = False
        self.heeded = None  # the last thing that somebody has heeded
        self.dismissed: QuorumLost | None = None
        self.era = None
        self.left_out = simulation.left_out  # as it was told when it was started
        self.step_number = 0
        self.history: tuple = ()  # what each step that counts was, by number
        self.used: tuple = ()
        self.events = ReplicatedEvents(
            self.send_event, self.first, lambda: self.operation, lambda: _EVER
        )
        super().__init__(simulation, me)
        self.outbox.append(("started", 0))

    def prepare(self):
        self.said_ready = True
        yield from super().prepare()

    def life(self):
        """The final State is stored only when the journal has all that led to it."""
        yield from super().life()
        if not self.protocol.joiner.following:
            yield Await(lambda: len(self.sim.standing) >= self.step_number)

    @property
    def operation(self) -> int:
        return self.protocol.hand.number

    def send_event(self, event, number) -> None:
        self.outbox.append(("record", (number, event)))
        if self.alive:
            self.sim.senders.add(self)

    def first(self) -> bool:
        urgent = self.inbox.urgent.members
        if self.protocol.lost_track:
            return False
        if self.protocol.holder and urgent[:1] == (self.me,):
            return True
        protocol = self.protocol
        present = (
            protocol.planned
            if protocol.joiner.following
            else self.inbox.members.get(protocol.generation, ())
        )
        return present[:1] == (self.me,)

    @property
    def state(self):
        return (
            self.epoch,
            self.cursor,
            self.weights,
            self.step_number,
            self.history,
            self.used,
            self.events.sequence,
            self.era,
        )

    @property
    def given(self):
        return (*self.state, self.events.hand_on())

    def become(self, state) -> None:
        (
            self.epoch,
            self.cursor,
            self.weights,
            self.step_number,
            self.history,
            self.used,
            sequence,
            self.era,
            *untold,
        ) = state
        if untold:
            self.events.go_on(sequence, *untold)
        else:
            self.events.sequence = sequence


class LedSimulation(Simulation):
    """See the module.

    Attributes:
        journal: what it has, each with its number.
        standing: of the steps that stand, what each was.
    """

    def __init__(
        self,
        scenario,
        choose,
        takeovers: int,
        shadows: int = 0,
        stops: bool = False,
        flips: int = 0,
        voids: int = 0,
        silent: int = 0,
        **broken,
    ) -> None:
        self.takeovers_left, self.flips_left, self.voids_left = takeovers, flips, voids
        self.silent_left = silent
        self.stops = stops
        self.left_out: dict = {}  # of what workers are told that are started now
        self.unsound: set = set()  # eras of what is given up, as workers have parted in them
        self.suspect: set = set()  # eras in which they have, as the journal has it and no more
        self.stopped_at: int | None = None  # the last step in the journal when it was to stop
        self.wanted: dict = {}  # States that are stored as soon as the journal has their steps
        self.failure = FailureConfig(
            replace=scenario.replace, hang_timeout_s=_EVER, start_timeout_s=_EVER, wait_s=_EVER
        )
        self.terms = RunTerms(
            founders=scenario.workers,
            min_workers=scenario.min_workers,
            max_workers=scenario.workers
            if scenario.spares
            else scenario.workers + scenario.joiners,
            failure=self.failure,
            first_step_s=_EVER,
            shadows=shadows,
        )
        self.conductor = Conductor(self.terms)
        self.now = 0.0
        self.places = scenario.workers + scenario.joiners + shadows
        self.journal: list = []
        self.standing: list = []
        self.parted = False  # and all are to go back for it
        self.kept: list[tuple] = []  # States in the store
        self.condemned: list[LedWorker] = []
        self.told: dict = {}
        self.eras: dict = {}
        self.total = self.places
        self.moments_left = 0
        super().__init__(scenario, choose, **broken)
        opening = RunStarted(name="r", seed=0, config={}, scaling={}, versions={})
        self.act(self.conductor.begin([opening]))
        self.offer()

    roster = property(lambda self: self.conductor._roster, lambda self, value: None)

    def spawn(self) -> None:
        """Whom the conductor starts is started."""

    def make_worker(self, me: int) -> LedWorker:
        return LedWorker(self, me)

    # ------------------------------------------------------------------ the shell

    def offer(self) -> None:
        self.act(self.conductor.room(self.places, more=self.places > 0, now=self.now))

    def act(self, actions) -> None:
        for action in actions:
            match action:
                case Tell():
                    self.tell(action.to, action.message)
                case Write():
                    self.write(action.event, action.sequence)
                case StartWorker(worker):
                    if worker != len(self.workers):
                        raise Violation(f"worker {worker} is started after {len(self.workers)}")
                    self.places -= 1
                    super().spawn()
                    self.senders.add(self.workers[-1])
                case KillWorker(worker) | EndWorker(worker):
                    self.condemned.append(self.workers[worker])
                case Vacate(worker, place):
                    self.places += place is Vacated.FREE
        if any(isinstance(action, Vacate) for action in actions):
            self.offer()

    def tell(self, to, message) -> None:
        if self.trace is not None:
            self.note(f"controller to {to}: {message}")
        if isinstance(message, Membership):
            self.generations = message.generation
        if isinstance(message, Membership | CatchUp | Dismiss | StoreSoon):
            for me in list(self.conductor.workers) if to is None else [to]:
                self.send(self.workers[me], message)

    def write(self, event, number) -> None:
        if self.trace is not None:
            self.note(f"journal {number}: {event}")
        self.journal.append((event, number))
        if isinstance(event, StepCommitted):
            self.step_taken(event)
        elif isinstance(event, Resumed):
            if self.parted:
                self.seen["went back as workers had parted"] += 1
            else:
                self.look_at_loss(event.step)
            self.parted = False
            del self.standing[event.step :]
        elif isinstance(event, ReplicasDiverged):
            self.parted = True
            self.unsound |= self.all_eras
            self.suspect = set()
        elif isinstance(event, ReplicasCompared):
            self.suspect = self.all_eras

    def step_taken(self, event) -> None:
        _, history, state, era = self.told[id(event)]
        while era is not None:
            if era in self.unsound:
                raise Violation(f"{event} was computed from what is given up")
            era = era[2] if era[0] == "heir" else None
        if event.step != len(self.standing) + 1:
            raise Violation(f"step {event.step} comes after {len(self.standing)}")
        if list(history[:-1]) != self.standing:
            raise Violation(f"two histories: {event} has another before it than the journal")
        self.standing = list(history)
        for worker in self.workers:
            self.wake(worker)
        if not self.choose(6):
            self.store(state, "every")
        elif list(history) in self.wanted.values():
            self.store(state, "notice")

    @property
    def all_eras(self) -> set:
        return {worker.era for worker in self.workers} - {None}

    def look_at_loss(self, step: int) -> None:
        """No step is given up that somebody has."""
        if step >= len(self.standing):
            return
        for worker in self.workers:
            if not worker.alive or worker.me not in self.conductor.workers:
                continue
            joiner = worker.protocol.joiner
            has = worker.protocol.holder or (joiner.following and joiner.shadow)
            if has and list(worker.history[: len(self.standing)]) == self.standing:
                raise Violation(f"it goes back to {step} though {worker.me} has all")

    def store(self, state, reason: str) -> None:
        self.kept = [one for one in self.kept if one[3] < state[3]] + [state]
        event = StateStored(ref="r", step=state[3], reason=reason, stored_bytes=0, store_s=0.0)
        self.journal.append((event, None))
        self.conductor.stored(event)

    @property
    def stored(self) -> tuple | None:
        """The State that the run goes on from."""
        return self.kept[-1] if self.kept else None

    @property
    def stored_step(self) -> int:
        return self.stored[3] if self.stored else 0

    def go_back_to(self) -> Resumed:
        """As Shell._stored: some of the States may have been computed from what is wrong."""
        if self.parted:
            del self.kept[self.choose(len(self.kept) + 1) :]
        resumed = Resumed(step=self.stored_step, ref="stored" if self.stored else "")
        self.left_out = LeftOut(event for event, _ in self.journal).after(resumed)
        return resumed

    # ------------------------------------------------------------------ another conductor

    def mishap(self) -> None:
        if self.stops and self.stopped_at is None and not self.choose(3):
            self.stop()
        elif self.flips_left and not self.choose(3):
            self.flip()
        elif self.voids_left and not self.choose(3):
            self.void()
        elif self.silent_left and not self.choose(3):
            self.silent_left -= 1
            self.take_out()
        elif self.takeovers_left and not self.choose(2):
            self.take_over()
        elif self.mishaps_left > self.scenario.kills + self.scenario.hiccups:
            self.mishaps_left -= 1
            alive = [worker for worker in self.workers if worker.alive]
            if alive:
                self.seen["asked to leave"] += 1
                worker = alive[self.choose(len(alive))]
                worker.noticed = True
                worker.outbox.append(("leave", 0))
                self.senders.add(worker)
        else:
            super().mishap()

    def kill(self, worker) -> None:
        super().kill(worker)
        if not self.choose(2):
            worker.outbox.clear()
            self.senders.discard(worker)

    def stop(self) -> None:
        self.seen["stopped"] += 1
        self.stopped_at = len(self.standing)
        if self.trace is not None:
            self.note(f"STOP at {self.stopped_at}")
        self.act(self.conductor.stop("Ctrl-C", self.now))

    def flip(self) -> None:
        """Workers of the group are found to hold different States: in a step, or when compared."""
        members = [w for w in self.conductor.membership.members if self.workers[w].protocol.holder]
        if len(members) < 2:
            return
        self.flips_left -= 1
        self.seen["flipped"] += 1
        said = Diverged(
            step=len(self.standing),
            workers=tuple(members),
            apart=tuple(members[:1]),
            parts=("model",),
            error=ReplicasDiffer("they differ"),
            unseen=True,
        )
        if self.choose(2):
            found = {"workers": said.workers, "apart": said.apart, "parts": said.parts}
            self.write(ReplicasCompared(step=said.step, occasion="", digest="", **found), None)
            self.conductor.differ(said)
            self.look_out()
            return
        for me in self.who_says_so(members):
            if self.workers[me].alive:
                self.workers[me].outbox.append(("diverged", said))
                self.senders.add(self.workers[me])

    def who_says_so(self, members: list[int]) -> list[int]:
        """Members that have seen that they have parted; or shadows alone, if these die first."""
        shadows = [
            worker.me
            for worker in self.workers
            if worker.alive and worker.protocol.joiner.following and worker.protocol.joiner.shadow
        ]
        if not shadows or self.choose(3):
            return members
        self.seen["a shadow alone says so"] += 1
        for me in members:
            if self.workers[me].alive:
                self.kill(self.workers[me])
        return shadows[: 1 + self.choose(len(shadows))]

    def void(self) -> None:
        """The guard leaves a batch out, say those who have the State."""
        if self.conductor.holders:
            self.voids_left -= 1
            self.seen["left out"] += 1
            spans = ((self.voids_left, self.voids_left + 1),)
            self.write(SamplesLeftOut(loader=0, spans=spans, step=len(self.standing)), None)

    def store_state(self, worker, want) -> None:
        """At a boundary where the group stands still; what led to it comes to the journal first."""
        worker.inbox.stores = False
        while worker.outbox and worker.alive:
            self.hear(worker)
        if list(worker.history) == self.standing:
            self.store(worker.state, "notice")

    def all_have_state(self, worker, want) -> Collective:
        self.look_out()
        return super().all_have_state(worker, want)

    def announce_entry(self, worker, want) -> None:
        super().announce_entry(worker, want)
        self.look_out()

    def succeed(self, worker, want) -> None:
        events = worker.events
        said = {"step": worker.step_number, "since": events.since, "sequence": events.sequence}
        worker.outbox.append(("succeeded", {**said, "equal": want.equal}))
        worker.era = ("heir", worker.me, worker.era)
        self.look_out()

    def look_out(self) -> None:
        """A moment at which the controller had better not die."""
        if self.takeovers_left and not self.moments_left and not self.choose(3):
            self.moments_left = 1 + self.choose(25)

    def take_over(self) -> None:
        self.takeovers_left, self.moments_left = self.takeovers_left - 1, 0
        if not self.choose(2):
            for worker in [one for one in self.workers if one.alive]:
                if self.choose(3) == 0:
                    self.kill(worker)
        if not self.choose(3):
            self.take_out()
        self.drop_condemned()
        self.go_on_without(self.choose(40))
        for worker in self.workers:
            self.lose_messages(worker)
        found = []
        for worker in self.choosing([w for w in self.workers if self.is_found(w)]):
            found.append(self.found(worker))
            self.go_on_without(self.choose(4))
        self.unsound |= self.suspect
        state = self.told_so_far()
        if state.unjudged is not None:
            self.seen["another controller judges"] += 1
            self.write(state.unjudged, None)
            state = self.told_so_far()
        self.conductor = Conductor(self.terms)
        resumed = self.go_back_to()
        for place, one in enumerate(found):
            misinformed = self.workers[one.worker].left_out != self.left_out
            found[place] = replace(one, misinformed=misinformed)
        if self.trace is not None:
            self.note(f"ANOTHER CONTROLLER {found} {state}")
        self.seen["another controller"] += 1
        known = range(len(self.workers))
        self.places = 0
        self.act(self.conductor.take_over(state, found, known, resumed, self.now))
        self.places = self.total - len(self.conductor.workers)
        self.gone = type(self.gone)()
        for worker in self.workers:
            if not worker.alive and worker.me in self.conductor.workers:
                self.gone.add(worker)
        self.offer()

    def told_so_far(self) -> RunState:
        state = RunState()
        for event, number in self.journal:
            state.take(event, number)
        return state

    def choosing(self, workers):
        while workers:
            yield workers.pop(self.choose(len(workers)))

    def is_found(self, worker) -> bool:
        return worker.alive or (self.over(worker) and not worker.reaped)

    def over(self, worker) -> bool:
        return worker.done or worker.released is not None or worker.fenced or worker.dismissed

    def found(self, worker) -> Found:
        protocol = worker.protocol
        heard = max(worker.inbox.members, default=0)
        return Found(
            worker=worker.me,
            pid=1,
            node="",
            device="cpu",
            generation=heard,
            address=worker.me if worker.said_ready else None,
            ready=worker.said_ready,
            holder=protocol.holder,
            shadow=protocol.joiner.following and protocol.joiner.shadow,
            noticed=worker.noticed,
            operation=protocol.hand.number,
        )

    def lose_messages(self, worker) -> None:
        worker.outbox = deque(
            one for one in worker.outbox if one[0] in _MUST_ARRIVE or not self.choose(2)
        )
        if worker.heeded is not None and not self.choose(2):  # it was not told that it was heard
            worker.outbox.appendleft(worker.heeded)
        worker.heeded = None
        if worker.outbox and worker.alive:
            self.senders.add(worker)
        else:
            self.senders.discard(worker)
        self.lose_mail(worker)

    def take_out(self) -> None:
        """The controller takes a worker for lost that lives, and ends it later, or dies before."""
        able = [w for w in self.workers if w.alive and w.me in self.conductor.workers]
        if able and self.conductor.phase is Phase.RUNNING:
            worker = able[self.choose(len(able))]
            self.seen["taken for lost"] += 1
            self.act(self.conductor.died(worker.me, self.now))

    def drop_condemned(self) -> None:
        """Some that it wanted to end it did not come to."""
        for worker in self.condemned:
            if self.choose(2):
                self.reap(worker)
        self.condemned.clear()

    def go_on_without(self, moments: int) -> None:
        for _ in range(moments):
            able = [*self.runnable.items, *self.uninformed.items]
            if not able:
                return
            place = self.choose(len(able))
            if place < len(self.runnable):
                self.step_on(able[place])
            else:
                self.deliver(able[place])

    # ------------------------------------------------------------------ what is heard

    def hear(self, worker) -> None:
        what, said = worker.outbox.popleft()
        if not worker.outbox:
            self.senders.discard(worker)
        if worker.me not in self.conductor.workers:
            return
        if what in _MUST_ARRIVE:
            worker.heeded = (what, said)
        if self.trace is not None:
            self.note(f"controller hears {what} {said} of worker {worker.me}")
        message = _MESSAGES[what](worker.me, said)
        self.act(self.conductor.hear(worker.me, message, self.now))
        if not self.choose(3):
            protocol = worker.protocol
            beat = Heartbeat(call=(protocol.hand.number, 0), generation=protocol.generation)
            self.act(self.conductor.hear(worker.me, beat, self.now))

    def notice(self, worker) -> None:
        self.gone.discard(worker)
        if self.over(worker):  # it waits until all is in the journal
            while worker.outbox:
                self.hear(worker)
        if worker.me not in self.conductor.workers:
            return
        if self.trace is not None:
            self.note(f"controller notices the end of worker {worker.me}")
        generation, step = worker.protocol.generation, worker.step_number
        if worker.done:
            outcome = Outcome(kind=OutcomeKind.FINISHED, generation=generation, step=step)
        elif worker.released is not None:
            outcome = Outcome(kind=OutcomeKind.LEFT, generation=worker.released, step=step)
        elif worker.dismissed:
            outcome = Outcome(
                kind=OutcomeKind.DISMISSED, generation=generation, step=step, error=worker.dismissed
            )
        elif worker.fenced:
            outcome = Outcome(kind=OutcomeKind.FENCED, step=step)
        else:
            self.act(self.conductor.died(worker.me, self.now))
            return
        self.act(self.conductor.ended(worker.me, outcome, self.now))

    def deliver(self, worker) -> None:
        message = worker.mail.popleft()
        if not worker.mail:
            self.uninformed.discard(worker)
        match message:
            case Membership():
                before = worker.inbox.urgent.generation
                worker.inbox.publish(message)
                if not message.urgent:
                    self.arrived.setdefault(message.generation, set()).add(worker.me)
                if worker.inbox.urgent.generation > before:
                    worker.events.send_again()
            case CatchUp():
                worker.inbox.invite(message.donors, shadow=message.shadow)
            case Dismiss():
                worker.inbox.dismiss(QuorumLost(message.reason))
            case StoreSoon():
                worker.inbox.store_soon()
        self.wake(worker)

    # ------------------------------------------------------------------ what a worker wants

    def give_state(self, worker, want) -> Collective:
        if want.founding != (not worker.protocol.hand.has_state):
            raise Violation(f"worker {worker.me} founds a run that goes on, or the reverse")
        if want.founding:
            if worker.left_out != self.left_out:
                raise Violation(f"worker {worker.me} founds the group without what is left out")
            if self.stored is not None:
                worker.become(self.stored)
            worker.era = ("founded", worker.protocol.generation)
        return worker.post(want.group, "State", worker.given, worker.me)

    def take(self, worker, told):
        value = told.values[told.root]
        if told.tag != "State":
            return value
        if worker.me == told.root:
            return None
        self.seen["joined"] += 1
        worker.become(value)
        root = self.workers[told.root]
        founded = worker.era == ("founded", worker.protocol.generation)
        if founded and worker.left_out != root.left_out:
            raise Violation(f"workers {root.me} and {worker.me} draw different samples")
        return Joined(0.0, 0)

    def adopt(self, worker, want):
        worker.become(want.given.state)
        return Joined(0.0, 0)

    def entered(self, worker, want) -> None:
        super().entered(worker, want)
        worker.events.send_again()

    def conclude(self, worker, want) -> None:
        """As there, within the history that this one has a part in."""
        kept = self.records, self.evaluated
        # Who was taken for lost may go on in a group that it had entered, and nobody heeds it.
        lost = worker.me in self.conductor.state.out
        self.records, self.evaluated = (
            ({}, {}) if lost else self.eras.setdefault(worker.era, ({}, {}))
        )
        try:
            super().conclude(worker, want)
        finally:
            self.records, self.evaluated = kept

    def commit(self, worker, drawn, contributors):
        used, after = committed(drawn, drawn[0] if self.scenario.slices else contributors)
        worker.used = (*worker.used, *used)
        worker.step_number += 1
        worker.history = (*worker.history, worker.weights)
        generation = worker.protocol.generation
        event = StepCommitted(
            step=worker.step_number, generation=generation, world_size=1, batches=()
        )
        state = (
            worker.epoch,
            after,
            worker.weights,
            worker.step_number,
            worker.history,
            worker.used,
            worker.events.sequence + 1,
            None,
        )
        self.told[id(event)] = event, worker.history, state, worker.era
        if worker.inbox.stores and not worker.protocol.joiner.following:
            worker.inbox.stores = False
            self.wanted[worker.me] = list(worker.history)
        worker.events.emit(event)
        return after

    # ------------------------------------------------------------------ processes and time

    def through(self, worker, over) -> None:
        worker.fenced = isinstance(over, Fenced)
        super().through(worker, over)

    def reap(self, worker) -> None:
        worker.reaped = True
        if worker.alive:
            worker.thread.close()
            self.end(worker)
            self.gone.discard(worker)

    def step_on(self, worker, failure: Failed | None = None) -> None:
        """Until it has to wait."""
        try:
            super().resume(worker, failure)
        except QuorumLost as lost:
            worker.dismissed = lost
            self.through(worker, lost)

    def resume(self, worker, failure: Failed | None = None) -> None:
        self.step_on(worker, failure)
        if self.moments_left:
            self.moments_left -= 1
            if not self.moments_left:
                self.take_over()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.offer()
        self.act(self.conductor.tick(self.now))
        if self.conductor.phase is Phase.GOING_BACK:
            self.seen["went back"] += 1
            for _ in range(self.choose(4)):  # what is being stored is given up first
                if self.senders:
                    self.hear(self.senders.items[self.choose(len(self.senders))])
            self.act(self.conductor.judge(self.now))
            before, resumed = self.left_out, self.go_back_to()
            anew = self.left_out != before
            self.act(self.conductor.went_back(resumed, self.now, anew=anew))

    def run(self) -> "LedSimulation":
        choose, every = self.choose, self.scenario.kill_every
        for _ in range(self.moments):
            if self.conductor.phase is Phase.OVER:
                break
            bags = self.could_happen()
            if not bags:
                if not self.go_on():
                    break
            elif self.mishaps_left and not choose(every):
                self.mishap()
            elif not choose(12):
                self.tick(0.3)
            else:
                self.something(choose(len(bags)), bags)
        else:
            raise Violation("the run goes round in circles")
        self.check()
        return self

    def could_happen(self) -> list:
        """Whose turn it may be: see `something`."""
        bags = self.runnable, self.uninformed, self.senders, self.gone
        return [worker for bag in bags for worker in bag.items] + self.condemned

    def something(self, place: int, bags: list) -> None:
        worker = bags[place]
        for bag, what in (
            (self.runnable, self.resume),
            (self.uninformed, self.deliver),
            (self.senders, self.hear),
            (self.gone, self.notice),
        ):
            if place < len(bag):
                what(worker)
                return
            place -= len(bag)
        self.condemned.remove(worker)
        self.reap(worker)

    def go_on(self) -> bool:
        """Nothing happens but that time passes."""
        for _ in range(_QUIET):
            self.tick(1.0)
            if self.conductor.phase is Phase.OVER or self.could_happen():
                return True
        return self.ask_after_failed_collectives()

    def check(self) -> None:
        ending = self.conductor.ending()
        if self.conductor.phase is not Phase.OVER:
            stuck = [
                (w.me, w.protocol.generation, w.protocol.call, getattr(w.waits, "tag", w.waits))
                for w in self.workers
                if w.alive
            ]
            raise Violation(f"nothing can happen any more: {stuck} {self.conductor.membership}")
        self.seen[ending.outcome] += 1
        if ending.outcome == "interrupted":
            self.look_if_stored()
        if ending.outcome != "finished":
            self.seen[ending.message[:60]] += 1
            return
        done = [w for w in self.workers if w.done and list(w.history) == self.standing]
        if not done:
            raise Violation(f"nobody that is done has what the journal has {len(self.standing)}")
        reached = 0
        for start, stop in sorted(done[0].used):
            if start != reached:
                raise Violation(f"position {min(start, reached)} missing or used twice")
            reached = stop
        if reached != self.scenario.epochs * self.scenario.length:
            raise Violation(f"samples used up to {reached} alone")

    def look_if_stored(self) -> None:
        if self.stored_step >= min(self.stopped_at, len(self.standing)):
            self.seen["stored"] += 1
            return
        have = [w.me for w in self.workers if w.alive and w.protocol.holder]
        have = [me for me in have if me in self.conductor.holders]
        if have:
            raise Violation(f"{have} have step {self.stopped_at}, stored is {self.stored_step}")


LedSimulation.answers = {
    want: getattr(LedSimulation, method.__name__) for want, method in Simulation.answers.items()
} | {wants.StoreState: LedSimulation.store_state}
