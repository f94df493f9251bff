"""A trial database with anything in it is read, or is Corrupt: nothing else is raised."""

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from elastix.errors import Corrupt, ElastixError, NotFound, StoreError
from elastix.events import TrialEnded
from elastix.observe import catalogue
from elastix.observe.journal import Journal
from elastix.report.sources import campaign_record
from elastix.search.results import Results, names
from elastix.search.trial import Suggestion, Trial, TrialState
from elastix.search.trial_database import FILE, TrialDatabase, TrialRow
from elastix.state import Ref
from tests.search_parts import seal

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
    """In place of what is there, as if it had been written if it is text."""
    with closing(sqlite3.connect(directory / FILE)) as sql, sql:
        sql.execute(statement, (text,))
        if isinstance(text, str):
            seal(sql)


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


def everything(store):
    """What a campaign that goes on reads of its database, and what a person does."""
    with TrialDatabase(store / "runs" / "c", read_only=True) as database:
        found = [database.lines(), database.fact("campaign"), database.passed()]
        found.append(database.superseded())
    read(store)
    return found


def filled(directory, trials=3):
    with TrialDatabase(directory) as database:
        rows = [TrialRow(replace(TRIAL, number=n), done=1 + n) for n in range(trials)]
        database.commit(rows, {"campaign": FACTS}, [Ref("2" * 64)], (1, {"told": [0]}))


def test_a_flipped_bit_is_noticed_or_changes_nothing(tmp_path):
    """One in 41 of those that are not in empty space; all were tried once."""
    path = tmp_path / "runs" / "c" / FILE
    filled(path.parent)
    whole, there = path.read_bytes(), everything(tmp_path)
    places = [place for place, byte in enumerate(whole) if byte]
    flips = [(place, bit) for place in places for bit in range(8)]
    noticed = 0
    for place, bit in flips[::41]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            assert everything(tmp_path) == there, (place, bit)
        except ElastixError:
            noticed += 1
    assert noticed > 0.8 * len(flips[::41])


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("trials", "state = 'failed'"),
        ("trials", "role = 'rerank'"),
        ("trials", "number = 7"),
        ("trials", "done = 2"),
        ("trials", """body = replace(body, '"epochs":0.0', '"epochs":4.0')"""),
        ("facts", "name = 'campaigo'"),
        ("facts", """value = replace(value, '"max"', '"min"')"""),
        ("passed", "body = replace(body, '0', '1')"),
        ("superseded", f"ref = '{'3' * 64}'"),
    ],
)
def test_a_change_that_leaves_a_database_is_corrupt_and_says_where(tmp_path, table, change):
    path = tmp_path / "runs" / "c" / FILE
    filled(path.parent, trials=1)
    with closing(sqlite3.connect(path)) as sql, sql:
        assert sql.execute(f"UPDATE {table} SET {change}").rowcount == 1
    with pytest.raises(Corrupt, match=rf"the row .* of its table {table} is not as it was written"):
        everything(tmp_path)


def unsummed(path):
    """As version 1 wrote it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as sql:
        for table in ("trials", "facts", "superseded", "passed"):
            sql.execute(f"ALTER TABLE {table} DROP COLUMN sum")
        sql.execute("PRAGMA user_version=1")


def test_a_database_of_an_earlier_version_is_read_and_gets_checksums_when_it_is_written(tmp_path):
    path = tmp_path / "runs" / "c" / FILE
    filled(path.parent)
    there = everything(tmp_path)
    unsummed(path)
    old = path.read_bytes()
    assert everything(tmp_path) == there
    assert path.read_bytes() == old, "reading changes nothing"
    TrialDatabase(path.parent).close()
    assert everything(tmp_path) == there
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("UPDATE trials SET state = 'failed' WHERE number = 1")
    with pytest.raises(Corrupt, match="the row 1 of its table trials"):
        everything(tmp_path)
    with TrialDatabase(path.parent) as database, pytest.raises(Corrupt):
        database.lines()


@pytest.mark.parametrize("gone", [["passed"], ["passed", "superseded"]])
def test_a_database_from_before_there_were_all_tables_gets_them(tmp_path, gone):
    """It was taken for a damaged one."""
    filled(tmp_path)
    unsummed(tmp_path / FILE)
    with closing(sqlite3.connect(tmp_path / FILE)) as sql, sql:
        for table in gone:
            sql.execute(f"DROP TABLE {table}")
    with TrialDatabase(tmp_path) as database:
        there = database.lines()
        assert there
        assert database.passed() == []
        database.commit(there, superseded=[Ref("0" * 64)], passed=(1, []))
    with TrialDatabase(tmp_path) as database:
        assert database.lines() == there
        assert database.passed() == [(1, [])]
        assert Ref("0" * 64) in database.superseded()


def over(number, state="finished"):
    """What the journal says of a trial that has ended."""
    return TrialEnded(
        t=1.0,
        trial=number,
        state=state,
        values={"m": 0.5},
        metrics={"m": 0.5},
        ref="",
        epochs=1.0,
        lineage_epochs=1.0,
        inherited=0.0,
        seconds=1.0,
        best=False,
        message="",
    )


@pytest.fixture
def killed(tmp_path):
    """What the driver of a campaign leaves that is killed after eight trials."""
    alive, left = tmp_path / "alive", tmp_path / "left"
    with TrialDatabase(alive) as database, Journal(alive / "journal.jsonl") as journal:
        database.commit([], {"campaign": FACTS})
        for n in range(8):
            database.commit([TrialRow(replace(TRIAL, number=n), done=1 + n)])
            journal.append(over(n))
            journal.append(over(n + 1, "paused"))  # which is no end
        shutil.copytree(alive, left)
    return left


def contents(directory):
    files = (directory / FILE, directory / f"{FILE}-wal")
    return [file.read_bytes() if file.exists() else None for file in files]


def numbers(directory):
    with TrialDatabase(directory) as database:
        return [line.trial.number for line in database.lines()]


def test_a_killed_campaign_goes_on_with_all_that_it_has_said(killed):
    assert contents(killed)[1]
    assert numbers(killed) == list(range(8))


def test_a_flipped_bit_in_the_log_of_a_killed_campaign_is_noticed_and_the_log_stays(killed):
    """SQLite takes it for the end of the log: what was committed after it was silently lost."""
    log = killed / f"{FILE}-wal"
    whole = log.read_bytes()
    used = [place for place, byte in enumerate(whole) if byte]
    lost = 0
    for place in used[:: len(used) // 60]:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        folder = killed.with_name(f"damaged at {place}")
        shutil.copytree(killed, folder)
        (folder / log.name).write_bytes(damaged)
        before = contents(folder)
        try:
            assert numbers(folder) == list(range(8)), place
        except Corrupt as error:
            assert contents(folder) == before, "it may be worth a look"
            lost += "has lost what was written last: 8 trials were over" in str(error)
    assert lost > 50


def test_who_only_reads_notices_lost_trials_too(killed, tmp_path):
    """Its best was the best of those that were left, without a word."""
    directory = tmp_path / "runs" / "c"
    directory.parent.mkdir()
    killed.rename(directory)
    assert len(Results.open(tmp_path, "c")) == 8
    (directory / f"{FILE}-wal").unlink()
    with pytest.raises(Corrupt, match=r"8 trials were over, as .* and it knows of 0\."):
        Results.open(tmp_path, "c")


@pytest.mark.parametrize(
    ("gone", "look"), [(FILE, Results.open), ("journal.jsonl", catalogue.find)]
)
def test_of_a_campaign_without_one_of_its_files_it_is_said_which(killed, tmp_path, gone, look):
    directory = tmp_path / "runs" / "c"
    directory.parent.mkdir()
    killed.rename(directory)
    (directory / gone).unlink()
    with pytest.raises(NotFound, match=f"c has no {gone}: .* was removed. Restore it"):
        look(tmp_path, "c")


@pytest.mark.parametrize("gone", [[f"{FILE}-wal"], [FILE, f"{FILE}-wal"]])
def test_a_database_that_was_copied_without_its_log_is_told_from_a_whole_one(killed, gone):
    for name in gone:
        (killed / name).unlink()
    with pytest.raises(Corrupt, match=r"knows of 0\..*To run the missing trials again, rename"):
        numbers(killed)
    (killed / "journal.jsonl").rename(killed / "before.jsonl")
    assert numbers(killed) == []


def test_a_trial_that_was_taken_out_of_a_database_is_no_damage(killed):
    numbers(killed)
    with closing(sqlite3.connect(killed / FILE)) as sql, sql:
        sql.execute("DELETE FROM trials WHERE number = 3")
    assert len(numbers(killed)) == 7


def test_a_damaged_journal_keeps_no_campaign_from_going_on(killed):
    path = killed / "journal.jsonl"
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)
    assert numbers(killed) == list(range(8))


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_database_that_is_taken_away_is_written_no_more(tmp_path, how):
    """SQLite does not mind, and the campaign ended well with nothing on the disk."""
    with TrialDatabase(tmp_path) as database:
        database.commit([TrialRow(TRIAL, done=1)], {"campaign": FACTS})
        there = (tmp_path / FILE).rename(tmp_path / "elsewhere")
        if how == "replaced":
            shutil.copyfile(there, tmp_path / FILE)
        for _ in range(2):
            with pytest.raises(StoreError, match="was removed or replaced while it was being"):
                database.commit([TrialRow(TRIAL, done=1)])
