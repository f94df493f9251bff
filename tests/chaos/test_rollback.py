"""FailureConfig(recovery="rollback"): the step in which a worker is lost is computed again."""

import pytest

from elastix.errors import ConfigError
from elastix.events import Recovered
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.local import run_local
from elastix.testing.replay import compare
from tests.laws import assert_exactly_once, committed
from tests.trainables import train
from tests.ways import Noted

SCHEDULES = {
    "one": [Kill(worker=1, phase="bucket", step=3)],
    "two in a row": [
        Kill(worker=1, phase="bucket", step=3),
        Kill(worker=2, phase="enter", detail=2),
        Kill(worker=0, phase="batch", step=9),
    ],
    "in the round of a void step": [
        Kill(worker=1, phase="bucket", step=3),
        Kill(worker=2, phase="round", detail=1, step=3),
    ],
}


@pytest.mark.fast("-in the round of a void step", "accumulate-one", "accumulate-two in a row")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("config", [{}, {"accumulate": 2, "samples": 240}], ids=["", "accumulate"])
def test_a_lost_step_is_done_again_with_the_same_samples(tmp_path, schedule, config):
    """Schedulers and batch norm too: a replay of what was committed ends with the same weights."""
    settings = {"model": "convnet", "samples": 250, "batch_size": 30, "epochs": 3, **config}
    doomed = with_kills(train, SCHEDULES[schedule])
    result = run_local(doomed, 4, config=settings, directory=tmp_path, recovery="rollback")
    assert set(result.lost) == {kill.worker for kill in SCHEDULES[schedule]}
    assert_exactly_once(result.events, 3)
    assert compare(tmp_path).relative < 1e-9
    again = [e for e in result.events if isinstance(e, Recovered) and e.outcome == "done again"]
    assert again
    step = committed(result.events)[3]
    positions = {
        p for b in step.batches for s in b.shares.values() for a, z in s for p in range(a, z)
    }
    whole = 30 * len(step.batches)
    assert positions == set(range(3 * whole, 4 * whole))  # none of them was put off


def test_a_second_backward_pass_on_one_batch_is_refused(tmp_path):
    """It could not be done again from its batch, since the first pass was a step of its own."""
    config = {"log": str(tmp_path)}
    with pytest.raises(ConfigError, match='Use recovery="forward"'):
        run_local(Noted("ppo"), 2, config=config, directory=tmp_path, recovery="rollback")
