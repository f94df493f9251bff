"""What the examples make of their arguments. That they run is `make examples`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*.py"))
SCRIPTS.remove("examples/search.py")  # as short as can be


SOON = ["examples/search_then_train.py", "jobs/demo.py"]
LATER = [pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS if script not in SOON]


@pytest.mark.parametrize("script", [*SOON, *LATER])
def test_help_is_no_path_and_starts_nothing(script, tmp_path):
    command = [sys.executable, ROOT / script, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []
