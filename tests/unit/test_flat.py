from hypothesis import given
from hypothesis import strategies as st

from elastix.flat import flatten, nest

NESTED = {
    "a": 1,
    "body": [{"w": 2, "sizes": [3, 4]}, {"w": 3}],
    "opt": {"name": "sgd", "betas": (0.9, 0.99)},
    "none": [],
}


def test_lists_stay_whole():
    assert flatten(NESTED) == {
        "a": 1,
        "body": NESTED["body"],
        "opt.name": "sgd",
        "opt.betas": (0.9, 0.99),
        "none": [],
    }


def test_blocks_are_spread_out_and_lists_of_values_are_not():
    assert flatten(NESTED, "config.", lists="blocks") == {
        "config.a": 1,
        "config.body.length": 2,
        "config.body.0.w": 2,
        "config.body.0.sizes": [3, 4],
        "config.body.1.w": 3,
        "config.opt.name": "sgd",
        "config.opt.betas": (0.9, 0.99),
        "config.none.length": 0,
    }


def test_all_lists_are_spread_out():
    found = flatten(NESTED, separator="/", lists="all")
    assert found["body/0/sizes/1"] == 4
    assert found["opt/betas/length"] == 2
    assert found["none/length"] == 0
    assert not any(isinstance(value, list | tuple | dict) for value in found.values())


names = st.text("abc", min_size=1, max_size=3)
trees = st.recursive(
    st.integers() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3),
)


@given(st.dictionaries(names, trees, max_size=3))
def test_what_was_made_flat_can_be_nested_again(values):
    assert nest(flatten(values)) == values
    assert nest(flatten(values, separator="/"), "/") == values
