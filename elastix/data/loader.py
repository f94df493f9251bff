"""Batches of a dataset, split over a group that may change, until every epoch is committed.

The loader decides which samples this worker sees (cursor.py does the arithmetic). Not here: how
they are read, in worker processes if asked (read_ahead.py), and when a step counts. The owner calls
`commit` with who contributed.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from opcode import opmap
from typing import Any, Protocol, cast

from torch.utils.data import Dataset

from elastix.arguments import is_whole, whole
from elastix.data.backward_window import Ratio, lowest
from elastix.data.cursor import Cursor, count, merge, split, split_like
from elastix.data.drawn_batch import Draw, SlicedDraw, sliced
from elastix.data.random_numbers import come_to
from elastix.data.read_ahead import ReadsAhead, ShareReader
from elastix.data.slice_assignment import Paces
from elastix.data.source import Source, told_from_the_end
from elastix.errors import ConfigError
from elastix.events import BatchShares, LoaderOpened, Span

logger = logging.getLogger(__name__)
_OFTEN = 3
_UNPACK = opmap["UNPACK_SEQUENCE"]


class Pace(Protocol):
    """What the loader needs to know of the group."""

    @property
    def me(self) -> int:
        """This worker's id."""
        ...

    def boundary(self, loader: int) -> None:
        """This loader is asked for a batch. Between two steps members may change now."""
        ...

    def members(self) -> tuple[int, ...]:
        """The workers over which the next batch is split, in rank order."""
        ...

    def binding(self, loader: int) -> Ratio | None:
        """The ratio that this loader's next batch must be split in; None for evenly."""
        ...

    def drawn(self, loader: int, size: int, ratio: Ratio) -> None:
        """A batch begins; it is split in this ratio, and usually has this size."""
        ...

    def begin_step(self, loader: "Loader", draw: SlicedDraw, at: Cursor) -> Any:  # noqa: ANN401
        """A batch begins that is cut into slices: what the loop is given to iterate over."""
        ...

    def exhausted(self, loader: int) -> bool:
        """The epoch has no batch left: what the train function does next is no step.

        Returns:
            Whether a step has ended here, which may have given some back.
        """
        ...

    def left(self) -> None:
        """The train function has left a loop over batches before the end of the epoch."""
        ...

    def planned(self, loader: int, epochs: int) -> None:
        """The train function is going to make so many epochs of a loader, all told."""
        ...


class Loader:
    """What `ctx.loader` returns.

    Attributes:
        dataset: what it reads from, as of a DataLoader.
        epoch: the epoch in progress, from 0.
        cursor: what is committed.
        paces: how fast workers compute slices, if there are any.
        turns: how often a batch was asked for.
        within: what of the worker's share of the last batch, or of the last slice, this process
            had; 1 for all.
        overtaken: the State that came is of another epoch than the loop of the train function, and
            nobody has looked yet whether that matters.
        gave: the train function had a batch of it.
        came_to_none: it had none, as its loop over an epoch began where that had none left.
    """

    def __init__(self, number: int, source: Source, pace: Pace) -> None:
        self.number = number
        self.dataset: Dataset[Any] = source.dataset
        self.epoch = 0
        self.cursor = Cursor(source.length)
        self.paces = Paces()
        self.within = 1.0
        self._source = source
        self._files = source.files  # by which it is known which samples the cursor counts
        self._pace = pace
        self._within = False  # a loop over epochs
        self._planned = 1  # epochs of it
        self.overtaken = self.gave = self.came_to_none = False
        self._drawn_out = False  # the train function has come to the end of this epoch
        self._ahead = self.cursor
        self._drawn: list[Draw] = []
        self._passed = 0  # of these, how many there were at the last backward pass
        self._passed_over: set[int] = set()  # the places of others that are not the last one
        self._binding: Ratio | None = None  # of the last batch drawn
        self._wholes = 0  # batches in a row that could not be split
        self.turns = 0
        self._told = False  # of that
        self._abandoned = -1  # in which epoch the last loop was left
        self._told_of_glances = False
        self._reader = ReadsAhead(self) if source.num_workers else ShareReader(source)

    def epochs(self, total: int) -> Iterator["Epoch"]:
        """The epochs up to the `total`-th, from the one in progress: a joiner enters that one.

        Samples left over by a `break` come first in the next epoch; none is skipped. The last one
        may come twice: when all of its batches were drawn in advance, and some were lost after.

        Raises:
            ConfigError: `total` is no whole number, when the first epoch is asked for.
        """
        total = cast("int", whole(total))
        if not is_whole(total):
            raise ConfigError(
                f"loader.epochs must be given a whole number, not {total!r}. Nothing was read."
            )
        self._pace.planned(self.number, total)
        self._within, self._planned = True, total
        try:
            while self.epoch < total:
                self._drawn_out = False
                if self._source.exact:  # who comes to it later draws the same
                    come_to(self._source.seed, "epoch", self.number, self.epoch)
                yield Epoch(self)
                if self.epoch + 1 < total or not (self._drawn_out and self.steps_left):
                    self.epoch += 1
        finally:
            self._within = False

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch in progress, as plain loops over a DataLoader have it.

        Raises:
            ConfigError: outside a loop over `epochs`.
        """
        if not self._within:
            raise ConfigError(
                "the loader was iterated outside of its epochs. Nothing was read. Write `for epoch "
                "in loader.epochs(n):` around it: that is how a joiner enters the right epoch."
            )
        return iter(Epoch(self))

    def opened(self) -> LoaderOpened:
        """What a reader of the journal must know to turn positions into samples."""
        source = self._source
        return LoaderOpened(
            loader=self.number,
            length=source.length,
            batch_size=source.batch_size,
            shuffle=source.shuffle,
            seed=source.seed,
            blocks=source.blocks,
            mixed=source.mixed,
            scattered=source.scattered,
            slices=source.slices or 0,
        )

    def orders_like(self, other: "Loader") -> bool:
        """Whether both have the same dataset, shuffled in the same order."""
        mine, theirs = self._source, other._source
        shuffled = mine.shuffle and theirs.shuffle
        return shuffled and mine.dataset is theirs.dataset and mine.seed == theirs.seed

    @property
    def outrun(self) -> bool:
        """Whether the State that came is of a time when the loop over the epochs was through."""
        return self._within and self.epoch >= self._planned

    @property
    def in_last_epoch(self) -> bool:
        """Whether no further epoch is planned."""
        return self.epoch + 1 >= self._planned

    @property
    def pending(self) -> bool:
        """Whether batches were drawn that are not committed: the middle of a step."""
        return bool(self._drawn)

    @property
    def drawn(self) -> tuple[Draw, ...]:
        """The batches of the step in hand, as the whole group has them."""
        return tuple(self._drawn)

    def commit(self, contributors: Sequence[int]) -> list[BatchShares]:
        """The batches drawn since the last commit count, as far as `contributors` had them.

        Shares of others are owed: they stand first in the next batch.
        """
        committed = [draw.commit(self.number, contributors) for draw in self._drawn]
        for place in self._passed_over:
            committed[place] = replace(committed[place], passed=False)
        lost = [span for batch in committed for span in batch.owed]
        self._ahead = self.cursor = self._ahead.give_back(lost) if lost else self._ahead
        self._forget()
        return committed

    def passed(self) -> None:
        """There was, or might have been, a backward pass since the last batch was drawn."""
        self._passed = len(self._drawn)

    def _forget(self) -> None:
        self._drawn, self._passed, self._passed_over = [], 0, set()

    def leave_out(self, spans: Iterable[Span] = ()) -> tuple[Span, ...]:
        """The batches drawn since the last commit are never used, nor are these positions.

        Returns:
            What the batches had.
        """
        drawn = merge(span for draw in self._drawn for span in draw.spans)
        self._ahead = self.cursor = self._ahead.leave_out((*drawn, *spans))
        self._forget()
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """The committed cursor, and what it counts."""
        in_blocks = {"blocks": [list(run) for run in self._source.blocks]}
        return {
            "epoch": self.epoch,
            "position": self.cursor.position,
            "owed": [list(span) for span in self.cursor.owed],
            "left_out": [list(span) for span in self.cursor.left_out],
            "length": self.cursor.length,
            "seed": self._source.seed,
            "shuffle": self._source.shuffle,
            **({**in_blocks, "mixed": self._source.mixed} if self._source.blocks else {}),
            **({"scattered": True} if self._source.scattered else {}),
            **({"files": self._files} if self._files else {}),
            **({"paces": self.paces.state_dict()} if self._source.slices else {}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a committed cursor.

        Raises:
            ConfigError: it counts another dataset or another order.
        """
        source = self._source
        for name, here in (
            ("length", source.length),
            ("seed", source.seed),
            ("shuffle", source.shuffle),
            ("blocks", [list(run) for run in source.blocks]),
            ("mixed", source.mixed),
            ("scattered", source.scattered),
        ):
            there = state_dict.get(name, type(here)())
            if there != here:
                raise ConfigError(
                    f"loader {self.number} had {name}={there} and is now made with {name}={here}, "
                    "so the positions that the State counts mean other samples. Nothing was read. "
                    "Use the same dataset and arguments, or another run name."
                )
        there = state_dict.get("files", source.files)
        # Earlier versions, which go on here, knew nothing of paths.
        self._files = source.files if there == source.files.partition(":")[0] else there
        owed, left_out = (
            tuple((start, stop) for start, stop in state_dict.get(name, ()))
            for name in ("owed", "left_out")
        )
        self.overtaken = self._within and self.epoch != state_dict["epoch"]
        self.epoch = state_dict["epoch"]
        self._ahead = self.cursor = Cursor(source.length, state_dict["position"], owed, left_out)
        self.paces.load_state_dict(state_dict.get("paces", {}))
        self._forget()

    def _look_at_samples(self) -> None:
        if self._files == self._source.files:
            return
        raise ConfigError(
            f"the samples of loader {self.number} (files, or the indices of a Subset) are not "
            "those that it had, though they are as many, or not in that order, so the positions "
            "that the State counts mean other samples. Nothing was read. Put the former files "
            "back, sort what glob or os.listdir gives, or make the same Subset: a worker that "
            "joins, or a run that goes on, does not know what was computed before, unless it "
            "is in ctx.track. Or choose another run name."
        )

    def left(self) -> None:
        """The loop over an epoch was left before its end."""
        self._abandoned = self.epoch
        self._pace.left()

    def begun_again(self) -> None:
        """A loop begins: say once if one was left in this epoch with a batch that nobody used.

        A step of slices is drawn again.
        """
        unused = self._drawn[self._passed :] if self._source.slices is None else []
        if not unused or self._abandoned != self.epoch or self._told_of_glances:
            return
        self._told_of_glances = True
        if self._pace.me == unused[0].members[0]:
            logger.warning(
                "a batch of %d samples of epoch %d was taken by a loop that was left, as by "
                "next(iter(epoch)), and another loop over the epoch began with no backward pass in "
                "between. The second loop does not have that batch again, as one over a DataLoader "
                "would: its samples are in this step, and no gradient is of them. To look at "
                "samples take them from epoch.dataset. If the loss is of both batches, nothing is "
                "wrong.",
                count(unused[0].spans),
                self.epoch,
            )

    def next_batch(self) -> Any | None:  # noqa: ANN401 - whatever collate makes
        """This worker's share of the next global batch, or the batch as a step of slices.

        None at the end of the epoch.

        Raises:
            ConfigError: the State that came counts other samples. Of a loader that has no batch
                left it makes no difference.
        """
        self._pace.boundary(self.number)
        binding = self._pace.binding(self.number)
        drawn = self.draw(self._ahead, binding)
        if drawn is None:
            if self._pace.exhausted(self.number):
                return self.next_batch()
            self._drawn_out = True
            return None
        self._look_at_samples()
        draw, after = drawn
        if isinstance(draw, SlicedDraw):
            return self._next_step(draw, after)
        self._binding = binding
        self._look_at_cost(draw)
        share = draw.share_of(self._pace.me)
        mine = self._source.own(share)
        self.within = self._source.within(share)
        self._source.announce(self.epoch, self._planned, self._ahead.position, after.position)
        with told_from_the_end():
            batch = self._reader.fetch(mine, self._ahead)
        self._ahead = after
        self._passed_over.update(range(self._passed, len(self._drawn)))
        self._drawn.append(draw)
        self._pace.drawn(self.number, self._batch_size, draw.ratio if binding is None else binding)
        return batch

    def _next_step(self, draw: SlicedDraw, after: Cursor) -> Any:  # noqa: ANN401 - see Pace
        at, self._ahead = self._ahead, after
        self._source.announce(self.epoch, self._planned, at.position, after.position)
        self._drawn.append(draw)
        return self._pace.begin_step(self, draw, at)

    def read_slice(self, draw: SlicedDraw, number: int, at: Cursor) -> Any:  # noqa: ANN401
        """What this process has of one slice of a batch, collated, on the device.

        Args:
            draw: the batch.
            number: of the slice.
            at: where the batch was drawn.
        """
        mine, spans = draw.of(self.me, draw.members), self._source.own(draw.slices[number])
        self.within = self._source.within(draw.slices[number])
        with told_from_the_end():
            if number in mine:
                return self._reader.fetch(spans, at, mine.index(number))
            return self._source.read(spans)  # what was read ahead stays for its turn

    def check_done(self) -> None:
        """Before the loop over an epoch goes on: that a step of slices is not left out.

        Raises:
            ConfigError: it is.
        """
        if self._source.slices is not None and self._drawn:
            raise ConfigError(
                "a step was drawn and then the next one, and its slices were not iterated over, or "
                "not to their end. The run ends. Write one loop within the other, and leave the "
                "inner one by no break: for step in epoch: for x, y in step: ... To leave batches "
                "out let the group do it: FailureConfig(guard=...)."
            )

    def undraw(self) -> None:
        """What was drawn since the last commit is drawn again: nothing was done with it."""
        self._ahead = self.cursor
        self._forget()

    def guess(self, cursor: Cursor) -> tuple[Draw, Cursor] | None:
        """What will be drawn at `cursor`, if it goes on as with the last batch."""
        return self.draw(cursor, self._binding)

    def draw(self, cursor: Cursor, binding: Ratio | None = None) -> tuple[Draw, Cursor] | None:
        """What the group as it is would draw at `cursor`, in the ratio that binds it if any."""
        batch_size = self._batch_size
        source = self._source
        batch, after = cursor.draw(batch_size, self.epoch, source.units)
        if not batch:
            return None
        members = self._pace.members()
        if self._source.slices is not None:
            assignment = self.paces.assign(members, self._source.slices)
            full, each = count(batch) == batch_size, self._source.batch_size
            cut = partial(sliced, weigh=source.weigh, unit=source.unit)
            return cut(self.epoch, batch, each, assignment, full=full), after
        if binding is None:
            shares = split(batch, len(members), batch_size, source.unit)
            if self._source.tiny_whole and not all(shares):
                return self._whole(members, batch, (batch,) * len(members)), after
            return self._split(members, batch, shares), after
        ratio = [binding.get(member, 0) for member in members]
        alike = split_like(batch, ratio, batch_size)
        if alike is not None and all(map(source.fits, map(count, alike))):
            draw = self._split(members, batch, alike)
            bound = lowest(dict(zip(members, ratio, strict=True)))
            if self._source.memory is None or draw.ratio == bound:
                return draw, after
        everything = tuple(batch if part else () for part in ratio)
        return self._whole(members, batch, everything), after

    def _whole(
        self,
        members: tuple[int, ...],
        batch: tuple[Span, ...],
        shares: tuple[tuple[Span, ...], ...],
    ) -> Draw:
        weigh = self._source.weigh
        return Draw(self.epoch, members, batch, shares, whole=True, weigh=weigh)

    def _split(
        self,
        members: tuple[int, ...],
        batch: tuple[Span, ...],
        shares: tuple[tuple[Span, ...], ...],
    ) -> Draw:
        return Draw(self.epoch, members, batch, shares, weigh=self._source.weigh)

    def _look_at_cost(self, draw: Draw) -> None:
        """Say so once if work is repeated all the time, not only at the end of an epoch."""
        full = count(draw.spans) == self._batch_size
        self._wholes = self._wholes + 1 if draw.whole and full else 0
        if self._told or self._wholes < _OFTEN:
            return
        self._told = True
        if self._pace.me == draw.members[0]:
            logger.warning(
                "batches of %d samples of loader %d are drawn for the same backward pass as others "
                "that are split %s over the workers, and cannot be split like those: every worker "
                "is given all %d. Gradients are right, work is repeated. Use a batch size that "
                "divides the other or that it divides, or have a backward pass of its own for "
                "each, the first within ctx.accumulate(), before the next batch is drawn.",
                count(draw.spans),
                self.number,
                ":".join(map(str, (self._binding or {}).values())),
                count(draw.spans),
            )

    @property
    def steps_left(self) -> int:
        """Batches until the epoch in progress is drawn, if nothing is lost."""
        return self._source.steps(self._ahead.left(self.epoch), self._batch_size)

    @property
    def _batch_size(self) -> int:
        """Of the next global batch."""
        each = self._source.batch_size
        return each * max(1, len(self._pace.members())) if self._source.per_worker else each

    @property
    def source(self) -> Source:
        """What is read, and how."""
        return self._source

    @property
    def me(self) -> int:
        """The worker that this loader serves."""
        return self._pace.me


class Epoch:
    """One pass over the data: yields this worker's share of each global batch.

    With slices it yields a step for each: to be iterated over for the slices to compute.

    `len` is the number of batches left. It may grow, when samples of a lost worker come back. So
    may what is iterated: whoever draws batches in advance may have come to the end before.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @property
    def number(self) -> int:
        """Counted from 0."""
        return self._loader.epoch

    @property
    def dataset(self) -> Dataset[Any]:
        """That of the loader: loops that are handed an epoch as their loader look at it."""
        return self._loader.dataset

    def __len__(self) -> int:
        return self._loader.steps_left

    def __iter__(self) -> Iterator[Any]:
        caller = sys._getframe(1)
        if caller.f_code.co_code[caller.f_lasti] == _UNPACK:  # for x, y in loader.epochs(n)
            raise ConfigError(
                "an epoch was unpacked as if it were a batch. Nothing was read. Write one loop "
                "within the other: for epoch in loader.epochs(n): for inputs, targets in epoch: ..."
            )
        return _Batches(self._loader)


class _Batches:
    """What an epoch has left, asked anew each time: a generator that has ended never goes on."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._draws = False  # a batch of the loader is from here
        self._turn = 0  # of the loader, when the last one was drawn

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - whatever collate makes
        if self._draws:
            self._loader.check_done()
        else:
            self._loader.begun_again()
        self._draws = True
        batch = self._loader.next_batch()
        self._loader.turns += 1
        self._turn = self._loader.turns
        if batch is None:
            self._turn = 0
            self._loader.came_to_none = not self._loader.gave
            raise StopIteration
        self._loader.gave, self._loader.came_to_none = True, False
        return batch

    def __del__(self) -> None:
        """At a `break`, before the code after the loop: nobody else has this."""
        if self._turn and self._turn == self._loader.turns:
            self._loader.left()
