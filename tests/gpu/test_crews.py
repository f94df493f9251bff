"""Workers that are several processes on a GPU that all of them share: FSDP2, tensors, stages.

Over NCCL, which is told that each process is a host, collectives of a lost worker raise nothing
when they are ended; over gloo they do.
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

BACKENDS = ["nccl", "gloo"]
BALLAST = 64 << 20


def run(tmp_path, workers, crew, kills=(), backend="nccl", **options):
    """As one process on the CPU has it, equal along each rail, every sample once."""
    options = {"gpus": Gpus(backend), "timeout_s": 120.0, **options}
    return checked(tmp_path, workers, crew, kills, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_agree_with_one_process(tmp_path, backend):
    found = run(tmp_path, 2, {"shard": 2}, backend=backend, samples=46, mean=True)
    assert not found.run.lost


@pytest.mark.parametrize(
    ("place", "phase", "backend"),
    [
        (1, "in forward", "nccl"),
        (0, "in backward", "nccl"),
        (1, "bucket", "nccl"),
        (1, "in backward", "gloo"),
    ],
)
def test_a_process_is_killed_and_its_mate_comes_out(tmp_path, place, phase, backend):
    found = run(tmp_path, 2, {"shard": 2}, [kill(1, place, phase)], backend)
    assert found.outcomes == ["reduced again"]
    assert [(worker, free) for worker, free, _ in found.run.freed] == [(1, 1 - place)]


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
    options = {"replace": True, "min_workers": 2, "epochs": 2, "function": with_ballast}
    found = run(tmp_path, 3, {"shard": 2}, kills, **options)
    assert {(worker, place) for worker, place, _ in found.run.freed} == {(1, 0), (2, 1)}
    assert set(found.run.outcomes) >= {0, 3}
    taken = {path.name: int(path.read_text()) for path in (tmp_path / "log").glob("taken-*")}
    assert {"taken-3-0", "taken-3-1"} <= taken.keys()
    assert max(taken.values()) < BALLAST


def test_no_worker_is_whole_and_the_run_goes_on_from_what_their_halves_hold(tmp_path):
    kills = [kill(0, 1, "in backward", step=3), kill(1, 0, "in backward", step=3)]
    found = run(tmp_path, 2, {"shard": 2}, kills, replace=True, epochs=2)
    resumed = [(e.step, e.held) for e in found.run.events if isinstance(e, Resumed)]
    assert resumed == [(3, True)]


@pytest.mark.parametrize("phase", ["in forward", "in backward"])
def test_split_tensors_and_a_kill(tmp_path, phase):
    found = run(tmp_path, 2, {"tensor": 2}, [kill(1, 1, phase)], samples=36)
    assert len(found.run.freed) == 1


def test_stages_and_a_kill(tmp_path):
    kills = [kill(1, 1, "in forward", after=1)]
    found = run(tmp_path, 2, {"pipe": 2}, kills, function=pipe_runs.train_with("1f1b"), samples=37)
    assert len(found.run.freed) == 1


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
    found = run(tmp_path, 2, {"shard": 2}, function=fails)
    (lost,) = [event for event in found.run.events if isinstance(event, WorkerLost)]
    assert (lost.worker, lost.cause) == (1, "its GPU failed")
    assert [(worker, place) for worker, place, _ in found.run.freed] == [(1, 0)]


@pytest.mark.timeout(240)
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
