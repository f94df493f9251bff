"""Train functions that fork."""

import json
import os
from pathlib import Path

import pytest

from tests.forked_scripts import Script

ROOT = Path(__file__).parents[3]

FORKS = """
import json, os, sys
from pathlib import Path
import elastix
from elastix.search.executors.serial import Local
from tests.search_parts import SPACE

ends = {ends!r}

def train(ctx):
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        ctx.report(m=ctx.config["x"], code=os.waitstatus_to_exitcode(status))
        return
    if ends == "exit":
        sys.exit(3)
    if ends == "says":
        sys.exit("farewell")
    if ends == "raises":
        raise ValueError("in the child")
    ctx.report(m=100.0)

results = elastix.Campaign(
    train, space=SPACE, metric="m", searcher=elastix.Random(), budget=elastix.Budget(trials=3),
    run=elastix.RunConfig(name="c", store={store!r}), executor=Local(), quiet=True,
).run()
right = [t.metrics["m"] == t.config["x"] for t in results]
print(json.dumps([[t.state.value, t.metrics["code"]] for t in results] + right))
"""


@pytest.mark.parametrize(
    ("ends", "code"), [("exit", 3), ("says", 1), ("raises", 1), ("returns", 0)]
)
def test_what_a_train_function_forks_ends_with_it_and_runs_no_campaign(tmp_path, ends, code):
    text = FORKS.format(ends=ends, store=str(tmp_path))
    script = Script(["-c", text], tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        printed, errors = script.stdout.read(), script.stderr.read()
        assert script.wait() == 0, errors
    finally:
        script.kill()
    lines = printed.splitlines()
    assert len(lines) == 1, "the child went on with the campaign too"
    assert json.loads(lines[0]) == [["finished", code]] * 3 + [True] * 3
    assert ("in the child" in errors) is (ends == "raises")
    assert ("farewell" in errors) is (ends == "says")
