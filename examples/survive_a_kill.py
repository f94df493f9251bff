"""Four workers train a convnet on real images; one is killed with SIGKILL in mid-backward.

The survivors finish that very step from the gradients they hold, a replacement is given the State
by a live peer, and the audit shows that every sample of every epoch was used exactly once.

Run it with `python examples/survive_a_kill.py`. About a minute on two cores.
"""

import argparse
import os
import sys
import tempfile

# Ray's own paragraph about a dead worker would bury the line that says what became of it.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import elastix
from elastix.events import Recovered, WorkerJoined
from elastix.report import write_report
from elastix.testing.chaos import Kill, with_kills
from elastix.testing.replay import compare
from search_spaces import convnet


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 handwritten digits of 8 x 8 pixels: training and test set."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float64).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def accuracy(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Share of a batch that is classified correctly."""
    x, y = batch
    return (model(x).argmax(1) == y).float().mean()


def train(ctx: elastix.Context) -> None:
    """A plain torch loop; what makes it elastic are the lines with ctx."""
    training, test = digits()
    model = convnet.build(ctx.config).double()  # so that the replay agrees to many digits
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = ctx.prepare(model, optimizer)
    loader = ctx.loader(training, batch_size=60)
    for epoch in loader.epochs(ctx.config["epochs"]):
        for x, y in epoch:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # here worker 2 dies, once
            optimizer.step()
        ctx.report(**ctx.evaluate(accuracy, test, batch_size=100))


def main() -> int:
    """Train, then show what happened and check it."""
    kill = Kill(worker=2, phase="bucket", step=30)
    result = elastix.ElasticTrainer(
        with_kills(train, [kill]),
        config={**convnet.space.get_default_configuration(), "epochs": 20},
        scaling=elastix.ScalingConfig(num_workers=(2, 4), cpus_per_worker=0.5),
        run=elastix.RunConfig(name="survive-a-kill", store=tempfile.mkdtemp(prefix="elastix-")),
    ).fit()

    recoveries = [event for event in result.events if isinstance(event, Recovered)]
    if not recoveries:
        print("worker 2 was not killed, as it never came: four workers want two CPUs")
        return 1
    joins = [event for event in result.events if isinstance(event, WorkerJoined)]
    replayed = compare(result.directory)
    print()
    print(f"worker 2 was killed with SIGKILL in backward() of step {kill.step + 1}")
    print(f"  survivors had the agreed gradient after {max(e.stall_s for e in recoveries):.3f} s")
    print(f"  steps lost: {result.audit.steps_lost}")
    for what, text in result.audit.lines.items():
        print(f"  {what} {text}")
    print(f"  replacements that joined: {len(joins)}")
    print(
        f"  one process, fed the committed batches of the journal, ends with the same weights: "
        f"relative difference {replayed.relative:.1e} after {replayed.steps} steps"
    )
    print(f"  test accuracy {result.metrics['accuracy']:.3f}; all of it is in {result.directory}")
    print(f"  report: {write_report(result.directory.name, result.directory.parents[1])}")
    fine = result.audit.exact and replayed.relative < 1e-6 and result.metrics["accuracy"] > 0.8
    return 0 if fine else 1


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=lines).parse_args()
    sys.exit(main())
