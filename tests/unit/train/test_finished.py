"""When a run that is called again has nothing left to do."""

import gc
import os
import pickle
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest
from ray.cloudpickle import CloudPickler

import elastix
from elastix.commands.run import train_function
from elastix.events import RunEnded, RunStarted
from elastix.observe.progress import Progress
from elastix.train.record.finished import mark, over

SCRIPT = """
import helper
import cloudpickle
from elastix.train.record.finished import mark

RATE = {rate}
NAMES = {{"a", "b", "c", "d", "e", "f", "g", "h"}}

class Patience:
    epochs = 3

def train(ctx):
    if str(ctx) in {{"s", "t", "u", "v", "w", "x", "y", "z"}} or str(ctx) in NAMES:
        return None
    return helper.build(Patience.epochs * RATE)

print(mark(cloudpickle.dumps(train)), mark(cloudpickle.dumps(helper.build)))
"""


FORKS = """
import os, runpy, sys
import cloudpickle
from elastix.train.record.finished import mark

for line in sys.stdin:
    if not (child := os.fork()):
        sys.path.insert(0, line.strip())
        runpy.run_path(os.path.join(line.strip(), "script.py"), run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


class Fresh:
    """Runs `script.py` of a folder as a process of its own: a fork, which has imported the rest."""

    def __init__(self):
        self.process = self._start()

    def _start(self):
        return subprocess.Popen(
            [sys.executable, "-c", FORKS],
            env={**os.environ, "PYTHONHASHSEED": "random"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder):
        print(folder, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().split()

    def start_again(self):
        """With another seed of its hashes."""
        self.close()
        self.process = self._start()

    def close(self):
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def fresh():
    processes = Fresh()
    yield processes
    processes.close()


def marks(fresh, folder, rate=0.1, helper="def build(x):\n    return x\n"):
    """As a process of its own has them."""
    (folder / "helper.py").write_text(helper)
    (folder / "script.py").write_text(SCRIPT.format(rate=rate))
    return fresh.run(folder)


def test_a_train_function_is_known_again_and_a_changed_one_is_not(fresh, tmp_path):
    first = marks(fresh, tmp_path)
    assert len(first) == 2
    assert marks(fresh, tmp_path) == first
    fresh.start_again()
    assert marks(fresh, tmp_path) == first
    other = marks(fresh, tmp_path, rate=0.2)
    assert other[0] != first[0]
    assert other[1] == first[1]
    changed = marks(fresh, tmp_path, helper="def build(x):\n    return x + 1\n")
    assert changed[0] != first[0], "what it imports is part of it"
    assert changed[1] != first[1], "a function that is pickled by its name is more than its name"


FAR = """
import helper
import cloudpickle
from elastix.train.record.finished import mark

DATA = {data!r}

def train(ctx):
    return helper.build(DATA)

def late(ctx):
    from package import inner
    return inner.build(DATA)

print(mark(cloudpickle.dumps(train)), mark(cloudpickle.dumps(late)))
"""


def far_marks(fresh, folder, depth="SIZE = 1\n", inner="from . import depth\n", data="d4" * 16):
    """As `marks`, of functions whose code lies further away."""
    package = folder / "package"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "inner.py").write_text(inner)
    (package / "depth.py").write_text(depth)
    (folder / "helper.py").write_text("import package.inner\n\n\ndef build(x): return x\n")
    (folder / "script.py").write_text(FAR.format(data=data))
    return fresh.run(folder)


def test_imports_of_imports_and_digests_belong_to_the_train_function(fresh, tmp_path):
    first = far_marks(fresh, tmp_path)
    assert far_marks(fresh, tmp_path) == first
    for changed in ({"depth": "SIZE = 22\n"}, {"inner": "from package import depth as d\n"}):
        other = far_marks(fresh, tmp_path, **changed)
        assert other[0] != first[0], "an import of an import"
        assert other[1] != first[1], "an import within the function"
    other = far_marks(fresh, tmp_path, data="e5" * 16)  # long as what cloudpickle draws for classes
    assert other[0] != first[0]
    assert other[1] != first[1]


def test_a_run_from_another_parent_is_another_one():
    train = pickle.dumps("train")
    assert mark(train, ["a"]) == mark(train, ["a"])
    assert len({mark(train), mark(train, ["a"]), mark(train, ["b"])}) == 3


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


def test_runs_that_begin_at_once_in_two_threads_do_not_disturb_each_other():
    """Each parses its modules, and a collection in the middle lets the other thread go on."""
    words = pickle.dumps(test_runs_that_begin_at_once_in_two_threads_do_not_disturb_each_other)
    marks, errors = [], []

    def begin():
        try:
            marks.extend(mark(words) for _ in range(3))
        except SystemError as error:  # which is what CPython makes of it
            errors.append(error)

    def let_others_in(_phase, _info):
        time.sleep(0.0001)

    threads = [threading.Thread(target=begin) for _ in range(3)]
    before = gc.get_threshold()
    gc.callbacks.append(let_others_in)
    gc.set_threshold(50)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(let_others_in)
    assert errors == []
    assert len(set(marks)) == 1


class Handle:
    """As handles of Ray's are: the general pickler knows nothing to do with it."""

    def __reduce__(self):
        raise TypeError("a handle cannot be pickled")


def test_a_function_that_only_ray_can_pickle_is_known_again(monkeypatch):
    handle = Handle()

    def train(ctx):
        return handle

    with pytest.raises(elastix.ConfigError, match=r"'handle', a Handle: a handle cannot be"):
        elastix.ElasticTrainer(train)._opening()
    monkeypatch.setitem(CloudPickler.dispatch_table.maps[0], Handle, lambda _: (Handle, ()))
    marks = {elastix.ElasticTrainer(train)._opening().code for _ in range(2)}
    assert len(marks) == 1
    assert marks.pop()


def test_a_script_is_known_again_when_python_has_written_its_byte_code(tmp_path, monkeypatch):
    """What is one text in a module from its source may be two in one from its byte code."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    script = tmp_path / "digits.py"
    script.write_text("def train(ctx):\n    def inner():\n        return ctx\n    return inner\n")
    pickles = [cloudpickle.dumps(train_function(script, "train")) for _ in range(2)]
    assert list((tmp_path / "__pycache__").iterdir())
    if pickles[0] == pickles[1]:  # Python 3.12 makes one of them
        pytest.skip("this Python gives one text, so nothing can be shown")
    assert mark(pickles[0]) == mark(pickles[1])
