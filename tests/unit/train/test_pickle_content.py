"""What a pickle says, whatever its writer remembered."""

import pickle
import pickletools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastix.train.record.pickle_content import content

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
PLAIN |= st.binary(max_size=3)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.frozensets(st.text(max_size=3), max_size=5)
    ),
    max_leaves=10,
)


class Unremembering(pickle._Pickler):
    """Writes text and bytes anew each time, as if no two were one object."""

    def memoize(self, obj):
        if not isinstance(obj, str | bytes):
            super().memoize(obj)


def unremembered(value):
    import io

    file = io.BytesIO()
    Unremembering(file, 5).dump(value)
    return file.getvalue()


@given(VALUES, VALUES)
def test_equal_values_have_equal_contents_and_others_have_not(one, other):
    assert content(pickle.dumps(one)) == content(unremembered(one))
    same = repr(one) == repr(other) or pickle.dumps(one) == pickle.dumps(other)
    if not same and one != other:
        assert content(pickle.dumps(one)) != content(pickle.dumps(other))


def test_the_order_of_a_set_does_not_count_and_that_of_a_list_does():
    assert content(b"\x80\x04(\x8c\x01a\x8c\x01b\x91.") == content(
        b"\x80\x04(\x8c\x01b\x8c\x01a\x91."
    )
    assert content(pickle.dumps(["a", "b"])) != content(pickle.dumps(["b", "a"]))
    assert content(pickle.dumps({"a": 1})) != content(pickle.dumps({"a": True}))


def test_one_list_twice_is_not_two_lists():
    one = [1]
    assert content(pickle.dumps([one, one])) != content(pickle.dumps([[1], [1]]))
    holds = []
    holds.append(holds)
    assert content(pickle.dumps(holds)) != content(pickle.dumps([[]]))
    shared = ("a", "b")
    copy = pickle.loads(pickle.dumps(shared))
    assert copy is not shared
    assert content(pickle.dumps([shared, shared])) == content(pickle.dumps([shared, copy]))


def test_texts_that_do_not_count():
    first, second = pickle.dumps(["a", "drawn"]), pickle.dumps(["a", "other"])
    assert content(first) != content(second)
    assert content(first, {"drawn"}) == content(second, {"other"})


def test_where_a_tensor_lies_does_not_count_and_what_it_holds_does():
    one, other = torch.arange(4.0), torch.arange(4.0)
    assert pickle.dumps(one) != pickle.dumps(other)
    assert content(pickle.dumps([one, one[1:]])) == content(pickle.dumps([other, other[1:]]))
    assert content(pickle.dumps(one)) != content(pickle.dumps(one + 1))
    assert content(pickle.dumps(one)) != content(pickle.dumps(one.int()))


@pytest.mark.parametrize("cut", [16, 40, 150, 230])
def test_bytes_that_only_begin_like_a_tensor_are_taken_as_they_are(cut):
    storage = max(
        (given for _, given, _ in pickletools.genops(pickle.dumps(torch.arange(4.0))) if given),
        key=lambda given: len(given) if isinstance(given, bytes) else 0,
    )
    assert content(pickle.dumps(storage[:cut])) != content(pickle.dumps(storage[:cut] + b"x"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_all_protocols_are_read(protocol):
    value = {"a": [1, (2.0, "a")], "b": {"c"}, "d": pickletools.OpcodeInfo}
    assert content(pickle.dumps(value, protocol)) == content(pickle.dumps(value, protocol))


def test_what_is_no_pickle_is_refused():
    with pytest.raises(ValueError):
        content(b"no pickle")


class Set:
    """As cloudpickle sets functions: by a call whose result is thrown away."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return object, (), self.state, None, None, setattr


def test_what_is_called_for_its_effect_counts():
    assert content(pickle.dumps(Set(1))) == content(pickle.dumps(Set(1)))
    assert content(pickle.dumps(Set(1))) != content(pickle.dumps(Set(2)))
