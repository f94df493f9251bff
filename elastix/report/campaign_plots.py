"""The plots of a campaign: its history, its parameters, its lineage."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from elastix.flat import flatten
from elastix.observe.progress import number
from elastix.report import trials as t
from elastix.report.figures import (
    BREAK,
    HOVER,
    Clock,
    Figure,
    Trace,
    axis,
    figure,
    finite,
    metric_axis,
    stacked,
)
from elastix.report.lineage_layout import layout as tree_layout
from elastix.report.trials import CampaignRecord, TrialRecord

_AXES = 10  # of the parallel coordinates
_FEW_CHOICES = 6  # numbers that have a tick each there
_LEVELS = 24  # values of a category that are told apart there
_LINES = 60  # trials with a curve of their own
_SYMBOLS = {"finished": "circle", "stopped": "circle-open", "paused": "diamond-open"}


def campaign_figures(campaign: CampaignRecord) -> list[Figure]:
    """All that a campaign has so far."""
    if not campaign.scored:
        return []
    found = t.importance(campaign)
    figures = [
        _history(campaign),
        _over_time(campaign),
        _front(campaign),
        _important(found) if found else None,
        _parallel(campaign, list(found.shares) if found else []),
        _lineage(campaign),
        _trial_curves(campaign),
    ]
    return [one for one in figures if one is not None]


def _trial_text(campaign: CampaignRecord, trial: TrialRecord) -> Markup:
    names = [name for name, _ in campaign.objectives]
    scores = [f"{n} {number(v)}" for n, v in zip(names, trial.values, strict=False)]
    told: list[object] = [f"trial {trial.number}, {trial.state}", *scores]
    if trial.parent is not None:
        told.append(f"changed from trial {trial.parent}")
    if trial.inherited is not None:
        told.append(f"inherited {trial.inherited:.0%}")
    told.append(f"epochs {trial.epochs:.4g}, with its ancestors {trial.lineage_epochs:.4g}")
    return stacked(*told)


def _points(campaign: CampaignRecord, found: Sequence[TrialRecord], **more: Any) -> Trace:  # noqa: ANN401
    return {
        "type": "scatter",
        "mode": "markers",
        "y": [trial.values[0] for trial in found],
        "text": [_trial_text(campaign, trial) for trial in found],
        "hovertemplate": HOVER,
        **more,
    }


def _history(campaign: CampaignRecord) -> Figure:
    scored = campaign.scored
    inherited = [trial for trial in scored if trial.inherited]
    fresh = [trial for trial in scored if not trial.inherited]
    traces = [
        _points(
            campaign,
            group,
            name=name,
            x=[trial.number for trial in group],
            marker={
                "color": colour,
                "size": 7,
                "symbol": [_SYMBOLS.get(trial.state, "circle") for trial in group],
            },
        )
        for name, colour, group in (("fresh", "@1", fresh), ("inherited", "@0", inherited))
        if group
    ]
    steps = list(campaign.best_so_far(scored))
    last = max(trial.number for trial in campaign.trials)
    traces.append(_best_line([x.number for x in steps], [x.values[0] for x in steps], last))
    return Figure(
        "history",
        "Best so far, by trial",
        "Every scored trial; the line is the best one so far. Open circles were stopped early, "
        "open diamonds are paused.",
        figure(
            traces,
            xaxis=axis("trial"),
            yaxis=metric_axis(campaign.metric),
        ),
    )


def _best_line(x: Sequence[float], y: Sequence[float], until: float) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "best so far",
        "x": [*x, until],
        "y": [*y, y[-1]],
        "line": {"color": "@ok", "width": 2, "shape": "hv"},
        "hovertemplate": Markup("best so far %{y:.4g}<extra></extra>"),
    }


def _over_time(campaign: CampaignRecord) -> Figure | None:
    ended = [trial for trial in campaign.scored if trial.finished_s is not None]
    if not ended:
        return None
    ended.sort(key=lambda trial: trial.finished_s or 0.0)
    began = campaign.began or min(trial.started_s or trial.finished_s or 0.0 for trial in ended)
    span = (ended[-1].finished_s or began) - began
    clock = Clock.over(span)
    at = {trial.number: clock((trial.finished_s or began) - began) for trial in ended}
    steps = list(campaign.best_so_far(ended))
    traces = [
        _points(
            campaign,
            ended,
            name="trials",
            x=[at[trial.number] for trial in ended],
            marker={"color": "@muted", "size": 5},
        ),
        _best_line([at[x.number] for x in steps], [x.values[0] for x in steps], clock(span)),
    ]
    return Figure(
        "time",
        "Best so far, by time",
        "Trials by the time at which they ended.",
        figure(
            traces,
            xaxis=clock.axis("campaign"),
            yaxis=metric_axis(campaign.metric),
        ),
    )


def _parallel(campaign: CampaignRecord, ranked: Sequence[str]) -> Figure | None:
    scored = campaign.scored
    varied = t.columns(scored)
    names = [*ranked, *(name for name in varied if name not in ranked)][:_AXES]
    if not names:
        return None
    scores = [trial.values[0] for trial in scored]
    axes = [_scale(name, varied[name]) for name in names]
    axes.append({"label": campaign.metric, "values": scores})
    trace = {
        "type": "parcoords",
        "dimensions": axes,
        "line": {
            "color": scores,
            "colorscale": "Viridis",
            "reversescale": campaign.objectives[0][1] == "min",
            "showscale": True,
        },
        "labelangle": -18 if len(axes) > 6 else 0,
    }
    left_out = len(varied) - len(names)
    which = f" The {left_out} least important are left out." if left_out else ""
    return Figure(
        "parallel",
        "Parallel coordinates",
        "A line is a trial. Drag along an axis to select, drag an axis to move it." + which,
        figure([trace], 380, margin={"t": 70, "l": 70, "r": 50, "b": 30}),
        wide=True,
        min_width=72 * len(axes),
    )


def _scale(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Numbers on a linear or logarithmic scale, anything else by name; what is absent below."""
    there = [v for v in values if v is not None]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in there):
        return _categories(name, values)
    logarithmic = min(there) > 0 and max(there) / min(there) >= 100
    places = [math.log10(v) if logarithmic else float(v) for v in there]
    low, high = min(places), max(places)
    few = len(set(places)) <= _FEW_CHOICES
    if logarithmic:
        ticks = [float(tick) for tick in range(math.floor(low), math.ceil(high) + 1)]
        texts = [f"{10.0**tick:g}" for tick in ticks]
    else:
        quarter = (high - low) / 4
        ticks = sorted(set(places)) if few else [low + quarter * part for part in range(5)]
        texts = [f"{tick:.3g}" for tick in ticks]
    if len(there) == len(values):
        whole = all(isinstance(v, int) for v in there)
        plain = not logarithmic and whole and not few
        named = {} if plain else {"tickvals": ticks, "ticktext": texts, "range": _ends(ticks)}
        return {"label": name, "values": places, **named}
    absent = min(ticks) - 0.12 * ((max(ticks) - min(ticks)) or 1.0)
    placed = iter(places)
    return {
        "label": name,
        "values": [absent if v is None else next(placed) for v in values],
        "tickvals": [absent, *ticks],
        "ticktext": ["absent", *texts],
        "range": _ends([absent, *ticks]),
    }


def _ends(ticks: Sequence[float]) -> list[float]:
    """An axis ends with its ticks: plotly draws those beyond the values outside of the plot."""
    return [ticks[0], ticks[-1] if ticks[-1] > ticks[0] else ticks[0] + 1.0]


def _categories(name: str, values: Sequence[Any]) -> dict[str, Any]:
    texts = ["absent" if v is None else number(v) for v in values]
    order = {text: i for i, text in enumerate(sorted(set(texts), key=_natural))}
    shown = [text for text, place in order.items() if place % math.ceil(len(order) / _LEVELS) == 0]
    return {
        "label": name,
        "values": [order[text] for text in texts],
        "tickvals": [order[text] for text in shown],
        "ticktext": [Markup(text) for text in shown],  # plotly reads no markup in these
    }


def _natural(text: str) -> tuple[int, float, str]:
    """Numbers by their size, then names; what is absent first."""
    try:
        return (1, float(text), text)
    except ValueError:
        return (0 if text == "absent" else 2, 0.0, text)


def _important(found: t.Importance) -> Figure:
    top = list(found.shares.items())[:15][::-1]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [share for _, share in top],
        "y": [name for name, _ in top],
        "marker": {"color": "@0"},
        "hovertemplate": Markup("%{x:.1%}<extra></extra>"),
    }
    return Figure(
        "importance",
        "Importance of parameters",
        "Permutation importance in a random forest over the trials' ranks. It explains "
        f"{max(0.0, found.explained):.0%} of their differences on trials it had not seen"
        + (": do not trust it." if found.explained < 0.3 else "."),
        figure(
            [trace],
            max(220, 70 + 22 * len(top)),
            xaxis={"tickformat": ".0%", "title": {"text": "share"}},
            yaxis={"automargin": True, "type": "category"},
        ),
    )


def _front(campaign: CampaignRecord) -> Figure:
    two = len(campaign.objectives) > 1
    scored, front = campaign.scored, campaign.front()

    def across(trial: TrialRecord) -> float:
        return trial.values[1] if two else trial.lineage_epochs

    name = campaign.objectives[1][0] if two else "epochs behind it, own and inherited"
    on_it = {trial.number for trial in front}
    others = [trial for trial in scored if trial.number not in on_it]
    front = sorted(front, key=across)
    traces = [
        _points(
            campaign,
            others,
            name="trials",
            x=[across(trial) for trial in others],
            marker={"color": "@muted", "size": 6},
        ),
        _points(
            campaign,
            front,
            name="not beaten",
            mode="lines+markers",
            x=[across(trial) for trial in front],
            marker={"color": "@0", "size": 9},
            line={"color": "@0", "width": 1, "dash": "dot"},
        ),
    ]
    more = len(campaign.objectives) - 2
    hidden = f" Of {more + 2} objectives the first two are drawn." if more > 0 else ""
    what = "both" if two else "score and cost: a child has been trained for its ancestors' epochs"
    return Figure(
        "pareto",
        "Pareto front",
        f"Trials that no other beats in {what}.{hidden}",
        figure(
            traces,
            xaxis=metric_axis(name),
            yaxis=metric_axis(campaign.metric),
        ),
    )


def _lineage(campaign: CampaignRecord) -> Figure:
    known = campaign.by_number
    places = tree_layout({trial.number: trial.parent for trial in campaign.trials})
    best = campaign.best
    line = {trial.number for trial in campaign.ancestry(best)} if best else set()
    traces: list[Trace] = []
    for name, colour, wanted in (
        ("derives from", "@muted", False),
        ("line of the best", "@ok", True),
    ):
        x: list[float | None] = []
        y: list[float | None] = []
        for trial in campaign.trials:
            parent = trial.parent
            if parent is None or parent not in known:
                continue
            if (trial.number in line and parent in line) is wanted:
                (depth, row), (above, row_above) = places[trial.number], places[parent]
                x += [above, depth, None]
                y += [row_above, row, None]
        width = 2.5 if wanted else 0.8
        edge = {"color": colour, "width": width}
        traces.append(
            {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": edge}
            | {"hoverinfo": "skip"}
        )
    for name, scored in (("without a score", False), ("trials", True)):
        group = [trial for trial in campaign.trials if trial.scored is scored]
        traces.append(_nodes(campaign, group, places, name, scored))
    rows = len({row for _, row in places.values()})
    return Figure(
        "lineage",
        "Lineage",
        "Which trial was changed from which, from left to right; the larger a point, the more of "
        "its tensors it inherited.",
        figure(
            traces,
            max(280, min(1400, 110 + 11 * rows)),
            xaxis={"title": {"text": "changes since a fresh start"}, "dtick": 1, "zeroline": False},
            yaxis={"visible": False, "autorange": "reversed"},
        ),
        wide=True,
        min_width=520,
    )


def _nodes(
    campaign: CampaignRecord,
    group: Sequence[TrialRecord],
    places: Mapping[int, tuple[int, float]],
    name: str,
    scored: bool,
) -> Trace:
    marker: dict[str, Any] = {
        "size": [7 + 9 * (trial.inherited or 0.0) for trial in group],
        "line": {"width": 1, "color": "@text"},
    }
    if scored:
        marker |= {
            "color": [trial.values[0] for trial in group],
            "colorscale": "Viridis",
            "reversescale": campaign.objectives[0][1] == "min",
            "showscale": True,
            "colorbar": {
                "title": {"text": campaign.metric},
                "thickness": 12,
                "lenmode": "pixels",
                "len": 220,
                "y": 1,
                "yanchor": "top",
            },
        }
    else:
        marker |= {"color": "@muted", "symbol": "x-thin-open"}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [places[trial.number][0] for trial in group],
        "y": [places[trial.number][1] for trial in group],
        "text": [_trial_text(campaign, trial) + _changes(campaign, trial) for trial in group],
        "hovertemplate": HOVER,
        "marker": marker,
    }


def _changes(campaign: CampaignRecord, trial: TrialRecord) -> Markup:
    """What differs from the parent."""
    parent = campaign.by_number.get(-1 if trial.parent is None else trial.parent)
    if parent is None:
        return Markup("")
    old, new = flatten(parent.config, lists="all"), flatten(trial.config, lists="all")
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    told = [f"{name}: {old.get(name, 'absent')} to {new.get(name, 'absent')}" for name in names]
    left_out = [f"and {len(told) - 6} more"] if len(told) > 6 else []
    return BREAK + stacked(*told[:6], *left_out) if told else Markup("")


def _trial_curves(campaign: CampaignRecord) -> Figure | None:
    curved = [trial for trial in campaign.scored if len(trial.curve) > 1]
    if not curved:
        return None
    curved.sort(key=campaign.loss)
    chosen = curved[:_LINES]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"trial {trial.number}",
            "x": list(range(1, len(trial.curve) + 1)),
            "y": [finite(value) for value in trial.curve],
            "line": {"color": "@muted" if place else "@ok", "width": 0.6 if place else 2.5},
            "text": [_trial_text(campaign, trial)] * len(trial.curve),
            "hovertemplate": HOVER,
            "showlegend": place == 0,
        }
        for place, trial in enumerate(chosen)
    ]
    which = f", the {len(chosen)} best of {len(curved)}" if len(curved) > len(chosen) else ""
    return Figure(
        "trial-curves",
        "Training curves",
        f"The metric after each report, the best trial in colour{which}.",
        figure(
            traces[::-1],
            xaxis=axis("report"),
            yaxis=metric_axis(campaign.metric),
        ),
        wide=True,
    )
