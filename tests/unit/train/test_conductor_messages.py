"""The conductor hears anything in any order, from whoever is at work, and is stopped meanwhile.

Not what workers would say, as in conductor_world: what must hold whatever they say.
"""

import random

import pytest

from elastix.config import FailureConfig
from elastix.errors import QuorumLost
from elastix.events import Resumed, RunStarted, StateNotStored, StateStored, StepCommitted
from elastix.train.control.actions import EndWorker, KillWorker, StartWorker, Vacate, Vacated, Write
from elastix.train.control.conductor import Conductor
from elastix.train.control.interruption import STORE_S
from elastix.train.control.messages import (
    CaughtUp,
    Entered,
    Heartbeat,
    Leave,
    Outcome,
    OutcomeKind,
    Ready,
    RecordEvents,
    Started,
    Succeeded,
    Suspect,
)
from elastix.train.control.run_state import RunState
from elastix.train.control.terms import Found, Phase, RunTerms

ENDS = [kind for kind in OutcomeKind if kind not in (OutcomeKind.RAISED, OutcomeKind.HALTED)]


class Run:
    """One run of a conductor, drawn by `chance`."""

    def __init__(self, chance):
        self.chance = chance
        founders = chance.randint(1, 4)
        failure = FailureConfig(hang_timeout_s=5.0, replace=chance.random() < 0.7, wait_s=1000.0)
        self.terms = RunTerms(
            founders=founders,
            min_workers=chance.randint(1, founders),
            max_workers=founders + chance.randint(0, 2),
            failure=failure,
            first_step_s=0.0,
            shadows=chance.choice([0, 0, 1]),
        )
        self.conductor = Conductor(self.terms)
        self.now, self.asked = 0.0, None
        self.free = self.terms.max_workers + 2
        self.alive, self.written = set(), []
        self.step = self.finished = 0
        opening = RunStarted(name="r", seed=0, config={}, scaling={}, versions={})
        self.do(self.conductor.begin([opening]))

    def do(self, actions):
        for action in actions:
            match action:
                case StartWorker(worker):
                    self.alive.add(worker)
                    self.free -= 1
                case KillWorker(worker) | EndWorker(worker):
                    self.alive.discard(worker)
                case Vacate(_, place):
                    self.free += place is Vacated.FREE
                case Write():
                    self.written.append(action)

    def play(self):
        """Until it is over; how it ended."""
        stop_at = self.chance.uniform(0, 30)
        while self.conductor.phase is not Phase.OVER:
            self.now += self.chance.choice([0.0, 0.05, 0.3, 1.0])
            if self.asked is None and self.now >= stop_at:
                self.asked = self.now
                self.do(self.conductor.stop("Ctrl-C", self.now))
            more = self.chance.random() < 0.5
            self.do(self.conductor.room(max(0, self.free), more=more, now=self.now))
            self.do(self.conductor.tick(self.now))
            if self.conductor.phase is Phase.GOING_BACK:
                step = self.chance.choice([0, self.step])
                stored = Resumed(step=step, ref=self.chance.choice(["", "stored"]))
                self.do(self.conductor.went_back(stored, self.now))
            if self.conductor.phase is not Phase.OVER:
                self.something()
            assert self.asked is None or self.now - self.asked <= STORE_S + 2
        ending = self.conductor.ending()
        self.do(self.conductor.close())
        return ending.outcome

    def something(self):
        """Somebody says something, or another conductor goes on."""
        if self.chance.random() < 0.02:
            self.take_over()
            return
        worker = self.chance.choice(sorted(self.alive) or [0])
        newest = self.conductor.membership.generation
        generation = max(0, newest - self.chance.choice([0, 0, 0, 1, 2]))
        step, hear, now = self.step + 1, self.conductor.hear, self.now
        commit = StepCommitted(step=step, generation=generation, world_size=1, batches=())
        said = [
            Started(pid=1, node="n"),
            Ready(("host", worker)),
            Ready(("host", worker)),
            Entered(generation),
            Entered(generation),
            Entered(generation),
            CaughtUp(equal=self.chance.random() < 0.5),
            Suspect(generation, "reset", frozenset({worker + 1})),
            Leave("notice"),
            RecordEvents(((step, commit),)),
            Succeeded(step=self.step, since=0, sequence=step, equal=True),
            *[Heartbeat(generation=newest, step=self.step, passed=self.chance.randint(0, 99))] * 3,
        ]
        what = self.chance.randrange(len(said) + 4)
        if what < len(said):
            self.step += isinstance(said[what], RecordEvents)
            self.do(hear(worker, said[what], now))
        elif what == len(said):
            self.do(self.conductor.died(worker, now))
        elif what == len(said) + 1 and self.chance.random() < 0.3:
            kind = self.chance.choice(ENDS)
            self.finished += kind is OutcomeKind.FINISHED and worker in self.conductor.workers
            error = QuorumLost("in vain") if kind is OutcomeKind.DISMISSED else None
            outcome = Outcome(kind=kind, generation=generation, step=self.step, error=error)
            self.do(self.conductor.ended(worker, outcome, now))
        elif what == len(said) + 2:
            reason = self.chance.choice(["notice", "best", "final", "every_steps"])
            step = max(0, self.step - self.chance.randint(0, 3))
            event = StateStored(ref="r", step=step, reason=reason, stored_bytes=0, store_s=0.0)
            self.written.append(Write(event))
            self.conductor.stored(event)
        elif what == len(said) + 3:
            failed = StateNotStored(step=self.step, reason="notice", why="torn")
            self.do(self.conductor.not_stored(failed))

    def take_over(self):
        state = RunState()
        for write in self.written:
            state.take(write.event, write.sequence)
        chance = self.chance
        found = [
            Found(
                worker=worker,
                pid=1,
                node="n",
                device="cpu",
                generation=chance.randint(0, state.generation),
                address=("host", worker),
                ready=holder or chance.random() < 0.5,
                holder=holder,
            )
            for worker in sorted(self.alive)
            for holder in [chance.random() < 0.6]
        ]
        self.conductor = Conductor(self.terms)
        known, stored = set(self.alive), Resumed(step=0, ref="")
        self.do(self.conductor.take_over(state, found, known, stored, self.now))
        if self.asked is not None:
            self.asked = self.now  # its time begins anew


@pytest.mark.parametrize("seed", range(0, 1200, 200))
def test_whatever_it_hears_it_comes_to_an_end_once_it_is_stopped(seed):
    """And has finished only if somebody was through, and is interrupted only if it was stopped."""
    for number in range(seed, seed + 200):
        run = Run(random.Random(number))
        outcome = run.play()
        assert outcome != "finished" or run.finished, number
        assert outcome != "interrupted" or run.asked is not None, number
