"""Which States are kept, and when one is due."""

import pytest

from elastix.comm.protocol.inbox import Inbox
from elastix.config import CheckpointConfig, RestoreConfig
from elastix.errors import ConfigError
from elastix.state import Ref
from elastix.train.checkpoint.retention import Kept, ranked, surplus, worth_storing
from elastix.train.checkpoint.schedule import Schedule


def kept(*scores):
    return [Kept(10 * n, Ref(f"{n:064x}"), score) for n, score in enumerate(scores, start=1)]


def steps(found):
    return [one.step for one in found]


def test_the_last_ones_and_the_best_ones_stay():
    states = kept(0.1, 0.9, 0.3, None, 0.9, 0.2)
    assert steps(surplus(states, 2, 1)) == [10, 30, 40]
    assert steps(surplus(states, 2, 2)) == [10, 30, 40]
    assert steps(surplus(states, 1, 0)) == [10, 20, 30, 40, 50]
    assert surplus(states, None, 1) == []
    assert surplus(states[:1], 1, 0) == []


def test_of_equal_scores_the_earlier_is_best():
    assert steps(ranked(kept(0.5, 0.9, None, 0.9))) == [20, 40, 10]


def test_a_state_is_worth_storing_if_it_would_be_among_the_best():
    states = kept(0.5, 0.9)
    assert worth_storing(0.91, states, 1)
    assert not worth_storing(0.9, states, 1)
    assert worth_storing(0.6, states, 2)
    assert worth_storing(0.1, states, 3)
    assert not worth_storing(None, states, 3)
    assert not worth_storing(1.0, states, 0)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_every_few_steps_once_each():
    assert stored(range(9)) == [4, 8]
    schedule = Schedule(CheckpointConfig(every_steps=4))
    schedule.stored(4)
    assert schedule.due(4) == ""
    assert schedule.due(8) == "every_steps"


def stored(boundaries):
    """Steps at which a State is stored, with boundaries at these."""
    schedule = Schedule(CheckpointConfig(every_steps=4))
    found = []
    for step in boundaries:
        if schedule.due(step):
            schedule.stored(step)
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("boundaries", "steps"),
    [(range(0, 30, 3), [6, 9, 12, 18, 21, 24]), (range(1, 20, 2), [5, 9, 13, 17])],
    ids=["three steps a batch", "two, and one before the first"],
)
def test_a_multiple_that_falls_between_two_boundaries_is_due_at_the_second(boundaries, steps):
    assert stored(boundaries) == steps


def test_time_counts_when_the_group_agrees_on_it():
    clock = Clock()
    schedule = Schedule(CheckpointConfig(every_s=60.0), clock=clock)
    clock.now = 59.0
    assert not schedule.time_is_up()
    clock.now = 60.0
    assert schedule.time_is_up()
    assert schedule.due(5) == ""  # rank 0 may see it otherwise
    schedule.agreed(store=True, compare=False, shadowed=False)
    assert schedule.due(5) == "every_s"
    schedule.stored(5)
    assert not schedule.time_is_up()
    assert schedule.due(6) == ""


@pytest.mark.parametrize(("mode", "expected"), [("max", 0.5), ("min", -0.5)])
def test_a_reported_metric_makes_its_state_due_with_its_score(mode, expected):
    schedule = Schedule(CheckpointConfig(every_steps=4, best="accuracy", mode=mode))
    schedule.stored(4)
    schedule.reported(4, {"accuracy": 0.5, "loss": 1.0})
    assert schedule.score(4) == expected
    assert schedule.due(4) == "best"  # the State at hand is stored already, but without its score
    schedule.stored(4)
    assert schedule.due(4) == ""
    assert schedule.score(5) is None


def test_a_state_that_was_taken_for_its_score_alone_may_be_stored_once_more():
    schedule = Schedule(CheckpointConfig())
    for step, reason, lacks in [
        (4, "best", True),
        (5, "notice", False),
        (5, "best", False),  # it is there already, without its score
        (6, "best", True),
        (6, "quorum lost", False),
    ]:
        schedule.stored(step, reason)
        assert schedule.lacks(step) == lacks
        assert schedule.lacks(step + 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), True, "good", None])
def test_a_metric_that_cannot_be_compared_is_no_score(value):
    schedule = Schedule(CheckpointConfig(best="accuracy"))
    schedule.reported(4, {"accuracy": value})
    assert schedule.due(4) == ""


@pytest.mark.parametrize(
    "options",
    [
        {"every_steps": 0},
        {"every_s": 0.0},
        {"every_s": -1.0},
        {"keep_last": 0},
        {"keep_best": -1},
        {"mode": "most"},
    ],
)
def test_impossible_checkpoint_settings_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        CheckpointConfig(**options)


@pytest.mark.parametrize("options", [{"step": -1}, {"leave_out": [0]}, {"leave_out": ["1"]}])
def test_impossible_restore_settings_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        RestoreConfig(**options)


def test_restore_settings_survive_json():
    config = RestoreConfig(step=3, leave_out=[4, 5])
    assert RestoreConfig.from_dict(config.to_dict()) == config


def compared_at(groups, first=0):
    """At which boundaries of a run with these groups replicas are compared, if all agree at once.

    Args:
        groups: the members at each boundary, a step after the other.
        first: the step of the first boundary.
    """
    schedule = Schedule(CheckpointConfig())
    found = []
    for step, members in enumerate(groups, first):
        if schedule.compares_now():
            found.append(step)
            schedule.compared()
        schedule.grouped(step, members)
        schedule.agreed(store=False, compare=schedule.compare, shadowed=False)
    return found


@pytest.mark.parametrize(
    ("groups", "first", "boundaries"),
    [
        ([(0, 1)] * 5, 0, []),
        ([(0, 1)] * 5, 7, [8]),
        ([(0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)], 0, [3]),
        ([(0, 1), (1,), (1,), (1, 2), (1, 2), (1, 2)], 0, [4]),
        ([(0, 1), (0,), (0,), (0,)], 0, []),
        ([(0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2)], 0, [2]),
    ],
    ids=[
        "founders of a fresh run",
        "of one that goes on",
        "a joiner",
        "a replacement",
        "a loss",
        "a joiner after the first step",
    ],
)
def test_replicas_are_compared_once_after_somebody_has_joined(groups, first, boundaries):
    assert compared_at(groups, first) == boundaries


def test_who_has_joined_is_compared_even_if_that_is_agreed_on_later():
    schedule = Schedule(CheckpointConfig())
    schedule.grouped(3, (0, 1))
    for step in range(4, 8):
        schedule.grouped(step, (0, 1))
        assert schedule.compare
        assert not schedule.compares_now()
    schedule.agreed(store=False, compare=True, shadowed=False)
    schedule.agreed(
        store=False, compare=False, shadowed=False
    )  # a further step before the boundary
    assert schedule.compares_now()
    assert not schedule.compares_now()
    assert schedule.due(8) == ""


def test_nothing_is_due_before_the_first_step():
    schedule = Schedule(CheckpointConfig(every_steps=1, best="accuracy"))
    assert not schedule.shadowed
    schedule.reported(0, {"accuracy": 0.5})
    schedule.agreed(store=True, compare=False, shadowed=False)
    assert schedule.due(0) == ""
    assert schedule.due(1) == "every_steps"


def test_the_best_is_due_at_the_first_step_too():
    schedule = Schedule(CheckpointConfig(best="accuracy"))
    schedule.reported(1, {"accuracy": 0.5})
    assert schedule.due(1) == "best"


def test_a_state_that_is_taken_for_its_score_is_not_the_one_that_all_wait_for_who_are_to_go():
    """It may turn out not to be among the best, and is not kept then."""
    inbox = Inbox()
    schedule = Schedule(CheckpointConfig(best="accuracy"), inbox)
    schedule.reported(1, {"accuracy": 0.5})
    inbox.store_soon()
    schedule.stored(1, reason="best")
    assert schedule.time_is_up()
    schedule.agreed(store=True, compare=False, shadowed=False)
    assert schedule.due(2) == "notice"
    schedule.stored(2, reason="notice")
    assert not schedule.time_is_up()
