"""What `make bench` and its like run: every command is one that its benchmark takes."""

import argparse
import importlib
import subprocess
import sys

import pytest

from benchmarks import __main__ as targets
from benchmarks.goals import ROWS
from benchmarks.table import RESULTS, ROOT

ELSEWHERE = {"gpu", "before_after", "versions"}
"""Which have a target of their own, or are called with a commit."""


class Parsed(Exception):
    """The command line was taken."""


@pytest.mark.parametrize("entry", targets.ENTRIES, ids=lambda entry: f"{entry.target}-{entry.name}")
def test_a_benchmark_takes_the_options_that_it_is_given(entry, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, *given):
        raise Parsed(parse(parser, *given).out)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    _, m, module, *given = entry.command
    assert m == "-m"
    monkeypatch.setattr(sys, "argv", [module, *given])
    found = importlib.import_module(module)
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{module}.__main__")
    with pytest.raises(Parsed) as taken:
        found.main()
    assert taken.value.args == (entry.out.relative_to(ROOT),)


def test_every_goal_and_every_result_has_a_target():
    run = {entry.name for entry in targets.ENTRIES if entry.target != "short"}
    assert {row.benchmark for row in ROWS} <= run | ELSEWHERE
    results = {path.stem for path in RESULTS.glob("*.json")} - {"about"}
    assert results <= run | ELSEWHERE


def test_a_name_stands_once_in_a_target_and_targets_stand_together():
    keys = [(entry.target, entry.name) for entry in targets.ENTRIES]
    assert len(keys) == len(set(keys))
    assert targets.listed(targets.ENTRIES).count(" minutes:") == len(targets.TARGETS)


def test_what_is_timed_ends_within_a_hundred_minutes():
    assert sum(entry.minutes for entry in targets.ENTRIES if entry.target == "timed") <= 100


def entries(tmp_path, monkeypatch, *names):
    monkeypatch.setattr(targets, "RESULTS", tmp_path)
    monkeypatch.setattr(targets, "ROOT", tmp_path)
    return [targets.Entry("counted", name, 1) for name in names]


def test_one_that_fails_stops_no_other_and_is_named(tmp_path, monkeypatch, capsys):
    ran = []
    kept = {name: tmp_path / f"{name}.json.runs.jsonl" for name in ("one", "two")}
    for path in kept.values():
        path.touch()

    def ended(command):
        ran.append(command[2])
        return 3 if command[2] == "benchmarks.two" else 0

    chosen = entries(tmp_path, monkeypatch, "one", "two", "three")
    assert targets.run(chosen, ended) == 1
    assert ran == ["benchmarks.one", "benchmarks.two", "benchmarks.three"]
    said = capsys.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in said] == ["one", "two", "three"]
    assert [line.endswith("FAILED with status 3") for line in said] == [False, True, False]
    assert {name: path.exists() for name, path in kept.items()} == {"one": False, "two": True}


def test_after_ctrl_c_it_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def ended(command):
        if command[2] == "benchmarks.two":
            raise KeyboardInterrupt
        return 0

    chosen = entries(tmp_path, monkeypatch, "one", "two", "three")
    assert targets.run(chosen, ended) == 130
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "go on with: python -m benchmarks counted --only two three"


def test_ctrl_c_waits_until_the_benchmark_has_ended_what_it_started(tmp_path):
    done = tmp_path / "done"
    script = (
        "import os, signal, sys, time\n"
        "try:\n"
        "    os.killpg(os.getpgid(0), signal.SIGINT)\n"  # as a terminal does it
        "    time.sleep(60)\n"
        "finally:\n"
        "    time.sleep(1)\n"  # which takes a while
        "    open(sys.argv[1], 'w').close()\n"
    )
    code = (
        "import os, sys; from benchmarks.__main__ import ended_with\n"
        f"os.setpgid(0, 0); ended_with([sys.executable, '-c', {script!r}, {str(done)!r}])"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL, check=False)
    assert ended.returncode != 0
    assert done.exists()
