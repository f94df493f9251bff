"""A campaign on two GPUs, as Ray believes, one of which is broken for good.

python -m tests.integration.broken_gpu HOW STORE: a worker on it says so, or dies of it.
"""

import os
import signal
import sys
from dataclasses import replace

import ray

import elastix
from elastix.search.executors import pool, pool_worker
from tests import search_parts

BROKEN = 0  # the first that Ray gives anybody


class Says(pool_worker.LoneWorker):
    def hello(self) -> pool_worker.Hello:
        said, (gpu,) = super().hello(), ray.get_gpu_ids()
        failed = "AcceleratorError: CUDA error: unknown error" if gpu == BROKEN else ""
        return replace(said, host=f"{said.node} GPU {gpu}", failed=failed)


class Dies(pool_worker.LoneWorker):
    def hello(self) -> pool_worker.Hello:
        if ray.get_gpu_ids() == [BROKEN]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().hello()


def tells_its_gpu(ctx: elastix.Context) -> None:
    ctx.report(score=ctx.config["x"], gpu=int(os.environ["CUDA_VISIBLE_DEVICES"]))


def main(how: str, store: str) -> None:
    ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
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
