"""A diary of failures: the demo, with one process of each kind killed, goes on as if nothing were.

A worker of the pool, the store's server, the driver and the controller, one each; after the death
of the driver the same command is given again, as a user would. See diary_driver.py.
"""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

import elastix
from elastix.data.audit import audit
from elastix.events import RunEnded, StepCommitted, TrialEnded, WorkerLost
from elastix.observe import journal

ROOT = Path(__file__).parents[2]
TRIALS = 24


def until(condition, timeout_s, check=lambda: None):
    """Other processes write; there is nothing to wait on but what they have written."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        check()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def files(pid):
    """Names of the files that a process has open."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed a moment ago
            found.add(entry.readlink().name)
    return found


class Demo:
    """The demo as a process, and every process that came of it."""

    def __init__(self, store):
        self.store = store
        self.mark = uuid.uuid4().hex
        self.process = None

    def start(self):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ELASTIX_MARK": self.mark}
        env |= {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "chaos" / "diary_driver.py", self.store],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def named(self, title):
        """Process ids of actors whose title begins so."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                words = (entry / "cmdline").read_text()
                ours = self.mark in (entry / "environ").read_text(errors="replace")
            except OSError:
                continue  # it has just ended
            if ours and words.startswith(title):
                found.append(int(entry.name))
        return found

    def kill_one(self, title, holding=""):
        """The first of these actors, or the one that has the file open."""
        victims = [pid for pid in self.named(title) if not holding or holding in files(pid)]
        os.kill(victims[0], signal.SIGKILL)

    def events(self, run, kind):
        path = self.store / "runs" / run / "journal.jsonl"
        return [e for e in journal.read(path) if isinstance(e, kind)] if path.exists() else []

    def trials(self):
        return len(self.events("digits-search", TrialEnded))

    def alive(self):
        code = self.process.poll()
        assert code is None, self.process.stdout.read()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_of_each_kind_is_killed_and_the_demo_ends_as_it_should(tmp_path):
    chance = random.Random(7)
    demo = Demo(tmp_path)
    demo.start()
    until(lambda: demo.trials() >= 2, 300, demo.alive)
    demo.kill_one("ray::LoneWorker")
    reached = demo.trials() + chance.randint(2, 5)
    until(lambda: demo.trials() >= reached, 300, demo.alive)
    demo.kill_one("ray::_Server", holding="index.sqlite")
    reached = demo.trials() + chance.randint(2, 5)
    until(lambda: demo.trials() >= reached, 300, demo.alive)
    demo.process.kill()
    demo.process.wait(30)
    demo.process.stdout.close()
    # Ray's processes follow their driver, some after the minute that they wait for the GCS.
    until(lambda: not demo.named("ray::"), 180)
    demo.start()
    until(
        lambda: len(demo.events("digits", StepCommitted)) > chance.randint(5, 15), 300, demo.alive
    )
    demo.kill_one("ray::Controller")
    said = demo.process.communicate(timeout=600)[0]
    assert demo.process.returncode == 0, said

    ended = Counter(e.trial for e in demo.events("digits-search", TrialEnded))
    found = elastix.Results.open(tmp_path, "digits-search")
    assert sorted(ended) == [trial.number for trial in found] == list(range(TRIALS))
    assert all(trial.state.is_final for trial in found)
    assert set(ended.values()) == {1}
    assert audit(journal.read(tmp_path / "runs" / "digits" / "journal.jsonl")).exact
    assert demo.events("digits", RunEnded)[-1].outcome == "finished"
    assert len(demo.events("digits", WorkerLost)) >= 2
    assert not demo.named("ray::")
