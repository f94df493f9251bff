"""Search an architecture, let each candidate inherit from its parent, train the winner under fire.

1. A campaign proposes convnets for scikit-learn's digits. Each candidate starts from its parent's
   weights where layers match, trains one epoch on a persistent worker, and is kept in the store.
2. The winner is trained to early stop by an elastic group of four workers and a spare, while one
   worker is killed with SIGKILL in the middle of backward() and another is stopped with SIGSTOP.
3. What came of it: recoveries, the account of samples, what was inherited, bytes saved, accuracy.

Run it with `make demo`, or `python examples/search_then_train.py [STORE]`. It goes on where it was
when it is run again with the same store. Some minutes on two cores.
"""

import os
import sys
import tempfile
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

# Ray's own paragraph about a dead worker would bury the line that says what became of it.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")

import ray
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import elastix
from elastix.events import Recovered, WorkerLost
from elastix.testing.chaos import Kill, with_kills
from search_spaces import convnet


def digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """1797 handwritten digits of 8 x 8 pixels: for training, for validation, for the test."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    return tuple(TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 1100), (1100, 1450), (1450, 1797)))


def accuracy(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Share of a batch that is classified correctly."""
    x, y = batch
    return (model(x).argmax(1) == y).float().mean()


class Patience:
    """Stops when a score has not improved for some epochs. Part of the State, as `track` sees to."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.best, self.since = float("-inf"), 0

    def stops(self, score: float) -> bool:
        """Take in the score of one more epoch."""
        self.best, self.since = (score, 0) if score > self.best else (self.best, self.since + 1)
        return self.since >= self.epochs

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.since = state["best"], state["since"]


def train(ctx: elastix.Context) -> None:
    """The search's candidates and the final training both run this."""
    training, validation, test = digits()
    model = convnet.build(ctx.config)
    ctx.inherit(model)  # tensors of the parent, if there is one
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(training, batch_size=64)
    patience = Patience(epochs=3)
    ctx.track(patience=patience)
    for epoch in loader.epochs(ctx.config.get("epochs", 1)):
        for x, y in epoch:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # in the final training worker 1 dies here, once
            optimizer.step()
        scores = ctx.evaluate(accuracy, validation, batch_size=350)
        ctx.report(**scores)
        if patience.stops(scores["accuracy"]):
            break
    found = ctx.evaluate(accuracy, test, batch_size=350)
    ctx.report(test_accuracy=found["accuracy"])


def search(store: Path) -> elastix.Results:
    """A campaign; the same call continues one that was interrupted."""
    return elastix.Campaign(
        train,
        space=convnet.space,
        searcher=elastix.Evolution(population=8, sample=4),
        metric="accuracy",
        budget=elastix.Budget(trials=24, parallel=2),
        inherit="lcs",
        scaling=elastix.ScalingConfig(cpus_per_worker=0.5),
        run=elastix.RunConfig(name="digits-search", store=str(store)),
    ).run()


def train_under_fire(best: Any, store: Path) -> elastix.Result:
    """The winner, by four workers and a spare; two of them do not live to see the end."""
    harm = [
        Kill(worker=1, phase="bucket", step=20, signal=SIGKILL),
        Kill(worker=2, phase="batch", step=45, signal=SIGSTOP),
    ]
    return best.trainer(
        with_kills(train, harm),
        config={"epochs": 40},
        scaling=elastix.ScalingConfig(num_workers=(2, 4), spares=1, cpus_per_worker=0.5),
        run=elastix.RunConfig(name="digits", store=str(store)),
        checkpoint=elastix.CheckpointConfig(every_steps=36, keep_last=2, best="accuracy"),
        failure=elastix.FailureConfig(hang_timeout_s=4.0),
    ).fit()


def main() -> int:
    """Search, train, and show what happened."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="elastix-"))
    if not ray.is_initialized():
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    campaign = search(path)
    best = campaign.best
    result = train_under_fire(best, path)
    return 0 if summary(path, campaign, result) else 1


def summary(path: Path, campaign: elastix.Results, result: elastix.Result) -> bool:
    """Print what came of it; whether all is as it should be."""
    best = campaign.best
    losses = [event for event in result.events if isinstance(event, WorkerLost)]
    stalls = [event.stall_s for event in result.events if isinstance(event, Recovered)]
    inherited = [trial.inherited["share"] for trial in campaign.trials if trial.inherited]
    exported = path / "digits.safetensors"
    with elastix.Store(path) as store:
        line = [store.describe(ref) for ref in store.ancestors(result.ref)]
        stats = store.stats()
        store.export(result.ref, exported, overwrite=True)

    model = convnet.build(best.config)
    model.load_state_dict(load_file(exported))
    model.eval()
    x, y = digits()[2].tensors
    with torch.no_grad():
        plain = (model(x).argmax(1) == y).double().mean().item()

    print()
    print(f"search      {len(campaign.trials)} trials; best: {best}")
    print(
        f"inherited   {len(inherited)} trials began with {sum(inherited) / max(1, len(inherited)):.0%} of a parent's bytes"
    )
    print(f"lost        {', '.join(f'worker {e.worker}: {e.cause}' for e in losses)}")
    print(
        f"recovered   in {', '.join(f'{s:.2f} s' for s in sorted(set(stalls)))}; steps lost: {result.audit.steps_lost}"
    )
    print(f"samples     {result.audit}")
    print(f"store       {stats}")
    print(f"lineage     {len(line)} ancestors of the final model")
    print(
        f"accuracy    {result.metrics['test_accuracy']:.3f} on the test set; {plain:.3f} by plain torch from {exported}"
    )
    return (
        result.audit.exact
        and len(losses) >= 2
        and abs(plain - result.metrics["test_accuracy"]) < 1e-6
    )


if __name__ == "__main__":
    sys.exit(main())
