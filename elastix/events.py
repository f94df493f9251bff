"""What happens in a run, as frozen dataclasses, and the bus that carries them.

Everything a person sees (console, journal, audit, report) is a reader of these events. An event
is plain data, and may be a line of JSON (event_records).
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Span = tuple[int, int]
"""Half-open range of stream positions; see data.cursor for what a position is."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, at `t` seconds since the Unix epoch."""

    t: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run begins, or goes on after a restart.

    Attributes:
        code: a digest of its train function.
        checkpoint: what CheckpointConfig.to_dict gives.
        origin: where it was started from: "command", "directory", "host", "git" (the commit).
        exact: as in RunConfig.
        order_seed: of the order of samples, where it is not `seed`: in a trial.
        exchange: what ExchangeConfig.to_dict gives.
        sentinel: whether workers compare a part of what they hold in every step.
    """

    name: str
    seed: int
    config: Mapping[str, Any]
    scaling: Mapping[str, Any]
    versions: Mapping[str, str]
    code: str = ""
    checkpoint: Mapping[str, Any] = field(default_factory=dict)  # unknown to journals of before
    origin: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False
    order_seed: int | None = None
    exchange: Mapping[str, Any] = field(default_factory=dict)
    sentinel: bool = False

    @property
    def seed_of_order(self) -> int:
        """Of the order of samples."""
        return self.seed if self.order_seed is None else self.order_seed


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """A worker process is up and waits to be let into the group.

    Attributes:
        mates: of a worker that is several processes, node and process id of the others.
        computes_with: on what its last bits depend: versions, processor, threads, GPU.
    """

    worker: int
    pid: int
    node: str
    device: str
    mates: tuple[tuple[str, int], ...] = ()
    computes_with: str = ""


@dataclass(frozen=True, kw_only=True)
class GenerationFormed(Event):
    """The controller decided who is in the group; rank is the position in `members`.

    Attributes:
        urgent: members enter it at once. If not, they do at a boundary that they agree on, and
            those of the one before it are in the group until then.
    """

    generation: int
    members: tuple[int, ...]
    cause: str
    urgent: bool = True


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """Training goes on from an older State; commits after `step` in the journal are void.

    Attributes:
        ref: of the State in the store; empty if it is not there.
        held: no worker was whole any more, and the processes that were left held all its parts.
        sequence: number of its next event that several workers may send; 0 if that is not known.
        again: so many steps are computed again since a worker held something else in them, unseen.
    """

    step: int
    ref: str
    held: bool = False
    sequence: int = 0
    again: int = 0


@dataclass(frozen=True, kw_only=True)
class ResumedFromShadow(Event):
    """All workers of the group were lost, and training goes on from the State that a shadow has.

    Attributes:
        worker: the shadow; it is in the group from here on.
        step: the last one in its State.
        steps_lost: commits after it that the journal has; a Resumed before this event voids them.
        sequence: number of its next event that several workers may send.
        equal: its State did not differ when it was last compared with the group's.
    """

    worker: int
    step: int
    steps_lost: int
    sequence: int
    equal: bool


@dataclass(frozen=True, kw_only=True)
class ProcessorsDiffer(Event):
    """Workers of the group compute with different things, and so round differently. Said once.

    Attributes:
        kinds: by what they compute with, the workers.
    """

    kinds: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class ReplicasLevelled(Event):
    """All workers go on from the State of `worker` after `step`, as their processors differ."""

    step: int
    worker: int


@dataclass(frozen=True, kw_only=True)
class ShadowDiffers(Event):
    """A shadow that did all steps holds another State than the group; it is copied anew.

    Where it computes on other hardware that is rounding. Said again when the distance is another.

    Attributes:
        followed: operations that it has followed since its State was copied.
        parts: what differs by its digest, as in ReplicasCompared.
    """

    worker: int
    step: int
    followed: int = 0
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SamplesLeftOut(Event):
    """These positions are left out on purpose from here on: they are not used, and not missing.

    Attributes:
        step: the last one that counted, if the guard has left them out; else -1.
    """

    loader: int
    spans: tuple[Span, ...]
    step: int = -1


@dataclass(frozen=True, kw_only=True)
class LoaderOpened(Event):
    """A data loader: its samples have positions epoch * length + k in the stream.

    Attributes:
        blocks: if it is shuffled in blocks: pairs of how many, and the samples of each.
        mixed: blocks that are shuffled together.
        scattered: the order of its many samples is computed where it is needed.
        slices: into how many each batch is cut; 0 for a share for each worker.
        before: positions that another run had used, in whose place this one began.
        begun: the step after which it did.
    """

    loader: int
    length: int
    batch_size: int
    shuffle: bool
    seed: int
    blocks: tuple[tuple[int, int], ...] = ()
    mixed: int = 0
    slices: int = 0
    scattered: bool = False
    before: tuple[Span, ...] = ()
    begun: int = 0


@dataclass(frozen=True, kw_only=True)
class EpochsPlanned(Event):
    """The train function asked a loader for the epochs up to this number, counted from 1."""

    loader: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class BatchShares:
    """One global batch of one loader as it was committed.

    Attributes:
        epoch: in which it was drawn.
        shares: which positions each contributor had, in rank order; empty shares are left out.
        owed: positions that were planned for this batch and lost with their worker.
        whole: contributors that each had all of the batch, since it could not be split in the ratio
            of the one that was drawn with it; `shares` has it once, under the first of them.
        passed: False if the next batch of the loader was drawn for the same step and no backward
            pass came between: all workers left this one out, or used both together.
    """

    loader: int
    epoch: int
    shares: Mapping[int, tuple[Span, ...]]
    owed: tuple[Span, ...] = ()
    whole: tuple[int, ...] = ()
    passed: bool = True

    @property
    def samples(self) -> int:
        """How many samples were used."""
        return sum(stop - start for spans in self.shares.values() for start, stop in spans)


@dataclass(frozen=True, kw_only=True)
class StepCommitted(Event):
    """The group agreed on the gradient of `step` (counted from 1) in `generation`.

    `batches` has one entry per global batch: one without accumulation.
    """

    step: int
    generation: int
    world_size: int
    batches: tuple[BatchShares, ...]


@dataclass(frozen=True, kw_only=True)
class SlicesHandedOver(Event):
    """Slices of lost workers were computed by others within the same step, so that it is whole.

    Attributes:
        moved: (whose they were, who has computed them, how many).
    """

    step: int
    moved: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A worker is gone. `rank` is what it had in `generation`, or -1 before it was let in."""

    worker: int
    rank: int
    generation: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class WorkerNotStarted(Event):
    """A worker was to be started, and its process was gone before it said a word: no loss."""

    worker: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class WorkerLeft(Event):
    """A worker went at a boundary, as agreed; nothing of the step was lost.

    `cause` says why: "notice" (it was told that its process is to end), "draining" (its node is to
    go), "slow", or "idle" for a spare.
    """

    worker: int
    generation: int
    step: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class WorkerSlow(Event):
    """A worker's own part of a step takes `factor` times as long as the others' (their median)."""

    worker: int
    step: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class WorkersMeasured(Event):
    """What members have measured of themselves over the last seconds.

    Attributes:
        step: steps committed then.
        workers: by worker, numbers by name: `cpu` (cores in use), `memory` (bytes), `gpu` (share of
            the time at which it computed), `gpu_memory` (bytes), and shares of the time that went
            to parts of its steps: `data_s`, `compute_s`, `reduce_s`, `wait_s` and others.
    """

    step: int
    workers: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """A survivor is out of a recovery.

    Attributes:
        step: the step in hand; between steps, the last one committed.
        outcome: "accepted" (all survivors held every bucket), "passed on" (somebody had left the
            commit round), "reduced again", "done again" (FailureConfig(recovery="rollback")), or
            "between steps".
        rebuild_s: news of the new generation to a working process group.
        stall_s: news of the new generation to the agreed result of the operation at hand.
    """

    worker: int
    generation: int
    step: int
    outcome: str
    rebuild_s: float
    stall_s: float


@dataclass(frozen=True, kw_only=True)
class WorkerJoined(Event):
    """A worker was given the State by a live peer and takes part from the next step on.

    Attributes:
        copy_bytes: size of the State; 0 of a shadow, which had it.
        watched_steps: operations that it followed before it came in; 0 if the others waited for
            the copy.
    """

    worker: int
    generation: int
    step: int
    copy_s: float
    copy_bytes: int
    watched_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Reported(Event):
    """Metrics from `ctx.report`, as the lowest rank alive saw them; `seq` counts the calls."""

    seq: int
    step: int
    metrics: Mapping[str, Any]


def take_in(known: dict[str, Any], reported: Mapping[str, Any]) -> None:
    """Bring the last values of metrics up to date. None is none: nothing new of that metric."""
    known |= {k: v for k, v in reported.items() if v is not None or k not in known}


def comparable(value: Any) -> float | None:  # noqa: ANN401 - whatever was reported
    """A metric by which models can be ranked: a finite number. None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all floats
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, kw_only=True)
class TensorsInherited(Event):
    """The model begins with tensors of an ancestor; `found` says which, and how many."""

    found: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class AncestorIgnored(Event):
    """There is a model to begin from, and the train function prepared without `ctx.inherit`."""


@dataclass(frozen=True, kw_only=True)
class StateStored(Event):
    """A State is in the store, durably.

    Attributes:
        state_bytes: of all its tensors. stored_bytes: of these, what was new to the store.
        store_s: from the first worker's offer to the commit.
        stall_s: how long it held up training, on the worker where it did so longest.
        digest: of an exact run, equal to that of an undisturbed one after this step.
        compared: all who were in the group then were seen to hold it, or it was one worker.
    """

    ref: str
    step: int
    reason: str
    stored_bytes: int
    store_s: float
    stall_s: float = 0.0
    state_bytes: int = 0
    digest: str = ""
    compared: bool = False


@dataclass(frozen=True, kw_only=True)
class StateNotStored(Event):
    """A State was to be stored and could not be; what was stored before is as it was."""

    step: int
    reason: str
    why: str


@dataclass(frozen=True, kw_only=True)
class ReplicasCompared(Event):
    """The States that workers held after `step` were compared, bit by bit, through digests.

    Attributes:
        occasion: "join" (somebody joined just before), or why a State was taken at that boundary.
        workers: those that were compared, two at least.
        digest: of what most of them hold; "" if no more than half hold the same.
        apart: workers that hold something else; all of them if there is no majority.
        parts: what differs, by the names under which it stands in a State: "model", "optimizer".
    """

    step: int
    occasion: str
    workers: tuple[int, ...]
    digest: str
    apart: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all of them held the same."""
        return not self.apart


@dataclass(frozen=True, kw_only=True)
class ReplicasDiverged(Event):
    """Workers were seen to hold different States in the step after `step`, which did not count.

    Attributes:
        workers: those that were asked what they hold.
        apart: workers that hold something else than most; all of them if there is no majority; or
            those that were lost before they could be asked, if the others hold the same.
        parts: what differs, as in ReplicasCompared; or of what a slice gave that was computed more
            than once: "gradients", "buffers", "batch" (what was read), "drawn" (random numbers).
        cure: "evicted" (those apart, and the step is done again), or "went back" (all, to the last
            State that is stored, which was found equal).
        unseen: in an exact run, steps that count may have been computed from what is apart.
    """

    step: int
    workers: tuple[int, ...]
    apart: tuple[int, ...]
    parts: tuple[str, ...]
    cure: str
    unseen: bool = False


@dataclass(frozen=True, kw_only=True)
class StepVoided(Event):
    """The guard has voided what would have been `step`; its batches are left out for good."""

    step: int
    why: str


@dataclass(frozen=True, kw_only=True)
class StateDropped(Event):
    """A stored State was removed by the retention rule."""

    ref: str
    step: int


@dataclass(frozen=True, kw_only=True)
class WorkerRaised(Event):
    """The train function raised on this worker."""

    worker: int
    rank: int
    step: int
    traceback: str


def where_raised(worker: int, rank: int, step: int) -> str:
    """Which worker it was, and when; it has no rank before it has joined the group."""
    if rank < 0:
        return f"worker {worker}, before it joined the group"
    return f"worker {worker}, rank {rank}, after step {step}"


@dataclass(frozen=True, kw_only=True)
class StopAsked(Event):
    """The run was asked to end before its train function is through, once its State is stored."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The run is over: "finished", "failed" or "interrupted"."""

    outcome: str
    step: int
    message: str = ""
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class CampaignStarted(Event):
    """A search begins, or goes on: `known` trials are final already.

    Refused ones and controls from scratch are not among them.

    Attributes:
        objectives: name of each metric to its mode, "min" or "max".
        budget: what Budget.to_dict gives.
        searcher, inherit: what proposes, and how trials inherit.
    """

    name: str
    objectives: Mapping[str, str]
    budget: Mapping[str, Any]
    searcher: str
    inherit: str
    known: int
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class TrialStarted(Event):
    """A trial was given to a worker; `attempt` counts from 1, a promotion begins anew.

    Attributes:
        parent: number of the trial that its configuration was changed from.
        rung: reports after which it pauses; None for its end.
        name: what its run is called; one of several workers has a journal of that name.
        role: see TrialEnded.
    """

    trial: int
    config: Mapping[str, Any]
    parent: int | None
    attempt: int
    rung: int | None
    name: str = ""  # unknown to journals of before
    role: str = "search"


@dataclass(frozen=True, kw_only=True)
class TrialReported(Event):
    """A running trial called `ctx.report`; `seq` counts its calls."""

    trial: int
    seq: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrialLost(Event):
    """A trial has lost its worker, or raised and has retries left: it starts again."""

    trial: int
    attempt: int
    cause: str
    raised: bool = False  # unknown to journals of before


@dataclass(frozen=True, kw_only=True)
class TrialStarved(Event):
    """A trial ran out of memory that others had beside it, and starts again with more.

    Attributes:
        times: how often that was so by now.
        peak_bytes: the most that its worker held; 0: unknown.
        reserved_bytes: what is kept free for it next.
        cause: in a line.
    """

    trial: int
    times: int
    peak_bytes: int
    reserved_bytes: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class TrialEnded(Event):
    """A trial is finished, paused, stopped, failed or refused, and the journal has it.

    Attributes:
        values: of the objectives, in the user's sense; empty for a failed one.
        metrics: the last value of each metric.
        epochs: of its own. lineage_epochs: with its ancestors'.
        inherited: share of the model's bytes that came from an ancestor.
        ignored: there was an ancestor, and the train function never called `ctx.inherit`.
        seconds: on the worker.
        best: whether it is the best now (multi-objective: on the front), by what each has come to.
        message: why it failed, in a line.
        peak_bytes: the most that its worker held while it ran; 0: unknown.
        role: "search", or "rerank" for a control from scratch, which does not count for the budget.
    """

    trial: int
    state: str
    values: Mapping[str, float]
    metrics: Mapping[str, Any]
    ref: str
    epochs: float
    lineage_epochs: float
    inherited: float
    seconds: float
    best: bool
    message: str = ""
    ignored: bool = False
    peak_bytes: int = 0
    role: str = "search"


@dataclass(frozen=True, kw_only=True)
class StoreMeasured(Event):
    """How large the campaign's store is, with all that is in it.

    Attributes:
        logical_bytes: of all models, as if nothing were shared. unique_bytes: of what they share.
        physical_bytes: of all its files.
    """

    logical_bytes: int
    unique_bytes: int
    physical_bytes: int


@dataclass(frozen=True, kw_only=True)
class CampaignEnded(Event):
    """The search is over: "finished", "failed" or "interrupted"; `best` is a trial or -1."""

    outcome: str
    trials: int
    best: int
    message: str = ""


class Events:
    """A bus: whoever subscribes is called with each event, in the thread that emits it.

    Subscribers must be quick; one that does slow work keeps a queue of its own.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Event], None]] = []

    def subscribe(self, subscriber: Callable[[Event], None]) -> None:
        """Call `subscriber` with each event from now on."""
        self._subscribers.append(subscriber)

    def emit(self, event: Event) -> None:
        """Hand `event` to every subscriber, in the order in which they came."""
        for subscriber in self._subscribers:
            subscriber(event)
