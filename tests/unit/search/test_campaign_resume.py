"""A campaign in two runs is the campaign in one: what its trial database remembers, and of whom."""

import json
import sqlite3
import threading
from contextlib import closing

import pytest
import torch
from ConfigSpace import Categorical, ConfigurationSpace, Float, Integer, NormalIntegerHyperparameter
from ConfigSpace.conditions import EqualsCondition

import elastix
from elastix.errors import NotFound
from elastix.search.executors.serial import Local
from elastix.search.rungs import Asha, Median
from elastix.search.space import Blocks, Space
from elastix.search.trial_database import FILE, TrialDatabase
from elastix.store import Store
from tests.search_parts import SPACE, learns, noop, seal


def train(ctx):
    for epoch in range(3):
        ctx.report(m=ctx.config["x"] + len(ctx.config["body"]) - epoch)


def space():
    block = ConfigurationSpace(space=[Categorical("w", [1, 2, 3])])
    return Space([Float("x", (0.0, 1.0))], Blocks("body", block, min=1, max=4))


def run(store, name, trials, **more):
    options = {"space": space(), "searcher": elastix.Evolution(population=6, sample=3), **more}
    found = elastix.Campaign(
        train,
        metric="m",
        budget=elastix.Budget(trials=trials),
        run=elastix.RunConfig(name=name, store=str(store)),
        executor=Local(),
        quiet=True,
        **{"inherit": elastix.InheritConfig(mode="none"), **options},
    ).run()
    return [trial.config for trial in found]


def test_two_halves_are_the_whole(tmp_path):
    whole = run(tmp_path, "one", 24)
    run(tmp_path, "two", 12)
    assert run(tmp_path, "two", 24) == whole


def test_equal_spaces_are_told_to_be_equal_and_others_are_not():
    assert repr(space()) == repr(space())
    assert repr(space()) != repr(space().plus(Integer("n", (1, 3))))
    assert repr(Space([Float("x", (0.0, 1.0))], valid=bool)) != repr(
        Space([Float("x", (0.0, 1.0))])
    )
    assert " at 0x" not in repr(Space([Float("x", (0.0, 1.0))], valid=lambda config: True))


@pytest.mark.parametrize("before", [Asha(1, 3, 9), Median(), None], ids=["asha", "median", "none"])
@pytest.mark.parametrize("after", [Asha(1, 2, 9), Median(2), None], ids=["asha", "median", "none"])
def test_a_campaign_goes_on_with_other_rungs(tmp_path, before, after):
    run(tmp_path, "c", 6, rungs=before)
    assert len(run(tmp_path, "c", 12, rungs=after)) == 12


def test_a_trial_that_somebody_took_out_of_the_database_costs_no_other(tmp_path):
    run(tmp_path, "c", 4)
    path = tmp_path / "runs" / "c" / FILE
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("DELETE FROM trials WHERE number = 1")
    before = elastix.Results.open(tmp_path, "c")
    run(tmp_path, "c", 6)
    after = elastix.Results.open(tmp_path, "c")
    assert [trial.number for trial in after] == [0, 2, 3, 4, 5, 6]
    assert after[:3] == before[:3]


@pytest.mark.parametrize("facts", ["[]", '{"name": "c"}', '{"metrics": ["m"], "modes": ["max"]}'])
def test_facts_that_are_of_no_campaign_are_corrupt(tmp_path, facts):
    run(tmp_path, "c", 2)
    path = tmp_path / "runs" / "c" / FILE
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("UPDATE facts SET value = ? WHERE name = 'campaign'", (facts,))
        seal(sql)
    with pytest.raises(elastix.Corrupt, match="is of no campaign"):
        run(tmp_path, "c", 3)


def test_another_train_function_is_told_of(tmp_path, caplog):
    """Its scores are compared with those of the trials that are there. Never a false alarm."""
    lock = threading.Lock()

    def go(trials, plus=0.0, held=None):
        def train(ctx):
            assert held is None or held.acquire(timeout=1)
            ctx.report(m=ctx.config["x"] + plus)
            _ = held is None or held.release()

        caplog.clear()
        elastix.Campaign(
            train,
            space=SPACE,
            metric="m",
            budget=elastix.Budget(trials=trials),
            run=elastix.RunConfig(name="c", store=str(tmp_path)),
            executor=Local(),
            quiet=True,
        ).run()
        return [r.getMessage() for r in caplog.records if "train function" in r.getMessage()]

    assert go(2) == go(4) == []
    (told,) = go(6, plus=1.0)
    assert told.startswith("campaign 'c' goes on with another train function")
    assert go(8, plus=1.0) == []
    assert go(10, held=lock) == [], "one that cannot be pickled is not known by anything"
    assert go(12, plus=1.0) == []


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"space": Space([Float("x", (0.0, 9.0))])}, "space"),
        ({"searcher": elastix.Random()}, "searcher and another way of inheritance"),
        ({"rungs": Median()}, "rule of rungs"),
        ({"inherit": elastix.InheritConfig(mode="lp")}, "way of inheritance"),
        ({"inherit": elastix.InheritConfig(provider="store")}, "way of inheritance"),
        ({"inherit": elastix.InheritConfig(optimizer=False)}, "way of inheritance"),
    ],
)
def test_another_space_searcher_or_rule_is_told_of(tmp_path, caplog, other, what):
    def go(trials, **more):
        caplog.clear()
        options = {"space": SPACE, "metric": "m", "searcher": elastix.Evolution(), **more}
        elastix.Campaign(
            lambda ctx: ctx.report(m=ctx.config["x"]),
            budget=elastix.Budget(trials=trials),
            run=elastix.RunConfig(name="c", store=str(tmp_path)),
            executor=Local(),
            quiet=True,
            **options,
        ).run()
        return [r.getMessage() for r in caplog.records if " goes on with " in r.getMessage()]

    assert go(2) == go(4) == []
    (told,) = go(6, **other)
    assert told.startswith(f"campaign 'c' goes on with another {what} than before.")
    assert go(8, **other) == []


def test_what_is_inherited_from_counts_for_nothing_where_nothing_is(tmp_path, caplog):
    for trials, provider in ((2, "store"), (4, "parent")):
        elastix.Campaign(
            lambda ctx: ctx.report(m=ctx.config["x"]),
            space=SPACE,
            metric="m",
            searcher=elastix.Evolution(),
            budget=elastix.Budget(trials=trials),
            inherit=elastix.InheritConfig(mode="none", provider=provider),
            run=elastix.RunConfig(name="c", store=str(tmp_path)),
            executor=Local(),
            quiet=True,
        ).run()
    assert not [r for r in caplog.records if " goes on with " in r.getMessage()]


@pytest.mark.parametrize("searcher", [elastix.Random(), elastix.DeepHyper()])
def test_a_parent_is_asked_for_in_vain_where_the_searcher_knows_none(tmp_path, searcher):
    with pytest.raises(elastix.ConfigError, match=type(searcher).__name__):
        run(tmp_path, "c", 2, searcher=searcher, inherit=elastix.InheritConfig(provider="parent"))
    assert not list(tmp_path.iterdir())


def rare():
    """Nearly always p, which is one configuration; q has as many as there are floats."""
    rare = ConfigurationSpace()
    choice = Categorical("c", ["p", "q"], weights=[0.9999, 0.0001])
    inner = Float("f", (0.0, 1.0))
    rare.add([choice, inner])
    rare.add(EqualsCondition(inner, choice, "q"))
    return rare


def narrow():
    """100,001 numbers, all but some ten of which are never drawn."""
    return ConfigurationSpace(
        space=[NormalIntegerHyperparameter("x", mu=0, sigma=1, lower=-50_000, upper=50_000)]
    )


@pytest.mark.parametrize("make", [elastix.Random, elastix.Evolution])
@pytest.mark.parametrize("space", [rare, narrow])
def test_a_concentrated_prior_is_no_end_of_the_space(make, space):
    searcher = make()
    searcher.start(space(), seed=0)
    asked = searcher.ask(60)
    assert len(asked) == 60
    assert len({suggestion.key for suggestion in asked}) == 60


def test_the_state_of_a_paused_best_trial_goes_once_the_trial_has_gone_on(tmp_path):
    """Its tag moves before it is let go of."""

    def go(trials):
        return elastix.Campaign(
            learns,
            space=Space(SPACE).plus(Categorical("epochs", [3])),
            searcher=elastix.Random(),
            inherit=elastix.InheritConfig(mode="none"),
            metric="accuracy",
            budget=elastix.Budget(trials=trials),
            rungs=Asha(1, 2, 3),
            run=elastix.RunConfig(name="c", store=str(tmp_path)),
            executor=Local(),
            quiet=True,
        ).run()

    first = go(1).best.trial
    assert first.state == "paused"
    after = go(4)
    assert after[0].ref != first.ref, "it has gone on"
    with Store(tmp_path, read_only=True) as store:
        assert store.get("c/best").meta["trial"] == after.best.trial.number
        with pytest.raises(NotFound):
            store.get(first.ref)


def seeded(store, name, trials, seed=0):
    """A campaign, and the seeds of the generators that its trials began with."""

    def train(ctx):
        ctx.report(m=0.0, seed=torch.initial_seed())

    found = elastix.Campaign(
        train,
        space=space(),
        metric="m",
        budget=elastix.Budget(trials=trials),
        run=elastix.RunConfig(name=name, store=str(store), seed=seed),
        executor=Local(),
        quiet=True,
    ).run()
    return found, [trial.metrics["seed"] for trial in found]


def test_campaigns_with_neighbouring_seeds_have_no_trial_seed_in_common(tmp_path):
    """They are replicates of one experiment, and shared all but one seed of each."""
    began = set()
    for seed in range(5):
        found, seeds = seeded(tmp_path, f"c{seed}", 6, seed)
        assert seeds == [found.seed_of(number) for number in range(6)]
        began.update(seeds)
    assert len(began) == 30
    first = elastix.Results.open(tmp_path, "c0")
    frozen = [8697804034638112767, 6722404685795505399]  # campaigns go on with later versions
    assert [first.seed_of(number) for number in range(2)] == frozen
    with pytest.raises(NotFound, match="no trial 6"):
        first.seed_of(6)


def test_a_seed_that_is_changed_before_the_first_trial_counts(tmp_path):
    """The searcher's state was of the seed before: its time was up, or somebody pressed Ctrl-C."""

    def configs(name, seed, budget):
        found = elastix.Campaign(
            noop,
            space=SPACE,
            searcher=elastix.Random(),
            metric="score",
            budget=budget,
            run=elastix.RunConfig(name=name, store=str(tmp_path), seed=seed),
            executor=Local(),
            quiet=True,
        ).run()
        return [trial.config for trial in found]

    assert configs("c", 1, elastix.Budget(time_s=1e-9)) == []
    wanted = configs("other", 2, elastix.Budget(trials=3))
    assert configs("c", 2, elastix.Budget(trials=3)) == wanted


def test_a_campaign_of_an_earlier_version_keeps_to_its_rule_for_seeds(tmp_path):
    """A trial that runs again or goes on must have the seed that it began with."""
    seeded(tmp_path, "old", 2, seed=7)
    path = tmp_path / "runs" / "old" / FILE
    with closing(sqlite3.connect(path)) as sql, sql:
        (text,) = sql.execute("SELECT value FROM facts WHERE name = 'campaign'").fetchone()
        facts = json.loads(text)
        del facts["seeds"]
        sql.execute("UPDATE facts SET value = ? WHERE name = 'campaign'", (json.dumps(facts),))
        seal(sql)
    found, seeds = seeded(tmp_path, "old", 5, seed=7)
    assert seeds[2:] == [found.seed_of(number) for number in (2, 3, 4)] == [9, 10, 11]
    assert seeded(tmp_path, "old", 6, seed=7)[1][5] == 12, "it goes on once more"


def test_a_best_model_that_was_retired_keeps_no_other_from_being_named_nor_states_from_going(
    tmp_path,
):
    def go_on():
        return elastix.Campaign(
            learns,
            space=SPACE,
            searcher=elastix.Random(),
            metric="accuracy",
            budget=elastix.Budget(trials=3),
            run=elastix.RunConfig(name="c", store=str(tmp_path)),
            executor=Local(),
            quiet=True,
        ).run()

    best, second = (found.ref for found in go_on().top(2))
    with Store(tmp_path) as store:
        store.untag("c/best", expected=best)
        store.retire(best)
        gone = store.put(elastix.State({"w": torch.ones(1)}))
    with TrialDatabase(tmp_path / "runs" / "c") as database:
        database.commit([], superseded=[gone])
    go_on()
    with Store(tmp_path, read_only=True) as store:
        assert store.tags()["c/best"] == second
        assert gone not in {entry.ref for entry in store.log()}
