"""What elastix.store offers, and what it does not drag in."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import elastix.store
from elastix.errors import ConfigError, NotFound, StoreError
from elastix.state import State, capture
from elastix.store import Store
from elastix.testing.models import chain


def test_all_is_there() -> None:
    assert elastix.store.__all__ == sorted(elastix.store.__all__)
    for name in elastix.store.__all__:
        assert getattr(elastix.store, name).__doc__


def test_a_store_needs_no_ray() -> None:
    code = "import sys, elastix.store, elastix.cli; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with elastix.store.Store(tmp_path_factory.mktemp("store") / "s") as opened:
        opened.tag("a", opened.put(capture({"": torch.nn.Linear(2, 2)}, {})))
        yield opened


def new():
    return State({"new": torch.ones(1)})


NO_PATH = [None, 3, b"x", "", ["a"], "a\0b"]
NO_SCORE = ["x", [1], torch.zeros(2), print, 10**400]
WRONG = {
    "a model": {
        "manifest": (lambda s, x: s.manifest(x), [None, 3, b"a", ["a"], "\ud800", "\udcff"]),
        "log": (lambda s, x: s.log(x), [3, "\ud800"]),
        "tag": (lambda s, x: s.tag("b", x), [None, 3, "\ud800"]),
        "nearest": (lambda s, x: s.nearest(chain("a"), but=x), [3, b"a", "\ud800"]),
    },
    "signature": {
        "nearest": (lambda s, x: s.nearest(x), [None, 3, "a", torch.nn.Linear(2, 2)]),
        "put": (lambda s, x: s.put(capture({"": torch.nn.Linear(1, 1)}, {}), signature=x), [3, ""]),
    },
    "where": {
        "nearest": (
            lambda s, x: s.nearest(chain("a"), where=x),
            [3, "a", ["a"], [], {1: 2}, {"a": None}, {"a": [1]}, {'a"': 1}],
        )
    },
    "tagged": {
        "nearest": (lambda s, x: s.nearest(chain("a"), tagged=x), [0, b"a", "\ud800", ["a"]])
    },
    "until_s": {
        "nearest": (lambda s, x: s.nearest(chain("a"), until_s=x), ["now", [1], True, b"1"])
    },
    "limit": {"log": (lambda s, x: s.log(limit=x), [-1, 1.5, True, "1", 10**30, np.array([1, 2])])},
    "cannot be a tag": {"tag": (lambda s, x: s.tag(x, "a"), [None, 3, b"x", ["a"], "\ud800", ""])},
    "state": {"put": (lambda s, x: s.put(x), [None, {}, torch.nn.Linear(2, 2), "a", "x" * 10**5])},
    "score": {
        "put": (lambda s, x: s.put(s.get("a"), score=x), NO_SCORE),
        "put_shares": (lambda s, x: s.put_shares([s.put_share(new())], score=x), NO_SCORE),
    },
    "names": {"get": (lambda s, x: s.get("a", x), [7, None, [7], [None], b"x"])},
    "parents": {"put": (lambda s, x: s.put(new(), parents=x), ["a", b"a", 7])},
    "refs": {"soup": (lambda s, x: s.soup(x, len), ["a", 7, None])},
    "path": {
        "export": (lambda s, x: s.export("a", x), NO_PATH),
        "import": (lambda s, x: s.import_(x), NO_PATH),
        "catalogue": (lambda s, x: s.catalogue(x), NO_PATH),
    },
}
CALLS = [
    pytest.param(what, call, value, id=f"{name}-{what}-{str(value)[:9]!r}")
    for what, calls in WRONG.items()
    for name, (call, values) in calls.items()
    for value in values
]


@pytest.mark.parametrize(("what", "call", "value"), CALLS)
def test_a_wrong_argument_is_named_and_no_damage_is_cried(store, what, call, value):
    with pytest.raises(ConfigError, match=what) as caught:
        call(store, value)
    assert "damaged" not in str(caught.value)
    assert [entry.tags for entry in store.log()] == [("a",)]


def test_what_is_to_be_left_out_may_be_named_by_a_tag_and_has_to_be_there(store):
    with pytest.raises(NotFound, match="no tag or model 'abc'"):
        store.nearest(chain("a"), but="abc")
    assert store.nearest(chain("a"), but="a") is None
    assert store.nearest(chain("a"), but=["a", "a"]) is None


def test_a_closed_store_says_so(tmp_path):
    opened = Store(tmp_path)
    ref = opened.put(new())
    opened.close()
    for call in (lambda: opened.get(ref), lambda: opened.put(new()), opened.log):
        with pytest.raises(StoreError, match=r"closed\..*Open it again"):
            call()


def test_what_is_known_of_a_model_is_what_was_stored_first(tmp_path, monkeypatch):
    """Another process stores an equal State just before this one's is committed."""
    with Store(tmp_path) as ours, Store(tmp_path) as theirs:
        submit = ours.ledger.submit

        def later(requests):
            monkeypatch.undo()
            theirs.put(new(), signature=chain("a b"), score=2.0)
            return submit(requests)

        monkeypatch.setattr(ours.ledger, "submit", later)
        ref = ours.put(new(), signature=chain("c"), score=1.0)
        for store in (ours, theirs):
            assert (store.signature(ref), store.score(ref)) == (chain("a b"), 2.0)


def test_a_model_that_was_retired_and_stored_anew_is_the_new_one_for_all(tmp_path):
    with Store(tmp_path) as ours, Store(tmp_path) as theirs:
        ref = ours.put(new(), signature=chain("a b"))
        assert ours.signature(ref) == chain("a b")
        theirs.retire(ref)
        theirs.put(new(), signature=chain("c"))
        assert ours.signature(ref) == theirs.signature(ref) == chain("c")
