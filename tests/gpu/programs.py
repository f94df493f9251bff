"""Ways to use a GPU in a train function; each returns what its State consists of."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import elastix
from elastix.comm.gradients import buckets
from elastix.state import capture
from tests.trainables import Convnet, digest, note, samples

BATCH = 20


class TwoStreams(nn.Module):
    """A branch on a stream of its own; its gradients are computed there, and take long."""

    def __init__(self, width=1024):
        super().__init__()
        self.enter = nn.Linear(64, width)
        self.branch = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.other = nn.Linear(width, width)
        self.leave = nn.Linear(width, 10)
        self.stream = torch.cuda.Stream()

    def forward(self, x):
        x = torch.tanh(self.enter(x.flatten(1)))
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            aside = self.branch(x)
        here = self.other(x)
        current.wait_stream(self.stream)
        return self.leave(torch.tanh(aside + here))


def _loop(ctx, model, optimizer, forward=None, dtype=torch.float64, amount=120):
    for epoch in ctx.loader(samples(amount, dtype), batch_size=BATCH).epochs(2):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy((forward or model)(x), y).backward()
            optimizer.step()
    return model, optimizer


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def two_streams(ctx):
    model = TwoStreams().double()
    return _loop(ctx, *ctx.prepare(model, _sgd(model)))


def compiled(ctx):
    """By inductor and Triton."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    model, optimizer = ctx.prepare(model, _sgd(model))
    forward = torch.compile(model, dynamic=True)
    return _loop(ctx, model, optimizer, forward, dtype=torch.float32)


def autocast_channels_last(ctx):
    model = Convnet().to(memory_format=torch.channels_last)
    model, optimizer = ctx.prepare(model, _sgd(model))

    def forward(x):
        with torch.autocast("cuda", torch.bfloat16):
            return model(x.to(memory_format=torch.channels_last)).float()

    return _loop(ctx, model, optimizer, forward, dtype=torch.float32)


def all_in_bfloat16(ctx):
    """No bucket of gradients can count samples, so that of the counts lies on the processor."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)).bfloat16()
    model, optimizer = ctx.prepare(model, _sgd(model))
    return _loop(ctx, model, optimizer, dtype=torch.bfloat16)


def grad_scaler(ctx):
    """One step overflows on one worker; all must leave it out, and scale down."""
    model = Convnet()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)
    model, optimizer, scaler = ctx.prepare(model, _sgd(model), scaler)
    for epoch in ctx.loader(samples(120), batch_size=BATCH).epochs(2):
        for x, y in epoch:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(x), y)
            if ctx.step == 2 and bool((x[:, 0, 0, 0] > 1.5).any()):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return model, optimizer, scaler


def graphed_model(ctx):
    """CUDA graphs of the model's forward and backward pass; all batches are of one size."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)).double()
    model, optimizer = ctx.prepare(model, _sgd(model))
    sample = torch.zeros(BATCH // 2, 1, 8, 8, dtype=torch.float64, device=ctx.device)
    forward = torch.cuda.make_graphed_callables(model, (sample,))
    return _loop(ctx, model, optimizer, forward)


def captured_step(ctx):
    """A graph of the whole step would be replayed without what averages gradients."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    model, optimizer = ctx.prepare(model, _sgd(model))
    graph = torch.cuda.CUDAGraph()
    for epoch in ctx.loader(samples(120, torch.float64), batch_size=BATCH).epochs(2):
        for number, (x, y) in enumerate(epoch):
            optimizer.zero_grad()
            if number < 3:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            else:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    F.cross_entropy(model(x), y).backward()
    return model, optimizer


def out_of_memory_caught(ctx):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    model, optimizer = ctx.prepare(model, _sgd(model))

    def forward(x):
        try:
            torch.empty(1 << 44, device=x.device)
        except torch.OutOfMemoryError:
            return model(x)
        raise AssertionError("there was room")

    return _loop(ctx, model, optimizer, forward)


PROGRAMS = {
    one.__name__: one
    for one in (
        two_streams,
        compiled,
        autocast_channels_last,
        all_in_bfloat16,
        grad_scaler,
        graphed_model,
        captured_step,
        out_of_memory_caught,
    )
}


def train(ctx: elastix.Context) -> None:
    """Runs `program`; every worker notes what it ended with."""
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = ctx.config.get("bucket_bytes", 16 << 10)
    model, *rest = PROGRAMS[ctx.config["program"]](ctx)
    others = {str(place): one for place, one in enumerate(rest)}
    log = Path(ctx.config["log"]) / f"{ctx.worker}.jsonl"
    note(log, ctx.step, digest(capture({"": model}, others)))


def broken_device(ctx: elastix.Context) -> None:
    """tests.trainables.train, in which the first GPU of worker 1 writes where it must not."""
    from tests import trainables

    kernel = torch.cuda._compile_kernel(
        'extern "C" __global__ void wild(int* memory) { *(volatile int*)8 = 1; }', "wild"
    )
    memory = torch.zeros(1, dtype=torch.int32, device=ctx.device)

    def look(phase: str, _detail: int) -> None:
        if (ctx.worker, phase, ctx.step) == (1, ctx.config["where"], 3):
            kernel((1, 1, 1), (1, 1, 1), (memory,))
            torch.cuda.synchronize()

    ctx.on_phase(look)
    trainables.train(ctx)
