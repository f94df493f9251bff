"""What a script prints last when its run has ended badly."""

import signal
import subprocess
import sys

import pytest

HEAD = """
import sys
from elastix.errors import WorkerFailed
from elastix.observe.excepthook import told

sys.excepthook = lambda kind, error, trace: print("another hook", kind.__name__)

def mine():
"""


def script(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{HEAD}    {body}\nmine()"], capture_output=True, text=True
    )


def test_ctrl_c_adds_nothing_and_the_shell_still_sees_the_signal():
    done = script("raise told(KeyboardInterrupt()) from None")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", -signal.SIGINT)


def test_an_error_that_was_told_comes_with_the_users_frames_and_its_message_once():
    # Put together there: Python 3.13 shows the lines of a script that came with -c, too.
    error = "WorkerFailed('it rai' 'sed.', 0, 1, 'LO' 'NG')"
    body = f"error = {error}; error.shown = True; raise told(error)"
    done = script(body)
    assert done.returncode == 1
    assert "in mine" in done.stderr
    assert done.stderr.count("it raised.") == 1
    assert "LONG" not in done.stderr


@pytest.mark.parametrize("body", ["raise ValueError", "told(ValueError()); raise ValueError"])
def test_other_errors_go_where_they_went_before(body):
    assert script(body).stdout == "another hook ValueError\n"


def test_a_worker_s_failure_carries_its_traceback_unless_it_was_shown():
    import pickle

    from elastix.errors import WorkerFailed

    error = pickle.loads(pickle.dumps(WorkerFailed("it raised.", 1, 2, "ValueError: x")))
    assert str(error) == "it raised. Its traceback:\n\nValueError: x"
    assert (error.rank, error.worker) == (1, 2)
    error.shown = True
    assert str(error) == "it raised."
