"""The README's numbers are those of benchmarks/results, and a missed goal is said."""

import json
from pathlib import Path

import pytest

from benchmarks.table import MARKERS, table, updated

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_shows_the_results_that_are_committed():
    text = README.read_text(encoding="utf-8")
    assert updated(text, table()) == text, "run python -m benchmarks.table --update README.md"


def test_reached_missed_and_not_measured(tmp_path):
    recovery = {"stall_s": {"median": 0.15, "max": 0.75}, "steps_lost": 0}
    (tmp_path / "recovery.json").write_text(json.dumps({"elastix": recovery}))
    lines = {line.split(" | ")[0]: line for line in table(tmp_path).splitlines()}
    assert lines["| SIGKILL to agreed gradient, median, s"].endswith("| 0.15 |  |")
    assert lines["| SIGKILL to agreed gradient, maximum, s"].endswith("| 0.75 | **missed** |")
    assert lines["| samples dropped"].endswith("| not measured | |")


def test_text_without_markers_is_refused():
    with pytest.raises(ValueError, match="no <!-- benchmarks: begin -->"):
        updated(f"{MARKERS[0]} but no end", "x")
