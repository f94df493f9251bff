"""Law 2 for runs with exact=True: one process, fed the journal's batches, ends with the same bytes.

The train function is run again in one thread. Nothing of elastix.comm takes part, and no loader:
each committed batch is cut into its slices, each slice's gradients are kept for themselves, and
they are added up by the definition of the tree. Random numbers are those of the places, so dropout
and augmentation are replayed too. Everything that the State holds is compared, the optimizer's
moments and the random numbers included.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset

from elastix.data.cursor import count, merge, split
from elastix.data.random_numbers import come_to, seed_generators
from elastix.data.rehearsal import Rehearsal
from elastix.data.source import Collate, Source
from elastix.errors import ConfigError, TrainError
from elastix.events import BatchShares, LoaderOpened, RunStarted, StepCommitted
from elastix.state import State, Stateful, raw_bytes, warm_start
from elastix.testing.replayed_steps import check_order
from elastix.train.replica.context import Context
from elastix.train.replica.evaluation import ExactEvaluation, Metric
from elastix.train.replica.exactness import (
    RandomPlaces,
    check_rate_scaling,
    computes_with,
    deterministic_operators,
)
from elastix.train.replica.learning_rate import RateScaling
from elastix.train.replica.tracked_objects import TrackedObjects

_THREADS = re.compile(r"(\d+) threads?")


class _Over(BaseException):
    """Every committed step is replayed."""


@dataclass(frozen=True)
class Recorded:
    """What is replayed.

    Attributes:
        opening: of the run.
        steps: those that stand, up to the State that is compared.
        ended: the train function went on to its end after the last of them.
        inherited: what `ctx.inherit` copied, and from which `ancestor`.
        opened: the run's loaders.
    """

    opening: RunStarted
    steps: Sequence[StepCommitted]
    ended: bool
    inherited: Mapping[str, Any] | None
    ancestor: State
    opened: Mapping[int, LoaderOpened]


def differing(train: Callable[[Context], None], what: Recorded, stored: State) -> list[str]:
    """Replay an exact run, and compare it with the State that it stored.

    Returns:
        Names of what has other bytes.

    Raises:
        TrainError: the run computed with something else than what is here, or the train function
            does not draw the batches that the journal has.
    """
    threads = torch.get_num_threads()
    try:
        device = _compute_as(str(stored.meta["exact"]))
        ours = _replay(train, what, device)
    finally:
        torch.set_num_threads(threads)
    names = sorted({name for name in {*ours.tensors, *stored.tensors} if _compared(name)})
    apart = [name for name in names if not _same_bytes(name, ours, stored)]
    entries = sorted(name for name in ours.meta if _compared(name))
    return apart + [name for name in entries if ours.meta[name] != stored.meta.get(name)]


def _compared(name: str) -> bool:
    return not name.startswith("@loader/")  # the journal's batches took its place


def _same_bytes(name: str, ours: State, stored: State) -> bool:
    if name not in ours.tensors or name not in stored.tensors:
        return False
    return torch.equal(raw_bytes(ours.tensors[name]), raw_bytes(stored.tensors[name]))


def _compute_as(kind: str) -> torch.device:
    """With as many threads as the run's workers, and on a device like theirs.

    Raises:
        TrainError: they computed with something else than what is here.
    """
    threads = _THREADS.search(kind)
    if threads is not None:
        torch.set_num_threads(int(threads[1]))
    devices = [torch.device("cpu"), *(torch.device("cuda", n) for n in range(_gpus()))]
    for device in devices:
        if computes_with(device) == kind:
            return device
    if ", crew with " in kind:
        raise TrainError(
            f"the run computed with {kind}: each worker was several processes, whose sums have "
            "another order than those of one. Nothing was compared. Two exact runs with that mesh "
            "have the same digests; StateStored.digest has them."
        )
    raise TrainError(
        f"the run computed with {kind}; here is {computes_with(devices[-1])}. Last bits depend on "
        "it, so nothing was compared. Replay it on a machine of that kind."
    )


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _replay(train: Callable[[Context], None], what: Recorded, device: torch.device) -> State:
    replica = _Replica(what, device)
    seed_generators(what.opening.seed)
    with deterministic_operators(), suppress(_Over):
        train(Context(replica, what.opening.config))
    replica.random.boundary()
    return replica.tracked.capture({}).clone()


class _Replica:
    """The one replica. See context.Replica."""

    mesh, place = None, 0

    def __init__(self, what: Recorded, device: torch.device) -> None:
        self.me = self.rank = self.step = 0
        self.world_size = self.generation = 1
        self.alone, self.exact, self.seed = False, True, what.opening.seed
        self.seed_of_order = what.opening.seed_of_order
        self.settings, self.run = self, "replay"
        self.steps_alone = False
        self.device = device
        self.tracked = TrackedObjects()
        self.what = what
        self.random = RandomPlaces(self.seed, lambda: self.step)
        self._loaders: list[_Loader] = []
        self._inherits: torch.nn.Module | None = None

    @property
    def prepared(self) -> bool:
        return bool(self.tracked.modules)

    def inherit(
        self, model: torch.nn.Module, rehearsal: Rehearsal | None
    ) -> Mapping[str, Any] | None:
        found = self.what.inherited
        own = model.state_dict()
        for name, theirs in (found["tensors"] if found else {}).items():
            own[name].copy_(self.what.ancestor.tensors[theirs])
        self._inherits = model if found else None
        if found and rehearsal is not None:
            rehearsal.inherit(self.what.ancestor)
        return found

    def prepare(self, objects: Sequence[Any]) -> None:
        self.tracked.prepare(objects, self.device)
        found = self.what.inherited
        if found and self._inherits is self.tracked.model:
            live = self.tracked
            warm_start(live.modules, live.others, self.what.ancestor, found["tensors"])
        self.random.prepared()

    def track(self, objects: Mapping[str, Stateful]) -> None:
        self.tracked.track(objects)

    def open_loader(self, source: Source) -> "_Loader":
        check_order(len(self._loaders), source, self.what.opened)
        self.tracked.remember(source)
        self._loaders.append(_Loader(self, len(self._loaders), source))
        return self._loaders[-1]

    def scale_rate(self, _scaling: RateScaling) -> None:
        check_rate_scaling()

    def accumulate(self) -> AbstractContextManager[None]:
        raise ConfigError("ctx.accumulate was used in a step of slices; the run refuses it too.")

    def backward(self) -> AbstractContextManager[None]:
        """A slice's passes add up in any case."""
        return nullcontext()

    def boundary(self) -> None:
        """Between two steps."""
        if self.step >= len(self.what.steps) and not self.what.ended:
            raise _Over
        self.random.boundary()

    def evaluate(
        self,
        metric: Metric,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate,
        microbatch: int | None = None,
    ) -> dict[str, float]:
        given = (self.tracked.model, metric, dataset, batch_size, collate, self.device)
        modules = self.tracked.every_module
        work = ExactEvaluation(*given, None, microbatch, seed=self.seed, modules=modules)
        alone: Any = SimpleNamespace(rank=0, size=1)
        return work.means(work.payload(alone))

    def clip(self, parameters: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Of one worker: nothing may be decided by it."""
        return dict(values)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Nobody reads it."""

    def on_phase(self, listener: Callable[[str, int], None]) -> None:
        """There are none: kills that were in store for the run do not happen here."""


class _Loader:
    """Gives the train function the committed batches, as steps of slices."""

    def __init__(self, replica: _Replica, number: int, source: Source) -> None:
        self.dataset: Dataset[Any] = source.dataset
        self.epoch = 0
        self._replica = replica
        self._source = source
        self._number = number
        self._batches = deque(
            (step.step, batch)
            for step in replica.what.steps
            for batch in step.batches
            if batch.loader == number
        )

    def epochs(self, total: int) -> Iterator["_Loader"]:
        while self.epoch < total:
            come_to(self._source.seed, "epoch", self._number, self.epoch)
            yield self
            self.epoch += 1

    @property
    def number(self) -> int:
        return self.epoch

    def __len__(self) -> int:
        return sum(batch.epoch == self.epoch for _, batch in self._batches)

    def __iter__(self) -> Iterator[Iterator[Any]]:
        while True:
            self._replica.boundary()
            if not self._batches or self._batches[0][1].epoch != self.epoch:
                return
            number, batch = self._batches.popleft()
            if number != self._replica.step + 1:
                raise TrainError(
                    f"the train function draws for step {self._replica.step + 1} what the journal "
                    f"has for step {number}. Nothing can be compared. Was it changed since?"
                )
            yield self._slices(batch)

    def _slices(self, batch: BatchShares) -> Iterator[Any]:
        spans = merge(span for share in batch.shares.values() for span in share)
        source, replica = self._source, self._replica
        usual = max(count(spans), source.batch_size)
        slices = split(spans, source.slices or 1, usual, source.unit)
        even = len({source.weigh(positions) for positions in slices}) == 1
        total = _Total(list(replica.tracked.modules.values()), len(slices), even=even)
        for number, positions in enumerate(slices):
            if positions:
                read = source.read(positions)
                total.begin()
                replica.random.slice(number)
                yield read
                total.end(number, source.weigh(positions) / source.weigh(spans))
        total.hand_over()
        replica.step += 1
        replica.random.over()


class _Total:
    """Gradients and buffers of a step, by the definition of the tree."""

    def __init__(self, modules: Sequence[torch.nn.Module], slices: int, *, even: bool) -> None:
        """`even`: all of the slices count as much, so the sum may be scaled in their place."""
        parameters = {id(p): p for module in modules for p in module.parameters()}
        self._parameters = [p for p in parameters.values() if p.requires_grad]
        self._buffers = list({id(b): b for module in modules for b in module.buffers()}.values())
        self._base = [buffer.clone() for buffer in self._buffers]
        self._before = [p.grad for p in self._parameters]
        self._used = [False] * len(self._parameters)
        self._slices = slices
        self._even = even
        self._leaves: dict[int, list[torch.Tensor]] = {}

    def begin(self) -> None:
        """A slice begins."""
        for parameter in self._parameters:
            parameter.grad = None

    def end(self, number: int, part: float) -> None:
        """A slice, which is so much of the batch, was computed."""
        leaf = []
        for place, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            self._used[place] |= gradient is not None
            dense = torch.zeros_like(parameter) if gradient is None else gradient
            dense = dense.to_dense() if dense.is_sparse else dense
            leaf.append(dense if self._scaled_last(parameter) else dense * part)
        for buffer, base in zip(self._buffers, self._base, strict=True):
            if _averaged(buffer):
                leaf.append(((buffer - base) * part).masked_fill_(buffer == base, 0))
            else:
                leaf.append(buffer.clone())
            buffer.data.copy_(base)
        self._leaves[number] = [value.detach() for value in leaf]

    def hand_over(self) -> None:
        """The step is over."""
        everything = [*self._parameters, *self._buffers]
        total = [self._sum(place, 0, self._slices) for place in range(len(everything))]
        gradients, changes = total[: len(self._parameters)], total[len(self._parameters) :]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None and self._scaled_last(parameter):
                gradient.mul_(1 / self._slices)
        for parameter, gradient, used, before in zip(
            self._parameters, gradients, self._used, self._before, strict=True
        ):
            parameter.grad = gradient if used else None
            if before is not None and bool(before.any()):
                parameter.grad = before if parameter.grad is None else parameter.grad + before
        for buffer, base, change in zip(self._buffers, self._base, changes, strict=True):
            if change is not None:
                value = change + base if _averaged(buffer) else change
                if bool((value != buffer).any()):
                    buffer.data.copy_(value)

    def _scaled_last(self, parameter: torch.Tensor) -> bool:
        return self._even and parameter.dtype in (torch.float32, torch.float64)

    def _sum(self, place: int, start: int, stop: int) -> torch.Tensor | None:
        """Of the slices from `start` to `stop`: the left half's, plus the right half's."""
        if stop - start == 1:
            return self._leaves[start][place] if start in self._leaves else None
        middle = (start + stop) // 2
        left, right = self._sum(place, start, middle), self._sum(place, middle, stop)
        if left is None or right is None:
            return right if left is None else left
        highest = place >= len(self._parameters) and not _averaged(left)
        return higher(left, right) if highest else left + right


def higher(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of integers, of which torch compares some of no sign only in another type."""
    return torch.maximum(left.long(), right.long()).to(left.dtype)


def _averaged(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()
