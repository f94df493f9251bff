"""Random programs of draws and passes, with kills, end as plain torch does on whole batches."""

import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elastix
from elastix.data.audit import audit
from elastix.state import capture
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests.trainables import digest, note, notes
from tests.ways import CLASSES, WIDTH, data

_EPOCHS = 2


class Heads(nn.Module):
    """One for each loader, so that some have no gradient, and weight decay shows it."""

    def __init__(self, heads):
        super().__init__()
        self.body = nn.Linear(WIDTH, 5)
        self.heads = nn.ModuleList(nn.Linear(5, CLASSES) for _ in range(heads))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.body(x)))


class Stream:
    """The batches of all epochs of a loader."""

    def __init__(self, number, loader):
        self.number = number
        self._batches = self._all(loader)
        self._epoch = ()
        self._last = False

    def _all(self, loader):
        for self._epoch in loader.epochs(_EPOCHS):
            self._last = self._epoch.number == _EPOCHS - 1
            for x, y in self._epoch:
                yield self.number, x, y

    def next(self, within):
        """A list of the next batch. Whether there is none is asked between steps only.

        Within a step the end is not sure: what is lost with a worker comes back after it.
        """
        if within and self._last and not len(self._epoch):
            return []
        return list(itertools.islice(self._batches, 1))


@dataclass(frozen=True)
class Program:
    """A train function that is all chance, but for the seed.

    A step is of up to three groups. A group draws up to three batches, of any loaders, and then has
    one or two passes, each about one or more of these batches; gradients may be zeroed in between.

    Attributes:
        revisits: there are steps that draw nothing, about the last batches.
    """

    seed: int
    revisits: bool

    def __call__(self, ctx: elastix.Context) -> None:
        chance = random.Random(self.seed)
        sizes = [
            chance.choice((4, 5, 6, 8, 10, 15, 16)) for _ in range(chance.choice((1, 2, 2, 3)))
        ]
        model = Heads(len(sizes)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=0.01)
        model, optimizer = ctx.prepare(model, optimizer)
        streams = [
            Stream(number, ctx.loader(data(chance.randrange(9, 60), seed=number), batch_size=size))
            for number, size in enumerate(sizes)
        ]
        going = set(range(len(sizes)))
        while going:
            self._step(ctx, chance, model, optimizer, streams, going)
        note(
            Path(ctx.config["log"]) / f"{ctx.worker}.jsonl",
            ctx.step,
            digest(capture({"": model}, {})),
        )

    def _step(self, ctx, chance, model, optimizer, streams, going):
        groups = chance.choice((1, 1, 2, 3))
        drawn = []
        for group in range(groups):
            wanted = [
                chance.choice(sorted(going)) for _ in range(chance.choice((1, 1, 2, 3))) if going
            ]
            fresh = []
            for number in wanted:
                found = streams[number].next(within=bool(drawn or fresh))
                fresh += found
                if not found and not drawn and not fresh:
                    going.discard(number)
            drawn = fresh or drawn
            if not drawn:
                return  # a step about nothing
            passes = chance.choice((1, 1, 2))
            for number in range(passes):
                last = group == groups - 1 and number == passes - 1
                about = chance.sample(fresh, chance.randint(1, len(fresh))) if fresh else []
                with nullcontext() if last else ctx.accumulate():
                    self._loss(model, about).backward()
            if group < groups - 1 and chance.random() < 0.1:
                optimizer.zero_grad(set_to_none=chance.random() < 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if self.revisits and drawn and chance.random() < 0.5:
            self._loss(model, drawn).backward()
            optimizer.step()
            optimizer.zero_grad()

    def _loss(self, model, batches):
        loss = 0.0 * model.body.weight.sum()
        for head, x, y in batches:
            loss = loss + F.cross_entropy(model(x, head), y)
        return loss


def check(directory, seed):
    chance = random.Random(-seed)
    workers = chance.choice((1, 2, 2, 3, 3, 4))
    phases = ("batch", "bucket", "filled", "round", "left", "boundary")
    kills = [
        Kill(
            worker=worker,
            phase=chance.choice(phases),
            step=chance.randrange(6),
            after=chance.randrange(4),
        )
        for worker in chance.sample(range(workers), min(workers - 1, chance.choice((0, 1, 1, 2))))
    ]
    logs = directory / "logs"
    logs.mkdir(parents=True)
    program = with_kills(Program(seed, revisits=not kills), kills)
    result = run_local(program, workers, config={"log": str(logs)}, directory=directory / "run")
    assert audit(result.events).exact
    ends = notes(logs)
    assert set(ends) >= set(range(workers)) - set(result.lost)  # one may be lost after its note
    assert all(end == next(iter(ends.values())) for end in ends.values()), ends
    for whole in (False, True):
        difference = compare(directory / "run", whole=whole)
        assert difference.relative <= 1e-9, (whole, workers, kills, difference)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_program(tmp_path, seed):
    check(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 300))
def test_more_random_programs(tmp_path, seed):
    check(tmp_path, seed)
