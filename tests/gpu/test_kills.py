"""Laws 1 and 2 on a GPU that all workers share: over gloo, and over NCCL."""

import pytest

from elastix.events import GenerationFormed, WorkerLost
from elastix.testing.chaos import HANG, Kill
from elastix.testing.local import run_local
from elastix.testing.local_worker import Gpus
from elastix.testing.replay import compare
from tests.chaos import test_joiners, test_kills
from tests.chaos.test_kills import PLACES
from tests.gpu.programs import broken_device
from tests.laws import assert_exactly_once, assert_replicas_identical, committed, joins
from tests.trainables import train

BACKENDS = ["gloo", "nccl"]


def run(tmp_path, kills, backend, workers=3, **options):
    """Ends as arithmetic on the same GPU does with the committed batches."""
    options = {"gpus": Gpus(backend), "timeout_s": 90.0, **options}
    result = test_kills.run(tmp_path, kills, workers, **options)
    assert compare(tmp_path / "run", device="cuda").relative < 1e-9
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
def test_one_worker_is_killed(tmp_path, place, backend):
    run(tmp_path, [PLACES[place]], backend, workers=4 if backend == "gloo" else 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phase", ["enter", "meet", "bucket", "round"])
def test_a_second_worker_is_killed_during_recovery(tmp_path, phase, backend):
    first = Kill(worker=1, phase="bucket", detail=1, step=3)
    detail, after = {"bucket": (1, 1), "round": (1, 0)}.get(phase, (2, 0))
    second = Kill(worker=2, phase=phase, step=3, detail=detail, after=after)
    run(tmp_path, [first, second], backend, workers=4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["forward", "middle bucket", "commit round"])
def test_a_failed_step_is_computed_again_where_that_is_wanted(tmp_path, place, backend):
    run(tmp_path, [PLACES[place]], backend, recovery="rollback")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_that_hangs_is_taken_out_and_operations_that_wait_for_it_end(tmp_path, backend):
    """No connection breaks: those of NCCL end by being aborted alone."""
    kill = Kill(worker=1, phase="bucket", detail=1, step=3, signal=HANG)
    result = run(tmp_path, [kill], backend, hang_timeout_s=4.0)
    (lost,) = [event for event in result.events if isinstance(event, WorkerLost)]
    assert lost.cause != "died"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["convnet", "tied"])
def test_a_replacement_is_let_in_and_has_the_same_weights(tmp_path, model, backend):
    result = test_joiners.run(
        tmp_path,
        train,
        2,
        config={"model": model},
        spares=1,
        max_workers=3,
        gpus=Gpus(backend),
        timeout_s=90.0,
    )
    (join,) = joins(result.events)
    assert join.watched_steps > 0
    assert committed(result.events)[-1].world_size == 3
    assert compare(tmp_path / "run", device="cuda").relative < 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["batch", "bucket", "round"])
def test_a_worker_whose_device_fails_is_lost_and_the_run_goes_on(tmp_path, where, backend):
    logs = tmp_path / "logs"
    logs.mkdir()
    config = {**test_kills.CONFIG, "log": str(logs), "where": where}
    options = {"config": config, "directory": tmp_path / "run", "gpus": Gpus(backend)}
    result = run_local(broken_device, 3, timeout_s=90.0, **options)
    (lost,) = [event for event in result.events if isinstance(event, WorkerLost)]
    assert (lost.worker, lost.cause) == (1, "its GPU failed")
    assert len([event for event in result.events if isinstance(event, GenerationFormed)]) == 2
    assert_exactly_once(result.events, config["epochs"])
    assert_replicas_identical(logs, {1}, result.events)
