"""The logbook: what a controller knows of its run, and what a driver may ask it for."""

import pytest

from elastix.events import Events, RunStarted, StepCommitted, WorkerLost
from elastix.observe.journal import Journal
from elastix.train.record.logbook import KEPT, Logbook

COUNT = 3 * KEPT + 17


def opening():
    return RunStarted(name="run", seed=0, config={}, scaling={}, versions={})


def opened(path, first):
    log = Logbook(Events())
    log.open(path, first, stays=False, patience_s=0.0)
    return log


def steps(count):
    return [
        StepCommitted(step=step, generation=1, world_size=2, batches=())
        for step in range(1, count + 1)
    ]


def followed(log, start=0):
    """As a driver asks, again and again."""
    seen = []
    while news := log.events(start + len(seen)):
        seen += news
    return seen


@pytest.fixture
def written(tmp_path):
    """A journal with an earlier run in it, and this run's events."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as before:
        before.append(opening())
        before.append(WorkerLost(worker=1, rank=1, generation=1, cause="died"))
    events = [opening(), *steps(COUNT)]
    log = opened(path, events[0])
    for sequence, event in enumerate(events):
        log.write(event, sequence)
    return path, events, log


def test_a_driver_is_told_everything_and_little_is_kept(written):
    _, events, log = written
    assert followed(log) == events
    for start in (1, KEPT - 1, KEPT, 2 * KEPT + 3, COUNT - 1, COUNT, COUNT + 1, 1 << 60):
        assert followed(log, start) == events[start:]
    assert len(log._newest) == KEPT
    assert log.count == len(events)
    assert log.state.losses == 0


def test_another_controller_tells_it_again(written):
    path, events, log = written
    log.close()
    again = opened(path, events[0])
    assert followed(again) == events
    assert (again.state.step, again.state.sequence) == (COUNT, COUNT)
    more = StepCommitted(step=COUNT + 1, generation=1, world_size=2, batches=())
    again.write(more, COUNT + 1)
    assert followed(again) == [*events, more]
    again.close()


def test_a_fresh_run_knows_nothing_of_the_one_before(written):
    path, _, log = written
    log.close()
    fresh = opened(path, opening())
    assert (fresh.count, fresh.ended, fresh.events(0)) == (0, None, [])
    fresh.close()
