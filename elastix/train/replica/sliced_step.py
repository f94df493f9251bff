"""A step whose batch is cut into slices: what the train function iterates over, and its end.

The inner loop is given this worker's slices, one after the other. When it asks for more than there
are, the group agrees on the gradient; if workers are lost before that, some of their slices come
next. The loop ends when the step is agreed on.

Not here: whose a slice is (data.slice_assignment), gradients and buffers (comm.gradients), and what
the group does (comm.protocol).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median_low
from typing import Any, NoReturn

import torch

from elastix.comm.driver import GroupDriver
from elastix.comm.gradients.reducer import Reducer
from elastix.comm.gradients.slice_passes import LOOP
from elastix.comm.gradients.steps import Weights
from elastix.comm.network.tree_reduction import Sharing
from elastix.data.cursor import Cursor, count
from elastix.data.drawn_batch import SlicedDraw
from elastix.data.loader import Loader
from elastix.data.slice_assignment import tellers
from elastix.errors import ConfigError, TrainError
from elastix.events import SlicesHandedOver
from elastix.train.replica import refusals
from elastix.train.replica.crew_mates import Mates
from elastix.train.replica.exactness import RandomPlaces
from elastix.train.replica.recomputation import Recomputation, batch_digest

_REMEMBERED = 5  # steps, of whose times the median is told


class Slices:
    """One worker's part in steps of slices: which it computes, and how fast it is.

    Args:
        me: this worker.
        driver: of its group.
        random: sets the random numbers of each slice.
        again: says which slices are computed more than once.
        phase: told of each slice.
        begins: called before the first.
        ends: called when all that are known of are computed; may raise.

    Attributes:
        step: the one in hand; None between steps, and in those of other loaders.
        samples: what this worker had of the last step, if that was one of slices; else None.
        random, again, begins, ends: see above.
        mates: the other processes of this worker; None if it is one.
    """

    def __init__(
        self,
        me: int,
        driver: GroupDriver,
        random: RandomPlaces,
        again: Recomputation,
        phase: Callable[[str, int], None],
        begins: Callable[[], None],
        ends: Callable[[], None] = lambda: None,
    ) -> None:
        self.begins, self.ends = begins, ends
        self.step: Step | None = None
        self.samples: int | None = None
        self.random = random
        self.again = again
        self.mates: Mates | None = None
        self._me = me
        self._driver = driver
        self._phase = phase
        self._us: dict[int, deque[int]] = {}  # by loader, whose slices differ

    @property
    def under_way(self) -> bool:
        """Whether the loop over the slices of a step has begun, and not ended."""
        return self.step is not None and self.step.begun

    @property
    def in_hand(self) -> "Step":
        """The step in hand; there has to be one."""
        if self.step is None:
            raise TrainError("no step of slices is in hand; this is a bug in elastix.")
        return self.step

    def open(self, loader: Loader, draw: SlicedDraw, at: Cursor, reducer: Reducer) -> "Step":
        """A batch was drawn: the step in hand."""
        self.step = Step(self, loader, draw, at, reducer)
        return self.step

    def refuse(self, call: str) -> None:
        """Raise if `call` is made while the loop over the slices of a step is under way.

        Raises:
            ConfigError: it is.
        """
        if self.under_way:
            raise ConfigError(
                f"{call} was called before the loop over a step's slices had ended. There the "
                "group has not agreed on the step yet, and workers have different numbers of "
                "slices. Nothing was done; the run ends. Call it after that loop, and do not leave "
                f"the loop by break: {LOOP}"
            )

    def refuse_others(self, loader: Loader, loaders: Sequence[Loader]) -> None:
        """Refuse a step of slices of `loader` to which a batch of another one belongs.

        Raises:
            ConfigError: one does.
        """
        if any(other.pending for other in loaders if other is not loader):
            raise ConfigError(
                f"loader {loader.number}, which has slices, was drawn from in the same step as "
                "another one. The step was not taken; the run ends. A step of slices is about one "
                "batch: put what belongs together into one dataset, or use no slices."
            )

    def refuse_accumulation(self) -> None:
        """Refuse ctx.accumulate in a step of slices.

        Raises:
            ConfigError: one is in hand.
        """
        if self.step is not None:
            raise ConfigError(
                "ctx.accumulate was used in a step of slices, which adds up their gradients "
                "itself. Nothing was done; the run ends. Leave it out, or use a loader without "
                "slices."
            )

    def put_back(self) -> None:
        """At the next boundary: a batch that nothing was done with is drawn again.

        Raises:
            ConfigError: something was done with it.
        """
        self.refuse("the next batch")
        if self.step is not None:
            self.step.loader.undraw()
            self.step = None

    def times(self, number: int) -> tuple[int, ...]:
        """What goes into the vote of step `number`: how long a slice takes those whose turn it is.

        Each fills its own place; 0 in the others, and from who had none.
        """
        if self.step is None:
            return ()
        measured = self._us.get(self.step.loader.number)
        mine = median_low(measured) if measured else 0
        asked = tellers(self.step.draw.members, number)
        return tuple(mine if worker == self._me else 0 for worker in asked)

    def committed(
        self, number: int, told: tuple[int, ...], contributors: tuple[int, ...]
    ) -> SlicesHandedOver | None:
        """A step counts; what others have computed for lost workers, if it was one of slices.

        Args:
            number: that it had in `times`.
            told: what `times` gave together.
            contributors: who was left.
        """
        step, self.step = self.step, None
        self.samples = None if step is None else step.weights().share
        if step is None:
            return None
        asked = tellers(step.draw.members, number)
        step.loader.paces.agreed(step.draw.assignment, dict(zip(asked, told, strict=True)))
        moved = step.draw.handed_over(contributors)
        if not moved:
            return None
        return SlicesHandedOver(
            step=number + 1, moved=tuple((lost, to, n) for (lost, to), n in moved.items())
        )

    def measured(self, loader: int, seconds: float, slices: int) -> None:
        """So many slices of the usual size have taken this worker so long; none is no measure."""
        if not slices:
            self._us.pop(loader, None)
            return
        measured = self._us.setdefault(loader, deque(maxlen=_REMEMBERED))
        measured.append(max(1, int(1e6 * seconds / slices)))

    def missing(self, step: "Step") -> list[int]:
        """Numbers of the slices that fall to this worker in the group as it is, to be computed."""
        driver = self._driver
        if driver.watching:
            return []
        return step.missing(self._me, driver.members(driver.generation))

    def lacks(self, members: tuple[int, ...]) -> bool:
        """Whether there would be some if these were the group."""
        return self.step is not None and bool(self.step.missing(self._me, members))

    @property
    def warms_up(self) -> bool:
        """Whether this worker follows the group and is going to be in it.

        Then it computes what has the shape of a slice: compilers run while nobody waits for it.
        """
        return self._driver.watching and not self._driver.shadow

    def more(self, step: "Step") -> list[int]:
        """Numbers of the slices that this worker computes once more, before its own.

        Who follows the group computes none, but has to know which ones they speak of.
        """
        fresh = step.loader.paces.newcomers(step.draw.members)
        more = self.again.begin(step.draw, self._me, self.missing(step), fresh)
        return [] if self._driver.watching else more

    def weigh(self, part: float) -> None:
        """Within this worker gradients of this process count for so much from now on."""
        if self.mates is not None:
            self.mates.within = part

    def look_if_reduced(self) -> None:
        """A slice is computed.

        Raises:
            ConfigError: not all of its gradients were reduced within this worker.
        """
        if self.mates is not None and self.mates.waits:
            raise refusals.held_back_in_crew()

    def at(self, phase: str, number: int) -> None:
        """A slice begins; one of a lost worker that was "handed" over, or once more: "again".

        At last it is "computed", and its gradients are as its backward passes have left them.
        """
        self._phase(phase, number)


class Step:
    """One global batch of a loader with slices: iterate over it for the slices to compute.

    Every worker has to iterate to the end, once; then `param.grad` is the mean over the batch.
    """

    def __init__(
        self, work: Slices, loader: Loader, draw: SlicedDraw, at: Cursor, reducer: Reducer
    ) -> None:
        self.loader = loader
        self.draw = draw
        self.begun = False
        self._work = work
        self._at = at
        self._reducer = reducer
        self._computed: set[int] = set()
        self._more: list[int] = []

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """There is none that is known; whoever asks for one is mostly about to divide by it.

        Raises:
            TypeError: always. Code that asks in passing (list, a progress bar) goes on without one.
        """
        raise TypeError(
            "a step has no len(): how many of its slices this worker computes is known only when "
            "the step is over, as it may compute those of a lost worker too. For a mean nothing is "
            "to be divided: gradients are averaged over the whole batch as they are. To count the "
            "samples of a slice, take the length of its tensors."
        )

    def __iter__(self) -> Iterator[Any]:
        if self.begun or self._work.step is not self:
            raise ConfigError(
                "a step was iterated a second time, or after the next one was drawn. Each can be "
                "done once, when it comes: its samples count then. Nothing was done; the run ends. "
                f"Write {LOOP}. An optimizer that calls a closure several times (LBFGS) needs a "
                "loader without slices."
            )
        self.begun = True
        return self._slices()

    def _slices(self) -> Iterator[Any]:
        reducer, work = self._reducer, self._work
        work.begins()
        reducer.begin_slices()
        self._more = work.more(self)
        for place, number in enumerate(self._more):
            yield from self._once_more(number, early=number not in self._more[:place])
        own = work.missing(self)
        started = time.monotonic()
        if not own:
            yield from self._placeholder()
        for number in own:
            yield from self._slice(number, last=number == own[-1])
        if self.draw.full:
            _await_device(self.loader.source.device)
            work.measured(self.loader.number, time.monotonic() - started, len(own))
        work.ends()
        while not reducer.end_slices():
            for number in work.missing(self):
                yield from self._slice(number, handed=True)
            work.ends()
        if work.mates is not None:
            work.mates.within = self._within
        work.random.over()

    @property
    def _within(self) -> float:
        """What of all that this worker has computed this process had."""
        slices = [self.draw.slices[number] for number in self._computed]
        share = sum(map(count, slices))
        return sum(count(s) * self.loader.source.within(s) for s in slices) / max(1, share)

    def _slice(self, number: int, *, last: bool = False, handed: bool = False) -> Iterator[Any]:
        self._work.at("handed" if handed else "slice", number)
        batch = self.loader.read_slice(self.draw, number, self._at)
        self._work.weigh(self.loader.within)
        self._computed.add(number)
        self._reducer.begin_slice(number, self._ratio(number), last)
        if not self._work.again.looks_at(number, self._more):
            self._work.random.slice(number)
            yield batch
            self._work.at("computed", number)
            self._work.look_if_reduced()
            self._reducer.end_slice(counts=True)
            return
        self._reducer.digest_slice()
        yield from self._looked_at(number, batch, counts=True)

    def _once_more(self, number: int, *, early: bool) -> Iterator[Any]:
        """A slice for its digest alone; read where what was read ahead stays for its turn."""
        self._work.at("again", number)
        batch = self.loader.source.read(self.draw.slices[number])
        self._reducer.begin_again(number, self._ratio(number), early=early)
        yield from self._looked_at(number, batch, counts=False)

    def _looked_at(self, number: int, batch: Any, *, counts: bool) -> Iterator[Any]:  # noqa: ANN401
        read = batch_digest(batch)
        self._work.random.slice(number)
        yield batch
        self._work.at("computed", number)
        self._reducer.end_slice(counts=counts)
        self._work.again.computed(number, self._reducer.digest, read)

    def _ratio(self, number: int) -> int:
        return self.draw.sizes.index(self.draw.samples[number])

    def _placeholder(self) -> Iterator[Any]:
        """The loop runs on every worker, so that what it sets is set; here for nothing."""
        self._work.weigh(0.0)
        self._reducer.begin_slice(0, 0, last=False)
        yield self.loader.source.read(self.draw.slices[0] if self._work.warms_up else ())
        self._reducer.end_slice(counts=False)

    def sharing(self, members: Sequence[int]) -> Sharing:
        """Who of these computes which slices."""
        held = tuple(frozenset(self.draw.of(member, members)) for member in members)
        return Sharing(held, len(self.draw.samples))

    def missing(self, worker: int, members: tuple[int, ...]) -> list[int]:
        """Numbers of slices that fall to a worker in a group of these, and are not computed."""
        return [n for n in self.draw.of(worker, members) if n not in self._computed]

    def weights(self) -> Weights:
        """Of what is computed, and of the slice in hand.

        Raises:
            ConfigError: a backward pass was run before the loop over slices.
        """
        if not self.begun:
            raise ConfigError(
                "a backward pass was run between the drawing of a step and the loop over its "
                "slices, so nobody could say what it is about. The step was not taken; the run "
                f"ends. Run it within that loop, for each slice: {LOOP}"
            )
        samples, total = self.draw.samples, sum(self.draw.samples)
        share = sum(samples[number] for number in self._computed)
        return Weights([size / total for size in self.draw.sizes], share, total)

    # ------------------------------------------------------------------ it is no batch

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - it always raises
        if name.startswith("_"):
            raise AttributeError(name)
        _no_batch()

    def __getitem__(self, _index: object) -> NoReturn:
        _no_batch()

    @classmethod
    def __torch_function__(cls, *_arguments: object) -> NoReturn:
        _no_batch()


def _no_batch() -> NoReturn:
    raise ConfigError(
        "a step was used as if it were a batch. A loader with slices yields steps, and a step its "
        f"slices. Nothing was done; the run ends. Write one loop within the other: {LOOP}; and "
        "optimizer.step() after the inner one."
    )


def _await_device(device: torch.device) -> None:
    """What was asked of an accelerator in this thread is done, so that it can be timed.

    Not what NCCL does beside it: that ends when all others have come as far.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
