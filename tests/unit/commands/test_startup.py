"""What verbs import: whoever lists models or asks for help does not wait for torch and Ray."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from typer.testing import CliRunner

import elastix
from elastix import cli
from elastix.commands.run import train_function
from elastix.events import RunEnded, StateStored
from elastix.observe.journal import Journal
from elastix.state import State
from elastix.store import Store
from tests.report_data import run_events

SLOW = ("torch", "ray", "pandas", "sklearn", "ConfigSpace", "deephyper", "pyarrow")

PROGRAM = f"""
import json, sys
from typer.testing import CliRunner
from elastix import cli

found = []
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(cli.app, words)
    found.append([done.exit_code, [name for name in {SLOW!r} if name in sys.modules]])
print(json.dumps(found))
"""


def test_no_listing_and_no_help_waits_for_torch_or_ray(tmp_path):
    with Store(tmp_path) as store:
        first = store.put(State({"w": torch.ones(3)}))
        second = store.put(State({"w": torch.zeros(3)}), parents=[first])
        store.tag("best", second)
    for name in ("digits", "again"):
        with Journal(tmp_path / "runs" / name / "journal.jsonl") as journal:
            for event in run_events(steps=10):
                journal.append(event)
    (tmp_path / "grafana").mkdir()
    where = ["--store", str(tmp_path)]
    verbs = [
        ["--help"],
        *(
            [verb, "--help"]
            for verb in ("run", "bench", "serve-model", "status", "doctor", "estimate", "data")
        ),
        ["grafana", "--out", str(tmp_path / "grafana")],
        *(["store", verb, *where] for verb in ("log", "tags", "stats", "verify", "gc")),
        *(["store", verb, "best", *where] for verb in ("show", "lineage")),
        ["store", "diff", "best", first, *where],
        ["store", "tag", "good", "best", *where],
        ["campaign", "list", *where],
        ["runs", *where],
        ["runs", "show", "digits", *where],
        ["runs", "note", "digits", "a note", *where],
        ["runs", "compare", "digits", "again", *where],
        ["runs", "rm", "again", "--yes", *where],
        ["report", "digits", *where],
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(verbs)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for words, (code, slow) in zip(verbs, json.loads(done.stdout), strict=True):
        assert (code, slow) == (0, []), words


def test_what_needs_torch_gets_it_when_it_needs_it(tmp_path):
    """A store that was opened without torch hands out tensors all the same."""
    with Store(tmp_path) as store:
        store.tag("best", store.put(State({"w": torch.arange(3.0)})))
    program = (
        "import sys, elastix\n"
        "store = elastix.Store(sys.argv[1], read_only=True)\n"
        "assert 'torch' not in sys.modules\n"
        "print(store.get('best').tensors['w'].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert done.stdout == "[0.0, 1.0, 2.0]\n", done.stderr
    path = tmp_path / "x.safetensors"
    words = ["store", "export", "best", str(path), "--store", str(tmp_path)]
    assert CliRunner().invoke(cli.app, words).exit_code == 0


HEAVY = (
    *("ray", "pandas", "scipy", "sklearn", "ConfigSpace", "deephyper", "optuna", "pyarrow"),
    *("plotly", "jinja2", "aiohttp", "elastix.train.on_ray.controller"),
)
SCRIPT = """
import sys
import torch
import elastix

def train(ctx):
    return torch.ones(3)

if __name__ == "__main__":
    store, *names = sys.argv[1:]
    if not names:
        from tests.unit.commands.test_startup import leave_finished
        leave_finished(store, train)
    else:
        elastix.ElasticTrainer(train, run=elastix.RunConfig(name="digits", store=store)).fit()
        print([name for name in names if name in sys.modules])
"""
RUN = """
import sys
from elastix import cli

try:
    cli.app(["run", *sys.argv[1:4]])
finally:
    print([name for name in sys.argv[4:] if name in sys.modules])
"""


def leave_finished(store, train):
    """What a run of that train function leaves that took no step, and is over."""
    run = elastix.RunConfig(name="digits", store=str(store))
    opening = elastix.ElasticTrainer(train, run=run)._opening()
    with Store(store) as opened:
        ref = opened.put(State({"w": torch.ones(3)}))
    with Journal(run.directory / "journal.jsonl") as journal:
        journal.append(opening)
        journal.append(StateStored(ref=ref, step=0, reason="final", stored_bytes=12, store_s=0.0))
        journal.append(RunEnded(outcome="finished", step=0))


def python(*words):
    """What a process says that finds this tree's modules."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_elastix_run_tells_of_a_finished_run_without_ray(tmp_path):
    script, store = tmp_path / "digits.py", tmp_path / "store"
    script.write_text(SCRIPT)
    leave_finished(store, train_function(script, "train"))
    said = python("-c", RUN, script, "--store", store, *HEAVY)
    assert "digits is finished (0 steps); nothing to do" in said
    assert said.splitlines()[-1] == "[]"


def test_fit_tells_of_a_finished_run_without_ray(tmp_path):
    script, store = tmp_path / "digits.py", tmp_path / "store"
    script.write_text(SCRIPT)
    python(script, store)
    said = python(script, store, *HEAVY)
    assert "digits is finished (0 steps); nothing to do" in said
    assert said.splitlines()[-1] == "[]"
