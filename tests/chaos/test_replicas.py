"""No run ends well whose replicas differ: flipped bits are found, and the audit says what was."""

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from elastix.config import CheckpointConfig
from elastix.data.audit import audit
from elastix.errors import ReplicasDiffer
from elastix.events import ReplicasCompared, StateStored, StepCommitted
from elastix.observe import journal
from elastix.store import Store
from elastix.testing.chaos import Flip, Kill, with_kills
from elastix.testing.local import run_local
from tests.laws import joins
from tests.trainables import make, train

EVERY = CheckpointConfig(every_steps=4)
CONFIG = {"samples": 150, "batch_size": 30, "epochs": 2}  # 10 steps


def compared(events) -> list[ReplicasCompared]:
    return [event for event in events if isinstance(event, ReplicasCompared)]


def stored(directory: Path) -> set[int]:
    """Steps of the States that are in the store."""
    with Store(directory / "store", read_only=True) as store:
        return {int(tag.removeprefix("local/step-")) for tag in store.tags() if "/step-" in tag}


@pytest.mark.parametrize(
    ("tensor", "part", "step", "found_at"),
    [
        ("head.weight", "model", 5, 8),
        ("@optimizer/state/conv1.weight/exp_avg_sq", "optimizer", 5, 8),
        ("norm1.running_var", "model", 8, 8),  # before the snapshot; a step would average it
        ("head.bias", "model", 9, 10),  # at the end
    ],
)
def test_a_flipped_bit_ends_the_run_and_names_the_worker(tmp_path, tensor, part, step, found_at):
    flipped = with_kills(train, [Flip(worker=1, tensor=tensor, step=step, bit=3)])
    with pytest.raises(ReplicasDiffer) as raised:
        run_local(flipped, 3, config=CONFIG, directory=tmp_path, checkpoint=EVERY, sentinel=False)
    before = 8 if found_at == 10 else 4
    assert f"after step {found_at} worker 1 holds another State than workers 0 and 2" in str(
        raised.value
    )
    assert part in str(raised.value).split("what differs: ")[1].split(".")[0]
    assert f"equal when last compared, after step {before}" in str(raised.value)
    events = list(journal.read(tmp_path / "journal.jsonl"))
    assert [(e.step, e.apart) for e in compared(events) if not e.equal] == [(found_at, (1,))]
    assert max(e.step for e in events if isinstance(e, StateStored)) == before
    assert max(stored(tmp_path)) == before
    assert "NOT EQUAL: after step" in str(audit(events))


def test_of_two_workers_both_are_named(tmp_path):
    flipped = with_kills(train, [Flip(worker=1, tensor="head.weight", step=6)])
    with pytest.raises(ReplicasDiffer, match="workers 0 and 1 hold different States"):
        run_local(flipped, 2, config=CONFIG, directory=tmp_path)


def test_a_run_that_was_stopped_goes_on_from_the_last_equal_state(tmp_path):
    """What was wrong is not in what it goes on from, and the audit covers what stands."""
    flipped = with_kills(train, [Flip(worker=1, tensor="head.weight", step=5)])
    with pytest.raises(ReplicasDiffer):
        run_local(flipped, 3, config=CONFIG, directory=tmp_path, checkpoint=EVERY, sentinel=False)
    run_local(train, 3, config=CONFIG, directory=tmp_path, checkpoint=EVERY, sentinel=False)
    account = audit(journal.read(tmp_path / "journal.jsonl"))
    assert account.exact
    assert account.replicas.equal
    assert account.replicas.last.step == account.steps == 10


def test_a_quiet_run_is_compared_at_each_checkpoint_and_at_its_end(tmp_path):
    run = run_local(train, 3, config=CONFIG, directory=tmp_path, checkpoint=EVERY, sentinel=False)
    assert [(e.step, e.workers) for e in compared(run.events)] == [
        (step, (0, 1, 2)) for step in (4, 8, 10)
    ]
    assert "replicas equal: compared 3 times, last after step 10 by 3 workers" in str(
        audit(run.events)
    )


@pytest.mark.parametrize("phase", ["bucket", "round", "snapshot"])
def test_survivors_are_compared_at_the_end(tmp_path, phase):
    """Without a checkpoint on the way, too. Killed in a step, in its round, at the very end."""
    killed = with_kills(train, [Kill(worker=1, phase=phase, step=4)])
    run = run_local(killed, 3, config=CONFIG, directory=tmp_path)
    (final,) = compared(run.events)
    assert (final.step, final.occasion) == (10 if phase == "snapshot" else final.step, "final")
    assert {0, 2} <= set(final.workers)
    account = audit(run.events)
    assert final.step == account.steps
    assert account.replicas.equal


def test_a_joiner_is_compared_with_the_others_soon_after_it_came(tmp_path):
    """With no checkpoint in the run, and none stored for it."""
    meeting = {"meeting": str(tmp_path), "ushers": {"2": 3}}
    config = {**CONFIG, **meeting, "epochs": 8}
    run = run_local(train, 2, config=config, directory=tmp_path / "run", spares=1, max_workers=3)
    (join,) = joins(run.events)
    found = [event for event in compared(run.events) if event.occasion == "join"]
    assert [event.workers for event in found] == [(0, 1, 2)]
    assert join.step < found[0].step <= join.step + 2
    assert stored(tmp_path / "run") == {audit(run.events).steps}


def test_one_worker_has_nothing_to_compare(tmp_path):
    run = run_local(train, 1, config=CONFIG, directory=tmp_path)
    assert compared(run.events) == []
    assert "replicas not compared: there was one worker" in str(audit(run.events))


def test_whoever_is_left_alone_says_so(tmp_path):
    killed = with_kills(train, [Kill(worker=1, phase="round", step=6)])
    run = run_local(killed, 2, config=CONFIG, directory=tmp_path, checkpoint=EVERY, sentinel=False)
    text = str(audit(run.events).replicas)
    assert text.startswith("equal: compared once after step 4 by 2 workers")
    assert "one worker was left" in text


@dataclass(frozen=True)
class Skips:
    """`train`'s loop in small, in which one worker leaves out a batch of its own accord."""

    worker: int
    batch: int
    caught: bool = False

    def __call__(self, ctx):
        model, optimizer, dataset = make(CONFIG)
        model, optimizer = ctx.prepare(model, optimizer)
        number = 0
        for epoch in ctx.loader(dataset, batch_size=30).epochs(2):
            for x, y in epoch:
                number += 1
                if ctx.worker == self.worker and number == self.batch:
                    continue  # "the loss is not finite"
                optimizer.zero_grad()
                with suppress(Exception) if self.caught else nullcontext():
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught in the loop"])
@pytest.mark.parametrize("batch", [3, 5], ids=["in an epoch", "its last one"])
def test_a_worker_that_skips_a_batch_is_known_in_that_very_step(tmp_path, batch, caught):
    with pytest.raises(ReplicasDiffer) as raised:
        run_local(Skips(1, batch, caught), 3, directory=tmp_path, config=CONFIG)
    text = str(raised.value)
    assert f"did not draw the same batches for step {batch}: worker 1 drew 2 batches" in text
    assert "workers 0 and 2 drew 1 batch" in text
    assert audit(journal.read(tmp_path / "journal.jsonl")).steps == batch - 1


def skips_or_uses_together(ctx):
    """All workers leave out the second batch, then use two together, then add up two passes."""
    model, optimizer, dataset = make(CONFIG)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(dataset, batch_size=15).epochs(1):
        batches = iter(epoch)
        next(batches)
        x, y = next(batches)
        F.cross_entropy(model(x), y).backward()
        optimizer.zero_grad()
        (x, y), (u, v) = next(batches), next(batches)
        F.cross_entropy(model(torch.cat([x, u])), torch.cat([y, v])).backward()
        optimizer.zero_grad()
        with ctx.accumulate():
            x, y = next(batches)
            F.cross_entropy(model(x), y).backward()
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.zero_grad()


def test_batches_that_all_skip_are_told_of(tmp_path):
    """Plain workers and one that dies: what it had is drawn again, skipped or not."""
    killed = with_kills(skips_or_uses_together, [Kill(worker=1, phase="bucket", step=2)])
    run = run_local(killed, 3, directory=tmp_path, config=CONFIG)
    account = audit(run.events)
    assert account.exact
    assert account.loaders[0].passed_over == 30
    first, second, third = [e.batches for e in run.events if isinstance(e, StepCommitted)][:3]
    assert [batch.passed for batch in (*first, *second, *third)] == [False, True] * 2 + [True] * 2


def test_the_one_that_skipped_may_die_before_it_can_say_so(tmp_path):
    """Or it dies before the round, and nobody ever heard of what it had drawn."""
    killed = with_kills(Skips(1, 3), [Kill(worker=1, phase="left", step=2, after=0)])
    with pytest.raises(ReplicasDiffer, match=r"one that has been lost since|worker 1 drew 2"):
        run_local(killed, 3, directory=tmp_path, config=CONFIG)
