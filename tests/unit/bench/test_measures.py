"""What a benchmark makes of the times of steps, and when it kills and ends."""

import math
import random
from dataclasses import replace

import pytest

from elastix.bench.measures import (
    Commit,
    Death,
    Observation,
    Rate,
    ScalingMeasured,
    SizeMeasured,
    Timing,
    Turn,
    Victim,
    cores_of_quota,
    measure_rate,
    parse_sizes,
)
from elastix.errors import ConfigError
from elastix.events import BatchShares, GenerationFormed, Resumed, StepCommitted, WorkerStarted

TIMING = Timing(warmup_s=2.0, seconds=10.0, kills=2, kill_every_s=5.0)


def steady(count, every=0.5, samples=8, size=2, since=0.0):
    return [
        Commit(t=since + every * n, samples=samples, step=n + 1, world_size=size)
        for n in range(count)
    ]


def test_a_rate_is_of_whole_steps_after_the_warmup():
    rate = measure_rate(steady(100), 2, TIMING)
    assert rate == Rate(
        samples_per_s=16.0, low=16.0, high=16.0, steps=20, seconds=10.0, step_samples=8.0
    )


def test_a_window_begins_with_the_whole_group_and_not_before():
    alone = steady(50, size=1)
    assert measure_rate(alone, 2, TIMING) is None
    rate = measure_rate([*alone, *steady(100, since=25.0, samples=4)], 2, TIMING)
    assert rate.samples_per_s == 8.0


def test_a_group_that_lost_somebody_by_itself_is_measured_anew():
    whole, fewer = steady(10), steady(30, size=1, since=5.0)
    assert measure_rate([*whole, *fewer], 2, TIMING) is None
    again = [replace(c, generation=3) for c in steady(25, since=20.0, samples=4)]
    assert measure_rate([*whole, *fewer, *again[:-1]], 2, TIMING) is None
    assert measure_rate([*whole, *fewer, *again], 2, TIMING).samples_per_s == 8.0
    alone = [
        *steady(20, size=1),
        *(replace(c, generation=2) for c in steady(5, size=1, since=20.0)),
    ]
    assert measure_rate(alone, 1, TIMING) is None  # it was away for ten seconds


def test_there_is_no_rate_until_the_window_is_over_and_has_steps_enough():
    assert measure_rate(steady(24), 2, TIMING) is None  # at 11.5 s: 9.5 of 10
    assert measure_rate(steady(25), 2, TIMING) is not None
    slow = steady(5, every=20.0)
    assert measure_rate(slow, 2, TIMING) is None
    assert measure_rate(steady(8, every=20.0), 2, TIMING).steps == 5


def test_the_fifths_show_a_machine_that_was_busy_for_a_while():
    quick, slow = steady(20, every=0.5), steady(10, every=1.0, since=10.0)
    rate = measure_rate([*quick, *slow], 2, Timing(0.0, 15.0, 0, 1.0))
    assert (rate.low, rate.high) == (8.0, 16.0)


def committed(t, step, world_size=2, generation=1, samples=8):
    batch = BatchShares(loader=0, epoch=0, shares={0: ((0, samples),)})
    return StepCommitted(
        t=t, step=step, generation=generation, world_size=world_size, batches=(batch,)
    )


def formed(t, generation, members):
    return GenerationFormed(t=t, generation=generation, members=members, cause="")


def watched(size=2, timing=TIMING, until=13.0):
    seen = Observation(size, timing, random.Random(0))
    for worker in range(size):
        seen.add(WorkerStarted(t=0.0, worker=worker, pid=100 + worker, node="n", device="cpu"))
    seen.add(formed(0.0, 1, tuple(range(size))))
    t, step = 0.0, 1
    while t <= until:
        seen.add(committed(t, step, size))
        t, step = t + 0.5, step + 1
    return seen, step


def test_a_group_of_one_is_over_when_its_rate_is_known():
    seen, _ = watched(size=1)
    assert seen.decide(13.0) is Turn.OVER
    assert seen.over
    assert seen.goodput is None


def test_it_is_known_for_how_long_the_group_is_not_whole():
    """From the beginning on, or since a worker was lost; until it is, or all is measured."""
    seen = Observation(2, TIMING, random.Random(0))
    for t in (100.0, 700.5):
        assert seen.decide(t) is Turn.WAIT
    assert seen.lacking_s == 600.5
    seen.add(formed(701.0, 1, (0,)))
    seen.decide(702.0)
    assert seen.lacking_s == 602.0
    seen.add(formed(703.0, 2, (0, 1)))
    seen.decide(704.0)
    assert seen.lacking_s == 0.0
    seen.add(formed(705.0, 3, (0,)))
    for t in (706.0, 709.0):
        seen.decide(t)
    assert seen.lacking_s == 3.0


def test_nobody_is_killed_before_the_rate_is_known():
    seen, _ = watched(until=11.0)
    assert seen.decide(11.0) is Turn.WAIT
    assert not seen.over


def test_kills_come_at_their_interval_and_the_end_after_the_last():
    seen, step = watched()
    first = seen.decide(13.0)
    assert isinstance(first, Victim)
    assert first.pid == 100 + first.worker
    seen.killed(first, 13.0)
    left = 1 - first.worker
    seen.add(formed(13.1, 2, (left,)))
    seen.add(committed(13.25, step, 1, 2))
    assert seen.decide(17.9) is Turn.WAIT
    assert seen.decide(18.1) is Turn.WAIT  # due, but one must be left to go on
    seen.add(WorkerStarted(t=18.0, worker=2, pid=102, node="n", device="cpu"))
    seen.add(formed(18.2, 3, (left, 2)))
    seen.add(committed(18.21, step + 1, 1, 2))
    assert seen.decide(18.22) is Turn.WAIT  # decided, but worker 2 has yet to enter
    seen.add(committed(18.25, step + 2, 2, 3))
    second = seen.decide(18.3)
    assert second.worker in (left, 2)
    seen.killed(second, 18.3)
    assert seen.decide(23.5) is Turn.WAIT  # no step since
    seen.add(formed(18.4, 4, tuple({left, 2} - {second.worker})))
    seen.add(committed(18.8, step + 3, 1, 4))
    assert seen.decide(23.6) is Turn.OVER
    assert [death.stall_s for death in seen.deaths] == [pytest.approx(0.25), pytest.approx(0.5)]


def test_goodput_is_what_was_made_over_what_the_rate_had_made():
    seen, step = watched(timing=Timing(2.0, 10.0, 1, 5.0))
    victim = seen.decide(13.0)
    seen.killed(victim, 13.0)
    seen.add(formed(13.5, 2, (1 - victim.worker,)))
    for n in range(5):  # at half the rate
        seen.add(committed(14.0 + n, step + n, 1, 2))
    assert seen.decide(18.0) is Turn.OVER
    assert seen.goodput == pytest.approx(0.5)


def test_a_step_that_ends_between_a_kill_and_its_effect_is_no_recovery():
    seen, step = watched(timing=Timing(2.0, 10.0, 1, 5.0))
    victim = seen.decide(13.0)
    seen.killed(victim, 13.0)
    seen.add(committed(13.01, step))  # of the old group
    assert seen.deaths[0].stall_s is None
    seen.add(formed(13.05, 2, (0, 1, 2)))  # a joiner, and the victim is in it
    seen.add(committed(13.06, step + 1, 3, 2))
    assert seen.deaths[0].stall_s is None
    seen.add(formed(13.1, 3, tuple({0, 1, 2} - {victim.worker})))
    seen.add(committed(13.4, step + 2, 2, 3))
    assert seen.deaths[0].stall_s == pytest.approx(0.4)


def test_whoever_never_recovers_does_not_hold_up_the_end_for_ever():
    seen, _ = watched(timing=Timing(2.0, 10.0, 1, 5.0))
    seen.killed(seen.decide(13.0), 13.0)
    assert seen.decide(40.0) is Turn.WAIT
    assert seen.decide(100.0) is Turn.OVER
    assert seen.deaths[0].stall_s is None


def test_a_step_after_a_kill_may_take_as_long_as_steps_do():
    seen = Observation(2, Timing(0.0, 10.0, 1, 5.0), random.Random(0))
    for worker in range(2):
        seen.add(WorkerStarted(t=0.0, worker=worker, pid=worker, node="n", device="cpu"))
    seen.add(formed(0.0, 1, (0, 1)))
    for n in range(7):
        seen.add(committed(600.0 * n, n + 1))
    seen.killed(seen.decide(3600.0), 3600.0)
    assert seen.decide(4300.0) is Turn.WAIT
    assert seen.decide(7000.0) is Turn.OVER


def test_how_far_a_measurement_is():
    seen = Observation(2, TIMING, random.Random(0))
    assert seen.standing() == "0 steps so far, 0 of 2 workers in the group"
    seen, step = watched()
    seen.killed(seen.decide(13.0), 13.0)
    there = f"{step - 1} steps so far, 2 of 2 workers in the group"
    assert seen.standing() == f"{there}, 1 of 2 killed"


def test_a_note_says_how_far_kills_were_apart_if_they_had_to_wait():
    def with_kills_at(*times):
        deaths = [Death(worker, t, 0.1) for worker, t in enumerate(times)]
        two = SizeMeasured(workers=2, elastix=rate(100.0), deaths=deaths)
        return [note for note in scaling([two]).notes if "apart" in note]

    assert with_kills_at(0.0, 1.2) == []
    (note,) = with_kills_at(0.0, 1.0, 180.0)
    assert note.startswith("Kills came up to 179 s apart instead of 1 s")


def test_steps_that_a_run_goes_back_behind_do_not_count():
    seen, step = watched(until=5.0)
    seen.add(Resumed(t=6.0, step=3, ref="r"))
    assert seen.steps == 3 < step


def rate(samples_per_s, step_samples=8.0):
    return Rate(samples_per_s, samples_per_s, samples_per_s, 10, 1.0, step_samples)


def scaling(sizes, cores=4, kills=1, cpus=1.0):
    return ScalingMeasured(
        script="s.py",
        function="train",
        cores=cores,
        cpus=cpus,
        timing=Timing(1.0, 1.0, kills, 1.0),
        sizes=sizes,
        versions={},
    )


def test_efficiency_is_per_worker_of_the_smallest_group():
    one = SizeMeasured(workers=1, elastix=rate(100.0), ddp=rate(90.0))
    four = SizeMeasured(workers=4, elastix=rate(300.0))
    found = scaling([one, four])
    assert found.efficiency(four, "elastix") == pytest.approx(0.75)
    assert found.efficiency(one, "ddp") == 1.0
    assert found.efficiency(four, "ddp") is None
    assert one.of_ddp == pytest.approx(100 / 90)
    assert four.of_ddp is None


def test_shared_cores_are_said_and_whole_ones_are_not():
    sizes = [SizeMeasured(workers=n, elastix=rate(100.0)) for n in (2, 4)]
    assert not any("says nothing about scaling" in note for note in scaling(sizes, cores=4).notes)
    (note,) = [n for n in scaling(sizes, cores=2).notes if "says nothing about scaling" in n]
    assert "2 usable cores: with 4 workers" in note
    assert "DDP" not in note  # it was not measured
    both = scaling([replace(size, ddp=rate(90.0)) for size in sizes], cores=2)
    assert any("The comparison with DDP holds" in note for note in both.notes)
    assert scaling(sizes, cores=4, cpus=2.0).oversubscribed(sizes[1])
    assert scaling(sizes, cores=3, cpus=0.5).oversubscribed(sizes[1])  # each computes on a thread


def test_notes_say_how_the_batch_scales_and_where_ddp_had_another():
    strong = [SizeMeasured(workers=n, elastix=rate(1.0)) for n in (1, 2)]
    assert any("strong scaling" in note for note in scaling(strong).notes)
    weak = [SizeMeasured(workers=n, elastix=rate(1.0, 8.0 * n)) for n in (1, 2)]
    assert any("weak scaling" in note for note in scaling(weak).notes)
    apart = [SizeMeasured(workers=2, elastix=rate(1.0, 8.0), ddp=rate(1.0, 4.0))]
    assert any("their steps are not the same" in note for note in scaling(apart).notes)


def test_a_stall_is_the_median_of_those_that_ended():
    deaths = [Death(1, 0.0, 0.3), Death(2, 1.0, None), Death(3, 2.0, 0.1)]
    assert SizeMeasured(workers=2, elastix=rate(1.0), deaths=deaths).stall_s == pytest.approx(0.2)
    sizes = [SizeMeasured(workers=2, elastix=rate(1.0), deaths=deaths)]
    assert any("no step came after 1 of 3 kills" in note for note in scaling(sizes).notes)
    sizes[0] = replace(sizes[0], deaths=[deaths[0], deaths[2]])
    assert not any("no step came" in note for note in scaling(sizes).notes)


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2.0),
        ("150000 100000", 1.5),
        ("max 100000\n", math.inf),
        ("", math.inf),
        ("1 0", math.inf),
    ],
)
def test_cores_of_a_container(text, cores):
    assert cores_of_quota(text) == cores


@pytest.mark.parametrize(
    ("text", "sizes"), [("4", [4]), ("1..4", [1, 2, 3, 4]), ("4,1,2,2", [1, 2, 4])]
)
def test_numbers_of_workers(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "0", "4..1", "1..", "a", "1..2..3", "65", "1,,2", "-1", "1.5", f"1..{10**12}"]
)
def test_what_are_no_numbers_of_workers(text):
    with pytest.raises(ConfigError, match="Nothing was started"):
        parse_sizes(text)


@pytest.mark.parametrize(
    "wrong", [(-1, 1, 1, 1), (1, 0, 1, 1), (1, 1, -1, 1), (1, 1, 1, 0), (float("nan"), 1, 1, 1)]
)
def test_times_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="Nothing was started"):
        Timing(*wrong)
