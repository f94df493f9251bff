import itertools
import json
import math
import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.errors import ConfigError
from elastix.search import ordered, rungs
from elastix.search.pareto import crowding, dominates, fronts, furthest, order
from elastix.search.rungs import Asha, Median, Rungs, Verdict
from tests.instructions import instructions

POINTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(POINTS)
def test_fronts_are_the_definition(points):
    left = set(range(len(points)))
    for front in fronts(points):
        nobody = {i for i in left if not any(dominates(points[j], points[i]) for j in left)}
        assert set(front) == nobody
        left -= nobody
    assert not left


@given(POINTS)
def test_order_never_puts_a_dominated_point_first(points):
    ranked = order(points)
    assert sorted(ranked) == list(range(len(points)))
    for before, after in itertools.pairwise(ranked):
        assert not dominates(points[after], points[before])


def test_order_of_numbers_is_stable_and_puts_what_is_not_finite_last():
    losses = [(2.0,), (math.nan,), (1.0,), (), (1.0,), (-math.inf,)]
    assert order(losses) == [2, 4, 0, 1, 3, 5]


def test_who_has_come_further_is_better():
    losses = [(1.0,), (9.0,), (5.0,), (0.5,), (math.nan,), (8.0,)]
    assert furthest(losses, [1, 3, None, 1, None, 3]) == [2, 4, 5, 1, 3, 0]
    assert furthest(losses, [None] * 6) == order(losses)
    assert furthest([], []) == []


def test_crowding_prefers_the_ends_and_the_lonely():
    front = [(0.0, 4.0), (1.0, 3.0), (1.1, 2.9), (3.0, 1.0), (4.0, 0.0)]
    distance = crowding(front)
    assert distance[0] == distance[4] == math.inf
    assert distance[3] > distance[1]


@pytest.mark.parametrize("rule", [Asha(), Median()])
def test_both_are_rungs(rule):
    assert isinstance(rule, Rungs)


def test_asha_pauses_then_promotes_when_enough_have_come():
    asha = Asha(first=1, eta=3, last=9)
    assert asha.levels == [1, 3]
    assert asha.report(0, 1, (0.1,)) is Verdict.PAUSE  # the best of one is not the best third
    assert asha.report(1, 1, (0.5,)) is Verdict.PAUSE
    assert asha.promotable() == []
    assert asha.report(2, 1, (0.9,)) is Verdict.PAUSE
    assert asha.promotable() == [0]
    asha.promote(0)
    assert asha.promotable() == []
    assert asha.report(0, 2, (0.1,)) is Verdict.CONTINUE
    assert asha.report(0, 3, (0.1,)) is Verdict.PAUSE
    assert asha.report(3, 1, (0.01,)) is Verdict.CONTINUE  # the best of four goes straight on
    assert asha.promotable() == []
    for number, loss in ((4, 0.7), (5, 0.8)):
        assert asha.report(number, 1, (loss,)) is Verdict.PAUSE
    assert asha.promotable() == []  # the best two of six have passed already
    asha.report(6, 1, (0.05,))
    asha.report(7, 1, (0.95,))
    asha.report(8, 1, (0.99,))
    assert asha.promotable() == []


def test_a_report_repeated_after_a_crash_counts_once():
    asha = Asha(eta=2)
    for _ in range(5):
        assert asha.report(0, 1, (0.5,)) is Verdict.PAUSE
    assert asha.report(1, 1, (0.1,)) is Verdict.CONTINUE
    assert asha.report(1, 1, (0.1,)) is Verdict.CONTINUE
    assert asha.promotable() == []


def test_asha_leaves_trials_alone_from_the_last_level_on():
    assert Asha(first=2, eta=2, last=4).report(0, 4, (9.0,)) is Verdict.CONTINUE
    assert Asha(first=2, eta=2, last=4).report(0, 1, (9.0,)) is Verdict.CONTINUE


def test_dropped_and_hopeless_trials_are_not_promoted():
    asha = Asha(eta=2)
    for number, loss in enumerate([math.nan, math.nan, math.inf, 3.0]):
        asha.report(number, 1, (loss,))
    assert asha.promotable() == []  # trial 3 went straight on, the others have no finite loss
    asha = Asha(eta=2)
    asha.report(0, 1, (0.1,))
    asha.report(1, 1, (0.2,))
    assert asha.promotable() == [0]
    asha.drop(0)
    assert asha.promotable() == []


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.integers(1, 2))
def test_asha_goes_on_from_saved_state_and_keeps_its_share(seed, objectives):
    rng = random.Random(seed)
    asha, level = Asha(eta=3, last=27), {}
    for number in range(40):
        running = [number]
        while running:
            trial = running.pop()
            at = level.get(trial, 0) + 1
            losses = tuple(rng.random() for _ in range(objectives))
            copy = Asha(eta=3, last=27)
            copy.load_state_dict(json.loads(json.dumps(asha.state_dict())))
            verdict = asha.report(trial, at, losses)
            assert copy.report(trial, at, losses) is verdict
            assert copy.promotable() == asha.promotable()
            level[trial] = at
            if verdict is Verdict.CONTINUE and at < 27:
                running.append(trial)
            for paused in asha.promotable():
                asha.promote(paused)
                running.append(paused)
    for rung in asha.levels:
        came = sum(at >= rung for at in level.values())
        passed = sum(at > rung for at in level.values())
        # Who passed while it was among the best third may fall back later, so more than a third
        # may have passed; but nobody passes where fewer than three came.
        assert passed <= came
        assert passed == 0 or came >= 3


def test_the_median_rule_stops_the_worse_half_once_there_are_enough():
    rule = Median(grace=1, others=4)
    for number in range(5):
        for level in (1, 2, 3):
            assert rule.report(number, level, (float(number),)) in (
                Verdict.CONTINUE,
                Verdict.STOP if number == 4 else Verdict.CONTINUE,
            )
    assert rule.report(9, 1, (99.0,)) is Verdict.CONTINUE  # grace
    assert rule.report(9, 2, (99.0,)) is Verdict.STOP
    assert rule.report(8, 1, (0.5,)) is Verdict.CONTINUE
    assert rule.report(8, 2, (99.0,)) is Verdict.CONTINUE  # its best counts
    assert rule.report(7, 1, (math.nan,)) is Verdict.CONTINUE
    assert rule.report(7, 2, (math.nan,)) is Verdict.STOP
    assert rule.promotable() == []


def test_the_median_rule_with_two_objectives_and_saved_state():
    rule = Median(grace=0, others=3)
    for number, losses in enumerate([(0.0, 1.0), (1.0, 0.0), (0.5, 0.5)]):
        rule.report(number, 1, losses)
    copy = Median(grace=0, others=3)
    copy.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert rule.report(3, 1, (2.0, 2.0)) is copy.report(3, 1, (2.0, 2.0)) is Verdict.STOP
    assert rule.report(4, 1, (0.0, 0.0)) is copy.report(4, 1, (0.0, 0.0)) is Verdict.CONTINUE


def naive_median(reports, number, level, *, grace, others):
    """The median rule by its definition, from all reports: number to level to losses."""
    theirs = []
    for other, theirs_all in reports.items():
        if other != number and max(theirs_all) >= level:
            until = [losses for at, losses in theirs_all.items() if at <= level]
            theirs.append(tuple(sum(v) / len(v) for v in zip(*until, strict=True)))
    if level <= grace or len(theirs) < others:
        return Verdict.CONTINUE
    finite = [losses for losses in reports[number].values() if all(map(math.isfinite, losses))]
    best = tuple(map(min, zip(*finite, strict=True))) if finite else (math.inf,)
    place = order([best, *theirs]).index(0)
    return Verdict.STOP if 2 * place > len(theirs) else Verdict.CONTINUE


# Sums of these are exact in any order.
LOSSES = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 1.5, 3.0, math.nan, math.inf, -math.inf])


@settings(max_examples=60)
@given(st.data(), st.integers(1, 2), st.integers(0, 2), st.integers(1, 3))
def test_the_median_rule_is_its_definition(data, objectives, grace, others):
    told = st.tuples(st.integers(0, 6), st.integers(1, 6), st.tuples(*[LOSSES] * objectives))
    rule, reports = Median(grace=grace, others=others), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "BLOCK", 1)
        # Reports come also again, late, and with levels left out.
        for number, level, losses in data.draw(st.lists(told, min_size=20, max_size=60)):
            reports.setdefault(number, {})[level] = losses
            if data.draw(st.integers(0, 9)) == 0:
                state = json.loads(json.dumps(rule.state_dict()))
                rule = Median(grace=grace, others=others)
                rule.load_state_dict(state)
            wanted = naive_median(reports, number, level, grace=grace, others=others)
            assert rule.report(number, level, losses) is wanted


def test_a_report_to_the_median_rule_costs_the_same_among_many_trials():
    rng = random.Random(0)
    rule, costs = Median(), {}
    for number in range(1001):
        for level in (1, 2):
            steps = instructions(partial(rule.report, number, level, (rng.random(),)))
        costs[number] = steps
    assert costs[10] > 20
    assert costs[1000] < 2 * costs[10]


def longest_list(held):
    """Of all lists within: what comes into one moves what stands behind its place."""
    if isinstance(held, dict):
        return max(map(longest_list, held.values()), default=0)
    if isinstance(held, list):
        return max(len(held), *map(longest_list, held)) if held else 0
    return longest_list(vars(held)) if hasattr(held, "__dict__") else 0


@pytest.mark.parametrize("make", [Asha, Median])
def test_what_a_report_moves_does_not_grow_with_the_number_of_trials(make):
    rule, draw, moved = make(), random.Random(0), {}
    for number in range(20_001):
        for level in (1, 2):
            rule.report(number, level, (draw.random(),))
        if number in (5_000, 20_000):
            moved[number] = longest_list(rule)
    assert 1_000 < moved[20_000] < 2 * moved[5_000]


def containers(value):
    """How many lists and tables: each is one more for Python's collector to look through."""
    parts = value.values() if isinstance(value, dict) else value
    return 1 + sum(containers(part) for part in parts if isinstance(part, dict | list | tuple))


def test_several_objectives_are_sorted_once_for_each_report(monkeypatch):
    """Whoever waits for trials asks again and again who may go on."""
    sorts = []
    monkeypatch.setattr(rungs, "order", lambda losses: sorts.append(len(losses)) or order(losses))
    rule = Asha(first=1, eta=2, last=4)
    for number in range(9):
        rule.report(number, 1, (float(number), float(-number)))
        asked = [rule.promotable() for _ in range(5)]
        assert asked == asked[:1] * 5
    assert sorts == list(range(1, 10))
    rule.promote(asked[0][0])
    assert asked[0][0] not in rule.promotable()


def test_a_saved_state_has_no_more_lists_for_more_trials():
    asha, counts, draw = Asha(), {}, random.Random(0)
    for number in range(1001):
        asha.report(number, 1, (draw.random(),))
        counts[number] = containers(asha.state_dict()) if number in (10, 1000) else 0
    assert counts[1000] == counts[10]


def test_asha_goes_on_from_what_an_earlier_version_has_saved():
    before = {
        "rungs": [[1, [[0, ["0.5"]], [1, ["nan"]], [2, ["0.25"]], [3, ["0.75"]]]], [3, []]],
        "passed": [[1, [2]], [3, []]],
        "paused": [[0, 1], [3, 1]],
    }
    old, asha = Asha(eta=2), Asha(eta=2)
    old.load_state_dict(before)
    asha.report(0, 1, (0.5,))
    asha.report(1, 1, (math.nan,))
    asha.report(2, 1, (0.25,))
    asha.report(3, 1, (0.75,))
    asha.drop(1)
    assert old.promotable() == asha.promotable() == [0]
    for number in range(4, 9):
        assert old.report(number, 1, (0.6,)) is asha.report(number, 1, (0.6,))
        assert old.promotable() == asha.promotable()


@pytest.mark.parametrize("wrong", [{"first": 0}, {"eta": 1}, {"first": 9, "last": 3}])
def test_asha_refuses_what_makes_no_rungs(wrong):
    with pytest.raises(ConfigError):
        Asha(**wrong)


@pytest.mark.parametrize("wrong", [{"grace": -1}, {"others": 0}])
def test_median_refuses_nonsense(wrong):
    with pytest.raises(ConfigError):
        Median(**wrong)


class Plain:
    """What Asha does, by sorting everybody each time."""

    def __init__(self, eta):
        self.eta, self.here, self.passed, self.paused = eta, {}, {}, {}

    def best(self, rung):
        here = self.here[rung]
        numbers = sorted(here)
        ranked = [numbers[i] for i in order([here[n] for n in numbers])]
        return [n for n in ranked[: len(here) // self.eta] if all(map(math.isfinite, here[n]))]

    def report(self, number, level, losses):
        rung = max((self.eta**k for k in range(9) if self.eta**k <= level), default=0)
        if not 0 < rung < 9 or level >= 9 or number in self.passed.setdefault(rung, set()):
            return Verdict.CONTINUE
        self.here.setdefault(rung, {})[number] = losses
        self.paused.pop(number, None)
        if number in self.best(rung):
            self.passed[rung].add(number)
            return Verdict.CONTINUE
        self.paused[number] = rung
        return Verdict.PAUSE

    def promotable(self):
        rungs = sorted(self.here, reverse=True)
        return [n for rung in rungs for n in self.best(rung) if self.paused.get(n) == rung]

    def promote(self, number):
        self.passed[self.paused[number]].add(number)
        del self.paused[number]


@pytest.mark.parametrize("objectives", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_asha_finds_by_searching_what_sorting_finds(seed, objectives, monkeypatch):
    monkeypatch.setattr(ordered, "BLOCK", 2)
    draw = random.Random(seed)
    plain, asha = Plain(eta=draw.choice([2, 3])), None
    asha = Asha(first=1, eta=plain.eta, last=9)
    for _ in range(80):
        number, act = draw.randrange(20), draw.random()
        if act < 0.75:
            some = [math.nan, math.inf, 0.0, -0.0, 1.0, *(draw.random() for _ in range(4))]
            losses = tuple(draw.choice(some) for _ in range(objectives))
            level = draw.randint(1, 10)
            assert asha.report(number, level, losses) == plain.report(number, level, losses)
        elif act < 0.9 and plain.promotable():
            first = plain.promotable()[0]
            plain.promote(first)
            asha.promote(first)
        else:
            plain.paused.pop(number, None)
            asha.drop(number)
        if act > 0.97:
            again = Asha(first=1, eta=plain.eta, last=9)
            again.load_state_dict(json.loads(json.dumps(asha.state_dict())))
            asha = again
        assert asha.promotable() == plain.promotable()
