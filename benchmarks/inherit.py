"""What inheriting weights is worth: digits, a convnet of variable depth, 60 candidates of an epoch.

    python -m benchmarks.inherit --out FILE [--seeds 5]

Variants: evolution without inheritance, with LP, with LCS from the parent; LCS of weights alone,
without what the parent's optimizer had gathered on them; random search with LCS of weights from
the best match in the store; a control that inherits nothing and trains each candidate from
scratch for as many epochs as its lineage would have had; and screened evolution without inheritance
and with LCS. The first 16 candidates are random in all of them and count in no figure: *evolved*
ones are the other 44.

Afterwards the best five are trained until validation accuracy has not risen for three epochs:
from their own weights, and from scratch. `store_bytes_ratio` is the store's folder over one
safetensors file per model; `match_cpu_ms` the CPU time of a candidate for finding an ancestor,
matching layers, reading and copying tensors, `warm_start_cpu_ms` that for its optimizer's.
What FILE has of variants that are not run stays.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import save as file_of
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from benchmarks.goals import ROWS, value_of
from benchmarks.record import save
from elastix.config import InheritMode, InheritProvider
from elastix.search.inherit import Inherited, inherit
from elastix.search.searchers.evolution import Evolution
from elastix.search.searchers.random import Random
from elastix.search.searchers.screened import ScreenedEvolution
from elastix.search.space import Space
from elastix.search.trial import Config, Searcher, Suggestion, Trial, TrialState
from elastix.state import State, capture, warm_start
from elastix.store import Store, signature
from search_spaces import convnet

SPACE = Space((), convnet.space.blocks["body"])
"""Architectures alone: with the learning rate in it, a search finds that and little else."""
FIXED = {"lr": 1e-3, "dropout": 0.0}
CANDIDATES = 60
FIRST = 16
TOP = 5
GOOD = 0.8
_BATCH = 100
_PATIENCE = 3
_MOST_EPOCHS = 40
_CLOCK = "lineage_epochs"


@dataclass(frozen=True)
class Variant:
    """How candidates are proposed, and what they begin with."""

    searcher: Callable[[], Searcher]
    mode: InheritMode = "none"
    provider: InheritProvider = "parent"
    lineage_from_scratch: bool = False
    optimizer: bool = False


def _evolution() -> Searcher:
    return Evolution(population=FIRST, sample=8)


def _screened() -> Searcher:
    return ScreenedEvolution(population=FIRST, sample=8, initial=FIRST)


VARIANTS = {
    "none": Variant(_evolution),
    "lp": Variant(_evolution, "lp", optimizer=True),
    "lcs": Variant(_evolution, "lcs", optimizer=True),
    "lcs_weights": Variant(_evolution, "lcs"),
    "lcs_store_random": Variant(Random, "lcs", "store"),
    "equal_epochs": Variant(_evolution, lineage_from_scratch=True),
    "screened_none": Variant(_screened),
    "screened_lcs": Variant(_screened, "lcs", optimizer=True),
}


# --------------------------------------------------------------------------------- data, training

Part = tuple[torch.Tensor, torch.Tensor]


@lru_cache
def digits() -> tuple[Part, Part, Part]:
    """Training, validation and test images of 8 x 8 pixels."""
    found = load_digits()
    x = torch.tensor(found.images / 16.0, dtype=torch.float32)[:, None]
    y = torch.tensor(found.target)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = mixed[:1000], mixed[1000:1400], mixed[1400:]
    train, validation, test = ((x[part], y[part]) for part in parts)
    return train, validation, test


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, order: torch.Generator) -> None:
    """One pass over the training images."""
    x, y = digits()[0]
    model.train()
    for batch in torch.randperm(len(x), generator=order).split(_BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, part: Part) -> float:
    """Share of a part that is classified correctly."""
    model.eval()
    x, y = part
    return float((model(x).argmax(1) == y).double().mean())


def build(config: Config) -> nn.Module:
    """The convnet of an architecture."""
    return convnet.build({**FIXED, **config})


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Fresh."""
    return torch.optim.AdamW(model.parameters(), lr=FIXED["lr"])


def full_training(
    model: nn.Module, optimizer: torch.optim.Optimizer, order: torch.Generator
) -> tuple[int, float]:
    """Epochs until validation accuracy rises no more, and test accuracy at its best."""
    _, validation, test = digits()
    best, waited, epochs, at_best = accuracy(model, validation), 0, 0, accuracy(model, test)
    while waited < _PATIENCE and epochs < _MOST_EPOCHS:
        train_epoch(model, optimizer, order)
        epochs += 1
        reached = accuracy(model, validation)
        waited = 0 if reached > best else waited + 1
        if reached > best:
            best, at_best = reached, accuracy(model, test)
    return epochs, at_best


# ------------------------------------------------------------------------------------- one search


@dataclass
class Run:
    """One variant with one seed."""

    variant: Variant
    seed: int
    store: Store
    candidates: int = CANDIDATES
    epochs_spent: float = 0.0
    file_bytes: int = 0

    def __post_init__(self) -> None:
        self.trials: list[Trial] = []
        self.inherited: list[Inherited] = []
        self.warm_start_s: list[float] = []

    def search(self) -> None:
        """All candidates, one after the other."""
        searcher = self.variant.searcher()
        searcher.start(SPACE, seed=self.seed)
        for number in range(self.candidates):
            (suggestion,) = searcher.ask(1)
            self.trials.append(self._candidate(number, suggestion))
            searcher.tell(self.trials[-1:])

    def _candidate(self, number: int, suggestion: Suggestion) -> Trial:
        torch.manual_seed(self.seed * 1000 + number)
        order = torch.Generator().manual_seed(self.seed * 1000 + number)
        model = build(suggestion.config)
        found = inherit(
            model,
            self.store,
            mode=self.variant.mode,
            provider=self.variant.provider,
            parent=suggestion.parent,
        )
        before, epochs = 0.0, 1
        if found is not None:
            self.inherited.append(found)
            before = found.lineage_epochs
        elif self.variant.lineage_from_scratch and suggestion.parent_number is not None:
            epochs += int(self.trials[suggestion.parent_number].lineage_epochs)
        optimizer = optimizer_of(model)
        if found is not None and self.variant.optimizer:
            began = time.process_time()
            ancestor = self.store.get(found.ref, "@*", lazy=True)
            warm_start({"": model}, {"optimizer": optimizer}, ancestor, found.tensors)
            self.warm_start_s.append(time.process_time() - began)
        for _ in range(epochs):
            train_epoch(model, optimizer, order)
        self.epochs_spent += epochs
        score = accuracy(model, digits()[1])
        others = {"optimizer": optimizer} if self.variant.optimizer else {}
        state = capture({"": model}, others, {_CLOCK: before + epochs})
        self.file_bytes += len(file_of({k: v.contiguous() for k, v in state.tensors.items()}))
        parents = [found.ref] if found else []
        ref = self.store.put(state, parents=parents, signature=signature(model), score=score)
        return Trial(
            number,
            suggestion,
            TrialState.FINISHED,
            losses=(-score,),
            metrics={"accuracy": score},
            ref=ref,
            epochs=epochs,
            lineage_epochs=before + epochs,
        )

    def full(self) -> dict[str, list[float]]:
        """The best five to the end: from their own weights, and from scratch."""
        best = sorted(self.trials, key=lambda trial: trial.losses)[:TOP]
        found: dict[str, list[float]] = {}
        for trial in best:
            kept = self.store.get(str(trial.ref))
            for start, state in (("checkpoint", kept), ("scratch", None)):
                torch.manual_seed(self.seed * 1000 + 500 + trial.number)
                order = torch.Generator().manual_seed(self.seed * 1000 + 500 + trial.number)
                model = build(trial.config)
                optimizer = optimizer_of(model)
                if isinstance(state, State):
                    model.load_state_dict(dict(state.model))
                    same = {name: name for name in state.model}
                    warm_start({"": model}, {"optimizer": optimizer}, state, same)
                epochs, reached = full_training(model, optimizer, order)
                found.setdefault(f"full_epochs_{start}", []).append(epochs)
                found.setdefault(f"test_accuracy_{start}", []).append(reached)
        return found


def one_run(name: str, seed: int, candidates: int = CANDIDATES) -> dict[str, float]:
    """All figures of one variant with one seed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # as a worker of a pool does
    with tempfile.TemporaryDirectory() as folder:
        with Store(Path(folder) / "store") as store:
            run = Run(VARIANTS[name], seed, store, candidates)
            run.search()
            full = run.full()
        on_disk = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    scores = [trial.metrics["accuracy"] for trial in run.trials[FIRST:]]
    spent = [found.match_s + found.load_s for found in run.inherited]
    return {
        "evolved_mean": statistics.mean(scores),
        "share_over_080": sum(score > GOOD for score in scores) / len(scores),
        **{key: statistics.mean(values) for key, values in full.items()},
        "store_bytes_ratio": on_disk / run.file_bytes,
        "match_cpu_ms": 1000 * statistics.mean(spent or [0.0]),
        "warm_start_cpu_ms": 1000 * statistics.mean(run.warm_start_s or [0.0]),
        "epochs_spent": run.epochs_spent,
        "lineage_epochs": statistics.mean(trial.lineage_epochs for trial in run.trials[FIRST:]),
    }


def measure(
    names: Sequence[str], seeds: int, processes: int, candidates: int
) -> dict[str, dict[str, float]]:
    """Means over seeds; everything is printed as it comes."""
    results: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        runs = {
            name: [pool.submit(one_run, name, seed, candidates) for seed in range(seeds)]
            for name in names
        }
        for name, futures in runs.items():
            found = [future.result() for future in futures]
            results[name] = {key: statistics.mean(run[key] for run in found) for key in found[0]}
            shown = "  ".join(f"{key} {value:.3f}" for key, value in results[name].items())
            print(f"{name:17} {shown}", flush=True)
    return results


def verdicts(results: dict[str, dict[str, float]]) -> list[str]:
    """The goals of these numbers, each with what was measured."""
    rows = [(row, value_of(row, results)) for row in ROWS if row.benchmark == "inherit"]
    return [
        f"{row.what}: {row.shown.format(value)} (goal {row.goal})"
        for row, value in rows
        if value is not None
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--candidates", type=int, default=CANDIDATES, help=f"more than {FIRST}")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    out, names = arguments.out, arguments.variants
    known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    size = {"seeds": arguments.seeds, "candidates": arguments.candidates}
    usual = {"seeds": 5, "candidates": CANDIDATES}
    known = {
        name: found for name, found in known.items() if {**usual, **found}.items() >= size.items()
    }
    found = measure(names, arguments.seeds, arguments.processes, arguments.candidates)
    known |= {name: {**of, **size} for name, of in found.items()}
    results = {name: known[name] for name in VARIANTS if name in known}
    print(*verdicts(results), sep="\n")
    save(out, results, parts=names)


if __name__ == "__main__":
    main()
