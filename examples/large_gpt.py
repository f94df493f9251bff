"""A GPT in parts: each worker is four processes. SIGKILL ends three of them in forward passes.

A worker's mesh has FSDP2 over two processes and tensor parallelism over two. First one process of
worker 1 is killed; its mates and a fresh process become worker 2. Later both workers lose one, at
different places of the mesh. Then no worker is whole, but what is left of the two has all parts of
the model: it is put together, and no step is lost. One worker, undisturbed, trains the same again.
With `exact=True` the two States have the same bytes.

Run it with `python examples/large_gpt.py`. About a minute on two cores.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from signal import SIGKILL

import ray
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import elastix
from elastix.events import Resumed, WorkerStarted

MESH = {"shard": 2, "tensor": 2}  # places 0 to 3: (0, 0), (0, 1), (1, 0), (1, 1)
KILLS = {1: [(1, 3)], 5: [(0, 1), (1, 2)]}  # by number of steps taken: rank and place
LENGTH, WIDTH, HEAD = 32, 32, 8  # bytes in a sample, features, features of an attention head


class Block(nn.Module):
    """Attention, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)  # split by `tensor`, a process has some of the heads
        heads = [f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next byte at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.byte(x) + self.position(torch.arange(x.shape[1]))
        return self.head(self.blocks(x))


def parallelize(model: GPT, mesh: torch.distributed.DeviceMesh) -> None:
    """Torch's own calls, with the mesh of one worker."""
    plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    plan |= dict.fromkeys(("out", "down"), RowwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def die(ctx: elastix.Context) -> None:
    """SIGKILL for this process if it is one of those to be hit now; two go at the same time."""
    hit = KILLS.get(ctx.step, []) if ctx.world_size == 2 else []
    pipe = Path(ctx.config["pipe"])
    if (ctx.rank, ctx.place) in hit and pipe.exists():
        if len(hit) == 2:  # a named pipe opens when both of its ends do
            pipe.open("rb" if ctx.rank else "wb")
            pipe.unlink(missing_ok=True)  # they go once: the step comes again
        os.kill(os.getpid(), SIGKILL)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Nats for each byte."""
    (x,) = batch
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def train(ctx: elastix.Context) -> None:
    """A loop as for any model."""
    text = torch.tensor(list(Path(torch.__file__).read_bytes()[: 240 * (LENGTH + 1)]))
    data = TensorDataset(text.view(240, LENGTH + 1))
    model = GPT()
    model.blocks[1].register_forward_pre_hook(lambda *_: die(ctx))
    if ctx.mesh is not None:  # None if a worker is one process
        parallelize(model, ctx.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(data, batch_size=60, slices=2).epochs(2):
        for step in epoch:
            for batch in step:  # the slices that fall to this worker
                loss(model, batch).backward()
            ctx.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ctx.report(**ctx.evaluate(loss, data, batch_size=120))


def fit(name: str, workers: int, store: str) -> elastix.Result:
    return elastix.ElasticTrainer(
        train,
        config={"pipe": f"{store}/pipe"},
        scaling=elastix.ScalingConfig(num_workers=workers, crew=MESH, cpus_per_worker=0.5),
        run=elastix.RunConfig(name=name, store=store, exact=True),
    ).fit()


def main() -> int:
    """Train under fire and in peace; show what happened and check it."""
    ray.init(log_to_driver=False)
    store = tempfile.mkdtemp(prefix="elastix-")
    os.mkfifo(f"{store}/pipe")
    result, quiet = fit("gpt", 2, store), fit("gpt-quiet", 1, store)

    origin: dict[int, str] = {}  # of each process, by its id
    print("\nworker  its processes were")
    for event in result.events:
        if isinstance(event, WorkerStarted):
            pids = [event.pid, *(pid for _, pid in event.mates)]
            print(f"{event.worker:<6}", *(f"{origin.get(pid, 'new'):<12}" for pid in pids))
            origin |= dict.fromkeys(pids, f"of worker {event.worker}")
    held = [event.held for event in result.events if isinstance(event, Resumed)]
    # A process that does not come out of a lost worker within 15 s is ended, and its part is gone.
    print(f"no worker was whole, {'and' if held == [True] else 'BUT NOT'} all parts were there")
    same = result.audit.state == quiet.audit.state
    print(f"the State is {'' if same else 'NOT '}byte for byte that of the quiet run")
    return 0 if result.audit.exact and same else 1


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=lines).parse_args()
    sys.exit(main())
