"""Faults for the guard, and steps in which nothing happens: what is found, and what should not be.

`case`: three workers of an exact run, in which batches have a sample whose loss is not a number, or
infinite, or all of whose losses are a thousand times too large. Each such step has to be void on
all workers, and no other; a run of one worker with the same faults has to end with the same bytes,
and no State that was stored on the way may hold a number that is not finite.

`quiet`: steps without a fault, in turn with and without `exact=True`. Whatever sentinel or guard
find in them is a false alarm.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from benchmarks.exact.counting import Counts
from benchmarks.exact.flips import Net, final
from elastix import CheckpointConfig, Context, Guard
from elastix.data.audit import audit
from elastix.events import ReplicasDiverged, StateStored, StepCommitted, StepVoided, WorkerLost
from elastix.store import Store
from elastix.testing.local import LocalRun, run_local

_SLICES, _BATCH, _WORKERS, _APART, _LEARNT = 8, 32, 3, 8, 30
"""A fault about every so many batches, once the guard knows what is usual."""

EACH = 10
EACH_QUIET = 5000

Fault = tuple[int, str, int]
"""Number of a batch, what befalls it, and which sample of it (one thousand times: all)."""

_FACTORS = {"nan": float("nan"), "inf": float("inf"), "scaled": 1000.0}


class Weighed(Dataset[Any]):
    """Samples with the weight of their loss."""

    def __init__(self, batches: int, faults: Sequence[Fault]) -> None:
        generator = torch.Generator().manual_seed(1)
        amount = batches * _BATCH
        self._x = torch.rand(amount, 16, generator=generator)
        self._y = torch.randint(4, (amount,), generator=generator)
        self._weight = torch.ones(amount)
        for batch, kind, sample in faults:
            begin = batch * _BATCH
            rows = slice(begin, begin + _BATCH) if kind == "scaled" else begin + sample
            self._weight[rows] = _FACTORS[kind]

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self._x[index], self._y[index], self._weight[index]


def train(ctx: Context) -> None:
    """The train function."""
    dataset = Weighed(ctx.config["batches"], ctx.config["faults"])
    model: Any = Net()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    loader = ctx.loader(dataset, batch_size=_BATCH, slices=_SLICES, shuffle=False)
    for epoch in loader.epochs(1):
        for step in epoch:
            for x, y, weight in step:
                (F.cross_entropy(model(x), y, reduction="none") * weight).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def case(seed: int, amount: int) -> Counts:
    """One run with so many faults."""
    draws = random.Random(seed)
    kinds = sorted(_FACTORS)
    faults: list[Fault] = []
    for number in range(amount):
        batch = _LEARNT + _APART * number + draws.randrange(_APART)
        faults.append((batch, kinds[(seed + number) % len(kinds)], draws.randrange(_BATCH)))
    config = {"batches": faults[-1][0] + _APART, "faults": faults}
    with tempfile.TemporaryDirectory() as directory:
        alone = _run(Path(directory) / "alone", config, 1)
        run = _run(Path(directory) / "run", config, _WORKERS)
        states, corrupt = _states(run)
    # Two faults one after the other void the same number of a step twice.
    found = Counter(event.step for event in run.events if isinstance(event, StepVoided))
    wanted = Counter(batch + 1 - before for before, (batch, _, _) in enumerate(faults))
    account = audit(run.events)
    return {
        "faults": amount,
        "found": (found & wanted).total(),
        "false_alarms": (found - wanted).total(),
        "byte_equal": int(final(run) == final(alone)),
        "exact": int(account.exact and account.replicas.equal is True),
        "runs": 1,
        "states": states,
        "corrupt_states": corrupt,
    }


def _run(directory: Path, config: dict[str, Any], workers: int) -> LocalRun:
    return run_local(
        train,
        workers,
        config=config,
        directory=directory,
        guard=Guard(most=EACH),
        checkpoint=CheckpointConfig(every_steps=5, keep_last=None),
        exact=True,
        timeout_s=1800.0,
    )


def _states(run: LocalRun) -> tuple[int, int]:
    """How many were stored, and how many of these hold a number that is not finite.

    Of a step that has two the later one: the final State takes the place of the one that was due.
    """
    stored = {event.step: event.ref for event in run.events if isinstance(event, StateStored)}
    with Store(run.directory / "store", read_only=True) as store:
        held = [store.get(ref).tensors.values() for ref in stored.values()]
        corrupt = sum(
            any(t.is_floating_point() and not bool(t.isfinite().all()) for t in tensors)
            for tensors in held
        )
    return len(stored), corrupt


def quiet(seed: int, steps: int) -> Counts:
    """So many steps of two workers; whatever is found in them."""
    exact = seed // EACH_QUIET % 2 == 1
    with tempfile.TemporaryDirectory() as directory:
        run = run_local(
            train,
            2,
            config={"batches": steps, "faults": []},
            directory=Path(directory),
            guard=Guard(),
            exact=exact,
            recompute_every=10 if exact else None,
            seed=seed,
            timeout_s=3600.0,
        )
    kinds = (ReplicasDiverged, StepVoided, WorkerLost)
    return {
        "steps": sum(isinstance(event, StepCommitted) for event in run.events),
        "false_alarms": sum(isinstance(event, kinds) for event in run.events),
    }
