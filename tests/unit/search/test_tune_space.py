"""Tune's domains for a space. Ray's library is imported, no cluster is started."""

import numpy as np
import pytest
from ConfigSpace import Categorical, Constant, Float, Integer, Normal

from elastix.errors import ConfigError
from elastix.search.space import Space
from search_spaces import conv1d, convnet, mlp, tabular, transformer
from tests.unit.search.test_space import SPACES

tune = pytest.importorskip("ray.tune")


def sampled(domains, seed):
    rng = np.random.default_rng(seed)
    return {
        name: domain.sample(random_state=rng) if hasattr(domain, "sample") else domain
        for name, domain in domains.items()
    }


@pytest.mark.parametrize("module", [conv1d, convnet, mlp, tabular, transformer])
def test_what_tune_draws_is_of_the_space(module):
    from elastix.search.tune_space import to_tune

    domains = to_tune(module.space)
    assert domains.keys() == set(module.space.flat)
    for seed in range(20):
        module.space.check(module.space.from_flat(sampled(domains, seed)))


def test_bounds_are_the_same():
    from elastix.search.tune_space import to_tune

    space = Space(
        [
            Integer("n", (2, 3)),
            Integer("m", (1, 4), log=True),
            Float("x", (1e-3, 1.0), log=True),
            Constant("k", 7),
        ]
    )
    found = [sampled(to_tune(space), seed) for seed in range(200)]
    assert {each["n"] for each in found} == {2, 3}
    assert {each["m"] for each in found} == {1, 2, 3, 4}
    assert sum(each["x"] < 0.1 for each in found) > 100
    assert {each["k"] for each in found} == {7}


def test_choices_of_equal_weights_are_drawn_evenly_as_tune_does():
    from elastix.search.tune_space import to_tune

    domains = to_tune(Space([Categorical("c", ["a", "b"], weights=[2, 2])]))
    assert {sampled(domains, seed)["c"] for seed in range(20)} == {"a", "b"}


@pytest.mark.parametrize(
    "space",
    [
        SPACES["plain"],
        Space([Float("x", (0, 1), distribution=Normal(0.5, 0.1))]),
        Space([Categorical("c", ["a", "b"], weights=[1, 9])]),
    ],
)
def test_what_tune_cannot_express_is_refused(space):
    from elastix.search.tune_space import to_tune

    with pytest.raises(ConfigError, match="Tune"):
        to_tune(space)
