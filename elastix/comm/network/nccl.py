"""Operations on tensors of GPUs, by NCCL. A group has this beside gloo, which carries all else.

Who is lost is decided elsewhere, and so is when a group is given up: what torch would do about that
by itself is switched off (`settle_environment`). An operation of NCCL that lacks a peer never ends.
It is over when the communicator was aborted, and then looks as if it had ended well. So the order
in which an end was seen and the abort was decided on tells which of the two it was.

Invariant: memory that an operation may still write is referred to until that is over, or until the
abort has returned.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elastix.comm.network.pending import Pending, bare

logger = logging.getLogger(__name__)

_OPERATION_TIMEOUT = timedelta(days=365)
_POLL_S = 0.0003  # an event of CUDA cannot be waited for and given up
_ENVIRONMENT = {
    # No thread of torch's that ends the process when an operation fails. A wait of torch's
    # would block then; nobody here uses it (`_GpuPending._order`).
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",  # of groups that torch makes for the places of a worker
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",  # seconds, to connect
    # Algorithms are connected with the communicator, and not when they are first chosen: then a
    # peer may be lost, and the thread that trains would wait for it.
    "NCCL_RUNTIME_CONNECT": "0",
}


def settle_environment(host: str = "") -> None:
    """Before the first group of this process, and before other threads read the environment.

    Args:
        host: where this process says that it is. NCCL refuses two processes on one GPU of one host;
            between hosts it goes through sockets, which is slow.
    """
    os.environ.update(_ENVIRONMENT)
    if host:
        os.environ["NCCL_HOSTID"] = host


class GpuGroup:
    """The GPUs of some members, connected. Operations are asynchronous and never raise.

    Torch's errors of the device itself are let through: they are the end of this worker.

    Args:
        store: through which they meet; used while this is made alone.
        rank: of this one.
        size: how many they are.
        device: of this one.

    Attributes:
        given_up: what ends from now on ends because of that. Set before NCCL is told so.
        closed: NCCL has returned from the abort: nothing is written any more.
    """

    def __init__(
        self, store: torch._C._distributed_c10d.Store, rank: int, size: int, device: torch.device
    ) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _OPERATION_TIMEOUT
        options.config.blocking = 0
        self._device = device
        self._nccl: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._news = threading.Condition()
        self._under_way: list[_GpuPending] = []
        self.given_up = False
        self._aborting = threading.Lock()
        self.closed = False
        threading.Thread(target=self._watch, name=f"nccl-{rank}", daemon=True).start()

    def connect(self, given_up: Callable[[], bool]) -> None:
        """Block until all are connected. NCCL does that when it is first used.

        Raises:
            RuntimeError: somebody cannot be reached, or nobody wants this any longer.
        """
        try:
            torch.cuda.set_device(self._device)  # of this thread
            size = self._nccl.size()
            tiny, other = (torch.zeros(size, device=self._device) for _ in range(2))
            ones, options = [1] * size, dist.AllToAllOptions()
            self._end(lambda nccl: nccl.allreduce([tiny]), given_up)
            # Pairs are connected by what they send to each other first.
            self._end(lambda nccl: nccl.alltoall_base(other, tiny, ones, ones, options), given_up)
        except BaseException:
            self.abort()
            raise

    def _end(self, launch: Callable[[Any], Any], given_up: Callable[[], bool]) -> None:
        pending = self.start(launch)
        while not pending.finished():
            if given_up():
                raise RuntimeError("abandoned before all members were connected")
            time.sleep(_POLL_S)
        error = pending.settle()
        if error is not None:
            raise error

    def start(self, launch: Callable[[Any], Any]) -> Pending:
        """Begin what `launch` begins with torch's process group, after the current stream's work.

        Raises:
            torch.AcceleratorError: the device fails.
        """
        if self.given_up:
            return Pending(None, _gone())
        try:
            pending = _GpuPending(launch(self._nccl), self)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            return _NotBegun(bare(error), launch, self)
        with self._news:
            if not self.closed:
                self._under_way.append(pending)
                self._news.notify_all()
                return pending
        pending.end(_gone())  # it was aborted while it was begun
        return pending

    def give_up(self) -> None:
        """From now on no operation ends well. At once; `abort` follows, in any thread."""
        with self._news:
            self.given_up = True

    def abort(self) -> None:
        """End all operations, and wait until none writes any more, which takes long."""
        self.give_up()
        with self._aborting:
            if self.closed:
                return
            with contextlib.suppress(RuntimeError):  # the device has failed, and so will its worker
                self._nccl.abort()
            with self._news:
                self.closed = True
                self._news.notify_all()

    def _watch(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._under_way or self.closed)
                if self.closed:
                    break
            if not self._look():
                time.sleep(_POLL_S)
        with self._news:  # what refers to an operation keeps its memory
            rest, self._under_way = self._under_way, []
        for pending in rest:
            pending.end(_gone())
            pending.tell()

    def _look(self) -> bool:
        """Whether some were over. Nothing here refers to them after that."""
        with self._news:
            under_way = list(self._under_way)
        over = [pending for pending in under_way if pending.look(self._news)]
        with self._news:
            self._under_way = [p for p in self._under_way if p not in over]
        for pending in over:
            pending.tell()
        return bool(over)


class _OfGpus(Pending):
    """Whose memory is let go of when nothing writes there, whether or not it has ended well."""

    def let_go(self) -> bool:
        return not self.writes


class _NotBegun(_OfGpus):
    """One that could not be begun. Parts of it may be under way, until the group is aborted."""

    def __init__(self, error: Exception, launch: Callable[[Any], Any], group: GpuGroup) -> None:
        super().__init__(None, error)
        self._launch = launch  # refers to the memory
        self._group = group

    @property
    def writes(self) -> bool:
        return not self._group.closed


class _GpuPending(_OfGpus):
    """See Pending."""

    def __init__(self, work: Any, group: GpuGroup) -> None:  # noqa: ANN401
        self._work = work
        self._group = group
        self._result = work.get_future_result()  # done if NCCL reports an error
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def look(self, news: threading.Condition) -> bool:
        """Whether it is over by itself. Called by the group's thread."""
        try:
            # It looks for errors before it looks whether the kernel has ended; so once more.
            if not (self._work.is_completed() and self._work.is_completed()):
                return False
            failed = self._result.done()
        except Exception as error:  # noqa: BLE001 - the device fails; this thread must not
            self.end(bare(error))
            return True
        with news:  # what was given up before it was seen to end may have ended by that
            if self._group.given_up:
                return False
            self.end(_lost() if failed else None)
        return True

    def end(self, error: BaseException | None) -> None:
        """It is over."""
        self._error = error
        self._over.set()

    def tell(self) -> None:
        """Call back whoever asked for it."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # as torch's futures do
                logger.exception("what was to be called at the end of an operation has raised")

    def finished(self) -> bool:
        return self._over.is_set()

    def on_finish(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._over.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def _order(self) -> None:
        """Not wait(), which aborts the group in this thread if there is an error by now."""
        self._work.synchronize()

    @property
    def writes(self) -> bool:
        """One that has failed goes on until it is aborted."""
        well = self._over.is_set() and self._error is None
        return not (well or self._group.closed)


def _lost() -> RuntimeError:
    return RuntimeError("NCCL reports that a peer, or the connection to it, is lost")


def _gone() -> RuntimeError:
    return RuntimeError("the group was given up before the operation had ended")
