"""A classifier in Lightning Fabric as its users write it; nothing of elastix."""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
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


def run(hparams):
    fabric = Fabric(accelerator="cpu", precision="64-true")
    fabric.launch()
    fabric.seed_everything(1)
    with fabric.init_module():
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=hparams["lr"])
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    train_loader = DataLoader(
        data(hparams["samples"], 7), batch_size=hparams["batch_size"], shuffle=True
    )
    test_loader = DataLoader(data(41, 8), batch_size=16)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)

    for epoch in range(hparams["epochs"]):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()

        model.eval()
        test_loss = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for x, y in test_loader:
                test_loss += F.cross_entropy(model(x), y, reduction="sum")
        test_loss = fabric.all_gather(test_loss).sum() / len(test_loader.dataset)
        hparams["losses"].append([epoch, float(test_loss)])
        scheduler.step()
        if hparams["save"]:
            fabric.save(hparams["save"], {"model": model, "epoch": epoch})
    return model
