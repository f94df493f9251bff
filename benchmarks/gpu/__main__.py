"""Measure every part in a process of its own, print it, and write one file; see the package."""

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import Terms
from benchmarks.record import save

PARTS: dict[str, float] = {
    "overhead": 0.2,
    "stall": 0.3,
    "read": 0.1,
    "packing": 0.3,
    "estimate": 0.1,
}
"""By part, its share of the time in which things are measured."""

_BESIDE = 0.65  # of all the time: starting, compiling, and making what is measured
_LONGEST_S = 150.0  # of a part, before it is ended
_ROOM = 30e9  # bytes of files at the most


def folder_for_files() -> Path:
    """One in memory, if there is room: disks are not what is measured."""
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > _ROOM
    return Path(tempfile.mkdtemp(prefix="elastix-gpu-", dir=shm if roomy else None))


def about_device(device: str) -> dict[str, Any]:
    """Its name and the versions, without using it."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "name": device,
    }
    if device == "cpu":
        return found
    found["cudnn"] = torch.backends.cudnn.version()
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        index = torch.device(device).index or 0
        row = said.strip().splitlines()[index].split(", ")
        found |= dict(zip(("name", "driver", "memory"), row, strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        found["nvidia_smi"] = repr(error)
        found["name"] = torch.cuda.get_device_name(device)
    return found


def measured_here(
    part: str,
    device: str,
    *,
    tiny: bool,
    seconds: float,
    folder: Path,
    turn: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """One part, in this process: {"found": ...} or {"failed": the traceback}.

    `turn` returns when it may begin; the others are those of Terms.
    """
    try:
        module = importlib.import_module(f"benchmarks.gpu.{part}")
        turn()
        on = torch.device(device)
        if on.type == "cuda":
            torch.cuda.init()
            torch.cuda.set_device(on)
        return {"found": module.measure(Terms(on, tiny, seconds, folder))}
    except Exception:  # noqa: BLE001 - the others are measured nevertheless
        return {"failed": traceback.format_exc()}


def _await_turn() -> None:
    if not sys.stdin.readline():
        raise EOFError("whoever has started this part is gone")


class Apart:
    """A part in a process of its own, which imports what it needs and then waits for its turn."""

    def __init__(self, part: str, device: str, *, tiny: bool, seconds: float) -> None:
        self._folder = folder_for_files()
        self._out = self._folder / "out.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(self._out)]
        command += ["--only", part, "--device", device, "--seconds-budget", str(seconds)]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
        self._process = subprocess.Popen(
            command + ["--tiny"] * tiny,
            env=environment,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def measured(self, longest_s: float = _LONGEST_S) -> dict[str, Any]:
        """It is its turn: {"found": ...} or {"failed": why}; it is ended if it takes too long."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(b"go\n", timeout=longest_s)
        code = self._process.poll()
        if self._out.exists():
            found: dict[str, Any] = json.loads(self._out.read_text(encoding="utf-8"))
            return found
        if code is None:
            return {"failed": f"it was not over after {longest_s:.0f} s, and was ended"}
        return {"failed": f"its process ended with {code} and told nothing"}

    def end(self) -> None:
        """Leave nothing of it behind, its own processes among it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def measure(
    parts: Sequence[str], device: str, *, tiny: bool, budget_s: float, out: Path
) -> dict[str, Any]:
    """All of them; the file is written after each, and keeps other parts of the same device."""
    results: dict[str, Any] = {"device": about_device(device)}
    known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if known.get("device", {}).get("name") == results["device"]["name"]:
        known.pop("failed", None)  # that was another call
        results = {**known, **results}
    seconds = budget_s * (1 - _BESIDE)
    waiting = {p: Apart(p, device, tiny=tiny, seconds=seconds * PARTS[p]) for p in parts}
    try:
        for part, apart in waiting.items():
            began = time.monotonic()
            found = apart.measured()
            apart.end()
            results.pop(part, None)
            if "failed" in found:
                results.setdefault("failed", {})[part] = found["failed"]
            else:
                results[part] = found["found"]
            results.setdefault("seconds", {})[part] = round(time.monotonic() - began, 1)
            print(f"{part}: {json.dumps(found, indent=2)}", flush=True)
            save(out, results, parts=[part])
    finally:
        for apart in waiting.values():
            apart.end()
    return results


def main() -> int:
    """Command line; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(";")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds-budget", type=float, default=150.0, help="of all parts")
    parser.add_argument("--device", default="cuda:0", help="cpu, to see that it runs")
    parser.add_argument("--tiny", action="store_true", help="numbers that say nothing, soon")
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda:0" if options.device == "cuda" else options.device
    if device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny shows that it runs")
    if options.only:
        how = {"tiny": options.tiny, "seconds": options.seconds_budget}
        folder = options.out.parent
        found = measured_here(options.only, device, **how, folder=folder, turn=_await_turn)
        options.out.write_text(json.dumps(found), encoding="utf-8")
        return 0
    budget_s = options.seconds_budget
    tiny, out = options.tiny, options.out
    results = measure(options.parts, device, tiny=tiny, budget_s=budget_s, out=out)
    return 1 if "failed" in results else 0


if __name__ == "__main__":
    sys.exit(main())
