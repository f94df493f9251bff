"""What installing elastix takes: the wheel alone into a virtual environment that has nothing.

`python -m benchmarks.install --out FILE`. The wheel is built from this tree, pip installs it with
its dependencies (its cache is not used), and then `elastix --help` and README's first script run
there, and a report of that run, in an empty folder: nothing of this repository but the wheel is
within reach.

Results: seconds to build the wheel (`build_s`), to make the environment (`venv_s`), to install the
wheel (`install_s`), for `elastix --help` (`help_s`), README's first script (`first_run_s`) and the
report (`report_s`); `wheel_bytes`; `bytes` that the environment takes on the disk, of which torch
and Ray take `torch_bytes` and `ray_bytes`; `packages`, how many there are in it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import save

ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints.txt"


def quickstart(readme: str) -> str:
    """The first Python block of the README.

    Raises:
        ValueError: it has none.
    """
    found = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError("README.md has no Python block")
    return found[1]


def measure(folder: Path) -> dict[str, float]:
    """Build, install and run below an empty folder.

    Raises:
        subprocess.CalledProcessError: a command failed; what it said has been printed.
    """
    results: dict[str, float] = {}

    def timed(name: str, *command: str | Path, inside: Path = folder) -> None:
        began = time.perf_counter()
        subprocess.run(command, check=True, cwd=inside, env=clean_environment())
        results[name] = round(time.perf_counter() - began, 2)

    wheels, place, empty = folder / "dist", folder / "venv", folder / "empty"
    empty.mkdir()
    timed("build_s", sys.executable, "-m", "build", "--outdir", wheels, ROOT)
    (wheel,) = wheels.glob("*.whl")
    timed("venv_s", sys.executable, "-m", "venv", place)
    python = place / "bin" / "python"
    pip = (python, "-m", "pip", "--quiet", "--no-cache-dir", "install", "-c", PINS)
    timed("install_s", *pip, wheel)
    timed("help_s", place / "bin" / "elastix", "--help", inside=empty)
    script = empty / "first.py"
    script.write_text(quickstart((ROOT / "README.md").read_text("utf-8")), "utf-8")
    timed("first_run_s", python, script, inside=empty)
    timed("report_s", place / "bin" / "elastix", "report", "run", inside=empty)
    (packages,) = place.glob("lib/python*/site-packages")
    return results | {
        "wheel_bytes": wheel.stat().st_size,
        "bytes": size(place),
        "torch_bytes": size(packages / "torch"),
        "ray_bytes": size(packages / "ray"),
        "packages": sum(1 for _ in packages.glob("*.dist-info")),
    }


def size(folder: Path) -> int:
    """Bytes of the files below a folder, links not followed."""
    return sum(
        (Path(at) / name).lstat().st_size for at, _, names in os.walk(folder) for name in names
    )


def clean_environment() -> dict[str, str]:
    """This one without what would let a command find this repository or its environment.

    Python keeps what it compiles, as it does by itself: a test looks at that.
    """
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="an empty folder, in which all of it stays")
    options = parser.parse_args()
    if options.keep is not None:
        results = measure(options.keep.resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="elastix-install-") as folder:
            results = measure(Path(folder))
    print(json.dumps(results))
    save(options.out, results)


if __name__ == "__main__":
    main()
