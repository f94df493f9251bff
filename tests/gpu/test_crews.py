"""Workers that are several processes on a GPU that all of them share: FSDP2, tensors, stages.

NCCL is told that each process is on a host of its own.
"""

from pathlib import Path

import pytest
import torch

import elastix
from elastix.events import Resumed, WorkerLost
from elastix.testing.local_worker import Gpus
from tests import crew_runs, pipe_runs
from tests.chaos import test_crew_slices
from tests.crew_runs import assert_laws, checked, configure, kill
from tests.gpu.test_ray import cluster  # noqa: F401 - a fixture

pytestmark = pytest.mark.timeout(150)

BALLAST = 512 << 20
"""Far above the workspaces of cuBLAS, which torch keeps: 32 MiB for each of some streams."""
GO_ON = {"replace": True, "min_workers": 2}
"""The others wait for a new worker, so what is left of the lost one is free before the end."""


def run(tmp_path, workers, crew, kills=(), **options):
    """As one process on the CPU has it, equal along each rail, every sample once."""
    options = {"gpus": Gpus("nccl"), "timeout_s": 100.0, **options}
    return checked(tmp_path, workers, crew, kills, **options)


def freed(found):
    return [(worker, place) for worker, place, _ in found.run.freed]


def told(found):
    """What became of processes, for whoever reads why it failed."""
    return found.run.lost_places, found.run.freed, found.run.lost


def test_shards_agree_with_one_process(tmp_path):
    found = run(tmp_path, 2, {"shard": 2}, samples=46, mean=True)
    assert not found.run.lost


@pytest.mark.parametrize(
    ("place", "phase"), [(1, "in forward"), (0, "in backward"), (1, "bucket"), (1, "held")]
)
def test_a_process_is_killed_and_its_mate_and_a_fresh_one_are_a_worker(tmp_path, place, phase):
    found = run(tmp_path, 2, {"shard": 2}, [kill(1, place, phase)], **GO_ON)
    assert freed(found) == [(1, 1 - place)], told(found)
    assert set(found.run.outcomes) == {0, 2}


def with_ballast(ctx):
    """Says how much of the device torch has taken when a life begins, and takes much."""
    log = Path(ctx.config["log"])
    (log / f"taken-{ctx.worker}-{ctx.place}").write_text(str(torch.cuda.memory_reserved()))
    build = crew_runs.build

    def heavy():
        model = build()
        model.ballast = [torch.empty(BALLAST, dtype=torch.uint8, device=ctx.device)]
        return model

    crew_runs.build = heavy
    try:
        crew_runs.train(ctx)
    finally:
        crew_runs.build = build


def test_the_halves_of_two_broken_workers_are_a_new_one_on_memory_that_is_free(tmp_path):
    kills = [kill(1, 1, "bucket", detail=0), kill(2, 0, "in forward")]
    found = run(tmp_path, 3, {"shard": 2}, kills, **GO_ON, epochs=2, function=with_ballast)
    assert set(freed(found)) == {(1, 0), (2, 1)}
    assert set(found.run.outcomes) >= {0, 3}
    taken = {path.name: int(path.read_text()) for path in (tmp_path / "log").glob("taken-*")}
    assert {"taken-3-0", "taken-3-1"} <= taken.keys()
    assert max(taken.values()) < BALLAST, taken


def test_no_worker_is_whole_and_the_run_goes_on_from_what_their_halves_hold(tmp_path):
    kills = [kill(0, 1, "in backward", step=3), kill(1, 0, "in backward", step=3)]
    found = run(tmp_path, 2, {"shard": 2}, kills, replace=True, epochs=2)
    resumed = [(e.step, e.held) for e in found.run.events if isinstance(e, Resumed)]
    assert resumed == [(3, True)], told(found)


@pytest.mark.parametrize("phase", ["in forward", "in backward"])
def test_split_tensors_and_a_kill(tmp_path, phase):
    found = run(tmp_path, 2, {"tensor": 2}, [kill(1, 1, phase)], **GO_ON, samples=36)
    assert freed(found) == [(1, 0)], told(found)


def test_stages_and_a_kill(tmp_path):
    kills, function = [kill(1, 1, "in forward", after=1)], pipe_runs.train_with("1f1b")
    found = run(tmp_path, 2, {"pipe": 2}, kills, **GO_ON, function=function, samples=37)
    assert freed(found) == [(1, 0)], told(found)


def test_an_exact_run_has_the_bytes_of_the_quiet_one(tmp_path):
    options = {"gpus": Gpus("nccl"), "epochs": 1, "timeout_s": 120.0}
    quiet = test_crew_slices.exact(tmp_path / "quiet", 1, "shard 2", **options)
    kills = [kill(1, 1, "in backward", step=3)]
    other = test_crew_slices.exact(tmp_path / "other", 2, "shard 2", kills, **options)
    (_, want), (_, had) = map(test_crew_slices.final, (quiet, other))
    assert want
    assert [name for name in want if not torch.equal(want[name], had[name])] == []


def fails(ctx):
    """The GPU of one place writes where it must not."""
    kernel = torch.cuda._compile_kernel(
        'extern "C" __global__ void wild(int* memory) { *(volatile int*)8 = 1; }', "wild"
    )
    memory = torch.zeros(1, dtype=torch.int32, device=ctx.device)

    def look(phase, _detail):
        if (ctx.worker, ctx.place, phase, ctx.step) == (1, 1, "bucket", 2):
            kernel((1, 1, 1), (1, 1, 1), (memory,))
            torch.cuda.synchronize()

    ctx.on_phase(look)
    crew_runs.train(ctx)


def test_a_process_whose_gpu_fails_is_ended_and_its_mate_is_free(tmp_path):
    found = run(tmp_path, 2, {"shard": 2}, **GO_ON, function=fails)
    (lost,) = [event for event in found.run.events if isinstance(event, WorkerLost)]
    assert (lost.worker, lost.cause) == (1, "its GPU failed")
    assert freed(found) == [(1, 0)], told(found)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("cluster")
def test_on_ray_where_processes_share_the_gpu(tmp_path):
    config = configure(tmp_path, [kill(1, 1, "in backward")], epochs=2)
    result = elastix.ElasticTrainer(
        crew_runs.train,
        config=config,
        scaling=elastix.ScalingConfig(num_workers=2, crew={"shard": 2}, gpus_per_worker=0.5),
        run=elastix.RunConfig(name="test", store=str(tmp_path / "store")),
        quiet=True,
    ).fit()
    assert_laws(config, list(result.events), {"shard": 2})
    told = [event for event in result.events if isinstance(event, WorkerLost)]
    assert [(event.worker, event.cause) for event in told] == [(1, "died")]
