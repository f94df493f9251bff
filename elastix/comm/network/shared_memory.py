"""Reductions among workers of one host, through memory that all of them see.

A bucket lies in a Room, which others can map. Everybody sums up one slice of all rooms into its
own, and copies the other slices from those who summed them up. That is a third of the work that
sending them through sockets takes.

A worker writes to its own memory alone. So nobody has to be waited for before memory is used
again, whatever became of the others: `Exchange.stop` is enough. It shows on the board that this
worker has left the generation, before anything is written anew; whoever has read a peer's memory
looks there afterwards, and gives the reduction up if the peer has left. Otherwise a bucket that is
refilled for the survivors could pass for a result of the group before.

Invariant: the result is the same to the last bit on all members that get one, since each slice is
summed up once. Within a generation it is not here that a room stays as it is until all have copied
from it: whoever uses a result has left a round that all members entered after they had theirs.

Source: reduce-scatter and all-gather in one hop (Thakur, Rabenseifner and Gropp 2005); to read,
then see whether it was overwritten, the sequence lock; to wait for a change of memory, futex(2).
"""

import ctypes
import json
import math
import mmap
import os
import platform
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

FROM_BYTES = 256 << 10
"""Less goes through sockets: there it is a matter of microseconds."""

_SWITCH = "ELASTIX_SHARED_MEMORY"
_NAME = "elastix-room"
_CHUNK = 1 << 17  # elements: what is added up stays in a core's cache, and `stop` waits no longer
_FUTEX = {"x86_64": 202}.get(platform.machine())  # others may show a flag before what it stands for
_WAIT, _WAKE = 0, 1
_ASK_AGAIN_S = 0.05  # whether somebody wants us to stop
_PAGES = 4 * mmap.PAGESIZE
_BELL, _FILLED, _SUMMED, _LEFT, _SLOTS = 0, 8, 16, 24, 64  # bytes from the beginning of a board
_OPERATIONS = 40  # bits of a counter; the rest is the generation
_SLOT = ctypes.c_uint64 * 5
_SQUARES = 4  # place in a slot
_SLOT_COUNT = (_PAGES - _SLOTS) // ctypes.sizeof(_SLOT)
MOST = _SLOT_COUNT
"""Reductions that a worker may be ahead of another."""


class _Stopped(Exception):
    """Internal: the reduction was given up here, or the others have gone on without it."""


def available() -> bool:
    """Whether memory of this process can be seen by others."""
    on = os.environ.get(_SWITCH, "1") != "0"
    return on and _FUTEX is not None and hasattr(os, "memfd_create")


class SharedBuffer:
    """Memory for one bucket. It can be used again when no tensor refers to it any more."""

    def __init__(self, size: int) -> None:
        """`size` in bytes."""
        self.size = size
        self.file = os.memfd_create(_NAME)
        os.ftruncate(self.file, size)
        self.inode = os.fstat(self.file).st_ino
        self._memory: Callable[[], mmap.mmap | None] = lambda: None
        weakref.finalize(self, os.close, self.file)

    @property
    def free(self) -> bool:
        """Whether no tensor refers to it."""
        return self._memory() is None

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it, flat."""
        return self.tensors(dtype, 1)[0]

    def tensors(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """All of it in so many equal parts, one after the other, each with a storage of its own."""
        memory = mmap.mmap(self.file, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = weakref.ref(memory)
        length, each = self.size // dtype.itemsize // count, self.size // count
        return [
            torch.frombuffer(memory, dtype=dtype, count=length, offset=number * each)
            for number in range(count)
        ]


class Board:
    """What one worker shows to the others: how far it is, and where its rooms are.

    Counters are `generation << _OPERATIONS | operations`; they only grow. A generation's `base` is
    the one before its first operation.
    """

    def __init__(self, file: int) -> None:
        self._memory = _mapped(file, _PAGES)
        start = self._memory.data_ptr()
        self._bell = ctypes.c_uint32.from_address(start + _BELL)
        self._counters = {
            where: ctypes.c_uint64.from_address(start + where)
            for where in (_FILLED, _SUMMED, _LEFT)
        }
        self._slots = [
            _SLOT.from_address(start + _SLOTS + n * ctypes.sizeof(_SLOT))
            for n in range(_SLOT_COUNT)
        ]
        self._lock = threading.Lock()

    def show(self, number: int, room: SharedBuffer) -> None:
        """Operation `number` is about this room."""
        self._slots[number % _SLOT_COUNT][:_SQUARES] = [number, room.file, room.inode, room.size]

    def shown(self, number: int) -> tuple[int, int, int]:
        """File, inode and size of the room of operation `number`."""
        which, *room = self._slots[number % _SLOT_COUNT][:_SQUARES]
        if which != number:
            raise RuntimeError(f"reduction {number} is not on a member's board any more")
        return (room[0], room[1], room[2])

    def tell(self, number: int, squares: float) -> None:
        """What this worker has added up in operation `number` has that sum of squares."""
        (bits,) = struct.unpack("<Q", struct.pack("<d", squares))
        self._slots[number % _SLOT_COUNT][_SQUARES] = bits

    def told(self, number: int) -> float:
        """See `tell`."""
        bits = self._slots[number % _SLOT_COUNT][_SQUARES]
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])

    def count(self, where: int, value: int) -> None:
        """Advance a counter, and wake whoever waits for it."""
        with self._lock:
            self._counters[where].value = value
            self._bell.value = (self._bell.value + 1) & 0xFFFFFFFF
        _futex(self._bell, _WAKE, 0x7FFFFFFF, None)

    def leave(self, base: int) -> None:
        """From now on rooms that were shown in this generation or before may be written anew."""
        self.count(_LEFT, max(base, self._counters[_LEFT].value))

    def stands(self, base: int) -> bool:
        """Whether what was read from rooms of this generation is what was reduced in it."""
        return self._counters[_LEFT].value < base

    def wait(self, where: int, value: int, stopped: Callable[[], bool]) -> None:
        """Until a counter has got to `value`.

        Raises:
            _Stopped: `stopped()`, or the counter is of a newer generation.
        """
        while True:
            heard = self._bell.value
            now = self._counters[where].value
            if now >> _OPERATIONS > value >> _OPERATIONS:
                raise _Stopped
            if stopped():
                raise _Stopped
            if now >= value:
                return
            _futex(self._bell, _WAIT, heard, _ASK_AGAIN_S)


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


_LIBC = ctypes.CDLL(None)


def _futex(word: ctypes.c_uint32, what: int, value: int, timeout_s: float | None) -> None:
    wait = None if timeout_s is None else ctypes.byref(_Timespec(0, int(timeout_s * 1e9)))
    number = ctypes.c_long(_FUTEX or 0)
    _LIBC.syscall(number, ctypes.byref(word), what, ctypes.c_uint32(value), wait, None, 0)


class _Own:
    """This process's board; a child of a fork makes its own."""

    process = 0
    file = -1
    board: Board
    maps: dict[tuple[int, int], tuple[int, torch.Tensor]]  # by process and inode: file, memory
    lock = threading.Lock()


def _own() -> Board:
    with _Own.lock:
        if _Own.process != os.getpid():
            _Own.file = os.memfd_create(_NAME)
            os.ftruncate(_Own.file, _PAGES)
            _Own.board, _Own.maps, _Own.process = Board(_Own.file), {}, os.getpid()
        return _Own.board


def introduce() -> str:
    """What others on this host need to see this worker's memory; "" if they cannot."""
    if not available():
        return ""
    try:
        _own()
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
    return json.dumps([host + space, os.getpid(), _Own.file, os.fstat(_Own.file).st_ino])


def _open(process: int, file: int, inode: int) -> int:
    """A handle on a room or a board of another process.

    Raises:
        OSError: it cannot be opened, or is something else by now.
    """
    handle = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    if os.fstat(handle).st_ino != inode:
        os.close(handle)
        raise OSError(f"file {file} of process {process} is another one")
    return handle


def _forget_closed(process: int) -> None:
    """Rooms that it has no more: their memory is there for as long as anybody maps it."""
    for known, (file, _) in list(_Own.maps.items()):
        if known[0] != process:
            continue
        try:
            there = Path(f"/proc/{process}/fd/{file}").stat().st_ino
        except OSError:
            there = None
        if there != known[1]:
            _Own.maps.pop(known, None)


def _mapped(file: int, size: int) -> torch.Tensor:
    """Bytes that others write to; unlike a Python mmap they need no open file."""
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)


@dataclass(frozen=True)
class Peer:
    """A worker whose memory can be seen here."""

    process: int
    board: Board


def meet(introductions: Sequence[str]) -> list[Peer]:
    """All who have introduced themselves, in that order; none at all if one cannot be seen."""
    if not all(introductions):
        return []
    found = [json.loads(text) for text in introductions]
    if len({host for host, *_ in found}) > 1:
        return []
    try:
        return [Peer(process, _board(process, file, inode)) for _, process, file, inode in found]
    except OSError:
        return []


def _board(process: int, file: int, inode: int) -> Board:
    if process == os.getpid():
        return _own()
    handle = _open(process, file, inode)
    try:
        return Board(handle)
    finally:
        os.close(handle)


class Reduction:
    """One reduction under way. One that is stopped never ends.

    Attributes:
        norm: when it is over, that of the result, the same on all members; None: nobody asked.
    """

    def __init__(self) -> None:
        self.norm: float | None = None
        self.over = threading.Event()
        self.error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def on_finish(self, callback: Callable[[], None]) -> None:
        """Call back from another thread when it is over; at once if it is."""
        with self._lock:
            if not self.over.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def end(self, error: Exception | None) -> None:
        """It is over."""
        with self._lock:
            self.error = error
            self.over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


Rooms = Mapping[int, torch.Tensor]
"""By rank, the room of each other member, flat."""


@dataclass(frozen=True)
class Contribution:
    """What a member computes in a reduction.

    Attributes:
        into: where its result goes.
        length: elements of the result. It is in the first so many of everybody's room, each
            member's slice in its own.
        add_up: computes this member's part of the result, in its room and in `into`.
        measured: elements of the result, from the first on, whose norm is wanted.
    """

    into: torch.Tensor
    length: int
    add_up: Callable[[slice, Rooms], None]
    measured: int = 0

    def squares(self, part: slice) -> float:
        """Their sum over a part of the result, as far as it is measured; not to the last bit."""
        of = slice(part.start, min(part.stop, self.measured))
        if self.into.dtype not in (torch.float32, torch.float64):
            norm = norm_of(self.into[of])
            return norm * norm
        values = self._array[of]
        return float(np.dot(values, values))

    @cached_property
    def _array(self) -> NDArray[np.floating]:
        """The result again, for numpy's dot: it takes about half the time of torch's."""
        return self.into.numpy()


def norm_of(values: torch.Tensor) -> float:
    """Not finite where a value is not, or where a square is too large for the type."""
    precise = (torch.float64, torch.complex128, torch.complex64)
    wide = None if values.dtype in precise else torch.float32
    return float(torch.linalg.vector_norm(values, dtype=wide))


class Exchange:
    """The members of one generation, all on this host. Reductions are done one after the other."""

    def __init__(self, generation: int, rank: int, mates: Sequence[Peer]) -> None:
        """`mates` by rank, this worker among them."""
        self._base = generation << _OPERATIONS
        self._rank = rank
        self._mates = mates
        self._others = [other for other in range(len(mates)) if other != rank]
        self._number = 0
        self._stopped = False
        self._touching = threading.Lock()
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for known in list(_Own.maps):  # the memory of those who are gone
            if known[0] not in [mate.process for mate in mates]:
                _Own.maps.pop(known, None)  # another builder may have been here
        name = f"reduce-{generation}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def all_reduce(
        self, room: SharedBuffer, tensor: torch.Tensor, add: bool, measured: int = 0
    ) -> Reduction:
        """Reduce `tensor`, all of `room`, in place; sums, or the maximum. Never blocks.

        Args:
            room: this member's.
            tensor: what is in it.
            add: sums.
            measured: elements, from the first on, whose norm is wanted; the same on all members.
        """
        sizes = [tensor.nbytes] * len(self._mates)

        def add_up(part: slice, rooms: Rooms) -> None:
            total = tensor[part]
            for other in self._others:
                if add:
                    total.add_(rooms[other][part])
                else:
                    torch.maximum(total, rooms[other][part], out=total)

        return self.begin(room, sizes, Contribution(tensor, len(tensor), add_up, measured))

    def begin(self, room: SharedBuffer, sizes: Sequence[int], work: Contribution) -> Reduction:
        """Have work done when all others have shown their rooms. Never blocks.

        Args:
            room: this member's.
            sizes: bytes of everybody's room, by rank.
            work: what to do.
        """
        number = self._number
        self._number += 1
        board = self._mates[self._rank].board
        board.show(number, room)
        board.count(_FILLED, self._base | number + 1)
        reduction = Reduction()
        flushes = sys.float_info.min / 2 == 0  # denormal numbers, in this thread

        def carry_out() -> None:
            error: Exception | None = None
            torch.set_flush_denormal(flushes)
            try:
                reduction.norm = self._reduce(number, sizes, work)
            except _Stopped:
                return
            except Exception as raised:  # noqa: BLE001 - whoever waits is told, whatever it is
                error = raised.with_traceback(None)
            reduction.end(error)

        self._waiting.put(carry_out)
        return reduction

    def stop(self) -> None:
        """Give up what is under way. Nothing is written to any room after this returned.

        Peers that still read this worker's rooms find out that they may be written anew.
        """
        self._stopped = True
        with self._touching:
            if self._number:  # else it was built ahead and never entered: no older one is left
                self._mates[self._rank].board.leave(self._base)
            self._waiting.put(None)

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            task()
            del task

    def _is_stopped(self) -> bool:
        return self._stopped

    def _reduce(self, number: int, sizes: Sequence[int], work: Contribution) -> float | None:
        size, target = len(self._mates), self._base | number + 1
        cuts = [work.length * n // size for n in range(size + 1)]
        rooms = {}
        for other in self._others:
            self._mates[other].board.wait(_FILLED, target, self._is_stopped)
            rooms[other] = self._map(other, number, sizes[other]).view(work.into.dtype)
        squares = [0.0] * size
        for start in range(cuts[self._rank], cuts[self._rank + 1], _CHUNK):
            part = slice(start, min(start + _CHUNK, cuts[self._rank + 1]))
            with self._touching:
                self._check()
                work.add_up(part, rooms)
                if part.start < work.measured:  # now, while it is in this core's cache
                    squares[self._rank] += work.squares(part)
        self._check_still_there(self._others)
        with self._touching:  # counters are of the next generation as soon as this one is left
            self._check()
            self._mates[self._rank].board.tell(number, squares[self._rank])
            self._mates[self._rank].board.count(_SUMMED, target)
        for other in self._others:
            self._mates[other].board.wait(_SUMMED, target, self._is_stopped)
            for start in range(cuts[other], cuts[other + 1], _CHUNK):
                part = slice(start, min(start + _CHUNK, cuts[other + 1]))
                with self._touching:
                    self._check()
                    work.into[part].copy_(rooms[other][part])
            squares[other] = self._mates[other].board.told(number)
            self._check_still_there([other])
        return math.sqrt(sum(squares)) if work.measured else None

    def _check_still_there(self, ranks: Sequence[int]) -> None:
        """After reading from their rooms, not before: only then does it say anything."""
        if not all(self._mates[rank].board.stands(self._base) for rank in ranks):
            raise _Stopped

    def _check(self) -> None:
        if self._stopped:
            raise _Stopped

    def _map(self, other: int, number: int, expected: int) -> torch.Tensor:
        process = self._mates[other].process
        file, inode, size = self._mates[other].board.shown(number)
        if size != expected:
            raise RuntimeError(
                f"rank {other} has {size} bytes to reduce where this one expects {expected}"
            )
        _, found = _Own.maps.get((process, inode), (file, None))
        if found is None:
            _forget_closed(process)
            handle = _open(process, file, inode)
            try:
                found = _mapped(handle, size)
            finally:
                os.close(handle)
            _Own.maps[process, inode] = file, found
        return found
