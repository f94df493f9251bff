"""`elastix runs` on real journals and a real store: listed, shown, noted, removed, compared."""

import json

import pytest
import torch
from typer.testing import CliRunner

from elastix import cli
from elastix.events import (
    CampaignEnded,
    CampaignStarted,
    Reported,
    Resumed,
    RunEnded,
    RunStarted,
    TrialEnded,
)
from elastix.observe import catalogue
from elastix.observe.journal import Journal, read
from elastix.observe.progress import Progress
from elastix.state import State
from elastix.store import Store
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
    header, *lines = run(store, "--store", str(store)).stdout.splitlines()
    assert header.split("\t")[:4] == ["run", "kind", "state", "steps"]
    assert len(lines) == 4
    assert all(len(line.split("\t")) == len(header.split("\t")) for line in lines)


def test_a_summary_says_what_the_whole_journal_says(store):
    progress = Progress()
    for event in read(store / "runs" / "digits" / "journal.jsonl"):
        progress.add(event)
    found = catalogue.summary(store, "digits")
    assert (found.steps, found.losses) == (progress.step, len(progress.losses))
    assert found.metrics == progress.metrics
    assert found.last_t == progress.last_t


def test_who_writes_the_journal_is_running_and_is_not_removed(store):
    with Journal(store / "runs" / "gone" / "journal.jsonl"):
        assert listed(store)["gone"]["state"] == "running"
        told = run(store, "rm", "gone", "--yes", code=1).stderr
        assert "is at work. Nothing was removed" in told
    assert listed(store)["gone"]["state"] == "stopped"


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


def test_notes_and_tags_stay_and_find_a_run_again(store):
    run(store, "note", "good", "ran out of memory")
    run(store, "tag", "good", "memory", "keep")
    run(store, "tag", "good", "memory")
    assert listed(store, "--tag", "memory")["good"]["tags"] == ["keep", "memory"]
    run(store, "tag", "good", "keep", "--delete")
    shown = json.loads(run(store, "show", "good", "--json").stdout)
    assert (shown["note"], shown["tags"]) == ("ran out of memory", ["memory"])
    assert "no memory" in run(store, "show", "good").stdout
    assert listed(store, "--tag", "nothing") == {}


def test_what_is_removed_takes_its_states_along_but_none_that_others_name(store):
    (found,) = json.loads(run(store, "rm", "good", "--yes", "--json").stdout)
    assert (found["run"], found["states"], len(found["kept"])) == ("good", 1, 1)
    assert not (store / "runs" / "good").exists()
    with Store(store, read_only=True) as models:
        assert set(models.tags()) == {"mine"}
        assert len(models.log()) == 1


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
    assert "give two runs" in run(store, "compare", "good", "good", code=2).stderr
    assert "there is no run" in run(store, "compare", "good", "god", code=1).stderr


def test_nothing_there_is_said(tmp_path):
    assert "has no runs" in run(tmp_path, "--store", str(tmp_path)).stderr
    assert "there are: none" in run(tmp_path, "show", "x", code=1).stderr
