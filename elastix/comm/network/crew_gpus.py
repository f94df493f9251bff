"""The GPUs of a worker's places: what these compute together by NCCL, and how that is ended.

FSDP2 and tensor parallelism begin such operations by themselves, in groups of torch's, and nobody
here sees each of them. NCCL is as `nccl` has it: an operation that lacks a mate never ends, and one
that was aborted looks as if it had ended well, so whatever comes after it computes with what was
in its memory, and says nothing. So when a mate is lost all of them are ended, and what this place
has computed counts only if `check` finds, after it was computed, that none was.

Invariant: `ended` is set before NCCL is told to end anything.
"""

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

_POLL_S = 0.0003  # an event of CUDA cannot be waited for and given up


class MatesGpus:
    """Of one place, in the world that torch has now.

    Args:
        device: of this place.

    Attributes:
        ended: what mates compute together is ended, or is about to be.
    """

    def __init__(self, device: torch.device) -> None:
        self.ended = False
        self._device = device
        self._lock = threading.Lock()
        self._aborts: list[threading.Thread] = []

    def connect(self, groups: Iterable[dist.ProcessGroup], pairs: Iterable[Any] = ()) -> None:
        """Block until the places of each group are connected. NCCL does that at its first use.

        Args:
            groups: in one order at all places.
            pairs: those of them whose places send to each other.

        Raises:
            RuntimeError: one of them is lost.
        """
        pairs = list(pairs)
        for group in groups:
            size = group.size()
            tiny, other = (torch.zeros(size, device=self._device) for _ in range(2))
            dist.all_reduce(tiny, group=group)
            if group in pairs:  # torch takes what is under way for an error if it is given no sizes
                dist.all_to_all_single(other, tiny, [1] * size, [1] * size, group=group)
            self.check(wait=True)

    def check(self, *, wait: bool = False) -> None:
        """That what was computed up to here was computed with all mates.

        Args:
            wait: until it is computed, all that the current stream has begun. If not, that is what
                the CPU knows the outcome of.

        Raises:
            RuntimeError: it may be anything, since operations were ended.
        """
        if wait and not self.ended:
            through = _mark(self._device)
            while not (through.query() or self.ended):
                time.sleep(_POLL_S)
        if self.ended:
            raise RuntimeError("a process of this worker is lost: what it computes was ended")

    def end(self) -> None:
        """End all operations. At once, in any thread, any number of times."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
            # Each in a thread of its own: an abort may wait for the device, and so for kernels of
            # groups that were not told yet.
            self._aborts = [
                threading.Thread(target=_abort, args=(group,), name="abort-mates", daemon=True)
                for group in _groups()
            ]
            for thread in self._aborts:  # whoever comes next may join them
                thread.start()

    def close(self) -> None:
        """End all, and block until nothing writes to this place's memory any more."""
        self.end()
        for thread in self._aborts:
            thread.join()


def _mark(device: torch.device) -> torch.cuda.Event:
    """What is over when the device is through with all that the current stream has begun."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _groups() -> list[Any]:
    """NCCL's of all groups that there are, those that user code has made among them."""
    world: Any = dist.distributed_c10d._world
    found = []
    for group in dict(world.pg_map):
        with contextlib.suppress(RuntimeError):  # it has none
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found


def _abort(group: Any) -> None:  # noqa: ANN401 - torch's
    with contextlib.suppress(RuntimeError):  # the device has failed, and so will its worker
        group.abort()
