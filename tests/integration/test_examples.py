"""What the examples make of their arguments. That they run is `make examples`."""

import os
from pathlib import Path

import pytest

from tests.forked_scripts import Script

ROOT = Path(__file__).parents[2]


SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*.py"))
SCRIPTS.remove("examples/search.py")  # as short as can be


SOON = ["examples/search_then_train.py", "jobs/demo.py"]
LATER = [pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS if script not in SOON]


AS_PYTHON_DOES = """
import runpy, sys
from pathlib import Path

del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", [*SOON, *LATER])
def test_help_is_no_path_and_starts_nothing(script, tmp_path):
    words = ["-c", AS_PYTHON_DOES, str(ROOT / script), "--help"]
    started = Script(words, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    said, complaints = started.stdout.read(), started.stderr.read()
    assert started.wait() == 0, complaints
    assert said.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []
