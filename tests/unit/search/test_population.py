"""Populations: what a selection is, in virtual time and in real trials; schedules; kills."""

import functools
import json
from itertools import pairwise

import pytest
import torch
from ConfigSpace import Categorical, ConfigurationSpace, Float
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from typer.testing import CliRunner

import elastix
from elastix import cli
from elastix.config import Budget
from elastix.errors import ConfigError, SearchError
from elastix.search.executors.executor import Work
from elastix.search.executors.in_process import execute
from elastix.search.executors.serial import Local
from elastix.search.gate import Foreseen
from elastix.search.rungs import Asha
from elastix.search.searchers.population import Population
from elastix.search.space import Space
from elastix.search.trial import Selects, Suggestion, Trial, TrialState
from elastix.testing.searcher_contract import smooth
from tests.search_parts import data
from tests.virtual import Rig, climbs


def member(number, loss, ref=True, config=None):
    config = config or {"a": 0.5, "n": 3, "kind": "good"}
    name = elastix.Ref(f"{number:064x}") if ref else None
    losses = () if loss is None else (loss,)
    return Trial(number, Suggestion(config), TrialState.PAUSED, losses, ref=name)


def started(space=None, seed=0, objectives=1, **options):
    searcher = Population(**{"members": 4, **options})
    searcher.start(space or smooth(), seed=seed, objectives=objectives)
    return searcher


def test_it_selects():
    assert isinstance(Population(), Selects)
    assert not isinstance(elastix.Evolution(), Selects)


def test_the_first_are_as_many_as_members_and_no_more_than_the_budget_allows():
    assert len(started().select([], 100).children) == 4
    assert len(started().select([], 3).children) == 3


def test_the_worst_makes_room_for_a_child_of_the_best_on_its_state():
    chosen = started().select([member(n, loss) for n, loss in enumerate([3.0, 1.0, 2.0, 9.0])], 10)
    assert (chosen.on, chosen.over) == ([0, 1, 2], [3])
    (child,) = chosen.children
    assert (child.parent_number, child.parent) == (1, f"{1:064x}")
    assert child.in_place
    assert child.config != member(1, 0.0).config


def test_who_has_no_finite_loss_comes_last():
    trials = [member(n, loss) for n, loss in enumerate([float("nan"), 1.0, 2.0, None])]
    chosen = started(share=0.5).select(trials, 10)
    assert chosen.over == [0, 3]
    assert {child.parent_number for child in chosen.children} <= {1, 2}


def test_nobody_is_stopped_whom_no_child_replaces():
    trials = [member(n, float(n)) for n in range(4)]
    chosen = started(share=0.5).select(trials, 1)
    assert (chosen.over, len(chosen.children)) == ([3], 1)
    chosen = started(share=0.5).select(trials, 0)
    assert (chosen.on, chosen.over, chosen.children) == ([0, 1, 2, 3], [], [])


def test_who_failed_is_replaced_and_who_came_to_the_end_is_not():
    searcher = started()
    first = searcher.select([], 10).children
    failed = Trial(0, first[0], TrialState.FAILED, traceback="ValueError")
    done = Trial(1, first[1], TrialState.FINISHED, (0.5,))
    searcher.tell([failed, done])
    chosen = searcher.select([member(2, 1.0), member(3, 2.0)], 10)
    assert len(chosen.children) == 2, "one for the worse of two, one for the failed one"
    assert len(searcher.select([member(2, 0.9), member(4, 2.0)], 10).children) == 1


def test_without_a_better_loss_all_begin_anew_half_as_often():
    searcher = started(patience=2, interval=3)
    trials = [member(n, float(n)) for n in range(4)]
    assert searcher.interval == 3
    for _ in range(2):
        assert len(searcher.select(trials, 100).over) == 1
    anew = searcher.select(trials, 100)
    assert (anew.on, anew.over, len(anew.children)) == ([], [0, 1, 2, 3], 4)
    assert {child.parent_number for child in anew.children} == {0}
    assert all(child.in_place for child in anew.children)
    assert searcher.interval == 6
    assert len(searcher.select(trials, 100).over) == 1, "it waits again before the next"


def test_a_small_space_is_not_used_up_by_other_states():
    """A configuration that was tried is tried again on another State, never twice on the same."""
    searcher = started(Space([Categorical("c", ["x", "y", "z"])]), members=3, patience=99)
    seen = [child.key for child in searcher.select([], 9).children]
    for turn in range(20):
        trials = [member(10 * turn + n, float(n), config={"c": "xyz"[n]}) for n in range(3)]
        chosen = searcher.select(trials, 9)
        assert len(chosen.children) == 1
        seen += [child.key for child in chosen.children]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    "wrong",
    [{"members": 0}, {"interval": 1.5}, {"share": 0.6}, {"share": "x"}, {"patience": True}],
)
def test_impossible_numbers(wrong):
    with pytest.raises(ConfigError, match="Population.*" + next(iter(wrong))):
        Population(**wrong)


losses = st.one_of(st.none(), st.floats(allow_nan=True), st.floats(-5, 5))


@settings(deadline=None, max_examples=60)
@given(
    found=st.lists(st.lists(losses, max_size=9), max_size=6),
    members=st.integers(1, 9),
    share=st.floats(0, 0.5),
    patience=st.integers(1, 3),
    most=st.integers(0, 12),
    seed=st.integers(0, 3),
)
def test_any_selection_accounts_for_all_and_can_be_repeated(
    found, members, share, patience, most, seed
):
    """Everybody goes on or is over, none twice; no child too many; a saved state selects alike."""
    searcher = started(members=members, share=share, patience=patience, seed=seed)
    other = started(members=members, share=share, patience=patience, seed=9)
    for turn, each in enumerate(found):
        trials = [member(100 * turn + n, loss) for n, loss in enumerate(each)]
        other.load_state_dict(json.loads(json.dumps(searcher.state_dict())))
        interval = searcher.interval
        chosen = searcher.select(trials, most)
        assert chosen == other.select(trials, most)
        assert sorted([*chosen.on, *chosen.over]) == [trial.number for trial in trials]
        assert len(chosen.children) <= most
        assert len({child.key for child in chosen.children}) == len(chosen.children)
        assert len(chosen.over) <= len(chosen.children)
        scored = {t.number: t.losses[0] for t in trials if t.scored}
        parents = {child.parent_number for child in chosen.children} - {None}
        assert parents <= scored.keys()
        if parents and chosen.over and searcher.interval == interval:
            assert max(scored[p] for p in parents) <= min(
                scored.get(n, float("inf")) for n in chosen.over
            )


# ------------------------------------------------------------------------------- real trials


class Breaking:
    """A gate that raises when it is asked for the n-th time."""

    def __init__(self, at=None):
        self.at, self.asked = at, 0

    def begin(self, idle):
        pass

    def learn(self, trial):
        pass

    def foresee(self, config):
        self.asked += 1
        if self.asked == self.at:
            raise SearchError("nothing fits")
        return Foreseen()


@pytest.mark.parametrize("at", [5, 6])  # the first and the second child of a selection
def test_a_selection_that_cannot_be_finished_is_made_again_as_a_whole(tmp_path, at):
    def rig(name):
        (tmp_path / name).mkdir()
        make = functools.partial(Population, members=4, share=0.5)
        return Rig(tmp_path / name, climbs(4), searcher=make, slots=2)

    budget = Budget(trials=12)
    whole = rig("whole").run(budget, gate=Breaking())
    cut = rig("cut")
    with pytest.raises(SearchError, match="nothing fits"):
        cut.run(budget, gate=Breaking(at))
    assert {line.trial.state for line in cut.lines} == {TrialState.PAUSED}, "nobody was stopped"
    assert [
        (trial.suggestion, trial.state, trial.results) for trial in cut.run(budget, gate=Breaking())
    ] == [(trial.suggestion, trial.state, trial.results) for trial in whole]


class Unwritten(Population):
    """Its state cannot be had after a selection, once for each entry in `fails`."""

    def __init__(self, fails, **options):
        super().__init__(**options)
        self.fails, self.selected = fails, False

    def select(self, paused, left):
        self.selected = bool(paused)  # else these are the founders
        return super().select(paused, left)

    def state_dict(self):
        if self.selected and self.fails:
            self.fails.pop()
            raise RuntimeError("no state")
        return super().state_dict()


def test_a_selection_is_not_written_without_the_searchers_state(tmp_path):
    def rig(name, *fails):
        (tmp_path / name).mkdir()
        make = functools.partial(Unwritten, list(fails), members=4, share=0.5)
        return Rig(tmp_path / name, climbs(4), searcher=make, slots=2)

    budget = Budget(trials=12)
    whole = rig("whole").run(budget)
    cut = rig("cut", "once")
    with pytest.raises(Exception, match="no state"):
        cut.run(budget)
    assert {line.trial.state for line in cut.lines} == {TrialState.PAUSED}, "nobody was stopped"
    assert [(trial.suggestion, trial.state, trial.results) for trial in cut.run(budget)] == [
        (trial.suggestion, trial.state, trial.results) for trial in whole
    ]


class Net(torch.nn.Module):
    def __init__(self, width, dropout=0.2):
        super().__init__()
        self.a, self.b, self.c = (
            torch.nn.Linear(8, width),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(width, 2),
        )

    def forward(self, x):
        return self.c(self.b(torch.relu(self.a(x))))


RATES = []


def trains(ctx):
    """A loss that a scheduler, momenta and dropout have a part in; `tag` has none."""
    model = Net(ctx.config.get("width", 8))
    ctx.inherit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    loader = ctx.loader(data(), batch_size=32)
    for epoch in loader.epochs(6):
        for x, y in epoch:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        RATES.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        ctx.report(loss=float(loss.detach()), epoch=epoch.number, rate=RATES[-1], step=ctx.step)


def search(store, train=trains, searcher=None, space=None, **options):
    searcher = searcher or Population(members=4, share=0.25)
    options = {"budget": Budget(trials=40, epochs=24), "name": "p", **options}
    name = options.pop("name")
    return elastix.Campaign(
        train,
        space=space or ConfigurationSpace(space=[Float("lr", (1e-3, 1e-1), log=True)]),
        searcher=searcher,
        metric="loss",
        mode="min",
        run=elastix.RunConfig(name=name, store=str(store), seed=1),
        executor=Local(),
        quiet=True,
        **options,
    ).run()


def test_members_are_trained_to_the_end_and_children_go_on_where_their_parents_stood(tmp_path):
    results = search(tmp_path)
    assert sum(trial.epochs for trial in results) == 24, "four members of six epochs"
    states = [trial.state for trial in results]
    assert set(states) == {TrialState.FINISHED, TrialState.STOPPED}
    assert states.count(TrialState.FINISHED) == 4
    children = [trial for trial in results if trial.suggestion.in_place]
    assert len(children) == 5, "one at each of five selections"
    for child in children:
        parent = results[child.suggestion.parent_number]
        assert child.inherited["ref"] == child.suggestion.parent
        first = child.results[0]
        before = next(r for r in parent.results if r["epoch"] == first["epoch"] - 1)
        assert first["step"] == before["step"] + 3
        assert child.lineage_epochs == child.epochs + before["epoch"] + 1
        schedule = results.schedule(child.number)
        assert schedule[-1].trial == child.number
        assert schedule[-1].begin == first["epoch"]
        assert schedule[-2].trial == parent.number
        spans = [(part.begin, part.end) for part in schedule]
        assert spans[0][0] == 0.0
        assert all(end == begin for (_, end), (begin, _) in pairwise(spans))
    for trial in results:
        if trial.state is TrialState.FINISHED:
            assert trial.results[-1]["epoch"] == 5
            assert trial.lineage_epochs == 6
        lr = trial.config["lr"]
        for result in trial.results:  # the rate is that of its own base at that epoch
            cosine = (1 + torch.cos(torch.tensor(torch.pi * result["epoch"] / 6)).item()) / 2
            assert result["rate"] == pytest.approx(lr * cosine, rel=1e-5)


def test_a_table_says_who_went_on_where(tmp_path):
    results = search(tmp_path, searcher=Population(members=2, share=0.5))
    where = [*("campaign", "show", "p", "--top", "0", "-s", str(tmp_path))]
    shown = json.loads(CliRunner().invoke(cli.app, [*where, "--json"]).output)["trials_shown"]
    in_place = [trial.number for trial in results if trial.suggestion.in_place]
    assert sorted(trial["trial"] for trial in shown if trial["in_place"]) == in_place
    head, *lines = CliRunner().invoke(cli.app, where).output.splitlines()
    parents = [line.split("\t")[head.split("\t").index("parent")] for line in lines]
    told = sorted(parent for parent in parents if " at " in parent)
    assert told == sorted(
        f"{results[n].suggestion.parent_number} at {results[n].results[0]['epoch']}"
        for n in in_place
    )
    assert [row["m:in_place"] for row in results.rows()] == [
        trial.number in in_place for trial in results
    ]


def test_what_is_enqueued_are_the_first_members(tmp_path):
    results = search(tmp_path, enqueued=[{"lr": 0.01}, {"lr": 0.02}])
    assert [trial.config["lr"] for trial in results[:2]] == [0.01, 0.02]
    first = [trial for trial in results if trial.suggestion.parent_number is None]
    assert len(first) == 4


def test_what_is_enqueued_and_proposed_as_well_is_one_member(tmp_path):
    """All of a small space are members; none of them twice, and so none is missing."""
    values = [0.0, 0.25, 0.5, 0.75]
    space = ConfigurationSpace(space=[Categorical("x", values)])

    class Few(Population):
        def start(self, given, *, objectives=1, seed=0):
            super().start(space, objectives=objectives, seed=seed)

    rig = Rig(tmp_path, climbs(1), searcher=lambda: Few(members=4))
    trials = rig.run(Budget(trials=4), enqueued=[{"x": 0.75}, {"x": 0.25}])
    assert sorted(trial.config["x"] for trial in trials) == values


class Renamed(Population):
    """Changes nothing that the train function uses."""

    def _changed(self, config, rng):
        return {**config, "tag": 1 - config["tag"]}


def test_a_child_that_changes_nothing_is_its_parent_byte_for_byte(tmp_path):
    """Weights, momenta, rates, order of samples, random numbers: all go on."""
    space = ConfigurationSpace(space=[Categorical("lr", [0.01]), Categorical("tag", [0, 1])])
    results = search(tmp_path, space=space, searcher=Renamed(members=2, share=0.5))
    ended = [trial for trial in results if trial.state is TrialState.FINISHED]
    assert any(trial.suggestion.in_place for trial in ended)
    alone = search(tmp_path, name="q", space=space, searcher=Population(members=2, share=0.0))
    plain = [dict(trial.results[-1]) for trial in alone]
    with elastix.Store(str(tmp_path), read_only=True) as store:
        known = [store.get(trial.ref).model for trial in alone]
        for trial in ended:
            assert dict(trial.results[-1]) in plain
            mine = store.get(trial.ref).model
            assert any(all(torch.equal(mine[n], other[n]) for n in mine) for other in known)


class Tied(Net):
    """Two names for one tensor; and something besides tensors."""

    def __init__(self):
        super().__init__(2)
        self.d = torch.nn.Linear(8, 2, bias=False)
        self.d.weight = self.a.weight
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        return super().forward(x) + self.d(x)

    def get_extra_state(self):
        return {"passes": self.passes}

    def set_extra_state(self, state):
        self.passes = state["passes"]


class Steps:
    def __init__(self):
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def counts(ctx):
    """What it counts itself, and what its model does, is reported beside the real number."""
    model, steps = Tied(), Steps()
    ctx.inherit(model)
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), ctx.config["lr"]))
    ctx.track(steps=steps)
    for epoch in ctx.loader(data(), batch_size=32).epochs(4):
        for x, y in epoch:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            steps.taken += 1
        ctx.report(loss=float(loss.detach()), real=ctx.step, steps=steps.taken, model=model.passes)


def test_a_model_with_tied_weights_goes_on_with_all_that_belongs_to_it(tmp_path):
    results = search(tmp_path, train=counts, searcher=Population(members=2, share=0.5))
    assert any(trial.suggestion.in_place for trial in results)
    told = [result for trial in results for result in trial.results]
    assert [(each["steps"], each["model"]) for each in told] == [
        (each["real"], each["real"]) for each in told
    ]


def two_modules(ctx):
    """What the second one is before and after an epoch, and how many steps its momenta know."""
    first, second = Net(ctx.config.get("width", 2)), torch.nn.Linear(2, 2)
    ctx.inherit(first)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=ctx.config["lr"])
    first, second, optimizer = ctx.prepare(first, second, optimizer)
    for epoch in ctx.loader(data(), batch_size=32).epochs(4):
        before = second.bias.detach().tolist()
        for x, y in epoch:
            optimizer.zero_grad()
            loss = F.cross_entropy(second(first(x)), y)
            loss.backward()
            optimizer.step()
        known = optimizer.state[second.bias]["step"].item()
        after = second.bias.detach().tolist()
        report = {"before": str(before), "after": str(after), "known": known, "step": ctx.step}
        ctx.report(loss=float(loss.detach()), **report)


def test_further_modules_go_on_as_the_parent_has_them(tmp_path):
    results = search(tmp_path, train=two_modules, searcher=Population(members=2, share=0.5))
    children = [trial for trial in results if trial.suggestion.in_place]
    assert children
    for child in children:
        first = child.results[0]
        assert first["known"] == first["step"]
        line = results[child.suggestion.parent_number].results
        stood = [each["after"] for each in line if each["step"] < first["step"]]
        assert first["before"] == stood[-1]


def constant(ctx):
    """Trains with the rate that its configuration has, or has for this epoch."""
    model = Net(8)
    ctx.inherit(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    for epoch in ctx.loader(data(), batch_size=32).epochs(6):
        for begin, lr in ctx.config.get("schedule", ()):
            if epoch.number >= begin:
                optimizer.param_groups[0]["lr"] = lr
        for x, y in epoch:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        ctx.report(loss=float(loss.detach()))


def test_a_schedule_replayed_in_one_training_gives_the_same_losses(tmp_path):
    results = search(tmp_path, train=constant, searcher=Population(members=4, share=0.5))
    ended = [trial for trial in results if trial.state is TrialState.FINISHED]
    longest = max(ended, key=lambda trial: len(results.schedule(trial.number)))
    schedule = results.schedule(longest.number)
    assert len(schedule) > 2
    parts = [(part.begin, part.config["lr"]) for part in schedule]
    replayed = execute(
        constant,
        Work(
            number=0,
            name="replay",
            config={"lr": parts[0][1], "schedule": parts},
            seed=results.seed_of(schedule[0].trial),
            order_seed=1,
        ),
        worker="here",
        tell=lambda report: None,
    )
    assert not replayed.traceback
    assert [result["loss"] for result in longest.results] == [
        replayed.results[n]["loss"] for n in range(6 - len(longest.results), 6)
    ]


def test_a_member_may_change_its_width(tmp_path):
    space = ConfigurationSpace(
        space=[Float("lr", (1e-3, 1e-1), log=True), Categorical("width", [4, 8, 16])]
    )
    results = search(tmp_path, space=space, searcher=Population(members=4, share=0.5))
    changed = [
        trial
        for trial in results
        if trial.suggestion.in_place
        and trial.config["width"] != results[trial.suggestion.parent_number].config["width"]
    ]
    assert changed
    assert all(trial.state is not TrialState.FAILED for trial in results)
    ended = [trial for trial in results if trial.state is TrialState.FINISHED]
    assert all(trial.results[-1]["epoch"] == 5 for trial in ended)


def test_two_halves_are_the_whole(tmp_path):
    whole = search(tmp_path / "one")
    search(tmp_path / "two", budget=Budget(trials=40, epochs=9))
    halves = search(tmp_path / "two")
    shown = [[(t.config, t.results, t.state, t.suggestion.parent_number) for t in found]
             for found in (whole, halves)]  # fmt: skip
    assert shown[0] == shown[1]


def test_after_the_end_a_population_begins_again_with_what_it_has_learned(tmp_path):
    results = search(tmp_path, budget=Budget(trials=14, epochs=48))
    again = [t for t in results if t.suggestion.parent_number is not None
             and not t.suggestion.in_place]  # fmt: skip
    assert len(again) == 4
    assert all(trial.results[0]["epoch"] == 0 and trial.inherited for trial in again)
    later = [t for t in results[again[0].number :] if t.suggestion.in_place]
    assert later
    for trial in later:
        schedule = results.schedule(trial.number)
        assert (schedule[0].trial in {t.number for t in again}, schedule[0].begin) == (True, 0.0)
        assert schedule[-1].begin == trial.results[0]["epoch"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rungs": Asha()},
        {"inherit": elastix.InheritConfig(mode="none")},
        {"inherit": elastix.InheritConfig(provider="store")},
        {"enqueued": [{"lr": 0.01 * place} for place in range(1, 6)]},
    ],
)
def test_what_cannot_go_with_a_population_is_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match="Population"):
        search(tmp_path, **wrong)
    assert not list(tmp_path.iterdir())
