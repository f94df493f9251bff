"""Train a parent, derive two children with frozen layers, and see what the store makes of them.

    python examples/lineage.py [FOLDER]

Prints the lineage, who first wrote which tensor, and the bytes that sharing saves.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from elastix.state import capture
from elastix.store import Store, shared, signature

DIGITS = load_digits()
X = torch.tensor(DIGITS.data / 16.0, dtype=torch.float32).view(-1, 1, 8, 8)
Y = torch.tensor(DIGITS.target)
TRAIN, TEST = slice(0, 1400), slice(1400, None)


def build(head: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 64, head),
        nn.ReLU(),
        nn.Linear(head, 10),
    )


def train(model: nn.Module, steps: int) -> float:
    """A few steps on what is not frozen; the accuracy afterwards."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(0, 1400, (128,))
        optimizer.zero_grad()
        F.cross_entropy(model(X[batch]), Y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(X[TEST]).argmax(1) == Y[TEST]).float().mean())


def main(folder: Path) -> None:
    torch.manual_seed(0)
    with Store(folder) as store:
        model = build(head=128)
        accuracy = train(model, steps=60)
        parent = store.put(
            capture({"": model}, {}, {"accuracy": accuracy}),
            signature=signature(model),
            score=accuracy,
        )
        store.tag("parent", parent)
        names = {parent: "parent"}

        for name, head, frozen in (("new-output", 128, (0, 2, 5)), ("wide-head", 192, (0, 2))):
            child = build(head)
            mine = signature(child)
            # The stored model that shares most layers; here, among those with this tag.
            match = store.nearest(mine, "lcs", tagged="parent")
            if match is None:
                raise SystemExit("the store holds no model that shares a layer")
            theirs = store.signature(match.ref)
            source = store.get(match.ref).model
            own = child.state_dict()
            for to, come_from in shared(mine, theirs, "lcs") if theirs else []:
                for tensor, _ in to.tensors:
                    own[f"{to.name}.{tensor}"].copy_(source[f"{come_from.name}.{tensor}"])
            for place in frozen:
                child[place].requires_grad_(False)
            accuracy = train(child, steps=60)
            ref = store.put(
                capture({"": child}, {}, {"accuracy": accuracy, "inherited": match.length}),
                parents=[match.ref],
                signature=mine,
                score=accuracy,
            )
            store.tag(name, ref)
            names[ref] = name

        models = [entry for entry in reversed(store.log()) if entry.ref in names]
        print("lineage")
        for entry in models:
            line = " <- ".join(names[r] for r in (entry.ref, *store.ancestors(entry.ref)))
            print(f"  {line:40} accuracy {entry.score:.3f}")
        print("who first wrote it")
        for entry in models:
            owners = {
                t: names[store.owner(entry.ref, t)] for t in store.manifest(entry.ref).tensors
            }
            print(f"  {names[entry.ref]:10} " + "  ".join(f"{t}: {o}" for t, o in owners.items()))
        stats = store.stats()
        saved = stats.logical_bytes - stats.unique_bytes
        print(
            f"bytes    {stats.logical_bytes:,} in {stats.models} models, {stats.unique_bytes:,} "
            f"kept, {saved:,} saved (dedup {stats.dedup_ratio:.2f}x)"
        )


if __name__ == "__main__":
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
    parser.add_argument(
        "folder", nargs="?", type=Path, help="the store; a temporary one by default"
    )
    asked = parser.parse_args()
    if asked.folder:
        main(asked.folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "store")
