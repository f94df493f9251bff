"""How long the command line takes to answer, beside that of Ray and of Optuna.

    python -m benchmarks.startup --out build/startup.json

CPU seconds (user and system, the child's own) and wall seconds of each command, the median of
several. Lists are of a store that holds a hundred models and a finished run. A run that is
finished, and has nothing left to do, is called again by `elastix run` and by a script with `fit()`;
beside it is what torch takes to be imported, which the script needs in any case.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.record import save
from elastix.events import RunEnded, RunStarted
from elastix.observe.journal import Journal
from elastix.state import State
from elastix.store import Store

SCRIPT = """
import torch

def train(ctx):
    model = torch.nn.Linear(4, 2)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dataset = torch.utils.data.TensorDataset(torch.ones(64, 4))
    for epoch in ctx.loader(dataset, batch_size=8).epochs(4):
        for (x,) in epoch:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""

FIT = """
import elastix

elastix.ElasticTrainer(
    train,
    scaling=elastix.ScalingConfig(num_workers=1, cpus_per_worker=0.5),
    run=elastix.RunConfig(name="fit", store={store!r}),
).fit()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        filled(Path(folder), given.models)
        os.environ.setdefault("RAY_worker_niceness", "0")  # else it waits behind all else
        (Path(folder) / "again.py").write_text(SCRIPT)
        (Path(folder) / "fit.py").write_text(SCRIPT + FIT.format(store=folder))
        for command in finished(folder).values():
            _once(command)  # to its end; from now on nothing is left to do
        found = {}
        for name, command in commands(folder):
            if shutil.which(command[0]) is None:
                print(f"{name}: not installed")
                continue
            cpu, wall = measured(command, given.repeats)
            found[name] = {"cpu_s": cpu, "wall_s": wall}
            print(f"{name:32} {cpu:6.2f} s of CPU {wall:6.2f} s")
    if given.out is not None:
        save(given.out, found)


def commands(store: str) -> Sequence[tuple[str, list[str]]]:
    """What is measured: a name, and what is typed."""
    here = Path(sys.executable).parent
    elastix, ray, optuna = (str(here / name) for name in ("elastix", "ray", "optuna"))
    where = ["--store", store]
    return (
        ("elastix --help", [elastix, "--help"]),
        ("elastix store --help", [elastix, "store", "--help"]),
        ("elastix store log", [elastix, "store", "log", *where]),
        ("elastix campaign list", [elastix, "campaign", "list", *where]),
        ("elastix report", [elastix, "report", "digits", *where]),
        *finished(store).items(),
        ("import torch", [sys.executable, "-c", "import torch"]),
        ("ray --help", [ray, "--help"]),
        ("optuna --help", [optuna, "--help"]),
    )


def finished(store: str) -> dict[str, list[str]]:
    """Calls of runs that are finished when each was called once."""
    elastix = str(Path(sys.executable).parent / "elastix")
    return {
        "elastix run, finished": [
            *(elastix, "run", f"{store}/again.py", "--store", store, "--cpus", "0.5")
        ],
        "fit, finished": [sys.executable, f"{store}/fit.py"],
    }


def filled(folder: Path, models: int) -> None:
    """A store with models and a run."""
    with Store(folder) as store:
        for number in range(models):
            store.put(State({"w": torch.full((64,), float(number))}, {"number": number}))
    with Journal(folder / "runs" / "digits" / "journal.jsonl") as journal:
        journal.append(RunStarted(name="digits", seed=0, config={}, scaling={}, versions={}))
        journal.append(RunEnded(outcome="finished", step=0))


def measured(command: Sequence[str], repeats: int) -> tuple[float, float]:
    """CPU and wall seconds, the median; the first run, which reads from disk, does not count."""
    pairs = [_once(command) for _ in range(repeats + 1)][1:]
    cpu, wall = zip(*pairs, strict=True)
    return statistics.median(cpu), statistics.median(wall)


def _once(command: Sequence[str]) -> tuple[float, float]:
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after, wall = os.times(), time.perf_counter() - began
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system, wall


if __name__ == "__main__":
    main()
