"""The conductor: leads a run. Pure; without Ray, threads, or a clock of its own.

A shell tells it what has happened, with the time, and carries out the actions that it returns. It
decides who is in the group (by a Roster), whom it takes for lost (by a FailureDetector), whether
enough workers are left (by a Quorum), when others are started, and how the run ends. It knows
nothing of steps and samples but what the journal is told, and never sees a tensor.

Two shells stand around it: the controller on Ray and the local run. A third one is virtual time.
Calls must not overlap; each takes time that does not grow with the number of workers, but for
copies of the member list when the group changes.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice

from elastix.comm.network.door import Address
from elastix.comm.protocol.membership import Membership, Roster
from elastix.errors import ElastixError
from elastix.events import (
    Event,
    GenerationFormed,
    Resumed,
    RunEnded,
    StateNotStored,
    StateStored,
    StepCommitted,
    StopAsked,
    WorkerLeft,
    WorkerLost,
    WorkerNotStarted,
    WorkerRaised,
    WorkerSlow,
    WorkerStarted,
)
from elastix.train.control import limits
from elastix.train.control.actions import (
    Action,
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
from elastix.train.control.divergence import Divergences, as_event
from elastix.train.control.failure_detector import FailureDetector
from elastix.train.control.interruption import Interruption
from elastix.train.control.messages import (
    CatchUp,
    CaughtUp,
    Dismiss,
    Diverged,
    Entered,
    FromWorker,
    Heartbeat,
    Leave,
    Measured,
    Outcome,
    OutcomeKind,
    Ready,
    RecordEvents,
    SawDeath,
    Started,
    StoreSoon,
    Succeeded,
    Suspect,
    WatchNeighbour,
)
from elastix.train.control.quorum import Quorum
from elastix.train.control.run_state import RunState
from elastix.train.control.shadows import Shadows
from elastix.train.control.slow_workers import SlowNews
from elastix.train.control.terms import AtWork, Found, Phase, RunTerms
from elastix.train.control.usage_events import Measures

RECOVERY_S = 1.0
"""Starting a worker costs seconds of a core, which the survivors of a loss need for an instant."""

_SUSPICION_S = 1.0
"""A death is known within milliseconds; only if none is for so long is the group made anew."""

_SLOW = 1.5  # times the others' part of a step: worth a line
_LINGER_S = 5.0
_WATCHED_BY = 2  # of those that ran on its node before it, and of those that come after it


class Conductor:
    """See the module. All times are seconds of one monotonic clock.

    Attributes:
        error: what ends the run early; what came first counts.
        founder: the only worker that may found the group anew: others have nothing of the State.
        state: what the run has told so far.
    """

    def __init__(self, terms: RunTerms) -> None:
        self.error: ElastixError | None = None
        self.state = RunState()
        self._terms = terms
        self._failure = terms.failure
        self._roster = Roster(terms.founders, terms.max_workers, terms.min_workers)
        self._shadows = Shadows(terms)
        self._slow_news = SlowNews()
        self._measures = Measures()
        self._detector = FailureDetector(terms.failure.hang_timeout_s, terms.first_step_s)
        self._quorum = Quorum(terms.min_workers, terms.failure)
        self._workers: dict[int, AtWork] = {}
        self._nodes: dict[str, dict[int, None]] = {}  # by node its workers, the youngest last
        self._released: dict[int, float] = {}  # through with their work, and since when
        self._suspicions: dict[int, float] = {}  # generation to when it is made anew, if it stands
        self._next_worker = 0
        self._unspent = 0  # numbers of workers that are not here, and of which nothing was told
        self._room, self._more = 0, False
        self._draining: Collection[str] = ()
        self._partly: Collection[int] = ()
        self._vacant_since = float("-inf")  # of the last loss, until a step was committed
        self._ticked = float("inf")  # when it was told last that time has passed
        self._finished = False
        self._interruption = Interruption()
        self._going_back = self._anew = False
        self._all_go = False
        self.founder: int | None = None
        self._divergences = Divergences(replaces=terms.failure.replace)
        self._differ: Diverged | None = None  # at a boundary, as was told since the last tick
        self._actions: list[Action] = []

    @property
    def phase(self) -> Phase:
        """Where the run stands."""
        if self.error is not None or self._interruption.over or self._roster.over:
            return Phase.OVER
        return Phase.GOING_BACK if self._going_back else Phase.RUNNING

    @property
    def workers(self) -> Collection[int]:
        """Those that are at work."""
        return self._workers.keys()

    @property
    def membership(self) -> Membership:
        """The newest."""
        return self._roster.newest

    @property
    def holders(self) -> Collection[int]:
        """Members that are known to have the State."""
        return self._roster.holders

    @property
    def extinct(self) -> bool:
        """Whether nobody has the State any more, of those that had it."""
        return self._roster.extinct

    def ending(self) -> RunEnded:
        """How the run ended, for the journal."""
        outcome, message = "finished", ""
        if self.error is not None:
            outcome, message = "failed", str(self.error)
        elif not self._roster.over:
            why = "It was ended before its train function was through."
            outcome, message = "interrupted", self._interruption.reason or why
        return RunEnded(outcome=outcome, step=self.state.step, message=message)

    # ------------------------------------------------------------------ what the shell says

    def begin(self, events: Sequence[Event]) -> list[Action]:
        """The run begins; these come first in its journal."""
        for event in events:
            self._write(event)
        return self._done()

    def take_over(
        self,
        state: RunState,
        found: Sequence[Found],
        known: Collection[int],
        stored: Resumed,
        now: float,
    ) -> list[Action]:
        """Go on with the workers of a conductor that was killed.

        Args:
            state: what its journal says.
            found: workers that are at work.
            known: ids of all workers that may still have a name somewhere.
            stored: where to go on from if none of them has the State.
            now: the time.
        """
        self.state = state
        present = state.of_use(found)
        founding = [one.worker for one in present if one.worker in state.founding]
        holders = [one.worker for one in present if one.holder]
        for worker in {one.worker for one in found} - {one.worker for one in present}:
            self._do(EndWorker(worker))
        for one in present:
            self._workers[one.worker] = AtWork(one.pid, device=one.device, address=one.address)
            self._workers[one.worker].ready = one.ready
            self._place(one.worker, one.node, one.lifeline)
            self._detector.hear(one.worker, Heartbeat(), now)
        # Also of those that could not be started: whoever takes over next takes them for gone.
        self._next_worker = max([-1, *state.started, *state.out, *known, *self._workers]) + 1
        for one in present:
            if one.shadow:
                self._shadows.level(one.worker, one.operation)
        if not (holders or founding) and (heir := self._shadows.call(stored)) is not None:
            holders = [heir]
        others = {*holders, *founding, *self._shadows}
        waiting = [w for w in self._workers if w in state.started and w not in others]
        newest = max([state.generation, *(one.generation for one in present)])
        for worker in sorted(state.unaccounted(self._workers)):
            self._write(WorkerLost(worker=worker, rank=-1, generation=newest, cause="died unseen"))
        self._unspent = self._next_worker - len(state.out.union(self._workers))
        if not (holders or founding):
            self._write(stored)
        self._push(self._roster.take_over(newest, holders, waiting, founding))
        for worker in (one.worker for one in present if one.noticed):
            if worker in self._roster.members:
                self._ask_to_leave(worker, self._workers[worker], "notice")
        if state.stopping:  # of which those who are here may not have heard
            self._interrupt(state.stopping, now)
        return self._done()

    def room(
        self,
        free: int,
        *,
        more: bool,
        now: float,
        draining: Collection[str] = (),
        partly: Collection[int] = (),
    ) -> list[Action]:
        """Where workers can be started.

        Args:
            free: places that are free now.
            more: further ones may come, or are free.
            now: the time.
            draining: nodes that are to be taken away.
            partly: workers of several processes, some of which are on such a node.
        """
        self._room, self._more = free, more
        self._draining, self._partly = draining, partly
        self._fill(now)
        return self._done()

    def hear(self, worker: int, message: FromWorker, now: float) -> list[Action]:  # noqa: C901 - a case per message
        """A worker says something. Nothing comes of it if it is not at work (any more)."""
        member = self._workers.get(worker)
        if member is None:
            return []
        match message:
            case Heartbeat():
                self._detector.hear(worker, message, now)
                self._shadows.at(worker, message.call[0])
            case Measured():
                self._measures.hear(worker, message.values)
            case RecordEvents():
                self._record(message, now)
            case Entered():
                self._push(self._roster.entered(worker, message.generation))
                self._shadows.entered(worker)
                if self._interruption.reason:  # it may not have heard, or was given a State since
                    self._do(Tell(worker, StoreSoon()))
                if self._roster.settled:
                    self._detector.settled(self._roster.members)
            case Started():
                member.pid, member.device = message.pid, message.device
                self._place(worker, message.node, message.lifeline)
                self._detector.hear(worker, Heartbeat(), now)
            case Ready():
                self._ready(worker, member, message)
            case CaughtUp() if worker in self._shadows:
                self._shadows.level(worker)
                if message.equal:
                    self._push(self._roster.shadow_level(worker))
            case Succeeded():
                self._succeeded(worker, message, now)
            case CaughtUp():
                self._push(self._roster.level(worker))
            case Suspect():
                if self._detector.suspect(worker, message, now):
                    self._suspicions.setdefault(message.generation, now + _SUSPICION_S)
            case SawDeath():
                self._lose(message.worker, "died", now)
            case Diverged():
                self._diverged(message, now)
            case Leave():
                if not member.leaves:
                    self._ask_to_leave(worker, member, message.cause)
            case _:
                self._do(Relay(worker, message))
        return self._done()

    def died(self, worker: int, now: float) -> list[Action]:
        """A worker's process is gone."""
        self._lose(worker, "died", now)
        return self._done()

    def ended(self, worker: int, outcome: Outcome, now: float) -> list[Action]:
        """A worker's run has ended, in one way or another."""
        member = self._workers.get(worker)
        if member is None:
            return []
        match outcome.kind:
            case OutcomeKind.FINISHED:
                self._finished = True
                self._release(worker, now)
                self._do(Forget(worker))
                self._push(self._roster.finished(worker, outcome.generation))
            case OutcomeKind.LEFT:
                self._release(worker, now)
                self._say_farewell(worker, member, outcome)
                self._push(self._roster.left(worker, outcome.generation))
            case OutcomeKind.FENCED if member.leaves:  # it was let go before it heard that it was
                self._release(worker, now)
                self._push(self._roster.lost(worker))
                newest = self._roster.newest.generation
                self._say_farewell(worker, member, replace(outcome, generation=newest))
            case OutcomeKind.DISMISSED:
                self._release(worker, now)
                if self._roster.holders.isdisjoint(self._workers):  # rank 0 may still be storing
                    self.fail(outcome.error)
                # The others may have gone on to meet it in a newer group before they heard.
                self._push(self._roster.left(worker, outcome.generation))
            case OutcomeKind.RAISED:
                self._write(
                    WorkerRaised(
                        worker=worker,
                        rank=outcome.rank,
                        step=outcome.step,
                        traceback=outcome.traceback,
                    )
                )
                self.fail(limits.raised(outcome, worker))
            case OutcomeKind.FREE:  # a mate of this one has died, and it was not heard yet
                self._lose(worker, "died", now)
            case OutcomeKind.OTHER_CODE if not self.state.generation:  # a founder
                self.fail(outcome.error)
                self._lose(worker, outcome.kind, now)
            case _:
                self._lose(worker, outcome.kind, now)
        return self._done()

    def tick(self, now: float) -> list[Action]:
        """Time has passed. To be called a few times a second."""
        away_s, self._ticked = now - self._ticked, now
        timeout_s = self._failure.hang_timeout_s
        if away_s > timeout_s / 2:
            # This process was stopped, and perhaps all others were: nobody is to blame for that. A
            # part of it counts all the same: where ticks always come so late, time passes too.
            away_s -= timeout_s / 4
            self._detector.was_away(away_s, now)
            self._interruption.was_away(away_s, now)
            self._quorum.was_away(away_s, now)
        if self.phase is not Phase.OVER:
            self._interruption.look(now, held=self._held)
        if self.phase is not Phase.RUNNING:
            return []
        if self._differ is not None:
            return self.judge(now)
        extinct = self._roster.extinct and self._shadows.heir is None
        if extinct and self._shadows.listens(now):
            self._check_hangs(now)
            return self._done()
        if extinct and (self._failure.replace or self._shadows.can_go_on):
            self._going_back = True
            return []
        if extinct:  # who had it has left, and whoever was to go on from it died meanwhile
            self.fail(limits.none_left(self.state.step))
            return []
        self._make_anew(now)
        self._check_hangs(now)
        self._check_pace(now)
        measured = self._measures.due(self._roster.members, self.state.step, now)
        if measured is not None:
            self._write(measured)
        self._check_nodes(now)
        self._check_quorum(now)
        self._let_go(now)
        self._invite_shadows()
        self._fill(now)
        self._found_with_fewer()
        return self._done()

    def went_back(self, stored: Resumed, now: float, *, anew: bool = False) -> list[Action]:
        """What was not stored is given up: found the group anew, from a shadow's State or this.

        If it is held in parts, by those who hold them: as the next worker, and as long as it is
        alone nobody else can found the group. Nothing is given up if a joiner has come in: what it
        was given it may have said after all others were lost. With `anew`, this time or since
        the last, not even who is about to start is of use: it was told something else than others.
        """
        apart, self._going_back = self._divergences.goes_back, False
        self._anew = self._anew or anew
        if not apart and self._roster.holders:
            self._push(self._roster.doubt(self._roster.newest.generation))
            return self._done()
        self.fail(self._divergences.went_back(stored))
        if self.error is not None:
            return []
        self._quorum.start_over()
        heir = None if apart else self._shadows.call(stored)
        if heir is not None:
            self._push(self._roster.start_over(heir))
            return self._done()
        self._clear_out(all_of_them=stored.held or self._anew)
        self.founder, self._anew = self._next_worker if stored.held else None, False
        self._write(stored)
        self._push(self._roster.start_over(founders=1 if stored.held else self._terms.founders))
        self._fill(now)
        return self._done()

    def differ(self, said: Diverged) -> None:
        """States that were compared at a boundary differ; `judge` or the next tick looks at it."""
        self._differ = said

    def judge(self, now: float) -> list[Action]:
        """If States were said to differ: what is done about it, also if all go back anyway."""
        said, self._differ = self._differ, None
        goes_back, self._going_back = self._going_back, False
        if said is not None:
            self._diverged(said, now)
        self._going_back = self._going_back or goes_back
        return self._done()

    def told_late(self, entries: Sequence[tuple[int, Event]]) -> list[Action]:
        """What lost workers had not told, and what the run goes on from needs."""
        for sequence, event in entries:
            self._write(event, sequence)
        return self._done()

    def stop(self, reason: str, now: float) -> list[Action]:
        """End the run when its State is stored: see Interruption."""
        if self.phase is not Phase.OVER:
            self._interrupt(reason, now)
        return self._done()

    def stored(self, event: StateStored) -> None:
        """A State is in the store; the shell has written that."""
        self.state.take(event)
        self._interruption.stored(event.step, event.reason)

    def not_stored(self, event: StateNotStored) -> list[Action]:
        """A State could not be stored; the shell has written that."""
        if self._interruption.not_stored(event.step, event.reason):
            self._do(Tell(None, StoreSoon()))
        return self._done()

    def fail(self, error: ElastixError | None) -> None:
        """The run cannot go on, if there is an error. What came first counts."""
        self.error = self.error or error

    def close(self) -> list[Action]:
        """The run is over: end all workers. Their deaths are no losses."""
        for worker in (*self._workers, *self._released):
            self._do(EndWorker(worker))
        self._workers.clear()
        self._released.clear()
        return self._done()

    # ------------------------------------------------------------------ what a worker says

    def _ready(self, worker: int, member: AtWork, message: Ready) -> None:
        if member.leaves:
            if worker in self._shadows:  # which has lost its donor on its way in
                self._push(self._roster.shadow_lonely(worker))
                if worker not in self._roster.members:
                    self._ask_to_leave(worker, member, member.leaves)
            return
        if worker not in self.state.started:
            self._write(
                WorkerStarted(
                    worker=worker,
                    pid=member.pid,
                    node=member.node,
                    device=member.device,
                    computes_with=message.computes_with,
                )
            )
        member.address, member.ready = message.address, True
        if self._shadows.takes(worker, self._roster):
            self._shadows.at(worker, message.operation)
            self._push(self._roster.shadow_lonely(worker))
            self._invite_shadows()
            return
        self._push(self._roster.ready(worker))
        if worker in self._roster.watching:
            donors = map(self._address, self._roster.donors())
            self._do(Tell(worker, CatchUp(tuple(there for there in donors if there is not None))))

    def _address(self, worker: int) -> Address | None:
        """Where it can be followed; nowhere if it was dismissed, and its State is there yet."""
        return self._workers[worker].address if worker in self._workers else None

    def _invite_shadows(self) -> None:
        for worker, donors in self._shadows.invitations(self._roster, self._address):
            self._do(Tell(worker, CatchUp(donors, shadow=True)))

    def _interrupt(self, reason: str, now: float) -> None:
        if not self.state.stopping:
            self._write(StopAsked(reason=reason))
        if not self._interruption.reason:
            self._do(Tell(None, StoreSoon()))
        self._interruption.ask(reason, self.state.step, self.state.stored, now)
        self._interruption.look(now, held=self._held)

    @property
    def _held(self) -> bool:
        """Whether somebody has the State, or a shadow that goes on in place of all others.

        Or processes that are of no worker any more may have it in parts, and found the group.
        """
        roster, shadows = self._roster, self._shadows
        in_parts = self._terms.in_parts and (roster.extinct or self._founds_from_parts)
        return bool(roster.holders) or shadows.can_go_on or shadows.heir is not None or in_parts

    @property
    def _founds_from_parts(self) -> bool:
        """Whether one worker is to found the group, and has not yet."""
        return self.founder is not None and not self._roster.founded

    def _succeeded(self, worker: int, said: Succeeded, now: float) -> None:
        """A shadow goes on in place of the group, unless there is something better."""
        if self._shadows.heir != worker:
            return
        events = self._shadows.succeeded(worker, said, self.state)
        for event in events:
            self._write(event)
        if not events:
            self._lose(worker, "behind" if said.equal else "diverged", now)

    def _record(self, message: RecordEvents, now: float) -> None:
        for sequence, event in message.entries:
            if self.state.knows(event, sequence):
                continue
            self._write(event, sequence)
            newest = self._roster.newest.generation
            if isinstance(event, StepCommitted) and event.generation == newest:
                self._vacant_since = float("-inf")
                self._fill(now)

    def _diverged(self, said: Diverged, now: float) -> None:
        """Workers hold different States: what most hold stands, or what was stored."""
        if self._going_back and not self._divergences.goes_back:
            self._differ = self._differ or said  # by one that came in as all others were lost
        verdict = None if self._going_back else self._divergences.judge(said, self._workers)
        if isinstance(verdict, ElastixError):
            if said.unseen:  # nor does the next run go on from what was stored since
                self._write(as_event(said, "went back"))
            self.fail(verdict)
        elif verdict is not None:
            self._write(verdict)
            if self._divergences.goes_back:
                self._going_back = True
                self._clear_out()  # at once: nothing that they have on the way is to be stored
                return
            for worker in verdict.apart:
                self._lose(worker, "diverged", now)

    def _ask_to_leave(self, worker: int, member: AtWork, cause: str) -> None:
        member.leaves = cause
        if worker in self._roster.members:
            self._push(self._roster.leave(worker))
        else:  # nobody would notice
            self._roster.leave(worker)
            self._take_out(worker)
            self._say_farewell(worker, member, Outcome(kind=OutcomeKind.LEFT, step=self.state.step))
            self._do(EndWorker(worker))

    # ------------------------------------------------------------------ those who go

    def _say_farewell(self, worker: int, member: AtWork, outcome: Outcome) -> None:
        """A worker has gone as it should."""
        self._write(
            WorkerLeft(
                worker=worker,
                generation=outcome.generation,
                step=outcome.step,
                cause=member.leaves,
            )
        )
        self._do(Forget(worker))
        draining = member.leaves == "draining"
        self._do(Vacate(worker, Vacated.DRAINING if draining else Vacated.FREE))

    def _lose(self, worker: int, cause: str, now: float) -> None:
        """A worker is dead or taken for dead: write it down, tell the survivors, then mop up."""
        if worker not in self._workers:
            return
        begun, newest = bool(self._workers[worker].pid), self._roster.newest
        self._take_out(worker)
        rank = newest.rank(worker) if worker in self._roster.members else -1
        gone = WorkerLost(worker=worker, rank=rank, generation=newest.generation, cause=cause)
        self._write(gone if begun else WorkerNotStarted(worker=worker, cause=cause))
        self._push(self._roster.lost(worker))
        self._do(KillWorker(worker))
        self._do(Forget(worker))
        if worker == self.founder and not self._roster.founded:
            self._going_back = True  # others would found the group from another State
        state, replace = self.state, self._failure.replace
        losses, size = (state.losses, state.losses_in_a_row), self._terms.founders
        self.fail(limits.too_many_losses(self._failure, *losses, size, state.step))
        if replace:
            self._vacant_since = now
        elif self._roster.extinct and not self._shadows.can_go_on:
            self.fail(limits.none_left(state.step))
        self._do(Vacate(worker, Vacated.FREE if replace else Vacated.UNUSED))

    def _take_out(self, worker: int) -> None:
        self._shadows.forget(worker)
        self._detector.forget(worker)
        member = self._workers.pop(worker)
        if member.node:
            self._nodes[member.node].pop(worker, None)

    def _clear_out(self, *, all_of_them: bool = False) -> None:
        """End those who have what is given up, or all."""
        for worker in [w for w, member in self._workers.items() if member.ready or all_of_them]:
            # A joiner that has caught up halfway must not pass for one that has the State.
            self._roster.lost(worker)
            self._take_out(worker)
            self._do(Forget(worker))
            self._do(EndWorker(worker))
            self._do(Vacate(worker, Vacated.FREE))

    def _release(self, worker: int, now: float) -> None:
        self._take_out(worker)
        self._released[worker] = now

    def _let_go(self, now: float) -> None:
        """End processes that were let go, once nobody waits for what they have sent."""
        while self._released:
            worker, since = next(iter(self._released.items()))
            if not self._roster.settled and now - since <= _LINGER_S:
                return
            del self._released[worker]
            self._do(EndWorker(worker))

    # ------------------------------------------------------------------ as time passes

    def _make_anew(self, now: float) -> None:
        while self._suspicions:
            generation, due = next(iter(self._suspicions.items()))
            if due > now:
                return
            del self._suspicions[generation]
            self._push(self._roster.doubt(generation))

    def _check_hangs(self, now: float) -> None:
        """Take out who is silent, who holds up all others, and who cannot be reached by them.

        A run that cannot get on whoever goes is ended.
        """
        for worker in self._detector.silent(now):
            self._lose(worker, "silent", now)
        members = self._roster.members
        if self._roster.leaving:  # the others wait for them too, until they are gone
            members = {*members, *self._roster.leaving}
        for worker in self._detector.holding_up(members, now):
            self._lose(worker, "stuck", now)
        if self._detector.standing_still(members, now):
            self._push(self._roster.doubt(self._roster.newest.generation))
        trusted = self._roster.holders or self._roster.members
        cut_off = self._detector.unreachable(trusted, now)
        if cut_off is not None:
            self._lose(cut_off, "unreachable", now)
        self.fail(self._detector.hopeless(now))

    def _check_pace(self, now: float) -> None:
        """Tell who is slow for long; let it go, if that is asked for, at once."""
        limit = self._failure.evict_slower_than
        found = self._detector.slow(self._roster.members, min(_SLOW, limit or _SLOW))
        step = self.state.step
        news = self._slow_news.worth_telling(found, step, now)
        for worker, factor in found.items():
            member = self._workers[worker]
            goes = limit is not None and factor >= limit and not member.leaves
            if goes or worker in news:
                self._write(WorkerSlow(worker=worker, step=step, factor=round(factor, 2)))
            if goes:
                self._ask_to_leave(worker, member, "slow")

    def _check_nodes(self, now: float) -> None:
        """Whoever is on a node that is to be taken away leaves before that."""
        there = {worker for node in self._draining for worker in self._nodes.get(node, ())}
        for worker in sorted(there.union(self._partly)):
            member = self._workers.get(worker)
            if member is not None and not member.leaves:
                self._ask_to_leave(worker, member, "draining")

    def _check_quorum(self, now: float) -> None:
        """End a run whose group was too small for too long, or to which nobody can come."""
        if self._finished:
            return
        verdict = self._quorum.judge(
            len(self._roster.holders),
            founded=self._roster.founded,
            coming=self._more or len(self._workers) - len(self._shadows) >= self._terms.min_workers,
            state=self.state,
            now=now,
        )
        if isinstance(verdict, ElastixError):
            ready = len(self._roster.waiting)
            if self._gathers and ready >= self._terms.min_workers:
                self._quorum.start_over()
                self._push(self._roster.found_with(ready))
                return
            self.fail(verdict)
        elif verdict is not None:
            self._do(Tell(None, Dismiss(verdict)))

    @property
    def _gathers(self) -> bool:
        """Whether the group has not come about, and those who are ready wait for others."""
        return not (self._roster.founded or self._roster.members)

    def _found_with_fewer(self) -> None:
        """Who is left of the founders founds the group, if nobody comes in place of the others."""
        if self._failure.replace or not self._gathers:
            return
        founders, least = self._terms.founders, self._terms.min_workers
        unspent = self._unspent if self._more or self._room else 0
        left = len(self._workers) + max(0, founders - self._next_worker + unspent)
        if max(1, least) <= left < founders:
            self._push(self._roster.found_with(left))
        elif left < founders and not (left and self._more):
            self.fail(limits.too_few_founders(left, least, self.state))

    def _fill(self, now: float) -> None:
        """Start a worker in every place that is free; spares when the group has come about.

        Starting one costs seconds of a core, and those who are to found the group come first, as
        do survivors of a loss until they have agreed on a step.
        """
        roster = self._roster
        if roster.founded and roster.holders and now - self._vacant_since <= RECOVERY_S:
            return
        ends = self._finished or (bool(self._interruption.reason) and not self._founds_from_parts)
        while self._room > 0 and self.phase is Phase.RUNNING and not ends:
            founders = self._terms.founders if self.founder is None else 1
            if not roster.founded and len(self._workers) >= founders:
                return
            self._room -= 1
            self._workers[self._next_worker] = AtWork()
            self._do(StartWorker(self._next_worker))
            self._next_worker += 1

    # ------------------------------------------------------------------ acting

    def _place(self, worker: int, node: str, lifeline: str) -> None:
        """Where a worker runs. Those beside it are told of its death before anybody far away."""
        member = self._workers[worker]
        member.node, member.lifeline = node, lifeline
        if not node:
            return
        neighbours = self._nodes.setdefault(node, {})
        if lifeline and worker not in neighbours:
            for other in islice(reversed(neighbours), _WATCHED_BY):
                self._do(Tell(other, WatchNeighbour(worker, lifeline)))
                self._do(Tell(worker, WatchNeighbour(other, self._workers[other].lifeline)))
        neighbours[worker] = None

    def _push(self, membership: Membership | None) -> None:
        if membership is None:
            return
        # First of all: if this process dies next, another one must know who is in the group.
        self._write(
            GenerationFormed(
                generation=membership.generation,
                members=membership.members,
                cause=membership.cause,
                urgent=membership.urgent,
            )
        )
        self._do(Tell(None, membership))
        differ = self.state.processors_of(membership.members)
        if differ is not None:
            self._write(differ)

    def _write(self, event: Event, sequence: int | None = None) -> None:
        self.state.take(event, sequence)
        self._do(Write(event, sequence))

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    def _done(self) -> list[Action]:
        # If nobody would be left, no one is let go; so the State is stored while it is there.
        all_go = self._roster.founded and self._roster.all_go
        if all_go and not self._all_go:
            self._do(Tell(None, StoreSoon()))
        self._all_go = all_go
        actions, self._actions = self._actions, []
        return actions
