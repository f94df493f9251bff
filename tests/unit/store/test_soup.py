"""Averages of models of one lineage: never below the best parent, or it is said."""

import logging

import pytest
import torch

from elastix.errors import ConfigError, NotFound, ReadOnly, StateError
from elastix.state import State, capture
from elastix.store import Store
from tests.unit.test_state import HasMore


def model(*values, steps=0, **meta):
    tensors = {
        "weight": torch.tensor(values, dtype=torch.float32),
        "steps": torch.tensor(steps),
        "@optimizer/weight/exp_avg": torch.zeros(len(values)),
    }
    return State(tensors, meta)


def near(*goal):
    """Scores a State by how near its weight is to a goal, 0 at best."""
    return lambda state: -float((state.model["weight"] - torch.tensor(goal)).abs().sum())


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path) as opened:
        yield opened


@pytest.fixture
def family(store):
    """One root and three children of it: the first two lie on both sides of (0, 0)."""
    root = store.put(model(5.0, 5.0))
    children = [(2.0, 0.0), (-1.0, 0.0), (9.0, 9.0)]
    return [store.put(model(*c, steps=7 + i), parents=[root]) for i, c in enumerate(children)]


def test_the_average_is_stored_with_those_that_it_was_made_of(store, family):
    soup = store.soup(family, near(0.0, 0.0))
    assert soup.averaged
    assert soup.parents == (family[1], family[0])
    state = store.get(soup.ref)
    assert state.model["weight"].tolist() == [0.5, 0.0]
    assert state.model["steps"] == 8  # whole numbers are those of the best
    assert state.tensors.keys() == {"weight", "steps"}
    assert set(state.parents) == {family[0], family[1]}
    assert (soup.score, soup.best_score) == (-0.5, -1.0)
    assert store.score(soup.ref) == -0.5


def test_the_average_has_seen_as_much_as_the_one_that_has_seen_most(store):
    root = store.put(model(5.0, 5.0, lineage_epochs=3))
    told = [{"lineage_epochs": 4.5}, {"lineage_epochs": 7}, {}, {"lineage_epochs": "many"}]
    values = [(2.0, 0.0), (-1.0, 0.0), (0.0, 0.5), (0.0, -0.5)]
    refs = [
        store.put(model(*each, **meta), parents=[root])
        for each, meta in zip(values, told, strict=True)
    ]
    soup = store.soup(refs, lambda state: 0.0)
    assert set(soup.parents) == {*refs}
    assert store.manifest(soup.ref).meta["lineage_epochs"] == 7
    soup = store.soup(refs[2:], lambda state: 0.0)
    assert soup.averaged
    assert "lineage_epochs" not in store.manifest(soup.ref).meta


def test_what_models_have_besides_tensors_is_that_of_the_best(store):
    made = [HasMore({"seen": seen}) for seen in (1, 2, 3)]
    for part, value in zip(made, (5.0, 2.0, -1.0), strict=True):
        torch.nn.init.constant_(part.weight, value)
        torch.nn.init.zeros_(part.bias)
    root, *children = (capture({"": part}, {}) for part in made)
    ref = store.put(root)
    refs = [store.put(child, parents=[ref]) for child in children]
    seen = []

    def validate(state):
        loaded = state.load_into(HasMore(None))
        seen.append(loaded.more["seen"])
        return -float(loaded.weight.detach().mean().abs())

    soup = store.soup(refs, validate)
    assert soup.averaged
    assert seen == [2, 3, 3]
    loaded = store.get(soup.ref).load_into(HasMore(None))
    assert (loaded.more, float(loaded.weight.detach().mean())) == ({"seen": 3}, 0.5)


def test_where_no_average_is_as_good_the_best_is_given_and_it_is_said(store, family, caplog):
    before = len(store.log())
    with caplog.at_level(logging.WARNING):
        soup = store.soup(family, near(2.0, 0.0))
    assert (soup.ref, soup.parents, soup.averaged) == (family[0], (family[0],), False)
    assert soup.score == soup.best_score == 0.0
    assert "nothing was stored" in caplog.text
    assert len(store.log()) == before


def test_it_is_never_below_the_best_parent(store):
    rng = torch.Generator().manual_seed(3)
    root = store.put(model(0.0, 0.0, 0.0))
    for round_ in range(10):
        refs = [
            store.put(model(*torch.randn(3, generator=rng).tolist(), round=round_), parents=[root])
            for _ in range(4)
        ]
        validate = near(*torch.randn(3, generator=rng).tolist())
        soup = store.soup(refs, validate)
        best = max(validate(store.get(ref)) for ref in refs)
        assert soup.best_score == best
        assert soup.score >= best
        assert validate(store.get(soup.ref)) == soup.score


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bfloat16])
def test_whatever_has_a_mean_is_averaged(store, dtype):
    root = store.put(State({"weight": torch.zeros(2, dtype=dtype)}))
    values = ([1, 3], [3, 5])
    refs = [store.put(State({"weight": torch.tensor(v).to(dtype)}), parents=[root]) for v in values]
    soup = store.soup(refs, lambda state: torch.tensor(1.0))
    assert soup.averaged
    assert torch.equal(store.get(soup.ref).tensors["weight"], torch.tensor([2, 4]).to(dtype))


def test_a_parent_and_its_child_are_of_one_lineage(store):
    root = store.put(model(1.0))
    child = store.put(model(-1.0), parents=[root])
    store.tag("child", child)
    assert set(store.soup([root[:8], "child"], near(0.0)).parents) == {root, child}


def test_strangers_are_not_averaged(store, family):
    stranger = store.put(model(0.0, 0.0))
    with pytest.raises(ConfigError, match="no common ancestor"):
        store.soup([family[0], stranger], near(0.0, 0.0))


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (model(1.0, 2.0, 3.0), "'weight'"),
        (State({"weight": torch.zeros(2, dtype=torch.float64), "steps": torch.tensor(1)}), "64"),
        (State({"weight": torch.zeros(2)}), "absent"),
    ],
)
def test_models_of_different_make_are_not_averaged(store, family, odd, text):
    ref = store.put(odd, parents=[family[0]])
    with pytest.raises(StateError) as caught:
        store.soup([family[0], ref], near(0.0, 0.0))
    assert text in str(caught.value)


@pytest.mark.parametrize("score", [float("nan"), None, "good", True])
def test_a_score_that_is_none(store, family, score):
    with pytest.raises(ConfigError, match="validate"):
        store.soup(family, lambda state: score)


def test_what_is_not_there(store, family, tmp_path):
    with pytest.raises(ConfigError, match="two different"):
        store.soup([family[0], family[0]], near(0.0, 0.0))
    with pytest.raises(NotFound):
        store.soup([family[0], "nobody"], near(0.0, 0.0))
    with Store(tmp_path, read_only=True) as reader, pytest.raises(ReadOnly):
        reader.soup(family, near(0.0, 0.0))
