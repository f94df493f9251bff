"""Workers that do not make the same calls, and operations that never succeed: no hang, no end."""

import signal
import threading
from dataclasses import dataclass

import pytest
import torch.nn.functional as F

from elastix.comm.network import shared_memory
from elastix.config import CheckpointConfig
from elastix.data.audit import audit
from elastix.errors import TrainError, WorkerFailed
from elastix.events import Resumed, StepCommitted
from elastix.observe import journal
from elastix.testing.local import run_local
from elastix.train.control import reachability
from tests.trainables import make

CONFIG = {"model": "wide", "samples": 60, "batch_size": 30}  # one bucket in shared memory


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Strays:
    """Two steps, in the second of which worker 0 does something else."""

    how: str

    def __call__(self, ctx):
        model, optimizer, dataset = make(CONFIG)
        model, optimizer = ctx.prepare(model, optimizer)
        for epoch in ctx.loader(dataset, batch_size=30).epochs(1):
            for batch in epoch:
                if ctx.worker == 0 and ctx.step == 1:
                    if self.how == "skips":
                        continue
                    if self.how == "returns":
                        return
                    ctx.evaluate(loss, dataset, batch_size=30)
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()


CALLS = {
    "skips": "worker 0 at the end of the train function",
    "returns": "worker 0 at the end of the train function",
    "evaluates": "worker 0 in ctx.evaluate",
}


@pytest.mark.parametrize(
    ("how", "workers", "through"),
    [
        ("skips", 2, "memory"),
        ("skips", 2, "sockets"),
        ("skips", 3, "memory"),
        ("skips", 3, "sockets"),
        ("returns", 2, "sockets"),
        ("evaluates", 3, "memory"),
    ],
)
def test_one_that_is_in_another_call_ends_the_run(tmp_path, how, workers, through):
    with pytest.raises(TrainError, match=r"worker(s 1 and)? \d in a backward pass") as raised:
        run_local(Strays(how), workers, directory=tmp_path, shared=through == "memory")
    assert CALLS[how] in str(raised.value)


def evaluate_other_data(ctx):
    model, _, dataset = make(CONFIG)
    ctx.prepare(model)
    mine = [dataset[i] for i in range(20 + ctx.worker)]
    ctx.evaluate(loss, mine, batch_size=30)


def evaluate_by_rank(ctx):
    model, _, dataset = make(CONFIG)
    ctx.prepare(model)
    ctx.evaluate(
        lambda model, batch: {f"of worker {ctx.worker}": loss(model, batch)},
        dataset,
        batch_size=30,
    )


def evaluate_more(ctx):
    model, _, dataset = make(CONFIG)
    ctx.prepare(model)
    names = [f"m{n}" for n in range(1 + 50 * ctx.worker)]
    ctx.evaluate(lambda m, batch: dict.fromkeys(names, 0.0), dataset, batch_size=30)


@pytest.mark.parametrize("train", [evaluate_other_data, evaluate_by_rank, evaluate_more])
def test_parts_of_different_evaluations_are_not_added_up(tmp_path, train):
    with pytest.raises(TrainError, match=r"called ctx\.evaluate with a dataset of another length"):
        run_local(train, 2, directory=tmp_path)


def out_of_files(ctx):
    """Rooms of the other worker can never be mapped, though its board was."""

    def fail(*_):
        raise OSError(24, "Too many open files")

    shared_memory.Exchange._map = fail
    Strays("steps")(ctx)


def test_an_operation_that_always_fails_ends_the_run_with_its_error(tmp_path, monkeypatch):
    """After five groups, however long that has taken: a short timeout could cost a worker."""
    monkeypatch.setattr(reachability, "_TIMEOUTS_IN_VAIN", 0)
    with pytest.raises(TrainError, match=r"though no worker was lost.*Too many open files"):
        run_local(out_of_files, 2, directory=tmp_path)


@dataclass(frozen=True)
class EndsWithAnError:
    """Worker 1 raises after the step; worker 0, which tells the journal, has not told of it."""

    def __call__(self, ctx):
        model, optimizer, dataset = make(CONFIG)
        model, optimizer = ctx.prepare(model, optimizer)
        again = ctx.config["again"]

        def held_up(phase, _):
            if phase == "left" and ctx.worker == 0 and ctx.step == 2 and not again:
                signal.pause()  # until it is ended with the run

        ctx.on_phase(held_up)
        for epoch in ctx.loader(dataset, batch_size=10).epochs(1):
            for batch in epoch:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
                if ctx.worker == 1 and ctx.step == 3 and not again:
                    raise ValueError("the labels are missing")


def test_steps_that_count_are_told_though_the_run_ends_with_an_error(tmp_path):
    def run(again):
        directory = tmp_path / "run"
        checkpoint = CheckpointConfig(every_steps=1, wait=True)
        run_local(
            EndsWithAnError(),
            2,
            config={"again": again},
            directory=directory,
            checkpoint=checkpoint,
        )

    with pytest.raises(WorkerFailed, match="the labels are missing"):
        run(False)
    told = list(journal.read(tmp_path / "run" / "journal.jsonl"))
    assert [event.step for event in told if isinstance(event, StepCommitted)] == [1, 2, 3]
    run(True)
    again = list(journal.read(tmp_path / "run" / "journal.jsonl"))
    assert [event.step for event in again if isinstance(event, Resumed)] == [2]
    assert audit(again).exact


def endless(ctx):
    del ctx
    threading.Event().wait()


def test_a_run_that_its_time_limit_ends_has_failed(tmp_path):
    with pytest.raises(TrainError, match=r"not over after 0\.2 s"):
        run_local(endless, 1, directory=tmp_path, timeout_s=0.2)
    ending = list(journal.read(tmp_path / "journal.jsonl"))[-1]
    assert (ending.outcome, ending.message) == ("failed", "the local run was not over after 0.2 s.")
