"""Where the report's records come from: the trial database and the journal of a campaign.

Works while the campaign runs, and without Ray. Not here: training runs, whose events are all there
is to know (training.py).
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from elastix.events import CampaignEnded, CampaignStarted, Event, TrialLost
from elastix.observe import catalogue
from elastix.report.trials import CampaignRecord, TrialRecord
from elastix.search.results import Results
from elastix.search.trial import Objectives, Trial, campaign_of, run_of
from elastix.search.trial_database import FILE, is_at_work, state_in_words
from elastix.search.trial_runs import is_trial


def is_campaign(directory: Path) -> bool:
    """Whether the run in this directory is a campaign."""
    return (directory / FILE).is_file()


def winner(store: Path, record: CampaignRecord) -> list[tuple[str, str]]:
    """The run of a campaign's best trial. Only those of several workers are runs of their own."""
    best = record.best
    name = "" if best is None else run_of(record.name, best.number)
    return [(f"best trial: {name}", name)] if name and is_trial(store, name) else []


def campaign(store: Path, run: str) -> list[tuple[str, str]]:
    """The campaign that a run is a trial of, if it is there."""
    name = campaign_of(run)
    if name is None or name not in catalogue.names(store):
        return []
    there = is_campaign(store / "runs" / name) and is_trial(store, run)
    return [(f"campaign {name}", name)] if there else []


def campaign_record(store: Path, name: str, events: Iterable[Event]) -> CampaignRecord:
    """A campaign as it stands.

    Args:
        store: directory of the store.
        name: of the campaign.
        events: of its journal: what the database does not say.

    Raises:
        NotFound, Corrupt, StoreError: the database cannot be read.
    """
    at_work = is_at_work(store / "runs" / name)  # before it is read: it may end meanwhile
    results = Results.open(store, name)
    losses: Counter[int] = Counter()
    outcome, message = "", ""
    began = last = idle_s = 0.0
    for event in events:
        began = began or event.t
        before, last = last or event.t, event.t
        if isinstance(event, TrialLost) and not event.raised:
            losses[event.trial] += 1
        elif isinstance(event, CampaignStarted):
            outcome, message = "", ""
            idle_s += max(0.0, event.t - before)
        elif isinstance(event, CampaignEnded):
            outcome, message = event.outcome, event.message
    objectives = results.objectives
    owners = {trial.ref: trial.number for trial in results.trials if trial.ref}
    records = [_record(trial, at_work, objectives, owners, losses) for trial in results.trials]
    controls = [_record(trial, at_work, objectives, owners, losses) for trial in results.reranked]
    facts = dict(results.facts)
    budget = facts.get("budget") or {}
    # As the console and `elastix runs` tell it; the book was begun before Ray was there.
    began = began or float(facts.get("began_s", 0.0))
    began = min([began, *(t.asked_s for t in results.trials if t.asked_s is not None)])
    return CampaignRecord(
        name=name,
        objectives=tuple(zip(objectives.names, objectives.modes, strict=True)),
        trials=tuple(records),
        controls=tuple(controls),
        facts={key: facts[key] for key in facts if key not in ("metrics", "modes", "began_s")},
        budget=budget.get("trials"),
        began=began,
        outcome=outcome,
        message=message,
        last=last,
        idle_s=idle_s,
    )


def _record(
    trial: Trial,
    at_work: bool,
    objectives: Objectives,
    owners: dict[Any, int],
    losses: Counter[int],
) -> TrialRecord:
    reported = [result.get(objectives.names[0]) for result in trial.results]
    curve = [float(v) for v in reported if isinstance(v, int | float) and not isinstance(v, bool)]
    found = trial.inherited
    return TrialRecord(
        number=trial.number,
        config=trial.config,
        state=state_in_words(trial, at_work),
        values=objectives.values(trial.losses),
        curve=tuple(curve),
        ref=trial.ref,
        parent=trial.suggestion.parent_number,
        provider=owners.get(found.get("ref")) if found else None,
        inherited=float(found.get("share", 0.0)) if found else None,
        epochs=trial.epochs,
        lineage_epochs=trial.lineage_epochs,
        asked_s=trial.asked_s,
        started_s=trial.started_s,
        finished_s=trial.finished_s,
        losses=losses[trial.number],
        starved=trial.starved,
        peak_bytes=trial.peak_bytes,
        traceback=trial.traceback,
    )
