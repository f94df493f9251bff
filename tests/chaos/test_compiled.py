"""torch.compile and slices: nobody compiles anything again because somebody died or joined."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.exact import compiled
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from tests.run_bytes import final
from tests.trainables import make


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("model", compiled.MODELS)
def test_nothing_is_compiled_again_over_ten_losses_and_joins(model, backend, exact):
    check(compiled.measure(model, 10, backend, exact=exact), 10)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_compiled_again_over_a_loss_and_a_join():
    check(compiled.measure("convnet", 1, "aot_eager"), 1)


def check(found, deaths):
    assert (found["losses"], found["joins"], found["workers"]) == (deaths, deaths, 3 + deaths)
    assert found["never_compiled"] == 0
    assert found["recompilations"] == 0


def train(ctx):
    model, optimizer, dataset = make({"model": "mlp", "samples": 120})
    if ctx.config["compile"] == "whole":
        model = torch.compile(model, backend="eager")
    if ctx.config["compile"] == "part":
        model[1] = torch.compile(model[1], backend="eager")
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(dataset, batch_size=20, slices=4).epochs(1):
        for step in epoch:
            optimizer.zero_grad()
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("what", ["whole", "part"])
def test_a_model_that_is_compiled_before_it_is_prepared_is_stored_as_the_plain_one(tmp_path, what):
    """By those who have seen a worker lost, and one that has joined."""

    def stored(compiles):
        run = run_local(
            with_kills(train, [Kill(worker=1, phase="bucket", after=2)] if compiles else []),
            2,
            config={"compile": compiles},
            directory=tmp_path / (compiles or "plain"),
            replace=True,
            min_workers=2,
            exact=True,
        )
        assert list(run.lost) == [1] * bool(compiles)
        digest, tensors = final(run)
        return digest, sorted(tensors)

    assert stored(compiles=what) == stored(compiles="")
