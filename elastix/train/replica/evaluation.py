"""Metrics over a dataset that the group shares out: an operation without buckets. No Ray."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch.utils.data import Dataset

from elastix.comm.network.process_group import Group, Reduce
from elastix.comm.protocol.calls import OperationKind
from elastix.comm.protocol.catch_up_messages import Watched
from elastix.comm.protocol.operation import RoundAlone
from elastix.data.random_numbers import RandomState, seed_at, seed_generators
from elastix.data.source import Collate, to_device
from elastix.errors import ConfigError
from elastix.sharding import let_go_of_gathered, local
from elastix.train.replica import refusals
from elastix.train.replica.outlines import same

Metric = Callable[[torch.nn.Module, Any], float | torch.Tensor | Mapping[str, float | torch.Tensor]]
"""`metric(model, batch)`: the mean over the batch, or several by name."""


class MetricsUnderWay:
    """Which are being computed: whatever workers do together has no place there.

    Each worker computes its own for as many batches as it has, again when another one is lost.
    """

    def __init__(self) -> None:
        self._under_way = False

    def watched(self, metric: Metric) -> Metric:
        """The same, so that one knows when it is computed."""

        @wraps(metric)
        def computed(model: torch.nn.Module, batch: Any) -> Any:  # noqa: ANN401 - as the metric's
            self._under_way = True
            try:
                return metric(model, batch)
            finally:
                self._under_way = False

        computed.__name__ = name_of(metric)
        return computed

    def refuse(self, call: str) -> None:
        """Raise if `call` is made by a metric.

        Raises:
            ConfigError: it is.
        """
        if self._under_way:
            raise ConfigError(
                f"{call} was called by the metric that ctx.evaluate was given. Workers have "
                "different numbers of batches there, and compute them again when one is lost. "
                "Nothing was done; the run ends. Let the metric return what it found, and call it "
                "after ctx.evaluate."
            )


class Places(Protocol):
    """The processes of one worker, as seen by one of them. All is collective among them."""

    @property
    def part(self) -> tuple[int, int]:
        """This one's index among those that split the worker's samples, and their number."""
        ...

    @property
    def stream(self) -> tuple[int, int]:
        """Which random numbers this one draws, and of how many streams."""
        ...

    @property
    def last_stage(self) -> bool | None:
        """Whether this one has the last layers; None if each has all of them."""
        ...

    def agree(self, *numbers: int) -> bool:
        """Whether all have called it with the same numbers; as many at each."""
        ...

    def add_up(self, sums: torch.Tensor) -> None:
        """In place, over those that split the worker's samples."""
        ...

    def add_up_stages(self, sums: torch.Tensor) -> None:
        """In place, over those that split the worker's layers."""
        ...

    def tell(self, said: str) -> list[str]:
        """What each has said, by place."""
        ...


class Evaluation(RoundAlone):
    """Each member evaluates its part of the dataset; the sums are added up.

    If the group changes, everybody evaluates its part of the new division: no result of a part
    outlives the group that it was divided for.

    If a member is several processes, these split each of its batches, and their sums are added up
    before the round. All run the model equally often: what it gathers, it gathers from all.

    Stages of a pipeline all call the metric, which runs a schedule; what it gives at the last one
    counts. A schedule wants whole micro-batches. What is left of the dataset after these for each
    place that splits samples, all of them compute, and it counts at the first.
    """

    kind = OperationKind.EVALUATION
    reduce: Reduce = "sum"

    def __init__(
        self,
        model: torch.nn.Module,
        metric: Metric,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Collate,
        device: torch.device,
        places: Places | None = None,
        microbatch: int | None = None,
    ) -> None:
        """`places`: of this worker, if it is several processes."""
        self.names: list[str] | None = None
        self.together = places is not None
        self._places = places
        self._model = model
        self._metric = metric
        self._dataset = dataset
        self._batch_size = batch_size
        self._collate = collate
        self._device = device
        self._micro = microbatch or 1
        self._unit = self._micro * (places.part[1] if places is not None and microbatch else 1)
        self._ignored = places is not None and places.last_stage is False

    def payload(self, group: Group) -> torch.Tensor:
        """Sample count, then the sum of each metric over this member's part, in float64."""
        mine = self._share(group)
        if self._places is not None:
            return self._sums_of_places(mine, self._places)
        with evaluating(self._model):
            return self._sums(mine)

    def _share(self, group: Group) -> range:
        every = range(len(self._dataset))  # type: ignore[arg-type]
        units = _part(range(len(every) // self._unit), group.rank, group.size)
        last = group.rank + 1 == group.size
        return every[units.start * self._unit : None if last else units.stop * self._unit]

    def _sums(self, share: range, index: int = 0, parts: int = 1) -> torch.Tensor:
        """Over one of so many parts of each of a share's batches."""
        starts = range(0, len(share), self._batch_size) or range(1)
        batches = (share[start : start + self._batch_size] for start in starts)
        return torch.stack([self._part_of(batch, index, parts) for batch in batches]).sum(0)

    def _part_of(self, batch: range, index: int, parts: int) -> torch.Tensor:
        """The sums over one of so many parts of a batch."""
        even, *few = self._even(batch)
        part = _part(even, index, parts)
        sums = self._batch(part) if part else self._nothing() if not few else None
        for whole in few:
            mine = self._batch(whole)
            mine = torch.zeros_like(mine) if index else mine
            sums = mine if sums is None else sums + mine
        assert sums is not None  # noqa: S101 - a batch has a part, or a rest
        return sums

    def _even(self, batch: range) -> list[range]:
        """What of a batch its parts share evenly, in micro-batches; and what all of them have."""
        if self._unit == 1:
            return [batch]
        even = len(batch) // self._unit * self._unit
        fit = len(batch) // self._micro * self._micro
        return [batch[:even], *filter(None, (batch[even:fit], batch[fit:]))]

    def _sums_of_places(self, share: range, places: Places) -> torch.Tensor:
        """The same at all places of this worker.

        Raises:
            ConfigError: these were given different things to evaluate.
        """
        given = len(self._dataset), self._batch_size, self._micro  # type: ignore[arg-type]
        if not places.agree(*given):
            raise refusals.parted_in_evaluation("a dataset of another length or another batch_size")
        try:
            with evaluating(self._model):
                sums = self._sums(share, *places.part)
        finally:
            let_go_of_gathered([self._model])
        if places.last_stage is not None:
            sums = self._of_last_stage(sums, places)
        elif not places.agree(self.detail()):
            raise refusals.parted_in_evaluation("a metric of other names")
        places.add_up(sums)
        return sums

    def _of_last_stage(self, sums: torch.Tensor, places: Places) -> torch.Tensor:
        """The names and sums that the last stage has, at all stages.

        Raises:
            ConfigError: its places have different names.
        """
        told = set(places.tell("" if self._ignored else json.dumps(self.names)))
        told.discard("")
        if len(told) > 1:
            raise refusals.parted_in_evaluation("a metric of other names")
        self.names = json.loads(told.pop())
        if self._ignored:
            sums = sums.new_zeros(*sums.shape[:-1], 1 + len(self.names or ()))
        places.add_up_stages(sums)
        return sums

    def _nothing(self) -> torch.Tensor:
        """The names of the metrics are needed even so, not their values."""
        return torch.zeros_like(self._batch(self._first))

    @property
    def _first(self) -> range:
        """A batch as any other: a metric need not know what to do with a single sample.

        It is no larger than a place's part of a batch, which is what fits into its memory.
        """
        parts = 1 if self._places is None else self._places.part[1]
        size = self._micro if self._unit > 1 else -(-self._batch_size // parts)
        return range(len(self._dataset))[:size]  # type: ignore[arg-type]

    def means(self, result: torch.Tensor) -> dict[str, float]:
        """By name, from what the round gave."""
        samples, *sums = result.tolist()
        return {name: total / samples for name, total in zip(self.names or (), sums, strict=True)}

    def detail(self) -> int:
        """The names of the metrics, and how many samples are shared out."""
        told = repr((self.names, len(self._dataset)))  # type: ignore[arg-type]
        return int.from_bytes(blake3(told.encode()).digest(8)) >> 2

    def imitate(self, watched: Watched) -> None:
        """The names of the metrics come from a batch, their values from the others."""
        with evaluating(self._model):
            self._batch(self._first)

    def _batch(self, where: range) -> torch.Tensor:
        batch = to_device(self._collate([self._dataset[i] for i in where]), self._device)
        if self._ignored:
            self._metric(self._model, batch)
            return torch.zeros(1, dtype=torch.float64, device="cpu")
        found = measure(self._metric, self._model, batch)
        before = self.names or list(found)
        if before != list(found):
            raise ConfigError(
                f"the metric gave {', '.join(before)} for one batch and {', '.join(found)} for "
                "another, so their means cannot be taken. Nothing was computed. Give all of them "
                "for each batch."
            )
        self.names = list(found)
        return torch.tensor([1.0, *found.values()], dtype=torch.float64, device="cpu") * len(where)


class ExactEvaluation(Evaluation):
    """The same to the last bit for any number of members.

    What is shared out are whole batches, which are the same whoever evaluates them, the random
    numbers that are drawn for them too; what a batch has moved in buffers is put back after it. The
    round carries the sums of each, as no other member adds
    anything to them, and all add them up in one order. A member that is several processes adds
    up their parts of each before the round: so it is the same for any number of members of one
    mesh.
    """

    def __init__(
        self,
        *given: Any,  # noqa: ANN401
        seed: int,
        modules: Collection[torch.nn.Module] = (),
    ) -> None:
        """`seed` of what is drawn; `modules` that the metric may use; the rest as Evaluation's."""
        super().__init__(*given)
        self._seed = seed
        self._modules = modules or (self._model,)

    def payload(self, group: Group) -> torch.Tensor:
        """A row for each batch of the dataset; those of other members are zeros."""
        before = RandomState().state_dict()
        table = super().payload(group)
        RandomState().load_state_dict(before)
        return table.flatten() + 0.0  # -0.0 plus the zero of another member is 0.0

    def _share(self, group: Group) -> range:
        """Numbers of batches."""
        return _part(range(self._of_batches), group.rank, group.size)

    def _sums(self, share: range, index: int = 0, parts: int = 1) -> torch.Tensor:
        rows = [self._row(number, index, parts) for number in share]
        width = len(rows[0]) if rows else len(self._nothing())
        table = torch.zeros(self._of_batches, width, dtype=torch.float64, device="cpu")
        if rows:
            table[share.start : share.stop] = torch.stack(rows)
        return table

    def _row(self, number: int, index: int, parts: int) -> torch.Tensor:
        every, size = range(len(self._dataset)), self._batch_size  # type: ignore[arg-type]
        batch = every[number * size : (number + 1) * size]
        stream = index if self._places is None else self._places.stream[0]
        seed_generators(
            seed_at(self._seed, "evaluate", batch.start, *((stream,) if stream else ()))
        )
        return self._part_of(batch, index, parts)

    @property
    def _of_batches(self) -> int:
        """How many there are."""
        return -(-len(self._dataset) // self._batch_size)  # type: ignore[arg-type]

    def _batch(self, where: range) -> torch.Tensor:
        with buffers_kept(self._modules):
            return super()._batch(where)

    def means(self, result: torch.Tensor) -> dict[str, float]:
        """By name, from the sums of all batches."""
        return super().means(result.view(-1, 1 + len(self.names or ())).sum(0))

    def imitate(self, watched: Watched) -> None:
        """See Evaluation."""
        before = RandomState().state_dict()
        super().imitate(watched)
        RandomState().load_state_dict(before)


def _part(whole: range, index: int, parts: int) -> range:
    start, stop = (len(whole) * (index + i) // parts for i in (0, 1))
    return whole[start:stop]


def name_of(metric: Metric) -> str:
    """Of the function; such as functools.partial makes have none."""
    return getattr(metric, "__name__", "metric")


def measure(metric: Metric, model: torch.nn.Module, batch: Any) -> dict[str, float]:  # noqa: ANN401
    """The metric's values by name, sorted; a single number has the name of the function."""
    found = metric(model, batch)
    if not isinstance(found, Mapping):
        found = {name_of(metric): found}
    return {name: _number(name, found[name]) for name in sorted(found)}


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the metric of ctx.evaluate gave {value!r} for {name}, which is no number. Nothing "
            "was computed. Let it return the mean over the batch, or several by name. In a "
            "pipeline what it returns at the last stage counts, where schedule.eval gives outputs."
        ) from error


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within: eval mode and no gradients; afterwards each module has its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def buffers_kept(modules: Collection[torch.nn.Module]) -> Iterator[None]:
    """Within, buffers may change; afterwards they are what they were before.

    Observers of quantization, say, look at what they are given in eval mode too.
    """
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    held = [
        (part._buffers, name, buffer, local(buffer).clone())
        for part in parts
        for name, buffer in part._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffers, name, buffer, values in held:
                buffers[name] = buffer
                if not same(local(buffer), values):  # one that was expanded cannot be written to
                    local(buffer).copy_(values)
