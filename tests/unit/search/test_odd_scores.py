"""Metrics that are no number, at a rung, between rungs and at the end."""

import math

import numpy as np
import pytest
import torch
from ConfigSpace import Categorical, ConfigurationSpace, Float

import elastix
from elastix.errors import EveryTrialFailed, NeverReported
from elastix.search.executors.serial import Local
from tests.search_parts import learns

SPACE = ConfigurationSpace(space=[Float("x", (0.0, 1.0))])
LAST = 4
RUNGS = elastix.Asha(first=2, eta=2, last=LAST)


def search(store, train, trials=12, **options):
    return elastix.Campaign(
        train,
        **{"space": SPACE, "searcher": elastix.Random(), "rungs": RUNGS, "metric": "m", **options},
        budget=elastix.Budget(trials=trials),
        run=elastix.RunConfig(name="odd", store=str(store)),
        executor=Local(),
        quiet=True,
    ).run()


def reports(odd, at):
    """x, four times; `odd` instead at one of them, in those trials whose x is low."""

    def train(ctx):
        for report in range(1, LAST + 1):
            low = ctx.config["x"] < 0.5
            ctx.report(m=odd() if low and report in at else ctx.config["x"], report=report)

    return train


ODD = {
    "text": lambda: "0.7",
    "a boolean": lambda: True,
    "not a number": lambda: math.nan,
    "infinite": lambda: math.inf,
}


@pytest.mark.parametrize("at", [[2], [2, 4], [4]], ids=["rung", "rung and end", "end"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("rungs", [RUNGS, elastix.Median(), None], ids=["asha", "median", "none"])
def test_who_has_no_finite_number_at_a_rung_or_at_the_end_has_failed(tmp_path, odd, at, rungs):
    results = search(tmp_path, reports(odd, at), rungs=rungs)
    low = [trial for trial in results if trial.config["x"] < 0.5]
    assert 0 < len(low) < len(results)
    assert all(trial.state != "failed" for trial in results if trial not in low)
    for trial in low:
        judged = rungs is RUNGS and 2 in at
        if judged:
            assert (trial.state, len(trial.results)) == ("failed", 2)
        elif 4 in at:  # it may have been paused or stopped before
            assert trial.state != "finished"
        if trial.state == "failed":
            assert "which is no" in trial.traceback
    assert results.best.trial.config["x"] > 0.5


@pytest.mark.parametrize("at", [[1], [2], [3], [4], [2, 3, 4]])
def test_none_says_nothing_new(tmp_path, at):
    """The number before it counts, at rungs and at the end, in score, metrics and stored model."""
    results = search(tmp_path / "none", reports(lambda: None, at))
    plain = search(tmp_path / "plain", reports(lambda: 0.0, []))
    assert len(results) == len(plain)
    assert [t.state for t in results] == [t.state for t in plain]
    assert [t.losses for t in results] == [t.losses for t in plain]
    assert [t.metrics for t in results] == [t.metrics for t in plain]


def test_a_model_whose_last_report_is_none_is_stored_under_the_number_before(tmp_path):
    def train(ctx):
        learns(ctx)
        ctx.report(accuracy=None)

    space = ConfigurationSpace(space=[Float("x", (0.0, 0.5)), Categorical("depth", [1])])
    results = search(tmp_path, train, 2, space=space, metric="accuracy", rungs=None)
    best = results.best
    assert best.metrics["accuracy"] == best.values["accuracy"]
    assert best.load().meta["metrics"]["accuracy"] == best.values["accuracy"]


def test_a_trial_that_says_nothing_new_after_a_rung_leaves_its_last_model(tmp_path):
    def train(ctx):
        model = torch.nn.Linear(2, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        samples = torch.utils.data.TensorDataset(torch.ones(8, 2))
        for epoch in ctx.loader(samples, batch_size=8).epochs(2):
            for (x,) in epoch:
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            ctx.report(m=None if epoch.number else ctx.config["x"])

    results = search(tmp_path, train, 4, rungs=elastix.Asha(first=1, eta=2, last=2))
    with elastix.Store(tmp_path) as store:
        last = [
            store.get(one.trial.ref).meta for one in results.top(4) if len(one.trial.results) == 2
        ]
    assert last
    for meta in last:
        assert (meta["epochs"], meta["metrics"]) == (2, {"m": meta["config"]["x"]})


@pytest.mark.parametrize("first", ["None", "absent"])
def test_a_trial_without_a_number_at_a_rung_is_not_let_through(tmp_path, first):
    """It would go on unjudged: the first is told of, later ones fail."""
    silent = True

    def train(ctx):
        for report in range(1, LAST + 1):
            metrics = {"m": None} if first == "None" else {"loss": 1.0}
            if report > 2 or not (silent or ctx.config["x"] < 0.5):
                metrics["m"] = ctx.config["x"]
            ctx.report(**metrics)

    with pytest.raises(NeverReported, match=r"'m'.* at a rung, after 2 reports; it will run again"):
        search(tmp_path, train)
    silent = False
    before = elastix.Results.open(tmp_path, "odd")[0]
    assert (before.state, before.results) == ("waiting", ())
    if before.config["x"] < 0.5:  # it has to be another that is the first
        with pytest.raises(NeverReported):
            search(tmp_path, train)
        return
    results = search(tmp_path, train)
    assert {(t.state, len(t.results)) for t in results if t.config["x"] < 0.5} == {("failed", 2)}


def test_what_a_trial_fails_of_at_a_rung_makes_no_difference_to_the_others(tmp_path):
    """Nor does it after a kill, with rungs that hear of all reports anew."""

    def ends(odd):
        def train(ctx):
            for report in range(1, LAST + 1):
                bad = report == 2 and ctx.config["x"] < 0.5
                if bad and odd is None:
                    raise ValueError("of something else")
                ctx.report(m=odd if bad else ctx.config["x"])

        return train

    found = {}
    for name, odd in {"raised": None, "nan": math.nan, "text": "0.7", "infinite": math.inf}.items():
        results = search(tmp_path / name, ends(odd), 12)
        again = search(tmp_path / name, ends(odd), 16, rungs=elastix.Asha(first=2, eta=2, last=8))
        found[name] = [
            [(t.state, len(t.results)) for t in run if t.config["x"] >= 0.5]
            for run in (results, again)
        ]
        assert any(trial.state == "failed" for trial in results)
        assert any(trial.state == "paused" for trial in results)
    assert found["nan"] == found["text"] == found["infinite"] == found["raised"]


def test_where_all_scores_at_a_rung_are_no_numbers_the_campaign_says_so(tmp_path):
    with pytest.raises(EveryTrialFailed, match="not finite"):
        search(tmp_path, lambda ctx: [ctx.report(m=math.nan) for _ in range(LAST)])


@pytest.mark.parametrize(
    "odd", [lambda: math.nan, lambda: "text", lambda: None], ids=["nan", "text", "none"]
)
def test_a_member_of_a_population_without_a_number_is_replaced(tmp_path, odd):
    seen = []

    def train(ctx):
        model = torch.nn.Linear(2, 2)
        ctx.inherit(model)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
        data = torch.utils.data.TensorDataset(torch.ones(4, 2))
        bad = ctx.config["x"] < 0.5
        seen.append(bad)
        for epoch in ctx.loader(data, batch_size=4).epochs(3):
            for (x,) in epoch:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            ctx.report(m=odd() if bad else ctx.config["x"])

    searcher = elastix.Population(members=4)
    results = search(tmp_path, train, 10, searcher=searcher, rungs=None)
    assert any(seen)
    assert {t.state for t in results if t.config["x"] < 0.5} == {"failed"}
    assert {t.state for t in results if t.config["x"] >= 0.5} <= {"finished", "stopped"}
    assert sum(t.state == "finished" for t in results) >= 3


@pytest.mark.parametrize(
    "number",
    [np.float32(0.5), np.float64(0.5), np.array([0.5]), torch.tensor([0.5]), np.int64(3)],
    ids=lambda number: f"{type(number).__name__} {number}",
)
def test_numbers_of_numpy_and_torch_are_numbers_at_rungs(tmp_path, number):
    results = search(tmp_path, lambda ctx: [ctx.report(m=number) for _ in range(LAST)], 4)
    assert {trial.losses for trial in results} == {(-number.item(),)}
    assert elastix.Results.open(tmp_path, "odd").best.values == {"m": number.item()}
