"""What a run's events prove: that every sample was used exactly once, and replicas equal. Pure."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elastix.data.cursor import count, merge
from elastix.data.left_out import LeftOut
from elastix.errors import Corrupt
from elastix.events import (
    Event,
    LoaderOpened,
    ReplicasCompared,
    ReplicasDiverged,
    Resumed,
    RunStarted,
    SamplesLeftOut,
    Span,
    StateStored,
    StepCommitted,
)
from elastix.notebook import facts
from elastix.stream_coverage import Coverage, Stretches

_PASSED_OVER = "without a backward pass of their own (left out, or used with the next batch)"

_OF_SLICES = frozenset({"gradients", "batch", "drawn"})
"""What differs where a worker has computed a slice wrongly: it may have done so with others."""


@dataclass(frozen=True)
class LoaderAudit:
    """What became of one loader's stream.

    Attributes:
        samples: positions committed by this run, each counted once.
        repeated: positions committed more than once.
        missing: positions below the last one committed that never were.
        epochs: epochs of which every sample is committed, or left out on purpose.
        left_out: positions that were left out on purpose.
        passed_over: samples committed in batches after which the next one was drawn without a
            backward pass between: the train function left them out, or used them with the next.
    """

    loader: int
    length: int
    samples: int
    repeated: tuple[Span, ...]
    missing: tuple[Span, ...]
    epochs: int
    left_out: tuple[Span, ...] = ()
    passed_over: int = 0


@dataclass(frozen=True)
class ReplicasAudit:
    """Whether workers held the same State, as far as it was looked at.

    Attributes:
        compared: how often States were compared, at steps that stand.
        last: the latest comparison; None if there was none.
        most: workers of the largest step, 0 before any.
        left: workers of the last step.
        step: the last one committed.
        sentinel: whether workers compared a part of what they held in every step.
    """

    compared: int = 0
    last: ReplicasCompared | None = None
    most: int = 0
    left: int = 0
    step: int = 0
    sentinel: bool = False

    @property
    def equal(self) -> bool | None:
        """The latest comparison; None if nothing was ever compared."""
        return None if self.last is None else self.last.equal

    def __str__(self) -> str:
        if self.last is None:
            if self.most < 2:
                return "not compared: there was one worker, and nothing to compare"
            if self.sentinel:
                why = "one worker was left at the end; " if self.left == 1 else ""
                return (
                    f"not compared as a whole: {why}of what {self.most} workers held, the sentinel "
                    "compared a part in every step"
                )
            return f"NOT COMPARED: there were {self.most} workers, and nothing shows them equal"
        last = self.last
        if not last.equal:
            who, what = ", ".join(map(str, last.apart)), ", ".join(last.parts)
            return f"NOT EQUAL: after step {last.step} workers {who} differed in {what}"
        often = "once" if self.compared == 1 else f"{self.compared} times, last"
        text = f"equal: compared {often} after step {last.step} by {len(last.workers)} workers"
        if last.step < self.step:
            why = "one worker was left" if self.left == 1 else "not compared since"
            text += f" ({self.step - last.step} steps after it: {why})"
        return f"{text}; {last.digest[:12]}"


@dataclass(frozen=True)
class Audit:
    """The account of a run: of its samples, and of how far its replicas were compared.

    Attributes:
        steps: committed steps that stand (none that a restart went back behind).
        steps_lost: numbers that no committed step has, below the last.
        digest: equal for two runs that used the same samples, whatever happened on the way.
        replicas: what was compared, and whether it was equal; `exact` says nothing of that.
        state: of a run with RunConfig(exact=True), what is equal for any two of the same config,
            mesh and seed: the step of the last State that was stored, and its digest; None for
            others.
        diverged: the last step in which a worker was taken out since it computed something else;
            None if none was. It may have done so in slices that nobody else has computed.
    """

    steps: int
    steps_lost: int
    loaders: tuple[LoaderAudit, ...]
    digest: str
    replicas: ReplicasAudit = ReplicasAudit()
    state: tuple[int, str] | None = None
    diverged: int | None = None

    @property
    def exact(self) -> bool:
        """Of samples: no step lost, no sample repeated or missing.

        Whatever is drawn counts; what the train function does with it, it alone knows. See
        `LoaderAudit.passed_over`.
        """
        clean = all(not loader.repeated and not loader.missing for loader in self.loaders)
        return clean and not self.steps_lost

    @property
    def lines(self) -> dict[str, str]:
        """What is proved, of what, for people."""
        said = {"samples": self._samples(), "replicas": str(self.replicas)}
        if self.state is not None:
            step, digest = self.state
            way = ", whatever happened on the way"
            if self.diverged is not None:
                way = (
                    f". In step {self.diverged} a worker was found that computed something else: "
                    "what it has computed before that may be in it"
                )
            said["bytes"] = f"{digest[:12]} after step {step}{way}"
        return said

    def __str__(self) -> str:
        return "\n".join(f"{what} {text}" for what, text in self.lines.items())

    def _repr_html_(self) -> str:
        return facts("audit", self.lines.items())

    def _samples(self) -> str:
        parts = [f"{self.steps} steps, {self.steps_lost} lost"]
        parts += [
            f"{loader.samples} samples ({loader.epochs} whole epochs of {loader.length}), "
            f"{count(loader.repeated)} repeated, {count(loader.missing)} missing"
            + (f", {count(loader.left_out)} left out on purpose" if loader.left_out else "")
            + (f", {loader.passed_over} {_PASSED_OVER}" if loader.passed_over else "")
            for loader in self.loaders
        ]
        if not self.loaders:
            return f"not counted: {parts[0]}; no loader of elastix was used"
        return f"{'exact' if self.exact else 'NOT EXACT'}: {'; '.join(parts)}; {self.digest[:12]}"


@dataclass
class _Stream:
    opened: LoaderOpened
    used: Stretches = field(default_factory=Stretches)
    passed_over: Stretches = field(default_factory=Stretches)


def audit(events: Iterable[Event]) -> Audit:
    """Add up all committed batches, and all comparisons of replicas.

    Raises:
        Corrupt: samples of a loader that was never opened.
    """
    streams: dict[int, _Stream] = {}
    steps = Stretches()  # a step used its own number
    compared: list[ReplicasCompared] = []
    state: tuple[int, str] | None = None
    diverged: int | None = None
    watched: list[bool] = []  # of this process and those before it
    left_out = LeftOut()
    for event in events:
        left_out.take(event)
        if isinstance(event, RunStarted):
            watched.append(event.sentinel)
        elif isinstance(event, LoaderOpened):
            streams.setdefault(event.loader, _Stream(event))
        elif isinstance(event, Resumed):
            steps.go_back(event.step)
            compared = [found for found in compared if _stands(found, event)]
            for stream in streams.values():
                stream.used.go_back(event.step)
                stream.passed_over.go_back(event.step)
        elif isinstance(event, SamplesLeftOut):
            _known(streams, event.loader, "samples were left out")
        elif isinstance(event, StateStored) and event.digest:
            state = event.step, event.digest
        elif isinstance(event, ReplicasDiverged) and event.cure == "evicted":
            diverged = event.step + 1 if _OF_SLICES.intersection(event.parts) else diverged
        elif isinstance(event, ReplicasCompared):
            compared.append(event)
        elif isinstance(event, StepCommitted):
            steps.add(event.step, (event.step, event.step + 1), event.world_size)
            _commit(event, streams)
    spans = left_out.spans
    accounts = tuple(_account(s, spans.get(number, ())) for number, s in sorted(streams.items()))
    text = json.dumps(
        [[*_order(s.opened), merge(s.used.spans)] for _, s in sorted(streams.items())]
    )
    distinct = Coverage()
    twice = sum(count(distinct.add(*span)) for span in steps.spans)
    last = distinct.end - 1 if steps.spans else 0
    lost = last - distinct.count + twice
    if steps.spans:  # that run's, in whose place this one began, are not of this journal
        lost -= min((stream.opened.begun for stream in streams.values()), default=0)
    return Audit(
        steps=distinct.count,
        steps_lost=lost,
        loaders=accounts,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        replicas=_replicas(steps, compared, watched),
        state=state,
        diverged=diverged,
    )


def _stands(found: ReplicasCompared, resumed: Resumed) -> bool:
    """Whether a comparison counts yet: who differed after that very step begins from one State."""
    return found.step < resumed.step or (found.step == resumed.step and found.equal)


def _commit(event: StepCommitted, streams: dict[int, _Stream]) -> None:
    spans: dict[int, list[Span]] = {}
    for batch in event.batches:
        stream = _known(streams, batch.loader, f"step {event.step} has samples")
        used = spans.setdefault(batch.loader, [])
        these = [span for share in batch.shares.values() for span in share]
        used += these
        for span in () if batch.passed else merge(these):
            stream.passed_over.add(event.step, span)
    for loader, used in spans.items():
        for span in merge(used):
            streams[loader].used.add(event.step, span)


def _known(streams: dict[int, _Stream], loader: int, what: str) -> _Stream:
    if loader not in streams:
        raise Corrupt(f"{what} of unknown loader {loader}.")
    return streams[loader]


def _replicas(
    steps: Stretches, compared: list[ReplicasCompared], watched: list[bool]
) -> ReplicasAudit:
    apart = [found for found in compared if not found.equal]
    latest = (apart or compared)[-1:]
    return ReplicasAudit(
        # One that came late, or a controller that was replaced, may have had it told again.
        compared=len({(found.step, found.occasion) for found in compared}),
        last=latest[0] if latest else None,
        most=steps.most_workers,
        left=steps.last_workers,
        step=max(0, steps.end - 1),
        sentinel=bool(watched) and all(watched),
    )


def _order(opened: LoaderOpened) -> list[Any]:
    """What says which sample a position is."""
    in_blocks = [opened.blocks, opened.mixed] if opened.blocks else []
    scattered = ["scattered"] if opened.scattered else []
    return [opened.length, opened.seed, opened.shuffle, *in_blocks, *scattered]


def _account(stream: _Stream, left_out: tuple[Span, ...]) -> LoaderAudit:
    length = stream.opened.length
    covered = Coverage()
    repeated = [
        again
        for start, stop in sorted((*stream.used.spans, *left_out, *stream.opened.before))
        for again in covered.add(start, stop)
    ]
    if covered.begin < 0:  # of no epoch
        repeated.append((covered.begin, 0))
    missing = covered.gaps()
    first_gap = missing[0][0] if missing else covered.end
    return LoaderAudit(
        loader=stream.opened.loader,
        length=length,
        samples=covered.count - count(left_out) - count(stream.opened.before),
        repeated=merge(repeated),
        missing=missing,
        epochs=first_gap // length,
        left_out=left_out,
        passed_over=count(stream.passed_over.spans),
    )
