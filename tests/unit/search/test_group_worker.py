"""What is made of the events of a trial that is a group of workers. No Ray."""

import cloudpickle
import pytest

from elastix.config import CheckpointConfig, FailureConfig, ScalingConfig
from elastix.errors import ConfigError, ControllerLost, QuorumLost, WorkerFailed
from elastix.events import Reported, StateStored
from elastix.observe.journal import Journal
from elastix.search.executors import group_worker
from elastix.search.executors.executor import EndedKind, Work
from elastix.search.executors.group_worker import _before, _Run
from elastix.search.executors.pool_worker import Reports
from tests.unit.data.test_audit import commit, opened
from tests.virtual import state_of


def stored(reason, reports):
    ref = state_of(7, reports)
    return StateStored(ref=ref, step=reports, reason=reason, stored_bytes=1, store_s=0.1)


def reported(seq, score):
    return Reported(seq=seq, step=seq, metrics={"score": score})


@pytest.mark.parametrize("reason", ["paused", "final"])
def test_the_model_of_a_trial_is_what_it_left_and_no_state_of_its_group(reason):
    """That of the last step but one may be stored later: nobody waits for it at the end."""
    run = _Run(Work(number=7, name="a-00007", config={}, seed=2), Reports(), lambda: False)
    run._watch([stored("every_steps", 1)])
    assert (run._found.ref, run._found.reason) == (None, "")
    run._watch([stored(reason, 3), stored("every_steps", 2), stored("best", 2)])
    assert (run._found.ref, run._found.reason) == (state_of(7, 3), reason)


def test_what_a_trial_had_reported_before_its_last_state_is_reported(tmp_path):
    """Its group was lost twice, and each time the next one went on from what was stored."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for seq, score in [(0, 0.1), (1, 0.2), (2, 0.3), (1, 0.25), (2, 0.35), (2, 0.4), (3, 0.5)]:
            journal.append(reported(seq, score))
    heard = {2: {"score": 0.4}, 3: {"score": 0.5}}
    assert _before(path, heard) == {0: {"score": 0.1}, 1: {"score": 0.25}}
    assert sorted(_before(path, {})) == [0, 1, 2, 3]  # its State was that of the last report
    assert _before(tmp_path / "none", {0: {"score": 1.0}}) == {}  # it began at the beginning


class Halted:
    """In place of a run that goes on from its State, and is halted when it has reported once."""

    def __init__(self, train, *, run, **_):
        self.run = run

    def as_trial(self, source, until_reports, watch, **_):
        self.watch = watch
        return self

    def fit(self):
        self.run.directory.mkdir(parents=True)
        before = [opened(length=4), commit(1, (0, 4)), reported(0, 0.1)]
        now = [commit(2, (4, 8)), reported(1, 0.2)]
        with Journal(self.run.directory / "journal.jsonl") as journal:
            for event in (*before, *now):
                journal.append(event)
        self.watch(now)


def test_of_a_trial_that_is_halted_all_that_it_has_done_counts(tmp_path, monkeypatch):
    """One that rungs stop had cost no epochs, and had come as far as its last run alone."""
    monkeypatch.setattr(group_worker, "ElasticTrainer", Halted)
    work = Work(number=7, name="a-00007", config={}, seed=2)
    settings = (ScalingConfig(), CheckpointConfig(), FailureConfig(), str(tmp_path))
    ended = _Run(work, Reports(), lambda: True).carry_out(print, *settings, worker="w")
    assert (ended.kind, ended.epochs) == (EndedKind.HALTED, 2.0)
    assert ended.results == {0: {"score": 0.1}, 1: {"score": 0.2}}


class Raises:
    """In place of a run that ends so, once its journal had so many events."""

    def __init__(self, error, events):
        self.error, self.events = error, events

    def __call__(self, *_, **__):
        return self

    def as_trial(self, source, until_reports, watch, **_):
        self.watch = watch
        return self

    def fit(self):
        self.watch(self.events)
        raise self.error


BEGAN = [reported(0, 0.1)]


@pytest.mark.parametrize(
    ("error", "events", "room", "kind"),
    [
        (QuorumLost("no room"), [], 2, "returned"),
        (QuorumLost("too few are left"), BEGAN, 2, "lost"),
        (ConfigError("can never be placed"), [], 1, "returned"),  # a node is gone
        (ConfigError("the config is no JSON"), [], 2, "raised"),
        (ConfigError("a wrong call in the train function"), BEGAN, 1, "raised"),
        (ControllerLost("its node is gone"), BEGAN, 2, "lost"),
        (ControllerLost("its node is gone"), [], 2, "lost"),
    ],
)
def test_a_trial_that_had_no_room_has_not_begun_and_is_no_bad_one(
    error, events, room, kind, tmp_path, monkeypatch
):
    """All that were to run after a node was gone had failed at once."""
    monkeypatch.setattr(group_worker, "ElasticTrainer", Raises(error, events))
    monkeypatch.setattr(group_worker, "fit_on_nodes", lambda *_: room)
    work = Work(number=7, name="a-00007", config={}, seed=2)
    scaling = ScalingConfig(num_workers=2)
    settings = (scaling, CheckpointConfig(), FailureConfig(), str(tmp_path))
    run = _Run(work, Reports(), lambda: False)
    ended = run.carry_out(print, *settings, worker="w", avoided=("other",))
    assert (ended.kind, ended.summary) == (kind, str(error))


def test_a_trial_waits_for_a_node_in_place_of_one_that_is_gone(monkeypatch):
    room = iter([0, 1, 1, 2])
    monkeypatch.setattr(group_worker, "fit_on_nodes", lambda *_: next(room))
    monkeypatch.setattr(group_worker, "_LOOK_S", 0.0)
    monkeypatch.setattr(_Run, "carry_out", lambda *_, **given: given["avoided"])
    settings = (ScalingConfig(num_workers=2), CheckpointConfig(), FailureConfig(), "runs")
    worker = group_worker.GroupWorker(0, cloudpickle.dumps(None), *settings)
    work = Work(number=7, name="a-00007", config={}, seed=2)
    assert worker._carry_out(work, lambda: False, ("other",)) == ("other",)
    assert next(room, None) is None
    monkeypatch.setattr(group_worker, "fit_on_nodes", lambda *_: 0)
    assert worker._carry_out(work, lambda: True, ()).kind is EndedKind.HALTED  # time is up


class TakesApart(Halted):
    """In place of a run whose train function changes its config."""

    def __init__(self, train, *, run, config, **_):
        super().__init__(train, run=run)
        config["body"][0]["kernel"] = 9
        del config["width"]


def test_what_a_group_does_to_its_config_is_not_what_its_model_is_stored_with(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(group_worker, "ElasticTrainer", TakesApart)
    work = Work(number=7, name="a-7", config={"width": 3, "body": [{"kernel": 5}]}, seed=2)
    settings = (ScalingConfig(), CheckpointConfig(), FailureConfig(), str(tmp_path))
    _Run(work, Reports(), lambda: True).carry_out(print, *settings, worker="w")
    assert work.config == {"width": 3, "body": [{"kernel": 5}]}


def test_a_group_that_goes_back_has_reported_what_it_reports_last():
    """All its workers were lost, and it went on from a State of two reports before."""
    told = Reports()
    run = _Run(Work(number=7, name="a-00007", config={}, seed=2), told, lambda: False)
    run._watch([reported(0, 0.1), reported(1, 0.9), reported(2, 0.8), reported(1, 0.3)])
    assert run._found.results == {0: {"score": 0.1}, 1: {"score": 0.3}}
    assert [(news.seq, news.metrics["score"]) for news in told.since(0)[1]][-1] == (1, 0.3)


def test_want_of_memory_is_seen_in_an_error_that_has_notes(tmp_path, monkeypatch):
    """Of a traceback the last line alone was looked at: such a trial had failed for good."""
    trace = 'Traceback (most recent call last):\n  File "x.py", line 3, in train\n    step()\n'
    trace += "MemoryError: Unable to allocate 7.45 GiB\nin batch 3\n"
    error = WorkerFailed("the train function raised", traceback=trace)
    monkeypatch.setattr(group_worker, "ElasticTrainer", Raises(error, BEGAN))
    settings = (ScalingConfig(), CheckpointConfig(), FailureConfig(), str(tmp_path))
    work = Work(number=7, name="a-00007", config={}, seed=2)
    ended = _Run(work, Reports(), lambda: False).carry_out(print, *settings, worker="w")
    assert ended.kind is EndedKind.STARVED
    assert ended.summary == "MemoryError: Unable to allocate 7.45 GiB\nin batch 3"
