"""Estimates of `elastix estimate` beside what training steps take on this machine.

    python -m benchmarks.estimate --out FILE [--rounds 5]

Per model: `peak_ratio`, bytes resident at the peak over those estimated, and `step_ratio`, the
roofline of a step over the quickest step. Machine and steps are measured in turns, and the best
of each counts: other work only ever makes them slower. Of workers that are two processes, memory
alone: bytes resident at the peak of either process over those estimated for a place.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks import steps
from benchmarks.record import save
from elastix.cost.devices import this_machine
from elastix.cost.trace import Cost, trace
from elastix.testing.local import run_local


def measured(
    name: str, mesh: Mapping[str, int] | None = None, steps_taken: int = 5
) -> tuple[float, float]:
    """Bytes at the peak, and seconds of the quickest step, in processes of their own.

    Args:
        name: of the model.
        mesh: that of the worker, if it is a crew; what counts then is the process with the most.
        steps_taken: the first makes what an optimizer keeps, so the peak is in the second.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured"
        config = {"model": name, "mesh": dict(mesh or {}), "steps": steps_taken, "out": str(out)}
        run_local(steps.measure, 1, config=config, crew=mesh, timeout_s=100)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("measured-*")]
    peaks, times = zip(*((one["peak_bytes"], min(one["times_s"])) for one in found), strict=True)
    return float(max(peaks)), float(min(times))


def estimated(name: str, mesh: Mapping[str, int]) -> Cost:
    """What a process of such a worker is said to take."""
    build, inputs = steps.MODELS[name]

    def mine() -> tuple[torch.Tensor]:
        batch = inputs()
        return (batch[: len(batch) // mesh.get("shard", 1)],)

    return trace(build, mine, foreach=False, mesh=mesh, parallelize=steps.parallelize)


def compare_place(name: str, mesh: Mapping[str, int], rounds: int) -> dict[str, float]:
    """Memory of a process of a crew. Not its time, of which estimates leave out what is sent."""
    peak = max(measured(name, mesh)[0] for _ in range(rounds))
    return {"peak_bytes": peak, "peak_ratio": peak / estimated(name, mesh).peak_bytes}


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


def _show(name: str, found: Mapping[str, float]) -> None:
    shown = "  ".join(f"{key} {value:.3g}" for key, value in found.items())
    print(f"{name:20} {shown}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = {}
    for name in steps.MODELS:
        results[name] = compare(name, options.rounds)
        _show(name, results[name])
    for name, (model, mesh) in steps.MESHES.items():
        results[name] = compare_place(model, mesh, options.rounds)
        _show(name, results[name])
    save(options.out, results)


if __name__ == "__main__":
    main()
