"""Bits that flip in workers of an exact run: how many are found, and who is named for them.

A run of three workers, of which each that is taken out is replaced. One flip after the other, in
weights, buffers, the optimizer, or what a slice gives; in each step one slice is computed by two.
The run has to end with the bytes of an undisturbed one of one worker. Of gradients of slices that
only their owner computes nobody can know; a part of the flips hits those.

Part of `python -m benchmarks.exact`; alone: `python -m benchmarks.exact.flips --flips 300`.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.exact.counting import Counts, counted
from elastix import Context
from elastix.data.random_numbers import seed_at
from elastix.events import ReplicasDiverged, StateStored, StepCommitted
from elastix.testing.chaos import Flip, flip
from elastix.testing.local import LocalRun, run_local

_SLICES, _WORKERS, _APART = 8, 3, 12
EACH = 15
"""So many flips in one run."""


@dataclass(frozen=True)
class Planned:
    """One flip.

    Attributes:
        kind: "state", "gradient" (of a slice that is looked at, by its owner or by the other one),
            or "unseen" (of a slice that is not).
        step: committed steps at that moment.
        rank: whose memory; for slices, it is whoever computes it.
        phase: of the owner, "slice", or of who computes it once more: "again".
        slice_: which.
        place: of the tensor among all of its kind.
        byte, bit: of it.
    """

    kind: str
    step: int
    rank: int
    phase: str
    slice_: int
    place: int
    byte: int
    bit: int


def plan(flips: int, seed: int, kinds: tuple[str, ...]) -> list[Planned]:
    """So many flips of these kinds, in turn."""
    chance = random.Random(seed)
    planned = []
    for number in range(flips):
        step, kind = _APART * (number + 1), kinds[number % len(kinds)]
        looked_at = seed_at(0, "again", step) % _SLICES
        planned.append(
            Planned(
                kind=kind,
                step=step,
                rank=chance.randrange(_WORKERS),
                phase=_phase(kind, chance),
                slice_=(looked_at + (kind == "unseen")) % _SLICES,
                place=chance.randrange(100),
                byte=chance.randrange(10_000),
                bit=chance.randrange(8),
            )
        )
    return planned


def _phase(kind: str, chance: random.Random) -> str:
    if kind == "gradient":
        return chance.choice(("slice", "again"))
    return "boundary" if kind == "state" else "slice"


class Net(nn.Module):
    """Small, and has of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        found: torch.Tensor = self.head(self.body(x))
        return found


def train(ctx: Context) -> None:
    """The train function. Of each flip a file tells who has suffered it; there is one of each."""
    marks = Path(ctx.config["marks"])
    planned = {one["step"]: Planned(**one) for one in ctx.config["planned"]}

    def look(phase: str, detail: int) -> None:
        one = planned.get(ctx.step)
        if one is None or one.phase != phase or ctx.rank < 0:
            return
        if ctx.rank != one.rank if phase == "boundary" else detail != one.slice_:
            return
        try:
            with (marks / str(one.step)).open("x") as file:
                file.write(str(ctx.worker))
        except FileExistsError:
            return  # the step is done again
        flip(Flip(worker=ctx.worker, tensor=_name(one, ctx), byte=one.byte, bit=one.bit), ctx)

    ctx.on_phase(look)
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(480, 16, generator=generator)
    y = torch.randint(4, (480,), generator=generator)
    model: Any = Net()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = ctx.loader(TensorDataset(x, y), batch_size=32, slices=_SLICES)
    for epoch in loader.epochs(ctx.config["epochs"]):
        for step in epoch:
            for inputs, targets in step:
                F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def _name(one: Planned, ctx: Context) -> str:
    member: Any = ctx._member
    if one.kind != "state":
        names = [f"@backward/{name}" for name, _ in member._tracked.model.named_parameters()]
    else:
        held = member.capture().tensors
        names = sorted(n for n in held if not n.startswith("@") or n.startswith("@optimizer"))
    return names[one.place % len(names)]


def final(run: LocalRun) -> str:
    """The digest of the last State that was stored."""
    return next(e.digest for e in reversed(run.events) if isinstance(e, StateStored))


def _found(run: LocalRun) -> Iterator[tuple[int, tuple[int, ...]]]:
    for event in run.events:
        if isinstance(event, ReplicasDiverged):
            yield event.step, event.apart


@cache
def quiet(epochs: int) -> str:
    """The digest that the undisturbed run of one worker ends with."""
    config = {"marks": "", "epochs": epochs, "planned": []}
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {"directory": Path(directory), "timeout_s": 1800.0}
        return final(run_local(train, 1, config=config, exact=True, **options))


def case(seed: int, amount: int, kinds: tuple[str, ...] = ("state", "gradient")) -> Counts:
    """One run with so many flips; see the package for what the counts mean."""
    counts: Counts = {"flips": 0, "state_found": 0, "gradient_found": 0, "culprit_named": 0}
    counts |= {"false_alarms": 0, "byte_equal": 0, "runs": 1, "steps": 0, "unseen": 0}
    planned = plan(amount, seed, kinds)
    epochs = (planned[-1].step + _APART) // 15 + 1
    with tempfile.TemporaryDirectory() as directory:
        marks = Path(directory) / "marks"
        marks.mkdir()
        config = {"marks": str(marks), "epochs": epochs}
        run = run_local(
            train,
            _WORKERS,
            config={**config, "planned": [asdict(one) for one in planned]},
            directory=Path(directory) / "run",
            min_workers=_WORKERS,
            replace=True,
            exact=True,
            recompute_every=1,
            timeout_s=1800.0,
        )
        suffered = {int(file.name): int(file.read_text()) for file in marks.iterdir()}
    found = list(_found(run))
    for one in planned:
        if one.step not in suffered:
            raise RuntimeError(f"{one} did not happen")
        named = [apart for step, apart in found if step == one.step]
        counts["flips"] += 1
        counts["unseen"] += one.kind == "unseen"
        if one.kind != "unseen":
            counts[f"{one.kind}_found"] += bool(named)
            counts["culprit_named"] += named == [(suffered[one.step],)]
    counts["false_alarms"] = sum(step not in suffered for step, _ in found)
    counts["byte_equal"] = int(final(run) == quiet(epochs))
    counts["steps"] = sum(isinstance(event, StepCommitted) for event in run.events)
    return counts


def measure(flips: int, seed: int = 0) -> Counts:
    """Counts over so many flips."""
    return counted(case, flips, EACH, seed=seed)


def main() -> None:
    """Print what was found of how many flips, and in how many runs the bytes are the quiet ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(measure(options.flips, options.seed), indent=2))


if __name__ == "__main__":
    main()
