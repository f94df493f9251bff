"""One server forks the workers of all these tests: one that is begun imports for some seconds."""

from importlib.util import find_spec

import pytest

from tests.adapters import adapting

PEERS = ("accelerate", "lightning_fabric", "ray.train", "transformers")


@pytest.fixture(autouse=True, scope="package")
def warm():
    with adapting.warm(*filter(find_spec, PEERS)):
        yield
