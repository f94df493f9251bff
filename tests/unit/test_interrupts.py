"""Interrupts that a library swallows while it is imported."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from elastix import interrupts
from elastix.interrupts import exit_codes_kept, heeding
from tests.interrupts import CtrlC

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
    monkeypatch.delitem(sys.modules, "imported_next", raising=False)
    (tmp_path / "imported_next.py").write_text("open(__file__ + '.ran', 'w')")
    yield tmp_path
    assert not (tmp_path / "imported_next.py.ran").exists(), "it went on half imported"


@pytest.fixture
def wakeup():
    """Where an event loop would read which signals have come."""
    reads, writes = socket.socketpair()
    writes.setblocking(False)
    reads.setblocking(False)
    before = signal.set_wakeup_fd(writes.fileno())
    yield reads
    assert signal.set_wakeup_fd(before) == writes.fileno()
    reads.close()
    writes.close()


@pytest.fixture
def noted():
    """Two signals that do nothing but to be told of here."""
    heard = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(each, lambda number, frame: heard.append(number)) for each in numbers]
    yield heard
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


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


def test_it_says_each_signal_that_has_come_and_no_other(noted):
    with heeding() as has_come:
        assert not has_come(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert has_come(signal.SIGUSR1)
        assert not has_come(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
        assert all(has_come(signal.SIGUSR2) for _ in range(2))
        assert has_come(signal.SIGUSR1)
    assert noted == [signal.SIGUSR1, signal.SIGUSR2]


@pytest.mark.parametrize("raises", [False, True])
def test_an_event_loop_of_the_program_hears_of_what_came_meanwhile(noted, wakeup, raises):
    with suppress(ZeroDivisionError), heeding():
        signal.raise_signal(signal.SIGUSR1)
        assert not raises or 1 / 0
    assert wakeup.recv(10) == bytes([signal.SIGUSR1])
    signal.raise_signal(signal.SIGUSR2)
    assert wakeup.recv(10) == bytes([signal.SIGUSR2])


def test_without_the_main_thread_it_does_nothing(wakeup):
    """Only that one may set where signals are told of, and only that one is interrupted."""
    with ThreadPoolExecutor(1) as threads:
        assert not threads.submit(lambda: run("import colorsys")).exception()


def test_another_thread_that_imports_something_is_not_interrupted(swallowing):
    (swallowing / "of_a_thread.py").write_text("")
    failed = []

    def import_in_a_thread():
        with ThreadPoolExecutor(1) as threads:
            failed.append(threads.submit(exec, "import of_a_thread", {}).exception())

    with pytest.raises(KeyboardInterrupt), heeding():
        exec("import swallows_ctrl_c\nimport_in_a_thread()", {**locals()})
    assert failed == [None]


def test_without_one_nothing_is_raised_and_nothing_stays():
    path = list(sys.meta_path)
    with heeding():
        pass
    assert sys.meta_path == path
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_before_any_line_leaves_nothing_that_is_looked_at(wakeup):
    """A signal that comes later is written to no file that has the number of one that is closed."""
    path, there = list(sys.meta_path), signal.set_wakeup_fd(-1)

    def interrupted(ctrl_c):
        signal.set_wakeup_fd(there)
        try:
            with ctrl_c:
                run("pass")
        except KeyboardInterrupt:
            return True
        return False

    whole = CtrlC([interrupts.__file__])
    assert not interrupted(whole)
    for place, visits in whole.visits.items():
        for visit in range(1, visits + 1):
            assert interrupted(CtrlC([interrupts.__file__], place, visit)), place
            assert sys.meta_path == path, place
            assert signal.set_wakeup_fd(-1) in (there, -1), place
    signal.set_wakeup_fd(there)


def test_a_command_that_is_interrupted_while_it_is_imported_says_so_in_one_line(swallowing):
    (swallowing / "typer.py").write_text("import swallows_ctrl_c\nimport imported_next")
    command = [sys.executable, "-m", "elastix", "--version"]
    path = f"{swallowing}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "elastix: interrupted\n")


def code_of(work):
    with pytest.raises(SystemExit) as ended, exit_codes_kept():
        work()
    return ended.value.code


def test_the_code_of_a_handler_of_sigterm_comes_through_what_makes_another_of_it():
    """As Ray does, where it waits."""

    def waits():
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            sys.exit(1)

    handler = lambda number, frame: sys.exit(128 + number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, handler)
    try:
        assert code_of(waits) == 128 + signal.SIGTERM
        assert code_of(lambda: sys.exit(3)) == 3
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
