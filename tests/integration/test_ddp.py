"""Law 3: without failures the result is that of torch's DistributedDataParallel."""

from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from elastix.config import ExchangeConfig
from elastix.testing.local import run_local
from tests.trainables import make

RANKS = 3
kept = []  # benchmarks.overhead.data_parallel says why DDP is never freed


def bfloat16(state, bucket):
    """torch's; under its own name DDP takes it for one that needs NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS = {"bfloat16": bfloat16, "float16": default_hooks.fp16_compress_hook}


def train_both(ctx):
    """Trains a replica with elastix and one with DDP on the very same shares."""
    config = ctx.config
    ours, optimizer, dataset = make(config)
    theirs, other, _ = make(config)
    theirs.load_state_dict(ours.state_dict())
    scaler, other_scaler = (
        torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4, enabled=config["scaler"])
        for _ in range(2)
    )
    ours, optimizer, scaler = ctx.prepare(ours, optimizer, scaler)
    store = TCPStore("127.0.0.1", config["port"], is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.world_size)
    ddp = DistributedDataParallel(
        theirs,
        broadcast_buffers=False,
        find_unused_parameters=config["model"] == "unused",
    )
    if config["wire"]:
        ddp.register_comm_hook(None, HOOKS[config["wire"]])
    every = config["accumulate"]
    loader = ctx.loader(dataset, batch_size=30)
    skipped = 0
    number = 0
    for epoch in loader.epochs(config["epochs"]):
        for x, y in epoch:
            number += 1
            last = number % every == 0
            overflow = float("inf") if config["scaler"] and ctx.step == 7 and ctx.rank == 1 else 1.0
            with nullcontext() if last else ctx.accumulate():
                scaler.scale(F.cross_entropy(ours(x), y) * overflow / every).backward()
            with nullcontext() if last else ddp.no_sync():
                other_scaler.scale(F.cross_entropy(ddp(x), y) * overflow / every).backward()
            if not last:
                continue
            for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
                if its.grad is None:
                    # DDP with find_unused_parameters=True gives None where nobody used it, too.
                    assert mine.grad is None
            for chosen, scale in ((optimizer, scaler), (other, other_scaler)):
                scale.step(chosen)
                before = scale.get_scale()
                scale.update()
                skipped += scale.get_scale() < before
                chosen.zero_grad()
    for name, mine in ours.named_parameters():
        its = dict(theirs.named_parameters())[name]
        torch.testing.assert_close(mine, its, rtol=config["rtol"], atol=config["rtol"], msg=name)
    for name, mine in ours.named_buffers():
        its = dict(theirs.named_buffers())[name].clone()
        if its.is_floating_point():  # DDP leaves each rank its own; the mean is linear in them
            dist.all_reduce(its)
            its /= ctx.world_size
        torch.testing.assert_close(mine, its, rtol=config["rtol"], atol=config["rtol"], msg=name)
    assert scaler.get_scale() == other_scaler.get_scale()
    assert skipped == (2 if config["scaler"] else 0)
    moved = sum(
        float((p - q).abs().sum()) for p, q in zip(ours.parameters(), fresh(config), strict=True)
    )
    assert moved > 0.1
    dist.barrier()
    dist.destroy_process_group()
    kept.append(ddp)


def fresh(config):
    torch.manual_seed(0)
    return make(config)[0].parameters()


DOUBLE = {"dtype": "float64", "optimizer": "adamw", "rtol": 1e-9}
SINGLE = {"dtype": "float32", "optimizer": "sgd", "rtol": 1e-4}


@pytest.mark.fast("*-float64", "unused-float32")
@pytest.mark.parametrize("precision", [DOUBLE, SINGLE], ids=["float64", "float32"])
@pytest.mark.parametrize("model", ["mlp", "convnet", "tied", "unused"])
def test_equals_ddp(tmp_path, model, precision):
    check(tmp_path, {"model": model, **precision})


@pytest.mark.fast("convnet")
@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_equals_ddp_with_accumulation(tmp_path, model):
    check(tmp_path, {"model": model, "accumulate": 2, **DOUBLE})


def test_equals_ddp_with_a_grad_scaler_and_an_overflow_on_one_rank(tmp_path):
    check(tmp_path, {"model": "convnet", "scaler": True, **SINGLE})


@pytest.mark.parametrize(
    ("wire", "model", "rtol"),
    [("bfloat16", "mlp", 0.0), ("bfloat16", "unused", 0.0), ("float16", "mlp", 1e-3)],
)
def test_equals_ddp_whose_hook_sends_another_type(tmp_path, wire, model, rtol):
    """To the last bit: of two workers a sum is the same in any order.

    Below 6e-5 float16 has fewer digits, and the hook halves what it has rounded there already.
    """
    check(tmp_path, {**SINGLE, "model": model, "wire": wire, "rtol": rtol}, ranks=2)


def check(tmp_path, config, ranks=RANKS):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    defaults = {"accumulate": 1, "scaler": False, "samples": 240, "epochs": 7, "wire": None}
    config = {**defaults, **config, "port": store.port}
    exchange = ExchangeConfig(wire=config["wire"])
    run = run_local(train_both, ranks, config=config, directory=tmp_path, exchange=exchange)
    assert {outcome.kind for outcome in run.outcomes.values()} == {"finished"}
