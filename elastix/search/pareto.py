"""Which of several losses is better: non-dominated fronts, and crowding within a front.

Pure. With one objective the order is that of the numbers. What is not finite comes last.

Source: Deb et al., NSGA-II, 2002.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Losses = Sequence[float]


def dominates(a: Losses, b: Losses) -> bool:
    """No loss of `a` is higher, and one is lower."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and tuple(a) != tuple(b)


class Front:
    """Those of all losses so far that nothing dominates.

    Args:
        losses: what it begins with.
    """

    def __init__(self, losses: Iterable[Losses] = ()) -> None:
        self.losses: list[Losses] = [tuple(each) for each in losses]

    def add(self, losses: Losses) -> bool:
        """Whether nothing so far is as good, or dominates it."""
        own = tuple(losses)
        if any(known == own or dominates(known, own) for known in self.losses):
            return False
        self.losses = [known for known in self.losses if not dominates(own, known)]
        self.losses.append(own)
        return True


def order(losses: Sequence[Losses]) -> list[int]:
    """Places of `losses`, best first: by front, then the least crowded, then the first.

    Args:
        losses: as many values each, lower is better; empty, NaN and infinite ones come last.
    """
    finite = [i for i, loss in enumerate(losses) if _finite(loss)]
    rest = [i for i, loss in enumerate(losses) if not _finite(loss)]
    if finite and len(losses[finite[0]]) == 1:
        return sorted(finite, key=lambda i: losses[i][0]) + rest
    ranked = []
    for front in fronts([losses[i] for i in finite]):
        members = [finite[i] for i in front]
        distance = crowding([losses[i] for i in members])
        pairs = sorted(zip(members, distance, strict=True), key=lambda pair: -pair[1])
        ranked += [member for member, _ in pairs]
    return ranked + rest


def furthest(losses: Sequence[Losses], reach: Sequence[int | None]) -> list[int]:
    """Places, best first, of trials of which some were paused or stopped early.

    Losses after one epoch and after nine are not compared. Who has come further is better, as it
    was among the best where the others stayed; of those who have come as far, `order` decides.

    Source: the order of complete and pruned trials in Optuna's TPE sampler.

    Args:
        losses: see `order`.
        reach: how many reports they are of; None: of all there are.
    """
    ranked = []
    for reached in sorted(set(reach), key=lambda r: math.inf if r is None else r, reverse=True):
        places = [place for place, each in enumerate(reach) if each == reached]
        ranked += [places[i] for i in order([losses[place] for place in places])]
    return ranked


def fronts(losses: Sequence[Losses]) -> list[list[int]]:
    """Places of finite `losses` by front: nobody in the first is dominated, and so on."""
    places: dict[tuple[float, ...], list[int]] = {}
    for place, loss in enumerate(losses):
        places.setdefault(tuple(loss), []).append(place)
    ordered = sorted(places)  # whoever dominates another one comes before it
    found: list[list[int]] = []
    for loss, depth in zip(ordered, _depths(ordered), strict=True):
        if depth == len(found):
            found.append([])
        found[depth] += places[loss]
    return [sorted(front) for front in found]


def _depths(ordered: Sequence[tuple[float, ...]]) -> Iterator[int]:
    """Of different losses in ascending order the numbers of their fronts, from 0.

    A front comes after all in which somebody dominates one of its members. Never every pair is
    compared at once, which would take memory by the square of the number.
    """
    if ordered and len(ordered[0]) > 2:
        values = np.array(ordered, dtype=float)[:, 1:].T.copy()
        depths = np.zeros(len(ordered), dtype=int)
        for place in range(len(ordered)):
            never_worse: NDArray[np.bool_] = np.all(
                values[:, :place] <= values[:, place, None], axis=0
            )
            depths[place] = 1 + depths[:place].max(where=never_worse, initial=-1)
        yield from depths.tolist()
        return
    least: list[float] = []  # by front, the last of the losses of whoever joined it last
    for *_, last in ordered:
        depth = bisect_right(least, last)
        least[depth : depth + 1] = [last]
        yield depth


def crowding(front: Sequence[Losses]) -> list[float]:
    """How far a member's neighbours are, summed over objectives; infinite at the ends."""
    distance = [0.0] * len(front)
    for k in range(len(front[0]) if front else 0):
        by = sorted(range(len(front)), key=lambda i: front[i][k])
        width = front[by[-1]][k] - front[by[0]][k]
        distance[by[0]] = distance[by[-1]] = math.inf
        for before, here, after in zip(by, by[1:], by[2:], strict=False):
            if width > 0:
                distance[here] += (front[after][k] - front[before][k]) / width
    return distance


def _finite(loss: Losses) -> bool:
    return bool(loss) and all(map(math.isfinite, loss))
