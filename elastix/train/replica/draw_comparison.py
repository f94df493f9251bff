"""What a worker has drawn for the step in hand, so that all can be seen to draw alike. Pure.

Counted are global batches and how they are split, not a worker's own share of them, which may be
empty. A hash goes into the commit round of the step (vote). Only if it differs is the rest told.

How often backward ran is counted for slices alone, which all have as many. Else a worker may leave
out the pass of a micro-batch that has nothing to learn from, within `ctx.accumulate`, which adds as
little as a loss of zero. It must enter `ctx.accumulate` all the same, which tells all alike that
there may have been a pass between two batches; how the second is split depends on that.

What is frozen counts as well: where one worker has frozen what others train, the average over all
lacks its samples, and no replica parts for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from blake3 import blake3

from elastix.comm.protocol.calls import fewest_first, name
from elastix.data.cursor import count, merge, subtract
from elastix.data.loader import Loader
from elastix.errors import ReplicasDiffer


@dataclass(frozen=True)
class Drawn:
    """One worker's account.

    Attributes:
        batches, samples: drawn since the last step.
        first, stop: positions of the stream from the lowest that was drawn to above the highest.
        passes: backward passes that each of its slices had; 0 without slices.
        epoch: of the first batch.
        data: a hash of which samples the datasets have, as far as that is known.
        frozen: how many parameters that were prepared require no gradient now.
        trains: a hash of which these are.
        mark: a hash of all of it; equal for equal draws. Fits an int64, with either sign.
    """

    batches: int
    samples: int
    first: int
    stop: int
    mark: int
    passes: int = 0
    epoch: int = 0
    data: int = 0
    frozen: int = 0
    trains: int = 0

    def __str__(self) -> str:
        if not self.batches:
            return "no batch"
        number = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        where = f"epoch {self.epoch}, positions {self.first} to {self.stop - 1}"
        what = f"{number} ({self.samples} samples, {where})"
        if not self.passes:
            return what
        return f"{what}, with {self.passes} backward pass{'es' * (self.passes > 1)} for each slice"


def drawn(loaders: Sequence[Loader], passes: int = 0, frozen: Sequence[int] = ()) -> Drawn:
    """The account of these loaders.

    Args:
        loaders: all of them.
        passes: backward passes that each slice had; 0 if there are no slices.
        frozen: places of the parameters that require no gradient, among those that are averaged.
    """
    batches = [
        (loader.number, draw.epoch, merge(draw.spans), draw.members, [*map(count, draw.shares)])
        for loader in loaders
        for draw in loader.drawn
    ]
    spans = [span for _, _, batch, _, _ in batches for span in batch]
    data = [(loader.number, loader.source.files) for loader in loaders if loader.drawn]
    return Drawn(
        batches=len(batches),
        samples=count(spans),
        first=min((start for start, _ in spans), default=0),
        stop=max((stop for _, stop in spans), default=0),
        mark=_number((batches, passes, data, *frozen)),
        passes=passes,
        epoch=batches[0][1] if batches else 0,
        data=_number(data),
        frozen=len(frozen),
        trains=of_frozen(frozen),
    )


def of_frozen(frozen: Sequence[int]) -> int:
    """A hash of which parameters require no gradient; 0 if all do."""
    return _number((*frozen,)) if frozen else 0


def alike(loaders: Sequence[Loader]) -> tuple[int, int] | None:
    """Two loaders that have drawn the same samples of one dataset for the step in hand, if any.

    With one seed the order of a dataset is the same in all loaders, so whoever meant to mix random
    pairs mixes each sample with itself.
    """
    for one, other in combinations((each for each in loaders if each.pending), 2):
        if one.orders_like(other):
            drawn, also = (merge(s for d in each.drawn for s in d.spans) for each in (one, other))
            if count(drawn) > count(subtract(drawn, also)):
                return one.number, other.number
    return None


def _number(value: object) -> int:
    return int.from_bytes(blake3(repr(value).encode()).digest(8)) >> 2


def parted(step: int, drawn: Mapping[int, Drawn]) -> ReplicasDiffer:
    """The error that ends a run whose workers did not draw the same batches for a step.

    Args:
        step: for which; it does not count.
        drawn: by worker, as far as they live.
    """
    if len({one.trains for one in drawn.values()}) > 1:
        return _frozen_otherwise(step, drawn)
    groups = fewest_first(drawn)
    who = "; ".join(f"{name(workers)} drew {what}" for what, workers in groups)
    if len(groups) == 1:
        who += ", and one that has been lost since drew something else"
    if len({one.data for one in drawn.values() if one.batches}) > 1:
        who += (
            ". Their datasets have other samples at these positions: another Subset, as if each "
            "had chosen its own, or files in another order (sort what glob or os.listdir gives)"
        )
    return ReplicasDiffer(
        f"the workers did not draw the same batches for step {step}: {who}. The step does not "
        "count, nothing was stored of it, and the run was stopped. Calling fit() again goes on "
        "from the last stored State. A loader is collective: every worker takes the same batches "
        "from it and calls backward for each, whatever its own share holds. To leave one out, let "
        "all decide it alike, or call backward on a loss that is zero. A count of your own "
        "(enumerate) begins at 0 in a worker that joins: go by ctx.step and epoch.number, and let "
        "loaders take turns within `for epochs in zip(one.epochs(n), other.epochs(n)):`."
    )


def _frozen_otherwise(step: int, drawn: Mapping[int, Drawn]) -> ReplicasDiffer:
    groups = fewest_first({worker: (one.frozen, one.trains) for worker, one in drawn.items()})
    who = "; ".join(f"{name(workers)} had frozen {many}" for (many, _), workers in groups)
    return ReplicasDiffer(
        f"the workers did not train the same parameters in step {step}. Of those that ctx.prepare "
        f"was given, {who} (requires_grad_(False)). So the gradients of these would not be of all "
        "samples. The step does not count, nothing was stored of it, and the run was stopped. "
        "Calling fit() again goes on from the last stored State. Freeze and unfreeze by ctx.step "
        "or epoch.number, and set it anew in each epoch or step: `if epoch.number == 2:` is not "
        "come to by a worker that joins after that, `requires_grad_(epoch.number >= 2)` is."
    )
