"""A train function for crews, the same for one process and for any mesh; and what must hold after.

`checked` runs it in float64 and holds against the laws of crews: as one process over the committed
samples has it, equal along each rail after every step, every sample exactly once.
"""

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import TensorDataset

from elastix.comm.gradients import buckets
from elastix.data.audit import audit
from elastix.data.sample_order import indices
from elastix.events import Recovered, Resumed, StepCommitted, WorkerStarted
from elastix.sharding import local
from elastix.state import raw_bytes
from elastix.testing.chaos import cut
from elastix.testing.local import LocalRun, run_local
from elastix.testing.replayed_steps import standing
from tests.trainables import await_worker, usher_all

WIDTH, CLASSES = 18, 10
CLIPPED = 0.1
"""All gradients of these runs are above it."""


@dataclass(frozen=True, kw_only=True)
class PlaceKill:
    """The end of one process of a crew, as chaos.Kill has that of a worker.

    Attributes:
        severed: its connections are cut, and it gets no signal.
    """

    worker: int
    place: int
    phase: str
    step: int = 2
    detail: int | None = None
    after: int = 0
    signal: int = signal.SIGKILL
    severed: bool = False


WITHIN_S = 1.0
"""Mates of a lost process are out so soon, as the design promises; more on a starved machine."""


def kill(worker, place, phase, **fixed):
    return PlaceKill(worker=worker, place=place, phase=phase, **fixed)


ONE_SIDED = {
    "a follower that holds all": kill(1, 1, "held", detail=1),
    "a speaker that waits for its crew": kill(1, 0, "crew", detail=1),
    "a speaker in the round": kill(1, 0, "round", detail=1),
    "a speaker out of the round": kill(1, 0, "left", detail=1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Meter:
    """A sum that is part of the State; each process adds to its own."""

    def __init__(self) -> None:
        self.sum = torch.zeros(())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"sum": self.sum}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.sum = state["sum"]


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(samples, 16, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) * 3).long() % CLASSES)


def build() -> Net:
    torch.manual_seed(1)
    return Net().double()


def parallelize(model, mesh) -> None:
    names = mesh.mesh_dim_names
    if "tensor" in names:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
    if "shard" in names:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """In one call for all parameters, where torch takes them so: not whole and split ones.

    In each process torch works out anew what to do of every operation on parts.
    """
    parameters = dict(model.named_parameters())
    kinds = {type(parameter.data) for parameter in parameters.values()}
    return torch.optim.AdamW(parameters.items(), lr=lr, fused=len(kinds) == 1, foreach=False)


def held(model, optimizer) -> str:
    """Digest of what this place holds of the model and of the optimizer."""
    digest = blake3()
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
            digest.update(raw_bytes(local(tensor.detach())).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def whole(parameter) -> torch.Tensor:
    """All of it, wherever its parts are. Collective in a worker."""
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().to("cpu", copy=True)


def replicated(model) -> str:
    """Digest of the parameters that each place has whole, by itself."""
    digest = blake3()
    for parameter in model.parameters():
        if not hasattr(parameter, "full_tensor"):
            digest.update(raw_bytes(parameter.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def watched(ctx, layer) -> Callable[..., None]:
    """Ends this process where it is to be ended; returns what is told of further places."""
    kills = [PlaceKill(**kill) for kill in ctx.config["kills"]]
    mine = [k for k in kills if (k.worker, k.place) == (ctx.worker, ctx.place)]
    passed = [0] * len(mine)

    def look(phase: str, detail: int = 0) -> None:
        for index, kill in enumerate(mine):
            if kill.phase == phase and ctx.step >= kill.step and kill.detail in (None, detail):
                passed[index] += 1
                if passed[index] == kill.after + 1:
                    cut() if kill.severed else os.kill(os.getpid(), kill.signal)

    ctx.on_phase(look)
    if mine:
        layer.register_forward_pre_hook(lambda *_: look("in forward"))
        layer.register_full_backward_hook(lambda *_: look("in backward"))
    return look


def train(ctx, after_epoch: Callable[[Any, Any], None] = lambda model, look: None) -> None:
    config = ctx.config
    buckets.FIRST_BUCKET_BYTES = buckets.BUCKET_BYTES = 4 << 10
    model = build()
    if ctx.mesh is not None:
        parallelize(model, ctx.mesh)
    log, look = Path(config["log"]), watched(ctx, model.blocks[1].norm)
    optimizer = adamw(model)
    model, optimizer = ctx.prepare(model, optimizer)
    tensor = ctx.mesh is not None and "tensor" in ctx.mesh.mesh_dim_names
    slices, dropout = config.get("slices"), config.get("dropout", 0.0)
    loader = ctx.loader(data(config["samples"]), batch_size=config["batch_size"], slices=slices)
    with (log / f"{ctx.worker}-{ctx.place}.jsonl").open("a") as file:
        for epoch in until_over(ctx, loader.epochs(config["epochs"])):
            for batch in epoch:
                for x, y in parts(batch, slices):
                    loss = F.cross_entropy(model(F.dropout(x, dropout)), y)
                    loss.backward()
                look("clip")
                if tensor:  # torch's own knows parameters of one mesh
                    ctx.clip_grad_norm_(model.parameters(), CLIPPED)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
                optimizer.step()
                optimizer.zero_grad()
                told = [ctx.step, held(model, optimizer), replicated(model)]
                file.write(json.dumps(told) + "\n")
                file.flush()
                pace(config)
                if ctx.place == 0:
                    usher_all(ctx)
            after_epoch(model, look)
        if config["mean"]:
            ctx.report(**ctx.mean(loss=loss))
    full = {name: whole(p) for name, p in model.named_parameters()}
    if ctx.place == 0:
        torch.save(full, log / f"final-{ctx.worker}.pt")


def held_until(holds: Mapping[int, int], places: int, ctx) -> None:
    """As `train`; after each step of `holds` the group waits until that worker waits to be let in.

    Each process says which one it is, in a file.
    """
    log = Path(ctx.config["log"])
    (log / f"pid-{ctx.worker}-{ctx.place}").write_text(str(os.getpid()))

    def look(phase: str, detail: int) -> None:
        if phase == "wait":
            (log / f"waits-{ctx.worker}-{ctx.place}").touch()
        elif phase == "boundary" and ctx.step in holds:
            for place in range(places):
                await_worker(log / f"waits-{holds[ctx.step]}-{place}")

    ctx.on_phase(look)
    train(ctx)


def told_pids(log: Path) -> dict[tuple[int, int], int]:
    """By worker and place, which process it was."""
    return {
        (int(worker), int(place)): int(path.read_text())
        for path in log.glob("pid-*")
        for _, worker, place in [path.name.split("-")]
    }


def parts(batch, slices):
    """What a backward pass is about: the batch, or its slices one after the other."""
    return [batch] if slices is None else batch


def until_over(ctx, epochs):
    """Epochs until somebody has seen the file that ends the run: all hear of it alike."""
    path = ctx.config.get("over")
    for epoch in epochs:
        yield epoch
        if path is not None and ctx.mean(over=Path(path).exists())["over"] > 0:
            return


def pace(config: Mapping[str, Any]) -> None:
    """Steps take a while, so that there are some left when a new worker is there."""
    if config["step_s"]:
        threading.Event().wait(config["step_s"])


def replayed(config: Mapping[str, Any], events: Sequence[Any]) -> dict[str, Any]:
    """One process, with the samples that were committed."""
    model = replayed_to(config, standing(events))
    return {name: p.detach() for name, p in model.named_parameters()}


def replayed_to(config: Mapping[str, Any], steps: Sequence[StepCommitted]) -> Net:
    """The model after these steps."""
    dataset, model = data(config["samples"]), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for event in steps:
        spans = [s for batch in event.batches for share in batch.shares.values() for s in share]
        chosen = torch.from_numpy(indices(spans, 0, config["samples"], True))
        if not len(chosen):
            continue
        x, y = (t[chosen] for t in dataset.tensors)
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        optimizer.step()
        optimizer.zero_grad()
    return model


def last_standing(events: Sequence[Any]) -> dict[int, int]:
    """By worker, the last of its steps that was not given up when a run went on from a State."""
    found: dict[int, int] = {}
    started: set[int] = set()
    for event in events:
        if isinstance(event, WorkerStarted):
            started.add(event.worker)
        if isinstance(event, Resumed):
            found |= {worker: min(event.step, found.get(worker, event.step)) for worker in started}
    return found


@dataclass
class Checked:
    """What a run came to.

    Attributes:
        apart: the largest relative difference from one process.
        freed_s: the longest that a mate of a lost process took to come out.
    """

    run: LocalRun
    steps: int
    apart: float
    outcomes: list[str]
    freed_s: float


def checked(
    tmp_path: Path,
    workers: int,
    crew: Mapping[str, int],
    kills: Sequence[PlaceKill] = (),
    *,
    samples: int = 60,
    batch_size: int = 12,
    epochs: int = 1,
    step_s: float = 0.0,
    mean: bool = False,
    slices: int | None = None,
    tolerance: float = 1e-9,
    ushers: Mapping[str, int] | None = None,
    before: Sequence[Any] = (),
    function: Callable[[Any], None] = train,
    within: Sequence[PlaceKill] = (),
    **options: Any,
) -> Checked:
    """Run, and assert the laws; `before` are the events of the run that this one continues.

    All of `kills` must have come to pass; those of `within` may, or are no ends of processes.
    """
    config = configure(
        tmp_path,
        [*kills, *within],
        samples=samples,
        batch_size=batch_size,
        epochs=epochs,
        step_s=step_s,
        mean=mean,
        slices=slices,
    )
    config |= {"meeting": config["log"], "ushers": ushers or {}}
    options.setdefault("directory", tmp_path / "run")
    run = run_local(function, workers, config=config, crew=crew, **options)
    apart = assert_laws(config, [*before, *run.events], crew, tolerance)
    steps = sum(isinstance(event, StepCommitted) for event in run.events)
    lost = {(worker, place) for worker, place, _ in run.lost_places}
    dead = [kill for kill in kills if kill.signal == signal.SIGKILL and not kill.severed]
    assert lost >= {(kill.worker, kill.place) for kill in dead}, lost
    assert set(run.lost) >= {kill.worker for kill in kills}
    first = run.lost | {worker: at for worker, _, at in reversed(run.lost_places)}
    freed_s = max((at - first[worker] for worker, _, at in run.freed), default=0.0)
    outcomes = [event.outcome for event in run.events if isinstance(event, Recovered)]
    return Checked(run, steps, apart, outcomes, freed_s)


def configure(
    tmp_path: Path,
    kills: Sequence[PlaceKill] = (),
    *,
    samples: int = 60,
    batch_size: int = 12,
    epochs: int = 1,
    step_s: float = 0.0,
    mean: bool = False,
    slices: int | None = None,
    dropout: float = 0.0,
) -> dict[str, Any]:
    """What `train` is told; it writes to a folder in `tmp_path`."""
    log = tmp_path / "log"
    log.mkdir(parents=True)
    return {
        "kills": [asdict(kill) for kill in kills],
        "log": str(log),
        "samples": samples,
        "batch_size": batch_size,
        "epochs": epochs,
        "step_s": step_s,
        "mean": mean,
        "slices": slices,
        "dropout": dropout,
    }


def assert_laws(
    config: Mapping[str, Any],
    events: Sequence[Any],
    crew: Mapping[str, int],
    tolerance: float = 1e-9,
) -> float:
    """Of what a run has left; the largest relative difference from one process."""
    log = Path(config["log"])
    account = audit(events)
    assert account.exact, account
    places: dict[int, dict[int, dict[int, str]]] = {}
    alike: dict[int, set[str]] = {}  # by step, what each place has by itself
    stands = last_standing(events)
    for path in log.glob("*.jsonl"):
        worker, place = map(int, path.stem.split("-"))
        until = stands.get(worker, math.inf)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        told = {step: digest for step, digest, *_ in lines if step <= until}
        places.setdefault(place, {})[worker] = told
        for step, _, *mine in lines:
            if step <= until:
                alike.setdefault(step, set()).update(mine)
    for place, rail in places.items():
        for step in {step for told in rail.values() for step in told}:
            digests = {told[step] for told in rail.values() if step in told}
            assert len(digests) == 1, f"place {place}: workers differ after step {step}"
    for step, found in alike.items():
        assert len(found) <= 1, f"places differ in what each has whole after step {step}"
    finals: dict[str, dict[str, torch.Tensor]] = {}  # by worker; stages have some tensors each
    for path in log.glob("final-*.pt"):
        finals.setdefault(path.stem.split("-")[1], {}).update(torch.load(path))
    assert finals
    want = replayed(config, events)
    apart = max(
        float((full[name] - want[name]).abs().max() / want[name].abs().max())
        for full in finals.values()
        for name in want
    )
    assert apart < tolerance
    return apart
