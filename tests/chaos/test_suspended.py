"""All processes of a run are stopped for longer than a worker may be silent, and go on."""

import functools
import os
import signal
import sys
import threading
from pathlib import Path

from elastix.events import StepCommitted, WorkerLost, WorkerStarted
from elastix.observe import journal
from elastix.testing.local import run_local
from tests.chaos.test_controller import held, until
from tests.forked_scripts import Script

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 5.0
CODE = "from tests.chaos.test_suspended import lead; lead()"


def lead() -> None:
    """What the process does that leads the run."""
    directory = Path(sys.argv[1])
    config = {"model": "mlp", "samples": 120, "batch_size": 12, "epochs": 1}
    train = functools.partial(held, directory / "go")
    options = {"hang_timeout_s": TIMEOUT_S, "timeout_s": 250.0}
    run_local(train, 2, config=config, directory=directory, **options)


def told(directory: Path, kind: type) -> list:
    path = directory / "journal.jsonl"
    return [e for e in journal.read(path) if isinstance(e, kind)] if path.exists() else []


def test_a_run_that_was_suspended_goes_on_with_all_its_workers(tmp_path):
    script = Script(["-c", CODE, str(tmp_path)], ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        until(lambda: len(told(tmp_path, StepCommitted)) == 3)
        everybody = [script.pid, *(event.pid for event in told(tmp_path, WorkerStarted))]
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(2 * TIMEOUT_S)  # nothing can happen: the time is what is tested
        for pid in everybody:  # who leads the run is the first that finds out
            os.kill(pid, signal.SIGCONT)
        (tmp_path / "go").touch()
        assert script.wait() == 0
    finally:
        script.kill()
    assert not told(tmp_path, WorkerLost)
    assert len(told(tmp_path, StepCommitted)) == 10
