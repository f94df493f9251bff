"""What the report tells: folds, fronts, trees and figures, without a browser."""

import itertools
import json
import math
import os
import random
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastix import report
from elastix.errors import Corrupt, NotFound, StoreError
from elastix.events import (
    BatchShares,
    LoaderOpened,
    ReplicasDiverged,
    Reported,
    Resumed,
    RunEnded,
    RunStarted,
    SamplesLeftOut,
    StateStored,
    StepCommitted,
    StepVoided,
    WorkerRaised,
    WorkersMeasured,
)
from elastix.observe.event_text import line
from elastix.observe.journal import Journal
from elastix.report import campaign_part, training_part, write_report
from elastix.report.campaign_plots import campaign_figures
from elastix.report.compose import campaign_page, training_page
from elastix.report.lineage_layout import layout
from elastix.report.page import figures_of, render, write
from elastix.report.side_by_side import differing
from elastix.report.training import Curve, Point, Rates, tell
from elastix.report.training_plots import training_figures
from elastix.report.trials import CampaignRecord, TrialRecord, columns, importance
from tests.report_data import BEGAN, campaign, run_events


def trial(number: int, *values: float, **more: Any) -> TrialRecord:
    given = {"config": {"x": number}, "state": "finished", "values": values, **more}
    return TrialRecord(number=number, **given)


def record(*trials: TrialRecord, objectives=(("score", "max"),)) -> CampaignRecord:
    return CampaignRecord(name="c", objectives=objectives, trials=trials)


# ------------------------------------------------------------------ a run


@given(st.integers(1, 20_000))
def test_a_curve_is_thinned_evenly_and_keeps_its_ends(amount):
    curve = Curve()
    for step in range(amount):
        curve.add(Point(step, float(step), float(step)))
    steps = [point.step for point in curve.points]
    assert steps[0] == 0
    assert steps[-1] == amount - 1
    assert len(steps) <= 1001
    gaps = {b - a for a, b in itertools.pairwise(steps[:-1])}
    assert gaps <= {curve.stride}
    assert amount < 1000 or len(steps) > 500


@given(st.lists(st.tuples(st.floats(0, 500), st.integers(0, 500)), min_size=1, max_size=200))
def test_rates_lose_no_sample(entries):
    rates = Rates()
    t = 0.0
    for wait, samples in entries:
        t += wait
        rates.add(t, samples)
    assert sum(rates.samples) == pytest.approx(sum(samples for _, samples in entries))
    assert len(rates.samples) <= 301


def test_a_stall_shows_as_long_as_it_was():
    rates = Rates()
    for t in (*(n / 10 for n in range(1, 101)), *(20 + n / 10 for n in range(1, 101))):
        rates.add(t, 10)
    per_s = [samples / rates.width_s for samples in rates.samples]
    assert per_s[4:36] == pytest.approx([100.0] * 32)
    assert all(rate < 2 for rate in per_s[44:76])


@pytest.mark.parametrize("back_s", [5, 10_000])
def test_a_clock_that_is_set_back_makes_no_time_negative_and_loses_no_sample(back_s):
    events = list(run_events(steps=600))
    late = events[len(events) // 2].t
    events = [replace(e, t=e.t - back_s) if e.t > late else e for e in events]
    told = tell(events)
    assert sum(told.rates.samples) == pytest.approx(told.progress.samples)
    assert all(bar.start <= bar.stop for bar in told.bars)
    assert training_page("r", "s", told, None, late).status == "finished"


def test_a_run_that_goes_on_by_an_earlier_clock_is_marked_as_that():
    begun = RunStarted(t=BEGAN, name="r", seed=0, config={}, scaling={}, versions={})
    told = tell([begun, replace(begun, t=BEGAN - 3600)])
    assert [kind for _, kind, _, _ in told.marks] == ["restart"]


def test_bars_are_who_was_in_the_group_when():
    events = list(run_events(steps=400, kill_every=170))
    training = tell(events)
    committed = [event for event in events if isinstance(event, StepCommitted)]
    for event in committed:
        t = event.t - training.began
        inside = [bar for bar in training.bars if bar.start < t <= bar.stop or bar.start == t]
        assert len(inside) >= event.world_size
    assert len({bar.worker for bar in training.bars}) == 10
    assert training.audit.exact
    assert training.states_stored == 2


def test_what_a_restart_went_back_behind_is_void():
    events = list(run_events(steps=100, kill_every=1000))
    half = next(i for i, e in enumerate(events) if isinstance(e, StepCommitted) and e.step == 60)
    began = RunStarted(t=BEGAN + 900, name="digits", seed=7, config={}, scaling={}, versions={})
    again = [e for e in events[half + 1 :] if isinstance(e, StepCommitted | Reported | RunEnded)]
    reported = Reported(t=BEGAN + 20, seq=9, step=55, metrics={"accuracy": 7.0})
    redone = [e for e in events if isinstance(e, StepCommitted) and 50 < e.step <= 60]
    resumed = Resumed(t=BEGAN + 901, step=50, ref="")
    training = tell([*events[: half + 1], reported, began, resumed, *redone, *again])
    assert training.audit.exact
    assert training.progress.samples == 100 * 240
    assert 7.0 not in [point.value for point in training.curves["accuracy"].points]
    assert [kind for _, kind, _, _ in training.marks] == ["restart"]


def test_a_page_of_a_long_run_stays_small():
    def long():
        for event in run_events(steps=12_000, kill_every=40, step_s=1.0):
            yield event
            if isinstance(event, StepCommitted):
                metrics = {f"m{n}": event.step / 7 for n in range(6)}
                yield Reported(t=event.t, seq=event.step, step=event.step, metrics=metrics)

    text = render(training_page("r", "s", tell(long()), None, BEGAN))
    assert len(text.encode()) < 5_000_000


@pytest.mark.parametrize("how", ["raised", "failed"])
def test_the_first_failure_is_on_the_page(how):
    events = list(run_events(steps=10, ended=False))
    t = events[-1].t
    if how == "raised":
        events += [
            WorkerRaised(t=t, worker=n, rank=n, step=10, traceback=f"KeyError: {n}") for n in (1, 2)
        ]
    events.append(RunEnded(t=t, outcome="failed", step=10, message="too few <workers>"))
    page = training_page("r", "s", tell(events), None, t)
    assert page.status == "failed"
    assert page.failure.text == ("KeyError: 1" if how == "raised" else "too few <workers>")


def test_a_run_that_failed_before_its_first_step_has_no_plot_of_rates_and_no_rank():
    events = [
        RunStarted(t=BEGAN, name="r", seed=0, config={}, scaling={}, versions={}),
        WorkerRaised(t=BEGAN + 1, worker=2, rank=-1, step=0, traceback="KeyError: 'lr'"),
        RunEnded(t=BEGAN + 1, outcome="failed", step=0, message="KeyError: 'lr'"),
    ]
    page = training_page("r", "s", tell(events), None, BEGAN + 2)
    assert "worker 2, before it joined the group" in page.failure.title
    assert "rank -1" not in render(page)
    assert "goodput" not in [figure.id for figure in training_figures(tell(events))]
    assert "goodput" in [figure.id for figure in training_figures(tell(run_events(steps=5)))]


def test_a_run_that_goes_on_can_be_looked_at_and_says_so():
    training = tell(run_events(steps=30, ended=False))
    last = training.progress.last_t
    page = training_page("r", "s", training, None, last + 1)
    assert (page.status, page.live) == ("running", True)
    assert "Still going on: this is how it stood at" in render(page)
    silent = training_page("r", "s", training, None, last + 999)
    assert silent.status == "silent"
    assert "Still going on" not in render(silent)
    assert "it may have been killed" in render(silent)
    assert training.bars[0].stop == training.length_s


def test_the_report_of_a_directory(tmp_path):
    with Journal(tmp_path / "runs" / "digits" / "journal.jsonl") as journal:
        for event in run_events(steps=30, ended=False):
            journal.append(event)
        path = write_report("digits", tmp_path)  # while it is being written
        assert path == tmp_path / "runs" / "digits" / "report.html"
        before = path.read_text()
        assert "30" in before
        journal.append(RunEnded(outcome="finished", step=30))
    assert write_report("digits", tmp_path, out=tmp_path / "x" / "y.html").exists()
    assert path.read_text() == before
    with pytest.raises(NotFound, match=r"no run 'digit' in .*. It has digits"):
        write_report("digit", tmp_path)
    with pytest.raises(NotFound, match="It has no runs"):
        write_report("digits", tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="could not be written"):
        write_report("digits", tmp_path, out=tmp_path / "file" / "y.html")
    names = {p.name for p in path.parent.iterdir()}
    assert names == {"journal.jsonl", "journal.lock", "report.html"}


# ------------------------------------------------------------------ a campaign


def test_the_best_and_where_it_comes_from():
    trials = [trial(0, 0.1), trial(1, 0.3, parent=0), trial(2, 0.9, state="failed"), trial(3, 0.3)]
    found = record(*trials, trial(4, math.nan), trial(5, 0.8, parent=1))
    assert [t.number for t in found.ancestry(found.best)] == [5, 1, 0]
    assert [t.number for t in found.best_so_far(found.trials)] == [0, 1, 5]
    low = record(*trials, objectives=(("loss", "min"),))
    assert low.best.number == 0


def test_controls_from_scratch_decide_on_the_best_as_in_the_results():
    trials = [trial(0, 0.1), trial(1, 0.9, parent=0), trial(2, 0.8, parent=1)]
    controls = (trial(3, 0.5, parent=1), trial(4, 0.6, parent=2), trial(5, parent=0))
    found = replace(record(*trials), controls=controls)
    assert found.best is controls[1]
    assert [t.number for t in found.ancestry(found.best)] == [4, 2, 1, 0]
    told = [str(tile) for tile in campaign_part.tiles(found)]
    assert any("trial 4 \N{LEFTWARDS ARROW} 2" in tile for tile in told)
    assert replace(found, controls=controls[2:]).best is trials[1], "that one failed"


def test_a_campaign_ran_as_long_as_its_processes_did():
    found = replace(record(trial(0, 0.1)), began=BEGAN, last=BEGAN + 1000, idle_s=990.0)
    assert "ran 0:10" in campaign_page(found, Path("store"), None, now=BEGAN + 5000).about


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=25))
def test_the_front_is_what_no_other_beats(points):
    objectives = (("a", "max"), ("b", "min"))
    found = record(*(trial(n, *map(float, p)) for n, p in enumerate(points)), objectives=objectives)

    def beats(p, q):
        return p != q and p[0] >= q[0] and p[1] <= q[1]

    expected = {n for n, q in enumerate(points) if not any(beats(p, q) for p in points)}
    assert {t.number for t in found.front()} == expected


def test_only_parameters_that_differ_have_a_column():
    nested = {"a": 1, "body": [{"w": 2}, {"w": 3}]}
    rows = [trial(0, 1.0, config=nested), trial(1, 1.0, config={"a": 1, "body": [{"w": 2}]})]
    found = columns(rows)
    assert found["body.1.w"] == [3, None]
    assert "a" not in found


def test_the_parameter_that_decides_is_the_important_one():
    chance = random.Random(1)
    trials = []
    for number in range(60):
        config = {"lr": chance.random(), "idle": chance.random(), "kind": chance.choice("abc")}
        score = -abs(config["lr"] - 0.4) + 0.05 * (config["kind"] == "b")
        trials.append(trial(number, score, config=config))
    found = importance(record(*trials))
    assert next(iter(found.shares)) == "lr"
    assert found.shares["idle"] < 0.15
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.explained > 0.5
    assert importance(record(*trials[:9])) is None
    assert importance(record(*(trial(n, 1.0) for n in range(20)))) is None


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=31))
def test_no_edges_of_a_tree_cross(choices):
    parents = {n: (c if 0 <= c < n else None) for n, c in enumerate(choices)}
    places = layout(parents)
    assert set(places) == set(parents)
    assert len(set(places.values())) == len(places)
    for node, parent in parents.items():
        assert places[node][0] == (0 if parent is None else places[parent][0] + 1)
    edges = [(places[p], places[n]) for n, p in parents.items() if p is not None]
    for (a, b), (c, d) in itertools.combinations(edges, 2):
        if a[0] == c[0]:
            assert (a[1] - c[1]) * (b[1] - d[1]) >= 0 or a == c


def test_a_lineage_may_be_deep_but_not_circular():
    deep = {n: n - 1 if n else None for n in range(5000)}
    assert layout(deep)[4999] == (4999, 0.0)
    with pytest.raises(Corrupt, match="own ancestors"):
        layout({1: 2, 2: 1, 3: None})


@pytest.mark.parametrize("objectives", [1, 2])
def test_a_campaign_has_all_its_plots(objectives):
    found = {figure.id for figure in campaign_figures(campaign(objectives=objectives))}
    assert found == {
        "history",
        "time",
        "pareto",
        "importance",
        "parallel",
        "lineage",
        "trial-curves",
    }


def test_the_axes_of_parallel_coordinates_end_with_their_ticks():
    """Plotly draws ticks that are beyond an axis' range all the same, outside of the plot."""
    chance = random.Random(0)
    trials = []
    for number in range(20):
        config = {"lr": 2.5e-4 * 10 ** (2.3 * number / 19), "dropout": chance.random()}
        config |= {"depth": chance.randint(1, 9)} if number % 3 else {}
        config |= {"kernel": (3, 5)[number % 2]}
        trials.append(trial(number, chance.random(), config=config))
    figures = {figure.id: figure for figure in campaign_figures(record(*trials))}
    axes = {a["label"]: a for a in figures["parallel"].figure["data"][0]["dimensions"]}
    assert axes["lr"]["ticktext"][0] == "0.0001"
    assert axes["kernel"]["tickvals"] == [3, 5]  # none between two choices
    for name in ("lr", "dropout", "depth", "kernel"):
        marks = [*axes[name]["tickvals"], *axes[name]["values"]]
        low, high = axes[name]["range"]
        assert low <= min(marks) < max(marks) <= high


def test_choices_are_shown_as_they_are_at_parallel_coordinates():
    """Plotly reads no markup there: quotes were shown as &#34;."""
    trials = [trial(n, 0.1 * n, config={"kind": ('a "b"', "<c>")[n % 2]}) for n in range(4)]
    found = json.loads(figures_of(campaign_page(record(*trials), "s", None, BEGAN)))
    (kind, _) = found["parallel"]["data"][0]["dimensions"]
    assert kind["ticktext"] == ["<c>", 'a "b"']


def test_small_values_of_a_metric_have_no_prefix_and_near_ones_are_told_apart():
    """Plotly's own ticks say 500μ for a loss of 0.0005, and six digits 2.30259 at all of a plot."""
    told = tell([*run_events(steps=20), Reported(t=BEGAN + 9, seq=9, step=20, metrics={"x": 5e-4})])
    plots = [figure for figure in training_figures(told) if figure.id.startswith("curve-")]
    plots += [f for f in campaign_figures(campaign()) if f.id not in ("importance", "parallel")]
    plots = [plot for plot in plots if plot.id != "lineage"]
    assert len(plots) > 4
    for plot in plots:
        shown = plot.figure["layout"]["yaxis"]["tickformat"].replace("~", "")  # as Python has it
        ticks = (5e-4, 2e-10, 2.3025851, 2.3025852, 12345685)
        assert [float(format(tick, shown)) for tick in ticks] == [*ticks]
        assert format(5e-4, shown) == "0.0005"


def test_a_campaign_without_a_score_has_a_page_and_no_plots():
    failed = trial(0, state="failed", traceback="Traceback\nKeyError: 'x'")
    running = TrialRecord(number=1, config={}, state="running")
    for trials in ((), (running,), (failed, running)):
        page = campaign_page(record(*trials), "s", None, BEGAN)
        assert not [f for section in page.sections for f in section.figures]
        render(page)
    assert page.failure.text.endswith("KeyError: 'x'")


def test_a_campaign_says_what_it_was_begun_with_and_by_how_much_its_best_was_trained():
    facts = {"rungs": "NoneType()", "code": "f00", "seed": 0, "budget": {"time_s": None}}
    (alone,) = campaign(trials=1).trials
    alone = replace(alone, epochs=3.0, lineage_epochs=3.0)
    page = campaign_page(replace(campaign(), facts=facts, trials=(alone,)), "s", None, BEGAN)
    (setup,) = (section for section in page.sections if section.id == "campaign-setup")
    rows = {name.text: value.text for name, value in setup.tables[0].rows}
    expected = {"rungs": "none", "train function (digest)": "f00", "seed": "0"}
    assert rows == {**expected, "budget.time_s": "none"}
    assert "all of its own" in [tile.more for tile in page.tiles]


def test_a_campaign_of_one_trial_and_one_that_varies_in_nothing():
    render(campaign_page(record(trial(0, 0.5)), "s", None, BEGAN))
    same = [trial(n, 0.5, config={"a": 1}) for n in range(30)]
    render(campaign_page(record(*same), "s", None, BEGAN))


def test_a_page_of_a_large_campaign_stays_small():
    found = campaign(trials=6000, objectives=2)
    page = campaign_page(found, "s", None, BEGAN)
    assert len(render(page).encode()) < 5_000_000
    rows = next(s for s in page.sections if s.id == "trials").tables[0].rows
    assert len(rows) <= 1000
    assert {found.best.number, 5999} <= {row[0].key for row in rows}
    assert "of 6000 trials" in page.sections[0].note


# ------------------------------------------------------------------ figures and the file


def resolved(value: Any) -> Any:
    """Colours as the page would put them."""
    if isinstance(value, dict):
        return {key: resolved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [resolved(item) for item in value]
    return "#123456" if isinstance(value, str) and value.startswith("@") else value


def all_figures():
    yield from training_figures(tell(run_events(steps=300)))
    yield from campaign_figures(campaign(objectives=2))
    yield from campaign_figures(campaign(objectives=1))


def test_plotly_knows_every_property_of_every_figure():
    for figure in all_figures():
        go.Figure(resolved(dict(figure.figure)))


def test_every_colour_is_one_that_the_page_has():
    css = Path(report.__file__).with_name("page.css").read_text()
    known = set(re.findall(r"--(\w+):", css))
    used = set()
    for figure in all_figures():
        text = json.dumps(figure.figure)
        used |= set(re.findall(r'"@(\w+)"', text))
    assert used
    assert {f"s{name}" if name.isdigit() else name for name in used} <= known


def test_text_that_has_no_bytes_is_on_the_page_all_the_same(tmp_path):
    odd = Reported(t=BEGAN + 9, seq=9, step=20, metrics={"path": "half \udc80"})
    page = training_page("r", "s", tell([*run_events(steps=20, ended=False), odd]), None, BEGAN)
    write(page, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("half \\udc80")


def test_a_page_takes_the_place_of_files_alone(tmp_path):
    """--out /dev/stdout put a file in its place, for the whole machine if this user may."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    page = training_page("r", "s", tell(run_events(steps=20, ended=False)), None, BEGAN)
    with (tmp_path / "redirected").open("w") as file:
        stdout = tmp_path / "stdout"  # as /dev/stdout is after `> redirected`
        stdout.symlink_to(f"/proc/self/fd/{file.fileno()}")
        there = set(tmp_path.iterdir())
        folder = tmp_path / "folder"
        for path in (folder, folder / "..", tmp_path / "pipe", stdout, Path()):
            with pytest.raises(StoreError, match=r"could not be written to .*: it is a folder"):
                write(page, path)
        assert set(tmp_path.iterdir()) == there
        assert stdout.is_symlink()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_page_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "report.html").mkdir()
    page = training_page("r", "s", tell(run_events(steps=20, ended=False)), None, BEGAN)
    with pytest.raises(StoreError, match="could not be written"):
        write(page, tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_nothing_of_a_user_becomes_markup():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&\u2028"
    events = [
        *run_events(steps=20, ended=False),
        Reported(t=BEGAN + 9, seq=9, step=20, metrics={evil: 1.0, "text": evil}),
        WorkerRaised(t=BEGAN + 9, worker=0, rank=0, step=20, traceback=evil),
    ]
    pages = [
        training_page(evil, evil, tell(events), None, BEGAN),
        campaign_page(
            record(
                *(trial(n, n, config={evil: n, "k": evil * n}) for n in range(12)),
                trial(12, state="failed", traceback=evil),
                objectives=((evil, "max"),),
            ),
            evil,
            None,
            BEGAN,
        ),
    ]
    for page in pages:
        text = render(page)
        assert "<script>alert" not in text
        assert "<img" not in text
        assert text.count("</script>") == 3  # figures, plotly, and our own


def started(**fields):
    given = {"name": "d", "seed": 0, "config": {}, "scaling": {}, "versions": {}, **fields}
    return RunStarted(t=BEGAN, **given)


def test_the_metric_that_checkpoints_go_by_comes_first_with_its_best_value_and_state():
    events = [
        started(checkpoint={"best": "acc", "mode": "max"}),
        Reported(t=BEGAN + 1, seq=0, step=10, metrics={"loss": 1.0, "acc": 0.9}),
        StateStored(
            t=BEGAN + 1, ref="ab" * 32, step=10, reason="best", stored_bytes=1, store_s=0.1
        ),
        Reported(t=BEGAN + 2, seq=1, step=20, metrics={"loss": float("nan"), "acc": 0.4}),
    ]
    first, *others = training_part.tiles(tell(events))
    assert (first.name, first.value, first.more) == (
        "acc",
        "0.9",
        "best, step 10, State " + "ab" * 6,
    )
    assert [tile.name for tile in others].count("acc") == 0
    (loss,) = [tile for tile in others if tile.name == "loss"]
    assert (loss.mood, loss.more) == ("bad", "not finite since step 20")


def test_a_run_that_failed_at_its_end_does_not_say_100_percent():
    tiles = {tile.name: tile for tile in training_part.tiles(tell(run_events(steps=100)))}
    assert "100%" in tiles["steps committed"].more
    failed = [*run_events(steps=100, ended=False), RunEnded(outcome="failed", step=100)]
    tiles = {tile.name: tile for tile in training_part.tiles(tell(failed))}
    assert tiles["steps committed"].more == "failed there"
    assert tiles["start-up"].value == "3.2 s"
    assert "since the group formed" in tiles["goodput"].more
    assert "no change of the group disturbed" in tiles["goodput"].meaning


def test_each_worker_has_its_node_its_samples_and_what_it_used():
    training = tell(run_events(steps=400))
    assert sum(w.samples for w in training.workers.values()) == 400 * 240
    assert training.workers[0].node == "n0"
    (section,) = [s for s in training_part.sections(training) if s.id == "workers"]
    (table,) = section.tables
    assert len(table.rows) == len(training.workers)
    assert {figure.id for figure in section.figures} == {"usage-cpu", "usage-memory", "parts"}
    quiet = [e for e in run_events(steps=50) if not isinstance(e, WorkersMeasured)]
    (section,) = [s for s in training_part.sections(tell(quiet)) if s.id == "workers"]
    assert section.figures == []


def test_what_sentinel_and_guard_found_is_listed():
    found = [
        ReplicasDiverged(
            t=BEGAN + 9, step=3, workers=(0, 1, 2), apart=(2,), parts=("model",), cure="evicted"
        ),
        StepVoided(t=BEGAN + 10, step=5, why="the gradient is not finite"),
        SamplesLeftOut(t=BEGAN + 11, loader=0, spans=((0, 10),)),
    ]
    training = tell([*run_events(steps=20, ended=False), *found])
    (group,) = [s for s in training_part.sections(training) if s.id == "group"]
    (table,) = [t for t in group.tables if t.id == "found"]
    assert [row[1].text for row in table.rows] == [line(event)[0] for event in found]


def test_how_a_run_was_started_is_part_of_its_setup():
    (setup,) = [s for s in training_part.sections(tell(run_events(steps=5))) if s.id == "setup"]
    facts = {row[0].text: row[1].text for row in setup.tables[0].rows}
    assert facts["origin.command"] == "python train.py"
    assert facts["origin.git"] == "1a2b3c4d5e6f with changes"
    assert facts["checkpoint.best"] == "accuracy"


def test_settings_that_are_no_numbers_of_the_config_are_compared_too():
    plain = next(run_events(steps=1))
    assert isinstance(plain, RunStarted)
    wire = {"wire": None, "every_steps": None, "outer_lr": 0.7, "outer_momentum": 0.9}
    diloco = {"wire": None, "every_steps": 20, "outer_lr": 0.7, "outer_momentum": 0.9}
    runs = {
        "plain": tell([replace(plain, exchange=wire)]),
        "exact": tell([replace(plain, exact=True)]),
        "outer": tell([replace(plain, exchange=diloco)]),
    }
    assert differing(runs) == {
        "exact": [False, True, False],
        "exchange.every_steps": [None, None, 20],
        "exchange.outer_lr": [None, None, 0.7],
        "exchange.outer_momentum": [None, None, 0.9],
    }


def test_what_was_left_out_on_purpose_is_not_said_to_have_been_used():
    """Nor what the train function drew without a backward pass of its own."""
    steps = [
        LoaderOpened(t=BEGAN, loader=0, length=12, batch_size=4, shuffle=False, seed=0),
        StepCommitted(t=BEGAN + 1, step=1, generation=1, world_size=1, batches=(batch(0, 4),)),
        SamplesLeftOut(t=BEGAN + 2, loader=0, spans=((4, 8),)),
        StepCommitted(
            t=BEGAN + 3,
            step=2,
            generation=1,
            world_size=1,
            batches=(batch(8, 10, passed=False), batch(10, 12)),
        ),
    ]
    training = tell([started(), *steps])
    assert training.audit is not None
    assert training.audit.exact
    (tile,) = [tile for tile in training_part.tiles(training) if tile.name == "samples"]
    assert tile.value == "8"
    assert tile.more == (
        "each exactly once; 4 left out on purpose; 2 without a backward pass of their own"
    )
    (section,) = [s for s in training_part.sections(training) if s.id == "audit"]
    assert section.note.startswith(
        "Every sample was used exactly once, but for 4 that were left out on purpose."
    )
    (table,) = section.tables
    row = dict(zip(table.columns, (cell.text for cell in table.rows[0]), strict=True))
    assert (row["left out"], row["no pass of their own"], row["missing"]) == ("4", "2", "0")


def batch(start: int, stop: int, *, passed: bool = True) -> BatchShares:
    return BatchShares(loader=0, epoch=0, shares={0: ((start, stop),)}, passed=passed)
