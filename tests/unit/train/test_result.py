"""What a run leaves, as its user gets it: tables, the best, the model."""

import pytest
import torch
from torch import nn

import elastix
from elastix.errors import ConfigError, NotFound, StateError
from elastix.events import Reported, Resumed, RunEnded, RunStarted, StateDropped, StateStored
from elastix.observe import catalogue
from elastix.observe.journal import Journal
from elastix.observe.progress import Progress
from elastix.state import State
from elastix.store import Store


def build(config):
    return nn.Linear(config["inputs"], 2)


@pytest.fixture
def run(tmp_path):
    """Accuracy peaks at step 2 of 3; each State has its step in all its weights."""
    config = {"inputs": 3}
    with Store(tmp_path) as store:
        refs = []
        for step in range(1, 4):
            model = build(config)
            nn.init.constant_(model.weight, step)
            state = State({**model.state_dict(), "@optimizer/x": torch.ones(4)}, {"step": step})
            refs.append(store.put(state))
    with Journal(tmp_path / "runs" / "digits" / "journal.jsonl") as journal:
        journal.append(
            RunStarted(
                name="digits",
                seed=0,
                config=config,
                scaling={},
                versions={},
                checkpoint={"best": "accuracy", "mode": "max"},
            )
        )
        for step, accuracy in enumerate((0.5, 0.9, 0.7), 1):
            metrics = {"accuracy": accuracy, "note": "<b>"}
            journal.append(Reported(seq=step, step=step, metrics=metrics))
            ref = refs[step - 1]
            journal.append(
                StateStored(ref=ref, step=step, reason="best", stored_bytes=1, store_s=0.1)
            )
        journal.append(RunEnded(outcome="finished", step=3))
    return tmp_path, refs


def test_a_run_is_opened_again_by_its_name(run):
    store, refs = run
    result = elastix.Result.open(store, "digits")
    assert (result.ref, result.config, result.name) == (refs[2], {"inputs": 3}, "digits")
    assert result.metrics["accuracy"] == 0.7
    with pytest.raises(NotFound, match="there is no run 'digit' in"):
        elastix.Result.open(store, "digit")
    with pytest.raises(ConfigError):
        elastix.Result.open(store, "../digits")


def test_of_a_run_that_went_back_the_state_is_the_one_that_it_stands_at(run):
    """It was the one of the steps that were given up, which is not in the store any more."""
    store, refs = run
    path = store / "runs" / "digits" / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(Resumed(step=2, ref=refs[1]))
    assert elastix.Result.open(store, "digits").ref == refs[1]
    with Journal(path) as journal:
        journal.append(
            StateStored(ref=refs[2], step=3, reason="final", stored_bytes=1, store_s=0.1)
        )
        journal.append(StateDropped(ref=refs[1], step=2))
    assert elastix.Result.open(store, "digits").ref == refs[2]
    with Journal(path) as journal:
        journal.append(StateDropped(ref=refs[2], step=3))  # a late worker held something else
    assert elastix.Result.open(store, "digits").ref == refs[0]
    with Journal(path) as journal:
        journal.append(Resumed(step=0, ref=""))
    assert elastix.Result.open(store, "digits").ref == ""


def test_none_says_nothing_new_to_whoever_reads_a_run(tmp_path):
    """Of a run as of a trial: the value before it counts."""
    with Journal(tmp_path / "runs" / "some" / "journal.jsonl") as journal:
        journal.append(RunStarted(name="some", seed=0, config={}, scaling={}, versions={}))
        reported = [{"a": 0.5, "note": "x"}, {"a": None, "b": None}, {"note": None}]
        for seq, metrics in enumerate(reported):
            journal.append(Reported(seq=seq, step=seq, metrics=metrics))
    progress = Progress()
    for event in elastix.Result.open(tmp_path, "some").events:
        progress.add(event)
    for metrics in (
        elastix.Result.open(tmp_path, "some").metrics,
        catalogue.summary(tmp_path, "some").metrics,
        progress.summary(0.0)["metrics"],
    ):
        assert metrics == {"a": 0.5, "note": "x", "b": None}


def test_history_is_a_table_by_step(run):
    history = elastix.Result.open(run[0], "digits").history
    assert list(history.index) == [1, 2, 3]
    assert list(history.columns) == ["seconds", "accuracy", "note"]
    assert list(history["accuracy"]) == [0.5, 0.9, 0.7]


def test_the_best_and_the_models(run):
    store, refs = run
    result = elastix.Result.open(store, "digits")
    assert (result.best.value, result.best.step, result.best.ref) == (0.9, 2, refs[1])
    final, best = result.model(build), result.model(build, best=True)
    assert (final.weight == 3).all()
    assert (best.weight == 2).all()
    assert not final.training
    with pytest.raises(StateError, match="gives another model"):
        result.model(lambda config: nn.Linear(5, 2))
    with pytest.raises(StateError, match=r'"weight"\. Give the function'):
        result.model(lambda config: nn.Sequential(nn.Linear(3, 2, bias=False)))
    with pytest.raises(ConfigError, match=r"must return a torch\.nn\.Module, not None"):
        result.model(lambda config: None)


def test_without_a_best_it_says_why(tmp_path):
    for name, best in (("unnamed", None), ("mistyped", "acuracy")):
        with Journal(tmp_path / "runs" / name / "journal.jsonl") as journal:
            checkpoint = {"best": best, "mode": "max"}
            journal.append(
                RunStarted(
                    name=name, seed=0, config={}, scaling={}, versions={}, checkpoint=checkpoint
                )
            )
            journal.append(Reported(seq=1, step=1, metrics={"acc": 0.5, "loss": 1.0}))
    with pytest.raises(NotFound, match="no metric was named"):
        _ = elastix.Result.open(tmp_path, "unnamed").best
    with pytest.raises(NotFound, match="as best='acuracy'; reported: acc, loss"):
        _ = elastix.Result.open(tmp_path, "mistyped").best
    assert elastix.Result.open(tmp_path, "unnamed").history["acc"].tolist() == [0.5]


def test_without_a_stored_state_it_says_so(tmp_path):
    Store(tmp_path).close()
    with Journal(tmp_path / "runs" / "young" / "journal.jsonl") as journal:
        best = {"best": "acc", "mode": "max"}
        journal.append(
            RunStarted(name="young", seed=0, config={}, scaling={}, versions={}, checkpoint=best)
        )
        journal.append(Reported(seq=1, step=1, metrics={"acc": 0.5}))
    result = elastix.Result.open(tmp_path, "young")
    with pytest.raises(NotFound, match=r"stored no State yet.*every_steps"):
        result.load()
    with pytest.raises(NotFound, match="is stored for step 1, at which 'acc' was best"):
        result.model(build, best=True)


def test_a_notebook_shows_a_table_and_a_terminal_a_line(run):
    result = elastix.Result.open(run[0], "digits")
    html = result._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "accuracy 0.9, step 2" in html
    assert len(repr(result)) < 120
