"""Events as metrics: which series there are, and what each event does to them. Pure.

Names are without the prefix `elastix_`; units are base units and stand in the names. Where the
values go is a Sink's affair (ray_metrics has the one for Ray).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from elastix.events import (
    BatchShares,
    CampaignStarted,
    Event,
    GenerationFormed,
    ProcessorsDiffer,
    Recovered,
    ReplicasDiverged,
    ReplicasLevelled,
    Reported,
    Resumed,
    ResumedFromShadow,
    RunEnded,
    SamplesLeftOut,
    ShadowDiffers,
    SlicesHandedOver,
    StateNotStored,
    StateStored,
    StepCommitted,
    StepVoided,
    TrialEnded,
    TrialLost,
    TrialStarted,
    TrialStarved,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerNotStarted,
    WorkerSlow,
    WorkersMeasured,
    WorkerStarted,
)
from elastix.observe.best_trial import BestTrial
from elastix.observe.progress import Progress
from elastix.stream_coverage import Coverage


@dataclass(frozen=True)
class Series:
    """One metric.

    Attributes:
        kind: a gauge is set, a counter grows, a histogram is shown single values.
        tags: labels beside that of the run.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    tags: tuple[str, ...] = ()


_WORKER = ("worker", "node")

SERIES = (
    Series("world_size", "gauge", "Workers in the group."),
    Series("generation", "gauge", "Version of the group's membership."),
    Series("steps", "counter", "Committed steps."),
    Series("step_seconds", "histogram", "From one commit to the next."),
    Series("recovery_seconds", "histogram", "From the news of a loss to the agreed step."),
    Series("shadow_resumptions", "counter", "All workers were lost, and a shadow went on."),
    Series("shadows_differed", "counter", "Shadows that held another State than the group."),
    Series(
        "workers_not_started", "counter", "Workers that were gone before they began.", ("cause",)
    ),
    Series("workers_lost", "counter", "Workers that were lost.", ("cause", *_WORKER)),
    Series("workers_joined", "counter", "Workers that were let in while the run went on."),
    Series("join_seconds", "histogram", "How long a joiner copied the State."),
    Series("goodput_ratio", "gauge", "Committed samples over those of an undisturbed group."),
    Series("samples_committed", "counter", "Samples of committed steps."),
    Series("samples_owed", "gauge", "Samples that a lost worker had and nobody has yet."),
    Series("slices_handed_over", "counter", "Slices of lost workers that others computed."),
    Series("samples_repeated", "gauge", "Samples used twice in an epoch. Must stay 0."),
    Series("workers_left", "counter", "Workers that went as agreed.", ("cause", *_WORKER)),
    Series("processor_kinds", "gauge", "What workers compute with, if they round differently."),
    Series("replicas_levelled", "counter", "Times that all went on from one State for that."),
    Series("workers_diverged", "counter", "Workers that held another State than most.", _WORKER),
    Series("steps_voided", "counter", "Steps that the guard voided."),
    Series("samples_left_out", "counter", "Samples that are left out on purpose."),
    Series("worker_cpu_cores", "gauge", "Processor cores that a worker uses.", _WORKER),
    Series("worker_memory_bytes", "gauge", "Memory of a worker's process.", _WORKER),
    Series("worker_gpu_ratio", "gauge", "Share of the time at which its GPU computes.", _WORKER),
    Series("worker_gpu_memory_bytes", "gauge", "Memory in use on its GPU.", _WORKER),
    Series("worker_time_ratio", "gauge", "Share of time by part of a step.", (*_WORKER, "part")),
    Series("worker_slowness_ratio", "gauge", "Its time for a step over the others'.", _WORKER),
    Series("checkpoint_stall_seconds", "histogram", "How long a State held up training."),
    Series("checkpoint_write_seconds", "histogram", "From the snapshot to the durable State."),
    Series("checkpoints_failed", "counter", "States that could not be stored."),
    Series("store_logical_bytes", "counter", "Bytes of the States that this run has stored."),
    Series("store_physical_bytes", "counter", "Of these, bytes that were new to the store."),
    Series("trials", "gauge", "Trials of the campaign.", ("state",)),
    Series("trials_lost", "counter", "Times that a trial lost its worker and began again."),
    Series(
        "trials_starved", "counter", "Times that a trial had too little memory, and began again."
    ),
    Series("trial_peak_bytes", "gauge", "Most memory that the last trial's worker held."),
    Series("best_objective", "gauge", "Of the best trial so far.", ("metric",)),
    Series("inherited_ratio", "gauge", "Share of the last trial's bytes that it inherited."),
    Series("reported", "gauge", "What ctx.report was given last.", ("metric",)),
)


_MEASURED = {
    "cpu": "worker_cpu_cores",
    "memory": "worker_memory_bytes",
    "gpu": "worker_gpu_ratio",
    "gpu_memory": "worker_gpu_memory_bytes",
}
"""What workers measure, and its series."""


class Sink(Protocol):
    """Where values go."""

    def put(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, grow a counter by, or show a histogram, `value`; `labels` of its tags."""
        ...

    def forget(self, name: str, *labels: str) -> None:
        """A gauge with these first labels is nobody's any more."""
        ...


class Readings:
    """A reader of one run's, or one campaign's, events."""

    def __init__(self, sink: Sink) -> None:
        self._put, self._forget = sink.put, sink.forget
        self._nodes: dict[int, str] = {}
        self._progress = Progress()
        self._committed_t: float | None = None
        self._repeated = 0
        self._known = 0
        self._best_trial = BestTrial()
        self._trials: dict[int, str] = {}
        self._in_state: Counter[str] = Counter()
        self._accounts: dict[int, Account] = {}

    def read(self, event: Event) -> None:
        """Pass on what the event means."""
        self._progress.add(event)
        match event:
            case StepCommitted():
                self._commit(event)
            case SlicesHandedOver():
                self._put("slices_handed_over", sum(slices for _, _, slices in event.moved))
            case Recovered():
                self._put("recovery_seconds", event.stall_s)
            case ResumedFromShadow():
                self._put("shadow_resumptions", 1)
            case ShadowDiffers():
                self._put("shadows_differed", 1)
            case StateStored():
                self._put("checkpoint_stall_seconds", event.stall_s)
                self._put("checkpoint_write_seconds", event.store_s)
                self._put("store_logical_bytes", event.state_bytes)
                self._put("store_physical_bytes", event.stored_bytes)
            case StateNotStored():
                self._put("checkpoints_failed", 1)
            case Reported():
                self._report(event)
            case Resumed():
                self._accounts.clear()  # what came before is the audit's affair
            case _:
                self._read_members(event)
                self._read_trials(event)

    def _read_members(self, event: Event) -> None:  # noqa: C901 - a case per event
        match event:
            case GenerationFormed():
                self._put("generation", event.generation)
                self._put("world_size", len(event.members))
            case WorkerStarted():
                self._nodes[event.worker] = event.node
            case WorkerLost():
                self._put("workers_lost", 1, event.cause, *self._who(event.worker))
                self._gone(event.worker)
            case WorkerNotStarted():
                self._put("workers_not_started", 1, event.cause)
            case WorkerLeft():
                self._put("workers_left", 1, event.cause, *self._who(event.worker))
                self._gone(event.worker)
            case WorkerSlow():
                self._put("worker_slowness_ratio", event.factor, *self._who(event.worker))
            case WorkersMeasured():
                for worker, values in event.workers.items():
                    self._measure(self._who(worker), values)
            case ProcessorsDiffer():
                self._put("processor_kinds", len(event.kinds))
            case ReplicasLevelled():
                self._put("replicas_levelled", 1)
            case ReplicasDiverged():
                for worker in event.apart:
                    self._put("workers_diverged", 1, *self._who(worker))
            case StepVoided():
                self._put("steps_voided", 1)
            case SamplesLeftOut():
                self._put("samples_left_out", sum(stop - start for start, stop in event.spans))
            case WorkerJoined():
                self._put("workers_joined", 1)
                self._put("join_seconds", event.copy_s)
            case RunEnded():
                self._put("world_size", 0)

    def _who(self, worker: int) -> tuple[str, str]:
        """A worker's labels."""
        return str(worker), self._nodes.get(worker, "")

    def _measure(self, who: tuple[str, str], values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name in _MEASURED:
                self._put(_MEASURED[name], value, *who)
            elif name.endswith("_s"):
                self._put("worker_time_ratio", value, *who, name.removesuffix("_s"))

    def _gone(self, worker: int) -> None:
        """What it used is free: its gauges end."""
        for name in (*_MEASURED.values(), "worker_time_ratio", "worker_slowness_ratio"):
            self._forget(name, *self._who(worker))

    def _read_trials(self, event: Event) -> None:
        match event:
            case CampaignStarted():
                self._known = event.known
                self._best_trial.begin(event)
            case TrialStarted():
                self._trial(event.trial, "running")
            case TrialLost():
                self._trial(event.trial, "waiting")
                if not event.raised:
                    self._put("trials_lost", 1)
            case TrialStarved():
                self._trial(event.trial, "waiting")
                self._put("trials_starved", 1)
            case TrialEnded(state="refused"):
                self._trial(event.trial, event.state)
            case TrialEnded():
                self._trial(event.trial, event.state)
                if event.peak_bytes:
                    self._put("trial_peak_bytes", event.peak_bytes)
                self._put("inherited_ratio", event.inherited)
                self._best_trial.end(event)
                best = self._best_trial.event
                for name, value in best.values.items() if best is not None else ():
                    self._put("best_objective", value, name)

    def _commit(self, event: StepCommitted) -> None:
        self._put("steps", 1)
        if self._committed_t is not None:
            self._put("step_seconds", max(0.0, event.t - self._committed_t))
        self._committed_t = event.t
        for batch in event.batches:
            self._put("samples_committed", batch.samples)
            account = self._accounts.setdefault(batch.loader, Account())
            self._repeated += account.add(batch)
        goodput = self._progress.goodput.share
        if goodput is not None:
            self._put("goodput_ratio", goodput)
        self._put("samples_repeated", self._repeated)
        self._put("samples_owed", sum(account.owed for account in self._accounts.values()))

    def _trial(self, trial: int, state: str) -> None:
        """A trial changes its state; those of an earlier process are counted, not known."""
        before = self._trials.get(trial)
        if before is not None:
            self._in_state[before] -= 1
            self._put("trials", self._in_state[before], before)
        self._trials[trial] = state
        self._in_state[state] += 1
        self._put("trials", self._in_state[state], state)
        if self._known:
            self._put("trials", self._known, "earlier")

    def _report(self, event: Reported) -> None:
        for name, value in event.metrics.items():
            if isinstance(value, int | float):
                self._put("reported", float(value), name)


class Account:
    """What is committed of a loader's stream, and what is owed."""

    def __init__(self) -> None:
        self._used = Coverage()
        self._reached = 0

    def add(self, batch: BatchShares) -> int:
        """Count one batch; how many of its positions were committed before."""
        used = [span for spans in batch.shares.values() for span in spans]
        self._reached = max([self._reached, *(stop for _, stop in (*used, *batch.owed))])
        again = (span for start, stop in used for span in self._used.add(start, stop))
        return sum(stop - start for start, stop in again)

    @property
    def owed(self) -> int:
        """Positions between those that are committed, and beyond them as far as any was drawn."""
        if not self._used.count:
            return 0
        return self._reached - self._used.begin - self._used.count
