"""Which trial is the best, where trials pause and are better or worse when they go on."""

import io

from rich.console import Console as Terminal

from elastix.events import CampaignEnded, CampaignStarted, TrialEnded, TrialStarted
from elastix.observe.best_trial import BestTrial
from elastix.observe.catalogue import summary
from elastix.observe.journal import Journal
from elastix.observe.metric_series import Readings
from elastix.observe.trials_console import TrialsConsole


def begun(objectives=None):
    return CampaignStarted(
        name="nas",
        objectives=objectives or {"accuracy": "max"},
        budget={"trials": 3},
        searcher="Random",
        inherit="none",
        known=0,
        versions={},
    )


def ended(trial, state, best=False, role="search", **values):
    return TrialEnded(
        trial=trial,
        state=state,
        values=values,
        metrics={},
        ref="",
        epochs=1.0,
        lineage_epochs=1.0,
        inherited=0.0,
        seconds=1.0,
        best=best,
        role=role,
    )


FALLS = (  # the best one at a rung is the worst in the end
    ended(0, "paused", best=True, accuracy=0.9),
    ended(1, "finished", accuracy=0.6),
    ended(2, "paused", accuracy=0.7),
    ended(0, "finished", accuracy=0.5),
)


def best_of(*events):
    best = BestTrial()
    for event in events:
        best.begin(event) if isinstance(event, CampaignStarted) else best.end(event)
    return best.event


def test_the_best_counts_with_what_it_has_come_to_last():
    assert best_of(begun(), *FALLS) is FALLS[2]
    assert best_of(begun(), FALLS[0], ended(0, "paused", accuracy=0.8)).values["accuracy"] == 0.8


def test_a_mode_is_minded():
    first = ended(0, "paused", best=True, loss=0.1)
    others = (ended(1, "finished", loss=0.3), ended(2, "finished", loss=0.2))
    assert best_of(begun({"loss": "min"}), first, *others, ended(0, "failed")) is others[1]


def test_a_trial_that_fails_after_a_rung_is_not_the_best():
    assert best_of(begun(), FALLS[0], ended(0, "failed", accuracy=0.9)) is None


def test_with_several_objectives_it_is_the_latest_on_the_front():
    there = begun({"accuracy": "max", "size": "min"})
    on_it = [ended(n, "paused", best=True, accuracy=n / 10, size=n) for n in range(3)]
    assert best_of(there, *on_it) is on_it[2]
    assert best_of(there, *on_it, ended(2, "finished", accuracy=0.0, size=9)) is on_it[1]


def test_the_list_of_runs_has_the_value_of_the_best_trial(tmp_path):
    """Also if that one is paused: it was that of the best among those which had ended."""
    folder = tmp_path / "runs" / "nas"
    folder.mkdir(parents=True)
    with Journal(folder / "journal.jsonl") as journal:
        journal.append(begun())
        for event in FALLS:
            journal.append(event)
        assert summary(tmp_path, "nas").metrics == {"accuracy": 0.7}
        journal.append(CampaignEnded(outcome="finished", trials=3, best=2))
    found = summary(tmp_path, "nas")
    assert found.metrics == {"accuracy": 0.7}
    assert found.steps == 2


def test_controls_from_scratch_are_no_trials_of_the_budget(tmp_path):
    folder = tmp_path / "runs" / "nas"
    folder.mkdir(parents=True)
    file = io.StringIO()
    console = TrialsConsole("nas", folder, 3, terminal=Terminal(file=file, width=120))
    events = [begun()]
    for number, role in enumerate(["search"] * 3 + ["rerank"] * 2):
        start = {"config": {}, "parent": None, "attempt": 1, "rung": None, "role": role}
        events += [
            TrialStarted(trial=number, **start),
            ended(number, "finished", role=role, accuracy=0.1),
        ]
    with Journal(folder / "journal.jsonl") as journal:
        for event in (*events, CampaignEnded(outcome="finished", trials=3, best=0)):
            journal.append(event)
            console.show(event)
    assert summary(tmp_path, "nas").steps == 3
    dot = "\N{MIDDLE DOT}"
    assert f"trials 3 done {dot} 2 from scratch {dot} 3 budget" in file.getvalue()


class Gauges:
    def __init__(self):
        self.found = {}

    def put(self, name, value, *labels):
        self.found[name, *labels] = value

    def forget(self, name, *labels):
        self.found.pop((name, *labels), None)


def test_the_gauge_falls_with_the_best_trial():
    gauges = Gauges()
    readings = Readings(gauges)
    for event in (begun(), *FALLS):
        readings.read(event)
    assert gauges.found["best_objective", "accuracy"] == 0.7
