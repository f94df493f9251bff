"""Interrupts that a library swallows while it is imported."""

import os
import signal
import subprocess
import sys

import pytest

from elastix.interrupts import heeding

SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""


@pytest.fixture
def swallowing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "swallows_ctrl_c.py").write_text(SWALLOWS)
    monkeypatch.delitem(sys.modules, "swallows_ctrl_c", raising=False)
    (tmp_path / "imported_next.py").write_text("raise AssertionError('it was imported')")
    return tmp_path


def run(code):
    with heeding():
        exec(code, {})


@pytest.mark.parametrize(
    "after", ["import imported_next", "None.missing", "", "import swallows_ctrl_c"]
)
def test_one_that_a_library_swallows_is_raised_at_the_next_import_or_error_or_end(
    swallowing, after
):
    with pytest.raises(KeyboardInterrupt):
        run(f"import swallows_ctrl_c\n{after}")


def test_what_a_handler_of_the_program_has_heeded_is_not_raised(swallowing):
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with heeding():
            import swallows_ctrl_c  # noqa: F401
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_one_nothing_is_raised_and_nothing_stays():
    path = list(sys.meta_path)
    with heeding():
        pass
    assert sys.meta_path == path
    assert signal.set_wakeup_fd(-1) == -1


def test_a_command_that_is_interrupted_while_it_is_imported_says_so_in_one_line(swallowing):
    (swallowing / "typer.py").write_text("import swallows_ctrl_c\nimport imported_next")
    command = [sys.executable, "-m", "elastix", "--version"]
    path = f"{swallowing}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "elastix: interrupted\n")
