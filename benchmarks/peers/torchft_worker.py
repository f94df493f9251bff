"""One replica of the torchft group: a process that ``torchft_group`` starts.

It says ``ready`` on its standard output when its manager is up, begins with the first line on
its standard input, says ``step`` and its number after each step that it committed, and ``done``
when its part of the data is used up, and ends when the standard input is closed, also if that
is because the parent is gone.
"""

import argparse
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]
from torch.nn import functional as F
from torchft import Manager, ProcessGroupGloo
from torchft.data import DistributedSampler
from torchft.optim import OptimizerWrapper

from benchmarks.peers.workload import (
    GLOBAL_BATCH,
    WORLD_SIZE,
    IndexedSamples,
    StepLog,
    batches_of,
    build_model,
    build_optimizer,
    kill_in_mid_backward,
    load,
)

_BUCKET_BYTES = 12 * 2**20
_MIN_REPLICAS = WORLD_SIZE - 1
_MANAGER_TIMEOUT = timedelta(seconds=30)


@dataclass
class _Bucket:
    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]
    missing: int
    work: Work | None = None


class BucketedAllreduce:
    """Averages gradients through the manager, bucket by bucket, while backward still runs.

    Each gradient is copied into its bucket by a hook, a full bucket goes to
    ``Manager.allreduce`` at once, and ``finish`` waits for all of them and lets ``grad`` point
    into the buckets. An error stays with the manager, which then refuses the commit.

    Args:
        manager: The manager.
        parameters: The parameters, in the order of the forward pass.
    """

    def __init__(self, manager: Manager, parameters: Iterable[nn.Parameter]) -> None:
        self._manager = manager
        self._buckets: list[_Bucket] = []
        group: list[nn.Parameter] = []
        for parameter in reversed(list(parameters)):
            if group and sum(p.nbytes for p in group) + parameter.nbytes > _BUCKET_BYTES:
                self._add_bucket(group)
                group = []
            group.append(parameter)
        self._add_bucket(group)

    def finish(self) -> None:
        """Waits for the averages, to be called between backward and the optimizer's step."""
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
            bucket.missing, bucket.work = len(bucket.parameters), None

    def _add_bucket(self, parameters: list[nn.Parameter]) -> None:
        flat = torch.zeros(sum(p.numel() for p in parameters))
        parts = torch.split(flat, [p.numel() for p in parameters])
        views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        bucket = _Bucket(flat, parameters, views, missing=len(parameters))
        self._buckets.append(bucket)
        for parameter, view in zip(parameters, views, strict=True):
            fill = partial(self._fill, bucket, view)
            parameter.register_post_accumulate_grad_hook(fill)

    def _fill(self, bucket: _Bucket, view: Tensor, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        view.copy_(parameter.grad)
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.work = self._manager.allreduce(bucket.flat)


class _Orders:
    """The parent's side of standard input, read by a thread of its own."""

    def __init__(self) -> None:
        self._go = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_go(self) -> None:
        self._go.wait()

    def wait_for_the_end(self) -> None:
        threading.Event().wait()

    def _read(self) -> None:
        for _ in sys.stdin:
            self._go.set()
        os._exit(0)


def _say(word: str) -> None:
    os.write(sys.stdout.fileno(), f"{word}\n".encode())


def _drawn_before(log: Path) -> int:
    # The step log doubles as the checkpoint of the replica's loader position after each step.
    return log.read_text(encoding="utf-8").count("\n") if log.exists() else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--op-timeout", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--stamp", type=Path, required=True)
    parser.add_argument("--kill-step", type=int, default=-1)
    return parser.parse_args()


def main() -> None:
    """Trains as one replica until its part of the data is used up."""
    arguments = _parse()
    orders = _Orders()
    torch.set_num_threads(1)
    model = build_model()
    sgd = build_optimizer(model)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    def set_state(new: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(new["model"])
        sgd.load_state_dict(new["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=arguments.op_timeout)),
        load_state_dict=set_state,
        state_dict=state,
        min_replica_size=_MIN_REPLICAS,
        timeout=_MANAGER_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=arguments.lighthouse,
        replica_id=f"replica_{arguments.replica}",
        init_sync=False,  # all replicas begin with the same weights
    )
    if arguments.kill_step >= 0:
        kill_in_mid_backward(
            model, lambda: manager.current_step() == arguments.kill_step, arguments.stamp
        )
    reducer = BucketedAllreduce(manager, model.parameters())
    optimizer = OptimizerWrapper(manager, sgd)

    dataset = IndexedSamples(arguments.steps * GLOBAL_BATCH)
    sampler = DistributedSampler(
        dataset,
        replica_rank=arguments.replica,
        num_replica_groups=WORLD_SIZE,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    batches = batches_of(list(sampler), _drawn_before(arguments.log))
    log = StepLog(arguments.log, arguments.replica)
    _say("ready")
    orders.wait_for_go()
    for inputs, labels, ids in load(dataset, batches):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        reducer.finish()
        step, done = manager.current_step(), manager.batches_committed()
        optimizer.step()
        committed = manager.batches_committed() > done
        log.write(
            step,
            ids.tolist(),
            world=manager.num_participants(),
            committed=committed,
            counted=manager.is_participating(),
        )
        if committed:
            _say(f"step{step}")
    _say("done")
    orders.wait_for_the_end()


if __name__ == "__main__":
    main()
