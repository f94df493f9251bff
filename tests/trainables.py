"""Train functions for the tests, and what they write down about themselves."""

import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import nn
from torch.utils.data import TensorDataset

import elastix
from elastix.comm.gradients import buckets
from elastix.state import State, capture, raw_bytes
from elastix.train.replica.sliced_step import Slices


class Convnet(nn.Module):
    """Batch norm: buffers of both kinds.

    No bias before it: its gradient is zero but for rounding, and Adam makes steps of that.
    """

    def __init__(self, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.flatten(1))


class Tied(nn.Module):
    """A small transformer whose output layer shares the embedding."""

    def __init__(self, vocabulary=40, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        tokens = (x.flatten(1)[:, ::4] * 16).long()
        return self.out(self.block(self.embed(tokens)).mean(1))[:, :10]


class Unused(nn.Module):
    """One branch is never used, another only for some samples, so only on some ranks."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.never = nn.Linear(32, 32)
        self.sometimes = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        h = torch.relu(self.body(x.flatten(1)))
        if bool((x[:, 0, 0, 0] > 1.5).any()):
            h = h + self.sometimes(h)
        return self.head(h)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def wide_mlp(width=256):
    """Three buckets, if they are closed at 256 KiB and parameters are float64."""
    layers = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
    layers += [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


MODELS = {"convnet": Convnet, "tied": Tied, "unused": Unused, "mlp": mlp, "wide": wide_mlp}


def samples(amount, dtype=torch.float32):
    """A dataset of 8 x 8 images with 10 classes that depend on them."""
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(amount, 1, 8, 8, generator=generator, dtype=torch.float64)
    x[::9, 0, 0, 0] = 2.0
    y = (x.sum((1, 2, 3)) * 3).long() % 10
    return TensorDataset(x.to(dtype), y)


def make(config):
    """Model, optimizer and dataset of a configuration."""
    dtype = getattr(torch, config.get("dtype", "float64"))
    model = MODELS[config.get("model", "convnet")]().to(dtype)
    chosen = config.get("optimizer", "adamw")
    if chosen == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    elif chosen == "nadam":
        optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, samples(config.get("samples", 240), dtype)


def accuracy(model, batch):
    x, y = batch
    return (model(x).argmax(1) == y).double().mean()


def digest(state: State) -> str:
    """Over every bit of a State but its random numbers, which differ by design."""
    text = blake3()
    for name in sorted(state.tensors):
        if not name.startswith("@rng"):
            text.update(name.encode())
            text.update(raw_bytes(state.tensors[name]).numpy().data)
    return text.hexdigest()


def train(ctx: elastix.Context) -> None:
    """The loop that the chaos tests run; every worker notes its digest after every step."""
    config = ctx.config
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = config.get("bucket_bytes", 256 << 10)
    model, optimizer, dataset = make(config)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    meeting = Path(config["meeting"]) if "meeting" in config else None
    hold = shadow_hold(ctx)
    if meeting is not None:  # ready to be let in
        ctx.on_phase(lambda name, _: name == "wait" and (meeting / str(ctx.worker)).touch())
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    follow = "rate" in config
    loader = ctx.loader(
        dataset,
        batch_size=config.get("batch_size", 30),
        per_worker=follow,
        num_workers=config.get("num_workers", 0),
    )
    if follow:
        ctx.scale_rate(optimizer, reference=2, rule=config["rate"], warmup_steps=5)
    every = config.get("accumulate", 1)
    log = Path(config["log"]) / f"{ctx.worker}.jsonl" if "log" in config else None
    for epoch in loader.epochs(config.get("epochs", 2)):
        for number, (x, y) in enumerate(epoch):
            time.sleep(config.get("step_s", 0))
            if ctx.worker == config.get("slow_worker"):
                time.sleep(config["slow_s"])
            last = len(epoch) == 0 or (number + 1) % every == 0
            with nullcontext() if last else ctx.accumulate():
                (F.cross_entropy(model(x), y) / every).backward()
            if not last:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if "hold_step" in config and ctx.step == config["hold_step"]:
                await_worker(meeting / str(config["hold_for"]))
            usher_all(ctx)
            await_leavers(ctx)
            hold()
            if log is not None:
                others = {"optimizer": optimizer, "scheduler": scheduler}
                note(log, ctx.step, digest(capture({"": model}, others)))
        ctx.report(**ctx.evaluate(accuracy, dataset, batch_size=64))


def sliced(ctx: elastix.Context) -> None:
    """The loop in slices; workers have equal shares unless it is `by_speed`."""
    config = ctx.config
    if not config.get("by_speed"):  # else who is killed at a slice might have none
        Slices.measured = lambda *_: None
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = 256 << 10
    model, optimizer, dataset = make(config)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    loader = ctx.loader(
        dataset,
        batch_size=config["batch_size"],
        slices=config["slices"],
        num_workers=config.get("num_workers", 0),
    )
    log = Path(config["log"]) / f"{ctx.worker}.jsonl"
    batch = 0
    for epoch in loader.epochs(config["epochs"]):
        for step in epoch:
            samples = 0
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                if (batch, ctx.worker) == config.get("infinite"):
                    loss = loss * math.inf
                loss.backward()
                for _ in range(1, config.get("passes", 1)):
                    F.cross_entropy(model(x), y).backward()
                samples += len(x)
                time.sleep((config.get("by_speed") or {}).get(str(ctx.worker), 0))
            batch += 1
            if config.get("means"):
                ctx.report(**ctx.mean(samples=samples))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            others = {"optimizer": optimizer, "scheduler": scheduler}
            note(log, ctx.step, digest(capture({"": model}, others)))
            usher_all(ctx)
            await_leavers(ctx)


def await_worker(sign: Path) -> None:
    """Until it has left its sign. There is no event between processes but the file."""
    while not sign.exists():
        time.sleep(0.005)


def others_late(ctx):
    """Whoever comes in another's place is ready when the State is about to be stored."""
    stored = Path(ctx.config["log"]) / "stored"
    ctx.on_phase(lambda phase, _: phase == "snapshot" and stored.touch())
    if ctx.worker > 1:
        await_worker(stored)


def until_told_to_store(ctx, workers):
    """Waits until all of these workers were told that the State is to be stored soon.

    To be made before they can be. Each notes it in a file, for the others.
    """
    log, inbox = Path(ctx.config["log"]), ctx._member._inbox
    store_soon = inbox.store_soon

    def hear():
        store_soon()
        if ctx.place == 0:
            (log / f"told-{ctx.worker}").touch()

    def wait():
        for worker in workers:
            await_worker(log / f"told-{worker}")

    inbox.store_soon = hear
    return wait


def usher(ctx, newcomer, through="in"):
    """After a step: go on when the newcomer needs another one of the group, or is to be let in.

    At a boundary it is given the State, and a digest once it has been told a step; then it asks to
    be let in. So it comes in within some steps, however slow it is. `through` ends a file's name,
    which others may write too: the group then goes on.
    """
    meeting, member = Path(ctx.config["meeting"]), ctx._member
    called, through, go = (meeting / f"{newcomer}-{what}" for what in ("called", through, ctx.step))
    if ctx.rank < 0:
        return
    if ctx.worker == newcomer:
        through.touch()
    while not (through.exists() or go.exists()):
        if newcomer in newest_group(member):
            called.touch()
        elif called.exists():  # it did not live long
            through.touch()
        needs = any(not s.fed or s.wants_digest for s in subscribers(member, newcomer))
        if needs or changing(member):
            go.touch()
        time.sleep(0.005)


def usher_all(ctx):
    """From the step on that `ushers` says for each newcomer."""
    for newcomer, since in ctx.config.get("ushers", {}).items():
        if ctx.step >= since:
            usher(ctx, int(newcomer))


def await_leavers(ctx):
    """From the step on that `leavers` says for each: go on when the others are about to be without.

    Else the controller may be heard when the run is over.
    """
    member = ctx._member
    for leaver, since in ctx.config.get("leavers", {}).items():
        while ctx.step >= since and ctx.rank >= 0 and int(leaver) in member._driver.present:
            if changing(member):
                break
            time.sleep(0.005)


def shadow_hold(ctx):
    """To be called after each step: waits at steps 2 and 3 until the `shadow` has the State.

    It is given that between the two; the donor knows that it has it when the group goes on. Made
    before ctx.prepare, where a shadow begins to follow.
    """
    shadow = ctx.config.get("shadow")
    if shadow is None:
        return lambda: None
    folder, member = Path(ctx.config["meeting"]), ctx._member
    connected, level, held = (folder / f"shadow-{sign}" for sign in ("connected", "level", "held"))
    if ctx.worker == shadow:
        tell_level(ctx, lambda equal: level.touch())
        return lambda: None

    def look(sign):
        followers = subscribers(member, shadow)
        told = sign is connected or (
            level.exists() and not any(s.fed and math.isinf(s.holds) for s in followers)
        )
        if followers and told:
            sign.touch()

    def hold():
        sign = {2: connected, 3: held}.get(ctx.step)
        while sign is not None and not sign.exists():
            look(sign)
            time.sleep(0.005)

    return hold


def tell_level(ctx, tell):
    """Have `tell` called whenever this shadow has said that it has a State."""
    news = ctx._member._driver._listener
    level = news.level

    def say(*, equal):
        level(equal=equal)
        tell(equal)

    news.level = say


def newest_group(member):
    inbox = member._inbox
    return max(inbox.urgent, inbox.proposed, key=lambda m: m.generation).members


def changing(member):
    """Whether there is to be another group, at the next boundary or in the next operation.

    As far as this member knows: it is connected with the others of that group.
    """
    inbox, driver = member._inbox, member._driver
    if set(newest_group(member)) == set(driver.present):
        return False
    if inbox.urgent.generation > inbox.proposed.generation:
        return True
    builder = driver._next_group.look(inbox.proposed.generation)
    return builder is None or builder.ready or builder.failed is not None


def subscribers(member, newcomer=None):
    """Who follows this member now; all, or the newcomer alone."""
    catch_up = member._catch_up  # crews have none
    found = [s for s in catch_up._subscribers if not s.closed] if catch_up else []
    return [s for s in found if newcomer in (None, s.worker)]


def note(log: Path, step: int, text: Any) -> None:
    with log.open("a") as file:
        file.write(json.dumps([step, text]) + "\n")


def notes(directory: Path) -> dict[int, dict[int, Any]]:
    """What each worker wrote: worker to step to text."""
    return {
        int(path.stem): dict(json.loads(line) for line in path.read_text().splitlines())
        for path in directory.glob("*.jsonl")
    }
