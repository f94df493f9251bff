"""A worker of the pool: a Ray actor that runs one trial after another.

This one runs each alone, in its own process; another (group_worker) has each run by a group.

Not here: which trial, and what becomes of it when this process dies (pool).
"""

import os
import pickle
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from elastix.data.leaving import leave
from elastix.errors import ElastixError
from elastix.frozen_imports import import_frozen
from elastix.search.executors import trial_memory
from elastix.search.executors.executor import Ended, EndedKind, TrainFunction, Work, WorkReport
from elastix.search.executors.in_process import execute
from elastix.train.on_ray.given_device import given_device
from elastix.train.record.provenance import Installation, installation
from elastix.train.replica.context import Context

GIVEN_BACK = b""
"""The answer of a run that had not begun when it was given back."""
_KEPT = 10_000


class Reports:
    """What a worker has to tell while it is at work. One thread writes, others read."""

    def __init__(self) -> None:
        self._kept: deque[WorkReport] = deque(maxlen=_KEPT)
        self._told = 0

    def tell(self, progress: WorkReport) -> None:
        """Add one."""
        self._kept.append(progress)
        self._told += 1

    def forget(self) -> None:
        """Work is over, and its end tells them all: it may run again, and report otherwise."""
        self._kept.clear()

    def since(self, seen: int) -> tuple[int, list[WorkReport]]:
        """How many there were so far, and those after the first `seen`, as far as they are kept."""
        told, kept = self._told, list(self._kept)
        return told, kept[len(kept) - min(len(kept), told - seen) :]


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a worker says of itself when it is ready.

    Attributes:
        node, pid: the id of its node, and of its process.
        host: what it shares memory with others on: the node, or one of its GPUs; for a worker
            that looks after groups, nothing that anybody else shares.
        idle_bytes: what it holds before any trial.
        capacity_bytes: what it and others may hold on that host, as it looks from here.
        kills: how often the system has ended a process there for want of memory.
        failed: what its GPU says, which does nothing for a process that has just begun.
        installation: the elastix that it has, for the driver to compare; another one says none.
    """

    node: str
    pid: int
    host: str
    idle_bytes: int = 0
    capacity_bytes: int = 0
    kills: int = 0
    failed: str = ""
    installation: Installation | None = None


def packed(sent: Work | WorkReport | Ended) -> bytes:
    """Work, or what comes of it, as bytes: Ray passes those on, and takes long over objects.

    A class of the script itself, or of a module that is registered to be pickled by value, and what
    has no name to be imported by, travel as their code.
    """
    if ray.cloudpickle.list_registry_pickle_by_value():
        return bytes(ray.cloudpickle.dumps(sent))
    try:
        plain = pickle.dumps(sent, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        plain = b""
    if not plain or b"__main__" in plain:
        return bytes(ray.cloudpickle.dumps(sent))
    return plain


class PoolWorker(ABC):
    """The actor. `run` occupies one thread; the other methods are answered beside it.

    Args:
        number: of the worker, for people.
        train: the train function as ray.cloudpickle wrote it.
    """

    def __init__(self, number: int, train: bytes) -> None:
        self._number = number
        self._train = train
        self._reports = Reports()
        self._halted: set[int] = set()
        self._begun = 0  # the turn of the newest run
        self._given_back: set[int] = set()  # turns of runs that others have
        self._spent = False  # see Ended
        self._turns = threading.Lock()
        self._at = "idle"

    def __repr__(self) -> str:
        return f"pool worker {self._number} {self._at}"

    def hello(self) -> Hello:
        """Be ready, and say who this is."""
        return Hello(
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            host=f"groups of worker {self._number}",
            kills=trial_memory.kills(),
            installation=installation(),
        )

    def run(self, given: bytes, turn: int, avoided: Collection[str] = ()) -> bytes:
        """Run a trial to its end: Work to Ended, packed. What it raises is part of the answer.

        GIVEN_BACK if another worker is to have it.

        Args:
            given: the Work.
            turn: by which this run is halted; a later one of the trial has another. They grow.
            avoided: nodes that are known to have other elastix code.
        """
        with self._turns:
            if turn in self._given_back or self._spent:
                self._given_back.discard(turn)
                return GIVEN_BACK
            self._begun = turn
        work: Work = pickle.loads(given)
        self._at = f"trial={work.number}"
        try:
            ended = self._carry_out(work, lambda: turn in self._halted, avoided)
            answer = packed(ended)
            self._spent = ended.spent  # once it can be heard, or all else would be given back
            return answer
        finally:
            self._reports.forget()
            self._halted.discard(turn)
            self._at = "idle"

    @abstractmethod
    def _carry_out(self, work: Work, halted: Callable[[], bool], avoided: Collection[str]) -> Ended:
        """Run a trial to its end, or until `halted`; where others take part, on no such node."""

    @ray.method(concurrency_group="control")
    def reports(self, seen: int) -> tuple[int, list[WorkReport]]:
        """See Reports.since; over all trials."""
        return self._reports.since(seen)

    @ray.method(concurrency_group="control")
    def kills(self) -> int:
        """How often the system has ended a process here for want of memory."""
        return trial_memory.kills()

    @ray.method(concurrency_group="control")
    def leave(self) -> None:
        """The process is about to be killed."""
        leave()

    @ray.method(concurrency_group="control")
    def halt(self, turn: int) -> None:
        """End a run soon. If it is over already, the trial's next one is left alone."""
        self._halted.add(turn)

    @ray.method(concurrency_group="control")
    def give_back(self, turns: Sequence[int]) -> list[int]:
        """Of runs that are queued here those that have not begun; none of these will."""
        with self._turns:
            back = [turn for turn in turns if turn > self._begun]
            self._given_back.update(back)
            return back


class LoneWorker(PoolWorker):
    """Each trial runs in this process.

    Args:
        number, train: see PoolWorker.
        threads: of torch.
    """

    def __init__(self, number: int, train: bytes, threads: int) -> None:
        super().__init__(number, train)
        self._threads = threads
        self._unpickled: TrainFunction | None = None
        self._device = torch.device("cpu")  # until it is ready

    def hello(self) -> Hello:
        """Import what every trial needs, and see whether the GPU does anything, if it has one."""
        import_frozen("torch._dynamo")  # making the first optimizer imports it, in most of a second
        torch.set_num_threads(self._threads)
        said = super().hello()
        try:
            self._device = given_device()
            if self._device.type == "cuda":
                _compute(self._device)
                room = trial_memory.free(self._device)
                return replace(said, host=_gpu(said.node), capacity_bytes=room)
        except RuntimeError as error:  # as torch's own are
            failed = f"{type(error).__name__}: {error}".splitlines()[0]
            return replace(said, host=_gpu(said.node), failed=failed)
        idle = trial_memory.resident()
        room = trial_memory.free() + idle
        return replace(said, host=said.node, idle_bytes=idle, capacity_bytes=room)

    def _carry_out(self, work: Work, halted: Callable[[], bool], avoided: Collection[str]) -> Ended:
        del avoided
        if self._unpickled is None:
            self._unpickled = interrupted(ray.cloudpickle.loads(self._train))
        if self._device.type == "cuda":
            try:
                torch.cuda.set_device(self._device)  # a trial may have made another one current
            except RuntimeError as error:  # as torch's own are
                what = f"its GPU failed: {error}".splitlines()[0]
                lost = EndedKind.LOST  # of which no worker is told that died by itself
                return Ended(number=work.number, kind=lost, summary=what, spent=True)
        ended = execute(
            self._unpickled,
            work,
            worker=f"worker {self._number} pid {os.getpid()}",
            tell=self._reports.tell,
            device=self._device,
            halted=halted,
        )
        return sendable(ended)


def _gpu(node: str) -> str:
    return f"{node} GPU {ray.get_gpu_ids()[0]}"


def _compute(device: torch.device) -> None:
    """Anything. One that is full is not broken."""
    with suppress(torch.OutOfMemoryError):
        torch.ones(1, device=device).add_(1).item()


def interrupted(train: TrainFunction) -> TrainFunction:
    """A KeyboardInterrupt here is the function's own: Ray would take the call for cancelled."""

    def call(ctx: Context) -> None:
        try:
            train(ctx)
        except KeyboardInterrupt as error:
            raise RuntimeError(f"KeyboardInterrupt: {error}") from error

    return call


def sendable(ended: Ended) -> Ended:
    """Errors travel as elastix's own or as text; one that cannot be sent travels as text."""
    error: Any = ended.error
    if not isinstance(error, ElastixError):
        return ended
    try:  # one whose class takes other arguments than its text can be sent, and not received
        pickle.loads(ray.cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - the border of the process: an error may hold anything
        return replace(ended, error=None)
    return ended
