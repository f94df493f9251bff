"""A bit flips in one process of a crew, in the part of the State that it holds.

Workers that are crews are compared at checkpoints: there the run ends, nothing of it is stored, and
`fit` once more leaves the bytes of the quiet run.
"""

import functools

import pytest

from elastix.config import CheckpointConfig
from elastix.data.audit import audit
from elastix.errors import ReplicasDiffer
from elastix.events import ReplicasDiverged, Resumed
from elastix.observe import journal
from elastix.testing.chaos import Flip, flip
from elastix.train.replica.sliced_step import Slices
from tests.chaos.test_crew_slices import exact, quiet
from tests.crew_runs import train
from tests.run_bytes import final

pytestmark = pytest.mark.timeout(240)


def parts_at(place: int, tensor: str, ctx) -> None:
    """After the first epoch a bit flips at this place of worker 1."""
    Slices.measured = lambda *_: None

    def after_epoch(_model, _look):
        if (ctx.worker, ctx.place, ctx.step) == (1, place, 5):
            flip(Flip(worker=1, tensor=tensor, byte=6, bit=4), ctx)

    train(ctx, after_epoch)


@pytest.mark.parametrize(
    ("place", "tensor"),
    [
        (1, "@optimizer/state/blocks.1.up.weight/exp_avg"),
        pytest.param(0, "blocks.0.down.weight", marks=pytest.mark.slow),
    ],
)
def test_it_ends_the_run_and_the_next_one_has_the_bytes_of_the_quiet_run(tmp_path, place, tensor):
    every = {"checkpoint": CheckpointConfig(every_steps=4), "directory": tmp_path / "run"}
    parts = functools.partial(parts_at, place, tensor)
    with pytest.raises(ReplicasDiffer, match="after step 8 workers 0 and 1 hold different States"):
        exact(tmp_path, 2, "shard 2", function=parts, **every)
    run = exact(tmp_path / "again", 2, "shard 2", **every)
    assert [event.step for event in run.events if isinstance(event, ReplicasDiverged)] == [8]
    assert [event.step for event in run.events if isinstance(event, Resumed)] == [4]
    assert final(run)[0] == quiet("shard 2")[0][0]
    assert audit(journal.read(tmp_path / "run" / "journal.jsonl")).exact
