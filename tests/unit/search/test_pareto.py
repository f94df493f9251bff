"""Fronts: as they are defined, and in memory that grows as the number of trials."""

import random
import tracemalloc

import pytest

from elastix.search.pareto import Losses, dominates, fronts, order


def _by_definition(losses: list[Losses]) -> list[list[int]]:
    left, found = set(range(len(losses))), []
    while left:
        front = {i for i in left if not any(dominates(losses[j], losses[i]) for j in left)}
        found.append(sorted(front))
        left -= front
    return found


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
@pytest.mark.parametrize("different", [2, 5, 1_000_000])
def test_nobody_in_a_front_is_dominated_by_those_who_are_left(objectives, different):
    rng = random.Random(0)
    for count in (0, 1, 2, 7, 30):
        losses = [
            tuple(float(rng.randrange(-different, different)) for _ in range(objectives))
            for _ in range(count)
        ]
        assert fronts(losses) == _by_definition(losses)


def test_zeros_of_either_sign_are_equal():
    assert fronts([(0.0, 1.0), (-0.0, 1.0), (0.0, 2.0)]) == [[0, 1], [2]]


@pytest.mark.parametrize("objectives", [2, 3])
def test_memory_grows_as_the_number_of_trials(objectives):
    rng = random.Random(0)

    def peak(trials: int) -> int:
        losses = [tuple(rng.random() for _ in range(objectives)) for _ in range(trials)]
        tracemalloc.start()
        order(losses)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(100)
    assert peak(2000) < 6 * peak(500)  # that of all pairs is 16 times as much
