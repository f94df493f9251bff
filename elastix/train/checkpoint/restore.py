"""From what a run goes on: which stored State, and which samples are left out. No Ray."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastix.data.cursor import merge, union
from elastix.errors import ConfigError
from elastix.events import Event, Resumed, Span, StepCommitted
from elastix.state import Ref, State
from elastix.store import Store


def newest(store: Store, run: str) -> Ref | None:
    """What a run goes on from; None if it has stored nothing."""
    return store.tags().get(f"{run}/last")


def samples_of(
    steps: Sequence[int], events: Iterable[Event], from_step: int
) -> dict[int, tuple[Span, ...]]:
    """By loader, the positions that the journal has for these steps.

    Raises:
        ConfigError: a step is part of the State already, or the journal has none of that number.
    """
    batches: dict[int, StepCommitted] = {}  # of very many those that are asked for
    last, back = 0, math.inf  # to where it went back since: until others come, a number says which
    for event in events:
        if isinstance(event, Resumed):
            back = min(back, event.step)
        elif isinstance(event, StepCommitted):
            if event.step > back:
                batches = {step: batch for step, batch in batches.items() if step <= back}
                last, back = 0, math.inf
            last = max(last, event.step)
            if event.step in steps:
                batches[event.step] = event
    spans: dict[int, list[Span]] = {}
    for step in steps:
        if step <= from_step:
            raise ConfigError(
                f"leave_out names step {step}, and the run goes on from the State after step "
                f"{from_step}, which has learnt from it. Nothing was changed. Go back to an older "
                "State (RestoreConfig(step=...))."
            )
        if step not in batches:
            raise ConfigError(
                f"leave_out names step {step}, which the journal does not have (its last is "
                f"{last}). Nothing was changed."
            )
        for batch in batches[step].batches:
            shares = (span for share in batch.shares.values() for span in share)
            spans.setdefault(batch.loader, []).extend(shares)
    return {loader: merge(found) for loader, found in spans.items()}


def leaving_out(state: State, spans: Mapping[int, Sequence[Span]]) -> State:
    """The State with these positions struck off its cursors' lists."""
    meta: dict[str, Any] = dict(state.meta)
    for loader, positions in spans.items():
        key = f"@loader/{loader}"
        if key in meta:
            cursor = copy.deepcopy(meta[key])
            old = [(start, stop) for start, stop in cursor.get("left_out", ())]
            new = union(sorted(old), positions)
            meta[key] = {**cursor, "left_out": [list(span) for span in new]}
    return replace(state, meta=meta)
