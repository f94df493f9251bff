"""Measure every row, print it, and write one file; see the package.

What counts (schedules, flips, faults, quiet steps, all workers killed, compilations) may run on a
busy machine; what takes times needs a quiet one. `--parts` names what to measure; what else is in
the file stays there, so that one file may be made bit by bit. Counts so far are kept beside it, in
FILE.PART.runs.jsonl, until all parts are done: a second call of the same goes on there.
"""

import argparse
import fcntl
import importlib.util
import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoint, recovery
from benchmarks.exact import compiled, cost, fire, flips, guards, pace, shadow, shares
from benchmarks.exact.counting import Case, Counts, counted
from benchmarks.overhead import MODELS
from benchmarks.record import code, save

_SHADOWED = "mlp"
"""Of 10.5 M parameters: a State of 126 MB."""

_STATE_MB = 126

Details = Mapping[str, Any]

TIMED: dict[str, Callable[[Namespace], Any]] = {
    **{
        f"cost_{model}": partial(lambda model, o: cost.measure(model, o.rounds, o.steps), model)
        for model in MODELS
    },
    "stall": lambda o: fire.stalls(max(2, o.rounds // 2)),
    "pace": lambda o: pace.measure(o.rounds * o.steps),
    "shares": lambda o: shares.measure(10 * o.steps),
    "shadow": lambda o: shadow.stall_ms(_SHADOWED, 4 * o.steps),
    "dcp": lambda o: _dcp(max(2, o.rounds // 4)),
    "torchft": lambda o: _torchft(max(1, o.rounds // 4)),
}

COUNTED: dict[str, tuple[Case, int, str]] = {
    "byte_equal": (fire.schedule, 1, "schedules"),
    "flips": (flips.case, flips.EACH, "flips"),
    "guard": (guards.case, guards.EACH, "faults"),
    "quiet": (guards.quiet, guards.EACH_QUIET, "quiet_steps"),
    "all_killed": (shadow.killed, 1, "kills"),
}
"""What makes one run, how many in it, and which option says how many in all."""

COMPILED = {f"compiled_{model}": model for model in compiled.MODELS}
_COSTS = ("slices_over_today", "eight_slices_over_plain", "exact_over_slices")
_COUNTS = {
    "byte_equal": ("schedules", "equal"),
    "flips": ("state_found", "gradient_found", "culprit_named", "false_alarms"),
    "guard": ("faults", "found", "false_alarms", "corrupt_states"),
}
"""Of which parts the documented keys have which counts."""

PARTS = (*COUNTED, *COMPILED, *TIMED)


def summary(details: Details) -> dict[str, Any]:
    """The documented keys, of those parts that are there."""
    return {**_timed(details), **_counts(details), "peers": _peers(details)}


def _timed(details: Details) -> dict[str, Any]:
    found: dict[str, Any] = {}
    costs = [details[part] for part in details if part.startswith("cost_")]
    for key in _COSTS if costs else ():
        found[key] = max(row[key]["median"] for row in costs)
    if "stall" in details:
        found["stall_s"] = {key: details["stall"][key] for key in ("median", "max")}
        found["batch_kept"] = details["stall"]["batch_kept"]
    if "pace" in details:
        found["slow_over_ideal"] = details["pace"]["over_ideal"]
    for kind in ("sentinel", "guard") if "shares" in details else ():
        found[f"{kind}_share"] = max(row[kind] for row in details["shares"]["models"].values())
    if "shadow" in details:
        stall = details["shadow"]["median"] - details["shadow"]["idle_ms"]
        found["shadow_stall_ms"] = max(0.0, stall)
    return found


def _counts(details: Details) -> dict[str, Any]:
    found = {
        part: {key: details[part][key] for key in keys}
        for part, keys in _COUNTS.items()
        if part in details
    }
    if "flips" in found and "quiet" in details:
        found["flips"]["false_alarms"] += details["quiet"]["false_alarms"]
    compilations = [details[part]["recompilations"] for part in COMPILED if part in details]
    alone = {"recompilations": sum(compilations)} if compilations else {}
    if "all_killed" in details:
        alone["steps_lost_all_killed"] = details["all_killed"]["steps_lost"]
    return {**found, **alone}


def _peers(details: Details) -> dict[str, Any]:
    costs = {model: details.get(f"cost_{model}") for model in MODELS}
    found = {f"ddp_accumulating_{model}_s": c["ddp_s"] for model, c in costs.items() if c}
    if "dcp" in details:
        found["checkpoint_stall_ms"] = details["dcp"]
    if details.get("torchft"):
        found["torchft_stall_s"] = details["torchft"]["stall_s"]
    return found


def _dcp(rounds: int) -> dict[str, float]:
    """Torch's distributed checkpoint beside ours, for a State of that size."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        return checkpoint.measure(rounds, _STATE_MB, 0.5, Path(directory))["stall_ms"]


def _torchft(kills: int) -> dict[str, Any] | None:
    """None where it is not installed."""
    if importlib.util.find_spec("torchft") is None:
        return None
    return recovery.measure_peer("torchft, heartbeat 0.5 s, operation timeout 1 s", kills)


class Measured:
    """The file, which grows with each part; two processes may measure parts of one."""

    def __init__(self, out: Path) -> None:
        self._out = out
        out.parent.mkdir(parents=True, exist_ok=True)

    def tell(self, name: str, found: Any) -> None:  # noqa: ANN401 - JSON
        """Put one part there."""
        with self._out.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            details = {**self._details(), name: found}
            save(self._out, {**summary(details), "details": details}, parts=[name])

    def counted(self, name: str, case: Case, amount: int, each: int) -> Counts:
        """The counts of a part, from where a call was stopped that wanted as many of this code."""
        kept = self._kept(name)
        known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        same = known.get("amount") == amount and known.get("code") == code()
        so_far = known["counts"] if same else None
        if so_far:
            print(f"{name}: goes on after {so_far['done']:g} of {amount}", flush=True)

        def keep(counts: Counts) -> None:
            text = json.dumps({"amount": amount, "code": code(), "counts": counts})
            new = kept.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(kept)

        return counted(case, amount, each, so_far=so_far, tell=keep)

    def ended(self, names: Iterable[str]) -> None:
        """All of these are in the file: the next call begins anew."""
        for name in names:
            self._kept(name).unlink(missing_ok=True)

    def _kept(self, name: str) -> Path:
        return self._out.with_name(f"{self._out.name}.{name}.runs.jsonl")

    def _details(self) -> dict[str, Any]:
        if not self._out.exists():
            return {}
        found: dict[str, Any] = json.loads(self._out.read_text(encoding="utf-8"))["details"]
        return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(";")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--rounds", type=int, default=20, help="blocks of steps; kills are half")
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--schedules", type=int, default=50, help="of kills, byte by byte")
    parser.add_argument("--flips", type=int, default=300, help="of bits")
    parser.add_argument("--faults", type=int, default=200, help="for the guard")
    parser.add_argument("--quiet-steps", type=int, default=100_000, help="for false alarms")
    parser.add_argument("--kills", type=int, default=20, help="of all workers at once")
    parser.add_argument("--losses", type=int, default=10, help="of workers that compile")
    options = parser.parse_args()
    file = Measured(options.out)
    for part in options.parts:
        if part in COUNTED:
            case, each, amount = COUNTED[part]
            found: Any = file.counted(part, case, getattr(options, amount), each)
        elif part in COMPILED:
            found = compiled.measure(COMPILED[part], options.losses)
        else:
            found = TIMED[part](options)
        file.tell(part, found)
        print(f"{part}: {json.dumps(found)}", flush=True)
    file.ended(options.parts)


if __name__ == "__main__":
    main()
