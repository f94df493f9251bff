"""What the executor on Ray Tune makes of what Tune's thread and the loop's do at the same time."""

import queue
from dataclasses import replace

import pytest
import ray
from ray import tune

from elastix.errors import OtherCode
from elastix.search.executors import tune_trials
from elastix.search.executors.executor import Ended, EndedKind, Work, WorkReport
from elastix.search.executors.tune_trials import _Queue
from elastix.train.record.provenance import installation


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


@pytest.mark.parametrize("name", ["done", "should_checkpoint", "training_iteration", "loss"])
def test_tune_is_told_of_no_metric_by_which_it_does_something(name, monkeypatch):
    """A trial that reported `done=1.0` was ended by it, and counted as lost."""
    given = []
    monkeypatch.setattr(tune, "report", given.append)
    news = queue.SimpleQueue()
    works = _Queue(news)
    works.put(Work(number=7, name="a", config={}, seed=2))
    train = ray.cloudpickle.dumps(lambda ctx: ctx.report(**{name: 0.5}))
    tune_trials._trainable(works.suggest("first"), train, installation())
    assert [name in result for result in given] == [name == "loss", False]
    for result in given:
        works.on_trial_result("first", result)
    reported, ended = news.get(), news.get()
    assert isinstance(reported, WorkReport)
    assert isinstance(ended, Ended)
    assert (ended.kind, ended.results) == (EndedKind.FINISHED, {0: {name: 0.5}})


def test_where_the_elastix_is_another_than_the_driver_s_nothing_is_run(monkeypatch):
    given, news, ran = [], queue.SimpleQueue(), []
    monkeypatch.setattr(tune, "report", given.append)
    monkeypatch.setattr(tune_trials, "execute", lambda *_, **__: ran.append(1))
    works = _Queue(news)
    works.put(Work(number=7, name="a", config={}, seed=2))
    driver = replace(installation(), digest="other")
    tune_trials._trainable(works.suggest("first"), ray.cloudpickle.dumps(None), driver)
    for result in given:
        works.on_trial_result("first", result)
    ended = news.get()
    assert (ended.number, ended.kind, type(ended.error)) == (7, EndedKind.RAISED, OtherCode)
    assert not ran
