"""A run in virtual time: the conductor that ships, and around it a shell that makes everything up.

The workers are what they are for a conductor: processes that start, send messages, get on, hang or
die. Of a step only its length and its commit exist. The shell checks what must hold at each action.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, field

from elastix.comm.protocol.membership import Membership
from elastix.config import FailureConfig
from elastix.errors import ConfigError, QuorumLost
from elastix.events import Resumed, RunStarted, StateStored, StepCommitted, WorkerLost
from elastix.train.control.actions import (
    EndWorker,
    Forget,
    KillWorker,
    Relay,
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

TICK_S = 0.2
START_S, CATCH_UP_S, NEWS_S, RECOVER_S = 10.0, 2.0, 0.02, 0.1


@dataclass
class Worker:
    """A process: what befell it, and how far it is."""

    id: int
    node: str
    ready: bool = False
    holder: bool = False
    generation: int = 0
    leaves: bool = False
    hung: bool = False
    silent: bool = False
    cut_off: bool = False
    busy: float = 1.0  # own work for a step, in lengths of a step
    waited_s: float = 0.0
    stores: bool = False  # it was told to, and has not since it was given the State
    told: list = field(default_factory=list)


class World:
    """See the module. `at` says what is to befall it, `run` plays until the run is over."""

    def __init__(
        self,
        workers,
        *,
        spares=0,
        shadows=0,
        in_parts=False,
        min_workers=1,
        max_workers=None,
        steps=60,
        step_s=1.0,
        heartbeat_s=1.0,
        tick_s=TICK_S,
        start_s=START_S,
        nodes=1,
        first_step_s=0.0,
        store_s=None,
        **failure,
    ):
        self.failure = FailureConfig(**failure)
        most = max_workers or workers
        self.terms = RunTerms(
            founders=workers,
            min_workers=min_workers,
            max_workers=most,
            failure=self.failure,
            first_step_s=first_step_s,
            shadows=shadows,
            in_parts=in_parts,
        )
        self.conductor = Conductor(self.terms)
        self.now = 0.0
        self.places = self.free = most + spares + shadows
        self.shadows = set()  # whoever was told to be one
        self.level = set()  # of them, those that have the State
        self.noticed = set()
        self.took_seats = []  # shadows that came in without anything copied
        self.heirs = set()  # of them, those that went on when all others were lost
        self.dies_when_called = False
        self.computes_with = {}  # what is not the usual, by worker
        self.other_code = set()  # workers that run on nodes with other code
        self.confirms = True  # shadows are found equal
        self.coming = False  # further room is on its way
        self.draining = set()
        self.alive: dict[int, Worker] = {}
        self.started, self.ended, self.vacated, self.forgotten = set(), set(), set(), set()
        self.written, self.entries = [], []
        self.sent = Counter()
        self.group = Membership(0, ())
        self.proposal = None
        self.step, self.steps, self.step_s = 0, steps, step_s
        self.stored_step = 0
        self.store_s = store_s  # what storing takes, if they do so when they are told to
        self.begun_s = 0.0
        self.stalled = True
        self.dismissed = self.paused = False
        self._nodes, self._start_s = nodes, start_s
        self._heartbeat_s, self._tick_s = heartbeat_s, tick_s
        self._queue, self._count = [], 0
        self._do(
            self.conductor.begin([RunStarted(name="r", seed=0, config={}, scaling={}, versions={})])
        )
        self._tick()
        self._beat()

    # ------------------------------------------------------------------ what a test does

    def at(self, when, what):
        """Have `what` happen at a time; a function of the world."""
        self._later(when - self.now, lambda: what(self))

    def run(self, until=3600.0):
        """Play until the run is over; the event that ends it."""
        while self.conductor.phase is not Phase.OVER:
            assert self._queue, "nothing will ever happen again"
            when, _, what = heapq.heappop(self._queue)
            assert when <= until, f"not over at {until}: {self.conductor.membership}, {self.group}"
            self.now = when
            what()
        self._do(self.conductor.close())
        assert not self.conductor.workers
        assert self.conductor.close() == []
        assert self.started == self.ended, "somebody is left behind"
        return self.conductor.ending()

    def play(self, until):
        """Play up to a time."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until

    def kill(self, worker):
        """A process dies; the others' operation fails, and the shell hears of it soon."""
        if self.alive.pop(worker, None) is None:
            return
        self._later(NEWS_S, lambda: self._do(self.conductor.died(worker, self.now)))
        if worker in self.group.members:
            self.stalled = True
            for other in self.group.members:
                if other in self.alive and not self.alive[other].hung:
                    self._say(other, Suspect(self.group.generation, "connection reset"))

    def notice(self, worker):
        """A worker is told to go."""
        if worker in self.alive:
            self.noticed.add(worker)
            self._say(worker, Leave("notice"))

    def events(self, kind):
        """What was written of a kind."""
        return [event for event in self.written if isinstance(event, kind)]

    def take_over(self):
        """The conductor's process dies, and another one goes on."""
        state = RunState()
        for write in self.entries:
            state.take(write.event, write.sequence)
        self.conductor = Conductor(self.terms)
        found = [
            Found(
                worker=worker.id,
                pid=1,
                node=worker.node,
                device="cpu",
                generation=worker.generation,
                address=("host", worker.id) if worker.ready else None,
                ready=worker.ready,
                holder=worker.holder,
                shadow=worker.id in self.level - self.heirs,
                noticed=worker.id in self.noticed,
            )
            for worker in self.alive.values()
        ]
        stored = Resumed(step=self.stored_step, ref="")
        known = set(self.started)
        self.ended |= self.started - set(self.alive)
        self._do(self.conductor.take_over(state, found, known, stored, self.now))
        self.free = self.places - len(self.alive)
        self._offer()

    # ------------------------------------------------------------------ the shell

    def _do(self, actions):
        for action in actions:
            self.sent[type(action).__name__] += 1
            match action:
                case Tell():
                    self._tell(action.to, action.message)
                case Write():
                    self.written.append(action.event)
                    self.entries.append(action)
                case StartWorker(worker):
                    assert self.free > 0
                    assert worker not in self.started
                    self.free -= 1
                    self.started.add(worker)
                    self.alive[worker] = Worker(worker, f"node{worker % self._nodes}")
                    self._later(self._start_s, lambda worker=worker: self._up(worker))
                case KillWorker(worker) | EndWorker(worker):
                    assert worker in self.started - self.ended
                    self.ended.add(worker)
                    gone = self.alive.pop(worker, None)
                    if gone is not None and worker in self.group.members:
                        self.stalled = True
                case Vacate(worker, place):
                    assert worker in self.started - self.vacated
                    self.vacated.add(worker)
                    self.free += place is Vacated.FREE
                case Forget(worker):
                    self.forgotten.add(worker)
                case Relay():
                    pass
        if any(isinstance(action, Vacate) for action in actions):
            self._offer()

    def _offer(self):
        more = self.coming or self.free > 0
        room = self.conductor.room(
            self.free, more=more, now=self.now, draining=tuple(self.draining)
        )
        self._do(room)

    def _tick(self):
        self._offer()
        self._do(self.conductor.tick(self.now))
        if self.conductor.phase is Phase.GOING_BACK:
            step = self.stored_step
            resumed = Resumed(step=step, ref="stored" if step else "")
            actions = self.conductor.went_back(resumed, self.now)
            if resumed in [action.event for action in actions if isinstance(action, Write)]:
                self.step = step
            self._do(actions)
        self._later(self._tick_s, self._tick)

    def _later(self, seconds, what):
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, what))

    def _say(self, worker, message):
        self._do(self.conductor.hear(worker, message, self.now))

    def _tell(self, to, message):
        match message:
            case Membership():
                assert message.generation > self.group.generation
                assert set(message.members) <= self.started - self.ended
                if message.urgent and any(w.holder for w in self.alive.values()):
                    holders = {w.id for w in self.alive.values() if w.holder}
                    assert set(message.members) & set(self.alive) <= holders, "without the State"
                shadows = (self.shadows - self.heirs).intersection(message.members)
                as_heir = len(message.members) == 1
                level = shadows <= self.level and not message.urgent
                assert not shadows or as_heir or level, "a shadow beside others, without the State"
                if set(message.members) <= self.level - self.heirs:
                    self._later(NEWS_S, lambda: self._succeed(message))
                if message.urgent:
                    self.stalled, self.proposal = True, None
                    self._later(RECOVER_S, lambda: self._meet(message))
                else:
                    self.proposal = message
            case CatchUp():
                assert message.donors
                if message.shadow:
                    self.shadows.add(to)
                self._later(CATCH_UP_S, lambda: self._caught_up(to))
            case Dismiss():
                self.dismissed = True
            case StoreSoon():
                for worker in self.alive.values():
                    worker.stores = worker.stores or to in (None, worker.id)

    # ------------------------------------------------------------------ the workers

    def _up(self, worker):
        if worker in self.alive and worker in self.other_code:
            error = ConfigError("a node has elastix 9, and the driver has 8")
            outcome = Outcome(kind=OutcomeKind.OTHER_CODE, error=error)
            self._do(self.conductor.ended(worker, outcome, self.now))
        elif worker in self.alive:
            here = self.alive[worker]
            self._say(worker, Started(pid=worker + 1, node=here.node, device="cpu"))
            here.ready = True
            with_what = self.computes_with.get(worker, "processor a")
            self._say(worker, Ready(("host", worker), with_what))

    def _caught_up(self, worker):
        if worker in self.alive:
            self.level |= self.shadows & {worker}
            self._say(worker, CaughtUp(equal=worker not in self.shadows))
            if worker in self.shadows and self.confirms:
                self._say(worker, CaughtUp())

    def shadow_holds(self):
        """Whether a shadow has the State, so that all others may be lost."""
        return bool(self.level & set(self.alive) - self.heirs)

    def _succeed(self, membership):
        """The shadow has received all that was told to the journal."""
        (heir,) = membership.members
        self.heirs.add(heir)
        if self.dies_when_called:
            self.kill(heir)
        elif heir in self.alive:
            self.group = Membership(0, ())
            events = self.step + 1
            said = Succeeded(step=self.step, since=events, sequence=events, equal=True)
            self._say(heir, said)

    def _meet(self, membership):
        """All of them enter, if all are there and nothing newer has come."""
        if membership is not self.conductor.membership and membership.urgent:
            newest = self.conductor.membership
            if newest.urgent:
                return
        if not all(map(self._answers, membership.members)):
            return  # they wait for each other; the conductor finds out
        members = [self.alive[worker] for worker in membership.members]
        before = self.group
        self.group, self.stalled = membership, False
        self.begun_s = self.now
        # Who is let go was told so in the vote, and goes before anybody enters.
        for worker in set(before.members) - set(membership.members):
            if worker in self.alive and self.alive[worker].leaves:
                del self.alive[worker]
                kind = OutcomeKind.LEFT
                outcome = Outcome(kind=kind, generation=membership.generation, step=self.step)
                self._do(self.conductor.ended(worker, outcome, self.now))
        for member in members:
            member.stores = member.stores and member.holder  # whoever is given the State forgets
            member.holder, member.generation = True, membership.generation
            if membership.size > 1 and member.id in self.shadows - self.heirs:
                self.shadows.discard(member.id)
                self.level.discard(member.id)
                self.took_seats.append(member.id)
            self._say(member.id, Entered(membership.generation))
        if self.group is membership:
            self._later(self.step_s, lambda: self._commit(membership))

    def _commit(self, group):
        """A step is over, unless somebody did not get to its end."""
        if self.group is not group or self.stalled:
            return
        if not all(map(self._answers, group.members)):
            self.stalled = True
            return
        members = [self.alive[worker] for worker in group.members]
        length = max(member.busy for member in members)
        if self.now < self.begun_s + length * self.step_s - 1e-9:
            self._later(self.begun_s + length * self.step_s - self.now, lambda: self._commit(group))
            return
        for member in members:
            member.waited_s += (length - member.busy) * self.step_s
        if len(members) < self.terms.min_workers:
            if self.dismissed:
                error = QuorumLost("in vain")
                self._all_end(members, Outcome(kind=OutcomeKind.DISMISSED, error=error))
                return
            self.paused = True
        else:
            self.paused = False
            self.step += 1
            event = StepCommitted(
                step=self.step, generation=group.generation, world_size=len(members), batches=()
            )
            self._say(group.members[0], RecordEvents(((self.step, event),)))
            if self.store_s is not None and members[0].stores:
                members[0].stores = False
                self._store_soon(members)
        if self.step >= self.steps:
            finished = Outcome(
                kind=OutcomeKind.FINISHED, generation=group.generation, step=self.step
            )
            self._all_end(members, finished)
        else:
            self._cross(group)

    def _store_soon(self, members):
        """In the background, as long as one of those lives who have a copy."""
        step = self.step

        def done():
            if any(member.id in self.alive for member in members):
                self.store(step, "notice")

        self._later(self.store_s, done)

    def store(self, step, reason):
        """The State after `step` is in the store."""
        event = StateStored(ref="stored", step=step, reason=reason, stored_bytes=0, store_s=0.0)
        self.stored_step = step
        self.written.append(event)
        self.entries.append(Write(event))
        self.conductor.stored(event)

    def _cross(self, group):
        """The boundary between two steps."""
        self.begun_s = self.now
        proposal = self.proposal
        if proposal is not None and all(map(self._answers, proposal.members)):
            self.proposal, self.paused = None, False
            for worker in set(group.members) - set(proposal.members):
                self.alive[worker].leaves = True
            self._meet(proposal)
        if self.group is group:
            self._later(self.step_s, lambda: self._commit(group))

    def _answers(self, worker):
        there = self.alive.get(worker)
        return there is not None and not (there.hung or there.silent or there.cut_off)

    def _all_end(self, members, outcome):
        for member in members:
            del self.alive[member.id]
            self._do(self.conductor.ended(member.id, outcome, self.now))

    def _beat(self):
        """Of all workers at once; those that do the same share the heartbeat."""
        same = {}
        hear, now = self.conductor.hear, self.now
        for worker in list(self.alive.values()):
            if not worker.ready or worker.silent:
                continue
            waiting = (self.stalled or self.paused) and not worker.hung
            passed = -1 if worker.hung or self.stalled else self.step
            key = (worker.generation, waiting, passed, worker.waited_s)
            beat = same.get(key)
            if beat is None:
                beat = same[key] = Heartbeat(
                    generation=worker.generation,
                    step=self.step,
                    call=(self.step, 1 if worker.generation else 0),
                    passed=passed,
                    waiting=waiting,
                    waited_s=worker.waited_s,
                )
            actions = hear(worker.id, beat, now)
            if actions:
                self._do(actions)
        self._later(self._heartbeat_s, self._beat)


def lost(world):
    """Who was lost, and why, in order."""
    return [(event.worker, event.cause) for event in world.events(WorkerLost)]
