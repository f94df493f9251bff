"""How much of a cluster's time training gets, against failure rate and group size. Pure.

    python -m elastix.testing.simulate --mtbf-days 30 --step-s 1

A group of up to tens of thousands of workers runs in virtual time: workers fail at random (or at
given times), the rest recovers in one of three ways, replacements start and join. Who is in the
group, when another is started and when it is let in is decided by the conductor that leads real
runs; what is made up here is how long things take.

- *forward*: survivors finish the step in hand from the gradients they hold; the lost worker's
  samples come back in the next batch.
- *rollback*: survivors redo the step with the same samples (the other strategy of Nicolae et al.,
  CCGrid'22).
- *restart*: everybody stops, and the whole group starts again from the last checkpoint.

What a failure costs is measured, not assumed: `costs_of` reads it from the journal of a real run.
Not modelled: failures that come in bunches, a network that slows down with size.

Goodput is committed samples per second over those of the undisturbed group.
"""

import argparse
import heapq
import itertools
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from elastix.arguments import LONGEST_S
from elastix.config import FailureConfig
from elastix.errors import ConfigError, ElastixError
from elastix.events import (
    Event,
    GenerationFormed,
    Recovered,
    StepCommitted,
    WorkerJoined,
    WorkerLost,
)
from elastix.observe import journal
from elastix.train.control.actions import Action, StartWorker, Tell, Vacate
from elastix.train.control.conductor import Conductor
from elastix.train.control.messages import CatchUp, CaughtUp, Entered, Ready, RecordEvents
from elastix.train.control.terms import Phase, RunTerms

Strategy = Literal["forward", "rollback", "restart"]
_DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, as measured.

    Attributes:
        work_s: of a step, what the workers divide among themselves, with all of them there.
        fixed_s: of a step, what takes as long with any number of workers.
        recover_s: from a death to the agreed result of the step in hand: news, group, reduction.
        recover_per_doubling_s: more of it each time the group is twice as large.
        start_s: from a death until its replacement is up to join.
        join_s: how long the group is held up when one joins.
        start_share: of the group's computing power that a starting worker takes away, where they
            share cores; 0 where each has its own.
        restart_s: the whole group ended and started again, with the State loaded.
        checkpoint_s: how long a checkpoint holds up a step.
    """

    work_s: float = 0.9
    fixed_s: float = 0.1
    recover_s: float = 0.1
    recover_per_doubling_s: float = 0.02
    start_s: float = 20.0
    join_s: float = 1.0
    start_share: float = 0.0
    restart_s: float = 60.0
    checkpoint_s: float = 0.01

    def step_s(self, workers: int, of: int) -> float:
        """A step of a constant global batch with `workers` of `of` there."""
        return self.fixed_s + self.work_s * of / workers

    def recovery_s(self, workers: int) -> float:
        """A recovery among so many survivors."""
        return self.recover_s + self.recover_per_doubling_s * math.log2(max(1, workers))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated.

    Attributes:
        workers: the full group.
        strategy: see the module.
        duration_s: of virtual time.
        mtbf_s: mean time between failures of one worker.
        spares: workers that are up already and can join at once; each used one is replaced.
        min_workers: fewer than that wait.
        checkpoint_every_s: a checkpoint at the first boundary after so long.
    """

    workers: int
    strategy: Strategy = "forward"
    duration_s: float = _DAY_S
    mtbf_s: float = 30 * _DAY_S
    spares: int = 0
    min_workers: int = 1
    checkpoint_every_s: float = 600.0

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ConfigError(
                f"strategy must be one of {get_args(Strategy)}, not {self.strategy!r}."
            )
        if not 1 <= self.min_workers <= self.workers or self.duration_s <= 0 or self.mtbf_s <= 0:
            raise ConfigError(
                f"a simulation needs 1 <= min_workers <= workers and positive times, not {self}."
            )


@dataclass(frozen=True)
class Forecast:
    """What came of it.

    Attributes:
        goodput: see the module.
        steps: committed steps that stand at the end.
        failures: workers lost.
        redone: steps that were done twice, or more often.
    """

    goodput: float
    steps: int
    failures: int
    redone: int


def simulate(
    plan: Scenario, costs: Costs, rng: random.Random, failures: Iterable[float] | None = None
) -> Forecast:
    """Run `plan` in virtual time.

    Args:
        plan: what to simulate.
        costs: what things take.
        rng: source of the failures.
        failures: times of failures in seconds, ascending, in place of random ones.
    """
    return _Simulation(plan, costs, rng, failures).run()


class _Cluster:
    """A shell around the conductor: workers that start, join and die as the simulation says.

    Args:
        plan: the group.
        start_s: from a death until its replacement is up to join.
        now: all workers are up then.

    Attributes:
        coming: when those that are being started will be up, and who they are.
    """

    def __init__(self, plan: Scenario, start_s: float, now: float) -> None:
        never = LONGEST_S
        failure = FailureConfig(hang_timeout_s=never, wait_s=never, start_timeout_s=never)
        terms = RunTerms(
            founders=plan.workers,
            min_workers=plan.min_workers,
            max_workers=plan.workers,
            failure=failure,
            first_step_s=0.0,
        )
        self.coming: list[tuple[float, int]] = []
        self._conductor = Conductor(terms)
        self._start_s = start_s
        self._size = plan.workers
        self._room = plan.workers + plan.spares
        self._up: deque[float] = deque([now] * self._room)  # when the next to be started are up
        self._steps = self._entered = 0
        self._offer(now)
        self.arrive(now)
        self.enter(now)
        self._offer(now)  # for spares
        self.arrive(now)

    @property
    def alive(self) -> int:
        """Members that have the State."""
        return len(self._conductor.holders)

    @property
    def over(self) -> bool:
        """Whether the run has failed: nobody has the State, or too many were lost in a row."""
        return not self.alive or self._conductor.phase is Phase.OVER

    def lose(self, now: float) -> None:
        """One dies, and the survivors meet."""
        worker = next(iter(self._conductor.holders))
        self._up.append(now + self._start_s)
        self._do(self._conductor.died(worker, now), now)

    def commit(self, now: float) -> None:
        """The group has agreed on a step, in the newest group that was to be entered at once.

        While nobody is missing that changes nothing, and the conductor need not hear of it.
        """
        membership = self._conductor.membership
        if self.alive == self._size and self._entered == membership.generation:
            return
        if membership.urgent and membership.generation > self._entered:
            self.enter(now)
        self._steps += 1
        step = StepCommitted(
            step=self._steps,
            generation=membership.generation,
            world_size=self.alive,
            batches=(),
        )
        worker = next(iter(self._conductor.holders))
        self._do(self._conductor.hear(worker, RecordEvents(((self._steps, step),)), now), now)

    def arrive(self, now: float) -> None:
        """Whoever is up by now is ready to join, and catches up if it is told to."""
        while self.coming and self.coming[0][0] <= now:
            worker = heapq.heappop(self.coming)[1]
            self._do(self._conductor.hear(worker, Ready(("", 0)), now), now)

    def enter(self, now: float) -> int:
        """The newest membership is entered. How many have come in by it."""
        before, membership = self.alive, self._conductor.membership
        self._entered = membership.generation
        newcomers = [w for w in membership.members if w not in self._conductor.holders]
        # That the others confirm it too changes nothing that is simulated: one speaks for all.
        for worker in (*newcomers, *membership.members[:1]):
            entered = Entered(membership.generation)
            self._do(self._conductor.hear(worker, entered, now), now)
        return self.alive - before

    @property
    def proposal(self) -> bool:
        """Whether there are newcomers whom the group lets in at the next boundary."""
        newest = self._conductor.membership
        return not newest.urgent and newest.size > self.alive

    def _offer(self, now: float) -> None:
        self._do(self._conductor.room(self._room, more=self._room > 0, now=now), now)

    def _do(self, actions: Iterable[Action], now: float) -> None:
        vacated = False
        for action in actions:
            match action:
                case StartWorker(worker):
                    self._room -= 1
                    heapq.heappush(self.coming, (max(now, self._up.popleft()), worker))
                case Vacate():
                    self._room += 1
                    vacated = True
                case Tell(to, CatchUp()) if to is not None:
                    self._do(self._conductor.hear(to, CaughtUp(), now), now)
                case _:
                    pass
        if vacated:
            self._offer(now)


@dataclass
class _Simulation:
    plan: Scenario
    costs: Costs
    rng: random.Random
    failures: Iterable[float] | None
    now: float = 0.0
    samples: float = 0.0  # in global batches
    steps: int = 0
    lost: int = 0
    redone: int = 0
    stored: tuple[float, int, float] = (0.0, 0, 0.0)  # when, steps, samples

    def run(self) -> Forecast:
        plan = self.plan
        self._cluster = _Cluster(plan, self.costs.start_s, self.now)
        self._trace = iter(self.failures) if self.failures is not None else None
        self._next = self._draw()
        while self.now < plan.duration_s:
            self._boundary()
            self._step()
        rate = 1.0 / self.costs.step_s(plan.workers, plan.workers)
        return Forecast(self.samples / (self.now * rate), self.steps, self.lost, self.redone)

    def _draw(self) -> float:
        if self._trace is not None:
            return next(self._trace, math.inf)
        if not self._cluster.alive:
            return math.inf
        return self.now + self.rng.expovariate(self._cluster.alive / self.plan.mtbf_s)

    def _boundary(self) -> None:
        """Whoever is up joins; too few wait; a checkpoint is taken."""
        self._join()
        while self._cluster.alive < self.plan.min_workers and self._cluster.coming:
            self.now = max(self.now, self._cluster.coming[0][0])
            self._join()
        if self.now - self.stored[0] >= self.plan.checkpoint_every_s:
            self.now += self.costs.checkpoint_s
            self.stored = (self.now, self.steps, self.samples)

    def _join(self) -> None:
        self._cluster.arrive(self.now)
        if self._cluster.proposal and self._cluster.enter(self.now):
            self.now += self.costs.join_s
            if self._trace is None:
                self._next = self._draw()

    def _step(self) -> None:
        """One step, with all that fails in it."""
        begun = self.now
        share = 1.0
        end = begun + self._length()
        while self._next < end:
            at = max(self._next, self.now)
            if self.plan.strategy == "restart":
                self.lost += 1
                self._restart(at)
                return
            self._lose(at)
            if self._cluster.over:
                self._cluster = _Cluster(self.plan, self.costs.start_s, at)
                self._restart(at)
                return
            alive = self._cluster.alive
            recovery_s = self.costs.recovery_s(alive)
            if self.plan.strategy == "forward":
                end += recovery_s
                share *= alive / (alive + 1)  # the rest is owed
            else:
                self.redone += 1
                end = at + recovery_s + self._length()
        self.now = end
        self.steps += 1
        self.samples += share
        self._cluster.commit(self.now)

    def _length(self) -> float:
        taken = min(0.9, self.costs.start_share * len(self._cluster.coming))
        return self.costs.step_s(self._cluster.alive, self.plan.workers) / (1.0 - taken)

    def _lose(self, at: float) -> None:
        self.lost += 1
        self._cluster.lose(at)
        self.now = at
        self._next = self._draw()

    def _restart(self, at: float) -> None:
        """All of them, from the last checkpoint."""
        _, steps, samples = self.stored
        self.redone += self.steps - steps
        self.steps, self.samples = steps, samples
        self.now = at + self.costs.restart_s
        self.stored = (self.now, steps, samples)
        if self._trace is None:
            self._next = self._draw()
        else:  # who is not there cannot die
            self._trace = itertools.dropwhile(lambda t: t < self.now, self._trace)
            self._next = self._draw() if self._next < self.now else self._next


# ------------------------------------------------------------------------------- measured costs


def costs_of(events: Iterable[Event], costs: Costs | None = None) -> Costs:
    """What a run's journal says things took; what it does not say stays as in `costs`."""
    known = list(events)
    costs = costs or Costs()
    full = max((e.world_size for e in known if isinstance(e, StepCommitted)), default=1)
    usual = {n: statistics.fmean(gaps) for n, gaps in _gaps(known).items() if gaps}
    if full in usual:
        costs = replace(costs, work_s=usual[full], fixed_s=0.0)
        fewer = [(n, gap) for n, gap in usual.items() if n < full]
        if fewer:  # a step is fixed + work * full / n: a line through two points
            n, gap = min(fewer)
            work_s = (gap - usual[full]) / (full / n - 1.0)
            work_s = min(max(work_s, 0.0), usual[full])
            costs = replace(costs, work_s=work_s, fixed_s=usual[full] - work_s)
            # While workers are missing others start; what is longer still is their share.
            start_share = max(0.0, 1.0 - costs.step_s(n, full) / gap)
            costs = replace(costs, start_share=start_share)
    stalls: dict[int, float] = {}
    for event in known:
        if isinstance(event, Recovered):
            stalls[event.generation] = max(stalls.get(event.generation, 0.0), event.stall_s)
    if stalls:
        recover_s = statistics.median(stalls.values())
        costs = replace(costs, recover_s=recover_s, recover_per_doubling_s=0.0)
    starts = list(_starts(known))
    if starts:
        costs = replace(costs, start_s=statistics.median(starts), join_s=_join_s(known, usual))
    return costs


def _gaps(events: Sequence[Event]) -> dict[int, list[float]]:
    """Seconds between two commits of one generation, by world size."""
    gaps: dict[int, list[float]] = {}
    before: StepCommitted | None = None
    for event in events:
        if isinstance(event, StepCommitted):
            if before is not None and before.generation == event.generation:
                gaps.setdefault(event.world_size, []).append(event.t - before.t)
            before = event
    return gaps


def _starts(events: Sequence[Event]) -> Iterator[float]:
    """From each death to the proposal that lets a replacement in."""
    dead: list[float] = []
    for event in events:
        if isinstance(event, WorkerLost):
            dead.append(event.t)
        elif isinstance(event, GenerationFormed) and event.cause == "join" and dead:
            yield event.t - dead.pop(0)


def _join_s(events: Sequence[Event], usual: dict[int, float]) -> float:
    """How much longer the step took in which a worker joined."""
    commits = [event for event in events if isinstance(event, StepCommitted)]
    joined = {event.step for event in events if isinstance(event, WorkerJoined)}
    longer = [
        after.t - before.t - usual.get(after.world_size, 0.0)
        for before, after in itertools.pairwise(commits)
        if before.step in joined
    ]
    return max(0.0, statistics.median(longer)) if longer else 0.0


# --------------------------------------------------------------------------------- command line


def table(sizes: Sequence[int], plan: Scenario, costs: Costs, seed: int) -> list[tuple[str, ...]]:
    """A row per group size: goodput of the three strategies under the same failure rate."""
    rows = []
    for size in sizes:
        plans = [replace(plan, workers=size, strategy=strategy) for strategy in get_args(Strategy)]
        found = (simulate(chosen, costs, random.Random(seed)) for chosen in plans)
        cells = [f"{100 * forecast.goodput:.1f}" for forecast in found]
        rows.append((f"{size}", f"{plan.mtbf_s / size / 60:.1f}", *cells))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 if there is no such run, or the plan is impossible."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--run", type=Path, help="directory of a run: its journal has the costs")
    parser.add_argument("--mtbf-days", type=float, default=30.0, help="of one worker")
    parser.add_argument("--step-s", type=float, help="of the full group")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[8, 64, 512, 1000, 2000, 5000, 10_000]
    )
    options = parser.parse_args(arguments)
    try:
        _print(options)
    except ElastixError as error:
        print(f"simulate: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def _print(options: argparse.Namespace) -> None:
    costs = Costs()
    if options.run is not None:
        costs = costs_of(journal.read(options.run / "journal.jsonl"))
    if options.step_s is not None:
        costs = replace(costs, work_s=0.9 * options.step_s, fixed_s=0.1 * options.step_s)
    plan = Scenario(
        workers=1,
        duration_s=3600 * options.hours,
        mtbf_s=_DAY_S * options.mtbf_days,
        spares=options.spares,
    )
    columns = ("workers", "minutes between failures", *(f"{s} %" for s in get_args(Strategy)))
    for row in (columns, *table(options.sizes, plan, costs, options.seed)):
        print("  ".join(f"{cell:>{len(head)}}" for cell, head in zip(row, columns, strict=True)))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
