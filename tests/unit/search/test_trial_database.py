"""A trial database with anything in it is read, or is Corrupt: nothing else is raised."""

import json
import sqlite3
from contextlib import closing

import pytest

from elastix.errors import Corrupt, ElastixError, NotFound
from elastix.report.sources import campaign_record
from elastix.search.results import Results, names
from elastix.search.trial import Suggestion, Trial, TrialState
from elastix.search.trial_database import FILE, TrialDatabase, TrialRow

FACTS = {
    "name": "c",
    "metrics": ["m"],
    "modes": ["max"],
    "searcher": "Random",
    "budget": {"trials": 3},
    "began_s": 1.0,
}
INHERITED = {"ref": "0" * 64, "share": 0.5, "lineage_epochs": 1.0}
TRIAL = Trial(
    0,
    Suggestion({"x": 0.5}, "0" * 64, 1),
    TrialState.FINISHED,
    losses=(-0.5,),
    results=({"m": 0.5},),
    metrics={"m": 0.5},
    ref="1" * 64,
    inherited=INHERITED,
    asked_s=1.0,
    started_s=1.0,
    finished_s=2.0,
)
ODD = [None, True, -1, 1e308, float("nan"), 10**400, "", "\ud800", [], {}, [1], {"a": 1}]


def places(value, path=()):
    """Where in a JSON value something else may stand."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(value, path, odd):
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return copy


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "runs" / "c"
    with TrialDatabase(path) as database:
        database.commit([TrialRow(TRIAL, done=1)], {"campaign": FACTS})
    return path


def read(store):
    results = Results.open(store, "c")
    results.rows()
    results.top()
    campaign_record(store, "c", [])


def put(directory, statement, text):
    with closing(sqlite3.connect(directory / FILE)) as sql, sql:
        sql.execute(statement, (text,))


@pytest.mark.parametrize("what", ["trial", "facts"])
def test_whatever_stands_in_a_book_is_read_or_is_a_typed_error(directory, tmp_path, what):
    value, statement = {
        "trial": (TRIAL.to_json(), "UPDATE trials SET body = ?"),
        "facts": (FACTS, "UPDATE facts SET value = ?"),
    }[what]
    read(tmp_path)
    corrupt = 0
    for path in places(value):
        for odd in ODD:
            put(directory, statement, json.dumps(changed(value, path, odd)))
            try:
                read(tmp_path)
            except Corrupt:
                corrupt += 1
    assert corrupt > 50


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, b"\xff\xfe", "", "null", "[]"])
@pytest.mark.parametrize("where", ["UPDATE trials SET body = ?", "UPDATE facts SET value = ?"])
def test_what_is_no_json_is_corrupt(directory, tmp_path, text, where):
    put(directory, where, text)
    with pytest.raises(ElastixError):
        read(tmp_path)


@pytest.mark.parametrize(("table", "column"), [("trials", "body"), ("facts", "value")])
def test_a_flipped_bit_that_leaves_no_text_is_corrupt(directory, tmp_path, table, column):
    put(directory, f"UPDATE {table} SET {column} = CAST(? AS TEXT)", b"{\xff}")
    with pytest.raises(Corrupt, match="Restore it from a backup"):
        read(tmp_path)


def test_what_is_no_file_is_no_campaign(tmp_path):
    (tmp_path / "runs" / "c" / FILE).mkdir(parents=True)
    with pytest.raises(NotFound, match="It has no campaigns"):
        Results.open(tmp_path, "c")
    assert names(tmp_path) == []
