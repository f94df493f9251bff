"""Locks between processes: gone with their holder however it ends, and not kept by its forks."""

import os
import signal
import subprocess
import sys

import pytest

from elastix.errors import Conflict
from elastix.observe.run_lock import Lock, holder

HOLDS = """
import os, sys, time
from pathlib import Path
from elastix.observe.run_lock import Lock
lock = Lock(Path(sys.argv[1]), "it is held")
if os.fork() == 0:
    print("the child is up", flush=True)
time.sleep(600)
"""


def test_a_killed_holder_leaves_no_lock_behind_and_neither_does_its_child(tmp_path):
    path = tmp_path / "run.lock"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, path],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert "up" in first.stdout.readline()
        with pytest.raises(Conflict, match=f"process {first.pid} on "):
            Lock(path, "it is held")
        assert holder(path).pid == first.pid
        first.kill()
        first.wait()
        assert holder(path) is None  # while the child lives on
        Lock(path, "it is held").close()
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.stdout.close()
