"""How a run begins or goes on."""

from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch

from elastix.config import CheckpointConfig, RestoreConfig
from elastix.errors import ConfigError, NotFound
from elastix.events import (
    BatchShares,
    ReplicasDiverged,
    Resumed,
    RunStarted,
    SamplesLeftOut,
    StateDropped,
    StateStored,
    StepCommitted,
)
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


def parted(directory):
    """Workers had parted unseen, and the run was killed as it had said so: only step 4 is sound."""
    refs = stored(directory, 2, 4, 8)
    opened(directory).close()
    with Journal(directory / "journal.jsonl") as journal:
        for step, ref in refs.items():
            journal.append(
                StateStored(
                    ref=ref,
                    step=step,
                    reason="every_steps",
                    compared=step == 4,
                    stored_bytes=1,
                    store_s=0.1,
                )
            )
        journal.append(
            ReplicasDiverged(
                step=9, workers=(0, 1), apart=(1,), parts=("model",), cure="went back", unseen=True
            )
        )
    return refs


@pytest.mark.parametrize(
    ("wanted", "error", "why"),
    [
        (
            RestoreConfig(step=8),
            NotFound,
            r"not go on from its State of step 8.* kept are \[2, 4\]",
        ),
        (RestoreConfig(step=6), NotFound, r"no State of step 6; kept are \[2, 4\]"),
        (RestoreConfig(step=2, leave_out=[3]), ConfigError, "the journal does not have"),
        (RestoreConfig(leave_out=[3]), ConfigError, "State after step 4, which has learnt"),
    ],
)
def test_what_is_refused_changes_nothing_where_workers_had_parted(tmp_path, wanted, error, why):
    """States were dropped, and the error said that nothing was changed."""
    refs = parted(tmp_path)
    checkpoints = Checkpoints(Store(tmp_path / "store"), "r", CheckpointConfig())
    before = checkpoints.store.tags()
    with pytest.raises(error, match=why + ".*Nothing was changed"):
        begin(checkpoints, settings(tmp_path), wanted)
    assert checkpoints.store.tags() == before
    told, _ = begin(checkpoints, settings(tmp_path), RestoreConfig(step=2))
    assert told == [
        StateDropped(ref=refs[8], step=8, t=ANY),
        Resumed(step=2, ref=refs[2], t=ANY),
    ]
    checkpoints.close()


def test_what_was_to_be_left_out_can_be_if_the_run_was_killed_before_it_said_so(tmp_path):
    """It had said that it goes back, and no step was taken since: the numbers mean the old ones."""
    refs = stored(tmp_path, 8)
    opened(tmp_path).close()
    with Journal(tmp_path / "journal.jsonl") as journal:
        for step in range(1, 11):
            batch = BatchShares(loader=0, epoch=0, shares={0: ((4 * step, 4 * step + 4),)})
            journal.append(StepCommitted(step=step, generation=1, world_size=1, batches=(batch,)))
        journal.append(Resumed(step=8, ref=refs[8]))
    checkpoints = Checkpoints(Store(tmp_path / "store"), "r", CheckpointConfig())
    wanted = RestoreConfig(step=8, leave_out=[9])
    told, to_workers = begin(checkpoints, settings(tmp_path), wanted)
    assert told == [
        Resumed(step=8, ref=refs[8], t=ANY),
        SamplesLeftOut(loader=0, spans=((36, 40),), t=ANY),
    ]
    assert to_workers.left_out == {0: ((36, 40),)}
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(StepCommitted(step=9, generation=1, world_size=1, batches=()))
    again, _ = begin(checkpoints, settings(tmp_path), wanted)  # 9 is another one now
    assert again == [Resumed(step=8, ref=refs[8], t=ANY)]
    with pytest.raises(ConfigError, match=r"names step 10, .*its last is 9"):
        begin(checkpoints, settings(tmp_path), RestoreConfig(step=8, leave_out=[10]))
    checkpoints.close()
