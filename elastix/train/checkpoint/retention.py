"""Which stored States of a run are kept. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastix.state import Ref


@dataclass(frozen=True)
class Kept:
    """A stored State of a run. `score`: higher is better; None if nothing was reported for it."""

    step: int
    ref: Ref
    score: float | None = None


def ranked(kept: Sequence[Kept]) -> list[Kept]:
    """Those with a score, the best first; of equal ones the earlier step."""
    scored = [(one.score, one) for one in kept if one.score is not None]
    return [one for _, one in sorted(scored, key=lambda pair: (-pair[0], pair[1].step))]


def surplus(kept: Sequence[Kept], keep_last: int | None, keep_best: int) -> list[Kept]:
    """Those to drop: neither among the last `keep_last` (None: all are) nor the best `keep_best`.

    The newest is never dropped: a run goes on from it.
    """
    if keep_last is None:
        return []
    newest = sorted(kept, key=lambda one: one.step, reverse=True)
    wanted = {one.step for one in (*newest[: max(1, keep_last)], *ranked(kept)[:keep_best])}
    return [one for one in sorted(kept, key=lambda one: one.step) if one.step not in wanted]


def worth_storing(score: float | None, kept: Sequence[Kept], keep_best: int) -> bool:
    """Whether a State with this score would be among the best."""
    if score is None or keep_best < 1:
        return False
    best = ranked(kept)[:keep_best]
    return len(best) < keep_best or score > (best[-1].score or 0.0)
