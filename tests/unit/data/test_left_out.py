"""What stands of what was left out, once all have gone back."""

import pytest

from elastix.data.audit import audit
from elastix.data.left_out import LeftOut
from elastix.events import (
    BatchShares,
    LoaderOpened,
    ReplicasDiverged,
    Resumed,
    SamplesLeftOut,
    StepCommitted,
)
from elastix.testing import replayed_steps

ON_PURPOSE = SamplesLeftOut(loader=0, spans=((0, 4),))
EARLY = SamplesLeftOut(loader=0, spans=((8, 12),), step=1)
LATE = SamplesLeftOut(loader=0, spans=((12, 16),), step=2)


def parted(**what):
    what = {"cure": "went back", "unseen": True, **what}
    return ReplicasDiverged(step=3, workers=(0, 1), apart=(1,), parts=("model",), **what)


@pytest.mark.parametrize(
    ("found", "step", "left"),
    [
        ([parted()], 2, ((0, 4), (8, 12))),
        ([parted()], 1, ((0, 4),)),
        ([parted()], 3, ((0, 4), (8, 16))),
        ([parted(), Resumed(step=3, ref="r")], 1, ((0, 4), (8, 16))),  # it was gone back for
        ([], 1, ((0, 4), (8, 16))),
        ([parted(unseen=False)], 1, ((0, 4), (8, 16))),
        ([parted(cure="evicted")], 1, ((0, 4), (8, 16))),
    ],
)
def test_what_was_left_out_for_what_a_worker_may_have_computed_wrongly_is_used(found, step, left):
    told = LeftOut([ON_PURPOSE, EARLY, LATE, *found, Resumed(step=step, ref="r")])
    assert told.spans == {0: left}


@pytest.mark.parametrize(("step", "left"), [(2, ((0, 4), (8, 16))), (1, ((0, 4),))])
def test_what_a_state_was_stored_with_stays_left_out(step, left):
    """All were lost, and went on from State 1 without what was left out later: it is in State 2."""
    late = SamplesLeftOut(loader=0, spans=((12, 16),), step=5)
    told = LeftOut([ON_PURPOSE, EARLY, late, Resumed(step=1, ref="r"), parted()])
    told.take(Resumed(step=step, ref="r"))
    assert told.spans == {0: left}


def test_the_account_of_a_run_goes_by_it():
    opened = LoaderOpened(loader=0, length=24, batch_size=4, shuffle=False, seed=0)

    def step(number, *span):
        batch = BatchShares(loader=0, epoch=0, shares={"0": (span,)})
        return StepCommitted(step=number, generation=1, world_size=1, batches=(batch,))

    events = [opened, ON_PURPOSE, step(1, 4, 8), EARLY, LATE]
    assert replayed_steps.left_out(events)[0] == [(0, ((0, 4),)), (1, ((8, 12),)), (1, ((12, 16),))]
    events += [parted(), Resumed(step=1, ref="r"), step(2, 8, 12), step(3, 12, 16)]
    found = audit(events)
    assert found.exact
    assert [loader.left_out for loader in found.loaders] == [((0, 4),)]
    assert replayed_steps.left_out(events)[0] == [(0, ((0, 4),))]
