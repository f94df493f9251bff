"""Is anything slower than it was? The same benchmarks in two trees, in turn, in one sitting.

    python -m benchmarks.before_after --before COMMIT --out FILE

Each round runs every benchmark in the older tree and then in this one, with the same interpreter
and the same libraries. What both print is put side by side: the medians over the rounds, the least
and the greatest, and the ratio of the medians. Nothing else may run on the machine.
A FILE that has the same older tree keeps what it has of other benchmarks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import save

HERE = Path(__file__).resolve().parent.parent
TREES = ("before", "after")

# Short forms: each a few minutes at most, so that the trees take turns on the same quiet machine.
BENCHMARKS = {
    "overhead": "--rounds 6 --steps 5",
    "recovery": "--repeats 2 --systems elastix",
    "executor": "--repeats 3 --trials 1500 --systems elastix_pool bare_pool",
    "store": "--models 60 --stored 5000 --traces 2 --rounds 5",
    "goodput": "--minutes 1.5 --kill-every 15 --systems elastix",
}


def numbers(found: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Each number in a result, with the way to it: ("models.mlp.ratio", 0.77)."""
    if isinstance(found, bool):
        return
    if isinstance(found, int | float):
        yield path, float(found)
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from numbers(value, f"{path}.{key}" if path else str(key))


def run(tree: Path, benchmark: str, out: Path) -> dict[str, float]:
    """What a benchmark finds in a tree."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *BENCHMARKS[benchmark].split()]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    with out.with_suffix(".log").open("w") as log:
        subprocess.run(
            [*command, "--out", str(out)],
            cwd=tree,
            env=environment,
            stdout=log,
            stderr=log,
            check=True,
            timeout=1800,
        )
    return dict(numbers(json.loads(out.read_text())))


def side_by_side(rounds: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """The numbers that every round of both trees has."""
    common = set.intersection(*(set(found) for tree in TREES for found in rounds[tree]))
    rows: dict[str, dict[str, Any]] = {}
    for name in (name for name in rounds["after"][0] if name in common):
        values = {tree: [found[name] for found in rounds[tree]] for tree in TREES}
        row: dict[str, Any] = {
            tree: {"median": median(v), "min": min(v), "max": max(v)} for tree, v in values.items()
        }
        before = row["before"]["median"]
        row["after_over_before"] = row["after"]["median"] / before if before else None
        rows[name] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", required=True, help="a commit")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    arguments = parser.parse_args()
    results: dict[str, Any] = {"before": arguments.before}
    if arguments.out.exists() and (found := json.loads(arguments.out.read_text())):
        results = found if found["before"] == arguments.before else results
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / "tree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", str(older), arguments.before], check=True)
        try:
            trees = {"before": older, "after": HERE}
            for benchmark in arguments.benchmarks:
                rounds: dict[str, list[dict[str, float]]] = {tree: [] for tree in TREES}
                for n in range(arguments.rounds):
                    for tree in TREES:
                        out = Path(folder) / f"{benchmark}-{tree}-{n}.json"
                        rounds[tree].append(run(trees[tree], benchmark, out))
                results[benchmark] = side_by_side(rounds)
                for name, row in results[benchmark].items():
                    print(
                        f"{benchmark:9} {name:60}"
                        f" {row['before']['median']:12.4g} {row['after']['median']:12.4g}",
                        flush=True,
                    )
                save(arguments.out, results)
        finally:
            subprocess.run([*git, "remove", "--force", str(older)], check=True)


if __name__ == "__main__":
    main()
