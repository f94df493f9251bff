"""What the executor on Ray Tune makes of what Tune's thread and the loop's do at the same time."""

import queue

from elastix.search.executors.executor import Work
from elastix.search.executors.tune_trials import _Queue


def test_a_halt_that_comes_too_late_is_not_for_the_next_run_of_the_trial():
    works = _Queue(queue.SimpleQueue())
    work = Work(number=7, name="a", config={}, seed=2)
    works.put(work)
    assert works.suggest("first")
    works.on_trial_complete("first", error=True)  # in Tune's thread, just before
    works.halted.add(7)
    works.put(work)
    assert works.suggest("second")
    assert works.number("second") == 7
    assert 7 not in works.halted
