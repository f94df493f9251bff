"""How a run begins or goes on."""

from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch

from elastix.config import CheckpointConfig, RestoreConfig
from elastix.errors import NotFound
from elastix.events import Resumed, RunStarted, StateStored
from elastix.observe.journal import Journal
from elastix.state import State
from elastix.store import Store
from elastix.train.checkpoint.coordinator import Checkpoints
from elastix.train.record.start_or_resume import begin
from elastix.train.replica.link import Settings


def test_a_run_with_a_state_and_without_its_journal_is_not_gone_on_with(tmp_path):
    """It trained to the end and was then told that it had samples of an unknown loader."""
    (tmp_path / "journal.jsonl").touch()  # as the new one, which nothing is in yet
    checkpoints = SimpleNamespace(last=lambda: SimpleNamespace(step=8), take_up=lambda *_: None)
    with pytest.raises(NotFound, match=r"'r' has a State of step 8 .*journal.jsonl is gone"):
        begin(checkpoints, settings(tmp_path), RestoreConfig())


def settings(directory, **checkpoint):
    return Settings(
        directory=directory,
        run="r",
        seed=0,
        min_workers=1,
        checkpoint=CheckpointConfig(**checkpoint),
    )


def stored(directory, *steps, score=None):
    """A run has stored States of these steps; their refs by step."""
    refs = {}
    with Store(directory / "store") as store:
        for step in steps:
            tensors = {"w": torch.full((4,), float(step))}
            ref = store.put(State(tensors, {"step": step}), score=score)
            store.tag(f"r/step-{step:010d}", ref)
            store.tag("r/last", ref)
            refs[step] = ref
    return refs


def opened(directory):
    """What the next `fit` has of it before it has the journal."""
    with Journal(directory / "journal.jsonl") as journal:
        journal.append(RunStarted(name="r", seed=0, config={}, scaling={}, versions={}))
    return Checkpoints(Store(directory / "store"), "r", CheckpointConfig())


def begun(directory, checkpoints):
    """What the journal is told, and the tags of the run."""
    told, _ = begin(checkpoints, settings(directory), RestoreConfig())
    tags = checkpoints.store.tags()
    checkpoints.close()
    return told, tags


def test_a_state_that_is_stored_while_the_journal_is_waited_for_is_gone_on_from(tmp_path):
    """The driver was killed, and its controller is not gone yet: workers went on from that State.

    The journal said that the run began anew, and 20 steps were told to be lost.
    """
    stored(tmp_path, 10)
    checkpoints = opened(tmp_path)
    refs = stored(tmp_path, 20)
    told, _ = begun(tmp_path, checkpoints)
    assert told == [Resumed(step=20, ref=refs[20], t=ANY)]


def test_states_that_a_killed_restore_had_not_dropped_yet_are_dropped(tmp_path):
    """It had named the State to go back to. What was stored on the way to the others was not."""
    refs = stored(tmp_path, 10, 20, 30)
    with Store(tmp_path / "store") as store:
        store.tag("r/last", refs[10])
    told, tags = begun(tmp_path, opened(tmp_path))
    assert told == [Resumed(step=10, ref=refs[10], t=ANY)]
    assert tags.keys() == {"r/step-0000000010", "r/last"}


def test_a_run_of_which_no_state_is_named_the_last_goes_on_from_the_newest(tmp_path):
    """`elastix runs rm` was killed. It began anew, and nothing of it was stored before step 20."""
    refs = stored(tmp_path, 10, 20)
    with Store(tmp_path / "store") as store:
        store.untag("r/last")
    told, tags = begun(tmp_path, opened(tmp_path))
    assert told == [Resumed(step=20, ref=refs[20], t=ANY)]
    assert tags["r/last"] == refs[20]


def test_scores_by_another_metric_are_not_compared_with_those_of_this_one(tmp_path):
    """The best by the former metric stayed the best for good, as no loss is that large."""
    refs = stored(tmp_path, 10, score=0.9)
    with Journal(tmp_path / "journal.jsonl") as journal:
        goal = CheckpointConfig(best="accuracy").to_dict()
        journal.append(
            RunStarted(name="r", seed=0, config={}, scaling={}, versions={}, checkpoint=goal)
        )
        journal.append(
            StateStored(ref=refs[10], step=10, reason="best", stored_bytes=1, store_s=0.1)
        )
    for other, score in (
        ({"best": "accuracy"}, 0.9),
        ({}, 0.9),  # which says nothing of what is best
        ({"best": "accuracy", "mode": "min"}, None),
        ({"best": "loss", "mode": "min"}, None),
    ):
        checkpoints = Checkpoints(Store(tmp_path / "store"), "r", CheckpointConfig(**other))
        begin(checkpoints, settings(tmp_path, **other), RestoreConfig())
        assert checkpoints.last().score == score
        checkpoints.close()
