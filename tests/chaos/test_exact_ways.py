"""Each way to use torch has the same bytes under exact=True whoever computes, or is refused."""

import pytest
import torch

from elastix.errors import ConfigError, TrainError
from elastix.events import ReplicasDiverged, StepCommitted
from elastix.observe import journal
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.chaos.test_exact import final
from tests.exact_ways import REFUSED, SELDOM, WORK, Way, forgotten_critic

WAYS = [pytest.param(name, marks=[pytest.mark.slow] if name in SELDOM else []) for name in WORK]


@pytest.mark.timeout(300)
@pytest.mark.fast(
    "autocast",
    "checkpointing_reentrant",
    "two_optimizers",
    "several_passes",
    "unused_parameters",
    "tied_weights",
    "sparse_embeddings",
    "gradients_kept",
    "noise_before_slices",
    "buffers_changed_between_steps",
    "averaged_weights",
    "schedule_free",
)
@pytest.mark.parametrize("name", WAYS)
def test_the_bytes_are_those_of_a_quiet_run_of_one_worker(tmp_path, name):
    found = []  # in each step a slice is computed by two, or by the only one twice
    for workers, kills in ((1, []), (3, [Kill(worker=1, phase="bucket", step=3)])):
        directory, train = tmp_path / str(workers), with_kills(Way(name), kills)
        options = {"exact": True, "recompute_every": 1, "timeout_s": 250}
        result = run_local(train, workers, directory=directory, **options)
        assert not [e for e in result.events if isinstance(e, ReplicasDiverged)]
        assert set(result.lost) == {kill.worker for kill in kills}
        found.append(final(result))
    (digest, tensors), (other_digest, other) = found
    assert not [name for name in tensors if not torch.equal(other[name], tensors[name])]
    assert other_digest == digest


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_exact_is_refused(tmp_path, way):
    with pytest.raises(ConfigError) as raised:
        run_local(Way(way.__name__), 2, directory=tmp_path, exact=True)
    assert REFUSED[way] in str(raised.value)
    steps = [e for e in journal.read(tmp_path / "journal.jsonl") if isinstance(e, StepCommitted)]
    later = way is forgotten_critic  # what it is shows in the step after its first
    assert len(steps) <= 1 + later


@pytest.mark.parametrize("way", ["passing_buffers", "warmed_up", "schedule_free"])
def test_who_comes_later_ends_with_the_same_bytes(tmp_path, way):
    found = []  # the others wait for who comes in place of the lost one
    for kills in ([], [Kill(worker=1, phase="bucket", step=2)]):
        directory, train = tmp_path / str(len(kills)), with_kills(Way(way), kills)
        options = {"exact": True, "min_workers": 2, "replace": True}
        found.append(run_local(train, 2, directory=directory, **options))
    assert found[1].lost
    (digest, tensors), (other_digest, others) = map(final, found)
    assert not [name for name in tensors if not torch.equal(others[name], tensors[name])]
    assert other_digest == digest


NOISE = ["noise_before_slices", "noise_past_the_counters"]


@pytest.mark.fast("moved_after_steps-3", "noise_before_slices-0", "noise_past_the_counters-3")
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("way", ["moved_after_steps", *NOISE])
def test_a_step_that_is_done_again_moves_nothing_twice(tmp_path, way, step):
    found = []
    for kills in ([], [Kill(worker=1, phase="bucket", step=step)]):
        directory, train = tmp_path / str(len(kills)), with_kills(Way(way), kills)
        found.append(run_local(train, 3, directory=directory, exact=True, recovery="rollback"))
    assert found[1].lost
    (digest, tensors), (other_digest, others) = map(final, found)
    assert not [name for name in tensors if not torch.equal(others[name], tensors[name])]
    assert other_digest == digest


def decays_late(ctx):
    """No step before has shown that this loop changes parameters."""
    model = torch.nn.Linear(4, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.utils.data.TensorDataset(torch.ones(48, 4))
    for epoch in ctx.loader(rows, batch_size=8, slices=4).epochs(1):
        for step in epoch:
            if ctx.step == 3:
                model.weight.data.mul_(0.9)
            for (x,) in step:
                model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_what_no_step_before_has_done_ends_the_run_if_it_would_be_done_twice(tmp_path):
    train = with_kills(decays_late, [Kill(worker=1, phase="bucket", step=3)])
    with pytest.raises(TrainError, match="step 4, which has to be done again"):
        run_local(train, 3, directory=tmp_path, exact=True, recovery="rollback")
