"""What a run's events so far add up to: where it is, how fast it goes, what it has survived.

A fold over events that console, status and report share, so that they never disagree. Pure: its
only clock is the time in the events. Not here: the proof of exactly-once (data.audit).
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elastix.events import (
    EpochsPlanned,
    Event,
    GenerationFormed,
    LoaderOpened,
    Recovered,
    Reported,
    Resumed,
    RunEnded,
    RunStarted,
    SlicesHandedOver,
    StateStored,
    StepCommitted,
    WorkerJoined,
    WorkerLost,
    WorkerNotStarted,
    WorkerRaised,
    take_in,
)
from elastix.observe.reported_metrics import BestSoFar
from elastix.stream_coverage import Stretches

_WINDOW_S = 60.0  # of the present rate
_GRAIN_S = 0.5  # steps closer together than this are counted as one


@dataclass
class Loss:
    """A worker that was lost, and what became of the step that the group was in.

    Attributes:
        step: steps that were committed when it was noticed. A commit may be told after the loss:
            the survivors know which step they had in hand.
        stall_s: of the slowest survivor, from the news to the agreed step; None until then.
        rebuild_s: the part of it that a working group took.
        outcome: what Recovered says.
        generation: in which the survivors recovered.
    """

    t: float
    worker: int
    rank: int
    cause: str
    step: int
    lost_in: int
    stall_s: float | None = None
    rebuild_s: float = 0.0
    outcome: str = ""
    generation: int | None = None
    handed_over: int = 0


@dataclass
class _Stream:
    opened: LoaderOpened
    epochs: int = 0
    epoch: int = 0
    counted: Stretches = field(default_factory=Stretches)  # samples, one after the other


@dataclass
class Goodput:
    """Committed samples over those that the largest group would have made undisturbed.

    A step is undisturbed if the group did not change since the step before. What is not failure
    (evaluation, checkpoints) is in both rates, so a run without losses has a goodput of 1.
    """

    samples: int = 0
    seconds: float = 0.0
    undisturbed: dict[int, list[float]] = field(default_factory=dict)  # size: samples, seconds

    def add(self, size: int, samples: int, seconds: float, disturbed: bool) -> None:
        """Count one step."""
        self.samples += samples
        self.seconds += seconds
        if not disturbed:
            sums = self.undisturbed.setdefault(size, [0.0, 0.0])
            sums[0] += samples
            sums[1] += seconds

    @property
    def full_rate(self) -> float | None:
        """Samples per second of the largest group undisturbed; None while nothing is known."""
        sizes = [size for size, (_, seconds) in self.undisturbed.items() if seconds > 0]
        if not sizes:
            return None
        samples, seconds = self.undisturbed[max(sizes)]
        return samples / seconds

    @property
    def share(self) -> float | None:
        """From 0 to 1; None while nothing is known."""
        full = self.full_rate
        if not full or self.seconds <= 0:
            return None
        return min(1.0, self.samples / self.seconds / full)


class Progress:
    """See the module.

    Attributes:
        started_t, last_t: times of the first and the latest event of the process at work now.
        began_t: time of the very first event, over restarts.
        run: how this `fit` was set up.
        outcome: how the run ended; empty while it goes on.
        first_failure: the first traceback of a train function since this `fit` began.
        not_finite: by metric, the first step at which it was reported as NaN or infinite.
        best: the best value so far of the metric that checkpoints go by.
    """

    def __init__(self) -> None:
        self.run: RunStarted | None = None
        self.started_t = self.last_t = self.began_t = 0.0
        self._before_s = 0.0
        self.step = 0
        self.samples = 0
        self.generation = 0
        self.members: tuple[int, ...] = ()
        self.losses: list[Loss] = []
        self.joins: list[WorkerJoined] = []
        self.not_started = 0
        self.metrics: dict[str, Any] = {}
        self.metrics_step = 0
        self.stored: StateStored | None = None
        self.outcome = ""
        self.message = ""
        self.first_failure: WorkerRaised | None = None
        self.not_finite: dict[str, int] = {}
        self.best = BestSoFar()
        self.goodput = Goodput()
        self._streams: dict[int, _Stream] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._committed_t: float | None = None
        self._disturbed = True

    def add(self, event: Event) -> None:  # noqa: C901 - a case per event
        """Count one more event."""
        before, self.last_t = self.last_t, max(self.last_t, event.t)
        self.best.add(event)
        match event:
            case RunStarted():
                self._before_s += before - (self.started_t or before)
                self._start(event)
            case Resumed():
                self._resume(event)
            case LoaderOpened():
                self._streams.setdefault(event.loader, _Stream(event))
            case EpochsPlanned():
                if event.loader in self._streams:
                    self._streams[event.loader].epochs = event.epochs
            case StepCommitted():
                self._commit(event)
            case GenerationFormed():
                self.generation, self.members = event.generation, event.members
                self._disturbed = True
            case WorkerLost():
                self._lose(event)
            case WorkerNotStarted():
                self.not_started += 1
            case Recovered():
                self._recover(event)
            case SlicesHandedOver():
                self._hand_over(event)
            case WorkerJoined():
                self.joins.append(event)
            case Reported():
                self._report(event)
            case StateStored():
                self.stored = event
            case WorkerRaised():
                self.first_failure = self.first_failure or event
            case RunEnded():
                self.outcome, self.message = event.outcome, event.message

    # ------------------------------------------------------------------ what it comes to

    @property
    def took_s(self) -> float:
        """From the first to the last event of each process: between two of them nothing ran."""
        return self._before_s + self.last_t - (self.started_t or self.last_t)

    @property
    def rate(self) -> float | None:
        """Samples per second over the last minute; None before two commits."""
        if len(self._recent) < 2:
            return None
        (since, before), (now, samples) = self._recent[0], self._recent[-1]
        return (samples - before) / (now - since) if now > since else None

    @property
    def done(self) -> float | None:
        """Share of the planned epochs that is committed; None if no plan is known."""
        planned = self._planned
        if not planned:
            return None
        return min(1.0, sum(s.counted.end for s in self._streams.values() if s.epochs) / planned)

    @property
    def left_s(self) -> float | None:
        """Seconds until the planned epochs are committed at the present rate."""
        rate, done = self.rate, self.done
        return None if not rate or done is None else (1 - done) * self._planned / rate

    @property
    def _planned(self) -> int:
        return sum(s.epochs * s.opened.length for s in self._streams.values())

    @property
    def epoch(self) -> tuple[int, int]:
        """The epoch in progress, counted from 1, of how many (0: unknown), of the main loader."""
        first = next(iter(self._streams.values()), None)
        return (first.epoch + 1, first.epochs) if first else (0, 0)

    @property
    def workers_wanted(self) -> int:
        """The largest group that was asked for; what was seen, if that is not known."""
        wanted = self.run.scaling.get("num_workers", 0) if self.run else 0
        most = wanted if isinstance(wanted, int) else max(wanted)
        return int(max(most, len(self.members)))

    @property
    def slowest_recovery_s(self) -> float | None:
        """The longest stall of any survivor; None without a recovery."""
        return max((x.stall_s for x in self.losses if x.stall_s is not None), default=None)

    def summary(self, now: float) -> dict[str, Any]:
        """Where the run stands at `now`, as JSON values."""
        last = self.losses[-1] if self.losses else None
        return {
            "run": self.run.name if self.run else "",
            "running_s": max(0.0, now - self.started_t),
            "step": self.step,
            "samples": self.samples,
            "epoch": self.epoch[0],
            "epochs": self.epoch[1],
            "done": self.done,
            "left_s": self.left_s,
            "samples_per_s": self.rate,
            "goodput": self.goodput.share,
            "generation": self.generation,
            "workers": len(self.members),
            "workers_wanted": self.workers_wanted,
            "losses": len(self.losses),
            "last_loss": None if last is None else asdict(last),
            "slowest_recovery_s": self.slowest_recovery_s,
            "metrics": dict(self.metrics),
        }

    # ------------------------------------------------------------------ counting

    def _start(self, event: RunStarted) -> None:
        """A process of its own: what an earlier one was told about failures is history."""
        self.run = event
        self.started_t = self.last_t = event.t
        self.began_t = self.began_t or event.t
        self.outcome = self.message = ""
        self.first_failure = None
        self.members = ()
        self._committed_t = None
        self._recent.clear()
        self._disturbed = True

    def _resume(self, event: Resumed) -> None:
        """Commits after that step are void: their time was spent, their samples do not count."""
        self.step = event.step
        self.not_finite = {n: step for n, step in self.not_finite.items() if step <= event.step}
        for stream in self._streams.values():
            stream.counted.go_back(event.step)
        stand = sum(stream.counted.end for stream in self._streams.values())
        self.goodput.samples -= self.samples - stand
        self.samples = stand

    def _commit(self, event: StepCommitted) -> None:
        made = sum(batch.samples for batch in event.batches)
        self.step = event.step
        self.samples += made
        samples: dict[int, int] = {}
        for batch in event.batches:
            stream = self._streams.get(batch.loader)
            if stream is not None:
                stream.epoch = batch.epoch
                samples[batch.loader] = samples.get(batch.loader, 0) + batch.samples
        for loader, number in samples.items():
            counted = self._streams[loader].counted
            counted.add(event.step, (counted.end, counted.end + number))
        if self._committed_t is not None:
            seconds = max(0.0, event.t - self._committed_t)
            self.goodput.add(event.world_size, made, seconds, self._disturbed)
        self._committed_t = event.t
        self._disturbed = False
        if self._recent and event.t < self._recent[-1][0]:  # the clock was set back
            self._recent.clear()
        if not self._recent or event.t - self._recent[-1][0] >= _GRAIN_S:
            self._recent.append((event.t, self.samples))
        while self._recent[0][0] < event.t - _WINDOW_S and len(self._recent) > 2:
            self._recent.popleft()

    def _report(self, event: Reported) -> None:
        take_in(self.metrics, event.metrics)
        self.metrics_step = event.step
        for name, value in event.metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                self.not_finite.setdefault(name, event.step)

    def _lose(self, event: WorkerLost) -> None:
        self._disturbed = True
        self.losses.append(
            Loss(event.t, event.worker, event.rank, event.cause, self.step, event.generation)
        )

    def _hand_over(self, event: SlicesHandedOver) -> None:
        latest = {loss.worker: loss for loss in self.losses}
        for worker, _, slices in event.moved:
            if worker in latest:
                latest[worker].handed_over += slices

    def _recover(self, event: Recovered) -> None:
        """The slowest survivor counts. A loss is over with the first recovery after it."""
        self._disturbed = True
        for loss in self.losses:
            if loss.rank < 0 or loss.lost_in >= event.generation:
                continue  # it never was in the group, or was lost later
            if loss.generation not in (None, event.generation):
                continue
            loss.generation = event.generation
            loss.stall_s = max(loss.stall_s or 0.0, event.stall_s)
            loss.rebuild_s = max(loss.rebuild_s, event.rebuild_s)
            loss.outcome = event.outcome
            before = event.step if event.outcome == "between steps" else event.step - 1
            loss.step = max(loss.step, before)


def duration(seconds: float) -> str:
    """As a clock shows it: 0:04, 12:04, 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: Any) -> str:  # noqa: ANN401 - whatever was reported
    """A metric for people: four digits of a float, large ones whole, anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def shown(metrics: Mapping[str, Any]) -> str:
    """Metrics on one line."""
    return "  ".join(f"{name} {number(value)}" for name, value in metrics.items())
