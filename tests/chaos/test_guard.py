"""FailureConfig(guard=...): a bad gradient counts on no worker, and its batch is left out."""

import math
import os
import random
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

import pytest
import torch
import torch.nn.functional as F

from benchmarks.exact import guards
from benchmarks.exact.counting import counted
from elastix.config import CheckpointConfig, Guard
from elastix.data.audit import audit
from elastix.data.cursor import count
from elastix.errors import QuorumLost, TrainingUnstable
from elastix.events import (
    Resumed,
    SamplesLeftOut,
    StateStored,
    StepCommitted,
    StepVoided,
    WorkerLost,
)
from elastix.observe import journal
from elastix.state import capture
from elastix.store import Store
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.local import run_local
from tests.laws import assert_replicas_identical
from tests.trainables import digest, make, newest_group, note

CONFIG = {"samples": 450, "batch_size": 30}  # 15 steps an epoch, and two epochs


@dataclass(frozen=True)
class Poisoned:
    """A loop in which gradients of some batches are what nobody wants.

    Attributes:
        faults: number of a batch, counted from 0 as they are drawn, to what befalls it.
        worker: on which worker; None: on all.
    """

    faults: tuple[tuple[int, str], ...]
    worker: int | None = None

    def __call__(self, ctx):
        model, optimizer, dataset = make(CONFIG)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
        log = Path(ctx.config["log"]) / f"{ctx.worker}.jsonl"
        faults, number = dict(self.faults), 0
        for epoch in ctx.loader(dataset, batch_size=30).epochs(2):
            for x, y in epoch:
                fault = faults.get(number) if self.worker in (None, ctx.worker) else None
                number += 1
                loss = F.cross_entropy(model(x), y)
                if fault == "loss":
                    ctx.report(loss=math.inf)
                elif fault is not None:
                    loss = loss * float(fault)
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                others = {"optimizer": optimizer, "scheduler": scheduler}
                note(log, ctx.step, digest(capture({"": model}, others)))


def guarded(directory, train, guard=None, workers=3, **options):
    logs = directory / "logs"
    logs.mkdir(parents=True)
    return run_local(
        train,
        workers,
        directory=directory / "run",
        config={"log": str(logs)},
        guard=guard or Guard(warmup=8),
        **options,
    )


def voided(run):
    return [(e.step, e.why) for e in run.events if isinstance(e, StepVoided)]


def check(directory, run, number, lost=()):
    """So many steps are missing, and nothing else is."""
    account = audit(run.events)
    assert account.exact
    (loader,) = account.loaders
    assert count(loader.left_out) == 30 * number
    assert account.steps == 30 - number
    assert account.replicas.equal
    assert_replicas_identical(directory / "logs", set(lost), run.events)


@pytest.mark.fast("nan-not finite-0", "nan-not finite-None", "inf-not finite-2", "1e3-usually-None")
@pytest.mark.parametrize("worker", [0, 2, None])
@pytest.mark.parametrize(
    ("fault", "why"), [("nan", "not finite"), ("inf", "not finite"), ("1e3", "usually")]
)
def test_a_bad_gradient_counts_on_nobody(tmp_path, worker, fault, why):
    run = guarded(tmp_path, Poisoned(((18, fault),), worker))
    ((step, said),) = voided(run)
    assert step == 19
    assert why in said
    check(tmp_path, run, 1)


def test_the_run_is_that_of_one_without_the_batch(tmp_path):
    """Weights, moments, statistics of batch norm, learning rates: as if it had never been."""
    run = guarded(tmp_path / "bad", Poisoned(((3, "nan"), (22, "1e4"))))
    assert len(voided(run)) == 2
    spans = [span for e in run.events if isinstance(e, SamplesLeftOut) for span in e.spans]
    assert spans == [(90, 120), (660, 690)]
    with Store(tmp_path / "bad" / "run" / "store", read_only=True) as store:
        state = store.get(store.tags()["local/final"])
    assert all(bool(t.isfinite().all()) for t in state.tensors.values() if t.is_floating_point())
    without = guarded(tmp_path / "good", Without((3, 22)))
    assert not voided(without)
    with Store(tmp_path / "good" / "run" / "store", read_only=True) as store:
        other = store.get(store.tags()["local/final"])
    assert digest(model_of(state)) == digest(model_of(other))


def model_of(state):
    names = [n for n in state.tensors if not n.startswith("@") or n.startswith("@optimizer")]
    return type(state)({name: state.tensors[name] for name in names})


@dataclass(frozen=True)
class Without:
    """The same loop, in which these batches are taken and not learnt from."""

    numbers: tuple[int, ...]

    def __call__(self, ctx):
        model, optimizer, dataset = make(CONFIG)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
        number = 0
        for epoch in ctx.loader(dataset, batch_size=30).epochs(2):
            for x, y in epoch:
                number += 1
                if number - 1 in self.numbers:
                    with ctx.accumulate():
                        pass
                    continue
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def test_a_reported_loss_is_judged_in_the_step_in_hand(tmp_path):
    run = guarded(tmp_path, Poisoned(((5, "loss"),), worker=1), Guard(metric="loss"))
    assert voided(run) == [(6, "the reported loss is not finite")]
    check(tmp_path, run, 1)


def test_too_many_end_the_run(tmp_path):
    bad = Poisoned(tuple((number, "nan") for number in range(10, 20)))
    with pytest.raises(TrainingUnstable, match=r"voided 4 of the last 4 steps, and .* is 3"):
        guarded(tmp_path, bad, Guard(most=3), checkpoint=CheckpointConfig(every_steps=4))
    events = list(journal.read(tmp_path / "run" / "journal.jsonl"))
    assert [e.step for e in events if isinstance(e, StepVoided)] == [11] * 4
    assert [e.step for e in events if isinstance(e, StepCommitted)] == list(range(1, 11))


@pytest.mark.fast("round")
@pytest.mark.parametrize("phase", ["bucket", "round", "left"])
def test_a_worker_may_die_in_a_step_that_is_void(tmp_path, phase):
    """Whoever is left comes to the same verdict, or to that of a gradient without its fault."""
    doomed = with_kills(Poisoned(((18, "nan"),)), [Kill(worker=1, phase=phase, step=18)])
    run = guarded(tmp_path, doomed)
    assert [e.worker for e in run.events if isinstance(e, WorkerLost)] == [1]
    assert [step for step, _ in voided(run)] == [19]
    account = audit(run.events)
    assert account.exact
    assert account.replicas.equal
    assert_replicas_identical(tmp_path / "logs", {1}, run.events)


@dataclass(frozen=True)
class LostBetweenEpochs:
    """A loop whose worker 1 dies between two epochs; the others wait there for a group without."""

    def __call__(self, ctx):
        visits = []

        def look(phase, detail):
            if phase == "boundary" and detail == 15:
                visits.append(detail)
                if len(visits) == 2 and ctx.worker == 1:
                    os.kill(os.getpid(), SIGKILL)
                if len(visits) == 2:
                    ctx._member._inbox.wait(lambda: 1 not in newest_group(ctx._member))

        ctx.on_phase(look)
        Poisoned(())(ctx)


@pytest.mark.parametrize(
    ("train", "step"),
    [
        (with_kills(Poisoned(((5, "nan"),)), [Kill(worker=1, phase="round", step=5)]), 5),
        (LostBetweenEpochs(), 15),
    ],
    ids=["after a void step", "between epochs"],
)
def test_too_few_store_their_state_where_one_of_that_step_was_stored_before(tmp_path, train, step):
    """What loaders hold is another by now, and is compared with what they hold now."""
    every = CheckpointConfig(every_steps=5)
    with pytest.raises(QuorumLost, match="They stored their State"):
        guarded(tmp_path, train, min_workers=3, checkpoint=every)
    events = list(journal.read(tmp_path / "run" / "journal.jsonl"))
    stored = [(e.step, e.reason) for e in events if isinstance(e, StateStored)]
    assert stored[-2:] == [(step, "every_steps"), (step, "quorum lost")]
    config = {"log": str(tmp_path / "logs")}
    run_local(Poisoned(()), 1, directory=tmp_path / "run", config=config, guard=Guard(warmup=8))
    events = list(journal.read(tmp_path / "run" / "journal.jsonl"))
    assert [e.step for e in events if isinstance(e, Resumed)] == [step]
    assert audit(events).exact


def test_what_was_left_out_stays_out_when_the_run_goes_on(tmp_path):
    """From a State of before the batch, and from none."""
    bad = Poisoned(((7, "nan"), (18, "nan")))
    for every in (None, 12):
        directory = tmp_path / str(every)
        stopped = with_kills(bad, [Kill(worker=0, phase="batch", step=23)])
        with pytest.raises(Exception, match="no worker is left"):
            guarded(directory, stopped, workers=1, checkpoint=CheckpointConfig(every_steps=every))
        run_local(
            Poisoned(()),
            1,
            directory=directory / "run",
            config={"log": str(directory / "logs")},
            guard=Guard(),
        )
        account = audit(journal.read(directory / "run" / "journal.jsonl"))
        assert account.exact, str(account)
        assert account.loaders[0].left_out == ((210, 240), (540, 570))


def test_what_was_left_out_stays_out_when_all_go_back(tmp_path):
    """To a State of before the batch, since two workers held different ones after it."""
    flips = [Flip(worker=1, tensor="head.weight", step=9)]
    run = guarded(
        tmp_path,
        with_kills(Poisoned(((6, "nan"),)), flips),
        workers=2,
        replace=True,
        checkpoint=CheckpointConfig(every_steps=4),
    )
    assert [e.step for e in run.events if isinstance(e, Resumed)] == [8]
    assert audit(run.events).exact
    again = guarded(
        tmp_path / "earlier",
        with_kills(Poisoned(((6, "nan"),)), [Flip(worker=1, tensor="head.weight", step=7)]),
        workers=2,
        replace=True,
        checkpoint=CheckpointConfig(every_steps=4),
    )
    assert [e.step for e in again.events if isinstance(e, Resumed)] == [4]
    account = audit(again.events)
    assert account.exact, str(account)
    assert account.loaders[0].left_out[0] == (180, 210)


def check_counts(counts):
    assert counts["found"] == counts["faults"]
    assert counts["false_alarms"] == counts["corrupt_states"] == 0
    assert counts["byte_equal"] == counts["exact"] == counts["runs"]
    assert counts["states"] > counts["faults"]


def test_faults_of_slices_void_their_steps_on_any_number_of_workers():
    """Of an exact run, all of whose stored States are looked at (law 4 of the design)."""
    check_counts(guards.case(0, 3))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_faults_of_slices():
    check_counts(counted(guards.case, 200, guards.EACH))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_more_faults(tmp_path, seed):
    chance = random.Random(seed)
    number = chance.randrange(9, 29)
    fault = chance.choice(["nan", "inf", "1e3", "-inf"])
    run = guarded(tmp_path, Poisoned(((number, fault),), chance.choice([0, 1, 2, None])))
    assert [step for step, _ in voided(run)] == [number + 1]
    check(tmp_path, run, 1)
