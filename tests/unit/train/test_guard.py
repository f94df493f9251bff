"""What the guard takes for a bad step: the same on all, soon enough, and hardly ever a good one."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastix.config import FailureConfig, Guard
from elastix.errors import ConfigError
from elastix.train.replica.guard import ABSENT, Alarm, Watch, number, ordered

STEPS = 60


def watch(norms=None, **options) -> Watch:
    """One that has seen some steps."""
    chance = random.Random(3)
    found = Watch(Guard(**options))
    for norm in norms or [math.exp(chance.gauss(0, 0.3)) for _ in range(STEPS)]:
        found.counted(norm, None)
    return found


@given(st.floats(), st.floats())
def test_numbers_keep_their_order_as_whole_numbers(first, second):
    assert abs(ordered(first)) < 2**63  # and so does the negative of each
    assert number(ordered(first)) == first or math.isnan(first)
    if math.isnan(first):
        assert ordered(first) == ordered(-first) > ordered(math.inf)
    elif not math.isnan(second) and first < second:
        assert ordered(first) < ordered(second)
    assert ordered(first) > ABSENT
    assert number(ABSENT) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_bad_from_the_first_step_on(value):
    alarm = Watch(Guard()).judge(value, None)
    assert alarm is not None
    assert str(alarm) == "the gradient's norm is not finite"
    assert Watch(Guard(spike=None, metric="loss")).judge(1.0, value).what == "loss"


def test_a_thousandfold_gradient_is_a_spike():
    alarm = watch().judge(1000.0, None)
    assert str(alarm).startswith("the gradient's norm is 1e+03, usually ")
    assert alarm.usual == pytest.approx(1, rel=0.2)
    assert watch(spike=None).judge(1000.0, None) is None


def test_nothing_is_a_spike_before_there_is_a_usual():
    assert watch([1.0] * 19).judge(1000.0, None) is None
    assert watch([1.0] * 20).judge(1000.0, None) is not None


def test_steady_numbers_may_begin_to_scatter():
    assert watch([1.0] * STEPS).judge(5.0, None) is None
    assert watch([1.0] * STEPS).judge(8.0, None) is not None


def test_a_norm_of_zero_and_a_negative_loss_are_no_spikes():
    found = watch(metric="loss")
    for _ in range(STEPS):
        found.counted(0.0, -1.0)
    assert found.judge(0.0, -3.0) is None


def test_a_hundred_thousand_good_steps_raise_no_alarm():
    """Norms that fall by a factor of 30 and scatter by one of two."""
    chance, found = random.Random(0), Watch(Guard())
    for step in range(100_000):
        norm = math.exp(chance.gauss(0, 0.5)) * 30 / (1 + step / 100)
        assert found.judge(norm, None) is None
        found.counted(norm, None)


def test_outliers_that_do_not_count_do_not_make_the_next_one_usual():
    found = watch(most=100)
    for step in range(50):
        alarm = found.judge(1000.0, None)
        assert alarm is not None
        assert found.voided(step, alarm) is None


def test_too_many_void_steps_in_a_window_end_the_run():
    found, alarm = watch(most=2, window=30), Alarm("gradient", math.inf, 1.0)
    for step in range(5):  # far enough from each other
        assert found.voided(step, alarm) is None
        for _ in range(20):
            found.counted(1.0, None)
    assert found.voided(7, alarm) is None
    error = found.voided(8, alarm)
    assert "voided 3 of the last 23 steps, and Guard.most is 2; the last was step 8" in str(error)


def test_void_passes_on_one_batch_count_as_one_unless_they_never_end():
    found, alarm = watch(most=2), Alarm("gradient", math.inf, 1.0)
    for step in range(2):
        for further in range(10):
            assert found.voided(step, alarm, again=further > 0) is None
    errors = (found.voided(3, alarm, again=True) for _ in range(2000))
    assert "voided 3 of the last" in str(next(error for error in errors if error))


def test_a_run_whose_batches_are_all_bad_ends_however_many_passes_there_are_on_each():
    """As of a loop with 64 passes on each: no window of 100 passes has more than two batches."""
    found, alarm = watch(most=2, window=100), Alarm("gradient", math.inf, 1.0)
    errors = [
        found.voided(step, alarm, again=further > 0) for step in range(3) for further in range(64)
    ]
    assert [number for number, error in enumerate(errors) if error] == [128]
    assert "voided 3 of the last 3 steps" in str(errors[128])


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_what_is_a_spike_does_not_depend_on_the_scale(scale):
    chance = random.Random(5)
    norms = [scale * math.exp(chance.gauss(0, 0.3)) for _ in range(STEPS)]
    found = watch(norms)
    assert found.judge(50 * scale, None) is not None
    assert found.judge(2 * max(norms), None) is None


def test_nothing_is_a_spike_that_is_no_larger_than_what_counted():
    norms = [1.0, 500.0] + [1.0] * 18  # the second came before anybody could tell
    assert watch(norms).judge(500.0, None) is None
    assert watch(norms).judge(400.0, None) is None
    assert watch(norms).judge(600.0, None) is not None


def test_a_reported_loss_is_judged_by_the_losses_before_it():
    found = Watch(Guard(metric="loss"))
    for step in range(STEPS):
        found.counted(1000.0 + step % 3, 1.0 + 0.1 * (step % 3))
    alarm = found.judge(1001.0, 1000.0)
    assert str(alarm).startswith("the reported loss is 1e+03, usually 1.1")
    second = Watch(Guard(metric="loss"))
    second.load_state_dict(found.state_dict())
    assert second.judge(1001.0, 1000.0) == alarm


def test_what_is_usual_is_known_after_the_warmup():
    for steps, known in ((19, False), (20, True)):
        alarm = watch([2.0] * steps).judge(math.inf, None)
        assert math.isnan(alarm.usual) != known


def test_void_steps_count_together_within_the_window_and_not_beyond():
    alarm = Alarm("gradient", math.inf, 1.0)
    for between, ends in ((28, True), (29, False)):
        found = Watch(Guard(most=1, window=30))
        assert found.voided(1, alarm) is None
        for _ in range(between):
            found.counted(1.0, None)
        assert (found.voided(2, alarm) is not None) == ends


def test_whoever_is_given_the_state_ends_the_run_at_the_same_step():
    alarm = Alarm("gradient", math.inf, 1.0)
    first, second = Watch(Guard(most=2, window=30)), Watch(Guard(most=2, window=30))
    for step in range(4):
        assert first.voided(step, alarm) is None
        for _ in range(20):
            first.counted(1.0, None)
    second.load_state_dict(first.state_dict())
    for step in range(4, 8):
        errors = [str(watch.voided(step, alarm)) for watch in (first, second)]
        assert errors[0] == errors[1]
    assert "voided 3 of the last 3 steps" in errors[0]


def test_whoever_is_given_the_state_judges_alike():
    first, second = watch(), Watch(Guard())
    first.voided(3, Alarm("gradient", math.nan, 1.0))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.judge(1000.0, None) == first.judge(1000.0, None)
    second.load_state_dict({})
    assert second.state_dict() == Watch(Guard()).state_dict()


def test_the_configuration():
    config = FailureConfig(guard=Guard(spike=6.0, metric="loss"))
    assert FailureConfig.from_dict(config.to_dict()) == config
    for wrong in ({"spike": 0.0}, {"warmup": 1}, {"warmup": 300}, {"most": -1}, {"window": 2.0}):
        with pytest.raises(ConfigError):
            Guard(**wrong)
    with pytest.raises(ConfigError, match="guard must be a Guard"):
        FailureConfig(guard=True)
