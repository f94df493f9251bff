"""`elastix.Rehearsal`: samples of earlier datasets in the batches of a later one.

Which samples are kept is a function of the datasets, and which of them stand beside a position of
the stream is a function of the position. So they are split, owed, replayed and given to joiners
with it, and no recovery knows of them. Not here: which samples are kept (reservoir).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from blake3 import blake3
from torch.utils.data import Dataset, TensorDataset

from elastix import state as states
from elastix.arguments import checked
from elastix.data import kept_samples
from elastix.data.cursor import count
from elastix.data.formats.indexed import by_position
from elastix.data.random_numbers import elsewhere, seed_at
from elastix.data.reservoir import Indices, Rows, lowest, rows_of, union
from elastix.data.sample_order import indices
from elastix.errors import ConfigError, StateError
from elastix.events import Span
from elastix.state import State

Labels = Callable[[Any], Any]
"""`labels(dataset)`: a whole number for each of its samples."""

ENTRY = "rehearsal"
"""Under which name it stands in a State."""

_FINEST = 1000  # a ratio is a fraction of two whole numbers, the second at most this


@checked
class Rehearsal:
    """Samples of the datasets that came before, beside those of the present one.

        memory = elastix.Rehearsal(500, labels=lambda dataset: dataset.targets)
        for task in tasks:
            loader = ctx.loader(task, 32, rehearse=memory)

    Each loader that is given it rehearses what was kept of the datasets of those before it. All
    workers have to open these loaders in the same order. With any number of workers, after any
    loss and in a replay the same samples stand in the same batches: new ones first, then the
    rehearsed ones. A loss or a mean over a batch counts both alike.
    """

    def __init__(
        self,
        capacity: int,
        *,
        ratio: float = 0.5,
        labels: Labels | None = None,
        keep: Literal["index", "samples"] = "index",
        past: Sequence[Dataset[Any]] = (),
        seed: int = 0,
    ) -> None:
        """Nothing is read before a loader is opened.

        Args:
            capacity: samples that are kept of all datasets together.
            ratio: rehearsed samples for each new one.
            labels: `labels(dataset)` gives a whole number for each sample, the same each time.
                Then as many samples are kept of each class; else any. It must be cheap.
            keep: "index" reads a sample again from its dataset, which must stay readable. With
                "samples" they are copied into the State when their dataset is opened: it may be
                gone when the next one is. They must be tensors, arrays, numbers, text, or made of
                these.
            past: datasets that came before the first one, and are rehearsed without being trained.
            seed: of what is kept.

        Raises:
            ConfigError: impossible arguments.
        """
        _check(capacity, ratio, labels, past, seed)
        self.capacity = capacity
        self.ratio = Fraction(ratio).limit_denominator(_FINEST)
        self.keep = keep
        self.seed = seed
        self._labels = labels
        self._datasets: list[Any] = [by_position(dataset) for dataset in past]
        self._past = len(self._datasets)
        self._inherited = 0  # datasets of an ancestor, numbered before ours
        self._known: list[dict[str, Any]] = []  # of each dataset, what would tell it from another
        self._rows: dict[int, Rows] = {}  # of each dataset that was looked at
        self._samples: dict[tuple[int, int], tuple[int, Any]] = {}  # class and sample, if kept

    # ---------------------------------------------------------------- a loader is opened

    def admit(self, dataset: Any) -> "Memory":  # noqa: ANN401 - map-style
        """The next dataset, and what its loader is going to rehearse."""
        self._datasets.append(by_position(dataset))
        return Memory(self, self._inherited + len(self._datasets) - 1)

    def open(self, number: int) -> None:
        """The loader of a dataset is opened, and the State has come: look at what is kept of it.

        Raises:
            ConfigError: it is another dataset than the State says, its samples cannot be kept, or
                those of an earlier one are not where they were.
        """
        first = self._inherited
        self._check_earlier(number)
        for earlier in range(first, number + 1) if number == first + self._past else [number]:
            length = len(self.dataset(earlier))
            if earlier >= len(self._known):
                self._take(earlier)
            elif self.keep == "samples":  # it may be gone
                self._compare(earlier, {"length": length})
            else:
                self._compare(earlier, self._told(earlier))

    def _check_earlier(self, number: int) -> None:
        """What is read again by its place must be there still: a dataset may have been changed."""
        earlier = range(self._inherited, min(number, len(self._known)))
        for one in earlier if self.keep == "index" else ():
            if self.dataset(one) is self.dataset(number):
                self._rows.pop(one, None)
                self._compare(one, self._told(one))
            else:
                self._compare(one, {"length": len(self.dataset(one))})

    def check_fresh(self, number: int) -> None:
        """That no other run has used it: the loader of this dataset is the first here.

        Raises:
            ConfigError: one has.
        """
        if number != self._inherited + self._past:
            raise ConfigError(
                "a Rehearsal was given to a loader that had been at work before: for another run, "
                "or for a loader that could not be made. What it kept would be rehearsed here. No "
                "loader was made. Make it within the train function."
            )

    def _take(self, number: int) -> None:
        rows = self._looked_at(number)
        if self.keep == "samples":
            before = self.before(number)
            together = lowest(union([before, rows]), self.capacity)
            kept = union([before, together[together.datasets == number]])
            named = zip(kept.names, kept.classes.tolist(), strict=True)
            self._samples = {name: self._kept(name, label) for name, label in named}
        self._known.append(self._told(number))

    def _kept(self, name: tuple[int, int], label: int) -> tuple[int, Any]:
        if name in self._samples:
            return self._samples[name]
        number, index = name
        with elsewhere(self.seed, "kept", number, index):
            sample = kept_samples.copied(self.dataset(number)[index])
        try:
            kept_samples.check(sample)
        except StateError as error:
            raise ConfigError(
                f"Rehearsal(keep='samples') and sample {index} of a "
                f"{type(self.dataset(number)).__name__}: {error} No loader was made. Turn samples "
                "into tensors in the dataset, and what is random in `augment`; or use keep='index'."
            ) from error
        return label, sample

    def _told(self, number: int) -> dict[str, Any]:
        """What would tell this dataset from another."""
        rows = self._looked_at(number)
        columns = (rows.indices.tobytes(), rows.classes.tobytes())
        digest = blake3(b"".join(columns)).hexdigest(8)
        return {"length": len(self.dataset(number)), "digest": digest}

    def _compare(self, number: int, here: Mapping[str, Any]) -> None:
        there = {key: self._known[number][key] for key in here}
        if there != here:
            raise ConfigError(
                f"dataset {number} of the Rehearsal had {there} and has now {dict(here)}, so other "
                "samples would be rehearsed. No loader was made. Open the same datasets, in the "
                "same order and with the same labels, or choose another run name."
            )

    # ------------------------------------------------------------------- what is kept

    def before(self, number: int) -> Rows:
        """What is kept of the datasets before this one."""
        if self.keep == "samples":
            names = [name for name in self._samples if name[0] < number]
            return lowest(union(self._ranked(names)), self.capacity)
        return lowest(union(self._looked_at(earlier) for earlier in range(number)), self.capacity)

    def _ranked(self, names: Sequence[tuple[int, int]]) -> Iterable[Rows]:
        for number in sorted({number for number, _ in names}):
            mine = [name for name in names if name[0] == number]
            places = np.array([index for _, index in mine], np.int64)
            classes = np.array([self._samples[name][0] for name in mine], np.int64)
            yield rows_of(self.seed, number, places, classes)

    def _looked_at(self, number: int) -> Rows:
        """What would be kept of one dataset alone."""
        if number not in self._rows:
            dataset = self.dataset(number)
            classes = _classes(dataset, self._labels)
            rows = rows_of(self.seed, number, np.arange(len(dataset)), classes)
            self._rows[number] = lowest(rows, self.capacity)
        return self._rows[number]

    def dataset(self, number: int) -> Any:  # noqa: ANN401 - map-style
        """One of those that it was given."""
        return self._datasets[number - self._inherited]

    def sample(self, name: tuple[int, int]) -> Any:  # noqa: ANN401 - whatever a sample is
        """One that is kept, by dataset and place."""
        if self.keep == "samples":
            return kept_samples.copied(self._samples[name][1])
        number, index = name
        return self.dataset(number)[index]

    def check_newest(self, number: int) -> None:
        """That what the loader of this dataset rehearses is still kept.

        Raises:
            ConfigError: a later one was opened.
        """
        if self.keep == "samples" and len(self._known) > number + 1:
            raise ConfigError(
                "a loader with Rehearsal(keep='samples') was drawn from after the loader of the "
                "next dataset had been opened; what it rehearses is not kept any more. The run "
                "ends. Open each loader when the loop over the one before is through, or use "
                "keep='index'."
            )

    # ---------------------------------------------------------------------- the State

    def state_dict(self) -> dict[str, Any]:
        """What was opened, and the samples if they are kept."""
        kept: dict[str, dict[str, Any]] = {}
        for (number, index), (label, sample) in self._samples.items():
            row = {"class": label, "sample": kept_samples.packed(sample)}
            kept.setdefault(str(number), {})[str(index)] = row
        return {"rule": self._rule, "datasets": list(self._known), "kept": kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ConfigError: it was made with other arguments.
        """
        there = state_dict["rule"]
        if there != self._rule:
            raise ConfigError(
                f"the Rehearsal was at work with {there} and is now made with {self._rule}, so "
                "other samples would be rehearsed. No loader was made. Use the same arguments, or "
                "another run name."
            )
        self._adopt(state_dict)

    @property
    def _rule(self) -> dict[str, Any]:
        ratio = f"{self.ratio.numerator}/{self.ratio.denominator}"
        named = {"capacity": self.capacity, "ratio": ratio, "keep": self.keep, "seed": self.seed}
        return {**named, "labels": self._labels is not None, "inherited": self._inherited}

    def _adopt(self, state_dict: Mapping[str, Any]) -> None:
        self._known = [dict(known) for known in state_dict["datasets"]]
        self._samples = {
            (int(number), int(index)): self._read_back(row)
            for number, rows in state_dict["kept"].items()
            for index, row in rows.items()
        }

    @staticmethod
    def _read_back(row: Mapping[str, Any]) -> tuple[int, Any]:
        return row["class"], kept_samples.copied(kept_samples.unpacked(row["sample"]))

    def inherit(self, ancestor: State) -> None:
        """Begin with what an ancestor has kept, if it rehearsed anything.

        Raises:
            ConfigError: it cannot be rehearsed here.
        """
        if f"@{ENTRY}" not in ancestor.meta:
            return
        if f"@{ENTRY}1" in ancestor.meta:
            raise ConfigError(
                "the ancestor rehearsed with several Rehearsals, and nobody could say which of "
                "them this one goes on from. Nothing was inherited. Use one for all loaders."
            )
        if len(self._datasets) > self._past:
            raise ConfigError(
                "ctx.inherit was given a Rehearsal that a loader has already. Nothing was "
                "inherited. Call it before ctx.loader."
            )
        states.restore(ancestor, {}, {ENTRY: _Ancestor(self._begin_with)})

    def _begin_with(self, theirs: Mapping[str, Any]) -> None:
        rule, number = theirs["rule"], len(theirs["datasets"])
        own = {"seed": self.seed, "keep": self.keep, "labels": self._labels is not None}
        differ = {name: rule[name] for name, value in own.items() if rule[name] != value}
        if differ:
            raise ConfigError(
                f"the ancestor's Rehearsal has {differ}, and this one {own}, so their samples "
                "cannot be put together. Nothing was inherited. Use the same."
            )
        if self.keep == "samples":
            if self._past:
                raise ConfigError(
                    "a Rehearsal(keep='samples') with `past` was to inherit what an ancestor kept, "
                    "and nobody could say which came first. Nothing was inherited. Leave one out."
                )
            self._adopt(theirs)
            self._inherited = number
            return
        if self._past != number:
            raise ConfigError(
                f"the ancestor rehearses from {number} datasets by index, and this Rehearsal was "
                f"given {self._past} of them. Nothing was inherited. Give the same ones as "
                "past=[...], or use keep='samples', which needs none."
            )
        self._known = [dict(known) for known in theirs["datasets"]]


@dataclass(frozen=True)
class _Ancestor:
    """Stands in for a Rehearsal where one begins with what another left."""

    load_state_dict: Callable[[dict[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        return {}


class Memory:
    """What one loader rehearses, by position in its stream.

    Attributes:
        rehearsal: that it is of.
        number: of the loader's own dataset.
    """

    def __init__(self, rehearsal: Rehearsal, number: int) -> None:
        self.rehearsal = rehearsal
        self.number = number

    @cached_property
    def names(self) -> list[tuple[int, int]]:
        """What is kept, by dataset and place."""
        return self.rehearsal.before(self.number).names

    def count(self, spans: Iterable[Span]) -> int:
        """How many rehearsed samples these positions have beside them."""
        return count(self._turns(spans)) if self.names else 0

    def places(self, spans: Iterable[Span]) -> list[int]:
        """Which ones: places in `names`. All of them come once before one comes twice."""
        self.rehearsal.check_newest(self.number)
        if not self.names:
            return []
        seed = seed_at(self.rehearsal.seed, "rehearsed", self.number)
        turns, length = self._turns(spans), len(self.names)
        there: list[int] = indices(turns, seed, length, True, beside=True).tolist()
        return there

    @property
    def settled(self) -> bool:
        """Whether a sample is the same each time it is read, whoever does."""
        rehearsal = self.rehearsal
        return rehearsal.keep == "samples" or all(
            type(rehearsal.dataset(number)) is TensorDataset
            for number in {number for number, _ in self.names}
        )

    def _turns(self, spans: Iterable[Span]) -> list[Span]:
        """Rehearsed samples have positions of their own, in proportion."""
        more, each = self.rehearsal.ratio.as_integer_ratio()
        return [(start * more // each, stop * more // each) for start, stop in spans]

    def turns(self, spans: Iterable[Span]) -> list[int]:
        """These positions, in the order of `places`."""
        if not self.names:
            return []
        return [turn for start, stop in self._turns(spans) for turn in range(start, stop)]

    def sample(self, place: int) -> Any:  # noqa: ANN401 - whatever a sample is
        """One of those that are kept."""
        return self.rehearsal.sample(self.names[place])


class WithMemory(Dataset[Any]):
    """A dataset, and behind it what is rehearsed."""

    def __init__(self, dataset: Any, memory: Memory) -> None:  # noqa: ANN401 - map-style
        self._dataset = dataset
        self._length = len(dataset)
        self._memory = memory
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._several

    def __len__(self) -> int:
        return self._length + len(self._memory.names)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - whatever a sample is
        if index < self._length:
            return self._dataset[index]
        return self._memory.sample(index - self._length)

    def _several(self, wanted: Sequence[int]) -> list[Any]:
        own = [index for index in wanted if index < self._length]
        new = iter(self._dataset.__getitems__(own) if own else [])
        return [next(new) if index < self._length else self[index] for index in wanted]


def _classes(dataset: Any, labels: Labels | None) -> Indices:  # noqa: ANN401 - map-style
    if labels is None:
        return np.zeros(len(dataset), np.int64)
    given = labels(dataset)
    try:
        found = np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given)
    except (TypeError, ValueError, RuntimeError):  # ragged, or of a type that NumPy has not
        found = np.empty((), object)
    if found.shape != (len(dataset),) or found.dtype.kind not in "iub":
        raise ConfigError(
            f"labels(dataset) of the Rehearsal gave {found.dtype} values of shape {found.shape} "
            f"for a {type(dataset).__name__} of {len(dataset)} samples. No loader was made. It "
            "must give one whole number for each sample."
        )
    return found.astype(np.int64)


def _check(capacity: int, ratio: float, labels: object, past: object, seed: int) -> None:
    end = "Nothing is rehearsed."
    if capacity < 1:
        raise ConfigError(f"capacity must be >= 1, not {capacity!r}. {end}")
    if not 1 / _FINEST <= ratio <= _FINEST:
        raise ConfigError(
            f"ratio must be a number from {1 / _FINEST} to {_FINEST}, not {ratio!r}: 0.5 puts one "
            f"rehearsed sample beside two new ones. {end}"
        )
    if labels is not None and not callable(labels):
        raise ConfigError(
            f"labels must be a function that gives a whole number for each sample of a dataset, "
            f"not {labels!r}. {end}"
        )
    if not isinstance(past, list | tuple):
        raise ConfigError(f"past must be a list of datasets, not a {type(past).__name__}. {end}")
    if seed < 0:
        raise ConfigError(f"seed must be >= 0, not {seed!r}. {end}")
