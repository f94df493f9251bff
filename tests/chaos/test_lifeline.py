"""A death on the same host is heard of at once. Real processes, ended by SIGKILL."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from elastix.train.on_ray import lifeline

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="robust mutexes in a memfd")
HOLDER = "from elastix.train.on_ray import lifeline; print(lifeline.hold(), flush=True); input()"
FORKED = """
import os
from elastix.train.on_ray import lifeline
path = lifeline.hold()
if os.fork() == 0:
    os._exit(0)
os.wait()
print(path, flush=True)
input()
"""


def start(code: str = HOLDER) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


@pytest.fixture
def holder():
    process, path = start()
    yield process, path
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_death_is_told(holder, number):
    process, path = holder
    dead = threading.Event()
    assert lifeline.watch(path, dead.set)
    assert not dead.is_set()
    process.send_signal(number)
    assert dead.wait(30)
    assert process.wait() == -number


def test_an_end_is_told_as_well(holder):
    process, path = holder
    dead = threading.Event()
    assert lifeline.watch(path, dead.set)
    process.communicate("\n")
    assert dead.wait(30)


def test_a_stopped_process_is_not_dead(holder):
    process, path = holder
    dead = threading.Event()
    assert lifeline.watch(path, dead.set)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not dead.is_set()
    process.kill()
    assert dead.wait(30)


def test_the_end_of_a_forked_child_is_not_its_parents():
    process, path = start(FORKED)
    dead = threading.Event()
    assert lifeline.watch(path, dead.set)
    assert not dead.is_set()
    process.kill()
    assert dead.wait(30)
    process.communicate()


def test_all_who_watch_are_told(holder):
    process, path = holder
    told = [threading.Event() for _ in range(3)]
    assert all(lifeline.watch(path, dead.set) for dead in told)
    process.kill()
    assert all(dead.wait(30) for dead in told)


def test_a_path_that_is_no_lifeline_is_not_watched(tmp_path):
    process, path = start()
    process.kill()
    process.wait()
    other = tmp_path / "other"
    other.write_bytes(bytes(4096))
    for nowhere in ("", path, str(other), "/proc/self/fd/0", str(tmp_path)):
        assert not lifeline.watch(nowhere, pytest.fail)
    assert other.read_bytes() == bytes(4096)
    process.communicate()
