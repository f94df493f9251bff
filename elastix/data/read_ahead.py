"""Reading a worker's share of a batch: when it is asked for, or ahead of it in worker processes.

Which samples those are is a guess that the group stays as it is; the loader decides. If it was
wrong, samples that were read are taken over from the processes (unused_samples.py). A process that
dies is replaced (loader_processes.py), and reading is tried again here.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader

from elastix.data import changed_dataset
from elastix.data.cursor import Cursor
from elastix.data.drawn_batch import Draw
from elastix.data.loader_processes import ProcessDied, ProcessReader, die_with_parent, own_files
from elastix.data.shared.packing import unpack
from elastix.data.source import Source, to_device
from elastix.data.unused_samples import Keeping, Lines, Task
from elastix.errors import TrainError
from elastix.events import Span

logger = logging.getLogger(__name__)
_ATTEMPTS = 3
_REACH = 8  # a group that has shrunk to an eighth may draw so many batches where one was guessed


class Guessing(Protocol):
    """What reading ahead needs of a loader."""

    number: int
    cursor: Cursor

    @property
    def source(self) -> Source:
        """What is read, and how."""
        ...

    @property
    def me(self) -> int:
        """The worker that it serves."""
        ...

    def guess(self, cursor: Cursor) -> tuple[Draw, Cursor] | None:
        """What will be drawn at `cursor`, and the cursor after it, if the group stays as it is."""
        ...


class ShareReader:
    """Reads in the training thread."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def fetch(self, share: Sequence[Span], at: Cursor, before: int = 0) -> Any:  # noqa: ANN401
        """The collated batch of one share, on the device.

        Args:
            share: the positions.
            at: where the global batch was drawn.
            before: how many of this worker's slices of it come before this one.
        """
        del at, before
        return self._source.read(share)


@dataclass(frozen=True)
class _Guess:
    """A batch that is going to be asked for, if the group stays as it is.

    Attributes:
        held: samples that are here already, by place in `keys`: it is collated here.
    """

    share: tuple[Span, ...]
    keys: list[Any]
    held: dict[int, bytes]

    @property
    def lacks(self) -> list[int]:
        """Places of the others."""
        return [place for place in range(len(self.keys)) if place not in self.held]


class ReadsAhead(ShareReader):
    """Reads ahead in processes of torch's DataLoader, on the guess that the group stays as it is.

    After a wrong guess, and after the death of a process, what was read ahead and falls to this
    worker still is used: the batches that have such samples are collated here.
    """

    def __init__(self, loader: Guessing) -> None:
        super().__init__(loader.source)
        self._loader = loader
        self._at = loader.cursor, 0  # of the batch that is asked for
        self._start: tuple[Cursor, int] | None = None  # of the guesses; None: there are none
        self._guesses: deque[_Guess] = deque()
        self._held: dict[Any, bytes] = {}  # samples that were read ahead, by key
        self._end = 0  # of what was guessed
        self._lines: Lines | None = None
        self._given: dict[str, object] | None = None  # the dataset, as processes have it
        self._reader = ProcessReader(self._made, self._rescue)

    def _made(self) -> DataLoader[Any]:
        source = self._source
        if self._given is None:
            self._given = changed_dataset.look(source.dataset)
        self._lines = Lines(source.num_workers)
        keeping = self._lines.keep(source)
        return DataLoader(
            keeping,
            batch_sampler=_Tasks(self),
            num_workers=source.num_workers,
            prefetch_factor=source.prefetch,
            collate_fn=keeping.collate,
            pin_memory=source.device.type == "cuda",
            persistent_workers=True,
            worker_init_fn=partial(_begin, keeping),
        )

    def fetch(self, share: Sequence[Span], at: Cursor, before: int = 0) -> Any:  # noqa: ANN401
        """The batch of one share; read ahead if the guess was right.

        Raises:
            TrainError: processes died again and again while they read it.
        """
        self._at = at, before
        if not before:
            self._look_at_dataset()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if not self._guesses or self._guesses[0].share != tuple(share):
                    self._guess_anew()
                batch = self._batch(self._guesses[0])
            except ProcessDied as died:
                logger.warning("a loader's process died attempt=%d: %s", attempt, died)
                said = str(died)
            else:
                self._guesses.popleft()
                return to_device(batch, self._source.device)
        raise TrainError(
            f"loader {self._loader.number}: processes died {_ATTEMPTS} times in a row before they "
            f"had read one batch: {said}. Others were started in their place each time; the run "
            "was stopped. Too little memory is the usual cause: use fewer num_workers or a smaller "
            "prefetch_factor. num_workers=0 reads in the train function's own process."
        )

    def _look_at_dataset(self) -> None:
        """Say so once if processes have another one than the train function has by now."""
        if not self._given:
            return
        dataset = self._source.dataset
        name = changed_dataset.changed(self._given, dataset)
        if name is not None:
            self._given = {}
            logger.warning(changed_dataset.CHANGED, name, type(dataset).__name__)

    def _batch(self, guess: _Guess) -> Any:  # noqa: ANN401 - whatever collate makes
        if not guess.held:
            return self._reader.next()
        samples = {place: unpack(bytearray(packed)) for place, packed in guess.held.items()}
        if guess.lacks:
            for place, packed in zip(guess.lacks, self._reader.next(), strict=True):
                if packed is not None:
                    samples[place] = unpack(bytearray(packed))
        return self._source.collated(guess.keys, samples)

    def _guess_anew(self) -> None:
        if self._guesses and self._lines is not None:
            self._start = None
            self._lines.next_turn()
            self._reader.begin()  # none of them reads any more when this returns
            self._take_over()
        self._guesses.clear()
        self._start = self._at
        self._reader.begin()
        if self._lines is not None:
            self._lines.begun()

    def _rescue(self) -> None:
        """A process has died, the others are about to be ended."""
        if self._lines is not None:
            self._lines.next_turn()
            self._take_over()
            self._lines.close()
        self._lines = None

    def _take_over(self) -> None:
        """What was read ahead and is wanted now, from the processes and from wrong guesses."""
        wanted = self._wanted()
        for guess in self._guesses:
            self._held.update((guess.keys[place], packed) for place, packed in guess.held.items())
        self._guesses.clear()
        if self._lines is not None:
            self._held.update(self._lines.hand_over(wanted))
        self._held = {key: packed for key, packed in self._held.items() if key in wanted}

    def _wanted(self) -> set[Any]:
        """Keys of the next batches, as far as was read ahead."""
        wanted: set[Any] = set()
        furthest = _REACH * self._source.num_workers * self._source.prefetch
        for draw, shares in islice(self._ahead(*self._at), furthest):
            if min(start for start, _ in draw.spans) >= self._end:
                break
            wanted.update(*map(self._source.keys, shares))
        return wanted

    def _ahead(self, cursor: Cursor, before: int) -> Iterator[tuple[Draw, list[tuple[Span, ...]]]]:
        """What will be drawn from there on, and what this process reads of it."""
        while (drawn := self._loader.guess(cursor)) is not None:
            draw, cursor = drawn
            yield draw, list(map(self._source.own, draw.reads(self._loader.me)[before:]))
            before = 0

    def tasks(self) -> Iterator[list[Task]]:
        """What the processes are to read, batch by batch from `_start` on: one task for each."""
        if self._start is None or self._lines is None:
            return
        turn = self._lines.turn
        for draw, shares in self._ahead(*self._start):
            self._end = max(self._end, *(stop for _, stop in draw.spans))
            for share in shares:
                guess = self._guess(share)
                self._guesses.append(guess)
                if not guess.held:
                    yield [Task(turn, guess.keys, collated=True)]
                elif guess.lacks:
                    keys = [guess.keys[place] for place in guess.lacks]
                    yield [Task(turn, keys, collated=False)]

    def _guess(self, share: tuple[Span, ...]) -> _Guess:
        keys = self._source.keys(share)
        held: dict[int, bytes] = {}
        if not self._source.exact or all(key in self._held for key in keys):  # else read together
            for place, key in enumerate(keys):
                if key in self._held:
                    held[place] = self._held.pop(key)
        return _Guess(share, keys, held)


def _begin(keeping: Keeping, number: int) -> None:
    die_with_parent(number)
    own_files()
    keeping.begin(number)


class _Tasks:
    """What DataLoader takes for a batch sampler."""

    def __init__(self, ahead: ReadsAhead) -> None:
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[Task]]:
        return self._ahead.tasks()
