"""A store of somebody else is shown as it is, and what may not be written says so."""

import ctypes
import json
import os
import struct
import subprocess
from pathlib import Path

import pytest

import elastix
from elastix.__main__ import main
from elastix.observe.journal import Journal
from tests.forked_scripts import Script
from tests.report_data import run_events

ROOT = Path(__file__).parents[3]
_CALL = "from tests.unit.commands.test_permissions import call; call()"
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
"""What lets root read and write everything, by the kernel's numbers."""
_DROP_FROM_BOUNDING_SET, _VERSION = 24, 0x20080522


def call():
    """What the process does that is forked for a command: as anybody, also where root tests."""
    if os.geteuid() == 0:
        libc, header = ctypes.CDLL(None), struct.pack("Ii", _VERSION, 0)
        held = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable; then the upper bits
        assert libc.capget(header, held) == 0
        for number in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
            assert libc.prctl(_DROP_FROM_BOUNDING_SET, number, 0, 0, 0) == 0
            for place in range(3):
                held[place] &= ~(1 << number)
        assert libc.capset(header, held) == 0
    main()


def called(*words):
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = Script(["-c", _CALL, *map(str, words)], ROOT, variables)
    said = script.stdout.read(), script.stderr.read()
    return subprocess.CompletedProcess(words, script.wait(), *said)


@pytest.fixture
def theirs(tmp_path):
    """A store with a model and a run, nothing of which may be written."""
    root = tmp_path / "store"
    with elastix.Store(root) as store:
        store.tag("best", store.put(elastix.State({})))
    with Journal(root / "runs" / "digits" / "journal.jsonl") as journal:
        for event in run_events(steps=20):
            journal.append(event)
    folders = [path for path in root.rglob("*") if path.is_dir()]
    files = [path for path in root.rglob("*") if path.is_file()]
    for path in (root, *folders, *files):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield root
    for path in (root, *folders):
        path.chmod(0o755)


def test_a_run_of_somebody_else_is_not_damaged(theirs):
    shown = called("runs", "--store", theirs)
    assert shown.returncode == 0, shown.stderr
    assert "finished" in shown.stdout
    assert "damaged" not in shown.stdout
    assert called("store", "log", "--store", theirs).stdout.count("best") == 1


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (
            ["store", "tag", "new", "best", "--store", "{}"],
            "Permission denied. Nothing was changed. Let this user write there.",
        ),
        (["store", "gc", "--store", "{}"], "Nothing was changed. Let this user write there."),
        (["store", "export", "best", "{}/x", "--store", "{}"], "/x failed: Permission denied."),
        (["grafana", "--out", "{}"], ".json cannot be written: Permission denied."),
        (["report", "digits", "--store", "{}"], "Permission denied"),
    ],
)
def test_what_may_not_be_written_is_named(theirs, words, fact):
    done = called(*(word.format(theirs) for word in words))
    assert done.returncode in (1, 2)
    assert fact in done.stderr
    assert "not foreseen" not in done.stderr
    opened = words[1] in ("tag", "gc")  # for writing, which reading needs not
    assert ("`elastix store log`" in done.stderr) == opened


@pytest.mark.parametrize("words", [["store", "log"], ["runs"], ["campaign", "list"]])
def test_a_folder_that_may_not_be_looked_into_is_named(theirs, words):
    theirs.chmod(0o000)
    done = called(*words, "--store", theirs)
    assert done.returncode == 1
    assert f"{theirs} failed: Permission denied" in done.stderr
    assert "not foreseen" not in done.stderr


@pytest.mark.parametrize("closed", ["runs/digits", "runs/digits/journal.jsonl"])
def test_a_run_that_may_not_be_read_hides_no_other_and_is_not_begun_anew(theirs, closed):
    runs, script = theirs / "runs", theirs.parent / "digits.py"
    runs.chmod(0o755)
    with Journal(runs / "another" / "journal.jsonl") as journal:
        for event in run_events(steps=20):
            journal.append(event)
    (theirs / closed).chmod(0o000)
    script.write_text("def train(ctx): ...\n")
    listed = called("runs", "list", "--store", theirs)
    assert [line.split("\t")[::2][:2] for line in listed.stdout.splitlines()[1:]] == [
        ["another", "finished"],
        ["digits", "damaged"],
    ]
    fact = f"reading {runs / 'digits' / 'journal.jsonl'} failed: Permission denied"
    for done in (
        listed,
        called("report", "digits", "--store", theirs),
        called("run", script, "--store", theirs),
    ):
        assert fact in done.stderr
        assert "not foreseen" not in done.stderr


@pytest.mark.parametrize("words", [["campaign", "show"], ["campaign", "resume"]])
def test_a_campaign_that_may_not_be_looked_for_is_not_said_to_be_missing(theirs, words):
    (theirs / "runs" / "digits").chmod(0o000)
    done = called(*words, "digits", "--store", theirs)
    assert done.returncode == 1
    assert "failed: Permission denied" in done.stderr
    assert "not foreseen" not in done.stderr


@pytest.fixture
def hidden(theirs):
    """One below a folder that may not be looked into."""
    mode = theirs.parent.stat().st_mode
    theirs.parent.chmod(0o000)
    yield theirs
    theirs.parent.chmod(mode)


@pytest.mark.parametrize("words", [["runs"], ["campaign", "list"], ["serve", "--port", "0"]])
def test_a_store_below_a_folder_that_may_not_be_looked_into_is_named(hidden, words):
    done = called(*words, "--store", hidden)
    assert done.returncode == 1
    assert f"reading {hidden} failed: Permission denied" in done.stderr
    assert "not foreseen" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["runs", "show", "digits"],
        ["runs", "note", "digits", "a note"],
        ["runs", "compare", "digits", "other"],
        ["report", "digits"],
    ],
)
def test_a_run_that_may_not_be_looked_at_is_named(theirs, words):
    theirs.chmod(0o000)
    done = called(*words, "--store", theirs)
    assert done.returncode == 1
    path = theirs / "runs" / "digits" / "journal.jsonl"
    assert f"reading {path} failed: Permission denied" in done.stderr
    assert "not foreseen" not in done.stderr


def test_the_doctor_tells_of_what_this_user_may_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").touch(0o000)
    (tmp_path / "closed").mkdir(0o000)
    told = called("doctor", "--json", "--store", tmp_path / "closed" / "store")
    found = {finding["check"]: finding["fact"] for finding in json.loads(told.stdout)}
    assert found["ray token"] == f"{tmp_path / 'token'} cannot be read: Permission denied"
    assert found["store"] == f"{tmp_path / 'closed'} cannot be written"
    (tmp_path / "closed").chmod(0o755)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "{}/train.py"],
        ["bench", "{}/train.py"],
        ["estimate", "{}/model.py", "--shape", "8"],
        ["data", "index", "{}/shard.tar"],
        ["grafana", "--out", "{}/dashboards"],
    ],
)
def test_where_this_user_may_not_look_is_told(tmp_path, words):
    """These ended with an error "that was not foreseen"."""
    folder = tmp_path / "secret"
    folder.mkdir(mode=0)
    said = called(*[word.format(folder) for word in words])
    folder.chmod(0o700)
    assert said.returncode == 1
    assert said.stdout == ""
    assert f"{folder}/" in said.stderr
    assert "Permission denied. Let this user" in said.stderr
    assert said.stderr.count("\n") == 1
