import random
from bisect import bisect_left, bisect_right, insort

import pytest

from elastix.search import ordered
from elastix.search.ordered import Ordered


@pytest.mark.parametrize("seed", range(20))
def test_keys_in_blocks_are_those_of_one_sorted_list(seed, monkeypatch):
    monkeypatch.setattr(ordered, "BLOCK", 3)
    draw = random.Random(seed)
    plain, blocks = [], Ordered()
    for _ in range(400):
        key = draw.choice([-0.0, 0.0, 1.0, 2.0, draw.random()])
        if draw.random() < 0.6 or not plain:
            insort(plain, key)
            blocks.add(key)
        else:
            key = draw.choice(plain)
            plain.remove(key)
            blocks.remove(key)
        assert len(blocks) == len(plain)
        assert blocks.until(2.0) == plain
        probe = draw.choice([*plain, draw.random()])
        assert blocks.below(probe) == bisect_left(plain, probe)
        assert blocks.until(probe) == plain[: bisect_right(plain, probe)]
        if plain:
            place = draw.randrange(len(plain) + 3)
            assert blocks.at(place) == plain[: place + 1][-1]
