"""When a run that is called again has nothing left to do."""

import os
import subprocess
import sys

import pytest

from elastix.events import RunEnded, RunStarted
from elastix.observe.progress import Progress
from elastix.train.finished import over

SCRIPT = """
import helper
from ray import cloudpickle
from elastix.train.finished import mark

RATE = {rate}

class Patience:
    epochs = 3

def train(ctx):
    return helper.build(Patience.epochs * RATE)

print(mark(cloudpickle.dumps(train)), mark(cloudpickle.dumps(helper.build)))
"""


def marks(folder, rate=0.1, helper="def build(x):\n    return x\n"):
    """As a process of its own has them."""
    (folder / "helper.py").write_text(helper)
    (folder / "script.py").write_text(SCRIPT.format(rate=rate))
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    return subprocess.check_output(
        [sys.executable, str(folder / "script.py")], env=environment, text=True, timeout=60
    ).split()


def test_a_train_function_is_known_again_and_a_changed_one_is_not(tmp_path):
    first = marks(tmp_path)
    assert marks(tmp_path) == first
    other = marks(tmp_path, rate=0.2)
    assert other[0] != first[0]
    assert other[1] == first[1]
    changed = marks(tmp_path, helper="def build(x):\n    return x + 1\n")
    assert changed[0] != first[0], "what it imports is part of it"
    assert changed[1] != first[1], "a function that is pickled by its name is more than its name"


def started(**fields):
    given = {"name": "r", "seed": 3, "config": {"sizes": (1, 2)}, "code": "abc", **fields}
    return RunStarted(scaling={"num_workers": 2}, versions={}, **given)


@pytest.mark.parametrize(
    ("outcome", "fields", "expected"),
    [
        ("finished", {}, True),
        ("finished", {"scaled": True}, True),
        ("failed", {}, False),
        ("stopped", {}, False),
        ("", {}, False),
        ("finished", {"config": {"sizes": (1, 3)}}, False),
        ("finished", {"seed": 4}, False),
        ("finished", {"code": "abd"}, False),
        ("finished", {"code": ""}, False),
    ],
)
def test_over_is_what_ended_well_and_is_called_unchanged(outcome, fields, expected):
    before = Progress()
    before.add(started(config={"sizes": [1, 2]}))  # as the journal gives it back
    if outcome:
        before.add(RunEnded(outcome=outcome, step=5, message=""))
    fields = {name: value for name, value in fields.items() if name != "scaled"}
    assert over(before, started(**fields)) is expected


def test_a_run_that_was_begun_again_is_not_over():
    before = Progress()
    for event in (started(), RunEnded(outcome="finished", step=5, message=""), started()):
        before.add(event)
    assert not over(before, started())
