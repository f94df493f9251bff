"""The one workload that every system runs, and the way a worker is killed in it.

Five workers train a multilayer perceptron of 10.5 million float32 parameters with plain SGD on
synthetic data for one pass. Every item carries its own index, so that each worker can say
which samples went into which step; it does so in a step log (``StepLog``), which the parent
process turns into numbers (see ``summary``).

Times are ``time.monotonic()``, one clock for all processes of a host.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import RemovableHandle

from benchmarks.peers.summary import StepRecord

WORLD_SIZE = 5
BATCH_PER_RANK = 32
GLOBAL_BATCH = WORLD_SIZE * BATCH_PER_RANK
STEPS = 50
"""Steps in one pass when nothing fails; the data set has ``steps * GLOBAL_BATCH`` samples."""
KILL_STEP = 25
"""The step (counted from 0) in whose backward the victim dies."""
VICTIM = 2
"""The rank that dies: of five in a ring it has two neighbours and two who are none."""
LEARNING_RATE = 0.01

_INPUTS = 64
_WIDTH = 1608
_HIDDEN_LAYERS = 4
_CLASSES = 10

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs, labels and the indices of the samples."""


class IndexedSamples(Dataset[tuple[Tensor, int, int]]):
    """Random inputs and labels that depend on nothing but the index.

    Args:
        size: Number of samples.
        seed: Another seed gives other data.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._inputs = torch.randn(size, _INPUTS, generator=generator)
        teacher = torch.randn(_INPUTS, _CLASSES, generator=generator)
        self._labels = (self._inputs @ teacher).argmax(dim=1).tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return self._inputs[index], self._labels[index], index


def build_model(seed: int = 0) -> nn.Sequential:
    """Builds the model; the same seed gives the same weights in every process."""
    torch.manual_seed(seed)
    widths = [_INPUTS] + [_WIDTH] * (_HIDDEN_LAYERS + 1)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(_WIDTH, _CLASSES))


def build_optimizer(model: nn.Module) -> torch.optim.SGD:
    """Builds the optimizer that goes with the model."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def batches_of(order: Sequence[int], first_batch: int) -> list[list[int]]:
    """Cuts one rank's order of samples into full batches.

    Args:
        order: The rank's samples in the order of its sampler.
        first_batch: Batches to leave out at the front, because they were drawn before.
    """
    count = len(order) // BATCH_PER_RANK
    starts = range(first_batch * BATCH_PER_RANK, count * BATCH_PER_RANK, BATCH_PER_RANK)
    return [list(order[start : start + BATCH_PER_RANK]) for start in starts]


def load(dataset: IndexedSamples, batches: list[list[int]]) -> "DataLoader[Batch]":
    """Returns a loader over the given batches of sample indices, without worker processes."""
    return DataLoader(dataset, batch_sampler=batches)  # type: ignore[arg-type]


def kill_in_mid_backward(
    model: nn.Module, when: Callable[[], bool], stamp: Path
) -> RemovableHandle:
    """Lets this process die by SIGKILL in the middle of a backward pass.

    The hook sits on the parameter in the middle of the network: when it runs, the later layers
    have their gradients (and overlapping systems have begun to reduce them), the earlier layers
    do not. The stamp, time and process id, is written before the kill but not synced to the
    disk: what was written outlives its process anyway, and a sync would count milliseconds of
    disk against the system that is measured.

    Args:
        model: The model, before anything wraps it.
        when: Asked once in each backward; the first True is the end.
        stamp: File for the time and the process id, to be read by ``summary.read_kill``.

    Returns:
        The handle of the hook.
    """

    def die(_: Tensor) -> None:
        if when():
            stamp_file = os.open(stamp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(stamp_file, json.dumps({"t": time.monotonic(), "pid": os.getpid()}).encode())
            os.kill(os.getpid(), signal.SIGKILL)

    parameters = list(model.parameters())
    middle = parameters[len(parameters) // 2]
    handle: RemovableHandle = middle.register_post_accumulate_grad_hook(die)
    return handle


class StepLog:
    """Appends one line per step that this worker took to a JSON lines file.

    Args:
        path: The file; a replacement may go on with the file of the worker it replaces.
        worker: Position of the worker in the group.
        attempt: Which start of the whole group this is, for systems that restart it; larger
            is later.
    """

    def __init__(self, path: Path, worker: int, attempt: float = 0.0) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._worker = worker
        self._attempt = attempt

    def write(
        self, step: int, ids: Sequence[int], *, world: int, committed: bool = True, counted: bool
    ) -> None:
        """Writes what happened to a step, as soon as it is known.

        Args:
            step: The step, counted from 0 over the whole run.
            ids: The samples that this worker drew for it.
            world: Workers whose samples are in the step.
            committed: Whether the group agreed on the gradient.
            counted: Whether this worker's samples are in that gradient.
        """
        record: StepRecord = {
            "t": time.monotonic(),
            "worker": self._worker,
            "pid": os.getpid(),
            "attempt": self._attempt,
            "step": step,
            "ids": [int(index) for index in ids],
            "world": world,
            "committed": committed,
            "counted": committed and counted,
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
