"""A larger search, over another space: 4000 sequences of MNIST-1D, convolutions along one axis.

Searched by DeepHyper's Bayesian optimisation, which knows no parents: each candidate inherits from
the stored model that shares most layers with it. The best is then trained by three workers.
`python examples/mnist1d_search.py`; two or three minutes on two cores.
"""

import argparse
import sys
import tempfile

import ray
import torch
import torch.nn.functional as F
from mnist1d.data import get_dataset_args, make_dataset
from torch.utils.data import TensorDataset

import elastix
from search_spaces import conv1d

made = make_dataset(get_dataset_args())
training, test = (
    TensorDataset(torch.tensor(made[x], dtype=torch.float32).unsqueeze(1), torch.tensor(made[y]))
    for x, y in (("x", "y"), ("x_test", "y_test"))
)


def accuracy(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Share of a batch that is classified correctly."""
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def train(ctx: elastix.Context) -> None:
    """Candidates train two epochs, the winner ten."""
    model = conv1d.build(ctx.config, classes=10)
    ctx.inherit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(training, batch_size=100).epochs(ctx.config.get("epochs", 2)):
        for x, y in epoch:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ctx.report(**ctx.evaluate(accuracy, test, batch_size=500))


def main() -> int:
    """Search, then train the winner."""
    store = tempfile.mkdtemp(prefix="elastix-")
    ray.init(log_to_driver=False)
    found = elastix.Campaign(
        train,
        space=conv1d.space,
        searcher=elastix.DeepHyper(),
        metric="accuracy",
        budget=elastix.Budget(trials=20, parallel=2),
        run=elastix.RunConfig(name="mnist1d-search", store=store),
    ).run()
    result = found.best.trainer(
        train,
        config={"epochs": 10},
        scaling=elastix.ScalingConfig(num_workers=3, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="mnist1d"),
    ).fit()
    inherited = sum(trial.inherited is not None for trial in found.trials)
    print(f"\n{found.best}; {inherited} of {len(found.trials)} trials inherited")
    print(f"after ten epochs of three workers: accuracy {result.metrics['accuracy']:.3f}")
    return 0 if result.audit.exact and result.metrics["accuracy"] > 0.5 else 1


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=lines).parse_args()
    sys.exit(main())
