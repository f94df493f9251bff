"""`elastix run`: a script for plain torch, made elastic by five lines."""

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastix.cli import app

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ROOT / "examples" / "plain_torch"


def changed(sign):
    before, after = ((PLAIN / name).read_text().splitlines() for name in ("before.py", "after.py"))
    lines = list(difflib.unified_diff(before[1:], after[1:], n=0))[2:]  # the docstrings differ
    return [line for line in lines if line.startswith(sign) and line[1:].strip()]


def test_at_most_five_lines_of_a_plain_script_change():
    assert len(changed("+")) <= 5
    assert len(changed("-")) <= 5


@pytest.mark.slow
def test_the_plain_script_runs():
    done = subprocess.run(
        [sys.executable, PLAIN / "before.py"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.85


def test_the_elastic_script_runs(cluster, tmp_path):
    script = tmp_path / "talks.py"
    script.write_text((PLAIN / "after.py").read_text() + "\nprint('loaded')\n")
    words = ["run", str(script), "--workers", "3", "--cpus", "0.5"]
    done = CliRunner().invoke(app, [*words, "--store", str(tmp_path / "store"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)  # whatever else is printed is on stderr
    assert "loaded" in done.stderr
    assert found["exact"]
    assert found["metrics"]["test_accuracy"] > 0.85


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["nowhere.py"], "there is no file nowhere.py"),
        ([str(PLAIN / "after.py"), "--function", "fit"], "has no 'fit'"),
        ([str(PLAIN / "after.py"), "--workers", "many"], "give a number, or MIN:MAX"),
        ([str(PLAIN / "after.py"), "--set", "lr"], "give KEY=VALUE"),
    ],
)
def test_bad_calls_say_what_is_wrong(words, fact):
    done = CliRunner().invoke(app, ["run", *words])
    assert done.exit_code == 2
    assert fact in done.output


@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        ("a.py", "def train(ctx:\n", ["a.py", "line 1", "was never closed", "cannot be loaded"]),
        ("b.py", "def train(ctx): ...\nimport nowhere\n", ["b.py", "line 2", "'nowhere'"]),
        ("c.py", "def train(ctx): ...\n1 / 0\n", ["c.py", "line 2", "ZeroDivisionError"]),
        ("d.py", "def train(ctx): ...\nraise SystemExit(2)\n", ["d.py ended itself", "(2)"]),
        ("e", "def train(ctx): ...\n", ["e is not a Python file"]),
        ("h.py", "async def train(ctx): ...\n", ["a function with `async def`"]),
        ("f g.py", "def train(ctx): ...\n", ["'f g'", "--name"]),
        (".", "", [". is a directory"]),
    ],
)
def test_a_script_that_cannot_be_loaded_is_told_with_the_users_own_lines(
    tmp_path, monkeypatch, name, text, facts
):
    monkeypatch.chdir(tmp_path)
    if text:
        Path(name).write_text(text)
    done = CliRunner().invoke(app, ["run", name])
    assert done.exit_code == 2
    assert [fact for fact in facts if fact not in done.output] == []
    assert "Nothing was started" in done.output
    assert "elastix/commands" not in done.output
    assert "importlib" not in done.output


def test_a_store_without_a_path_is_not_blamed_on_the_name(tmp_path):
    (tmp_path / "one.py").write_text("def train(ctx): ...\n")
    done = CliRunner().invoke(app, ["run", str(tmp_path / "one.py"), "--store", ""])
    assert done.exit_code == 2
    assert "store must be the path of a directory" in done.output
    assert "--name" not in done.output


@pytest.mark.parametrize(
    "words", [["--workers", "0"], ["--cpus", "nan"], ["--seed", "-1"], ["--spares", "-1"]]
)
def test_a_script_is_not_loaded_for_numbers_that_make_no_sense(tmp_path, words):
    (tmp_path / "one.py").write_text("def train(ctx): ...\nprint('loaded')\n")
    done = CliRunner().invoke(app, ["run", str(tmp_path / "one.py"), *words])
    assert done.exit_code == 2
    assert "loaded" not in done.output


SPACE = "elastix.Space([elastix.Float('x', (0.0, 1.0))])"
CAMPAIGN = f"space={SPACE}, metric='m', budget=elastix.Budget(trials=1)"


@pytest.mark.parametrize(
    "call", ["ElasticTrainer(train).fit()", f"Campaign(train, {CAMPAIGN}).run()"]
)
def test_a_script_that_trains_when_it_is_loaded_is_refused(tmp_path, call):
    script = tmp_path / "one.py"
    script.write_text(f"import elastix\ndef train(ctx): ...\nelastix.{call}\n")
    done = CliRunner().invoke(app, ["run", str(script)])
    assert done.exit_code == 2
    assert f"Run it with `python {script}`" in done.output
    assert {entry.name for entry in tmp_path.iterdir()} - {"__pycache__"} == {script.name}


@pytest.mark.parametrize("text", ["", "def train_all(): ...\n", "import os.train\n"])
def test_a_script_without_the_function_does_not_run(tmp_path, text):
    (tmp_path / "plain.py").write_text(f"{text}open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    result = CliRunner().invoke(app, ["run", str(tmp_path / "plain.py")])
    assert "has no 'train'. Nothing was started" in str(result.exception) + result.output
    assert not (tmp_path / "ran").exists()
