"""Evaluations by crews: what is evaluated, and what must hold of the means that all places got."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from tests.crew_runs import data, kill, replayed_to, standing

SAMPLES, BATCH = 23, 5
"""Divided by no number of workers, places or batches."""

ONE_SIDED = {
    "a follower before it is told to evaluate": kill(1, 1, "held", detail=2),
    "a speaker that waits for its crew": kill(1, 0, "crew", detail=2),
    "a follower that is through": kill(1, 1, "round", detail=2),
    "a speaker in the round": kill(1, 0, "round", detail=2),
    "a speaker out of the round": kill(1, 0, "left", detail=2),
}
"""Places in the protocol of an evaluation."""

SEVERAL = [
    kill(1, 1, "in evaluation"),
    kill(2, 0, "meet", detail=2),
    kill(3, 1, "in evaluation", after=1),  # when it evaluates again
]
"""In one evaluation and in the recovery from that."""


def validation():
    """Inputs, targets, and which sample it is."""
    x, y = data(SAMPLES).tensors
    return TensorDataset(x, y, torch.arange(SAMPLES))


def loss_and_samples(model, batch):
    """The loss, and of each sample how often it is there, as means over the batch."""
    return means(model(batch[0]), batch)


def means(outputs, batch):
    """The same of what a model has made of the batch."""
    _, y, numbers = batch
    seen = F.one_hot(numbers, SAMPLES).double().mean(0).tolist()
    return {"loss": F.cross_entropy(outputs, y), **{f"s{n}": v for n, v in enumerate(seen)}}


def evaluate(ctx, log, model, look, metric=loss_and_samples, at=2, **cut):
    """`look` is told of that batch, from 1; the means go to a file of this place."""
    calls = 0

    def watched(model, batch):
        nonlocal calls
        calls += 1
        if calls == at:
            look("in evaluation")
        return metric(model, batch)

    found = ctx.evaluate(watched, validation(), **{"batch_size": BATCH, **cut})
    assert model.training
    with (log / f"{ctx.worker}-{ctx.place}.evaluated").open("a") as file:
        file.write(json.dumps([ctx.step, found]) + "\n")


def told(tmp_path):
    """By step, the means, which are the same bits at all places."""
    by_step = {}
    for path in (tmp_path / "log").glob("*.evaluated"):
        for line in path.read_text().splitlines():
            step, found = json.loads(line)
            assert by_step.setdefault(step, found) == found, (path, step)
    return by_step


def assert_evaluated(tmp_path, found, times):
    """After each epoch: the same bits at all places, every sample once, as one process has it."""
    by_step = told(tmp_path)
    assert len(by_step) == times
    for step, found_then in by_step.items():
        for number in range(SAMPLES):
            assert found_then[f"s{number}"] == pytest.approx(1 / SAMPLES, rel=1e-12), (step, number)
        steps = standing(found.run.events)[:step]
        model = replayed_to({"samples": 36}, steps)
        x, y, _ = validation().tensors
        assert found_then["loss"] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-9)
