"""Proves from a run's events that every sample was used exactly once. Pure."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elastix.data.cursor import count, merge, subtract
from elastix.errors import Corrupt
from elastix.events import (
    Event,
    LoaderOpened,
    Resumed,
    SamplesLeftOut,
    Span,
    StepCommitted,
)


@dataclass(frozen=True)
class LoaderAudit:
    """What became of one loader's stream.

    Attributes:
        samples: positions committed, each counted once.
        repeated: positions committed more than once.
        missing: positions below the last one committed that never were.
        epochs: epochs of which every sample is committed, or left out on purpose.
        left_out: positions that were left out on purpose.
    """

    loader: int
    length: int
    samples: int
    repeated: tuple[Span, ...]
    missing: tuple[Span, ...]
    epochs: int
    left_out: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Audit:
    """The sample account of a run.

    Attributes:
        steps: committed steps that stand (none that a restart went back behind).
        steps_lost: numbers that no committed step has, below the last.
        digest: equal for two runs that used the same samples, whatever happened on the way.
    """

    steps: int
    steps_lost: int
    loaders: tuple[LoaderAudit, ...]
    digest: str

    @property
    def exact(self) -> bool:
        """No step lost, no sample repeated or missing."""
        clean = all(not loader.repeated and not loader.missing for loader in self.loaders)
        return clean and not self.steps_lost

    def __str__(self) -> str:
        parts = [f"{self.steps} steps, {self.steps_lost} lost"]
        parts += [
            f"{loader.samples} samples ({loader.epochs} whole epochs of {loader.length}), "
            f"{count(loader.repeated)} repeated, {count(loader.missing)} missing"
            + (f", {count(loader.left_out)} left out on purpose" if loader.left_out else "")
            for loader in self.loaders
        ]
        return f"{'exact' if self.exact else 'NOT EXACT'}: {'; '.join(parts)}; {self.digest[:12]}"


@dataclass
class _Stream:
    opened: LoaderOpened
    spans: list[tuple[int, Span]] = field(default_factory=list)  # step, span
    left_out: tuple[Span, ...] = ()


def audit(events: Iterable[Event]) -> Audit:
    """Add up all committed batches.

    Raises:
        Corrupt: a batch of a loader that was never opened.
    """
    streams: dict[int, _Stream] = {}
    steps: list[int] = []
    for event in events:
        if isinstance(event, LoaderOpened):
            streams.setdefault(event.loader, _Stream(event))
        elif isinstance(event, Resumed):
            steps = [step for step in steps if step <= event.step]
            for stream in streams.values():
                stream.spans = [entry for entry in stream.spans if entry[0] <= event.step]
        elif isinstance(event, SamplesLeftOut):
            stream = streams[event.loader]
            fresh = subtract(event.spans, stream.left_out)
            stream.left_out = merge((*stream.left_out, *fresh))
        elif isinstance(event, StepCommitted):
            steps.append(event.step)
            for batch in event.batches:
                if batch.loader not in streams:
                    raise Corrupt(
                        f"step {event.step} has samples of unknown loader {batch.loader}."
                    )
                spans = (span for share in batch.shares.values() for span in share)
                streams[batch.loader].spans += [(event.step, span) for span in spans]
    accounts = tuple(_account(stream) for _, stream in sorted(streams.items()))
    text = json.dumps(
        [
            [*_order(s.opened), merge(span for _, span in s.spans)]
            for _, s in sorted(streams.items())
        ]
    )
    distinct = len(set(steps))
    return Audit(
        steps=distinct,
        steps_lost=(max(steps) if steps else 0) - distinct + (len(steps) - distinct),
        loaders=accounts,
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def _order(opened: LoaderOpened) -> list[Any]:
    """What says which sample a position is."""
    in_blocks = [opened.blocks, opened.mixed] if opened.blocks else []
    return [opened.length, opened.seed, opened.shuffle, *in_blocks]


def _account(stream: _Stream) -> LoaderAudit:
    length = stream.opened.length
    repeated: list[Span] = []
    missing: list[Span] = []
    reached = 0
    used = [span for _, span in stream.spans]
    for start, stop in sorted((*used, *stream.left_out)):
        if start > reached:
            missing.append((reached, start))
        if start < reached:
            repeated.append((start, min(stop, reached)))
        reached = max(reached, stop)
    first_gap = missing[0][0] if missing else reached
    return LoaderAudit(
        loader=stream.opened.loader,
        length=length,
        samples=reached - count(missing) - count(stream.left_out),
        repeated=merge(repeated),
        missing=tuple(missing),
        epochs=first_gap // length,
        left_out=stream.left_out,
    )
