"""Search an architecture, let each candidate inherit from its parent, train the winner under fire.

1. A campaign proposes convnets for scikit-learn's digits. Each candidate starts from its parent's
   weights where layers match, trains one epoch on a persistent worker, and is kept in the store.
2. The winner is trained to early stop by an elastic group of four workers and a spare, while one
   worker is killed with SIGKILL in the middle of backward() and another is stopped with SIGSTOP.
3. The winner is trained again by one worker, in peace. `exact=True`: the State has the same bytes.
4. What came of it: recoveries, the account of samples, what was inherited, bytes saved, accuracy.

Run it with `make demo`, or `python examples/search_then_train.py [STORE]`. It goes on where it was
when it is run again with the same store. Some minutes on two cores.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from statistics import median
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
from elastix.report import write_report
from elastix.search.results import Best
from elastix.store import Entry
from elastix.testing.chaos import Kill, with_kills
from search_spaces import convnet


def digits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """1797 handwritten digits of 8 x 8 pixels: for training, for validation, for the test."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    parts = (slice(0, 1100), slice(1100, 1450), slice(1450, None))
    training, validation, test = (TensorDataset(x[part], y[part]) for part in parts)
    return training, validation, test


def accuracy(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Share of a batch that is classified correctly."""
    x, y = batch
    right: torch.Tensor = model(x).argmax(1) == y
    return right.float().mean()


class Patience:
    """Stops when a score has not improved for some epochs. `ctx.track` puts it into the State."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.best, self.since = float("-inf"), 0

    def stops(self, score: float) -> bool:
        """Take in the score of one more epoch."""
        self.best, self.since = (score, 0) if score > self.best else (self.best, self.since + 1)
        return self.since >= self.epochs

    def state_dict(self) -> dict[str, Any]:
        """What a joiner needs."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.best, self.since = state["best"], state["since"]


def train(ctx: elastix.Context) -> None:
    """The search's candidates and the final training both run this."""
    training, validation, test = digits()
    model = convnet.build(ctx.config)
    ctx.inherit(model)  # tensors of the parent, if there is one
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(training, batch_size=64, slices=8)
    patience = Patience(epochs=3)
    ctx.track(patience=patience)
    for epoch in loader.epochs(ctx.config.get("epochs", 1)):
        for step in epoch:
            for x, y in step:  # the slices of the batch that fall to this worker
                loss = F.cross_entropy(model(x), y)
                loss.backward()  # in the final training worker 1 dies here, once
            optimizer.step()
            optimizer.zero_grad()
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
        inherit=elastix.InheritConfig(mode="lcs"),
        scaling=elastix.ScalingConfig(cpus_per_worker=0.25),
        run=elastix.RunConfig(name="digits-search", store=str(store)),
    ).run()


def train_under_fire(best: Best, store: Path) -> elastix.Result:
    """The winner, by four workers and a spare; two of them do not live to see the end."""
    harm = [
        Kill(worker=1, phase="bucket", step=20, signal=SIGKILL),
        Kill(worker=2, phase="slice", step=45, signal=SIGSTOP),
    ]
    return best.trainer(
        with_kills(train, harm),
        config={"epochs": 40},
        scaling=elastix.ScalingConfig(num_workers=(2, 4), spares=1, cpus_per_worker=0.25),
        run=elastix.RunConfig(name="digits", store=str(store), exact=True),
        checkpoint=elastix.CheckpointConfig(every_steps=36, keep_last=2, best="accuracy"),
        failure=elastix.FailureConfig(hang_timeout_s=4.0),
    ).fit()


def train_in_peace(best: Best, store: Path) -> elastix.Result:
    """The winner again, by one worker whom nothing befalls."""
    return best.trainer(
        train,
        config={"epochs": 40},
        scaling=elastix.ScalingConfig(num_workers=1, cpus_per_worker=0.25),
        run=elastix.RunConfig(name="digits-quiet", store=str(store), exact=True),
    ).fit()


def main() -> int:
    """Search, train, and show what happened."""
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
    parser.add_argument("store", nargs="?", help="directory; a new temporary one by default")
    path = Path(parser.parse_args().store or tempfile.mkdtemp(prefix="elastix-"))
    with elastix.Store(path):
        pass  # it can be made, or says why not before anything is started
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    campaign = search(path)
    best = campaign.best
    result, quiet = train_under_fire(best, path), train_in_peace(best, path)
    fine = summary(path, campaign, result)
    for name in ("digits-search", "digits"):
        print(f"report     {write_report(name, path)}")
    same = result.audit.state == quiet.audit.state
    verdict = "the State under fire is byte for byte" if same else "the State under fire is NOT"
    print(f"bytes      {verdict} that of a quiet run: {quiet.audit.lines['bytes']}")
    return 0 if fine and same else 1


def summary(path: Path, campaign: elastix.Results, result: elastix.Result) -> bool:
    """Print what came of it; whether all is as it should be."""
    losses = [event for event in result.events if isinstance(event, WorkerLost)]
    stalls = [event.stall_s for event in result.events if isinstance(event, Recovered)]
    shares = [trial.inherited["share"] for trial in campaign.trials if trial.inherited]
    exported = path / "digits.safetensors"
    with elastix.Store(path) as store:
        line = store.log("digits/final")
        stats = store.stats()
        store.export("digits/final", exported)
    model = convnet.build(campaign.best.config)
    model.load_state_dict(load_file(exported))
    score = result.metrics["test_accuracy"]
    again = _test_accuracy(model)
    print()
    print(f"search     {len(campaign.trials)} trials, the best {campaign.best}")
    print(f"inherited  {len(shares)} trials, in the median {median(shares):.0%} of their bytes")
    print(f"lost       {', '.join(f'worker {loss.worker} ({loss.cause})' for loss in losses)}")
    print(f"recovered  the slowest in {max(stalls):.2f} s; {result.audit.steps_lost} steps lost")
    for what, text in result.audit.lines.items():
        print(f"{what:<10} {text}")
    saved = stats.logical_bytes - stats.unique_bytes
    print(
        f"store      {stats.models} models, {stats.logical_bytes / 1e6:.1f} MB; {saved} bytes saved"
    )
    print(f"lineage    {' <- '.join(_called(entry) for entry in line)}")
    print(f"accuracy   {score:.3f} on the test set; {again:.3f} by plain torch from {exported}")
    return result.audit.exact and len(losses) >= 2 and abs(again - score) < 1e-6


def _called(entry: Entry) -> str:
    """A model in words: its trial, or the step of the final training."""
    if "trial" in entry.meta:
        return f"trial {entry.meta['trial']}"
    return f"step {entry.meta['step']}"


@torch.no_grad()
def _test_accuracy(model: torch.nn.Module) -> float:
    x, y = digits()[2].tensors
    right: torch.Tensor = model.eval()(x).argmax(1) == y
    return right.double().mean().item()


if __name__ == "__main__":
    sys.exit(main())
