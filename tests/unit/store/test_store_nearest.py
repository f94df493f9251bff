"""The quick answers are those of a plain scan over lineage.shared, on chains and graphs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.store.lineage import Mode, Signature, ancestors, common_ancestor, shared
from elastix.store.nearest import Candidate, Neighbours, pack_ids
from elastix.testing.models import chain, graph

Models = dict[int, tuple[Signature, float | None]]


def random_graph(choose: random.Random, size: int) -> Signature:
    nodes = []
    for i in range(size):
        inputs = sorted(choose.sample(range(i), min(i, choose.choice([1, 1, 1, 2]))))
        nodes.append((choose.choice("abc"), inputs))
    return graph(nodes)


def random_model(choose: random.Random) -> Signature:
    if choose.random() < 0.5:
        return chain(" ".join(choose.choices("abcd", k=choose.randint(0, 9))))
    return random_graph(choose, choose.randint(1, 10))


def entry(key: int, signature: Signature, score: float | None) -> Candidate:
    return Candidate(key, score, pack_ids(signature.paths), pack_ids(signature.ids))


def scan(
    models: Models, wanted: Signature, mode: Mode, allowed: set[int] | None
) -> tuple[int, int] | None:
    """EvoStore's broadcast scan, one model after the other."""
    found = [
        (len(shared(wanted, signature, mode)), float("-inf") if score is None else score, -key)
        for key, (signature, score) in models.items()
        if allowed is None or key in allowed
    ]
    length, _, key = max(found, default=(0, 0.0, 0))
    return (-key, length) if length else None


def ask(neighbours: Neighbours, wanted: Signature, mode: Mode, allowed: set[int] | None):
    best = (
        neighbours.lp(wanted.paths, allowed)
        if mode == "lp"
        else neighbours.lcs(wanted.ids, allowed)
    )
    return (best.key, best.length) if best else None


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_equal_to_a_scan(seed: int, count: int) -> None:
    choose = random.Random(seed)
    scores = [None, 0.1, 0.5, 0.5, 0.9]
    models: Models = {k: (random_model(choose), choose.choice(scores)) for k in range(count)}
    neighbours = Neighbours(entry(k, *model) for k, model in models.items())
    for step in range(12):
        wanted = random_model(choose)
        if models and choose.random() < 0.5:
            wanted = choose.choice(list(models.values()))[0]
        allowed = None
        if choose.random() < 0.5:
            share = choose.choice([0.0, 0.05, 0.5])
            allowed = {k for k in models if choose.random() < share}
        for mode in ("lp", "lcs"):
            assert ask(neighbours, wanted, mode, allowed) == scan(models, wanted, mode, allowed)
        key = 1000 + step
        models[key] = (random_model(choose), choose.choice(scores))
        neighbours.add(entry(key, *models[key]))
        if choose.random() < 0.5:
            gone = choose.choice(list(models))
            del models[gone]
            neighbours.remove(gone)
        assert len(neighbours) == len(models)


def test_equal_to_a_scan_over_many_with_long_postings() -> None:
    choose = random.Random(3)
    models: Models = {k: (random_model(choose), choose.random()) for k in range(3000)}
    neighbours = Neighbours(entry(k, *models[k]) for k in range(1000))
    for key in range(1000, 3000):  # sorts itself anew several times on the way
        neighbours.add(entry(key, *models[key]))
    for _ in range(60):
        wanted = random_model(choose)
        for allowed in (None, set(choose.sample(sorted(models), 40))):
            for mode in ("lp", "lcs"):
                assert ask(neighbours, wanted, mode, allowed) == scan(models, wanted, mode, allowed)


@pytest.mark.parametrize("length", [7, 8, 9, 16, 31, 33, 63, 64, 65, 130, 200])
def test_lcs_of_long_models_carries_from_word_to_word(length: int) -> None:
    choose = random.Random(length)
    words = ["a", "b", "c"]
    models: Models = {
        k: (chain(" ".join(choose.choices(words, k=choose.randint(1, 2 * length)))), None)
        for k in range(5)
    }
    neighbours = Neighbours(entry(k, *model) for k, model in models.items())
    for _ in range(5):
        wanted = chain(" ".join(choose.choices(words, k=length)))
        assert ask(neighbours, wanted, "lcs", None) == scan(models, wanted, "lcs", None)


def test_shared_gives_the_layers_to_copy() -> None:
    wanted, stored = chain("a b x c d"), chain("a b c d")
    assert [(a.name, b.name) for a, b in shared(wanted, stored, "lp")] == [
        ("layer0", "layer0"),
        ("layer1", "layer1"),
    ]
    assert [(a.name, b.name) for a, b in shared(wanted, stored, "lcs")] == [
        ("layer0", "layer0"),
        ("layer1", "layer1"),
        ("layer3", "layer2"),
        ("layer4", "layer3"),
    ]


def test_branches_count_and_their_order_does_not() -> None:
    fork = graph([("in", []), ("l", [0]), ("r", [0]), ("join", [1, 2])])
    other = graph([("in", []), ("r", [0]), ("l", [0]), ("join", [1, 2])])
    half = graph([("in", []), ("l", [0]), ("q", [0]), ("join", [1, 2])])
    assert len(shared(fork, other, "lp")) == 4
    assert len(shared(fork, half, "lp")) == 2
    twins = graph([("in", []), ("l", [0]), ("l", [0]), ("join", [1, 2])])
    assert len(shared(fork, twins, "lp")) == 2
    assert len(shared(twins, twins, "lp")) == 4


def test_ancestry_of_a_diamond_and_of_a_long_chain() -> None:
    edges = {"d": ["b", "c"], "b": ["a"], "c": ["a"], "a": [], "e": ["a"], "z": []}
    assert ancestors("d", edges.__getitem__) == ["b", "c", "a"]
    assert common_ancestor("d", "e", edges.__getitem__) == "a"
    assert common_ancestor("d", "b", edges.__getitem__) == "b"
    assert common_ancestor("d", "z", edges.__getitem__) is None
    assert len(ancestors("5000", lambda n: [str(int(n) - 1)] if n != "0" else [])) == 5000
