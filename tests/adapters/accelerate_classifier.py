"""A classifier in Accelerate as its users write it; nothing of elastix."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
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
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    train_loader = DataLoader(
        data(config["samples"], 7), batch_size=config["batch_size"], shuffle=True
    )
    test_loader = DataLoader(data(41, 8), batch_size=16)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )

    for epoch in range(config["epochs"]):
        model.train()
        for x, y in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()

        model.eval()
        losses = []
        with torch.no_grad():
            for x, y in test_loader:
                loss = F.cross_entropy(model(x), y, reduction="none")
                losses.append(accelerator.gather_for_metrics(loss))
        config["losses"].append([epoch, torch.cat(losses).mean().item()])
        if config["save"]:
            accelerator.save(accelerator.unwrap_model(model).state_dict(), config["save"])
