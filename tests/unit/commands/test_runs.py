"""`elastix runs` on real journals and a real store: listed, shown, noted, removed, compared."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime

import pytest
import torch
from typer.testing import CliRunner

from elastix import cli
from elastix.errors import Conflict, Full, NotFound, StoreError
from elastix.event_records import to_record
from elastix.events import (
    CampaignEnded,
    CampaignStarted,
    Reported,
    Resumed,
    RunEnded,
    RunStarted,
    StepCommitted,
    TrialEnded,
    TrialLost,
)
from elastix.observe import catalogue, notes, sealed_lines
from elastix.observe.journal import Journal, read
from elastix.observe.progress import Progress
from elastix.observe.run_lock import Lock
from elastix.report.site import Site
from elastix.search.trial import Suggestion, Trial, TrialState
from elastix.search.trial_database import TrialDatabase, TrialRow
from elastix.state import State
from elastix.store import Store
from elastix.store.ledger import Ledger
from tests.report_data import BEGAN, run_events


def write(store, name, *events):
    with Journal(store / "runs" / name / "journal.jsonl") as journal:
        for event in events:
            journal.append(event)


def started(name, t=BEGAN, seed=0, **config):
    checkpoint = {"best": "accuracy", "mode": "max"}
    return RunStarted(
        t=t, name=name, seed=seed, config=config, scaling={}, versions={}, checkpoint=checkpoint
    )


def said(step, t=BEGAN + 1, **metrics):
    return Reported(t=t, seq=step, step=step, metrics=metrics)


@pytest.fixture
def store(tmp_path):
    """A run that finished, one that failed, one whose process is gone, and a campaign."""
    write(tmp_path, "digits", *run_events(steps=40))
    write(
        tmp_path,
        "good",
        started("good", lr=0.1),
        said(1, accuracy=0.9),
        said(2, accuracy=0.5),
        RunEnded(t=BEGAN + 9, outcome="failed", step=2, message="no memory"),
    )
    write(tmp_path, "gone", started("gone", seed=1, lr=0.2), said(3, accuracy=0.3))
    write(
        tmp_path,
        "nas",
        CampaignStarted(
            t=BEGAN + 500,
            name="nas",
            objectives={"accuracy": "max"},
            budget={},
            searcher="Evolution",
            inherit="lcs",
            known=0,
            versions={},
        ),
        TrialLost(t=BEGAN + 550, trial=0, attempt=1, cause="died"),
        TrialLost(t=BEGAN + 560, trial=0, attempt=2, cause="OSError: busy", raised=True),
        TrialEnded(
            t=BEGAN + 600,
            trial=0,
            state="finished",
            values={"accuracy": 0.7},
            metrics={},
            ref="",
            epochs=1,
            lineage_epochs=1,
            inherited=0,
            seconds=1,
            best=True,
        ),
        CampaignEnded(t=BEGAN + 601, outcome="finished", trials=1, best=0),
    )
    with Store(tmp_path) as models:
        ref = models.put(State({"w": torch.ones(250)}))
        other = models.put(State({"w": torch.zeros(250)}))
        models.tag("good/last", ref)
        models.tag("good/best", ref)
        models.tag("good/step-1", other)
        models.tag("mine", other)
    return tmp_path


def run(store, *words, code=0, answer=None):
    if "--store" not in words:
        words = (*words, "--store", str(store))
    result = CliRunner().invoke(cli.app, ["runs", *words], input=answer)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def listed(store, *words):
    found = json.loads(run(store, "--store", str(store), "--json", *words).stdout)
    return {entry["name"]: entry for entry in found}


def test_all_of_a_store_are_listed_the_latest_first(store):
    found = listed(store)
    assert list(found) == ["nas", "good", "digits", "gone"]
    states = {name: entry["state"] for name, entry in found.items()}
    assert states == {
        "nas": "finished",
        "digits": "finished",
        "good": "failed",
        "gone": "stopped",
    }
    assert found["good"]["best"] == {"metric": "accuracy", "value": 0.9, "step": 1}
    assert (found["good"]["bytes"], found["digits"]["bytes"]) == (2000, 0)
    assert (found["nas"]["kind"], found["nas"]["steps"]) == ("campaign", 1)
    assert found["nas"]["metrics"] == {"accuracy": 0.7}
    assert found["nas"]["losses"] == 1
    header, *lines = run(store, "--store", str(store)).stdout.splitlines()
    assert header.split("\t")[:4] == ["run", "kind", "state", "steps"]
    assert len(lines) == 4
    assert all(len(line.split("\t")) == len(header.split("\t")) for line in lines)
    shown = [line.split("\t")[4:7] for line in lines]
    assert shown[0] == ["accuracy 0.7", "-", "1"]  # of the campaign's best trial
    assert shown[1] == ["accuracy 0.9 (step 1)", "accuracy 0.5", "0"]
    rows = Site(store).runs().sections[0].tables[0].rows
    cells = {row[0].text: [cell.text for cell in row[4:7]] for row in rows}
    assert cells["nas"] == ["accuracy 0.7", "", "1"]
    assert cells["good"] == ["accuracy 0.9", "accuracy 0.5", "0"]


def test_a_summary_says_what_the_whole_journal_says(store):
    progress = Progress()
    for event in read(store / "runs" / "digits" / "journal.jsonl"):
        progress.add(event)
    found = catalogue.summary(store, "digits")
    assert (found.steps, found.losses) == (progress.step, len(progress.losses))
    assert found.metrics == progress.metrics
    assert found.last_t == progress.last_t


def test_time_in_which_nothing_ran_is_none_of_a_runs(store):
    """It was killed, and somebody went on with it the next day."""
    day = 86_400
    events = [
        started("twice"),
        said(1, t=BEGAN + 5),
        started("twice", t=BEGAN + day),
        Resumed(t=BEGAN + day, step=1, ref=""),
        said(2, t=BEGAN + day + 7),
    ]
    write(store, "twice", *events)
    progress = Progress()
    for event in events:
        progress.add(event)
    assert catalogue.summary(store, "twice").took_s == progress.took_s == 12.0
    told = dict(row.split("\t") for row in run(store, "show", "twice").stdout.splitlines())
    assert told["took"] == "0:12"


def test_the_last_step_of_a_killed_process_counts_as_its_time(store):
    events = list(run_events(steps=40))
    last = max(n for n, event in enumerate(events) if isinstance(event, StepCommitted))
    began, ended = events[0].t, events[last].t
    write(store, "again", *events[: last + 1], started("again", t=ended + 1000.0))
    assert catalogue.summary(store, "again").took_s == ended - began


def ended(trial, state, score, best):
    counts = {"epochs": 1.0, "lineage_epochs": 1.0, "inherited": 0.0, "seconds": 1.0}
    values = {} if score is None else {"accuracy": score}
    about = {"values": values, "metrics": {}, "ref": "", "best": best}
    return TrialEnded(t=BEGAN + trial, trial=trial, state=state, **about, **counts)


def test_of_a_campaign_trials_that_ran_count_and_a_control_decides_on_the_best(store):
    begun = CampaignStarted(
        t=BEGAN,
        name="nas-2",
        objectives={"accuracy": "max"},
        budget={},
        searcher="Evolution",
        inherit="lcs",
        known=0,
        versions={},
    )
    write(
        store,
        "nas-2",
        begun,
        ended(0, "refused", None, best=False),
        ended(1, "finished", 0.9, best=True),
        ended(2, "finished", 0.8, best=False),  # the same from scratch
        CampaignEnded(t=BEGAN + 3, outcome="finished", trials=2, best=2),
    )
    found = catalogue.summary(store, "nas-2")
    assert found.steps == 2, "the gate refused one"
    assert found.best_trial == {"accuracy": 0.8}


def test_who_writes_the_journal_is_running_and_is_not_removed(store):
    with Journal(store / "runs" / "gone" / "journal.jsonl"):
        assert listed(store)["gone"]["state"] == "running"
        for words in (("gone",), ("good", "gone")):  # before anything is removed, or asked
            told = run(store, "rm", *words, code=1).stderr
            assert f"is written by process {os.getpid()} on " in told
            assert "Nothing was removed" in told
    assert listed(store)["gone"]["state"] == "stopped"
    assert (store / "runs" / "good").exists()


def test_a_run_that_has_just_begun_is_not_removed(store):
    """Its driver owns it before there is a journal to write."""
    with Lock(store / "runs" / "gone" / "driver.lock", "run 'gone' is being trained"):
        told = run(store, "rm", "gone", "--yes", code=1).stderr
        assert f"run 'gone' of this store is at work by process {os.getpid()} on " in told
    assert (store / "runs" / "gone" / "journal.jsonl").is_file()
    run(store, "rm", "gone", "--yes")
    assert not list((store / "runs").glob("*gone*"))


def test_a_detached_run_whose_controller_was_killed_is_not_removed(store):
    """Ray starts it anew, and workers train meanwhile. Their journal and States were removed."""
    lock = store / "runs" / "gone" / "journal.lock"
    child = os.fork()
    if not child:
        try:
            held = Journal(lock.with_name("journal.jsonl"), stays=True)  # noqa: F841 - it is held
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(2):  # the first attempt must not take the sign away
        told = run(store, "rm", "gone", "--yes", code=1).stderr
        assert f"process {child} on " in told
        assert "Nothing was removed" in told
    assert lock.with_name("journal.jsonl").is_file()
    lock.unlink()  # as it says, where the cluster is gone
    run(store, "rm", "gone", "--yes")
    assert not lock.parent.exists()


def test_nobody_begins_a_run_while_it_is_removed(store, monkeypatch):
    """And whoever waited for that has a lock that others see."""
    path = store / "runs" / "gone" / "driver.lock"
    seen = []

    def retired(_store, _ref):
        with pytest.raises(Conflict):
            Lock(path, "it is held")
        with pytest.raises(Conflict):
            Journal(path.with_name("journal.jsonl"))
        seen.append(True)

    with Store(store) as models:
        models.tag("gone/step-3", models.put(State({"w": torch.ones(3)})))
    monkeypatch.setattr(Store, "retire", retired)
    run(store, "rm", "gone", "--yes")
    assert seen
    assert not path.parent.exists()


def test_what_a_killed_removal_left_goes_with_the_next(store):
    left = store / "runs" / ".removed-0123" / "journal.jsonl"
    left.parent.mkdir()
    left.write_text(line())
    assert sorted(listed(store)) == ["digits", "gone", "good", "nas"]
    run(store, "rm", "gone", "--yes")
    assert sorted(path.name for path in (store / "runs").iterdir()) == [
        ".notes.lock",
        "digits",
        "good",
        "nas",
    ]


def test_steps_after_the_state_gone_back_to_do_not_count(store):
    events = list(run_events(steps=20, ended=False))
    write(store, "back", *events, Resumed(t=events[-1].t, step=5, ref="x"))
    assert catalogue.summary(store, "back").steps == 5


def test_a_damaged_journal_is_listed_as_such_and_hides_no_other(store):
    (store / "runs" / "gone" / "journal.jsonl").write_text('{"event":"RunStarted"}\n')
    (store / "runs" / "good" / "journal.jsonl").write_text("garbage\n")
    result = run(store, "--store", str(store), "--json")
    states = {entry["name"]: entry["state"] for entry in json.loads(result.stdout)}
    assert (states["gone"], states["good"], states["digits"]) == ("damaged", "damaged", "finished")
    assert "is no event" in result.stderr


def test_a_run_that_a_later_version_wrote_is_not_called_damaged(store):
    path = store / "runs" / "gone" / "journal.jsonl"
    with Journal(path) as journal:
        end = journal._end[1]
    with path.open("ab") as file:
        file.write(sealed_lines.seal(b'{"event":"Resumed","t":3.0,"whence":[7]}', end)[0])
    result = run(store, "--store", str(store), "--json")
    states = {entry["name"]: entry["state"] for entry in json.loads(result.stdout)}
    assert (states["gone"], states["digits"]) == ("too new", "finished")
    assert "another version of elastix" in result.stderr


def test_notes_and_tags_stay_and_find_a_run_again(store):
    run(store, "note", "good", "ran out of memory")
    run(store, "tag", "good", "memory", "keep")
    run(store, "tag", "good", "memory")
    assert listed(store, "--tag", "memory")["good"]["tags"] == ["keep", "memory"]
    run(store, "tag", "good", "keep", "--delete")
    shown = json.loads(run(store, "show", "good", "--json").stdout)
    assert (shown["note"], shown["tags"]) == ("ran out of memory", ["memory"])
    assert "no memory" in run(store, "show", "good").stdout
    told = dict(row.split("\t") for row in run(store, "show", "good").stdout.splitlines())
    datetime.strptime(told["began"], "%Y-%m-%d %H:%M")  # for people; JSON has seconds
    assert not {"began_t", "last_t", "bytes"} & set(told)
    assert listed(store, "--tag", "nothing") == {}


TAGS = """
import sys
from datetime import datetime
from pathlib import Path
from elastix.observe import notes
directory, mine = Path(sys.argv[1]), sys.argv[2]
print("up", flush=True)
sys.stdin.readline()
for number in range(25):
    notes.change(directory, tags=lambda tags: [*tags, f"{mine}-{number}"])
"""


def test_of_tags_given_at_the_same_time_none_is_lost(store):
    """By processes that begin together; one of them is killed on the way."""
    directory = store / "runs" / "good"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", TAGS, directory, mine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for mine in "abc"
    ]
    for writer in writers:
        assert writer.stdout.readline() == "up\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    while not any(tag.startswith("c-") for tag in notes.read(directory).tags):
        assert writers[2].poll() is None
    writers[2].kill()
    for writer in writers:
        writer.communicate()
    wanted = {f"{mine}-{number}" for mine in "ab" for number in range(25)}
    tags = notes.read(directory).tags
    assert wanted <= set(tags)
    killed = [int(tag[2:]) for tag in tags if tag not in wanted]
    assert killed == list(range(len(killed)))
    assert len(set(tags)) == len(tags)


def test_a_run_that_was_removed_is_not_made_again_by_a_note(store):
    directory = store / "runs" / "good"
    shutil.rmtree(directory)
    with pytest.raises(StoreError, match="Nothing was changed"):
        notes.change(directory, note="too late")
    assert not directory.exists()


def test_a_note_is_on_the_disk_before_it_takes_the_place_of_the_one_before(store, monkeypatch):
    directory = store / "runs" / "good"
    notes.change(directory, note="before")
    there = set(directory.iterdir())

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(notes.os, "fsync", full)
        with pytest.raises(Full, match=r"No space left on device.*Nothing was changed"):
            notes._write(directory, notes.Notes("after"))
    assert notes.read(directory).note == "before"
    assert set(directory.iterdir()) == there


def test_what_a_killed_writer_of_a_note_left_is_no_obstacle_and_not_followed(store):
    directory, elsewhere = store / "runs" / "good", store / "elsewhere"
    elsewhere.write_text("mine")
    (directory / ".notes.json.draft").symlink_to(elsewhere)
    notes.change(directory, note="after")
    assert notes.read(directory).note == "after"
    assert elsewhere.read_text() == "mine"


def test_what_is_removed_takes_its_states_along_but_none_that_others_name(store):
    (found,) = json.loads(run(store, "rm", "good", "--yes", "--json").stdout)
    assert (found["run"], found["states"], len(found["kept"])) == ("good", 1, 1)
    assert not (store / "runs" / "good").exists()
    with Store(store, read_only=True) as models:
        assert set(models.tags()) == {"mine"}
        assert len(models.log()) == 1


def test_a_campaign_goes_with_the_runs_of_its_trials_and_no_other(store):
    trial = replace(started("nas-00000", seed=5), order_seed=0)
    write(store, "nas-00000", trial)
    write(store, "nas-00001", started("nas-00001"))  # a user's, of that name by chance
    with Store(store) as models:
        ref = models.put(State({"w": torch.full((250,), 2.0)}))
        models.tag("nas-00000/last", ref)
        models.tag("nas-00001/last", models.put(State({"w": torch.full((250,), 3.0)})))
    (found,) = json.loads(run(store, "rm", "nas", "--yes", "--json").stdout)
    assert (found["run"], found["states"]) == ("nas", 1)
    assert catalogue.names(store) == ["digits", "gone", "good", "nas-00001"]
    with Store(store, read_only=True) as models:
        assert "nas-00000/last" not in models.tags()
        assert "nas-00001/last" in models.tags()


def test_with_a_campaign_go_the_models_of_trials_that_nobody_heard_of(store):
    """A driver that was killed as one ended, say; others of that name would inherit from them."""
    with Store(store) as models:
        theirs = [
            models.put(State({"w": torch.full((250,), float(n))}, {"campaign": name, "trial": n}))
            for n, name in enumerate(["killed", "killed", "other"])
        ]
    facts = {"name": "killed", "metrics": ["score"], "modes": ["max"], "searcher": "Random"}
    with TrialDatabase(store / "runs" / "killed") as database:
        trial = Trial(0, Suggestion({"x": 1}), TrialState.FINISHED, ref=theirs[0])
        database.commit([TrialRow(trial)], {"campaign": {**facts, "budget": {}, "began_s": 0.0}})
    write(store, "killed", CampaignEnded(t=BEGAN, outcome="interrupted", trials=0, best=-1))
    (found,) = json.loads(run(store, "rm", "killed", "--yes", "--json").stdout)
    assert found["states"] == 2
    with Store(store, read_only=True) as models:
        assert not {*theirs[:2]} & {entry.ref for entry in models.log()}
        assert theirs[2] in {entry.ref for entry in models.log()}


def test_a_campaign_is_not_removed_while_one_of_its_trials_runs(store):
    write(store, "nas-00000", replace(started("nas-00000"), order_seed=0))
    with Journal(store / "runs" / "nas-00000" / "journal.jsonl"):
        assert "nas-00000" in run(store, "rm", "nas", "--yes", code=1).stderr
    assert {path.name for path in (store / "runs").iterdir()} >= {"nas", "nas-00000"}


def test_a_campaign_with_a_damaged_database_is_removed_and_its_models_are_said_to_stay(store):
    (store / "runs" / "nas" / "campaign.sqlite").write_bytes(b"SQLite format 3\0" + bytes(50))
    result = run(store, "rm", "nas", "--yes")
    assert "the trial database of 'nas' is damaged" in result.stderr
    assert "nas" not in catalogue.names(store)


def test_of_a_run_elsewhere_the_link_is_removed(store, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "good"
    shutil.move(store / "runs" / "good", elsewhere)
    (store / "runs" / "good").symlink_to(elsewhere)
    run(store, "rm", "good", "--yes")
    assert list((store / "runs").glob(".removed-*")) == []
    assert (elsewhere / "journal.jsonl").exists()


def test_removal_asks_and_a_no_removes_nothing(store):
    run(store, "rm", "good", answer="n\n", code=1)
    assert (store / "runs" / "good").exists()
    run(store, "rm", "good", "digits", "nowhere", "--yes", code=1)
    assert (store / "runs" / "digits").exists()
    assert "directory" in run(store, "rm", "../runs", "--yes", code=2).stderr


def test_a_comparison_has_what_differs_and_a_page_with_the_curves(store):
    result = run(store, "compare", "good", "gone", "--json")
    found = json.loads(result.stdout)
    assert found["settings"] == {"seed": [0, 1], "config.lr": [0.1, 0.2]}
    assert "good" in (store / "runs" / "compare.html").read_text()
    twice = json.loads(run(store, "compare", "good", "gone", "good", "--json").stdout)
    assert twice == found, "a run that is named twice has one column"
    assert "give two runs" in run(store, "compare", "good", "good", code=2).stderr
    assert "there is no run" in run(store, "compare", "good", "god", code=1).stderr


def test_list_and_the_store_before_a_subcommand_mean_what_they_say(store):
    bare = ["runs", "--store", str(store)]
    listed = CliRunner().invoke(cli.app, [*bare, "list"])
    assert listed.stdout == run(store).stdout
    shown = CliRunner().invoke(cli.app, [*bare, "show", "good", "--json"])
    assert shown.stdout == run(store, "show", "good", "--json").stdout


@pytest.mark.parametrize("tag", ["", " ", "to keep"])
def test_a_tag_is_one_word(store, tag):
    assert "is no tag" in run(store, "tag", "good", "fine", tag, code=2).stderr
    assert catalogue.summary(store, "good").tags == ()


def test_nothing_there_is_said(tmp_path):
    assert "has no runs" in run(tmp_path, "--store", str(tmp_path)).stderr
    assert "no directory" in run(tmp_path, "--store", str(tmp_path / "x"), code=1).stderr
    assert "It has no runs" in run(tmp_path, "show", "x", code=1).stderr


def line(**changes):
    record = to_record(started("odd"))
    return json.dumps({**record, **changes}) + "\n"


def as_fifo(path):
    path.unlink()
    os.mkfifo(path)


def as_link(path):
    path.unlink()
    path.symlink_to("/nowhere")


DAMAGE = {
    "a time that is text": lambda path: path.write_text(line(t="x")),
    "no time": lambda path: path.write_text(line(t=None)),
    "a time that is no number": lambda path: path.write_text(line(t=float("nan"))),
    "a time without a date": lambda path: path.write_text(line(t=1e30)),
    "a time before all": lambda path: path.write_text(line(t=-1e15)),
    "a config that is a list": lambda path: path.write_text(line(config=[1])),
    "a name that is a number": lambda path: path.write_text(line(name=1)),
    "a lock that is a folder": lambda path: path.with_suffix(".lock").mkdir(),
    "a lock that leads away": lambda path: path.with_suffix(".lock").symlink_to("/etc/hostname"),
    "notes that are a folder": lambda path: (path.parent / "notes.json").mkdir(),
    "notes that are a pipe": lambda path: os.mkfifo(path.parent / "notes.json"),
}
NO_RUN = {
    "a pipe": as_fifo,
    "a link to nowhere": as_link,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize(
    ("damage", "left"),
    [(d, ["digits", "odd"]) for d in DAMAGE.values()] + [(d, ["digits"]) for d in NO_RUN.values()],
    ids=[*DAMAGE, *NO_RUN],
)
def test_one_run_that_cannot_be_read_takes_no_other_with_it(tmp_path, damage, left):
    """Neither from the list nor from the page of all runs."""
    write(tmp_path, "digits", *run_events(steps=40))
    path = tmp_path / "runs" / "odd" / "journal.jsonl"
    path.parent.mkdir()
    path.write_text(line())
    damage(path)
    listed = {summary.name: summary for summary in catalogue.summaries(tmp_path)}
    assert sorted(listed) == left
    assert listed["digits"].state == "finished"
    assert "odd" not in listed or listed["odd"].state == "damaged"
    found = CliRunner().invoke(cli.app, ["runs", "--store", str(tmp_path)])
    assert found.exit_code == 0, found.output
    rows = Site(tmp_path).runs().sections[0].tables[0].rows
    assert sorted(row[0].text for row in rows) == left


NO_NAMES = (
    "..x",
    "...",
    "-rf",
    "two\nlines",
    "\x1b[2Jgone",
    "tab\there",
    " ",
    "ü",
    "x" * 101,
    "\udcff",
)


def test_folders_that_no_run_can_be_named_after_are_left_out_and_said(store):
    for name in NO_NAMES:
        (store / "runs" / name).mkdir()
        (store / "runs" / name / "journal.jsonl").write_text(line())
    found = run(store, "--store", str(store))
    assert len(found.stdout.splitlines()) == 5
    assert "8 folders" in found.stderr  # hidden ones are nobody's business
    assert "\x1b" not in found.output
    assert sorted(listed(store)) == catalogue.names(store) == ["digits", "gone", "good", "nas"]
    assert len(Site(store).runs().sections[0].tables[0].rows) == 4
    for name in NO_NAMES:
        for verb, *rest in (["show"], ["note", "text"], ["tag", "text"], ["rm"]):
            told = run(store, verb, "--store", str(store), "--", name, *rest, code=2)
            assert "a run's name is" in told.stderr
            assert "\x1b" not in told.output
        assert (store / "runs" / name / "journal.jsonl").is_file()


def test_what_a_journal_says_does_not_steer_a_terminal(store):
    evil = "\x1b]0;owned\x07\r\n[bold]x"
    write(store, "evil", started("evil", **{evil: evil}), said(1, **{evil: 0.5}))
    notes.change(store / "runs" / "evil", note=evil, tags=lambda _tags: [evil])
    for words, code in (
        (("--store", str(store)), 0),
        (("show", "evil"), 0),
        (("tag", "evil", evil), 2),
    ):
        told = run(store, *words, code=code).output
        assert not {"\x1b", "\x07", "\r"} & set(told)


def test_a_run_that_is_removed_while_runs_are_listed_is_left_out(tmp_path):
    write(tmp_path, "digits", *run_events(steps=40))
    write(tmp_path, "gone", started("gone"))
    found = catalogue.summaries(tmp_path)
    assert next(found).name == "digits"
    (tmp_path / "runs" / "gone" / "journal.jsonl").unlink()
    assert list(found) == []


def test_a_model_with_the_score_zero_is_sorted_by_it(tmp_path):
    with Store(tmp_path) as store:
        scored = store.put(State({"w": torch.zeros(1)}), score=0.0)
        store.put(State({"w": torch.ones(1)}))
    rows = Site(tmp_path).models().sections[0].tables[0].rows
    assert {row[0].key == scored: (row[2].text, row[2].key) for row in rows} == {
        True: ("0", 0.0),
        False: ("", ""),
    }


def test_the_page_of_a_model_whose_parent_was_stored_after_it_is_its_own(tmp_path):
    parent = State({"w": torch.zeros(1)})
    with Store(tmp_path) as store:
        child = store.put(State({"w": torch.ones(1)}), parents=[parent.manifest().ref])
        store.put(parent)
    page = Site(tmp_path).model(child)
    assert page.name == child[:12]
    assert [row[0].text for row in page.sections[0].tables[1].rows] == ["ancestor"]
    assert len(page.sections) == 2  # the second: how it differs from its parent


def test_a_model_that_is_retired_as_its_page_is_made_is_not_found(tmp_path, monkeypatch):
    with Store(tmp_path) as store:
        ref = store.put(State({"w": torch.zeros(1)}))
        rows = Ledger.rows
        monkeypatch.setattr(Ledger, "rows", lambda *asked: store.retire(ref) or rows(*asked))
        with pytest.raises(NotFound, match="retired"):
            Site(tmp_path).model(ref)


def test_a_model_whose_parent_is_retired_as_its_page_is_made_has_a_page(tmp_path, monkeypatch):
    with Store(tmp_path) as store:
        parent = store.put(State({"w": torch.zeros(1)}))
        child = store.put(State({"w": torch.ones(1)}), parents=[parent])
        diff = Store.diff
        monkeypatch.setattr(Store, "diff", lambda *asked: store.retire(parent) or diff(*asked))
        assert len(Site(tmp_path).model(child).sections) == 1


def test_the_bytes_of_a_run_are_those_of_its_tagged_models_each_once(tmp_path):
    write(tmp_path, "digits", *run_events(steps=40))
    with Store(tmp_path) as store:
        for size, tags in ((10, ("digits/latest", "digits/best")), (20, ("digits/final",))):
            ref = store.put(State({"w": torch.zeros(size)}))
            for tag in tags:
                store.tag(tag, ref)
        store.put(State({"w": torch.zeros(30)}))
    assert listed(tmp_path)["digits"]["bytes"] == 4 * (10 + 20)
