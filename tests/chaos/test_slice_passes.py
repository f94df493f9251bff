"""Workers that run backward another number of times for each slice are told apart."""

import pytest
import torch.nn.functional as F

from elastix.errors import ReplicasDiffer
from elastix.testing.local import run_local
from tests.trainables import make


def more_on_one(ctx):
    model, optimizer, dataset = make({"model": "mlp", "samples": 64})
    ctx.prepare(model, optimizer)
    for epoch in ctx.loader(dataset, batch_size=32, slices=8).epochs(1):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
                if ctx.rank == 1:
                    model(x).pow(2).mean().backward()


@pytest.mark.parametrize("exact", [True, False])
def test_who_has_a_slice_does_not_decide_how_often_it_counts(tmp_path, exact):
    said = "worker 1 drew 1 batch .*, with 2 backward passes for each slice"
    with pytest.raises(ReplicasDiffer, match=said):
        run_local(more_on_one, 3, directory=tmp_path, exact=exact)
