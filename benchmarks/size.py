"""What size costs: `python -m benchmarks.size --out FILE`.

The first three are in virtual time, so nothing but the conductor and the shell below is run. What a
step, a start and a recovery take is what benchmarks.recovery found in real runs (`--costs`).

- `events`: CPU microseconds of one event in groups of 10, 100, 1,000 and 10,000 workers. A
  heartbeat, the passing of time and a committed step concern one worker. A loss and a join concern
  all of them: each is divided by the messages that it brings, and given whole as well.
- `hour`: 1,000 workers for an hour, each with a heartbeat a second.
- `day`: 10,000 workers for a day, each with a heartbeat a minute. In both, one is lost each minute
  and replaced; all survivors of a loss suspect somebody, and all members confirm each generation.
  What it cost in CPU, by kind of event, and the share of a core that is.
- `journal`: what reading the journal of a run of 100,000 steps and of ten million (`--steps`)
  costs; see benchmarks.long_run.
- `store`: what stores of 10,000, 100,000 and a million models (`--models`) cost; see
  benchmarks.many_models.
- `campaign`: what campaigns of 1,000, 10,000 and 100,000 trials (`--trials`) cost their driver and
  those who read them; see benchmarks.long_campaign.
- `workers`: real processes (`--workers`), one of which is killed each second for a minute
  (`--seconds`); see benchmarks.many_workers.

`--parts` runs some of these; what FILE has of other parts, and of other sizes, stays.
"""

import argparse
import gc
import heapq
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import long_campaign, long_run, many_models, many_workers
from benchmarks.record import save
from benchmarks.table import RESULTS
from elastix.comm.protocol.membership import Membership
from elastix.config import FailureConfig
from elastix.events import GenerationFormed, StepCommitted
from elastix.testing.simulate import Costs
from elastix.train.control.actions import Action, StartWorker, Tell, Vacate, Write
from elastix.train.control.conductor import Conductor
from elastix.train.control.messages import (
    CatchUp,
    CaughtUp,
    Entered,
    FromWorker,
    Heartbeat,
    Ready,
    RecordEvents,
    Started,
    Suspect,
)
from elastix.train.control.terms import Phase, RunTerms

SIZES = (10, 100, 1_000, 10_000)
PARTS = ("events", "hour", "day", "journal", "store", "campaign", "workers")
FEW_STEPS = 100_000
TICK_S = 0.2


class Fleet:
    """A shell around the conductor whose workers do whatever they are told, at once.

    Args:
        size: workers of the group.
        hang_timeout_s: of the failure detector.
        costs: what a start and a recovery take.

    Attributes:
        spent: CPU seconds within the conductor, by kind of event.
        heard: how many events of each kind.
    """

    def __init__(self, size: int, hang_timeout_s: float, costs: Costs) -> None:
        failure = FailureConfig(hang_timeout_s=hang_timeout_s, evict_slower_than=2.0)
        terms = RunTerms(
            founders=size, min_workers=1, max_workers=size, failure=failure, first_step_s=0.0
        )
        self.now = 0.0
        self.conductor = Conductor(terms)
        self.alive: dict[int, int] = {}  # worker to the generation that it is in
        self.order: list[int] = []  # in which they send heartbeats
        self.spent: dict[str, float] = defaultdict(float)
        self.heard: Counter[str] = Counter()
        self.formed = self.lost = self.step = 0
        self._costs = costs
        self._free = size
        self._coming: list[tuple[float, int]] = []
        self._room()
        self.arrive()
        if len(self.alive) != size:
            raise RuntimeError(f"{len(self.alive)} of {size} workers have started")

    def tell(self, kind: str, call: Callable[[], list[Action]]) -> None:
        """Have the conductor hear of something, and do what it wants."""
        begun = time.process_time()
        actions = call()
        self.spent[kind] += time.process_time() - begun
        self.heard[kind] += 1
        if actions:
            self._do(actions)

    def say(self, worker: int, message: FromWorker) -> None:
        """A worker says something."""
        kind = type(message).__name__
        self.tell(kind, lambda: self.conductor.hear(worker, message, self.now))

    def hear_all(self, kind: str, messages: Iterable[tuple[int, FromWorker]]) -> None:
        """Many of them say something of one kind: the clock is read once for all."""
        hear, now = self.conductor.hear, self.now
        told = list(messages)
        begun = time.process_time()
        found = [actions for worker, message in told if (actions := hear(worker, message, now))]
        self.spent[kind] += time.process_time() - begun
        self.heard[kind] += len(told)
        for actions in found:
            self._do(actions)

    def tick(self) -> None:
        """Time passes."""
        self.now += TICK_S
        self.arrive()
        self.tell("tick", lambda: self.conductor.tick(self.now))

    def arrive(self) -> None:
        """Whoever has been started is up by now."""
        while self._coming and self._coming[0][0] <= self.now:
            worker = heapq.heappop(self._coming)[1]
            self.alive[worker] = 0
            self.order.append(worker)
            self.say(worker, Started(pid=worker, node=f"node{worker // 8}", device="cpu"))
            self.say(worker, Ready(("host", worker)))

    def lose(self, worker: int) -> None:
        """A process dies, and its neighbours in the group feel it."""
        del self.alive[worker]
        self.lost += 1
        newest = self.conductor.membership.generation
        suspect = Suspect(newest, "connection reset")
        self.hear_all("Suspect", ((other, suspect) for other in self.alive))
        self.now += self._costs.recovery_s(len(self.alive))
        self.tell("loss", lambda: self.conductor.died(worker, self.now))

    def beat(self, workers: Iterable[int]) -> None:
        """Heartbeats of those that are alive."""
        step, alive = self.step, self.alive
        self.hear_all(
            "Heartbeat",
            (
                (
                    worker,
                    Heartbeat(
                        generation=alive[worker],
                        step=step,
                        call=(step, 1),
                        passed=step,
                        waited_s=0.001 * (worker % 7) * step,
                    ),
                )
                for worker in workers
                if worker in alive
            ),
        )

    def commit(self) -> None:
        """All have agreed on a step."""
        self.step += 1
        membership = self.conductor.membership
        event = StepCommitted(
            step=self.step,
            generation=membership.generation,
            world_size=membership.size,
            batches=(),
        )
        self.say(membership.members[0], RecordEvents(((self.step, event),)))

    def check(self) -> None:
        """The run goes on as it should."""
        if self.conductor.phase is not Phase.RUNNING:
            raise RuntimeError(f"the run has ended: {self.conductor.error}")

    def _room(self) -> None:
        more = self._free > 0
        self.tell("room", lambda: self.conductor.room(self._free, more=more, now=self.now))

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case StartWorker(worker):
                    self._free -= 1
                    at = self.now + (self._costs.start_s if self.lost else 0.0)
                    heapq.heappush(self._coming, (at, worker))
                case Vacate():
                    self._free += 1
                    self._room()
                case Tell(to, CatchUp()) if to is not None:
                    self.say(to, CaughtUp())
                case Tell(_, Membership() as membership):
                    self._enter(membership)
                case Write(GenerationFormed()):
                    self.formed += 1
                case _:
                    pass

    def _enter(self, membership: Membership) -> None:
        generation = membership.generation
        if membership is not self.conductor.membership:
            return
        for worker in membership.members:
            self.alive[worker] = generation
        entered = Entered(generation)
        self.hear_all("Entered", ((worker, entered) for worker in membership.members))


# ------------------------------------------------------------------ one event


def events(size: int, rounds: int, costs: Costs) -> dict[str, float]:
    """CPU microseconds by kind of event, medians over `rounds`."""
    fleet = Fleet(size, hang_timeout_s=30.0, costs=costs)
    for _ in range(45):  # until paces are known
        fleet.now += 1.0
        fleet.commit()
        fleet.beat(list(fleet.order))
    rng = random.Random(size)
    found: dict[str, list[float]] = {}

    def taken(kind: str, what: Callable[[], object], messages: float) -> None:
        begun = time.process_time()
        what()
        found.setdefault(kind, []).append(1e6 * (time.process_time() - begun) / messages)

    gc.disable()
    for _ in range(rounds):
        fleet.now += 1.0
        fleet.step += 1
        some = rng.sample(sorted(fleet.alive), min(size, 10))
        for _ in range(100):
            fleet.now += 0.001
            fleet.step += 1
            before = fleet.spent["Heartbeat"]
            fleet.beat(some)
            spent = fleet.spent["Heartbeat"] - before
            found.setdefault("heartbeat_us", []).append(1e6 * spent / len(some))
        fleet.beat(list(fleet.order))
        for _ in range(20):
            taken("tick_us", fleet.tick, 1)
            taken("step_us", fleet.commit, 1)
        fleet.beat(list(fleet.order))
        heard = fleet.heard.total()
        begun = time.process_time()
        fleet.lose(rng.choice(list(fleet.alive)))
        fleet.tick()
        spent = time.process_time() - begun
        found.setdefault("loss_us", []).append(1e6 * spent)
        found.setdefault("loss_us_per_message", []).append(
            1e6 * spent / (fleet.heard.total() - heard)
        )
        fleet.commit()
        fleet.beat(list(fleet.order))
        heard = fleet.heard.total()
        begun = time.process_time()
        while len(fleet.alive) < size:
            fleet.tick()
            if fleet.now % 5 < TICK_S:
                fleet.beat(list(fleet.order))
        spent = time.process_time() - begun
        found.setdefault("join_us_per_message", []).append(
            1e6 * spent / (fleet.heard.total() - heard)
        )
    gc.enable()
    fleet.check()
    return {kind: round(statistics.median(values), 2) for kind, values in found.items()}


def costs_in(recovery: Path) -> Costs:
    """What results of benchmarks.recovery say that things take."""
    found = json.loads(recovery.read_text(encoding="utf-8"))["elastix"]
    return Costs(
        work_s=found["step_s"],
        fixed_s=0.0,
        recover_s=found["stall_s"]["median"],
        recover_per_doubling_s=0.0,
        start_s=found["contributes_s"],
    )


# ------------------------------------------------------------------ a day


def day(
    workers: int, hours: float, heartbeat_s: float, costs: Costs, loss_every_s: float = 60.0
) -> tuple[dict[str, Any], Fleet]:
    """So many workers for so long, one of which is lost and replaced every so often.

    In a real run they send a heartbeat a second. Where they send fewer, what a second's would cost
    follows from what one costs, and is given as `heartbeat_share_at_1_s`.
    """
    fleet = Fleet(workers, max(30.0, 5 * heartbeat_s), costs)
    step_s = costs.step_s(workers, workers)
    rng = random.Random(0)
    begun = time.process_time()
    ticks = round(3600 * hours / TICK_S)
    per_tick = TICK_S / heartbeat_s
    place, due = 0.0, 0
    next_loss, next_step = loss_every_s, step_s
    for _ in range(ticks):
        fleet.tick()
        place += per_tick * len(fleet.order)
        if int(place) > due:
            fleet.beat(fleet.order[due : int(place)])
            due = int(place)
        if place >= len(fleet.order):
            fleet.order = [worker for worker in fleet.order if worker in fleet.alive]
            place, due = 0.0, 0
        while fleet.now >= next_step:
            next_step += step_s
            fleet.commit()
        if fleet.now >= next_loss:
            next_loss += loss_every_s
            members = fleet.conductor.membership.members
            fleet.lose(members[rng.randrange(len(members))])
    spent = time.process_time() - begun
    seconds = fleet.now
    fleet.check()
    beat_s = fleet.spent["Heartbeat"] / max(1, fleet.heard["Heartbeat"])
    return {
        "workers": workers,
        "hours": round(seconds / 3600, 2),
        "losses": fleet.lost,
        "generations": fleet.formed,
        "steps": fleet.step,
        "in_the_group_at_the_end": len(fleet.conductor.holders),
        "events": dict(sorted(fleet.heard.items())),
        "conductor_cpu_s": round(sum(fleet.spent.values()), 1),
        "cpu_s_by_event": {kind: round(s, 2) for kind, s in sorted(fleet.spent.items())},
        "share_of_a_core": round(sum(fleet.spent.values()) / seconds, 5),
        "heartbeat_share_at_1_s": round(beat_s * workers, 4),
        "benchmark_cpu_s": round(spent, 1),
    }, fleet


def measured(
    part: str, options: argparse.Namespace, costs: Costs
) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """What a part finds, size by size; None where it has but one."""
    match part:
        case "events":
            for size in SIZES:
                yield str(size), events(size, options.rounds, costs)
        case "hour":
            yield None, day(1_000, 1.0, 1.0, costs)[0]
        case "day":
            yield None, day(10_000, 24.0, 60.0, costs)[0]
        case _:
            yield from _really(part, options)


def _really(part: str, options: argparse.Namespace) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parts that are not in virtual time."""
    match part:
        case "journal":
            for length in (FEW_STEPS, options.steps):
                yield str(length), long_run.journal_of(length)
        case "store":
            for size, found in many_models.store_of(options.models):
                yield str(size), found
        case "campaign":
            for trials in options.trials:
                yield str(trials), long_campaign.campaign_of(trials)
        case "workers":
            for size in options.workers:
                found = many_workers.workers_of(size, options.seconds, options.every_s)
                yield str(size), found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--steps", type=int, default=10_000_000, help="of the long run")
    parser.add_argument("--models", type=int, nargs="+", default=many_models.SIZES)
    parser.add_argument("--trials", type=int, nargs="+", default=long_campaign.SIZES)
    parser.add_argument("--workers", type=int, nargs="+", default=(16, 32, 64))
    parser.add_argument("--seconds", type=float, default=60.0, help="under fire")
    parser.add_argument("--every-s", type=float, default=1.0, help="between two kills")
    parser.add_argument("--costs", type=Path, default=RESULTS / "recovery.json")
    options = parser.parse_args()
    found = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    costs = costs_in(options.costs)
    found["costs"] = {
        "step_s": costs.work_s,
        "recover_s": costs.recover_s,
        "start_s": costs.start_s,
    }
    for part in options.parts:
        for size, figures in measured(part, options, costs):
            print(part, size or "", figures, flush=True)
            if size is None:
                found[part] = figures
            else:
                sizes = {**found.get(part, {}), size: figures}
                found[part] = dict(sorted(sizes.items(), key=lambda item: int(item[0])))
            save(options.out, found, parts=[part if size is None else f"{part} {size}"])


if __name__ == "__main__":
    main()
