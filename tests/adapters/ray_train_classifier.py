"""A classifier in Ray Train as its users write it; nothing of elastix."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from ray import train
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))


def data(amount, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(amount, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) * 3).long() % 3)


def run(config):
    context = train.get_context()
    each = config["batch_size"] // context.get_world_size()
    torch.manual_seed(1)
    model = train.torch.prepare_model(Net().double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    train_loader = DataLoader(data(config["samples"], 7), batch_size=each, shuffle=True)
    test_loader = DataLoader(data(41, 8), batch_size=16)
    train_loader = train.torch.prepare_data_loader(train_loader)
    test_loader = train.torch.prepare_data_loader(test_loader)

    for epoch in range(config["epochs"]):
        if context.get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        scheduler.step()

        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for x, y in test_loader:
                test_loss += F.cross_entropy(model(x), y, reduction="sum").item()
        test_loss /= len(test_loader.dataset)
        config["losses"].append([epoch, test_loss])
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.state_dict(), "epoch": epoch}, Path(folder) / "model.pt")
            checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"test_loss": test_loss, "epoch": epoch}, checkpoint=checkpoint)
