"""A Ray Tune script as it was, but for its search_alg: four at random, then elastix's Evolution."""

import argparse
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from ray import tune
from sklearn.datasets import load_digits

import elastix.tune


def train(config: dict[str, Any]) -> None:
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, config["width"]),
        torch.nn.ReLU(),
        torch.nn.Dropout(config["regular"]["dropout"]),
        torch.nn.Linear(config["width"], 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for batch in torch.randperm(1400).split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    model.eval()
    tune.report({"accuracy": (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item()})


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=lines).parse_args()
    tuner = tune.Tuner(
        train,
        param_space={
            "width": tune.choice([16, 32, 64, 128]),
            "lr": tune.loguniform(1e-4, 1e-1),
            "regular": {"dropout": tune.uniform(0.0, 0.5)},
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=12,
            max_concurrent_trials=2,  # without it Tune lets a searcher have one pending trial
            # was: OptunaSearch(). Tune does not tell a searcher how many trials there will be.
            search_alg=elastix.tune.Search(elastix.Evolution(population=4)),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=tempfile.mkdtemp(), verbose=0),
    )
    best = tuner.fit().get_best_result()
    print(f"accuracy {best.metrics['accuracy']:.3f} with {best.config}")
