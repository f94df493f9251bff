"""A campaign or a run on GPUs, as Ray believes, one of which is broken for good.

python -m tests.integration.broken_gpu HOW STORE: a worker on it says so, or dies of it. Each leaves
STORE/broken-PID, and trials wait until the pool has met enough of them. HOW is "trains" for a run:
a worker on it fails before ctx.prepare.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import ray
import torch

import elastix
from elastix.search.executors import pool, pool_worker
from tests import search_parts

BROKEN = 0  # the first that Ray gives anybody
ENOUGH = {"says": 1, "dies": 3}


def is_broken() -> bool:
    """Whether this process has that GPU."""
    if ray.get_gpu_ids() != [BROKEN]:
        return False
    Path(os.environ["MARKS"], f"broken-{os.getpid()}").touch()
    return True


class Says(pool_worker.LoneWorker):
    def hello(self) -> pool_worker.Hello:
        said = super().hello()
        return replace(said, host="GPU 0", failed="unknown error") if is_broken() else said


class Dies(pool_worker.LoneWorker):
    def hello(self) -> pool_worker.Hello:
        if is_broken():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().hello()


def tells_its_gpu(ctx: elastix.Context) -> None:
    marks, enough = Path(os.environ["MARKS"]), ENOUGH[os.environ["HOW"]]
    while len(list(marks.glob("broken-*"))) < enough:
        time.sleep(0.05)
    ctx.report(score=ctx.config["x"], gpu=int(os.environ["CUDA_VISIBLE_DEVICES"]))


def trains(ctx: elastix.Context) -> None:
    if is_broken():
        raise torch.AcceleratorError("CUDA error: unknown error")
    model = torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dataset = torch.utils.data.TensorDataset(torch.ones(32, 1))
    for epoch in ctx.loader(dataset, batch_size=4).epochs(1):
        for (x,) in epoch:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()


def train(store: str) -> None:
    scaling = elastix.ScalingConfig(num_workers=2, cpus_per_worker=0.5, gpus_per_worker=0.6)
    run = elastix.RunConfig(name="broken", store=store)
    elastix.ElasticTrainer(trains, scaling=scaling, run=run).fit()


def main(how: str, store: str) -> None:
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=3 if how == "trains" else 2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"MARKS": store, "HOW": how}},
    )
    if how == "trains":
        train(store)
        ray.shutdown()
        return
    pool.LoneWorker = {"says": Says, "dies": Dies}[how]
    elastix.Campaign(
        tells_its_gpu,
        space=search_parts.SPACE,
        searcher=search_parts.Drawing(),
        metric="score",
        budget=elastix.Budget(trials=12),
        scaling=elastix.ScalingConfig(gpus_per_worker=1),
        run=elastix.RunConfig(name="broken", store=store),
    ).run()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
