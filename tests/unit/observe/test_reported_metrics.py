"""What was reported, over restarts: the history and the best value."""

import math

import pytest

from elastix.events import Reported, Resumed, RunStarted, StateDropped, StateStored
from elastix.observe.reported_metrics import BestSoFar, history


def started(t=0.0, **checkpoint):
    return RunStarted(
        t=t, name="r", seed=0, config={}, scaling={}, versions={}, checkpoint=checkpoint
    )


def said(step, t=1.0, **metrics):
    return Reported(t=t, seq=step, step=step, metrics=metrics)


def stored(step, ref):
    return StateStored(ref=ref, step=step, reason="best", stored_bytes=1, store_s=0.1)


def best_of(*events):
    best = BestSoFar()
    for event in events:
        best.add(event)
    return best


def test_reports_of_one_step_share_a_row_and_void_steps_have_none():
    rows = history(
        [
            started(t=10.0),
            said(1, t=11.0, loss=3.0),
            said(1, t=12.0, accuracy=0.5),
            said(2, t=13.0, loss=2.0),
            Resumed(step=1, ref="a"),
            started(t=50.0),
            said(2, t=51.0, loss=1.0),
        ]
    )
    assert rows == [
        {"step": 1, "seconds": 1.0, "loss": 3.0, "accuracy": 0.5},
        {"step": 2, "seconds": 41.0, "loss": 1.0},
    ]


@pytest.mark.parametrize(("mode", "step", "value"), [("max", 2, 0.7), ("min", 1, 0.3)])
def test_the_best_value_is_that_of_the_metric_and_mode_that_checkpoints_go_by(mode, step, value):
    best = best_of(
        started(best="a", mode=mode), said(1, a=0.3, b=9), said(2, a=0.7), said(3, a=0.5)
    )
    assert (best.value.metric, best.value.step, best.value.value) == ("a", step, value)
    assert best.value.ref == ""


def test_the_best_state_is_the_one_of_its_step_as_long_as_it_is_stored():
    events = [started(best="a"), said(1, a=0.3), stored(1, "one"), said(2, a=0.1), stored(2, "two")]
    assert best_of(*events).value.ref == "one"
    assert best_of(*events, StateDropped(ref="one", step=1)).value.ref == ""
    assert best_of(*events, StateDropped(ref="two", step=2)).value.ref == "one"


def test_what_came_after_the_step_that_a_run_went_back_to_is_no_best():
    events = [started(best="a"), said(1, a=0.3), said(5, a=0.9)]
    assert best_of(*events).value.step == 5
    assert best_of(*events, Resumed(step=4, ref="x")).value.step == 1


ODD = [math.nan, math.inf, -math.inf, "good", True, None, 10**400]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("mode", ["max", "min"])
def test_what_is_no_finite_number_is_no_best(mode, odd):
    assert best_of(started(best="a", mode=mode), said(1, a=odd)).value is None
    best = best_of(started(best="a", mode=mode), said(1, a=0.5), said(2, a=odd)).value
    assert (best.step, best.value) == (1, 0.5)


def test_none_in_a_report_says_nothing_new_of_its_step():
    rows = history([said(1, a=0.5), said(1, a=None, b=None), said(2, a=None)])
    assert [{**row, "seconds": 0} for row in rows] == [
        {"step": 1, "seconds": 0, "a": 0.5, "b": None},
        {"step": 2, "seconds": 0, "a": None},
    ]


def test_a_metric_that_is_called_as_a_column_has_one_of_its_own():
    said_so = Reported(t=1.0, seq=1, step=7, metrics={"step": 70, "seconds": 0.5, "a": 1})
    assert history([said_so]) == [
        {"step": 7, "seconds": 0.0, "reported:step": 70, "reported:seconds": 0.5, "a": 1}
    ]


def test_silence_is_no_best():
    assert best_of(started(), said(1, a=1.0)).value is None
    assert best_of(started(best="a"), said(1, b=1.0)).metric == "a"
