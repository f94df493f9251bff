"""What the executor on Ray Tune makes of what Tune's thread and the loop's do at the same time."""

import queue
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
from ray import tune

from elastix.config import ScalingConfig
from elastix.errors import ConfigError, OtherCode
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


def test_a_trial_that_tune_stops_ends_its_thread_and_reports_nothing_more(monkeypatch):
    """Its last report was waited for without end, and so was the next trial of its process."""
    given = []

    def report(result):
        given.append(result)
        if len(given) == 2:
            raise SystemExit(0)
        assert len(given) < 3

    def train(ctx):
        for score in range(9):
            ctx.report(score=score)

    monkeypatch.setattr(tune, "report", report)
    works = _Queue(queue.SimpleQueue())
    works.put(Work(number=7, name="a", config={}, seed=2))
    with pytest.raises(SystemExit) as ended:
        tune_trials._trainable(works.suggest("first"), ray.cloudpickle.dumps(train), installation())
    assert ended.value.code == 0
    assert len(given) == 2


def test_a_trial_under_tune_computes_on_the_gpu_that_ray_gave_it(monkeypatch):
    """It was the CPU, beside a GPU that was reserved for it."""
    devices = []
    over = Ended(number=7, kind=EndedKind.FINISHED)
    monkeypatch.setattr(tune, "report", lambda result: None)
    monkeypatch.setattr(tune_trials, "given_device", lambda: "the GPU")
    monkeypatch.setattr(
        tune_trials, "execute", lambda *_, device, **__: devices.append(device) or over
    )
    works = _Queue(queue.SimpleQueue())
    works.put(Work(number=7, name="a", config={}, seed=2))
    tune_trials._trainable(works.suggest("first"), ray.cloudpickle.dumps(print), installation())
    assert devices == ["the GPU"]


@pytest.mark.parametrize("odd", [KeyboardInterrupt("mine"), ConfigError("of the script")])
def test_what_a_train_function_raises_is_what_its_trial_failed_of(odd, monkeypatch):
    """As in the pool. It had counted as lost, four times."""
    given, news = [], queue.SimpleQueue()
    monkeypatch.setattr(tune, "report", given.append)
    works = _Queue(news)
    works.put(Work(number=7, name="a", config={}, seed=2))

    class OfTheScript(ConfigError):
        def __init__(self, first, second):
            super().__init__(f"{first}{second}")

    def train(ctx):
        raise OfTheScript("of the", " script") if isinstance(odd, ConfigError) else odd

    tune_trials._trainable(works.suggest("first"), ray.cloudpickle.dumps(train), installation())
    for result in given:
        works.on_trial_result("first", result)
    ended = news.get()
    assert (ended.kind, ended.error) == (EndedKind.RAISED, None)
    assert str(odd) in ended.summary


def test_an_end_is_heard_before_tune_may_stop_the_trial():
    """Who is halted at that moment ends by itself, and its process with it if that is spent."""
    works = _Queue(queue.SimpleQueue())
    works.put(Work(number=7, name="a", config={}, seed=2))
    works.suggest("first")
    works.halted.add(7)
    decides = tune_trials._Halting(works)
    trial = SimpleNamespace(trial_id="first")
    assert decides.on_trial_result(None, trial, {"elastix_seq": 0}) == "STOP"
    assert decides.on_trial_result(None, trial, {tune_trials._ENDED: ""}) == "CONTINUE"


def test_a_trial_that_tune_has_stopped_counts_with_its_epochs():
    """`Budget(epochs=...)` never ended where rungs had stopped most trials."""
    news = queue.SimpleQueue()
    works = _Queue(news)
    works.put(Work(number=7, name="a", config={}, seed=2))
    works.suggest("first")
    for seq in range(3):
        report = WorkReport(number=7, seq=seq, metrics={"m": seq})
        works.on_trial_result("first", {"elastix_all": tune_trials._pack(report)})
        assert news.get() == report
    works.halted.add(7)
    works.on_trial_complete("first")
    ended = news.get()
    assert (ended.kind, ended.epochs, len(ended.results)) == (EndedKind.HALTED, 3.0, 3)


def test_what_can_never_be_placed_is_refused(monkeypatch):
    """Tune waits for it without end."""
    let_go = []
    monkeypatch.setattr(tune_trials, "hold_ray", lambda: True)
    monkeypatch.setattr(tune_trials, "let_go_of_ray", lambda: let_go.append(1))
    monkeypatch.setattr(
        ray,
        "nodes",
        lambda: [{"Alive": True, "NodeID": "n", "Resources": {"CPU": 4.0}}],
    )
    executor = tune_trials.Tune(scaling=ScalingConfig(gpus_per_worker=1))
    with pytest.raises(ConfigError, match="can never be placed"):
        executor.open(print)
    assert let_go == [1]


def test_who_was_closed_can_be_opened_again(monkeypatch):
    """For a campaign that goes on in the same process. Tune was told that it was over."""
    suggested = []

    class Tuner:
        def __init__(self, trainable, *, tune_config, run_config):
            self.searcher = tune_config.search_alg.searcher

        def fit(self):
            while (found := self.searcher.suggest("first")) is None:
                pass
            suggested.append(found)

    monkeypatch.setattr(tune_trials, "hold_ray", lambda: False)
    monkeypatch.setattr(tune_trials, "check_capacity", lambda scaling: 1)
    monkeypatch.setattr(tune_trials.tune, "Tuner", Tuner)
    monkeypatch.setattr(tune_trials.tune, "with_parameters", lambda *_, **__: None)
    monkeypatch.setattr(tune_trials.tune, "with_resources", lambda *_: None)
    executor = tune_trials.Tune(parallel=1)
    for number in (7, 8):
        executor.open(print)
        assert executor.room == 1
        executor.submit(Work(number=number, name="a", config={}, seed=2))
        executor._thread.join()
        executor.close()
    assert [tune_trials._unpack(one[tune_trials._WORK]).number for one in suggested] == [7, 8]
