"""The fast tests, and a run with a kill, under the Pythons and with the torch and Ray allowed.

    python -m benchmarks.versions --out benchmarks/results/versions.json
    python -m benchmarks.versions 3.13:newest:newest 3.11:oldest:2.50 --out build/versions.json

One row after the other, each PYTHON:TORCH:RAY: a virtual environment in a temporary folder, into
it the wheel of this tree with what its tests need, then `tests/unit` without the slow ones, and
README's first script, in which Ray runs three workers and one is killed. `oldest` is the least
version that pyproject.toml allows, `newest` what pip takes by itself. The tests are those of this
tree and import its modules; README's script has only the wheel within reach.

Without a CPU build for a row's Python, torch brings some 3 GB of CUDA libraries. They are fetched
once for all rows, and everything is removed at the end.

Results: a row each, those of earlier calls stay: `asked`; `installed`, the versions of packages;
`install_s`; `tests`, with `passed`, `failed`, `skipped`, `seconds`, and of `failures` what each
said; `run`, with `passed`, `seconds`, and what it said if it failed. A row that could not be
installed has `not_installed`, the reason, and nothing else.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from xml.etree import ElementTree

from benchmarks.install import ROOT, clean_environment, quickstart
from benchmarks.record import save

NEWEST, OLDEST = "newest", "oldest"
_SHOWN = (
    *("torch", "ray", "numpy", "deephyper", "scikit-learn", "ConfigSpace", "pyarrow"),
    *("optuna", "transformers", "accelerate", "lightning-fabric", "onnx", "mlflow-skinny", "wandb"),
)
_CHECK = """
if result.worker_losses != 1 or not result.audit.exact:
    raise SystemExit(f"worker losses {result.worker_losses}, {result.audit}")
"""
_NOT_YET = "test_pyproject_names_no_python_that_has_not_passed"  # looks at what comes of this
_INSTALL_S = 1800
_TESTS_S = 3000
_RUN_S = 300
_SAID = 600


@dataclass(frozen=True)
class Row:
    """What is tried together.

    Attributes:
        python: such as "3.13".
        torch: a version such as "2.9", of which the last release is taken; or oldest, newest.
        ray: likewise.
    """

    python: str
    torch: str
    ray: str

    @classmethod
    def of(cls, text: str) -> Self:
        """From PYTHON:TORCH:RAY.

        Raises:
            ValueError: it is not that.
        """
        version = r"\d+\.\d+(?:\.\d+)?"
        known = rf"{version}|{NEWEST}|{OLDEST}"
        found = re.fullmatch(rf"({version}):({known}):({known})", text)
        if found is None:
            raise ValueError(f"{text}: give PYTHON:TORCH:RAY, such as 3.13:newest:2.50")
        return cls(*found.groups())

    def __str__(self) -> str:
        return f"{self.python}:{self.torch}:{self.ray}"


ROWS = (
    Row("3.13", NEWEST, NEWEST),
    Row("3.12", NEWEST, NEWEST),
    Row("3.11", OLDEST, OLDEST),
    Row("3.11", OLDEST, NEWEST),
)


class NotInstalled(Exception):
    """A row cannot be tried, and why."""


def oldest(package: str, pyproject: str) -> str:
    """The least version of a dependency that pyproject.toml allows.

    Raises:
        ValueError: it names none.
    """
    for line in tomllib.loads(pyproject)["project"]["dependencies"]:
        if found := re.match(rf"{re.escape(package)}(?:\[.*\])?>=([\d.]+)", line):
            return found[1]
    raise ValueError(f"pyproject.toml has no least version of {package}")


def requirements(row: Row, pyproject: str) -> list[str]:
    """What pip is told of torch and Ray."""
    asked = {"torch": row.torch, "ray": row.ray}
    pins = []
    for package, version in asked.items():
        if version == OLDEST:
            version = oldest(package, pyproject)
        pins.append(package if version == NEWEST else f"{package}=={version}.*")
    return pins


def interpreter(version: str) -> str:
    """Of that Python: from PATH, or of pyenv.

    Raises:
        NotInstalled: there is none.
    """
    known = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for python in (shutil.which(f"python{version}"), *map(str, known)):
        if python is not None and _works(python):
            return python
    raise NotInstalled(f"there is no python{version} here")


def _works(python: str) -> bool:
    """Whether it starts; what pyenv puts in PATH may not."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def tried(row: Row, wheel: Path, folder: Path, fetched: Path) -> dict[str, Any]:
    """What came of a row; see the module.

    Args:
        row: what is tried.
        wheel: of this tree.
        folder: in which its environment is made and removed.
        fetched: where pip keeps what it has fetched.
    """
    place = folder / f"{row}".replace(":", "-")
    try:
        began = time.perf_counter()
        python = installed(row, wheel, place, fetched)
        found: dict[str, Any] = {"install_s": round(time.perf_counter() - began, 1)}
        found |= {"installed": versions(python)}
        return found | {"run": run_with_a_kill(python, place), "tests": fast_tests(python, place)}
    except NotInstalled as reason:
        return {"not_installed": str(reason)}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def installed(row: Row, wheel: Path, place: Path, cache: Path) -> Path:
    """The interpreter of an environment that has it all.

    Raises:
        NotInstalled: there is no such Python, or pip fails; with what it said last.
    """
    subprocess.run([interpreter(row.python), "-m", "venv", place], check=True)
    python = place / "bin" / "python"
    pins = requirements(row, (ROOT / "pyproject.toml").read_text("utf-8"))
    pip: list[str | Path] = [python, "-m", "pip", "--quiet", "--cache-dir", cache, "install"]
    try:
        done = _called([*pip, *pins, f"{wheel}[dev]"], place, _INSTALL_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"pip took longer than {_INSTALL_S} s") from None
    if done.returncode:
        raise NotInstalled(f"pip: {done.stderr.strip()[-_SAID:]}")
    return python


def versions(python: Path) -> dict[str, str]:
    """Of Python and of what a fault would be looked for in; without those that are missing."""
    code = (
        "import json, platform, sys; from importlib.metadata import distributions\n"
        "print(json.dumps({'python': platform.python_version()}"
        " | {d.metadata['Name'].lower(): d.version for d in distributions()}))"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, check=True)
    found = json.loads(done.stdout)
    return {name: found[name.lower()] for name in ("python", *_SHOWN) if name.lower() in found}


def run_with_a_kill(python: Path, place: Path) -> dict[str, Any]:
    """README's first script in an empty folder: whether it ends well, with one worker lost."""
    empty = place / "empty"
    empty.mkdir()
    script = empty / "first.py"
    script.write_text(quickstart((ROOT / "README.md").read_text("utf-8")) + _CHECK, "utf-8")
    began = time.perf_counter()
    try:
        done = _called([python, script], empty, _RUN_S)
    except subprocess.TimeoutExpired:
        return {"passed": False, "seconds": _RUN_S, "said": "it did not end"}
    found = {"passed": done.returncode == 0, "seconds": round(time.perf_counter() - began, 1)}
    return found if found["passed"] else found | {"said": (done.stdout + done.stderr)[-_SAID:]}


def fast_tests(python: Path, place: Path) -> dict[str, Any]:
    """What pytest counts in `tests/unit`."""
    report = place / "tests.xml"
    pytest: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-k",
        f"not {_NOT_YET}",
    ]
    at_once = ["-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", f"--junitxml={report}"]
    try:
        done = _called([*pytest, *at_once, "tests/unit"], ROOT, _TESTS_S)
    except subprocess.TimeoutExpired:
        return {"failed": 1, "failures": {"pytest": f"it took longer than {_TESTS_S} s"}}
    if not report.exists():
        return {"failed": 1, "failures": {"pytest": (done.stdout + done.stderr)[-_SAID:]}}
    return counted(report.read_text("utf-8"))


def counted(report: str) -> dict[str, Any]:
    """Of a JUnit report; what could not be collected has failed."""
    tree = ElementTree.fromstring(report)
    cases = list(tree.iter("testcase"))
    bad = [case for case in cases if _said(case) is not None]
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "seconds": round(sum(float(suite.get("time", 0)) for suite in tree.iter("testsuite")), 1),
        "failures": {f"{case.get('classname')}::{case.get('name')}": _said(case) for case in bad},
    }


def _said(case: ElementTree.Element) -> str | None:
    """What a test that failed said; None of one that did not fail."""
    found = (case.find(kind) for kind in ("failure", "error"))
    said = [one.get("message", "") for one in found if one is not None]
    return said[0][:_SAID] if said else None


def passed(found: Mapping[str, Any]) -> bool:
    """Whether a row was installed and nothing in it failed."""
    return "tests" in found and found["tests"]["failed"] == 0 and bool(found["run"]["passed"])


def _called(
    command: Sequence[str | Path], inside: Path, limit_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=inside,
        env=clean_environment(),
        timeout=limit_s,
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    """Command line; how many rows did not pass."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", type=Row.of, metavar="PYTHON:TORCH:RAY")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fetched", type=Path, help="a folder that keeps what pip has fetched")
    options = parser.parse_args()
    rows: Sequence[Row] = options.rows or ROWS
    known = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    bad = 0
    with tempfile.TemporaryDirectory(prefix="elastix-versions-") as name:
        folder = Path(name)
        build: list[str | Path] = [sys.executable, "-m", "build"]
        build += ["--outdir", folder / "dist", ROOT]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = (folder / "dist").glob("*.whl")
        fetched = (options.fetched or folder / "fetched").absolute()
        for row in rows:
            known[str(row)] = found = {"asked": asdict(row)} | tried(row, wheel, folder, fetched)
            bad += not passed(found)
            print(f"{row}: {json.dumps(found)}", flush=True)
            save(options.out, known, parts=[str(row)])
    return bad


if __name__ == "__main__":
    sys.exit(main())
