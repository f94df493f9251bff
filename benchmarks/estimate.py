"""Estimates of `elastix estimate` beside what training steps take on this machine.

    python -m benchmarks.estimate --out FILE [--rounds 5]

Per model: `peak_ratio`, bytes resident at the peak over those estimated, and `step_ratio`, the
roofline of a step over the quickest step. Machine and steps are measured in turns, and the best
of each counts: other work only ever makes them slower.
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks import steps
from benchmarks.record import save
from elastix.cost.devices import this_machine
from elastix.cost.trace import trace
from elastix.testing.local import run_local


def measured(name: str) -> tuple[float, float]:
    """Bytes at the peak, and seconds of the quickest of five steps, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        config = {"model": name, "steps": 5, "out": str(out)}
        run_local(steps.measure, 1, config=config, timeout_s=100)
        found = json.loads(out.read_text())
    return float(found["peak_bytes"]), float(min(found["times_s"]))


def compare(name: str, rounds: int) -> dict[str, float]:
    """All figures of one model."""
    build, inputs = steps.MODELS[name]
    estimate = trace(build, lambda: (inputs(),), foreach=False)
    peaks, times, rooflines = [], [], []
    for _ in range(rounds):
        machine = this_machine(threads=1)
        rooflines.append(estimate.roofline_s(machine.peak("float32"), machine.bytes_per_s))
        peak, step_s = measured(name)
        peaks.append(peak)
        times.append(step_s)
    return {
        "peak_bytes": max(peaks),
        "peak_ratio": max(peaks) / estimate.peak_bytes,
        "step_s": min(times),
        "step_ratio": min(rooflines) / min(times),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = {}
    for name in steps.MODELS:
        results[name] = compare(name, options.rounds)
        shown = "  ".join(f"{key} {value:.3g}" for key, value in results[name].items())
        print(f"{name:12} {shown}", flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
