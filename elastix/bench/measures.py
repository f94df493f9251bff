"""What a scaling benchmark measures, and when it kills and ends. Pure: no torch, no Ray, no clock.

A rate is samples of whole steps over the time between two commits, so it has no part of a step in
it. The same arithmetic serves elastix and DDP.
"""

import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby, pairwise

from elastix.errors import ConfigError
from elastix.events import (
    Event,
    GenerationFormed,
    Resumed,
    StepCommitted,
    WorkerStarted,
)

LEAST_STEPS = 5
_PARTS = 5
_NEAR = 0.1  # an epoch's last batch is smaller
_HOPE_S = 60.0  # beyond the interval of the last kill, for the step after it,
_HOPE_STEPS = 5.0  # or so many times a step, which may take longer
_LATE = 1.5  # times the interval that kills were to have


@dataclass(frozen=True)
class Timing:
    """How long is measured.

    Attributes:
        warmup_s: from the first step of the whole group, not measured.
        seconds: of undisturbed training, and at least LEAST_STEPS steps.
        kills: afterwards, in a group of two or more.
        kill_every_s: from one to the next, and from the last to the end.
    """

    warmup_s: float
    seconds: float
    kills: int
    kill_every_s: float

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--warmup", self.warmup_s, 0.0),
            ("--seconds", self.seconds, 0.5),
            ("--kill-every", self.kill_every_s, 0.5),
        ):
            if not least <= value <= 1e6:
                raise ConfigError(
                    f"{name} is a number of seconds from {least:g} to 1e6, not {value:g}. "
                    "Nothing was started."
                )
        if not 0 <= self.kills <= 1000:
            raise ConfigError(
                f"--kill is a number of kills from 0 to 1000, not {self.kills}. Nothing was "
                "started."
            )


@dataclass(frozen=True)
class Commit:
    """A step that counts.

    Attributes:
        t: when, in seconds since the Unix epoch.
        samples: of the whole group.
        step: its number, from 1.
        world_size: workers that contributed.
        generation: of the group; 0 under DDP.
    """

    t: float
    samples: int
    step: int
    world_size: int
    generation: int = 0


@dataclass(frozen=True)
class Rate:
    """Samples per second, undisturbed.

    Attributes:
        samples_per_s: over the whole window.
        low, high: of its fifths: how far the machine was quiet.
        steps: in the window.
        seconds: its length.
        step_samples: of the whole group in one step, on average.
    """

    samples_per_s: float
    low: float
    high: float
    steps: int
    seconds: float
    step_samples: float

    @property
    def step_s(self) -> float:
        """Of one step, on average."""
        return self.seconds / self.steps


def measure_rate(commits: Sequence[Commit], size: int, timing: Timing) -> Rate | None:
    """The rate in the first window of a group of `size` that stayed as it was; None before."""
    for _, run in groupby(commits, lambda commit: (commit.generation, commit.world_size)):
        group = list(run)
        if group[0].world_size != size:
            continue
        inside = [c for c in group if c.t >= group[0].t + timing.warmup_s]
        for place, last in enumerate(inside):
            if place >= LEAST_STEPS and last.t >= inside[0].t + timing.seconds:
                return _rate(inside[: place + 1])
    return None


def _rate(commits: Sequence[Commit]) -> Rate:
    steps = len(commits) - 1
    cuts = [steps * part // _PARTS for part in range(_PARTS + 1)]
    parts = [_samples_per_s(commits[start : stop + 1]) for start, stop in pairwise(cuts)]
    return Rate(
        samples_per_s=_samples_per_s(commits),
        low=min(parts),
        high=max(parts),
        steps=steps,
        seconds=commits[-1].t - commits[0].t,
        step_samples=sum(c.samples for c in commits[1:]) / steps,
    )


def _samples_per_s(commits: Sequence[Commit]) -> float:
    """Of the steps after the first of these, which ended when it was committed."""
    seconds = commits[-1].t - commits[0].t
    return sum(c.samples for c in commits[1:]) / seconds if seconds > 0 else math.inf


@dataclass(frozen=True)
class Death:
    """A worker that was killed.

    Attributes:
        t: when, in seconds since the Unix epoch.
        stall_s: until the next step of a group without it was committed; None if none was.
    """

    worker: int
    t: float
    stall_s: float | None = None


class Turn(Enum):
    """What is to be done besides killing."""

    WAIT = "wait"
    OVER = "over"


@dataclass(frozen=True)
class Victim:
    """Who is to be killed now."""

    worker: int
    pid: int


@dataclass
class Observation:
    """One run of elastix, told by its events, from its start until enough is measured.

    Attributes:
        size: of the whole group.
        timing: how long, and how many kills.
        choice: of victims.
        rate: undisturbed; None while it is not known.
        over: whether all is measured.
        lacking_s: for how long the group has not been whole, when it was last decided.
    """

    size: int
    timing: Timing
    choice: random.Random
    rate: Rate | None = None
    over: bool = False
    lacking_s: float = 0.0
    _short_since: float | None = None
    _commits: list[Commit] = field(default_factory=list)
    _formed: list[GenerationFormed] = field(default_factory=list)
    _pids: dict[int, int] = field(default_factory=dict)
    _kills: list[Death] = field(default_factory=list)
    _until: float = math.inf

    def add(self, event: Event) -> None:
        """What the run's journal has."""
        match event:
            case WorkerStarted():
                self._pids[event.worker] = event.pid
            case GenerationFormed():
                self._formed.append(event)
            case Resumed():
                self._commits = [c for c in self._commits if c.step <= event.step]
            case StepCommitted():
                samples = sum(batch.samples for batch in event.batches)
                self._commits.append(
                    Commit(event.t, samples, event.step, event.world_size, event.generation)
                )

    def decide(self, now: float) -> Turn | Victim:
        """What is to be done at `now`; a victim counts as killed once `killed` is called."""
        turn = self._decide(now)
        self.over = turn is Turn.OVER
        whole = bool(self._formed) and len(self._formed[-1].members) >= self.size
        begun = now if self._short_since is None else self._short_since
        self._short_since = None if whole or self.over else begun
        self.lacking_s = 0.0 if self._short_since is None else now - self._short_since
        return turn

    def _decide(self, now: float) -> Turn | Victim:
        if self.rate is None:
            self.rate = measure_rate(self._commits, self.size, self.timing)
        if self.rate is None:
            return Turn.WAIT
        if self.size < 2 or not self.timing.kills:
            return Turn.OVER
        due = self._kills[-1].t + self.timing.kill_every_s if self._kills else now
        if now < due:
            return Turn.WAIT
        if len(self._kills) < self.timing.kills:
            return self._victim()
        hope_s = max(_HOPE_S, _HOPE_STEPS * self.rate.step_s)
        if self.deaths[-1].stall_s is None and now <= due + hope_s:
            return Turn.WAIT
        self._until = now
        return Turn.OVER

    def _victim(self) -> Turn | Victim:
        """Not before there is somebody who goes on: who joins enters some time after the decision.

        If the last who had entered was killed in between, the run would begin anew.
        """
        newest = self._formed[-1]  # the rate is known, so there is one
        entered = self._commits and self._commits[-1].generation >= newest.generation
        members = newest.members if entered else ()
        alive = [w for w in members if w in self._pids and w not in {k.worker for k in self._kills}]
        if len(alive) < 2:
            return Turn.WAIT
        worker = self.choice.choice(alive)
        return Victim(worker, self._pids[worker])

    def killed(self, victim: Victim, t: float) -> None:
        """It was sent SIGKILL at `t`."""
        self._kills.append(Death(victim.worker, t))

    def standing(self) -> str:
        """How far it is, for those who wait."""
        there = len(self._formed[-1].members) if self._formed else 0
        text = f"{self.steps} steps so far, {there} of {self.size} workers in the group"
        if self.rate is None or self.size < 2:
            return text
        return f"{text}, {len(self._kills)} of {self.timing.kills} killed"

    @property
    def steps(self) -> int:
        """Steps that count so far."""
        return len(self._commits)

    @property
    def counts_samples(self) -> bool:
        """Whether any step so far had samples of a loader."""
        return any(commit.samples for commit in self._commits)

    @property
    def deaths(self) -> list[Death]:
        """Each kill with what came of it."""
        return [Death(kill.worker, kill.t, self._stall(kill)) for kill in self._kills]

    def _stall(self, kill: Death) -> float | None:
        """A step may end between a kill and its effect; the one that counts is of those left."""
        without = next(
            (f for f in self._formed if f.t > kill.t and kill.worker not in f.members), None
        )
        if without is None:
            return None
        times = (c.t for c in self._commits if c.generation >= without.generation)
        first = min((t for t in times if t > kill.t), default=None)
        return None if first is None else first - kill.t

    @property
    def goodput(self) -> float | None:
        """Samples from the first kill on, over what the undisturbed rate had made of that time."""
        if self.rate is None or not self._kills or math.isinf(self._until):
            return None
        since = self._kills[0].t
        made = sum(c.samples for c in self._commits if since < c.t <= self._until)
        return made / (self._until - since) / self.rate.samples_per_s


@dataclass(frozen=True, kw_only=True)
class SizeMeasured:
    """What was measured with one number of workers.

    Attributes:
        elastix, ddp: the two rates; None for DDP if it was left out.
        deaths: kills during the elastix run.
        goodput: see Observation.
    """

    workers: int
    elastix: Rate
    ddp: Rate | None = None
    deaths: Sequence[Death] = ()
    goodput: float | None = None

    @property
    def of_ddp(self) -> float | None:
        """The rate of elastix over that of DDP."""
        return None if self.ddp is None else self.elastix.samples_per_s / self.ddp.samples_per_s

    @property
    def stall_s(self) -> float | None:
        """The median over the kills."""
        known = [death.stall_s for death in self.deaths if death.stall_s is not None]
        return statistics.median(known) if known else None


@dataclass(frozen=True, kw_only=True)
class ScalingMeasured:
    """A whole benchmark.

    Attributes:
        script, function: what was measured.
        cores: that this process may use.
        cpus: of each worker.
        sizes: in the order of the numbers of workers.
        versions: of what it ran on.
        cut_short: it ended before all was measured.
    """

    script: str
    function: str
    cores: int
    cpus: float
    timing: Timing
    sizes: Sequence[SizeMeasured]
    versions: Mapping[str, str]
    cut_short: bool = False

    def efficiency(self, size: SizeMeasured, system: str) -> float | None:
        """Rate per worker over that of the smallest group; `system` is elastix or ddp."""
        first: Rate | None = getattr(self.sizes[0], system)
        this: Rate | None = getattr(size, system)
        if first is None or this is None:
            return None
        return (this.samples_per_s / size.workers) / (first.samples_per_s / self.sizes[0].workers)

    def oversubscribed(self, size: SizeMeasured) -> bool:
        """Whether its workers have fewer cores than they were promised."""
        return size.workers * max(1.0, self.cpus) > self.cores

    @property
    def notes(self) -> list[str]:
        """What a reader must know to take the numbers for what they are."""
        cut = ["The benchmark was cut short: what is missing here was not measured."]
        return [
            *(cut if self.cut_short else ()),
            *self._of_cores(),
            *self._of_batches(),
            *self._of_ddp(),
            *self._of_kills(),
        ]

    def _of_cores(self) -> Iterator[str]:
        over = [str(size.workers) for size in self.sizes if self.oversubscribed(size)]
        beside = any(size.ddp is not None for size in self.sizes)
        if over:
            yield (
                f"This machine has {self.cores} usable core{'s' * (self.cores != 1)}: with "
                f"{', '.join(over)} workers they are shared, and efficiency says nothing about "
                "scaling." + " The comparison with DDP holds, as both had the same cores." * beside
            )

    def _of_batches(self) -> Iterator[str]:
        first, last = self.sizes[0], self.sizes[-1]
        before, after = first.elastix.step_samples, last.elastix.step_samples
        if first is last:
            return
        if abs(after / before - 1) < _NEAR:
            yield (
                f"A step of the whole group has {before:.0f} samples with any number of workers, "
                "so each worker's share shrinks (strong scaling)."
            )
        else:
            yield (
                f"A step has {before:.0f} samples with {first.workers} and {after:.0f} with "
                f"{last.workers} workers (weak scaling)."
            )

    def _of_ddp(self) -> Iterator[str]:
        if any(size.ddp for size in self.sizes):
            yield (
                "DDP: the same function in as many plain processes, with torch's "
                "DistributedDataParallel and DataLoader at their defaults and the same share of "
                "each batch."
            )
        for size in self.sizes:
            ours, theirs = size.elastix.step_samples, size.ddp.step_samples if size.ddp else 0.0
            if size.ddp and abs(theirs / ours - 1) >= _NEAR:
                yield (
                    f"With {size.workers} workers a step of elastix had {ours:.0f} samples, and "
                    f"{theirs:.0f} were drawn at a time under DDP, as where a step takes several "
                    "batches, or a batch several steps. If not, their steps are not the same."
                )

    def _of_kills(self) -> Iterator[str]:
        if any(size.goodput is not None and size.goodput > 1 for size in self.sizes):
            yield (
                "Goodput over 100%: fewer workers were faster than all of them while one was "
                "away. A step of this function is too small to be shared."
            )
        if not self.timing.kills:
            yield "No worker was killed: --kill N measures stall and goodput."
        elif any(size.workers == 1 for size in self.sizes):
            yield "A single worker is not killed, since nobody would be left to go on."
        gaps = (b.t - a.t for size in self.sizes for a, b in pairwise(size.deaths))
        if (longest := max(gaps, default=0.0)) > _LATE * self.timing.kill_every_s:
            yield (
                f"Kills came up to {longest:.0f} s apart instead of {self.timing.kill_every_s:g} "
                "s: the next one waits until a replacement is in the group, if nobody would be "
                "left otherwise."
            )
        for size in self.sizes:
            if stood := sum(death.stall_s is None for death in size.deaths):
                yield (
                    f"With {size.workers} workers no step came after {stood} of "
                    f"{len(size.deaths)} kills: these are in no stall."
                )


def cores_of_quota(text: str) -> float:
    """CPUs that a control group may use at once, from its cpu.max: "QUOTA PERIOD", or "max"."""
    quota, _, period = text.strip().partition(" ")
    try:
        return float(quota) / float(period)
    except (ValueError, ZeroDivisionError):
        return math.inf  # no limit, or nothing that is known here


def parse_sizes(text: str) -> list[int]:
    """Numbers of workers from 4, 1,2,4 or 1..4, in ascending order.

    Raises:
        ConfigError: it is none of these, or beyond 1 to 64.
    """
    low, dots, high = text.partition("..")
    try:
        named = [int(low), int(high)] if dots else [int(n) for n in text.split(",")]
    except ValueError:
        named = [0]
    if not all(1 <= size <= 64 for size in named) or (dots and named[0] > named[1]):
        raise ConfigError(
            f"--workers {text}: give numbers of workers from 1 to 64 as 1..4, or 1,2,4. Nothing "
            "was started."
        )
    return list(range(named[0], named[1] + 1)) if dots else sorted(set(named))
