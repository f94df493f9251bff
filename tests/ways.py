"""Ways to use torch in a train function: the table of the law that none of them ends wrong.

Each way is a small train function in float64 (unless it is about another type) without randomness
after it was built; it returns what its State consists of. `WAYS` says what becomes of it.
"""

import contextlib
import copy
import itertools
import multiprocessing
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import elastix
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.state import capture
from tests.trainables import digest, note

WIDTH, CLASSES = 6, 3
BATCH = 10  # uneven shares for 2 and for 3 workers ...
SAMPLES = 46  # ... and a small last batch


def data(amount=SAMPLES, dtype=torch.float64, seed=7):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(amount, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), (x.sum(1) * 3).long() % CLASSES)


def mlp(*, norm=False):
    layers = [nn.Linear(WIDTH, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES)).double()


def sgd(*modules, rate=0.1):
    parameters = [p for module in modules for p in module.parameters()]
    return torch.optim.SGD(parameters, lr=rate, momentum=0.5)


def batches(ctx, dataset=None, **options):
    for epoch in ctx.loader(dataset or data(), batch_size=BATCH, **options).epochs(2):
        yield from epoch


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def plain(ctx, model, **options):
    """The usual loop around a model."""
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx, **options):
        step(model, optimizer, x, y)
    return model, optimizer


# ------------------------------------------------------------ several backward passes on a batch


def gan(ctx):
    """The generator's output, with batch norm behind it, is used again after the other's step."""
    generator = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))
    generator, critic = generator.double(), critic.double()
    of_generator, of_critic = sgd(generator), sgd(critic)
    ctx.prepare(generator, critic, of_generator, of_critic)
    loss = nn.BCEWithLogitsLoss()
    for x, _ in batches(ctx):
        real, ones, zeros = (
            x[:, :4],
            torch.ones(len(x), 1).double(),
            torch.zeros(len(x), 1).double(),
        )
        of_critic.zero_grad()
        with ctx.accumulate():
            loss(critic(real), ones).backward()
        fake = generator(x)
        loss(critic(fake.detach()), zeros).backward()
        of_critic.step()
        of_generator.zero_grad()
        loss(critic(fake), ones).backward()
        of_generator.step()
    return generator, critic, of_generator, of_critic


def gan_in_three_steps(ctx):
    """As DCGAN has it: the critic's two backward passes are steps, since nobody accumulates."""
    generator = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    generator, critic = generator.double(), critic.double()
    of_generator, of_critic = sgd(generator), sgd(critic)
    ctx.prepare(generator, critic, of_generator, of_critic)
    for x, _ in batches(ctx):
        of_critic.zero_grad()
        F.softplus(-critic(x[:, :4])).mean().backward()
        fake = generator(x)
        F.softplus(critic(fake.detach())).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        of_generator.step()
    return generator, critic, of_generator, of_critic


def wgan_gp(ctx):
    """Three critic steps on a batch, each with a penalty on the norm of a gradient."""
    generator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()
    critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    of_generator, of_critic = sgd(generator, rate=0.01), sgd(critic, rate=0.01)
    ctx.prepare(generator, critic, of_generator, of_critic)
    for x, _ in batches(ctx):
        for round_ in range(3):
            fake = generator(x).detach()
            between = (x + (round_ + 1) / 4 * (fake - x)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
            of_critic.zero_grad()
            (critic(fake).mean() - critic(x).mean() + 10 * penalty).backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(x)).mean()).backward()
        of_generator.step()
    return generator, critic, of_generator, of_critic


def ppo(ctx):
    """Four epochs on each batch, with a clipped ratio."""
    policy = mlp()
    policy, optimizer = ctx.prepare(policy, torch.optim.Adam(policy.parameters(), lr=1e-2))
    for x, y in batches(ctx):
        with torch.no_grad():
            old = F.log_softmax(policy(x), 1).gather(1, y[:, None])
        for _ in range(4):
            ratio = (F.log_softmax(policy(x), 1).gather(1, y[:, None]) - old).exp()
            advantage = x.sum(1, keepdim=True) - 3
            better = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            optimizer.zero_grad()
            (-better.mean()).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    return policy, optimizer


def lbfgs(ctx, search=None):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, line_search_fn=search)
    model, optimizer = ctx.prepare(model, optimizer)
    for x, y in batches(ctx):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return model, optimizer


def lbfgs_with_line_search(ctx):
    """The line search decides by the loss: by that of the group."""
    return lbfgs(ctx, "strong_wolfe")


def accumulation(ctx):
    """Each share in two pieces, for want of memory; one may be empty."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        optimizer.zero_grad()
        half = len(x) // 2
        with ctx.accumulate():
            (F.cross_entropy(model(x[:half]), y[:half], reduction="sum") / len(x)).backward()
        (F.cross_entropy(model(x[half:]), y[half:], reduction="sum") / len(x)).backward()
        optimizer.step()
    return model, optimizer


# ------------------------------------------------------------ loaders


def two_loaders_in_turn(ctx, *, norm=False):
    """Labelled and unlabelled batches of unlike sizes, one step for both."""
    model = mlp(norm=norm)
    model, optimizer = ctx.prepare(model, sgd(model))
    some, many = ctx.loader(data(20), batch_size=4), ctx.loader(data(80, seed=8), batch_size=15)
    for one, other in zip(some.epochs(2), many.epochs(2), strict=False):
        for (x, y), (u, _) in zip(one, other, strict=False):
            soft = F.softmax(model(u), 1)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) - (soft * soft.log()).sum(1).mean()).backward()
            optimizer.step()
    return model, optimizer


def two_loaders_with_norm(ctx):
    """Of three workers the last has no labelled samples; its buffers count for the others."""
    return two_loaders_in_turn(ctx, norm=True)


def two_loaders_in_sequence(ctx):
    """The last batch of the first is of one sample a worker and less; the other's is not."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    first, second = ctx.loader(data(22), batch_size=20), ctx.loader(data(40, seed=8), batch_size=9)
    for loader in (first, second):
        for epoch in loader.epochs(1):
            for x, y in epoch:
                step(model, optimizer, x, y)
                step(model, optimizer, x, y)
    return model, optimizer


def loader_processes(ctx):
    multiprocessing.current_process()._config["daemon"] = False  # else it must not have children
    return plain(ctx, mlp(norm=True), num_workers=1)


# ------------------------------------------------------------ several batches to a step


def two_sizes_in_one_loss(ctx):
    """15 and 4 samples cannot be split over two or three workers in one ratio."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    many, few = ctx.loader(data(52), batch_size=15), ctx.loader(data(17, seed=8), batch_size=4)
    for one, other in zip(many.epochs(2), few.epochs(2), strict=False):
        for (x, y), (u, v) in zip(one, other, strict=False):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + F.cross_entropy(model(u), v)).backward()
            optimizer.step()
    return model, optimizer


def two_sizes_in_turn(ctx):
    """A pass for each, as accumulation; the second of some has no sample for the last worker."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    many, few = ctx.loader(data(52), batch_size=15), ctx.loader(data(17, seed=8), batch_size=4)
    for one, other in zip(many.epochs(2), few.epochs(2), strict=False):
        others = iter(other)
        for x, y in one:
            optimizer.zero_grad()
            with ctx.accumulate():
                F.cross_entropy(model(x), y).backward()
            u, v = next(others, (None, None))
            if u is None:
                u, v = x, y
            F.cross_entropy(model(u), v).backward()
            optimizer.step()
    return model, optimizer


def alternating_accumulation(ctx, *, norm=False):
    """Up to five passes for a step, of batches of 15, 6, 15 and 4; then one about none of them."""
    model = mlp(norm=norm)
    model, optimizer = ctx.prepare(model, sgd(model, rate=0.03))
    many, few = ctx.loader(data(60), batch_size=15), ctx.loader(data(16, seed=8), batch_size=6)
    single = ctx.loader(data(4, seed=9), batch_size=8)
    for epochs in zip(*(loader.epochs(2) for loader in (many, few, single)), strict=False):
        parts = [iter(epoch) for epoch in epochs]
        while len(epochs[0]):
            optimizer.zero_grad()
            for part in (parts[0], parts[1], parts[0]):
                for x, y in itertools.islice(part, 1):
                    with ctx.accumulate():
                        F.cross_entropy(model(x), y).backward()
            for x, y in itertools.islice(parts[2], 1):
                with ctx.accumulate():
                    F.cross_entropy(model(x), y).backward()
            (0.01 * sum(p.pow(2).sum() for p in model.parameters())).backward()
            optimizer.step()
    return model, optimizer


def alternating_accumulation_with_norm(ctx):
    return alternating_accumulation(ctx, norm=True)


def accumulation_over_a_short_batch(ctx):
    """An epoch's last step is of two batches, the last of 3 samples; some have none of it."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for epoch in ctx.loader(data(43), batch_size=BATCH).epochs(2):
        optimizer.zero_grad()
        for number, (x, y) in enumerate(epoch):
            last = (number % 2 == 1 and len(epoch) != 1) or len(epoch) == 0
            with contextlib.nullcontext() if last else ctx.accumulate():
                F.cross_entropy(model(x), y).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer


def accumulation_with_grad_scaler(ctx):
    """Three batches to a step, the last short; one step overflows, in its first batch."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    model, optimizer, scaler = ctx.prepare(model, sgd(model), scaler)
    for epoch in ctx.loader(data(43), batch_size=BATCH).epochs(3):
        for number, (x, y) in enumerate(epoch):
            last = (number % 3 == 2 and len(epoch) > 1) or len(epoch) == 0
            loss = F.cross_entropy(model(x), y) / 3
            if ctx.step == 2 and number % 3 == 0:
                loss = loss * float("inf")
            with contextlib.nullcontext() if last else ctx.accumulate():
                scaler.scale(loss).backward()
            if last:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return model, optimizer, scaler


def single_samples(ctx):
    """Batches of 4 and then of 1 sample, in one step: no way to share out the second."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    some, one = ctx.loader(data(24), batch_size=4), ctx.loader(data(9, seed=8), batch_size=8)
    for epoch, other in zip(some.epochs(2), one.epochs(2), strict=False):
        others = iter(other)
        for x, y in epoch:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            for u, v in itertools.islice(others, 1):
                loss = loss + F.cross_entropy(model(u), v)
            loss.backward()
            optimizer.step()
    return model, optimizer


def batches_in_advance(ctx):
    """Three batches are drawn before the first pass, and each has its own; the last is short."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for epoch in ctx.loader(data(), batch_size=BATCH).epochs(3):
        rest = iter(epoch)
        while ahead := list(itertools.islice(rest, 3)):
            optimizer.zero_grad()
            for x, y in ahead[:-1]:
                with ctx.accumulate():
                    F.cross_entropy(model(x), y).backward()
            x, y = ahead[-1]
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model, optimizer


def ppo_over_several_batches(ctx):
    """Three epochs, with a step for each batch, over what was drawn in advance."""
    policy = mlp()
    policy, optimizer = ctx.prepare(policy, torch.optim.Adam(policy.parameters(), lr=1e-2))
    for epoch in ctx.loader(data(43), batch_size=BATCH).epochs(2):
        rest = iter(epoch)
        while ahead := list(itertools.islice(rest, 2)):
            for x, y in ahead * 3:
                step(policy, optimizer, x, y)
    return policy, optimizer


def zeroed_in_between(ctx):
    """What was accumulated is dropped again, in either way, after batches of other sizes."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    many, few = ctx.loader(data(60), batch_size=15), ctx.loader(data(26, seed=8), batch_size=4)
    for one, other in zip(many.epochs(2), few.epochs(2), strict=False):
        others = iter(other)
        for number, (x, y) in enumerate(one):
            for a, b in ((x, y), *itertools.islice(others, 1)):
                with ctx.accumulate():
                    F.cross_entropy(model(a), b).backward()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            for u, v in itertools.islice(others, 1):
                with ctx.accumulate():
                    F.cross_entropy(model(u), v).backward()
            F.cross_entropy(model(x[:1]), y[:1]).mul(0).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


# ------------------------------------------------------------ what happens around autograd


class Twice(nn.Module):
    """A layer in two checkpointed segments, a checkpointed batch norm, and a head outside."""

    def __init__(self, reentrant):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.reentrant = reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self._segment, x, use_reentrant=self.reentrant)
        return self.head(x)

    def _segment(self, x):
        return torch.tanh(self.norm(self.body(x)))


class Whole(Twice):
    """Every layer in a segment of its own; nothing outside, and one segment within another."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        x = checkpoint(self._outer, x, use_reentrant=self.reentrant)
        return checkpoint(self.head, x, use_reentrant=self.reentrant)

    def _outer(self, x):
        return checkpoint(self._segment, x, use_reentrant=self.reentrant)


class Silent(nn.Module):
    """Batch norm without a count of batches: nothing tells that its statistics have moved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.variance, training=True)


class Sometimes(Twice):
    """Checkpointed where a worker's samples have a certain sum: on some workers, in some steps."""

    def __init__(self, norm):
        super().__init__(reentrant=False)
        self.norm = norm

    def forward(self, x):
        x = x.clone().requires_grad_()
        chosen = int(1e3 * x.sum()) % 2
        x = checkpoint(self._segment, x, use_reentrant=False) if chosen else self._segment(x)
        return self.head(x)


class Lowest(nn.Module):
    """Observers of quantization begin like this: what is infinite has no change to add up."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("lowest", torch.full((WIDTH,), torch.inf))
        self.register_buffer("unknown", torch.full((), torch.nan))

    def forward(self, x):
        self.lowest = torch.minimum(self.lowest, x.detach().amin(0))
        if self.unknown.isnan():
            self.unknown.copy_(x.mean())
        return self.linear(x - self.lowest) * self.unknown


def lowest_seen(ctx):
    return plain(ctx, Lowest().double())


def lowest_seen_in_slices(ctx):
    model = Lowest().double()
    model, optimizer = ctx.prepare(model, sgd(model))
    for one in batches(ctx, slices=5):
        optimizer.zero_grad()
        for x, y in one:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def norm_moved_in_backward(ctx):
    """By a hook, where no version tells of it, when buffers have been sent already."""
    model = mlp(norm=True)
    mean = model[1].running_mean.data

    def move(gradient):
        mean.add_(gradient.sum(1), alpha=0.1)

    model[0].weight.register_hook(move)
    return plain(ctx, model)


class Late(nn.Module):
    """Its running mean is registered by the first forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0), persistent=False)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x - self.mean)


def buffer_registered_late(ctx):
    return plain(ctx, Late().double())


def checkpointing_sometimes(ctx):
    return plain(ctx, Sometimes(nn.BatchNorm1d(WIDTH)).double())


def checkpointing_sometimes_in_silence(ctx):
    return plain(ctx, Sometimes(Silent()).double())


def checkpointing(ctx):
    return plain(ctx, Twice(reentrant=False).double())


def checkpointing_reentrant(ctx):
    return plain(ctx, Twice(reentrant=True).double())


def checkpointing_whole_reentrant(ctx):
    return plain(ctx, Whole(reentrant=True).double())


class Before(nn.Module):
    """A layer is used in a checkpoint and before it, so its gradient comes in two pieces."""

    def __init__(self, *, first):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if first else nn.Identity()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, *, checkpointed):
        x = self._segment(self.first(x))
        x = checkpoint(self._segment, x, use_reentrant=True) if checkpointed else self._segment(x)
        return self.head(x)

    def _segment(self, x):
        return torch.tanh(self.body(x))


def _checkpointing_later(ctx, model):
    """That passes nest is seen when the first pieces have been copied, and perhaps sent."""
    model, optimizer = ctx.prepare(model, sgd(model))
    for number, (x, y) in enumerate(batches(ctx)):
        optimizer.zero_grad()
        F.cross_entropy(model(x, checkpointed=number > 0), y).backward()
        optimizer.step()
    return model, optimizer


def checkpointing_later(ctx):
    """Other gradients of the bucket come after both pieces."""
    return _checkpointing_later(ctx, Before(first=True).double())


def checkpointing_later_in_a_full_bucket(ctx):
    """It is sent with the first piece."""
    return _checkpointing_later(ctx, Before(first=False).double())


def compiled(ctx):
    """AOT autograd without a C++ compiler behind it."""
    model = mlp(norm=True)
    fast = torch.compile(model, backend="aot_eager")
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        step(fast, optimizer, x, y)
    return model, optimizer


def autocast(ctx):
    model = mlp().float()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx, data(dtype=torch.float32)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return model, optimizer


def grad_scaler(ctx):
    """Two steps overflow, on one worker only; all must leave them out, and scale down."""
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    model, optimizer, scaler = ctx.prepare(model, sgd(model), scaler)
    for x, y in batches(ctx):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if ctx.step in (2, 5) and bool((x[:, 0] > 0.9).any()):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return model, optimizer, scaler


class Failing(torch.autograd.Function):
    """Fails in backward, as a lack of memory does."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise RuntimeError("out of memory, says the test")
        return gradient, None


def exception_in_backward(ctx):
    """Everybody leaves the batch out, as some libraries do; the step had begun, though."""
    first, second = nn.Linear(WIDTH, 8).double(), nn.Linear(8, CLASSES).double()
    model, optimizer = ctx.prepare(nn.ModuleList([first, second]), sgd(first, second))
    for x, y in batches(ctx):
        optimizer.zero_grad()
        try:
            F.cross_entropy(second(Failing.apply(first(x), ctx.step == 3)), y).backward()
        except RuntimeError:
            continue
        optimizer.step()
    return model, optimizer


def exception_in_backward_then_again(ctx):
    """The same batch is tried again at once."""
    first, second = nn.Linear(WIDTH, 8).double(), nn.Linear(8, CLASSES).double()
    model, optimizer = ctx.prepare(nn.ModuleList([first, second]), sgd(first, second))
    for x, y in batches(ctx):
        for fails in (ctx.step == 3, False):
            optimizer.zero_grad()
            with contextlib.suppress(RuntimeError):
                F.cross_entropy(second(Failing.apply(first(x), fails)), y).backward()
                break
        optimizer.step()
    return model, optimizer


def exception_in_forward(ctx):
    """Everybody leaves the same batch out; what was drawn counts as used."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    skipped = False
    for x, y in batches(ctx, data(40)):
        if ctx.step == 3 and not skipped:
            skipped = True
            continue
        step(model, optimizer, x, y)
    return model, optimizer


def one_worker_skips(ctx):
    """Only one of them does: from there on cursors would part."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    skipped = False
    for x, y in batches(ctx):
        if ctx.step == 3 and ctx.rank == 0 and not skipped:
            skipped = True
            continue
        step(model, optimizer, x, y)
    return model, optimizer


# ------------------------------------------------------------ parameters and their gradients


def freezing_after_prepare(ctx):
    """Gradual unfreezing as it works: prepared whole, frozen after it, by the number of steps."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        for parameter in model[0].parameters():
            parameter.requires_grad_(ctx.step >= 4)
        step(model, optimizer, x, y)
    return model, optimizer


def frozen_on_one_worker(ctx):
    """As in one that joined after the others had unfrozen it, in an epoch that is behind."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        model[0].requires_grad_(ctx.step < 3 or ctx.worker == 0)
        step(model, optimizer, x, y)
    return model, optimizer


def without_elements(ctx):
    model = nn.Linear(WIDTH, CLASSES, device="meta")
    ctx.prepare(model, sgd(model))
    raise AssertionError("prepared")


def expanded(ctx):
    """A constant that is one number in memory, which torch cannot load from a state_dict."""
    model = mlp()
    model.register_buffer("scale", torch.ones(1).double().expand(WIDTH))
    return plain(ctx, model)


def unfreezing(ctx):
    """What was frozen at prepare is trained later."""
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        model[0].requires_grad_(ctx.step >= 4)
        step(model, optimizer, x, y)
    return model, optimizer


def layer_added(ctx):
    """A layer that was not there at prepare is trained."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    model.append(nn.Linear(CLASSES, CLASSES).double())
    optimizer.add_param_group({"params": list(model[-1].parameters())})
    for x, y in batches(ctx):
        step(model, optimizer, x, y)
    return model, optimizer


def group_added(ctx):
    """A joiner's optimizer has one group when it is given the State."""
    model = mlp()
    optimizer = torch.optim.SGD(model[-1].parameters(), 0.1)
    ctx.prepare(model, optimizer)
    for number, (x, y) in enumerate(batches(ctx)):
        if number == 2:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        step(model, optimizer, x, y)
        model.zero_grad()
    return model, optimizer


def gradient_surgery(ctx):
    """Two tasks; the gradient of the first is kept by reference, and projected."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first = [p.grad for p in model.parameters()]
        flat = first[0].view(-1)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        second = [p.grad.detach() for p in model.parameters()]
        along = sum((a * b).sum() for a, b in zip(first, second, strict=True)) + flat[0]
        optimizer.zero_grad()
        (0.1 * model(x).abs().mean()).backward()
        for parameter, a, b in zip(model.parameters(), first, second, strict=True):
            parameter.grad = parameter.grad + a - 0.1 * along * b
        optimizer.step()
    return model, optimizer


def moving_average(ctx):
    """Of the weights, written by `.data` into a module that is prepared and never trained."""
    model, average = mlp(), mlp()
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    model, average, optimizer = ctx.prepare(model, average, sgd(model))
    for x, y in batches(ctx):
        step(model, optimizer, x, y)
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    return model, average, optimizer


def weight_norm(ctx):
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, 8)), nn.Linear(8, CLASSES))
    return plain(ctx, model.double())


def spectral_norm(ctx):
    """Its power iteration changes buffers in every forward pass."""
    critic = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(WIDTH, 8)),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    ).double()
    critic, optimizer = ctx.prepare(critic, sgd(critic))
    for x, y in batches(ctx):
        step(critic, optimizer, x, y)
        step(critic, optimizer, x, y)
    return critic, optimizer


class Packed(nn.Module):
    """An LSTM over sequences of unlike lengths."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        lengths = (x[:, 0] * WIDTH).long().clamp(1, WIDTH)
        packed = pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


def packed_lstm(ctx):
    return plain(ctx, Packed().double())


class Mixture(nn.Module):
    """Each sample goes to one of four experts; one never gets any, others not on every worker."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

    def forward(self, x):
        which = (x[:, 0] * 3).long()
        out = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            mine = which == number
            if mine.any():
                out = out.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return out


def mixture(ctx):
    model = Mixture().double()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for x, y in batches(ctx):
        step(model, optimizer, x, y)
    return model, optimizer


class Words(nn.Module):
    """An embedding, and a head that may share its weights."""

    def __init__(self, *, sparse=False, tied=False):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH, sparse=sparse)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embed((x * 20).long()).mean(1))))


def tied_embeddings(ctx):
    return plain(ctx, Words(tied=True).double())


def sparse_embeddings(ctx):
    model = Words(sparse=True).double()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(ctx):
        step(model, optimizer, x, y)
    return model, optimizer


def sparse_adam(ctx):
    model = Words(sparse=True).double()
    sparse = torch.optim.SparseAdam(model.embed.parameters(), lr=0.01)
    ctx.prepare(model, sparse, sgd(model.body, model.head))
    raise AssertionError("prepared")


class Constants(nn.Module):
    """Buffers of types that backends do not reduce by themselves; one is used in two graphs."""

    def __init__(self, strange=False):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("table", torch.arange(CLASSES, dtype=torch.int16))
        self.register_buffer("mask", torch.tensor([True, True, True]))
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.ones(3)))
        self.register_buffer("scale", torch.linspace(1, 2, CLASSES))
        for dtype in (torch.uint16, torch.uint32):
            self.register_buffer(f"most_{dtype.itemsize}", torch.zeros(2, dtype=dtype))
        self.register_buffer("left", torch.full((2,), 99))
        self.register_buffer("fresh", torch.ones((), dtype=torch.bool))
        if strange:
            self.register_buffer("bits", torch.zeros(2, dtype=torch.uint64))

    def forward(self, x):
        if self.training:
            for most in (self.most_2, self.most_4):
                most.copy_(torch.maximum(most.long(), (1000 * x.max()).long()))
            self.left -= 1
            self.fresh.fill_(False)
        return (self.linear(x) * self.scale + self.table)[:, self.mask]


def odd_buffers(ctx):
    """A graph is used again after a step, and a buffer that nobody changes stands in it."""
    model = Constants().double()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward(retain_graph=True)
        (0.1 * out.pow(2).mean()).backward()
        optimizer.step()
    return model, optimizer


def odd_buffers_in_slices(ctx):
    model = Constants().double()
    model, optimizer = ctx.prepare(model, sgd(model))
    for slices in batches(ctx, slices=5):
        optimizer.zero_grad()
        for x, y in slices:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def impossible_buffer(ctx):
    model = Constants(strange=True)
    ctx.prepare(model, sgd(model))
    raise AssertionError("prepared")


def never_outside_of_accumulate(ctx):
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        with ctx.accumulate():
            F.cross_entropy(model(x), y).backward()
    return model, optimizer


def zeroed_in_place(ctx):
    """In each step in another way, some of which torch keeps no count of; then two passes."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    ways = (
        lambda _gradient: optimizer.zero_grad(set_to_none=False),
        lambda gradient: gradient.data.zero_(),
        lambda gradient: gradient.zero_(),
        lambda gradient: gradient.mul_(0),
        lambda gradient: gradient.copy_(torch.zeros_like(gradient)),
    )
    first = True
    for epoch in ctx.loader(data(), batch_size=BATCH).epochs(2):
        for x, y in epoch:
            for parameter in model.parameters() if first else ():
                if parameter.grad is not None:
                    ways[ctx.step % len(ways)](parameter.grad)
            more = first and len(epoch) > 0
            with ctx.accumulate() if more else contextlib.nullcontext():
                F.cross_entropy(model(x), y).backward()
            if not more:
                optimizer.step()
            first = not more
    return model, optimizer


def added_up_step_by_step(ctx):
    """Two batches, each with a step of its own, for one step of the optimizer."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        F.cross_entropy(model(x), y).backward()
        if ctx.step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def added_up_over_slices(ctx):
    """As before, each batch in slices."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for one in batches(ctx, slices=2):
        for x, y in one:
            F.cross_entropy(model(x), y).backward()
        if ctx.step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def clipped_in_between(ctx):
    """Each worker would clip what it has of the first batch by a norm of its own."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for number, (x, y) in enumerate(batches(ctx)):
        with ctx.accumulate() if number % 2 == 0 else contextlib.nullcontext():
            F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def clipped_within(ctx):
    """As before, without another batch."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        optimizer.zero_grad()
        with ctx.accumulate():
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer


# ------------------------------------------------------------------- gradients from elsewhere


def _halve(parameter):
    parameter.grad.mul_(0.5)


def _put_half(parameter):
    parameter.grad = parameter.grad * 0.5


def _hooked(ctx, hook, *, late, **options):
    model = mlp()
    optimizer = sgd(model)
    if late:
        ctx.prepare(model, optimizer)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    if not late:
        ctx.prepare(model, optimizer)
    for one in batches(ctx, **options):
        optimizer.zero_grad()
        for x, y in one if "slices" in options else [one]:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def hook_before_prepare(ctx):
    return _hooked(ctx, _halve, late=False)


def hook_after_prepare(ctx):
    """It is called after the one of elastix."""
    return _hooked(ctx, _halve, late=True)


def hook_that_replaces(ctx):
    return _hooked(ctx, _put_half, late=True)


def hook_on_sums(ctx):
    """What it halves is the sum over the slices so far."""
    return _hooked(ctx, _halve, late=False, slices=5)


def hook_that_replaces_sums(ctx):
    return _hooked(ctx, _put_half, late=True, slices=5)


def hook_that_steps(ctx):
    """An optimizer in the backward pass, which saves the memory of gradients."""
    model = mlp()
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}
    ctx.prepare(model, *optimizers.values())
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, of=optimizer: of.step())
    for x, y in batches(ctx):
        F.cross_entropy(model(x), y).backward()
        model.zero_grad()
    return (model,)


def gradients_by_hand(ctx):
    """No backward pass tells of them."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        _put_gradients(model, x, y)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def gradients_by_hand_within_backward(ctx):
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        with ctx.backward():
            _put_gradients(model, x, y)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _put_gradients(model, x, y):
    own = list(model.parameters())
    for parameter, gradient in zip(
        own, torch.autograd.grad(F.cross_entropy(model(x), y), own), strict=True
    ):
        parameter.grad = gradient


def step_on_what_was_added_up(ctx):
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    for x, y in batches(ctx):
        with ctx.accumulate():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        F.cross_entropy(model(x), y).backward()
        optimizer.zero_grad()
    return model, optimizer


def copy_trained(ctx):
    """Of the prepared model, with an optimizer of its own."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    other = copy.deepcopy(model)
    own = sgd(other)
    for x, y in batches(ctx):
        step(other, own, x, y)
    return model, optimizer


def drawn_in_a_thread(ctx):
    """To have the next batch ready; there the error stays, and training goes on."""
    model = mlp()
    model, optimizer = ctx.prepare(model, sgd(model))
    ready = queue.Queue()

    def draw():
        try:
            for batch in batches(ctx):
                ready.put(batch)
        finally:
            ready.put(None)

    threading.Thread(target=draw, daemon=True).start()
    while (batch := ready.get()) is not None:
        step(model, optimizer, *batch)
    return model, optimizer


class Waves(nn.Module):
    """Its parameters are complex."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, 8, dtype=torch.complex128))
        self.last = nn.Parameter(torch.randn(8, CLASSES, dtype=torch.complex128))

    def forward(self, x):
        return (torch.tanh((x.to(torch.complex128) @ self.first).real) * (1 + 1j) @ self.last).abs()


def other_default_device(ctx):
    """As with torch.set_default_device("cuda"), which no tensor of elastix's own goes by."""
    model, dataset = mlp(), data()
    with torch.device("meta"):
        return plain(ctx, model, dataset=dataset)


def complex_parameters(ctx):
    return plain(ctx, Waves())


@dataclass(frozen=True)
class Way:
    """What becomes of one.

    Attributes:
        train: the function.
        advice: what the error says, if it is refused; empty if it works.
        tolerance: relative, of the largest difference to plain torch on the same batches.
        seldom: too slow for the fast suite.
        places: where kills may be placed.
        most: workers with which it can be tried.
        whole: when plain torch on whole batches ends with the same weights: "always"; "undisturbed"
            if it goes on with a batch after a share of it was lost; "never" with batch norm.
    """

    train: Callable[[elastix.Context], Any]
    advice: str = ""
    tolerance: float = 1e-9
    seldom: bool = False
    places: tuple[str, ...] = ("batch", "bucket", "filled", "round", "left", "boundary")
    most: int = 4
    whole: str = "always"

    @property
    def name(self) -> str:
        return self.train.__name__


_ADD_UP = "within ctx.accumulate()"
_CLIP = "after the last backward pass"
_CATCH = "Let the exception through"
_UNFREEZE = "freeze after ctx.prepare"

WAYS = {
    way.name: way
    for way in itertools.chain(
        (
            Way(way, whole="never")
            for way in (
                gan,
                gan_in_three_steps,
                alternating_accumulation_with_norm,
                loader_processes,
                checkpointing,
                checkpointing_reentrant,
                checkpointing_sometimes,
                checkpointing_sometimes_in_silence,
                checkpointing_whole_reentrant,
                lowest_seen,
                lowest_seen_in_slices,
                norm_moved_in_backward,
            )
        ),
        (
            Way(way, whole="undisturbed")
            for way in (
                wgan_gp,
                ppo,
                ppo_over_several_batches,
                lbfgs,
                two_loaders_in_sequence,
                gradient_surgery,
                spectral_norm,
                odd_buffers,
                odd_buffers_in_slices,
            )
        ),
        map(
            Way,
            (
                accumulation,
                two_loaders_in_turn,
                two_sizes_in_one_loss,
                two_sizes_in_turn,
                alternating_accumulation,
                accumulation_over_a_short_batch,
                accumulation_with_grad_scaler,
                single_samples,
                batches_in_advance,
                zeroed_in_between,
                zeroed_in_place,
                grad_scaler,
                exception_in_forward,
                freezing_after_prepare,
                checkpointing_later,
                moving_average,
                weight_norm,
                packed_lstm,
                mixture,
                tied_embeddings,
                sparse_embeddings,
                hook_before_prepare,
                hook_after_prepare,
                hook_that_replaces,
                gradients_by_hand_within_backward,
                complex_parameters,
                other_default_device,
            ),
        ),
        (
            Way(two_loaders_with_norm, most=3, whole="never"),  # four would have one sample each
            Way(compiled, seldom=True, whole="never"),  # importing and tracing takes seconds
            # The line search goes by the loss of those who are left: a worker that dies between
            # the round of a step and that of its loss is in the one and not in the other.
            Way(
                lbfgs_with_line_search,
                places=("batch", "bucket", "boundary"),
                whole="undisturbed",
            ),
            # Rounding to bfloat16 is not continuous: a difference in the last bit of a float32
            # sum may become one of 2^-8 in an activation.
            Way(autocast, tolerance=2e-2),
            Way(checkpointing_later_in_a_full_bucket, "checkpoint from the first step on"),
            Way(exception_in_backward, _CATCH),
            Way(exception_in_backward_then_again, _CATCH),
            Way(added_up_step_by_step, _ADD_UP),
            Way(added_up_over_slices, _ADD_UP),
            Way(never_outside_of_accumulate, "never took a step"),
            Way(clipped_in_between, _CLIP),
            Way(clipped_within, _CLIP),
            Way(one_worker_skips, "every worker takes the same batches"),
            Way(unfreezing, _UNFREEZE),
            Way(frozen_on_one_worker, "did not train the same parameters in step 4"),
            Way(layer_added, _UNFREEZE),
            Way(group_added, "Give it all groups before"),
            Way(sparse_adam, "sparse=False"),
            Way(hook_on_sums, "changed or dropped within the loop"),
            Way(hook_that_replaces_sums, "changed or dropped within the loop"),
            Way(hook_that_steps, "a hook on a gradient took the step"),
            Way(gradients_by_hand, "within `with ctx.backward():`"),
            Way(step_on_what_was_added_up, "no backward pass outside of ctx.accumulate()"),
            Way(drawn_in_a_thread, "in another thread than ctx.prepare"),
            Way(copy_trained, "a copy that is made of one later"),
            Way(buffer_registered_late, "Register buffers before ctx.prepare"),
            Way(without_elements, "to_empty"),
            Way(expanded, "tensor.clone()"),
            Way(impossible_buffer, "Keep it in another type"),
        ),
    )
}


@dataclass(frozen=True)
class Noted:
    """The train function of a way; every worker notes what it ended with.

    Attributes:
        at_once: a bucket of gradients is filled when the last of them has come, as on a GPU.
        threaded: it prepares and trains in another thread than the one that it is called in.
    """

    name: str
    at_once: bool = False
    threaded: bool = False

    def __call__(self, ctx: elastix.Context) -> None:
        if self.at_once:
            GradientBucket.at_once = ("cpu",)
        train = WAYS[self.name].train
        if self.threaded:
            with ThreadPoolExecutor(1) as threads:
                found = threads.submit(train, ctx).result()
        else:
            found = train(ctx)
        objects = dict(enumerate(found))
        modules = {f"{n}/": o for n, o in objects.items() if isinstance(o, nn.Module)}
        others = {str(n): o for n, o in objects.items() if not isinstance(o, nn.Module)}
        log = Path(ctx.config["log"]) / f"{ctx.worker}.jsonl"
        note(log, ctx.step, digest(capture(modules, others)))
