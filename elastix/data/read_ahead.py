"""Reading a worker's share of a batch: when it is asked for, or ahead of it in worker processes.

Which samples those are is a guess that the group stays as it is; the loader decides. A process that
dies is replaced (loader_processes.py), and reading is tried again here.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader

from elastix.data.cursor import Cursor
from elastix.data.drawn_batch import Draw
from elastix.data.loader_processes import ProcessDied, ProcessReader, die_with_parent
from elastix.data.source import Source, to_device
from elastix.errors import TrainError
from elastix.events import Span

logger = logging.getLogger(__name__)
_ATTEMPTS = 3


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


class ReadsAhead(ShareReader):
    """Reads ahead in processes of torch's DataLoader, on the guess that the group stays as it is.

    A wrong guess costs the batches read ahead, never a sample.
    """

    def __init__(self, loader: Guessing) -> None:
        super().__init__(loader.source)
        source = loader.source
        self._loader = loader
        self._start = loader.cursor, 0
        self._guesses: deque[tuple[Span, ...]] = deque()
        self._reader = ProcessReader(
            lambda: DataLoader(
                source.keyed,
                batch_sampler=_Guesses(self),
                num_workers=source.num_workers,
                prefetch_factor=source.prefetch,
                collate_fn=source.collate,
                pin_memory=source.device.type == "cuda",
                persistent_workers=True,
                worker_init_fn=die_with_parent,
            )
        )

    def fetch(self, share: Sequence[Span], at: Cursor, before: int = 0) -> Any:  # noqa: ANN401
        """The batch of one share; read ahead if the guess was right.

        Raises:
            TrainError: processes died again and again while they read it.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if not self._guesses or self._guesses[0] != tuple(share):
                    self._start = at, before
                    self._guesses.clear()
                    self._reader.begin()
                batch = self._reader.next()
            except ProcessDied as died:
                self._guesses.clear()
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

    def guesses(self) -> Iterator[list[Any]]:
        """What the processes are to read, batch by batch from `_start` on."""
        cursor, before = self._start
        while (drawn := self._loader.guess(cursor)) is not None:
            draw, cursor = drawn
            for share in map(self._source.own, draw.reads(self._loader.me)[before:]):
                self._guesses.append(share)
                yield self._source.keys(share)
            before = 0


class _Guesses:
    """What DataLoader takes for a batch sampler."""

    def __init__(self, ahead: ReadsAhead) -> None:
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[Any]]:
        return self._ahead.guesses()
