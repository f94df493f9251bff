"""`elastix.Shared`: a dataset whose samples the processes of a host decode for each other.

A sample that is missing is claimed by a lock on its byte, decoded, and kept in the arena; a lock
goes with its holder, so nobody waits for the dead, and for nobody longer than a few decodes.
"""

import logging
import operator
import os
import pickle
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from torch.utils.data import Dataset

from elastix.arguments import MOST, checked
from elastix.data.cache_eviction import NEVER, Horizon, Indices, ReaderPosition, victims
from elastix.data.formats.indexed import Indexed, by_position, known_by
from elastix.data.sample_order import order_of, runs
from elastix.data.shared.arena import READERS, Arena, Layout
from elastix.data.shared.folder import KEY_DIGITS, SharedFolder, enter, sweep
from elastix.data.shared.identity import digest_into
from elastix.data.shared.locks import Locks, available
from elastix.data.shared.packing import pack, unpack
from elastix.errors import ConfigError

_LOG = logging.getLogger(__name__)
_MEMORY = Path("/dev/shm")
_PATIENCE_DECODES = 5
_LEAST_PATIENCE_S = 1.0  # a process that is alive may still have to wait for a core
_ENTRY_S = 10.0
_LAST = -100
_BATCH_OF_VICTIMS = 32  # a pass over all samples finds one in so many of them
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError)


@dataclass
class Counts:
    """What this process has done with a Shared dataset.

    Attributes:
        hits: samples that were there.
        decodes: samples that it read from the dataset itself.
        kept: how many of these it left for others.
        evicted: samples that had to go for them.
        waited_s: seconds in which somebody else was decoding what it wanted.
    """

    hits: int = 0
    decodes: int = 0
    kept: int = 0
    evicted: int = 0
    waited_s: float = 0.0


@checked
class Shared(Indexed):
    """A map-style dataset whose samples are decoded once on each host, by the first who needs them.

    For a dataset whose samples are expensive to make, such as decoded images: all processes of a
    host that make a `Shared` of the same dataset (trials of a campaign, workers of a run, processes
    of their loaders) keep its samples in memory that they share. `shared[i]` is `dataset[i]` for
    each of them, in memory of its own. So a sample must be the same whenever it is read: the first
    one is read twice, to see.

    There is no server. Any process may be killed at any moment; when the last one ends, nothing is
    left in /dev/shm, and what killed ones leave behind is removed when the next one starts. Where
    memory cannot be shared, or there is none left, the dataset is read directly.
    """

    def __init__(self, dataset: Dataset[Any], budget: int | str = "4GB") -> None:
        """Nothing is shared before the first sample is read.

        Args:
            dataset: map-style. Processes share with each other if their datasets hold the same
                values, have the same code and the same first sample. Files that it reads must not
                change meanwhile. All that it holds must be picklable, except for functions and
                classes. Sharing is worth it from 50 microseconds a sample upwards.
            budget: bytes of memory, or text like "8GB", for all processes that share; that of the
                first one counts. Memory is taken as samples come. When the budget is used up, the
                samples go that will be wanted last.

        Raises:
            ConfigError: no samples by position, one that is not the same twice or cannot be
                pickled, or a budget without room for one.
        """
        self._dataset = by_position(dataset)
        self._length = len(self._dataset)  # type: ignore[arg-type]
        self._budget = _bytes(budget)
        if self._length < 1:
            raise ConfigError(f"the {type(dataset).__name__} is empty. Nothing is shared.")
        digest = self._digest()  # before it is read, which may change it
        first = self._first()
        self._sample_bytes = len(first)
        digest.update(first)
        self._key: str = digest.hexdigest(KEY_DIGITS // 2)
        self._check_budget()
        self._begin()

    def _begin(self) -> None:
        self._counts = Counts()
        self._attached: _Attached | None = None
        self._process = 0
        self._lock, self._locks_process = threading.RLock(), os.getpid()
        self._row: int | None = None
        _SHARERS.add(self)

    def __len__(self) -> int:
        return self._length

    @property
    def blocks(self) -> tuple[int, ...]:  # type: ignore[override]
        """Those of the dataset, if it is read in blocks."""
        return self._dataset.blocks if isinstance(self._dataset, Indexed) else ()

    @property
    def mixed(self) -> int:  # type: ignore[override]
        """Of the dataset, if it is read in blocks."""
        return self._dataset.mixed if isinstance(self._dataset, Indexed) else 0

    @property
    def files(self) -> str:  # type: ignore[override]
        """Of the dataset."""
        return known_by(self._dataset)

    @property
    def counts(self) -> Counts:
        """What this process has done so far."""
        return replace(self._counts)

    @property
    def folder(self) -> Path | None:
        """Where the samples are; None if nothing is shared (yet)."""
        return self._attached.room.path if self._attached else None

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - a sample
        index = operator.index(index)
        shared = self._attach()
        if shared is None or not 0 <= index < self._length:
            return self._alone(index)
        copy = shared.arena.get(index)
        return self._hit(copy) if copy is not None else self._missed(shared, index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples. Processes that want the same ones decode different ones first."""
        indices = list(indices)
        shared = self._attach()
        decoded: dict[int, Any] = {}
        if shared is not None:
            missing = [i for i in dict.fromkeys(indices) if not shared.has(i)]
            turn = shared.turn(len(missing))
            for index in missing[turn:] + missing[:turn]:
                self._decode_for_all(shared, index, decoded)
        return [decoded.pop(i) if i in decoded else self[i] for i in indices]

    def announce(self, reader: ReaderPosition, taken: int) -> None:
        """Say what this process is going to read, for the sake of what is kept.

        Args:
            reader: where the batch begins that is read now.
            taken: samples of it.
        """
        shared = self._attach()
        with self._lock:
            if shared is not None and shared is self._attached:
                shared.announce(reader, taken)
                self._row = shared.row

    def close(self) -> None:
        """Give up the shared memory; reading begins anew. The end of the process does so too."""
        self._close(-1)

    def _close(self, within_s: float) -> None:
        """Not if another thread is decoding for longer than that; -1: for as long as it takes."""
        if not self._lock.acquire(timeout=within_s):
            return
        try:
            if self._attached is not None and self._process == os.getpid():
                self._attached.leave()
            self._attached, self._process, self._row = None, 0, None
        finally:
            self._lock.release()

    # ---------------------------------------------------------------------------- a miss

    def _hit(self, copy: bytearray) -> Any:  # noqa: ANN401
        self._counts.hits += 1
        return unpack(copy)

    def _alone(self, index: int) -> Any:  # noqa: ANN401
        return self._made(index)[0]

    def _made(self, index: int) -> tuple[Any, bytes | None]:
        """A sample as a hit gives it, and packed if it can be: who comes first gains nothing."""
        self._counts.decodes += 1
        sample = self._dataset[index]
        try:
            packed = pack(sample)
        except _UNPICKLABLE:  # this one alone: the first was none of them
            return sample, None
        return unpack(bytearray(packed)), packed

    def _missed(self, shared: "_Attached", index: int) -> Any:  # noqa: ANN401
        with self._lock:
            if shared is not self._attached:  # another thread closed it, and its files
                return self._alone(index)
            began = time.monotonic()
            ours = shared.claim(index, wait=True)
            self._counts.waited_s += time.monotonic() - began
            try:
                copy = shared.arena.get(index)
                if copy is not None:
                    return self._hit(copy)
                return self._decoded(shared, index)  # ours, or whoever has it does not get done
            finally:
                if ours:
                    shared.release(index)

    def _decode_for_all(self, shared: "_Attached", index: int, decoded: dict[int, Any]) -> None:
        """Decode a sample, unless it is there or somebody is at it."""
        with self._lock:
            if shared is not self._attached or not 0 <= index < self._length:
                return
            if not shared.claim(index, wait=False):
                return
            try:
                if not shared.has(index):
                    decoded[index] = self._decoded(shared, index)
            finally:
                shared.release(index)

    def _decoded(self, shared: "_Attached", index: int) -> Any:  # noqa: ANN401
        began = time.perf_counter_ns()
        sample, packed = self._made(index)
        shared.arena.took(time.perf_counter_ns() - began)
        if packed is not None:
            kept, evicted = shared.put(index, packed)
            self._counts.kept += kept
            self._counts.evicted += evicted
        return sample

    # ------------------------------------------------------------------------- attaching

    def _attach(self) -> "_Attached | None":
        """The shared memory as this process has it; a child of a fork has none of its parent's."""
        if self._locks_process != os.getpid():  # a thread of the parent may hold the lock
            self._lock, self._locks_process = threading.RLock(), os.getpid()
        if self._process != os.getpid():
            with self._lock:
                if self._process != os.getpid():
                    self._attached = self._opened()
                    self._process = os.getpid()
        return self._attached

    def _opened(self) -> "_Attached | None":
        if _LEFT.is_set():
            return None
        if not (available() and _MEMORY.is_dir()):
            _LOG.warning("memory cannot be shared on this system: samples are decoded by each.")
            return None
        layout = Layout.within(self._budget, self._length, self._sample_bytes)
        try:
            room = enter(_MEMORY, self._key, _ENTRY_S)
            if room is not None:
                attached = _Attached(room, layout, self._horizon(), self._row)
                attached.arena.took(self._decode_ns)
                return attached
            why = "somebody who was stopped is making it or removing it"
        except _NotReady:
            why = "somebody who was stopped is making it"
        except OSError as error:
            why = str(error)
        _LOG.warning(
            "%s cannot be used (%s): samples of the %s are decoded by this process for itself.",
            _MEMORY,
            why,
            type(self._dataset).__name__,
        )
        return None

    def _horizon(self) -> Horizon:
        blocks, mixed = runs(self.blocks), self.mixed
        length = self._length
        return Horizon(length, lambda seed, epoch: order_of(seed, epoch, length, blocks, mixed))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _TRAVELS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # ------------------------------------------------------------------- what it is known by

    def _first(self) -> bytes:
        """The first sample, which must be the same whenever it is read."""
        began = time.perf_counter_ns()
        try:
            samples = [pack(self._dataset[0]) for _ in range(2)]
            self._decode_ns = (time.perf_counter_ns() - began) // 2
            if samples[0] != samples[1]:  # the very first time it may have filled a cache
                samples = [samples[1], pack(self._dataset[0])]
        except _UNPICKLABLE as error:
            raise self._unpicklable("sample 0", error) from error
        if samples[0] != samples[1]:
            raise ConfigError(
                f"{type(self._dataset).__name__}[0] is not the same twice, so it cannot be kept "
                "for others. Nothing is shared. Take what is random out of the dataset; quantized "
                "and nested tensors, whose bytes are never the same, too."
            )
        return samples[1]

    def _digest(self) -> Any:  # noqa: ANN401 - blake3 has no types
        digest = blake3(b"elastix.Shared 1 %d " % self._length)
        try:
            digest_into(digest, self._dataset)
        except _UNPICKLABLE as error:
            raise self._unpicklable("it", error) from error
        return digest

    def _unpicklable(self, what: str, error: Exception) -> ConfigError:
        return ConfigError(
            f"{type(self._dataset).__name__}: {what} cannot be pickled ({error}), so processes "
            "cannot tell that they mean the same dataset. Nothing is shared. Open files when they "
            "are first read, and give samples classes of a module."
        )

    def _check_budget(self) -> None:
        layout = Layout.within(self._budget, self._length, self._sample_bytes)
        need = layout.blocks_for(self._sample_bytes)
        if layout.blocks < need:
            least = layout.table_bytes + need * (layout.block_bytes + 16)
            raise ConfigError(
                f"a budget of {self._budget} bytes has no room for a single sample: {least} are "
                f"needed for {self._length} places and one of {self._sample_bytes} bytes. Nothing "
                "is shared. Give it a larger budget."
            )


_SHARERS: "weakref.WeakSet[Shared]" = weakref.WeakSet()
_LEFT = threading.Event()


def leave() -> None:
    """This process is about to be killed: from here on it reads datasets directly.

    What others who were killed have left behind goes as well. What a thread is decoding is not
    waited for: that may take for ever.
    """
    _LEFT.set()
    for shared in list(_SHARERS):
        shared._close(_LEAST_PATIENCE_S)
    sweep(_MEMORY)


def clear(within_s: float) -> None:
    """Remove what others have left behind who were killed; see `sweep`."""
    if available() and _MEMORY.is_dir():
        sweep(_MEMORY, within_s)


_TRAVELS = ("_dataset", "_length", "_budget", "_sample_bytes", "_decode_ns", "_key")


class _NotReady(Exception):
    """Internal: whoever makes the table does not get done."""


class _Attached:
    """The shared memory of a dataset as one process has it."""

    def __init__(
        self, room: SharedFolder, layout: Layout, horizon: Horizon, row: int | None
    ) -> None:
        """`row`: of the board, if this is a child of a process that has one."""
        self.room = room
        self.row = row
        self._horizon = horizon
        self._victims: Iterator[tuple[int, int, int]] = iter(())
        self._file = room.open("claims")
        self._locks = Locks(self._file)
        self._changing = layout.length  # the byte of whoever changes the arena
        try:
            with self._alone(_ENTRY_S) as alone:
                if not alone:
                    raise _NotReady
                table, arena = room.open("table"), room.open("arena")
                try:
                    self.arena = Arena(table, arena, layout)
                finally:
                    os.close(table)
                    os.close(arena)
        except BaseException:
            os.close(self._file)
            room.leave()
            raise
        # At the end of a process: after its children, whom multiprocessing ends before that.
        self.leave = Finalize(self, _leave, (room, self.arena, self._file), exitpriority=_LAST)
        _ALIVE.add(self)

    def abandon(self) -> None:
        """In a child of a fork: close what is the parent's."""
        if self.leave.still_active():
            self.leave.cancel()
            self.room.abandon()
            self.arena.close()
            os.close(self._file)

    def has(self, index: int) -> bool:
        """Whether a sample is there."""
        return 0 <= index < self._changing and self.arena.has(index)

    # ------------------------------------------------------------------------------ claims

    def claim(self, index: int, wait: bool) -> bool:
        """Whether the sample is ours to decode. With `wait`, after a few usual decodes at most."""
        if not wait:
            return self._locks.take(index)
        usual_s = self.arena.usual_ns * 1e-9
        patience_s = max(_LEAST_PATIENCE_S, _PATIENCE_DECODES * usual_s)
        return self._locks.take(index, patience_s, lambda: self.arena.has(index))

    def release(self, index: int) -> None:
        """It is decoded, or given up."""
        self._locks.release(index)

    @contextmanager
    def _alone(self, wait_s: float) -> Iterator[bool]:
        taken = self._locks.take(self._changing, wait_s)
        try:
            yield taken
        finally:
            if taken:
                self._locks.release(self._changing)

    def put(self, index: int, packed: bytes) -> tuple[bool, int]:
        """Keep a sample if it is worth it: whether it is there now, and how many had to go."""
        with self._alone(_LEAST_PATIENCE_S) as alone:
            if not alone:
                return False, 0
            return self.arena.put(index, packed, lambda short, arena: self._going(index, short))

    # ---------------------------------------------------------------------------- eviction

    def announce(self, reader: ReaderPosition, taken: int) -> None:
        """Write to the board, in a row of our own."""
        if not 0 <= reader.seed <= NEVER:
            return
        if self.row is None:
            for row in range(READERS):
                if self._locks.take(self._changing + 1 + row):
                    self.row = row
                    break
            else:
                return
        self.arena.board[self.row] = (
            1,
            reader.seed,
            reader.epoch,
            reader.offset,
            reader.epochs,
            reader.shuffle,
            taken,
            0,
        )

    def turn(self, size: int) -> int:
        """Where to begin with so many samples, so that all readers begin elsewhere."""
        rows = np.flatnonzero(self.arena.board[:, 0])
        return int(np.searchsorted(rows, self.row or 0)) * size // max(1, len(rows))

    def _readers(self) -> list[ReaderPosition]:
        """Of others the batch in hand is still to come; of ours it is not."""
        readers = []
        for row in np.flatnonzero(self.arena.board[:, 0]):
            _, seed, epoch, offset, epochs, shuffle, taken, _ = map(int, self.arena.board[row])
            own = row == self.row
            if not own and not self._locks.is_taken(self._changing + 1 + int(row)):
                self.arena.board[row, 0] = 0  # it is dead
                continue
            readers.append(ReaderPosition(seed, epoch, offset + own * taken, epochs, bool(shuffle)))
        return readers

    def _going(self, index: int, short: int) -> list[int] | None:
        """Samples that are wanted later than this one, until enough blocks come free."""
        mine = int(self._horizon.next_use(np.array([index]), self._readers())[0])
        going: list[int] = []
        while short > 0:
            found = next(self._victims, None) or self._look_for_victims(going)
            if found is None:
                return None
            other, word, use = found
            if use <= mine:
                self._victims = iter(())  # the nearest of a batch, or all are: look again next time
                return None
            if int(self.arena.where[other]) == word and other not in going:
                going.append(other)
                short -= self.arena.layout.blocks_for(self.arena.nbytes(other))
        return going

    def _look_for_victims(self, going: list[int]) -> tuple[int, int, int] | None:
        """The farthest but for those that go already; some more are kept for the next time."""
        there: Indices = np.setdiff1d(np.flatnonzero(self.arena.where), going)
        words = self.arena.where[there]
        uses = self._horizon.next_use(there, self._readers())
        farthest = victims(uses, max(1, len(there) // _BATCH_OF_VICTIMS))
        found = [(int(there[n]), int(words[n]), int(uses[n])) for n in farthest]
        self._victims = islice(found, 1, None)
        return found[0] if found else None


_ALIVE: "weakref.WeakSet[_Attached]" = weakref.WeakSet()


def _after_fork() -> None:
    for attached in list(_ALIVE):
        attached.abandon()
    _ALIVE.clear()


os.register_at_fork(after_in_child=_after_fork)


def _leave(room: SharedFolder, arena: Arena, file: int) -> None:
    arena.close()
    os.close(file)  # our row of the board is free with it
    room.leave()


def _bytes(budget: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(budget), re.IGNORECASE)
    if match is None or isinstance(budget, bool):
        raise ConfigError(
            f'a budget is a number of bytes, or text like "8GB", not {budget!r}. Nothing is shared.'
        )
    number, unit, binary = match.groups()
    exponent = "KMGT".index(unit.upper()) + 1 if unit else 0
    found = float(number) * (1024 if binary else 1000) ** exponent
    if found > MOST:
        raise ConfigError(f"a budget of {budget} is more than memory can be. Nothing is shared.")
    return int(found)
