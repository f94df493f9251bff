"""When a worker counts as killed."""

import random
import signal
import time

from elastix.bench.elastic_group import strike
from elastix.bench.measures import Observation, Timing, Victim


def test_the_others_hear_of_a_kill_after_its_time_however_late_the_killer_goes_on(monkeypatch):
    heard = []
    monkeypatch.setattr("os.kill", lambda pid, what: heard.append((pid, what, time.time())))
    seen = Observation(2, Timing(0.0, 1.0, 1, 1.0), random.Random(0))
    strike(seen, Victim(worker=1, pid=7))
    ((pid, what, t),) = heard
    assert (pid, what) == (7, signal.SIGKILL)
    assert [death.worker for death in seen.deaths] == [1]
    assert seen.deaths[0].t <= t


def test_one_that_was_lost_by_itself_counts_as_killed(monkeypatch):
    def gone(*_):
        raise ProcessLookupError

    monkeypatch.setattr("os.kill", gone)
    seen = Observation(2, Timing(0.0, 1.0, 1, 1.0), random.Random(0))
    strike(seen, Victim(worker=0, pid=7))
    assert [death.worker for death in seen.deaths] == [0]
