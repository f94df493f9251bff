"""What elastix.store offers, and what it does not drag in."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import elastix.store
from elastix.errors import ConfigError
from elastix.state import capture


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


NO_PATH = [None, 3, b"x", "", ["a"], "a\0b"]
WRONG = {
    "a model": {
        "manifest": (lambda s, x: s.manifest(x), [None, 3, b"a", ["a"], "\ud800", "\udcff"]),
        "log": (lambda s, x: s.log(x), [3, "\ud800"]),
        "tag": (lambda s, x: s.tag("b", x), [None, 3, "\ud800"]),
    },
    "limit": {"log": (lambda s, x: s.log(limit=x), [-1, 1.5, True, "1", 10**30, np.array([1, 2])])},
    "cannot be a tag": {"tag": (lambda s, x: s.tag(x, "a"), [None, 3, b"x", ["a"], "\ud800", ""])},
    "state": {"put": (lambda s, x: s.put(x), [None, {}, torch.nn.Linear(2, 2), "a", "x" * 10**5])},
    "score": {"put": (lambda s, x: s.put(s.get("a"), score=x), ["x", [1], torch.zeros(2), print])},
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
