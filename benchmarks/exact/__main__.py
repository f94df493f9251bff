"""Measure every row, print it, and write one file; see the package."""

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint, recovery
from benchmarks.exact import cost, fire, flips, pace, shadow, shares
from benchmarks.record import save

_SHADOWED = "mlp"
"""Of 10.5 M parameters: a State of 126 MB."""

_STATE_MB = 126


def _worst(by_model: Mapping[str, Mapping[str, Any]], key: str) -> float:
    return float(max(row[key]["median"] for row in by_model.values()))


def _peers(rounds: int) -> dict[str, Any]:
    """Torch's distributed checkpoint beside ours, for a State of that size; torchft, if here."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        stored = checkpoint.measure(max(2, rounds // 4), _STATE_MB, 0.5, Path(directory))
    found: dict[str, Any] = {"checkpoint_stall_ms": stored["stall_ms"], "torchft": None}
    if importlib.util.find_spec("torchft") is not None:
        found["torchft"] = recovery.measure_peer("torchft, heartbeat 0.5 s", max(1, rounds // 4))
    return found


def main() -> None:
    """All rows; the file grows with each, so that what was measured stands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20, help="blocks of steps; kills are half")
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--schedules", type=int, default=50, help="of kills, byte by byte")
    parser.add_argument("--flips", type=int, default=60, help="of bits; 300 take half an hour")
    options = parser.parse_args()
    rounds, steps = options.rounds, options.steps
    results: dict[str, Any] = {}
    details: dict[str, Any] = {}

    def row(name: str, measure: Callable[[], Any]) -> Any:  # noqa: ANN401 - JSON
        details[name] = found = measure()
        print(f"{name}: {json.dumps(found)}", flush=True)
        return found

    def tell(**found: Any) -> None:  # noqa: ANN401 - JSON
        results.update(found)
        save(options.out, {**results, "details": details})

    models = row("cost", lambda: cost.measure(rounds, steps))
    keys = ("slices_over_today", "eight_slices_over_plain", "exact_over_slices")
    tell(**{key: _worst(models, key) for key in keys})
    stalls = row("stall", lambda: fire.stalls(max(2, rounds // 2)))
    tell(stall_s={"median": stalls["median"], "max": stalls["max"]})
    tell(batch_kept=stalls["batch_kept"])
    tell(slow_over_ideal=row("pace", lambda: pace.measure(rounds * steps))["over_ideal"])
    taken = row("shares", lambda: shares.measure(10 * steps))["models"].values()
    for kind in ("sentinel", "guard"):
        tell(**{f"{kind}_share": max(share[kind] for share in taken)})
    stall = row("shadow", lambda: shadow.stall_ms(_SHADOWED, 2 * steps))
    tell(shadow_stall_ms=stall["median"])
    killed = row("all_killed", lambda: shadow.all_killed(max(3, rounds // 4)))
    tell(steps_lost_all_killed=killed["steps_lost"])
    tell(byte_equal=row("byte_equal", lambda: fire.schedules(options.schedules)))
    flipped = row("flips", lambda: flips.measure(options.flips))
    of = ("state_found", "gradient_found", "culprit_named", "false_alarms")
    tell(flips={key: flipped[key] for key in of})
    torch_s = {f"ddp_accumulating_{model}_s": found["ddp_s"] for model, found in models.items()}
    tell(peers={**torch_s, **row("peers", lambda: _peers(rounds))})
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
