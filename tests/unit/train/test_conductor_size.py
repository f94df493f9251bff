"""What an event costs the conductor does not depend on how many workers there are.

Counted are the instructions that Python executes: no clock is involved, so the numbers are the same
on every machine. Copies of the member list, which a new generation is, are one instruction each.
"""

import pickle
import time

import pytest

from elastix.config import FailureConfig
from elastix.events import GenerationFormed, StepCommitted, WorkerLost
from elastix.train.control.actions import Tell
from elastix.train.control.conductor import Conductor
from elastix.train.control.messages import (
    CatchUp,
    CaughtUp,
    Entered,
    Heartbeat,
    Ready,
    RecordEvents,
    Started,
    Suspect,
)
from elastix.train.control.terms import RunTerms
from tests.instructions import instructions
from tests.unit.train.conductor_world import World

SIZES = (10, 100, 1000, 10_000)


class Group:
    """A group of so many workers, all of which have the State and take steps."""

    def __init__(self, size):
        self.size = size
        failure = FailureConfig(hang_timeout_s=30.0, evict_slower_than=2.0)
        self.conductor = Conductor(
            RunTerms(
                founders=size,
                min_workers=1,
                max_workers=size,
                failure=failure,
                first_step_s=0.0,
            )
        )
        self.now = 0.0
        self.conductor.room(size, more=False, now=0.0)
        for worker in range(size):
            self.hear(worker, Started(pid=1, node=f"node{worker}"))
            self.hear(worker, Ready(("host", worker)))
        for worker in range(size):
            self.hear(worker, Entered(1))
        for step in range(45):  # until paces are known
            self.now += 1.0
            for worker in range(size):
                self.beat(worker, step)
        self.conductor.tick(self.now)

    def hear(self, worker, message):
        return self.conductor.hear(worker, message, self.now)

    def beat(self, worker, step, generation=1):
        call, waited_s = (step, 1), 0.001 * (worker % 7) * step
        beat = Heartbeat(
            generation=generation, step=step, call=call, passed=step, waited_s=waited_s
        )
        return self.hear(worker, beat)

    def lose(self, worker):
        return self.conductor.died(worker, self.now)

    def tick(self):
        self.now += 0.2
        return self.conductor.tick(self.now)


@pytest.fixture(scope="module")
def groups():
    return [Group(size) for size in SIZES]


def costs(groups, work):
    return [instructions(lambda group=group: work(group)) for group in groups]


def assert_flat(counts, slack=1.3):
    assert max(counts) <= slack * min(counts) + 40, dict(zip(SIZES, counts, strict=True))


def test_a_heartbeat(groups):
    counts = costs(groups, lambda group: group.beat(3, 60))
    assert_flat(counts)
    assert max(counts) < 1000


def test_the_passing_of_time(groups):
    assert_flat(costs(groups, Group.tick))


def test_a_long_step_in_which_all_compute(groups):
    """Nobody has moved for longer than the timeout, which is no harm while nobody waits."""

    def idle(group, waiting):
        for _ in range(4):
            group.now += 10.0
            for worker in range(group.size):
                beat = Heartbeat(generation=1, step=44, call=(44, 1), passed=1, waiting=waiting)
                group.hear(worker, beat)
            group.tick()

    for group in groups:
        idle(group, waiting=True)
        idle(group, waiting=False)
        idle(group, waiting=False)
    assert_flat(costs(groups, Group.tick))


def test_a_committed_step(groups):
    event = StepCommitted(step=61, generation=1, world_size=1, batches=())
    assert_flat(costs(groups, lambda group: group.hear(0, RecordEvents(((61, event),)))))


def test_a_loss_and_what_the_survivors_say_of_it(groups):
    """The news, a survivor that suspects somebody, one that enters the new group, and the last."""

    def die(group):
        (membership,) = [a.message for a in group.lose(4) if isinstance(a, Tell)]
        assert len(membership.members) == group.size - 1

    assert_flat(costs(groups, lambda group: group.hear(5, Suspect(1, "reset"))))
    assert_flat(costs(groups, die))
    assert_flat(costs(groups, lambda group: group.hear(5, Entered(2))))
    for group in groups:
        for worker in range(group.size):
            if worker not in (4, 5, 6):
                group.hear(worker, Entered(2))
    assert_flat(costs(groups, lambda group: group.hear(6, Entered(2))))


def test_a_join(groups):
    """It is told whom to follow, let in, and confirms."""
    for group in groups:
        group.conductor.room(1, more=False, now=group.now + 100)
        group.hear(group.size, Started(pid=1))

    def ready(group):
        (tell,) = [a for a in group.hear(group.size, Ready(("host", 0))) if isinstance(a, Tell)]
        assert isinstance(tell.message, CatchUp)
        assert len(tell.message.donors) <= 8

    def caught_up(group):
        (membership,) = [
            a.message for a in group.hear(group.size, CaughtUp()) if isinstance(a, Tell)
        ]
        assert membership.members[-1] == group.size

    assert_flat(costs(groups, ready))
    assert_flat(costs(groups, caught_up))
    assert_flat(costs(groups, lambda group: group.hear(group.size, Entered(3))))


@pytest.mark.parametrize("minutes", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_a_thousand_workers(minutes):
    """Each sends a heartbeat a second, and one is lost each minute."""
    world = World(1000, steps=60 * minutes, start_s=20.0, spares=1, hang_timeout_s=30.0)
    for minute in range(1, minutes):
        world.at(60.0 * minute + 0.5, lambda w: w.kill(min(w.conductor.holders)))
    began = time.process_time()
    assert world.run(until=5000.0).outcome == "finished"
    spent = time.process_time() - began
    assert len(world.events(WorkerLost)) == minutes - 1
    assert len(world.events(StepCommitted)) == 60 * minutes
    assert world.events(GenerationFormed)[-1].cause == "join"
    print(f"{spent:.1f} s of CPU for {world.now:.0f} s of {len(world.group.members)} workers")


def test_what_it_remembers_of_those_that_are_gone_is_small():
    """Three hundred are lost and replaced, and steps are taken by the thousand: bytes of a loss."""
    world = World(4, steps=100_000, start_s=1.0, spares=1)
    for number in range(1, 401):
        world.at(10.0 * number, lambda w: w.kill(min(w.conductor.holders)))
    sizes, steps = [], []
    for until in (1005.0, 4005.0):
        world.play(until)
        sizes.append(len(pickle.dumps(world.conductor)))
        steps.append(world.step)
    assert len(world.events(WorkerLost)) == 400
    assert steps[1] - steps[0] > 2000
    assert (sizes[1] - sizes[0]) / 300 < 200
