"""Ctrl-C before any line of the store, which goes on being used, as in a notebook."""

import random
from pathlib import Path

import pytest

import elastix.store
from elastix.store import Store
from elastix.testing.store_contract import chain, child, same, small
from tests.interrupts import CtrlC

FILES = [str(path) for path in Path(elastix.store.__file__).parent.glob("*.py")]


def use(store, acked):
    """A bit of everything. What a call returned from is entered into `acked`."""
    first = small(1)
    ref = store.put(first, signature=chain("a b"), score=0.5)
    acked[ref] = first
    store.tag("kept", ref)
    acked["kept"] = first
    second = child(first, ref, "layer1.weight", {"seed": 2})
    acked[store.put(second, signature=chain("a c"))] = second
    assert store.nearest(chain("a c d")) is not None
    store.retire(store.put(small(3)))
    store.gc()
    assert same(store.get("kept"), first)
    assert store.log()
    fourth = small(4)
    acked[store.put(fourth)] = fourth


def assert_whole(store, acked):
    for name, state in acked.items():
        assert same(store.get(name), state)
    assert store.verify() == []


def cut_off(folder, ctrl_c):
    """A Store in whose use Ctrl-C fell, what it acknowledged, and whether it did fall."""
    store, acked = Store(folder), {}
    try:
        with ctrl_c:
            use(store, acked)
    except KeyboardInterrupt:
        return store, acked, True
    return store, acked, False  # caches are filled by now, or the order of packs was another


@pytest.mark.timeout(900)  # a store is begun and used anew for each of some hundred lines
@pytest.mark.parametrize(
    ("seed", "share"), [(1, 0.1), *[pytest.param(s, 1, marks=pytest.mark.slow) for s in (2, 3, 4)]]
)
def test_ctrl_c_before_any_line_loses_nothing_and_blocks_nobody(tmp_path, seed, share):
    """Before each line once, in one of its turns; a share of the lines, drawn by the seed."""
    with Store(tmp_path / "whole") as store, CtrlC(FILES) as whole:
        use(store, {})
    rng = random.Random(seed)
    places = sorted(whole.visits.items())
    places = rng.sample(places, round(share * len(places)))
    fell = 0
    for number, (place, visits) in enumerate(places):
        visit = rng.randint(1, visits)
        print(f"{place}, visit {visit} of {visits}")
        folder = tmp_path / str(number)
        store, acked, interrupted = cut_off(folder, CtrlC(FILES, place, visit))
        fell += interrupted
        assert_whole(store, acked)
        use(store, acked)
        assert_whole(store, acked)
        store.close()
        with Store(folder) as store:
            assert_whole(store, acked)
            store.rebuild()  # refused while a writer is at work, or a lock was left locked
            assert_whole(store, acked)
    assert fell > 0.9 * len(places) > 50
