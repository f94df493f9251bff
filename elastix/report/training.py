"""What the report tells of a training run, folded from its events in one pass. Pure.

A run may have millions of steps, and a page must open at once: curves and rates are thinned
while they are read, so memory and page stay small however long the journal is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastix.data.audit import Audit, audit
from elastix.events import (
    Event,
    GenerationFormed,
    ProcessorsDiffer,
    ReplicasDiverged,
    ReplicasLevelled,
    Reported,
    Resumed,
    ResumedFromShadow,
    RunEnded,
    RunStarted,
    SamplesLeftOut,
    ShadowDiffers,
    StateDropped,
    StateNotStored,
    StateStored,
    StepCommitted,
    StepVoided,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerRaised,
    WorkerSlow,
    WorkersMeasured,
    WorkerStarted,
    where_raised,
)
from elastix.observe.event_text import line
from elastix.observe.progress import Progress

_POINTS = 1000  # of a curve
_BINS = 300  # of the rate over time
_MARKS = 2000  # on the timeline, the latest
_STATES = 200  # rows of the table of States, the latest


@dataclass
class Bar:
    """A worker was in the group from `start` to `stop`, seconds since the run began."""

    worker: int
    start: float
    stop: float


class Point(NamedTuple):
    """One reported value."""

    step: int
    t: float
    value: float


@dataclass
class Curve:
    """Values of one metric. When there are too many, every second one goes.

    Attributes:
        stride: of so many reported values one is kept; the last one always is.
    """

    stride: int = 1
    _kept: list[Point] = field(default_factory=list)
    _last: Point | None = None
    _seen: int = 0

    @property
    def points(self) -> list[Point]:
        """What is left, in order."""
        last = [self._last] if self._last and self._last is not self._kept[-1] else []
        return [*self._kept, *last]

    def add(self, point: Point) -> None:
        """One more value."""
        self._last = point
        if self._seen % self.stride == 0:
            self._kept.append(point)
        self._seen += 1
        if len(self._kept) > _POINTS:
            self._kept = self._kept[::2]
            self.stride *= 2

    def go_back(self, step: int) -> None:
        """Values after `step` are void."""
        self._kept = [point for point in self._kept if point.step <= step]
        self._last = self._kept[-1] if self._kept else None
        self._seen = len(self._kept) * self.stride


class Rates:
    """Samples committed over time, in bins that double their width when there are too many.

    A step's samples are spread over the time since the step before, so that a stall shows as
    long as it was and the rhythm of bins and steps does not.
    """

    def __init__(self) -> None:
        self.width_s = 0.25
        self.samples: list[float] = []
        self._until = 0.0

    def pause(self, t: float) -> None:
        """Nobody trained before `t` seconds since the run began."""
        self._until = t

    def add(self, t: float, samples: int) -> None:
        """Committed at `t` seconds since the run began."""
        start, self._until = min(self._until, t), t
        while t / self.width_s >= _BINS:
            padded = [*self.samples, 0.0]
            self.samples = [a + b for a, b in zip(padded[::2], padded[1::2], strict=False)]
            self.width_s *= 2
        first, last = int(start / self.width_s), int(t / self.width_s)
        self.samples += [0.0] * (last + 1 - len(self.samples))
        if first == last:
            self.samples[last] += samples
            return
        for place in range(first, last + 1):
            begin, end = place * self.width_s, (place + 1) * self.width_s
            self.samples[place] += samples * (min(end, t) - max(begin, start)) / (t - start)


@dataclass
class WorkerRecord:
    """One worker.

    Attributes:
        node, device: where it ran.
        samples: of its own shares, committed.
        present_s: in the group.
        usage: curves of what it measured, by name: "cpu", "memory", "gpu", "gpu_memory".
        parts: by part of a step, the sum of its shares of the time, and how many there were.
    """

    node: str = ""
    device: str = ""
    samples: int = 0
    present_s: float = 0.0
    usage: dict[str, Curve] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    measured: int = 0

    @property
    def rate(self) -> float | None:
        """Samples per second of its time in the group."""
        return self.samples / self.present_s if self.present_s > 0 else None

    def measure(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """One more measurement."""
        self.measured += 1
        for name, value in values.items():
            if name.endswith("_s"):
                part = name.removesuffix("_s")
                self.parts[part] = self.parts.get(part, 0.0) + value
            else:
                self.usage.setdefault(name, Curve()).add(Point(step, t, value))

    def share(self, part: str) -> float:
        """Of its time that went to this part."""
        return self.parts.get(part, 0.0) / self.measured if self.measured else 0.0


@dataclass
class Training:
    """A run as the page shows it; times are seconds since the run first began.

    Attributes:
        began: seconds since the Unix epoch.
        length_s: from the first event to the last.
        progress: what the events add up to.
        audit: the sample account.
        bars: who was in the group when.
        sizes: (time, workers in the group), at each change.
        marks: (time, kind, worker or -1, text): joins, restarts, errors.
        formed_s: when the first group had formed; None before that.
        workers: what is known of each worker.
        found: (time, text) of what sentinel and guard found, the latest.
        states: stored and not dropped since, the latest ones.
        states_stored, states_dropped, stored_bytes: over the whole run.
    """

    began: float = 0.0
    length_s: float = 0.0
    progress: Progress = field(default_factory=Progress)
    audit: Audit | None = None
    bars: list[Bar] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    marks: list[tuple[float, str, int, str]] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    formed_s: float | None = None
    workers: dict[int, WorkerRecord] = field(default_factory=dict)
    found: list[tuple[float, str]] = field(default_factory=list)
    states: list[tuple[float, StateStored]] = field(default_factory=list)
    states_stored: int = 0
    states_dropped: int = 0
    stored_bytes: int = 0
    _present: dict[int, Bar] = field(default_factory=dict)

    def add(self, event: Event) -> None:  # noqa: C901 - a case per event
        """Count one more event."""
        again = bool(self.began)
        self.began = self.began or event.t
        t = self.length_s = max(self.length_s, event.t - self.began)  # clocks are set back
        self.progress.add(event)
        match event:
            case RunStarted() if again:
                self._membership(t, ())
                self._mark(t, "restart", -1, "the run goes on in a new process")
            case RunEnded():
                self._membership(t, ())
            case Resumed():
                self.states = [entry for entry in self.states if entry[1].step <= event.step]
                for curve in self.curves.values():
                    curve.go_back(event.step)
                if event.again:
                    self.found = [*self.found[1 - _MARKS :], (t, line(event)[0])]
            case WorkerStarted():
                worker = self._worker(event.worker)
                worker.node, worker.device = event.node, event.device
            case WorkersMeasured():
                for number, values in event.workers.items():
                    self._worker(number).measure(t, event.step, values)
            case (
                ReplicasDiverged()
                | StepVoided()
                | SamplesLeftOut()
                | ShadowDiffers()
                | ProcessorsDiffer()
                | ReplicasLevelled()
            ):
                self.found = [*self.found[1 - _MARKS :], (t, line(event)[0])]
            case GenerationFormed():
                if event.members and self.formed_s is None:
                    self.formed_s = t
                if not self._present:
                    self.rates.pause(t)
                self._membership(t, event.members)
            case WorkerLost():
                self._leave(t, event.worker)
            case ResumedFromShadow():
                self._mark(t, "shadow", event.worker, line(event)[0])
            case WorkerLeft():
                text = f"worker {event.worker} left after step {event.step} ({event.cause})"
                self._mark(t, "left", event.worker, text)
                self._leave(t, event.worker)
            case WorkerSlow():
                text = f"worker {event.worker} took {event.factor:.1f} times as long as the others"
                self._mark(t, "slow", event.worker, text)
            case WorkerJoined():
                text = line(event)[0]
                self._mark(t, "join", event.worker, text)
            case WorkerRaised():
                where = where_raised(event.worker, event.rank, event.step)
                text = f"the train function raised on {where}"
                self._mark(t, "error", event.worker, text)
            case StepCommitted():
                self.rates.add(t, sum(batch.samples for batch in event.batches))
                for batch in event.batches:
                    for number, spans in batch.shares.items():
                        self._worker(number).samples += sum(stop - start for start, stop in spans)
            case Reported():
                self._report(t, event)
            case StateStored():
                self.states_stored += 1
                self.stored_bytes += event.stored_bytes
                self.states = [*self.states[1 - _STATES :], (t, event)]
            case StateNotStored():
                text = f"the State after step {event.step} was not stored: {event.why}"
                self._mark(t, "error", -1, text)
            case StateDropped():
                self.states_dropped += 1
                self.states = [entry for entry in self.states if entry[1].ref != event.ref]

    def finish(self) -> None:
        """After the last event: a run that goes on has open bars."""
        for bar in self._present.values():
            bar.stop = self.length_s
        for bar in self.bars:
            self._worker(bar.worker).present_s += bar.stop - bar.start

    def _worker(self, number: int) -> WorkerRecord:
        return self.workers.setdefault(number, WorkerRecord())

    def _membership(self, t: float, members: tuple[int, ...]) -> None:
        for worker in [w for w in self._present if w not in members]:
            self._leave(t, worker)
        for worker in members:
            if worker not in self._present:
                self._present[worker] = Bar(worker, t, t)
                self.bars.append(self._present[worker])
        self.sizes.append((t, len(members)))

    def _mark(self, t: float, kind: str, worker: int, text: str) -> None:
        """Remember it for the timeline; of very many the latest."""
        self.marks = [*self.marks[1 - _MARKS :], (t, kind, worker, text)]

    def _leave(self, t: float, worker: int) -> None:
        bar = self._present.pop(worker, None)
        if bar is not None:
            bar.stop = t

    def _report(self, t: float, event: Reported) -> None:
        for name, value in event.metrics.items():
            number = _number(value)
            if number is not None:
                self.curves.setdefault(name, Curve()).add(Point(event.step, t, number))


def tell(events: Iterable[Event]) -> Training:
    """Fold a run's events.

    Raises:
        Corrupt: they contradict each other.
    """
    training = Training()

    def noted() -> Iterable[Event]:
        for event in events:
            training.add(event)
            yield event

    training.audit = audit(noted())
    training.finish()
    return training


def _number(value: Any) -> float | None:  # noqa: ANN401 - whatever was reported
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
