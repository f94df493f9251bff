"""`elastix campaign` and `elastix report` on a real trial database with trials in every state."""

import json
import os
import pty
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ConfigSpace import ConfigurationSpace, Float
from typer.testing import CliRunner

import elastix
from elastix import cli
from elastix.events import RunStarted
from elastix.observe import journal
from elastix.observe.journal import Journal
from elastix.report import report_page, write_report
from elastix.report.site import Site
from elastix.report.sources import campaign_record
from elastix.search.executors.serial import Local
from elastix.search.results import Results
from elastix.search.trial import Suggestion, Trial, TrialState
from elastix.search.trial_database import TrialDatabase, TrialRow
from tests.report_data import run_events

SPACE = ConfigurationSpace(space=[Float("x", (0.0, 1.0))], seed=1)
TOLD = {"finished", "stopped", "failed", "interrupted", "waiting", "paused", "refused"}
"""What is said of these where no process runs the campaign."""
STATES = ("finished", "stopped", "failed", "running", "waiting", "paused", "refused")
HOSTILE = "\x1b]0;owned\x07[red]gone[/b] [link=https://example.org]click[/link]"


def train(ctx: elastix.Context) -> None:
    if 0.4 < ctx.config["x"] < 0.6:
        raise ValueError(f"unlucky {HOSTILE}")
    ctx.report(score=ctx.config["x"], loss=float("nan"), note=HOSTILE)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A campaign that ended, with trials as a stop in the middle of anything leaves them."""
    root = tmp_path_factory.mktemp("store")
    run = elastix.RunConfig(name="mixed", store=str(root))
    elastix.Campaign(
        train,
        space=SPACE,
        searcher=elastix.Evolution(),  # it tries what is bad, too, so that some trials fail
        metric="score",
        budget=elastix.Budget(trials=12),
        run=run,
        executor=Local(),
        inherit=elastix.InheritConfig(mode="none"),
        quiet=True,
    ).run()
    with TrialDatabase(run.directory) as database:
        number = len(database.lines())
        for state in ("stopped", "running", "waiting", "paused", "refused"):
            suggestion = Suggestion({"x": number / 100})
            database.commit([TrialRow(Trial(number, suggestion, TrialState(state)))])
            number += 1
        assert {line.trial.state.value for line in database.lines()} == set(STATES)
    return root


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == code, result.output
    return result.output


def strict(text: str):
    """JSON as its standard has it: without NaN."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_report_has_a_row_for_every_trial(store):
    record = campaign_record(
        store, "mixed", journal.read(store / "runs" / "mixed" / "journal.jsonl")
    )
    assert {trial.state for trial in record.trials} == TOLD
    assert all(trial.values == () for trial in record.trials if trial.state == "failed")
    page = write_report("mixed", store).read_text()
    assert all(f">{state}<" in page for state in TOLD)


def test_the_table_has_a_row_for_every_trial(store):
    head, *lines = run("campaign", "show", "mixed", "--top", "0", "-s", str(store)).splitlines()
    assert head.split("\t")[:3] == ["trial", "state", "score"]
    assert len(lines) == 17
    assert {line.split("\t")[1] for line in lines} == TOLD
    found = strict(run("campaign", "show", "mixed", "--top", "0", "--json", "-s", str(store)))
    column = head.split("\t").index("memory")
    assert {line.split("\t")[column] == "-" for line in lines} == {True, False}
    assert (found["refused"], found["starved"]) == (1, 0)
    best = run("campaign", "show", "mixed", "--top", "2", "-s", str(store))
    assert "the best 2 trials; 15 more are there: --top 0 shows all" in best
    scored = sum(line.split("\t")[2] != "-" for line in lines)
    fewer = run("campaign", "show", "mixed", "--top", "16", "-s", str(store))
    assert f"trials with a score: {scored}; {17 - scored} more are there" in fewer
    ran = [trial for trial in found["trials_shown"] if trial["peak_bytes"]]
    assert len(ran) == 12
    unscored = [t for t in found["trials_shown"] if t["state"] in ("failed", "waiting")]
    assert unscored
    assert all(trial["values"] == {} for trial in unscored)


def test_trials_run_while_a_process_runs_their_campaign_and_are_interrupted_if_none_does(store):
    where = ("--json", "-s", str(store))

    def told():
        (listed,) = strict(run("campaign", "list", *where))
        shown = strict(run("campaign", "show", "mixed", "--top", "0", *where))
        states = [trial["state"] for trial in shown["trials_shown"]]
        counts = [(states.count(state), listed[state], shown[state]) for state in said]
        record = campaign_record(store, "mixed", [])
        return [*counts, {trial.state for trial in record.trials}.intersection(said)]

    said = ("running", "interrupted")
    assert told() == [(0, 0, 0), (1, 1, 1), {"interrupted"}]
    with TrialDatabase(store / "runs" / "mixed"):
        assert told() == [(1, 1, 1), (0, 0, 0), {"running"}]


def test_controls_that_failed_are_shown_among_what_failed(store, tmp_path):
    """Nothing said why the best could not be trained again."""
    moved = shutil.copytree(store, tmp_path / "moved")
    run_of = elastix.RunConfig(name="mixed", store=str(moved))
    failed = Trial(90, Suggestion({"x": 0.9}), TrialState.FAILED, traceback="OSError: no disk")
    with TrialDatabase(run_of.directory) as database:
        database.commit([TrialRow(failed, "rerank", 90)])
    shown = run("campaign", "show", "mixed", "--failed", "-s", str(moved))
    assert "90\tOSError: no disk" in shown


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    with elastix.Store(root) as opened:
        tensors = {f"w{HOSTILE}": torch.zeros(2)}
        ref = opened.put(elastix.State(tensors, {"note": HOSTILE, "loss": float("nan")}))
        opened.put(elastix.State({"v": torch.zeros(1)}, {"note": "[/b]"}), parents=[ref])
        opened.tag("odd", ref)
    return root


def on_a_terminal(*words: str) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    code = "from elastix.cli import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "250", "TERM": "xterm-256color"},
    )
    os.close(theirs)
    told = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        told += part
    os.close(ours)
    return process.wait(), told.decode()


def test_what_a_user_named_does_not_steer_a_terminal(hostile, store):
    for words in (
        ("store", "show", "odd", "-s", str(hostile)),
        ("campaign", "show", "mixed", "--failed", "-s", str(store)),
    ):
        code, told = on_a_terminal(*words)
        assert code == 0, told
        assert "[red]gone[/b]" in told
        assert "\x1b]" not in told, "no title, no hyperlink"
        assert "\x07" not in told


def test_what_a_user_named_stays_a_line_on_a_pipe(hostile):
    for words in (("store", "show", "odd"), ("store", "diff", "odd", "odd")):
        assert "\x1b" not in run(*words, "-s", str(hostile))
    assert "\x1b" not in run("store", "show", "x\x1b[31m\ny", "-s", str(hostile), code=1)


def test_json_for_programs_has_no_nan(hostile):
    shown = strict(run("store", "show", "odd", "--json", "-s", str(hostile)))
    assert shown["meta"]["loss"] is None
    assert strict(run("store", "log", "--json", "-s", str(hostile)))


@pytest.mark.parametrize("name", ["../../outside", "a/../mixed", "/etc", "..", "", "mixed/"])
def test_a_runs_name_does_not_lead_out_of_the_store(store, tmp_path, name):
    outside = store.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "journal.jsonl").write_bytes(
        (store / "runs" / "mixed" / "journal.jsonl").read_bytes()
    )
    for verb, done in ((("report",), "done"), (("campaign", "show"), "started")):
        told = run(*verb, name, "-s", str(store), code=2)
        assert f"Nothing was {done}" in " ".join(told.split())
    assert [path.name for path in outside.iterdir()] == ["journal.jsonl"]


def test_a_campaign_leads_to_the_run_of_its_best_trial_and_back(store):
    """In files, which need no server, and on the site; without such a run nowhere."""
    write_report("mixed", store)
    page = (store / "runs" / "mixed" / "report.html").read_text()
    assert "best trial" not in page
    best = Results.open(store, "mixed").best.trial.number
    trial, other = f"mixed-{best:05d}", f"mixed-{best + 1:05d}"
    for name in (trial, other, "mixed-1", "lonely-00001"):
        with Journal(store / "runs" / name / "journal.jsonl") as journal:
            for event in run_events(steps=20):
                trial_of_it = isinstance(event, RunStarted)
                journal.append(replace(event, order_seed=0) if trial_of_it else event)
    try:
        target = write_report("mixed", store)
        assert f'href="../{trial}/report.html"' in target.read_text()
        back = store / "runs" / trial / "report.html"
        assert 'href="../mixed/report.html"' in back.read_text()
        assert not (store / "runs" / other / "report.html").exists()
        before = back.stat().st_mtime_ns
        write_report("mixed", store)
        assert back.stat().st_mtime_ns == before  # nothing has happened since
        for name in ("mixed-1", "lonely-00001"):
            assert not report_page(name, store).kin
        site = Site(store)
        assert (f"best trial: {trial}", f"/run/{trial}") in site.run("mixed").links
        for name in (trial, other):
            assert ("campaign mixed", "/run/mixed") in site.run(name).links
        elsewhere = write_report("mixed", store, store / "elsewhere.html").read_text()
        assert "../" + trial not in elsewhere  # it could be anywhere
    finally:
        for name in (trial, other, "mixed-1", "lonely-00001"):
            shutil.rmtree(store / "runs" / name)


def test_a_store_without_campaigns_is_said_to_be_and_a_wrong_folder_too(tmp_path):
    missing = CliRunner().invoke(cli.app, ["campaign", "list", "--store", str(tmp_path / "none")])
    assert missing.exit_code == 1
    assert "there is no directory" in missing.output
    empty = CliRunner().invoke(cli.app, ["campaign", "list", "--store", str(tmp_path)])
    assert empty.exit_code == 0
    assert f"{tmp_path} has no campaigns" in empty.stderr
    for asked in (["campaign", "list"], ["report", "run"], ["runs", "list"]):  # not of this folder
        unset = CliRunner().invoke(cli.app, [*asked, "--store", ""])
        assert unset.exit_code == 2
        assert "it is empty" in unset.output


def test_any_limit_of_a_budget_can_be_raised_by_command(tmp_path, monkeypatch):
    made = elastix.Campaign(
        train,
        space=SPACE,
        metric="score",
        budget=elastix.Budget(trials=1),
        run=elastix.RunConfig(name="small", store=str(tmp_path)),
        executor=Local(),
        inherit=elastix.InheritConfig(mode="none"),
        quiet=True,
    )
    results, asked = made.run(), []
    monkeypatch.setattr(elastix.Campaign, "run", lambda self: asked.append(self.budget) or results)
    limits = [name for name in vars(made.budget) if name != "parallel"]  # `Local` has its own
    given = [f"--{name.replace('_', '-')}=2" for name in limits]
    ended = CliRunner().invoke(
        cli.app, ["campaign", "resume", "small", f"--store={tmp_path}", *given]
    )
    assert ended.exit_code == 0, ended.output
    assert asked == [elastix.Budget(trials=2, time_s=2.0, epochs=2.0)]
