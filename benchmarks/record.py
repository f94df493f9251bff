"""Where a benchmark's numbers go, and under what circumstances they were taken.

A result file holds the numbers and nothing else, under the keys that the benchmark documents.
Date, versions, machine size and the command stand beside them, in `about.json` of the same folder.
Neither says where anything lies on this machine.
"""

import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ABOUT = "about.json"
_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = (
    *("elastix", "torch", "ray", "numpy", "torchft", "deephyper", "optuna", "ConfigSpace"),
    *("safetensors", "h5py"),
)


def save(out: Path, results: Mapping[str, Any], parts: Iterable[str] = ()) -> None:
    """Write the numbers to `out`, and the circumstances to `about.json` beside it.

    Args:
        out: file to write; its folder is made.
        results: JSON values.
        parts: which of these were measured now, if the others are older; each keeps its own
            circumstances.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(without_places(json.dumps(results, indent=2)) + "\n", encoding="utf-8")
    path = out.parent / ABOUT
    about = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    now = circumstances()
    if parts:
        former = about.get(out.stem, {})
        older = former.get("parts") or ({"before": former} if former else {})
        now["parts"] = older | {part: dict(now) for part in parts}
    about[out.stem] = now
    path.write_text(json.dumps(dict(sorted(about.items())), indent=2) + "\n", encoding="utf-8")


@cache
def code() -> str:
    """A digest of the package and the benchmarks: what a stopped call has kept is of this code."""
    digest = hashlib.sha256()
    for folder in ("elastix", "benchmarks"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def circumstances() -> dict[str, Any]:
    """Date, command, time taken, size of the machine, and versions of what is measured."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    package = module.name.removesuffix(".__main__") if module else ""
    command = [f"python -m {package}" if module else "python", *map(_without_place, sys.argv[1:])]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "seconds": round(time.time() - psutil.Process().create_time()),  # of this process so far
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def without_places(text: str) -> str:
    """`text` with no folder of this machine that a message of a benchmark may name."""
    places = {
        f"{_ROOT}/": "",
        sys.prefix: "ENVIRONMENT",
        sys.base_prefix: "PYTHON",
        tempfile.gettempdir(): "TEMPORARY",
        str(Path.home()): "HOME",
    }
    for place, said in sorted(places.items(), key=lambda item: -len(item[0])):
        text = text.replace(place, said) if len(place) > 1 else text
    return text


def _without_place(argument: str) -> str:
    """An argument as it would be said in the repository; of a path elsewhere its last part."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else path.name


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
