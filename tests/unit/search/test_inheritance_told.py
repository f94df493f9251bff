"""A search that is to inherit does so within its budget, and says so if it did not. No Ray."""

import functools
import shutil

import pytest
import torch
import torch.nn.functional as F

import elastix
from elastix.events import AncestorIgnored, TrialEnded
from elastix.observe import journal
from elastix.search.executors.serial import Local
from elastix.train.replica.solo import run_alone
from tests.search_parts import SPACE, Net, accuracy, data
from tests.unit.train.solo import solo
from tests.unit.train.test_solo import Keeps


def learns(ctx, inherits):
    model = Net(ctx.config["depth"])
    if inherits:
        ctx.inherit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=ctx.config["x"])
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(data(), batch_size=48).epochs(1):
        for x, y in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    ctx.report(**ctx.evaluate(accuracy, data(), batch_size=96))


def search(store, train, capsys, **more):
    campaign = elastix.Campaign(
        train,
        space=SPACE,
        metric="accuracy",
        budget=elastix.Budget(trials=12),
        run=elastix.RunConfig(name="c", store=str(store)),
        executor=Local(),
        **more,
    )
    found = campaign.run()
    events = list(journal.read(store / "runs" / "c" / "journal.jsonl"))
    return found, [e for e in events if isinstance(e, TrialEnded)], capsys.readouterr().out


@pytest.mark.parametrize(
    ("searcher", "many"), [(None, 3), (elastix.ScreenedEvolution, 3), (elastix.Evolution, 8)]
)
def test_a_small_budget_is_enough_to_inherit(tmp_path, capsys, searcher, many):
    """Four trials at random; then only mutations in Evolution, or what looks best of both."""
    given = {} if searcher is None else {"searcher": searcher()}
    found, _, told = search(tmp_path, lambda ctx: learns(ctx, inherits=True), capsys, **given)
    assert not any(trial.suggestion.parent_number is not None for trial in found[:4])
    children = [trial for trial in found if trial.suggestion.parent_number is not None]
    assert len(children) >= many
    assert all(trial.inherited["share"] > 0 for trial in children)
    assert f"  {len(children)} trials inherited " in told


def test_a_train_function_that_does_not_inherit_is_told_so_once(tmp_path, capsys):
    found, ended, told = search(tmp_path, lambda ctx: learns(ctx, inherits=False), capsys)
    assert not any(trial.inherited for trial in found)
    children = {t.number for t in found if t.suggestion.parent_number is not None}
    assert {event.trial for event in ended if event.ignored} == children != set()
    assert told.count("without ctx.inherit(model)") == 1
    assert f"{len(children)} trials had a model to inherit from and did not" in told
    assert "% of their bytes" not in told


def test_a_search_in_which_nothing_was_made_from_another_claims_nothing(tmp_path, capsys):
    train = lambda ctx: learns(ctx, inherits=True)  # noqa: E731
    _, ended, told = search(tmp_path, train, capsys, searcher=elastix.Evolution(population=12))
    assert not any(event.ignored for event in ended)
    assert "no trial inherited anything: none was made from another one" in told


def test_trials_without_models_have_no_layers_that_could_differ(tmp_path, capsys):
    _, _, told = search(tmp_path, lambda ctx: ctx.report(accuracy=ctx.config["x"]), capsys)
    assert "no trial inherited anything: none has left a model" in told


def test_models_of_a_removed_campaign_of_that_name_are_told_of(tmp_path, capsys, caplog):
    """With the store as provider they are found by that name."""
    given = {"searcher": elastix.Random(), "quiet": True}
    search(tmp_path, functools.partial(learns, inherits=True), capsys, **given)
    assert "earlier campaign" not in caplog.text
    search(tmp_path, functools.partial(learns, inherits=True), capsys, **given)
    assert "earlier campaign" not in caplog.text, "it goes on, and these are its own"
    shutil.rmtree(tmp_path / "runs")
    found, _, _ = search(tmp_path, functools.partial(learns, inherits=True), capsys, **given)
    assert found[0].inherited is not None
    assert "12 models of an earlier campaign 'c'" in caplog.text


def test_a_campaign_without_inheritance_has_nothing_to_say_about_it(tmp_path, capsys):
    train = lambda ctx: learns(ctx, inherits=False)  # noqa: E731
    _, ended, told = search(tmp_path, train, capsys, inherit=elastix.InheritConfig(mode="none"))
    assert not any(event.ignored for event in ended)
    assert "no trial inherited" not in told
    assert "ctx.inherit(model)" not in told


@pytest.mark.parametrize("has_ancestor", [True, False])
def test_a_run_that_has_an_ancestor_says_that_it_was_not_asked_for(tmp_path, has_ancestor):
    events, keeps = [], Keeps()
    keeps.has_ancestor = has_ancestor
    run_alone(
        lambda ctx: ctx.prepare(Net(1)), {}, solo(tmp_path, model_source=keeps), events.append
    )
    assert any(isinstance(event, AncestorIgnored) for event in events) == has_ancestor


@pytest.mark.parametrize(
    ("trials", "population", "sample"),
    [(1, 2, 1), (8, 2, 1), (24, 8, 4), (60, 20, 8), (96, 32, 8), (5000, 32, 8), (None, 32, 8)],
)
def test_the_population_follows_the_budget(trials, population, sample):
    for searcher in (elastix.Evolution(), screened := elastix.ScreenedEvolution()):
        searcher.expect(trials)
        assert (searcher.population, searcher.sample) == (population, sample)
    assert screened.initial == min(10, population)


def test_a_population_that_was_chosen_stays():
    chosen = {"population": 5, "sample": 3}
    for searcher in (elastix.Evolution(**chosen), elastix.ScreenedEvolution(**chosen, initial=7)):
        searcher.expect(1000)
        assert (searcher.population, searcher.sample) == (5, 3)
    assert searcher.initial == 7


def test_a_larger_budget_does_not_begin_the_search_anew(tmp_path, capsys):
    train = lambda ctx: learns(ctx, inherits=True)  # noqa: E731
    search(tmp_path, train, capsys, searcher=elastix.Evolution())
    again = elastix.Campaign(
        train,
        space=SPACE,
        searcher=elastix.Evolution(),
        metric="accuracy",
        budget=elastix.Budget(trials=60),
        run=elastix.RunConfig(name="c", store=str(tmp_path)),
        executor=Local(),
        quiet=True,
    ).run()
    assert len(again) == 60
    assert all(trial.suggestion.parent_number is not None for trial in again[12:])
