"""`elastix bench`: a real run of each system, and what it refuses to compare."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from elastix.bench import ddp_group
from elastix.bench.ddp_group import measure_ddp
from elastix.bench.elastic_group import measure_elastix, own_ray
from elastix.bench.endless import Endless
from elastix.bench.measures import Timing
from elastix.cli import app
from elastix.errors import ConfigError, TrainError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "plain_torch" / "after.py")
SHORT = Timing(warmup_s=0.0, seconds=0.5, kills=0, kill_every_s=1.0)


def ranks_alive():
    found = psutil.Process().children(recursive=True)
    return [one for one in found if "elastix.bench.ddp_rank" in one.cmdline()]


def loop(ctx, inner=lambda model, x: model(x), epochs=1, **options):
    torch.manual_seed(ctx.rank)  # DDP has to make them equal
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    )
    ctx.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(42, 4)
    loader = ctx.loader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=12, **options)
    for epoch in loader.epochs(epochs):
        for samples, labels in epoch:
            optimizer.zero_grad()
            F.cross_entropy(inner(model, samples), labels).backward()
            optimizer.step()
            if ctx.step % 5 == 0:
                ctx.report(**ctx.mean(rank=float(ctx.rank)))
        found = ctx.evaluate(
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            TensorDataset(x, (x[:, 0] > 0).long()),
            batch_size=7,
        )
        assert 0 < found["<lambda>"] < 10


def around_ddp(ctx):
    loop(ctx, inner=lambda model, x: model[2](model[1](model[0](x))))


def in_slices(ctx):
    loop(ctx, slices=2)


def raises(ctx):
    raise ValueError("no such thing")


def returns(ctx):
    ctx.prepare(torch.nn.Linear(1, 1))


def dies_talking(ctx):
    """More than any pipe holds, and more than is to be kept."""
    sys.stdout.write("spoken " * 1_000_000 + "\nthe last word\n")
    sys.stdout.flush()
    os._exit(3)


def telling_its_threads(ctx):
    raise ConfigError(f"there are {torch.get_num_threads()} threads")


def measured(train, tmp_path, size, cpus=1.0, **more):
    folder, train = tmp_path / "ddp", pickle.dumps(Endless(train))
    return measure_ddp(train, {}, size, SHORT, folder, cpus=cpus, seed=0, **more)


def test_ddp_trains_one_model_on_all_ranks(tmp_path):
    rate = measured(loop, tmp_path, 2)
    assert rate.samples_per_s > 0
    assert rate.step_samples <= 12
    ranks = [(tmp_path / "ddp" / f"digests-{rank}").read_text().split()[:2] for rank in range(2)]
    assert ranks[0][0] == "4"
    assert ranks[0] == ranks[1]
    assert ranks_alive() == []


def test_a_rank_has_as_many_threads_as_a_worker_whatever_the_environment_says(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(ConfigError, match="there are 3 threads"):
        measured(telling_its_threads, tmp_path, 1, cpus=3.5)


@pytest.mark.fast("raises-*", "in_slices-*")
@pytest.mark.parametrize(
    ("train", "size", "error", "fact"),
    [
        (around_ddp, 2, TrainError, "the models differ after 4 batches"),
        (raises, 1, TrainError, "ValueError: no such thing"),
        pytest.param(
            *(returns, 1, TrainError, "the train function was through after 0 counted steps"),
            marks=pytest.mark.slow,
        ),
        (in_slices, 1, ConfigError, "slices=...) has no counterpart in DDP"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, train, size, error, fact):
    with pytest.raises(error, match=r"--no-ddp|--seconds") as caught:
        measured(train, tmp_path, size)
    assert fact in str(caught.value)
    assert ranks_alive() == []


def test_of_what_a_rank_prints_the_end_is_kept_and_no_file(tmp_path):
    with pytest.raises(TrainError, match="ended with code 3") as caught:
        measured(dies_talking, tmp_path, 1)
    assert str(caught.value).endswith("spoken \nthe last word\n")
    assert len(str(caught.value)) < 3000
    folder = tmp_path / "ddp"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000


def never_starts(ctx):
    raise AssertionError("it has no room")


def test_a_worker_that_never_comes_is_not_waited_for_without_end(tmp_path, monkeypatch):
    """The run itself goes on with whoever is there."""
    told = []

    class Run:
        def __init__(self, watch):
            self.watch = watch

        def fit(self):
            for now in (100.0, 500.0, 701.0):
                monkeypatch.setattr("elastix.bench.elastic_group.time.time", lambda now=now: now)
                self.watch([])
            raise AssertionError("it would go on")

    monkeypatch.setattr(
        "elastix.train.on_ray.trainer.ElasticTrainer.as_trial", lambda *given: Run(given[-1])
    )
    with pytest.raises(TrainError, match=r"not whole for 600 s \(0 steps so far, 0 of 2 workers"):
        measure_elastix(
            never_starts, {}, 2, SHORT, tmp_path, cpus=0.5, seed=0, progress=told.append
        )


def test_what_workers_print_is_limited_and_the_environment_is_as_before(monkeypatch):
    """Ray reads it in each process that it starts."""
    during = {}
    monkeypatch.setattr(
        "elastix.train.on_ray.find_ray.init_ray", lambda *_, **__: during.update(os.environ)
    )
    monkeypatch.setenv("RAY_ROTATION_BACKUP_COUNT", "3")
    before = dict(os.environ)
    with own_ray(1.0):
        assert 0 < int(during["RAY_ROTATION_MAX_BYTES"]) <= 1 << 24
        assert during["RAY_ROTATION_BACKUP_COUNT"] == "3"  # somebody's own
    assert dict(os.environ) == before


def test_workers_have_the_priority_that_ddp_has(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "elastix.train.on_ray.find_ray.init_ray", lambda address, **options: asked.update(options)
    )
    with own_ray(1.0):
        assert asked["_system_config"]["worker_niceness"] == 0


def silent(ctx):
    threading.Event().wait()


def test_ddp_is_waited_for_as_long_as_ten_steps_take(tmp_path, monkeypatch):
    monkeypatch.setattr(ddp_group, "_PATIENCE_S", 0.01)
    with pytest.raises(TrainError, match=r"no step came in 2 s"):
        measured(silent, tmp_path, 1, step_s=0.2)
    assert ranks_alive() == []


def test_a_script_that_has_started_ray_itself_is_refused(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"called ray.init when it was loaded"), own_ray(1.0):
        pass


@contextmanager
def started(tmp_path, *words):
    (tmp_path / "tmp").mkdir()
    short = {"TMPDIR": str(tmp_path / "tmp"), "RAY_TMPDIR": "/tmp"}  # for Ray's sockets
    process = subprocess.Popen(
        [sys.executable, "-m", "elastix", "bench", SCRIPT, "--cpus", "0.5", *words],
        cwd=tmp_path,
        env={**os.environ, **short},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_run_of_both_systems_with_a_kill(tmp_path):
    times = ["--seconds", "0.5", "--warmup", "0", "--kill", "1", "--kill-every", "0.5"]
    with started(tmp_path, "-w", "2", *times, "--out", "p.html", "--json") as process:
        output, told = process.communicate()
    assert process.returncode == 0, told
    (two,) = json.loads(output)["sizes"]
    for system in ("elastix", "ddp"):
        assert two[system]["samples_per_s"] > 0
        assert two[system]["step_samples"] == pytest.approx(60, rel=0.01)
    (death,) = two["deaths"]
    assert two["goodput"] >= 0  # 0 if no step came in a minute
    assert f"killed worker {death['worker']}, 1 of 1" in told
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["p.html", "tmp"]
    assert list((tmp_path / "tmp").glob("elastix-scaling-*")) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["elastix", "DDP"])
def test_ctrl_c_leaves_nothing_behind(tmp_path, phase):
    seconds = "1" if phase == "DDP" else "600"
    with started(tmp_path, "-w", "1", "--seconds", seconds) as process:
        for line in process.stderr:
            if f"under {phase} ..." in line:
                break
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert [entry.name for entry in tmp_path.iterdir()] == ["tmp"]
    assert list((tmp_path / "tmp").glob("elastix-scaling-*")) == []


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["nowhere.py"], "there is no file nowhere.py"),
        ([SCRIPT, "--workers", "none"], "give numbers of workers"),
        ([SCRIPT, "--seconds", "0"], "--seconds is a number of seconds from"),
        ([SCRIPT, "--kill", "-1"], "--kill is a number of kills"),
        ([SCRIPT, "--cpus", "0"], "must occupy some CPU"),
        ([SCRIPT, "--seed", "-1"], "seed"),
        ([SCRIPT, "--set", "lr"], "give KEY=VALUE"),
        ([SCRIPT, "--out", "/dev/null/x.html"], "cannot be the page"),
        ([SCRIPT, "--out", SCRIPT], "cannot be the page"),
        ([SCRIPT, "--function", "fit"], "has no 'fit'"),
    ],
)
def test_bad_calls_start_nothing(words, fact, monkeypatch):
    def started_after_all(*_):
        raise AssertionError("work was started")

    monkeypatch.setattr("elastix.bench.elastic_group.own_ray", started_after_all)
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 2, done.output
    assert fact in done.output
