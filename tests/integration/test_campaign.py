"""Campaigns in one process: what a user calls, gets and can get wrong. Ray where it says so."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from ConfigSpace import ConfigurationSpace, ForbiddenEqualsClause, Integer
from typer.testing import CliRunner

import elastix
from elastix.cli import app
from elastix.errors import (
    ConfigError,
    Conflict,
    EmptySpace,
    EveryTrialFailed,
    NeverReported,
    NotFound,
    SearchError,
    TooNew,
)
from elastix.events import CampaignEnded, CampaignStarted, StoreMeasured, TrialEnded
from elastix.observe import journal
from elastix.search.executors import campaign_file
from elastix.search.executors.serial import Local
from elastix.search.rungs import Asha
from elastix.search.trial import TrialState
from elastix.search.trial_database import TrialDatabase
from elastix.testing.executor_contract import orders
from tests import search_parts
from tests.notes import Notes
from tests.search_parts import SPACE, Drawing

ROOT = Path(__file__).parents[2]


def campaign(tmp_path, train=search_parts.noop, trials=8, **options):
    given = {
        "space": SPACE,
        "searcher": Drawing(),
        "metric": "score",
        "budget": elastix.Budget(trials=trials),
        "run": elastix.RunConfig(name="test", store=str(tmp_path)),
        "executor": Local(),
        "quiet": True,
    }
    return elastix.Campaign(train, **{**given, **options})


def learning(tmp_path, **options):
    parents = elastix.InheritConfig(provider="parent")
    given = {"metric": "accuracy", "inherit": parents, **options}
    return campaign(tmp_path, search_parts.learns, **given)


def test_all_trials_have_their_samples_in_one_order(tmp_path):
    run = elastix.RunConfig(name="test", store=str(tmp_path), seed=3)
    results = campaign(tmp_path, orders, trials=3, run=run).run()
    told = [trial.metrics for trial in results.trials]
    assert len({metrics["order"] for metrics in told}) == 1
    assert len({metrics["weights"] for metrics in told}) == 3


def test_known_good_configurations_come_first_and_are_resumed_by_command(tmp_path):
    made = campaign(tmp_path, trials=2)
    made.enqueue({"x": 1, "depth": 2.0}, {"depth": 1, "x": 0.5})
    made.enqueue({"x": 0.25, "depth": 3})
    first = made.run()
    assert [trial.config for trial in first.trials] == [
        {"x": 1.0, "depth": 2},
        {"x": 0.5, "depth": 1},
    ]
    assert type(first.trials[0].config["depth"]) is int
    again = campaign_file.read(tmp_path / "runs" / "test")
    more = again.again(budget=elastix.Budget(trials=4), store=str(tmp_path), quiet=True)
    more._executor = Local()
    assert more.run().trials[2].config == {"x": 0.25, "depth": 3}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"x": 0.5}, "depth"),
        ({"x": 0.5, "depth": 9}, "depth"),
        ({"x": 0.5, "depth": 1, "y": 2}, "y"),
        ([0.5, 1], "mapping"),
        ("x", "mapping"),
    ],
)
def test_what_is_not_of_the_space_is_not_enqueued(tmp_path, wrong, said):
    made = campaign(tmp_path, trials=1)
    with pytest.raises(ConfigError, match=f"(?s){said}.*Nothing was enqueued"):
        made.enqueue({"x": 0.25, "depth": 3}, wrong)
    assert made.run().trials[0].config != {"x": 0.25, "depth": 3}


def test_the_journal_tells_how_large_the_store_has_become(tmp_path):
    results = learning(tmp_path).run()
    path = tmp_path / "runs" / "test" / "journal.jsonl"
    told = [event for event in journal.read(path) if isinstance(event, StoreMeasured)]
    with elastix.Store(tmp_path, read_only=True) as store:
        found = store.stats()
    assert len(told) >= 2  # after the first trial, and at the end
    assert told[-1].logical_bytes == found.logical_bytes
    assert told[-1].unique_bytes == found.unique_bytes
    assert told[0].logical_bytes < told[-1].logical_bytes
    assert results.best


def test_loggers_hear_what_the_journal_has_and_cannot_end_a_campaign(tmp_path):
    notes, broken = Notes(), Notes(fails_at=lambda event: isinstance(event, TrialEnded))
    results = campaign(tmp_path, loggers=[broken, notes]).run()
    assert len(list(results)) == 8
    assert notes.seen == list(journal.read(tmp_path / "runs" / "test" / "journal.jsonl"))
    assert notes.closed == 1
    assert not any(isinstance(event, TrialEnded) for event in broken.seen)


def test_loggers_are_closed_when_a_campaign_fails(tmp_path):
    notes = Notes()
    with pytest.raises(EveryTrialFailed):
        campaign(tmp_path, search_parts.raises, loggers=[notes]).run()
    assert isinstance(notes.seen[-1], CampaignEnded)
    assert notes.closed == 1


def test_children_begin_with_their_parents_weights_and_the_store_knows(tmp_path):
    results = learning(tmp_path).run()
    children = [trial for trial in results if trial.inherited is not None]
    assert children
    with elastix.Store(tmp_path, read_only=True) as store:
        for trial in results:
            meta = store.manifest(trial.ref).meta
            assert meta["config"] == trial.config
            assert meta["epochs"] == trial.epochs == 2
            assert meta["lineage_epochs"] == trial.lineage_epochs
            assert store.signature(trial.ref) is not None
        for child in children:
            parent = results[child.suggestion.parent_number]
            assert store.ancestors(child.ref)[0] == child.inherited["ref"] == parent.ref
            assert child.lineage_epochs == parent.lineage_epochs + 2
            assert 0 < child.inherited["share"] <= 1
        assert store.tags()["test/best"] == results.best.ref
    search_parts.Net(results.best.config["depth"]).load_state_dict(results.best.load().model)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, True),
        ({"provider": "store"}, False),
        ({"provider": "store", "optimizer": True}, True),
        ({"optimizer": False}, False),
        ({"mode": "none"}, False),
    ],
)
def test_models_are_stored_with_their_optimizer_where_children_will_take_it(
    tmp_path, options, kept
):
    inherit = elastix.InheritConfig(**{"provider": "parent", **options})
    results = learning(tmp_path, trials=2, inherit=inherit).run()
    with elastix.Store(tmp_path, read_only=True) as store:
        for trial in results:
            assert ("@optimizer" in store.manifest(trial.ref).meta) is kept


def test_without_inheritance_lineages_are_as_long_as_trials(tmp_path):
    results = learning(tmp_path, inherit=elastix.InheritConfig(mode="none"), trials=4).run()
    assert all(trial.inherited is None for trial in results)
    assert {trial.lineage_epochs for trial in results} == {2}


def test_the_store_provides_ancestors_for_a_searcher_without_parents(tmp_path):
    results = learning(
        tmp_path,
        searcher=elastix.Random(),
        trials=5,
        inherit=elastix.InheritConfig(provider="store"),
    ).run()
    assert results[0].inherited is None
    assert all(trial.inherited for trial in results[1:])


def test_asha_with_real_models(tmp_path, monkeypatch):
    def run(trials):
        options = {"rungs": Asha(first=1, eta=3, last=9), "trials": trials}
        return campaign(tmp_path, search_parts.learns_long, metric="accuracy", **options).run()

    monkeypatch.setattr(elastix.Campaign, "_tidy", lambda *_: None)  # as if killed before it
    run(7)
    monkeypatch.undo()
    with elastix.Store(tmp_path, read_only=True) as store:
        assert len(store.log()) > 7
    results = run(9)
    assert {len(trial.results) for trial in results} <= {1, 3, 9}
    assert {trial.state for trial in results} <= {TrialState.PAUSED, TrialState.FINISHED}
    assert all(trial.epochs == len(trial.results) for trial in results)
    with elastix.Store(tmp_path, read_only=True) as store:
        log = store.log()
        paused = [trial.ref for trial in results if trial.state is TrialState.PAUSED]
        beyond = {entry.ref for entry in log} - {trial.ref for trial in results}
        needed = {parent for entry in log if entry.ref in paused for parent in entry.parents}
        assert beyond <= needed, "a State that a trial went beyond is retired"
        assert len(beyond) < sum(len(trial.results) > 1 for trial in results)
        assert {"@optimizer", "@loader/0", "@rng"} <= set(store.get(paused[0]).meta)


def plain(ctx):
    """As somebody who trains without torch would write it: no model, no loader."""
    with Path(ctx.config["diary"]).open("a") as file:
        for epoch in range(1, 10):
            file.write(f"{ctx.config['x']} {epoch}\n")
            file.flush()
            ctx.report(score=ctx.config["x"] + epoch / 100)


def test_rungs_without_a_model_stop_trials_at_their_reports(tmp_path, caplog):
    searcher = Drawing(diary=str(tmp_path / "diary"))
    rungs = Asha(first=1, eta=3, last=9)
    results = campaign(tmp_path, plain, searcher=searcher, rungs=rungs, trials=12).run()
    lengths = [len(trial.results) for trial in results]
    assert set(lengths) == {1, 3, 9}
    assert lengths.count(1) >= 6
    assert [t.state for t in results if len(t.results) < 9] == [TrialState.PAUSED] * (
        12 - lengths.count(9)
    )
    made = (tmp_path / "diary").read_text().splitlines()
    again = {1: 1, 3: 1 + 3, 9: 1 + 3 + 9}  # nothing is stored: it begins anew
    assert len(made) == sum(again[length] for length in lengths)
    for trial in results:
        scores = [result["score"] for result in trial.results]
        assert scores == [trial.config["x"] + n / 100 for n in range(1, len(scores) + 1)]
    told = [r.message for r in caplog.records if "begins anew" in r.message]
    assert len(told) == 1


def test_a_population_without_a_model_is_told_that_it_needs_one(tmp_path):
    searcher = elastix.Population(members=2)
    with pytest.raises(SearchError, match="no State"):
        campaign(tmp_path, unmodelled, searcher=searcher, trials=4).run()


def unmodelled(ctx):
    for epoch in range(5):
        ctx.report(score=ctx.config["x"] + epoch)


def test_children_inherit_from_the_states_of_paused_trials(tmp_path):
    def run(trials):
        searcher = elastix.Evolution(population=3, sample=1)
        options = {"rungs": Asha(first=1, eta=2, last=9), "searcher": searcher, "trials": trials}
        return campaign(tmp_path, search_parts.learns_long, metric="accuracy", **options).run()

    results = run(16)
    children = [trial for trial in results if trial.suggestion.parent is not None]
    assert len(children) >= 10
    assert all(child.inherited["ref"] == child.suggestion.parent for child in children)
    own = {trial.ref for trial in results}
    left = {child.suggestion.parent for child in children} - own
    assert left, "no parent has gone on: nothing is shown"
    with elastix.Store(tmp_path, read_only=True) as store:
        there = {entry.ref for entry in store.log()}
    paused = [child for child in children if child.state is TrialState.PAUSED]
    needed = {child.suggestion.parent for child in paused}
    assert needed - own, "no paused child of one that has gone on: nothing is shown"
    assert there == own | needed, "what a paused child may inherit from again is there, no more"
    further = run(24)
    assert all(t.inherited for t in further if t.suggestion.parent is not None)


def test_the_best_again_from_scratch(tmp_path):
    results = learning(tmp_path, trials=5, rerank=2).run()
    assert len(results) == 5
    assert len(results.reranked) == 2
    assert all(trial.inherited is None and trial.epochs == 2 for trial in results.reranked)
    assert {trial.lineage_epochs for trial in results.reranked} == {2}
    assert results.best.trial in results.reranked
    assert list(results.dataframe()["m:role"]) == ["search"] * 5 + ["rerank"] * 2


def test_several_objectives(tmp_path):
    def train(ctx):
        ctx.report(score=ctx.config["x"], size=ctx.config["x"] ** 2 + ctx.config["depth"])

    results = campaign(tmp_path, train, metric=["score", "size"], mode=["max", "min"]).run()
    front = {best.trial.number for best in results.front}
    for best in results.front:
        for other in results:
            mine, theirs = best.trial.losses, other.losses
            assert not (all(o <= m for o, m in zip(theirs, mine, strict=True)) and theirs != mine)
    assert results.best.trial.number in front
    assert {"objective_0", "objective_1"} <= set(results.dataframe())


# ---------------------------------------------------------------------------------- tables


def test_a_table_with_deephypers_columns(tmp_path):
    results = learning(tmp_path, trials=4).run()
    frame = results.dataframe()
    columns = {"p:x", "p:depth", "objective", "job_id", "job_status", "m:accuracy"}
    assert columns | {"m:timestamp_submit", "m:lineage_epochs"} <= set(frame)
    assert list(frame["objective"]) == [trial.metrics["accuracy"] for trial in results]
    back = pd.read_parquet(results.to_parquet(tmp_path / "trials.parquet"))
    assert back["p:x"].tolist() == frame["p:x"].tolist()
    assert back["m:ref"].tolist() == [trial.ref for trial in results]


def test_an_optuna_journal(tmp_path):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    results = campaign(tmp_path, search_parts.half_finite, trials=10).run()
    path = results.to_optuna(tmp_path / "journal.log")
    storage = JournalStorage(JournalFileBackend(str(path)))
    study = optuna.load_study(study_name="test", storage=storage)
    assert len(study.trials) == 10
    assert study.best_value == pytest.approx(results.best.values["score"])
    assert study.best_params == dict(results.best.config)
    failed = [t.number for t in study.trials if t.state is optuna.trial.TrialState.FAIL]
    assert failed == [t.number for t in results if t.state is TrialState.FAILED]
    with pytest.raises(Conflict, match="there already"):
        results.to_optuna(path)


def test_blocks_are_spread_out_in_tables(tmp_path):
    from search_spaces import convnet

    def train(ctx):
        ctx.report(score=len(ctx.config["body"]))

    results = campaign(tmp_path, train, space=convnet.space, searcher=elastix.Evolution()).run()
    row = results.rows()[0]
    assert row["p:body.length"] == len(results[0].config["body"])
    assert row["p:body.0.hidden"] == results[0].config["body"][0]["hidden"]
    results.to_parquet(tmp_path / "t.parquet")
    results.to_optuna(tmp_path / "t.log")


# -------------------------------------------------------------------------------- going on


def test_more_trials_a_wider_space_and_another_searcher(tmp_path):
    first = campaign(tmp_path, trials=4).run()
    wider = ConfigurationSpace(space=[Integer("depth", (1, 9))])
    more = campaign(tmp_path, trials=7, space=wider, searcher=elastix.Random()).run()
    assert more[:4] == first[:4]
    assert len(more) == 7


def test_another_metric_is_another_campaign(tmp_path):
    campaign(tmp_path, trials=2).run()
    with pytest.raises(ConfigError, match=r"\['score'\].*\['loss'\]"):
        campaign(tmp_path, metric="loss").run()


def test_two_drivers_cannot_run_one_campaign(tmp_path):
    campaign(tmp_path, trials=2).run()
    with (
        TrialDatabase(tmp_path / "runs" / "test"),
        pytest.raises(Conflict, match=f"is run by process {os.getpid()} on .*Nothing was started"),
    ):
        campaign(tmp_path).run()
    campaign(tmp_path).run()


def test_a_book_of_a_later_version_is_refused(tmp_path):
    campaign(tmp_path, trials=2).run()
    with TrialDatabase(tmp_path / "runs" / "test") as database:
        database._sql.execute("PRAGMA user_version = 99")
    with pytest.raises(TooNew, match="99"):
        campaign(tmp_path).run()


def test_the_journal_tells_the_story(tmp_path):
    results = campaign(tmp_path, trials=5).run()
    campaign(tmp_path, trials=6).run()
    events = list(journal.read(tmp_path / "runs" / "test" / "journal.jsonl"))
    started = [event for event in events if isinstance(event, CampaignStarted)]
    assert [event.known for event in started] == [0, 5]
    ended = [event for event in events if isinstance(event, TrialEnded)]
    assert [event.trial for event in ended] == list(range(6))
    best = [event.trial for event in ended[:5] if event.best][-1]
    assert best == results.best.trial.number
    assert [e.outcome for e in events if isinstance(e, CampaignEnded)] == ["finished"] * 2


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "best"}, "mode"),
        ({"metric": []}, "metric"),
        ({"inherit": "all"}, "inherit"),
        ({"rerank": "again"}, "rerank"),
        ({"rerank": -1}, "rerank"),
        ({"retries": -1}, "retries"),
        ({"train": 3}, "function"),
        ({"train": lambda: None}, "one argument"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        campaign(tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "values", [{"trials": 0}, {"trials": -3}, {"time_s": 0}, {"epochs": 0}, {"trials": 1.5}, {}]
)
def test_a_budget_of_nothing(values):
    with pytest.raises(ConfigError, match="Budget"):
        elastix.Budget(**values)


def test_a_space_without_a_valid_configuration(tmp_path):
    space = ConfigurationSpace(space=[Integer("n", (1, 2), default=1)])
    space.add(ForbiddenEqualsClause(space["n"], 2))
    campaign(
        tmp_path, lambda ctx: ctx.report(score=1), space=space, searcher=elastix.Random()
    ).run()
    with pytest.raises(EmptySpace):
        campaign(tmp_path, space=ConfigurationSpace(), searcher=elastix.Random(), trials=3).run()


def test_the_metric_is_never_reported(tmp_path, capsys):
    with pytest.raises(NeverReported, match=r"'score'.*\['loss', 'speed'\]"):
        campaign(tmp_path, search_parts.silent, quiet=False).run()
    assert "failed" in capsys.readouterr().out


def test_every_trial_fails(tmp_path):
    with pytest.raises(EveryTrialFailed, match="no luck with") as caught:
        campaign(tmp_path, search_parts.raises, trials=100).run()
    assert "in raises" in caught.value.traceback
    with pytest.raises(NotFound, match="score"):
        _ = elastix.Results.open(tmp_path, "test").best


def test_a_best_without_a_model_says_so(tmp_path):
    with pytest.raises(NotFound, match="no model"):
        campaign(tmp_path).run().best.load()


def test_a_store_that_is_full(tmp_path, monkeypatch):
    """ENOSPC from the second model on: typed, and nothing that was finished is lost."""
    from elastix.errors import Full
    from elastix.store.store import Store as Kept

    put, puts = Kept.put, []

    def full(self, *args, **options):
        puts.append(1)
        if len(puts) > 3:
            raise Full("no room is left where the store is kept. Nothing is visible.")
        return put(self, *args, **options)

    monkeypatch.setattr(Kept, "put", full)
    with pytest.raises(Full, match="no room"):
        learning(tmp_path).run()
    safe = [trial for trial in elastix.Results.open(tmp_path, "test") if trial.state.is_final]
    assert len(safe) == 3
    monkeypatch.undo()
    results = learning(tmp_path).run()
    assert [results[trial.number] for trial in safe] == safe
    assert all(trial.state is TrialState.FINISHED for trial in results)


# ------------------------------------------------------------------------------ what is seen


def test_what_is_printed(tmp_path, capsys):
    learning(tmp_path, quiet=False, trials=6).run()
    told = capsys.readouterr().out
    assert "max accuracy with Drawing" in told
    first, *_, last = [line for line in told.splitlines() if "(raylet)" not in line]
    assert str(tmp_path) in first
    assert "inherited" in told
    assert "lineages of up to" in told
    assert f"elastix campaign show test --store {tmp_path}" in told
    assert str(tmp_path) in last


def invoke(*arguments):
    return CliRunner().invoke(app, ["campaign", *map(str, arguments)])


def test_commands(tmp_path):
    listed = invoke("list", "-s", tmp_path)
    assert len(listed.stdout.splitlines()) == 1  # the header
    assert "has no campaigns" in listed.stderr
    results = learning(tmp_path, trials=6).run()
    listed = json.loads(invoke("list", "-s", tmp_path, "--json").stdout)
    assert [entry["campaign"] for entry in listed] == ["test"]
    assert listed[0]["trials"] == 6
    shown = json.loads(invoke("show", "test", "-s", tmp_path, "-n", 3, "--json").stdout)
    first = shown["trials_shown"][0]
    assert first["trial"] == results.best.trial.number
    assert first["lineage_epochs"] == results.best.trial.lineage_epochs
    assert first["values"]["accuracy"] == results.best.values["accuracy"]
    table = invoke("show", "test", "-s", tmp_path, "-n", 0, "--parquet", tmp_path / "t.parquet")
    assert len(table.stdout.splitlines()) == 1 + 6  # the header
    assert len(pd.read_parquet(tmp_path / "t.parquet")) == 6
    missing = invoke("show", "nope", "-s", tmp_path)
    assert missing.exit_code == 1
    assert "test" in missing.stderr


@pytest.mark.parametrize("tables", [False, True], ids=["without tables", "with tables"])
def test_a_campaign_that_was_killed_before_it_began_hides_no_other(tmp_path, tables):
    campaign(tmp_path, trials=2).run()
    database = tmp_path / "runs" / "nothing" / "campaign.sqlite"
    if tables:
        TrialDatabase(database.parent).close()
    else:
        database.parent.mkdir()
        database.touch()
    listed = invoke("list", "-s", tmp_path, "--json")
    assert listed.exit_code == 0
    assert [entry["campaign"] for entry in json.loads(listed.stdout)] == ["test"]
    assert "stopped before it began" in listed.stderr
    for verb in ("show", "resume"):
        refused = invoke(verb, "nothing", "-s", tmp_path)
        assert refused.exit_code == 1
        assert "Run it again" in refused.stderr
    database.write_bytes(b"not a database" * 1000)
    listed = invoke("list", "-s", tmp_path, "--json")
    assert listed.exit_code == 1
    assert [entry["campaign"] for entry in json.loads(listed.stdout)] == ["test"]
    assert str(database) in listed.stderr


def test_failed_trials_are_shown_with_their_first_traceback(tmp_path):
    campaign(tmp_path, search_parts.sometimes).run()
    shown = invoke("show", "test", "-s", tmp_path, "--failed")
    assert "ValueError: two is a bad number" in shown.output
    assert "in sometimes" in shown.stderr


SCRIPT = """
import sys
import elastix
from elastix.search.executors import campaign_file
from elastix.search.executors.serial import Local
from tests.search_parts import SPACE, Drawing

def slow(ctx):
    import time
    time.sleep(0.02)
    ctx.report(score=ctx.config["x"])
    print("ran", flush=True)

elastix.Campaign(
    slow, space=SPACE, searcher=Drawing(), metric="score", executor=Local(),
    budget=elastix.Budget(trials=int(sys.argv[2])),
    run=elastix.RunConfig(name="script", store=sys.argv[1]),
).run()
"""


def test_ctrl_c_leaves_everything_resumable(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), "2000"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    ran = 0
    for line in driver.stdout:
        ran += line == "ran\n"
        if ran == 3:
            driver.send_signal(signal.SIGINT)
            break
    rest = driver.stdout.read()
    assert driver.wait() != 0
    driver.stdout.close()
    assert rest.count("interrupted") == 1
    assert "Traceback" not in rest
    before = elastix.Results.open(tmp_path, "script")
    done = [trial for trial in before if trial.state.is_final]
    assert 1 <= len(done) < 2000
    command[-1] = str(len(done) + 3)
    again = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert again.stdout.count("ran\n") == 3
    after = elastix.Results.open(tmp_path, "script")
    assert [after[trial.number] for trial in done] == done


def test_resume_by_command(cluster, tmp_path):
    """On Ray: the command builds the default executor."""
    half = elastix.ScalingConfig(cpus_per_worker=0.5)
    campaign(tmp_path, trials=3, executor=None, scaling=half).run()
    resumed = invoke("resume", "test", "-s", tmp_path, "--trials", 5, "--parallel", 1, "--json")
    assert resumed.exit_code == 0, resumed.output + resumed.stderr
    assert json.loads(resumed.stdout)["trials"] == 5
    assert len(elastix.Results.open(tmp_path, "test")) == 5
    assert invoke("resume", "nope", "-s", tmp_path).exit_code == 1


def test_seeds_of_trials_differ_and_are_the_runs(tmp_path):
    def train(ctx):
        ctx.report(score=float(torch.rand(1)))

    first = campaign(tmp_path / "a", train, trials=3).run()
    second = campaign(tmp_path / "b", train, trials=3).run()
    scores = [trial.metrics["score"] for trial in first]
    assert scores == [trial.metrics["score"] for trial in second]
    assert len(set(scores)) == 3
