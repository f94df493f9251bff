"""One server forks the workers of all these tests: one that is begun imports for some seconds."""

from importlib.util import find_spec

import pytest

from tests.adapters import adapting

PEERS = {
    "accelerate": (),
    "lightning_fabric": (),
    "ray.train": ("ray.train.examples.pytorch.torch_linear_example",),
    "transformers": ("transformers.trainer",),  # which the package imports when it is used
}
"""And what else of each their scripts import."""


@pytest.fixture(autouse=True, scope="package")
def warm():
    there = filter(find_spec, PEERS)
    with adapting.warm(*(name for peer in there for name in (peer, *PEERS[peer]))):
        yield
