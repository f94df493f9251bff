"""SyncBatchNorm synchronises nothing between workers, and whoever brings it along is told."""

import logging
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastix.testing.local import run_local

HINT = "the model has SyncBatchNorm"
NORMS = {"synced": nn.SyncBatchNorm, "plain": nn.BatchNorm1d}


def normed(ctx):
    handler = logging.FileHandler(Path(ctx.config["log"], f"{ctx.worker}.log"))
    logging.getLogger("elastix").addHandler(handler)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), NORMS[ctx.config["norm"]](4), nn.Linear(4, 1))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.rand(24, 3, generator=torch.Generator().manual_seed(2))
    for epoch in ctx.loader(TensorDataset(data), 8).epochs(2):
        for (x,) in epoch:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    torch.save(model.state_dict(), Path(ctx.config["log"], f"{ctx.worker}.pt"))


def run(directory, norm):
    directory.mkdir()
    run_local(normed, 2, config={"log": str(directory), "norm": norm}, directory=directory / "run")
    told = "".join(path.read_text() for path in directory.glob("*.log"))
    return told.count(HINT), torch.load(directory / "0.pt")


def test_it_is_a_batch_norm_and_says_so_once(tmp_path):
    told, synced = run(tmp_path / "synced", "synced")
    untold, plain = run(tmp_path / "plain", "plain")
    assert (told, untold) == (1, 0)
    assert all(torch.allclose(synced[name], plain[name]) for name in plain)
