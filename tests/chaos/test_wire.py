"""Gradients that travel in bfloat16 or float16, with workers that are killed and others that join.

Laws: replicas bit-identical after every step, every sample exactly once; with crews too, and near
to one process that rounds nothing.
"""

import pytest

from elastix.config import ExchangeConfig
from elastix.events import Recovered
from tests.chaos import test_joiners, test_kills
from tests.chaos.test_crews import kill
from tests.crew_runs import checked
from tests.laws import joins
from tests.trainables import train

WIRES = ["bfloat16", "float16"]
TOLERANCE = {"bfloat16": 0.1, "float16": 0.02}
"""Of weights after some steps of AdamW, relative to the largest of each tensor."""

pytestmark = pytest.mark.timeout(240)


def run(tmp_path, kills, wire, **options):
    return test_kills.run(tmp_path, kills, exchange=ExchangeConfig(wire=wire), **options)


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])
@pytest.mark.parametrize("wire", WIRES)
def test_one_is_killed_in_a_bucket(tmp_path, wire, shared):
    result = run(tmp_path, [test_kills.PLACES["middle bucket"]], wire, shared=shared)
    assert any(isinstance(event, Recovered) for event in result.events)


@pytest.mark.slow
@pytest.mark.parametrize("place", test_kills.PLACES)
@pytest.mark.parametrize("wire", WIRES)
def test_one_is_killed_anywhere(tmp_path, wire, place):
    run(tmp_path, [test_kills.PLACES[place]], wire, workers=5)


def test_a_joiner_follows_what_was_rounded(tmp_path):
    """It is told what was reduced, and widens that by itself."""
    options = {"exchange": ExchangeConfig(wire="bfloat16"), "spares": 1, "max_workers": 3}
    result = test_joiners.run(tmp_path, train, 2, **options)
    (join,) = joins(result.events)
    assert join.watched_steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
def test_a_process_of_a_crew_is_killed_in_a_bucket(tmp_path, wire):
    exchange = ExchangeConfig(wire=wire)
    one = kill(1, 1, "bucket", detail=1)
    found = checked(
        tmp_path, 3, {"shard": 2}, [one], epochs=2, exchange=exchange, tolerance=TOLERANCE[wire]
    )
    assert found.apart > 1e-6  # it was rounded
