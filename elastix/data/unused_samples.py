"""Samples that a loader's processes have read ahead, for when other batches are wanted after all.

Each process remembers the samples of the last batches that it has read. When members come or go, or
a process dies, the worker that it reads for asks for those which it still needs. A process has a
line and a thread for that, so it answers whatever has become of the others. Not here: which samples
are needed (read_ahead).
"""

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import RawValue
from typing import Any

from torch.utils.data import Dataset, default_collate

from elastix.data.formats.indexed import Indexed
from elastix.data.shared import Shared
from elastix.data.shared.packing import pack
from elastix.data.source import Collate, Source, samples_at

_PATIENCE_S = 5  # with processes that are stopped, or at samples that take for ever
_TIMEVAL = struct.Struct("ll")


@dataclass(frozen=True)
class Task:
    """What a process is to read.

    Attributes:
        turn: of `Lines`; one of an earlier turn is not wanted any more.
        keys: of samples, as Source has them.
        collated: as a batch; else each packed, None if it cannot be.
    """

    turn: int
    keys: Sequence[Any]
    collated: bool


class Lines:
    """From a worker to the processes that read for it. Used by one thread."""

    def __init__(self, processes: int) -> None:
        pairs = [Pipe() for _ in range(processes)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._turn = RawValue("q", 0)
        for line in self._ours:
            _give_up_after(line, _PATIENCE_S)

    @property
    def turn(self) -> int:
        """Tasks of earlier ones are left out, if they are not begun."""
        return int(self._turn.value)

    def keep(self, source: Source) -> "Keeping":
        """What the processes are to read from."""
        return Keeping(source, self._theirs, self._turn)

    def next_turn(self) -> None:
        """What the processes have not begun to read is not wanted any more."""
        self._turn.value += 1

    def hand_over(self, wanted: Collection[Hashable]) -> list[tuple[Hashable, bytes]]:
        """Of what was read, the samples with these keys, packed.

        Blocks until each process is through with the batch in hand. One that is gone or stopped has
        none; all of these together are waited for as long as one.
        """
        asked = [line for line in list(self._ours) if wanted and self._ask(line, wanted)]
        found: list[tuple[Hashable, bytes]] = []
        latest = time.monotonic() + _PATIENCE_S
        while asked and (ready := wait(asked, max(0.0, latest - time.monotonic()))):
            for line in [line for line in asked if line in ready]:
                asked.remove(line)
                try:
                    found += [(line.recv(), line.recv_bytes()) for _ in range(line.recv())]
                except (OSError, EOFError):
                    self._drop(line)
        for line in asked:
            self._drop(line)
        return found

    def _ask(self, line: Connection, wanted: Collection[Hashable]) -> bool:
        try:
            line.send(wanted)
        except OSError:
            self._drop(line)
            return False
        return True

    def _drop(self, line: Connection) -> None:
        """What it may still say would be taken for something else."""
        line.close()
        self._ours.remove(line)

    def begun(self) -> None:
        """The processes have been started and have their ends."""
        for line in self._theirs:
            line.close()

    def close(self) -> None:
        """They are gone."""
        for line in (*self._ours, *self._theirs):
            line.close()


class Keeping(Dataset[Any]):
    """In a process that reads ahead: the dataset by tasks, remembering what it gives.

    Its batches are None for a task that nobody wants any more.
    """

    def __init__(
        self,
        source: Source,
        lines: Sequence[Connection],
        turn: Any,  # noqa: ANN401 - ctypes
    ) -> None:
        self._dataset = source.keyed
        self._collate: Collate = source.collate
        self._at_once = hasattr(source.keyed, "__getitems__")
        ours = isinstance(source.dataset, Indexed | Shared)
        several = hasattr(source.dataset, "__getitems__") and not ours
        # What it gives may stand in memory that is used again, and whoever else collates may change
        # what is given.
        self._packs = several or source.collate is not default_collate
        self._lines = lines
        self._turn = turn
        self._batches = source.prefetch
        self._recent: deque[list[_Kept]] = deque(maxlen=self._batches)

    def begin(self, number: int) -> None:
        """In the process of this number, before its first task: be ready to hand over."""
        self._reading = threading.Lock()
        for other, line in enumerate(self._lines):
            if other != number:
                line.close()
        serve = threading.Thread(target=self._serve, args=[self._lines[number]], daemon=True)
        serve.start()

    def __getitems__(self, tasks: list[Task]) -> list[tuple[Task, list[Any] | None]]:
        return [(task, self._read(task)) for task in tasks]

    def _read(self, task: Task) -> list[Any] | None:
        samples: list[Any] = []
        with self._reading:
            packs = self._packs or len(task.keys) == 1  # one alone may be in such memory, too
            remembered: list[_Kept] = []
            self._recent.append(remembered)
            for keys in [task.keys] if self._at_once else [[key] for key in task.keys]:
                if task.turn != self._turn.value:
                    return None
                some = samples_at(self._dataset, list(keys))
                remembered += (
                    _Kept(key, _packed(sample) if packs else sample, packs)
                    for key, sample in zip(keys, some, strict=True)
                )
                samples += some
        return samples

    def collate(self, read: list[tuple[Task, list[Any] | None]]) -> Any:  # noqa: ANN401
        """For DataLoader: the batch of the one task."""
        ((task, samples),) = read
        if samples is None:
            return None
        return self._collate(samples) if task.collated else list(map(_packed, samples))

    def _serve(self, line: Connection) -> None:
        with suppress(OSError, EOFError):
            while True:
                wanted = line.recv()
                with self._reading:
                    recent = [kept for batch in self._recent for kept in batch]
                found = [kept for kept in recent if kept.key in wanted]
                packed = [(k.key, k.sample if k.packed else _packed(k.sample)) for k in found]
                there = [(key, sample) for key, sample in packed if sample is not None]
                line.send(len(there))
                for key, sample in there:
                    line.send(key)
                    line.send_bytes(sample)


@dataclass(frozen=True)
class _Kept:
    """A sample that was read.

    Attributes:
        packed: `sample` is its bytes, or None if there are none.
    """

    key: Hashable
    sample: Any
    packed: bool


def _packed(sample: Any) -> bytes | None:  # noqa: ANN401
    try:
        return pack(sample)
    except Exception:  # noqa: BLE001 - of the user's classes, which need no pickling to be read
        return None


def _give_up_after(line: Connection, seconds: int) -> None:
    """Reading and writing raises OSError if the other end does neither for so long."""
    with socket.socket(fileno=line.fileno()) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, 0))
        end.detach()
