"""Places of a worker that stand still since their programs have parted. Pure.

What the places of a worker compute together is torch's affair: an all-gather of FSDP2 waits for the
other places, wherever they are. If user code has one place compute more than the others (`if
ctx.place == 0: loss.backward()`), all of them stand still, and no wait of torch's ends within half
an hour. So a place that has not moved for a while says where it stands, and the speaker compares.

All places come to the same calls of elastix, in the same order, and begin the same collectives
between them. So whoever has come to a call had begun all there is to begin before it: nobody who
has still to come to that call may have begun more. What a place had begun where never changes, so
it does not matter when it is heard. That all stand still is asked for as well, since programs may
send from one place to another, which torch counts too.

The stages of a pipeline send each other a number of times that is each stage's own, so of these
nothing is known by counting. But a schedule waits for its sends before it ends. So if all places
stand still at one time with nothing on its way between them, each waits in a schedule or has come
to a later call than those that do, then they wait for ever.

Not here: how a place knows this of itself (network.place_watch), and what is done about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from elastix.errors import TrainError

if TYPE_CHECKING:
    from collections.abc import Mapping

STILL_S = 3.0
"""Of a place that has not moved for so long it is asked where it stands."""

BATCHES = "batches"
"""Counted beside the collectives."""


@dataclass(frozen=True)
class Standing:
    """Where a place stands that has not moved.

    Attributes:
        position: of the last call to elastix that it has come to; they are counted alike.
        before: by group of places, collectives that it had begun when it came there.
        now: that it has begun since the worker came together.
        still_s: seconds for which all this is so.
        busy: it is in user code that is neither torch nor elastix, so it may go on by itself.
        where: in user code, for an error.
        inside: it is in that call.
        scheduled: it waits in a schedule of a pipeline, all this time, for what others send.
    """

    position: int
    before: Mapping[str, int]
    now: Mapping[str, int]
    still_s: float
    busy: bool
    where: str
    inside: bool = False
    scheduled: bool = False


def parted(worker: int, stands: Mapping[int, Standing]) -> TrainError | None:
    """What is wrong, if two places wait for each other for ever; None if nothing is known to be.

    Args:
        worker: the number of theirs.
        stands: by place, of those that stand still.
    """
    for ahead, behind in permutations(sorted(stands), 2):
        here, there = stands[ahead], stands[behind]
        if min(here.still_s, there.still_s) < STILL_S or here.busy or there.busy:
            continue
        found = _more(here, there)
        if found is None:
            continue
        group, had, has = found
        return TrainError(
            f"the places of worker {worker} have parted, and wait for each other: up to the same "
            f"call of elastix place {behind}, now at {there.where}, has begun {has} "
            f"{_named(group)}, and place {ahead}, now at {here.where}, had begun {had}. Nothing "
            "can be recovered; the run was stopped. Whatever the places of a worker compute "
            "together, forward and backward passes and the clipping of gradients among it, all of "
            "them must do equally often and in the same order: look for a condition on ctx.place, "
            "or on what only one place knows."
        )
    return None


def deserted(worker: int, stands: Mapping[int, Standing]) -> TrainError | None:
    """What is wrong, if stages of a pipeline wait for others that are through with it.

    Args:
        worker: the number of theirs.
        stands: by place, of all places of the worker, as heard less than STILL_S ago.
    """
    waits = {place: stand for place, stand in stands.items() if stand.scheduled}
    through = {place: stand for place, stand in stands.items() if stand.inside}
    if not waits or len(waits) + len(through) < len(stands):
        return None
    if min(stand.still_s for stand in stands.values()) < STILL_S:
        return None
    last = max(stand.position for stand in waits.values())
    if any(stand.position <= last for stand in through.values()):
        return None
    others = f", and {_at(through)} for them in a later call of elastix" if through else ""
    return TrainError(
        f"the places of worker {worker} have parted, and wait for each other: {_at(waits)} in a "
        f"schedule of a pipeline{others}. Nothing can be recovered; the run was stopped. All "
        "stages must run the same schedules on as many micro-batches, equally often and in the "
        "same order: look for a condition on ctx.place, or on what only one stage knows."
    )


def _at(stands: Mapping[int, Standing]) -> str:
    said = ", ".join(f"place {place}, now at {stands[place].where}," for place in sorted(stands))
    return f"{said} {'waits' if len(stands) == 1 else 'wait'}"


def _more(ahead: Standing, behind: Standing) -> tuple[str, int, int] | None:
    """The group in which one that has not come further has begun more, and how much each had."""
    if behind.position > ahead.position:
        return None
    has = behind.before if behind.position == ahead.position else behind.now
    for group in sorted(ahead.before.keys() & has.keys()):
        if has[group] > ahead.before[group]:
            return group, ahead.before[group], has[group]
    return None


def _named(group: str) -> str:
    return BATCHES if group == BATCHES else f"collectives along {group}"
