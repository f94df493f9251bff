"""Where a benchmark's numbers go, and under what circumstances they were taken.

A result file holds the numbers and nothing else, under the keys that the benchmark documents.
Date, versions, machine size and the command stand beside them, in `about.json` of the same folder.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ABOUT = "about.json"
_PACKAGES = (
    *("elastix", "torch", "ray", "numpy", "torchft", "deephyper", "optuna", "ConfigSpace"),
    *("safetensors", "h5py"),
)


def save(out: Path, results: Mapping[str, Any], parts: Iterable[str] = ()) -> None:
    """Write the numbers to `out`, and the circumstances to `about.json` beside it.

    Args:
        out: file to write; its folder is made.
        results: JSON values.
        parts: which of these were measured now, if the others are older; each keeps its own date.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    path = out.parent / ABOUT
    about = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    now = circumstances()
    if parts:
        older = about.get(out.stem, {}).get("parts", {})
        now["parts"] = older | {part: {k: now[k] for k in ("date", "command")} for part in parts}
    about[out.stem] = now
    path.write_text(json.dumps(dict(sorted(about.items())), indent=2) + "\n", encoding="utf-8")


def circumstances() -> dict[str, Any]:
    """Date, command, time taken, size of the machine, and versions of what is measured."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    command = [f"python -m {module.name}" if module else "python", *sys.argv[1:]]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "seconds": round(time.time() - psutil.Process().create_time()),  # of this process so far
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
