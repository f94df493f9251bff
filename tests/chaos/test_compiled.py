"""torch.compile and slices: nobody compiles anything again because somebody died or joined."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastix.events import WorkerJoined, WorkerLost
from elastix.testing.local import run_local
from tests.exact_programs import NoisyNet
from tests.trainables import samples

WORKERS = 3


class Attentive(nn.Module):
    """A small transformer over the rows of a picture."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.block(self.embed(x.squeeze(1))).mean(1))


class Convnet(NoisyNet):
    """Without the noise of NumPy's, which dynamo cannot see through."""

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(F.dropout(x.flatten(1), 0.3, self.training))


MODELS = {"convnet": Convnet, "transformer": Attentive}


def compiled():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train(ctx):
    """Rank 1 kills itself whenever the group has been whole for some steps."""
    folder, deaths = Path(ctx.config["folder"]), ctx.config["deaths"]
    model = MODELS[ctx.config["model"]]()
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    fast = torch.compile(model, backend=ctx.config["backend"])
    whole = 0

    def look(phase, _detail):
        if phase == "slice" and ctx.rank == 1 and whole > 3 and len(done()) < deaths:
            (folder / f"dead-{ctx.worker}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def done():
        return list(folder.glob("dead-*"))

    ctx.on_phase(look)
    log = (folder / f"{ctx.worker}.jsonl").open("a", buffering=1)
    for epoch in ctx.loader(samples(96), batch_size=48, slices=16).epochs(100_000):
        for step in epoch:
            for x, y in step:
                F.cross_entropy(fast(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = whole + 1 if ctx.world_size == WORKERS else 0
            log.write(json.dumps([ctx.step, ctx.rank, compiled()]) + "\n")
            if whole == 0:
                time.sleep(0.05)  # whoever follows has time to come
            end = folder / "end"
            come = len(list(folder.glob("*.jsonl")))
            if ctx.rank == 0 and whole > 3 and come == WORKERS + deaths and not end.exists():
                (folder / "end.part").write_text(str(ctx.step + 2))
                (folder / "end.part").rename(end)
            if end.exists() and ctx.step >= int(end.read_text()):
                return


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_compiled_again_over_ten_losses_and_joins(tmp_path, model, backend, exact):
    ten_losses(tmp_path, 10, model=model, backend=backend, exact=exact)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_compiled_again_over_a_loss_and_a_join(tmp_path):
    ten_losses(tmp_path, 1, model="convnet", backend="aot_eager", exact=True)


def ten_losses(tmp_path, deaths, *, exact, **config):
    config = {"folder": str(tmp_path), "deaths": deaths, **config}
    options = {"directory": tmp_path / "run", "replace": True, "exact": exact}
    run = run_local(train, WORKERS, config=config, timeout_s=1700.0, **options)
    assert sum(isinstance(event, WorkerLost) for event in run.events) == deaths
    assert sum(isinstance(event, WorkerJoined) for event in run.events) == deaths
    for worker in range(WORKERS + deaths):
        lines = (tmp_path / f"{worker}.jsonl").read_text().splitlines()
        counts = [graphs for _, _, graphs in map(json.loads, lines)]
        assert counts, f"worker {worker} has made no step"
        assert counts[0] > 0
        assert counts[-1] == counts[0], f"worker {worker} compiled again: {lines}"
