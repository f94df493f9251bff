"""One process of a run on Ray, without Ray: what it goes by that controllers have told it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch

from elastix.config import CheckpointConfig
from elastix.train.control.messages import Outcome, OutcomeKind
from elastix.train.on_ray import worker
from elastix.train.replica.link import Life, Settings

SETTINGS = Settings(directory=Path(), run="r", seed=0, min_workers=1, checkpoint=CheckpointConfig())
BEFORE, SINCE = {0: ((0, 4),)}, {0: ((0, 8),)}


@pytest.fixture
def process(monkeypatch):
    """That of worker 3; what each life of it goes by is in `began`."""
    monkeypatch.setattr(worker, "on_notice", lambda leave: None)
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(worker.ray, "get_runtime_context", lambda: context)
    job = SimpleNamespace(address=("host", 1), crew=False)
    made = worker.Worker(3, None, job, None)
    made.began = []

    def train(life, mine):
        made.began.append(life.settings.left_out)
        return Outcome(kind=OutcomeKind.FINISHED)

    monkeypatch.setattr(made, "_train", train)
    return made


def life(left_out):
    return Life(3, 0, replace(SETTINGS, left_out=left_out))


def test_who_has_begun_says_what_it_was_told(process):
    process.run(life(BEFORE))
    assert process.began == [BEFORE]
    assert process.adopt(("host", 2), SINCE).left_out == BEFORE


def test_a_call_of_the_controller_before_that_comes_late_goes_by_what_the_next_one_says(process):
    assert process.adopt(("host", 2), SINCE).left_out == SINCE
    process.run(life(BEFORE))
    assert process.began == [SINCE]
    assert process.adopt(("host", 3), {}).left_out == SINCE


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: unknown error"), OutcomeKind.DEVICE_FAILED),
        (RuntimeError("something else"), OutcomeKind.RAISED),
    ],
)
def test_a_gpu_that_fails_before_the_train_function_begins_costs_its_worker_alone(
    error, kind, process, monkeypatch
):
    """It was taken for an error of the function, which ends the run of all others."""

    def train(life, mine):
        raise error

    monkeypatch.setattr(process, "_train", train)
    process.run(life(BEFORE))
    outcome = process._lives[3].outcome
    assert outcome.kind is kind
    assert repr(error) == outcome.summary
    assert "raise error" in outcome.traceback


def test_what_a_train_function_does_to_its_config_is_forgotten_in_the_next_life(process):
    """A process of a crew lives on when its worker is lost without it, and calls it once more."""

    def train(ctx):
        ctx.config["lr"] /= 10
        ctx.config["widths"].pop()

    process.job.train = ray.cloudpickle.dumps(train)
    process.job.config = {"lr": 1.0, "widths": [4, 8]}
    for _ in range(2):
        called, config = process._program()
        assert config == {"lr": 1.0, "widths": [4, 8]}
        called(SimpleNamespace(config=config))
