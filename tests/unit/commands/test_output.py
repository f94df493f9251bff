"""Tables for people: whole words, however narrow the terminal is."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elastix
from elastix.commands.output import print_table

COLUMNS = ("run", "state", "best")
ROWS = [("digits", "finished", "accuracy 0.9"), ("imagenet", "failed", "-")]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    def show(width, rows=ROWS):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(sys, "stdout", Terminal())
        print_table(False, {}, COLUMNS, iter(rows))
        lines = re.sub(r"\x1b\[[0-9;]*m", "", sys.stdout.getvalue()).splitlines()
        assert max(map(len, lines), default=0) <= width
        return [line.split() for line in lines]

    return show


def test_a_wide_terminal_has_a_line_for_each_row(shown):
    assert shown(80) == [
        [*COLUMNS],
        ["digits", "finished", "accuracy", "0.9"],
        ["imagenet", "failed", "-"],
    ]


def test_columns_move_together_and_fold_between_words_before_there_are_blocks(shown):
    assert shown(28)[1:3] == [["digits", "finished", "accuracy"], ["0.9"]]


def test_where_words_would_break_each_row_is_a_block(shown):
    assert shown(20) == [
        ["run", "digits"],
        ["state", "finished"],
        ["best", "accuracy", "0.9"],
        [],
        ["run", "imagenet"],
        ["state", "failed"],
        ["best", "-"],
    ]


def test_a_long_word_is_folded_in_its_column(shown):
    found = shown(40, rows=[("digits", "finished", "0123456789" * 4)])
    assert found[1] == ["digits", "finished", "0123456789012345678901"]
    assert found[2] == ["234567890123456789"]


def test_a_value_of_several_lines_keeps_them_on_a_terminal_and_is_one_line_elsewhere(
    shown, monkeypatch
):
    rows = [("digits", "failed", "it raised:\n\n  File\tx.py\r\nKeyError")]
    found = shown(80, rows=rows)
    assert found[1:] == [
        ["digits", "failed", "it", "raised:"],
        ["File", "x.py"],
        ["KeyError"],
    ]
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    print_table(False, {}, COLUMNS, rows)
    told = "digits\tfailed\tit raised:   File  x.py KeyError"
    assert sys.stdout.getvalue().splitlines()[1:] == [told]


def test_a_table_without_rows_has_its_head_wherever_it_fits(shown):
    assert shown(80, rows=[]) == [[*COLUMNS]]
    assert shown(6, rows=[]) == []


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["store", "--help"], ["doctor", "--help"], ["store", "tags"]],
)
def test_output_that_has_no_room_is_said_in_a_line(words, tmp_path):
    with elastix.Store(tmp_path) as store:
        store.tag("best", store.put(elastix.State({})))
    command = [sys.executable, "-m", "elastix", *words]
    env = {**os.environ, "ELASTIX_STORE": str(tmp_path)}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, check=False
        )
    assert done.returncode in (1, 120)
    assert done.stderr.startswith(
        "elastix: what it prints, or a file that it writes, has no room: No space left on device."
    )
    assert "Traceback" not in done.stderr
