"""Which steps of a run are replayed, by whom, with which samples: from its journal alone. Pure."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from elastix.data.cursor import count, merge
from elastix.data.left_out import LeftOut
from elastix.errors import TrainError
from elastix.events import (
    BatchShares,
    Event,
    GenerationFormed,
    LoaderOpened,
    Resumed,
    SamplesLeftOut,
    Span,
    StateStored,
    StepCommitted,
)

if TYPE_CHECKING:
    from elastix.data.source import Source

_OfStep = TypeVar("_OfStep", StepCommitted, StateStored)
_ORDER = ("length", "seed", "shuffle", "blocks", "mixed", "scattered")
"""What says which sample stands at which position."""


def standing(events: Sequence[Event]) -> list[StepCommitted]:
    """Committed steps but for those that a restart went back behind."""
    return _standing(events, StepCommitted)


def last_stored(events: Sequence[Event]) -> StateStored | None:
    """The State that was stored last, of those that no restart went back behind."""
    return next(reversed(_standing(events, StateStored)), None)


def _standing(events: Sequence[Event], kind: type[_OfStep]) -> list[_OfStep]:
    found: list[_OfStep] = []
    for event in events:
        if isinstance(event, Resumed):
            found = [one for one in found if one.step <= event.step]
        elif isinstance(event, kind):
            found.append(event)
    return found


def left_out(events: Sequence[Event]) -> dict[int, list[tuple[int, tuple[Span, ...]]]]:
    """By loader, what is never used, and after which step that was said."""
    stands = {id(said) for said in LeftOut(events).told}
    found: dict[int, list[tuple[int, tuple[Span, ...]]]] = {}
    step = 0
    for event in events:
        if isinstance(event, StepCommitted | Resumed):
            step = event.step
        elif id(event) in stands and isinstance(event, SamplesLeftOut):
            found.setdefault(event.loader, []).append((step, event.spans))
    return found


def loaders_of(events: Sequence[Event]) -> dict[int, LoaderOpened]:
    """The run's loaders, as they were opened last."""
    return {event.loader: event for event in events if isinstance(event, LoaderOpened)}


def check_order(number: int, source: "Source", opened: Mapping[int, LoaderOpened]) -> None:
    """Refuse a loader that has other samples at the journal's positions: weights would differ.

    Raises:
        TrainError: names what differs.
    """
    for name in _ORDER if number in opened else ():
        then, now = getattr(opened[number], name), getattr(source, name)
        if then != now:
            raise TrainError(
                f"loader {number} had {name}={then} in the run, and is made with {name}={now} "
                "here, so the journal's positions mean other samples. Nothing was compared. Replay "
                "with the dataset that the run had."
            )


@dataclass(frozen=True)
class ReplayedStep:
    """One step.

    Attributes:
        workers: by thread, whose shares of its batches that thread has.
        present: the members of the group that agreed on it; None for those who had samples.
    """

    committed: StepCommitted
    workers: tuple[int, ...]
    present: frozenset[int] | None


def steps_of(steps: Sequence[StepCommitted], events: Sequence[Event]) -> list[ReplayedStep]:
    """What is to be replayed of these steps of a run; a step in slices is that of one worker."""
    members: dict[int, frozenset[int]] = {}
    stand = {id(step) for step in steps}
    found = []
    for event in events:
        if isinstance(event, GenerationFormed):
            members[event.generation] = frozenset(event.members)
        if isinstance(event, StepCommitted) and id(event) in stand:
            had = (worker for batch in event.batches for worker in weights(batch))
            found.append(
                ReplayedStep(event, tuple(dict.fromkeys(had)), members.get(event.generation))
            )
    sliced = {e.loader for e in events if isinstance(e, LoaderOpened) and e.slices}
    return [
        whole_step(replayed)
        if any(batch.loader in sliced for batch in replayed.committed.batches)
        else replayed
        for replayed in found
    ]


def weights(batch: BatchShares, weigh: Callable[[Sequence[Span]], int] = count) -> dict[int, int]:
    """How the batch was shared out, by worker."""
    if batch.whole:
        return dict.fromkeys(batch.whole, 1)
    return {int(worker): weigh(spans) for worker, spans in batch.shares.items()}


def whole_step(replayed: ReplayedStep) -> ReplayedStep:
    """The same step, as one worker would have taken it."""
    batches = []
    for batch in replayed.committed.batches:
        spans = merge(span for share in batch.shares.values() for span in share)
        batches.append(dataclasses.replace(batch, shares={0: spans} if spans else {}, whole=()))
    return ReplayedStep(dataclasses.replace(replayed.committed, batches=tuple(batches)), (0,), None)
