"""Does the simulation predict what losses cost? `python -m benchmarks.prediction --out FILE`.

A run is that of benchmarks.goodput: five workers on Ray, one killed every so often. Its journal
says what a step, a recovery, a start and a join took. elastix.testing.simulate is given these and
the moments of the kills, and says what goodput comes of it. The error is that of the loss:
|predicted - measured| / (1 - measured).

Each run is kept when it ends, in FILE.runs.jsonl, and a second call of the same goes on there.
Remove that file to begin anew.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.goodput import measure_elastix
from benchmarks.record import code, save

Run = Mapping[str, Any]


def error(run: Run) -> float:
    """Of the predicted loss of goodput, relative to the measured one."""
    return float(abs(run["predicted_elastix"] - run["elastix"]) / (1 - run["elastix"]))


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """What the result file holds: median, least and most of all runs, and the runs."""
    series = {
        "measured": [run["elastix"] for run in runs],
        "predicted": [run["predicted_elastix"] for run in runs],
        "loss_error": [error(run) for run in runs],
    }
    return {
        **{
            name: {
                "median": round(statistics.median(values), 4),
                "min": round(min(values), 4),
                "max": round(max(values), 4),
            }
            for name, values in series.items()
        },
        "runs": list(runs),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds")
    parser.add_argument("--minutes", type=float, default=1.0, help="of a run")
    options = parser.parse_args()
    kept = options.out.with_name(f"{options.out.name}.runs.jsonl")
    kept.parent.mkdir(parents=True, exist_ok=True)
    every_s, minutes = options.kill_every, options.minutes
    wanted = [every_s, minutes, code()]
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    runs = [run for *of, run in map(json.loads, lines) if of == wanted]
    for number in range(len(runs), options.runs):
        runs.append(measure_elastix(every_s, minutes, seed=number))
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps([*wanted, runs[-1]]) + "\n")
        print(f"{number + 1} of {options.runs}: error {error(runs[-1]):.2f}", flush=True)
    save(options.out, summary(runs))
    kept.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
