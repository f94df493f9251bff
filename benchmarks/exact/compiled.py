"""torch.compile and slices: is anything compiled again because somebody died or joined?

Three workers train a compiled model. One dies whenever the group has been whole for some steps, and
is replaced: so many losses, so many joins. Each worker counts its compilations after each of its
steps; what comes after its first step is a recompilation.
"""

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastix import Context
from elastix.events import WorkerJoined, WorkerLost
from elastix.testing.local import run_local

_WORKERS, _SLICES, _BATCH = 3, 16, 48


class Convnet(nn.Module):
    """Batch norm and dropout, over pictures of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x))).flatten(1)
        found: torch.Tensor = self.head(F.dropout(x, 0.3, self.training))
        return found


class Transformer(nn.Module):
    """A small one over the rows of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        found: torch.Tensor = self.head(self.block(self.embed(x.squeeze(1))).mean(1))
        return found


MODELS: dict[str, type[nn.Module]] = {"convnet": Convnet, "transformer": Transformer}


def _compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def train(ctx: Context) -> None:
    """The train function. Rank 1 kills itself whenever the group has been whole for some steps."""
    folder, deaths = Path(ctx.config["folder"]), ctx.config["deaths"]
    model: Any = MODELS[ctx.config["model"]]()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    fast: Any = torch.compile(model, backend=ctx.config["backend"])
    whole = 0

    def look(phase: str, _detail: int) -> None:
        if phase != "slice" or ctx.rank != 1 or whole <= 3:
            return
        if len(list(folder.glob("dead-*"))) < deaths:
            (folder / f"dead-{ctx.worker}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    ctx.on_phase(look)
    log = (folder / f"{ctx.worker}.jsonl").open("a", buffering=1)
    dataset = TensorDataset(torch.rand(2 * _BATCH, 1, 8, 8), torch.randint(10, (2 * _BATCH,)))
    for epoch in ctx.loader(dataset, batch_size=_BATCH, slices=_SLICES).epochs(100_000):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(fast(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = whole + 1 if ctx.world_size == _WORKERS else 0
            graphs = _compiled()
            log.write(json.dumps([ctx.step, ctx.rank, graphs]) + "\n")
            if whole == 0:
                time.sleep(0.05)  # whoever follows has time to come
            end = folder / "end"
            come = len(list(folder.glob("*.jsonl")))
            if ctx.rank == 0 and whole > 3 and come == _WORKERS + deaths and not end.exists():
                (folder / "end.part").write_text(str(ctx.step + 2))
                (folder / "end.part").rename(end)
            if end.exists() and ctx.step >= int(end.read_text()):
                return


def measure(model: str, deaths: int, backend: str = "inductor", *, exact: bool = True) -> Any:  # noqa: ANN401 - JSON
    """How many graphs all workers compiled, and how many of them after their first step.

    Raises:
        RuntimeError: a worker compiled nothing, or others were lost or joined than were to be.
    """
    config = {"model": model, "deaths": deaths, "backend": backend}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        run = run_local(
            train,
            _WORKERS,
            config={**config, "folder": directory},
            directory=folder / "run",
            replace=True,
            exact=exact,
            timeout_s=1700.0,
        )
        logs = [
            [graphs for *_, graphs in map(json.loads, path.read_text().splitlines())]
            for path in folder.glob("*.jsonl")
        ]
    found = {
        "losses": sum(isinstance(event, WorkerLost) for event in run.events),
        "joins": sum(isinstance(event, WorkerJoined) for event in run.events),
        "workers": len(logs),
        "compiled": sum(log[0] for log in logs),
        "never_compiled": sum(log[0] == 0 for log in logs),
        "recompilations": sum(log[-1] - log[0] for log in logs),
    }
    if found["never_compiled"] or found["losses"] != deaths or found["joins"] != deaths:
        raise RuntimeError(f"not {deaths} losses and joins of workers that compile: {found}")
    return found
