"""A search in under 40 lines: each trial begins with the weights of the one it was made from."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import elastix
from search_spaces import convnet

data = load_digits()
x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
training, validation = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


def accuracy(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def train(ctx: elastix.Context) -> None:
    model = convnet.build(ctx.config)
    ctx.inherit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(training, batch_size=64).epochs(1):
        for images, labels in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    ctx.report(**ctx.evaluate(accuracy, validation, batch_size=256))


if __name__ == "__main__":
    results = elastix.Campaign(
        train, space=convnet.space, metric="accuracy", budget=elastix.Budget(trials=24)
    ).run()
    shares = [f"{trial.inherited['share']:.0%}" for trial in results if trial.inherited]
    print(results.best, results.best.config, len(results.best.load().model), "tensors")
    print(len(shares), "trials inherited, of their bytes:", *shares)
