"""A campaign as parts of the page: its numbers at the top, its sections."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.filesize import decimal

from elastix.flat import flatten
from elastix.observe.event_text import last_error, plain_lines
from elastix.observe.progress import duration, number
from elastix.report.campaign_plots import campaign_figures
from elastix.report.page import Cell, Failure, Section, Table, Tile
from elastix.report.trials import CampaignRecord, TrialRecord, columns

_ROWS = 1000  # of the trial table
_DRAWN = 4000  # trials in the plots
_PARAMETERS = 24  # columns of it


def tiles(campaign: CampaignRecord) -> Iterator[Tile]:
    """What matters first."""
    states = Counter(trial.state for trial in campaign.trials)
    told = ", ".join(f"{n} {state}" for state, n in states.items())
    of = "" if campaign.budget is None else f" of {campaign.budget}"
    yield Tile("trials", f"{len(campaign.trials)}{of}", told)
    best = campaign.best
    if best is not None:
        line = " \N{LEFTWARDS ARROW} ".join(
            str(trial.number) for trial in campaign.ancestry(best)[:6]
        )
        yield Tile(f"best {campaign.metric}", number(best.values[0]), f"trial {line}", "good")
        own = f"{best.epochs:.4g} of its own, the rest inherited"
        whole = best.lineage_epochs
        own = "all of its own" if whole <= best.epochs else own
        yield Tile("epochs behind the best", f"{whole:.4g}", own)
        shares = [t.inherited for t in campaign.trials if t.inherited]
        if shares:  # as the console says it
            mean, those = sum(shares) / len(shares), "trial" if len(shares) == 1 else "trials"
            told = f"of their bytes by {len(shares)} {those}, on average"
            yield Tile("inherited", f"{mean:.0%}", told)
    lost = sum(trial.losses for trial in campaign.trials)
    if lost:
        yield Tile("workers lost", str(lost), "their trials went on")
    starved = sum(trial.starved for trial in campaign.trials)
    if starved:
        yield Tile("ran out of memory", str(starved), "and were run again with more")
    if states["failed"]:
        yield Tile("failed", str(states["failed"]), "see the table", "bad")


def sections(campaign: CampaignRecord) -> Iterator[Section]:
    """All parts."""
    drawn = _chosen(campaign, _DRAWN)
    figures = campaign_figures(replace(campaign, trials=tuple(drawn)))
    note = "" if figures else "No trial has a score yet."
    if len(drawn) < len(campaign.trials):
        note = f"Drawn are {len(drawn)} of {len(campaign.trials)} trials, the best and the latest."
    yield Section("campaign", "Campaign", figures, (), note)
    if campaign.controls:
        yield Section("controls", "From scratch", (), [_controls(campaign)])
    yield Section("trials", "Trials", (), [_trials(campaign)])
    if campaign.facts:
        rows = [_fact(name, value) for name, value in flatten(campaign.facts).items()]
        table = Table("campaign-facts", "Arguments", ("name", "value"), rows)
        yield Section("campaign-setup", "How it was set up", (), [table])


def _fact(name: str, value: Any) -> list[Cell]:  # noqa: ANN401 - any JSON value
    """A row of what a campaign was begun with: of code and space it keeps digests alone."""
    called = {"code": "train function (digest)", "space": "space (digest)"}.get(name, name)
    nothing = value is None or value == "NoneType()"  # what it calls rungs that are not there
    return [Cell(called), Cell("none" if nothing else number(value))]


def failure(campaign: CampaignRecord) -> Failure | None:
    """The first traceback, if every trial that ended has failed: then it is not chance."""
    failed = [t for t in campaign.trials if t.traceback and t.state == "failed"]
    if not failed or campaign.scored:
        if campaign.outcome == "failed":
            return Failure("Why the campaign failed", "\n".join(plain_lines(campaign.message)))
        return None
    first = min(failed, key=lambda trial: (trial.finished_s or 0.0, trial.number))
    text = "\n".join(plain_lines((first.traceback or "").strip()))
    return Failure(f"First failure: the train function raised in trial {first.number}", text)


def _chosen(campaign: CampaignRecord, most: int) -> Sequence[TrialRecord]:
    """The best and the latest, if there are more than `most`."""
    if len(campaign.trials) <= most:
        return campaign.trials
    best = sorted(campaign.scored, key=campaign.loss)[: most // 2]
    chosen = {trial.number for trial in (*best, *campaign.trials[-most // 2 :])}
    return [trial for trial in campaign.trials if trial.number in chosen]


def _trials(campaign: CampaignRecord) -> Table:
    chosen = _chosen(campaign, _ROWS)
    varied = list(columns(chosen))
    names = varied[:_PARAMETERS]
    best = campaign.best
    rows = [_row(campaign, trial, names, trial is best) for trial in chosen]
    left_out = [
        f"{len(chosen)} of {len(campaign.trials)} trials, the best and the latest."
        if len(chosen) < len(campaign.trials)
        else "",
        f"{len(names)} of {len(varied)} parameters." if len(names) < len(varied) else "",
        "Click a heading to sort. Parameters that are equal in all trials are left out.",
    ]
    heads = (
        "trial",
        "state",
        *(name for name, _ in campaign.objectives),
        "parent",
        "inherited",
        "epochs",
        "with ancestors",
        "ran",
        "peak memory",
        "model",
        *names,
        "error",
    )
    caption = " ".join(part for part in left_out if part)
    return Table("trials-table", "Trials", heads, rows, caption, sortable=True, wide=True)


def _controls(campaign: CampaignRecord) -> Table:
    """What the best are worth without what they inherited."""
    known = campaign.by_number
    rows = []
    for control in campaign.controls:
        trial = known.get(-1 if control.parent is None else control.parent)
        score = control.values[0] if control.values else None
        before = trial.values[0] if trial is not None and trial.values else None
        rows.append(
            [
                _known(control.parent),
                _known(score, "good" if control is campaign.best else ""),
                _known(before),
                _known(control.epochs),
                _known(trial.lineage_epochs if trial is not None else None),
                Cell(control.state, control.state, "bad" if control.state == "failed" else ""),
            ]
        )
    heads = ("trial", "from scratch", "as found", "epochs", "epochs behind it as found", "state")
    caption = (
        "The best trials run again from fresh weights: a child has been trained for its ancestors' "
        "epochs too, these have not."
    )
    return Table("controls-table", campaign.metric, heads, rows, caption, sortable=True, wide=True)


def _row(
    campaign: CampaignRecord, trial: TrialRecord, names: Sequence[str], is_best: bool
) -> list[Cell]:
    config = flatten(trial.config, lists="all")
    values = [*trial.values, *[None] * (len(campaign.objectives) - len(trial.values))]
    ran = None
    if trial.started_s is not None and trial.finished_s is not None:
        ran = trial.finished_s - trial.started_s
    error = last_error(trial.traceback or "")
    share = trial.inherited
    return [
        Cell(str(trial.number), trial.number),
        Cell(trial.state, trial.state, "bad" if trial.state == "failed" else ""),
        *(_known(value, "good" if is_best else "") for value in values),
        _known(trial.parent),
        Cell("", "") if share is None else Cell(f"{share:.0%}", share),
        _known(trial.epochs),
        _known(trial.lineage_epochs),
        Cell("", "") if ran is None else Cell(duration(ran) if ran >= 60 else f"{ran:.1f} s", ran),
        Cell(decimal(trial.peak_bytes) if trial.peak_bytes else "", trial.peak_bytes),
        Cell((trial.ref or "")[:12], trial.ref or ""),
        *(_known(config.get(name)) for name in names),
        Cell(error, error, "bad" if error else ""),
    ]


def _known(value: object, mood: str = "") -> Cell:
    """A number or text, sorted as what it is."""
    if value is None:
        return Cell("", "")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(number(value), value, mood)
    return Cell(str(value), str(value), mood)
