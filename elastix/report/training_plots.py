"""The plots of a training run: who was in the group, how fast it went, what was reported."""

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from elastix.observe.progress import Loss
from elastix.report.figures import (
    HOVER,
    Clock,
    Figure,
    Trace,
    axis,
    figure,
    finite,
    metric_axis,
    stacked,
    upright,
)
from elastix.report.training import Training


def training_figures(training: Training) -> list[Figure]:
    """All that a run has."""
    rates = [_rates(training)] if training.rates.samples else []
    return [_membership(training), *rates, *_curves(training)]


def _membership(training: Training) -> Figure:
    clock = Clock.over(training.length_s)
    bars = training.bars
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "in the group",
            "base": [clock(bar.start) for bar in bars],
            "x": [clock(bar.stop - bar.start) for bar in bars],
            "y": [bar.worker for bar in bars],
            "text": [f"worker {bar.worker}: {bar.start:.2f} s to {bar.stop:.2f} s" for bar in bars],
            "textposition": "none",
            "hovertemplate": HOVER,
            "marker": {"color": "@0"},
            "width": 0.62,
        }
    ]
    losses = training.progress.losses
    points: list[tuple[float, int, str]] = [
        (loss.t - training.began, loss.worker, _loss_text(loss)) for loss in losses
    ]
    traces.append(_marks("lost", "x", "@loss", points, clock))
    points = [
        (loss.t - training.began + loss.stall_s, loss.worker, _loss_text(loss))
        for loss in losses
        if loss.stall_s is not None
    ]
    traces.append(_marks("the others recovered", "line-ns-open", "@ok", points, clock))
    for kind, name, symbol, colour in (
        ("shadow", "resumed from the shadow", "diamond", "@ok"),
        ("join", "joined", "triangle-right", "@ok"),
        ("left", "left", "triangle-left", "@warn"),
        ("slow", "slow", "hourglass", "@warn"),
        ("error", "went wrong", "star", "@loss"),
    ):
        points = [
            (at, worker, text)
            for at, k, worker, text in training.marks
            if k == kind and worker >= 0
        ]
        traces.append(_marks(name, symbol, colour, points, clock))
    restarts = [at for at, kind, _, _ in training.marks if kind == "restart"]
    workers = len({bar.worker for bar in bars})
    rows = [row for trace in traces for row in trace["y"]] or [0]
    return Figure(
        "membership",
        "Membership",
        "Who was in the group when. A cross is a loss, the tick after it the moment at which the "
        "slowest survivor had the agreed step, a green triangle a worker that joined, a yellow one "
        "a worker that left as agreed.",
        figure(
            [trace for trace in traces if trace["y"]],
            max(190, min(900, 130 + 24 * workers)),
            barmode="overlay",
            xaxis=_since(training, clock),
            yaxis={
                "title": {"text": "worker"},
                "range": [max(rows) + 0.7, min(rows) - 0.7],  # the first on top; no tick beyond
                "dtick": max(1, math.ceil(workers / 30)),
            },
            shapes=[upright(clock(at)) for at in restarts],
        ),
        wide=True,
    )


def _since(training: Training, clock: Clock) -> dict[str, Any]:
    """Time since the run began, from shortly before there was a group: starting may take long."""
    start = min((bar.start for bar in training.bars), default=0.0)
    margin = 0.02 * (training.length_s - start)
    ends = [clock(max(0.0, start - margin)), clock(training.length_s + margin)]
    return {**clock.axis("run"), "range": ends}


def _loss_text(loss: Loss) -> Markup:
    rank = f"rank {loss.rank}" if loss.rank >= 0 else "not in the group yet"
    told = [f"worker {loss.worker} ({rank}) {loss.cause} after step {loss.step}"]
    if loss.stall_s is not None:
        told.append(f"recovered in {loss.stall_s:.3f} s, of it new group {loss.rebuild_s:.3f} s")
        told.append(f"{loss.outcome}, 0 steps lost")
    return stacked(*told)


def _marks(
    name: str,
    symbol: str,
    colour: str,
    points: Sequence[tuple[float, int, str]],
    clock: Clock,
) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [clock(at) for at, _, _ in points],
        "y": [worker for _, worker, _ in points],
        "text": [text for _, _, text in points],
        "hovertemplate": HOVER,
        "marker": {
            "symbol": symbol,
            "size": 11,
            "color": colour,
            "line": {"width": 2, "color": colour},
        },
    }


def _rates(training: Training) -> Figure:
    clock = Clock.over(training.length_s)
    rates = training.rates
    full = training.progress.goodput.full_rate
    at = [clock((i + 0.5) * rates.width_s) for i in range(len(rates.samples))]
    sizes = [*training.sizes, *((training.length_s, n) for _, n in training.sizes[-1:])]
    per_s = [round(samples / rates.width_s, 3) for samples in rates.samples]
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "samples/s",
            "x": at,
            "y": per_s,
            "fill": "tozeroy",
            "line": {"color": "@0", "width": 1.5},
            "hovertemplate": Markup("%{y:.0f} samples/s<extra></extra>"),
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "workers",
            "x": [clock(at) for at, _ in sizes],
            "y": [size for _, size in sizes],
            "yaxis": "y2",
            "line": {"color": "@1", "width": 1.5, "shape": "hv"},
            "hovertemplate": Markup("%{y} workers<extra></extra>"),
        },
    ]
    shapes = []
    if full:
        line = {"color": "@ok", "width": 1, "dash": "dash"}
        ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": full, "y1": full}
        shapes.append({"type": "line", "line": line, **ends})
    share = training.progress.goodput.share
    known = "" if share is None else f" Goodput over the run: {share:.1%}."
    return Figure(
        "goodput",
        "Goodput",
        f"Samples committed per second, in bins of {rates.width_s:g} s; the dashed line is the "
        f"rate of the largest group while nothing happened.{known}",
        figure(
            traces,
            xaxis=_since(training, clock),
            yaxis={"title": {"text": "samples/s"}, "rangemode": "tozero"},
            yaxis2={
                "title": {"text": "workers"},
                "overlaying": "y",
                "side": "right",
                "rangemode": "tozero",
                "showgrid": False,
                "tickmode": "linear",
                "dtick": max(1, math.ceil(max((n for _, n in training.sizes), default=1) / 6)),
            },
            shapes=shapes,
        ),
        wide=True,
    )


def _curves(training: Training) -> list[Figure]:
    figures = []
    for place, (name, curve) in enumerate(training.curves.items()):
        points = curve.points
        trace = {
            "type": "scatter",
            "mode": "lines+markers" if len(points) < 80 else "lines",
            "name": name,
            "x": [point.step for point in points],
            "y": [finite(point.value) for point in points],
            "line": {"color": f"@{place % 8}", "width": 2},
            "marker": {"size": 5},
            "hovertemplate": Markup("step %{x}: %{y:.4g}<extra></extra>"),
        }
        thinned = f" One value in {curve.stride} is shown." if curve.stride > 1 else ""
        losses = [upright(loss.step) for loss in training.progress.losses if loss.rank >= 0]
        figures.append(
            Figure(
                f"curve-{place}",
                name,
                f"As reported; a dotted line is a loss of a worker.{thinned}",
                figure([trace], 260, xaxis=axis("step"), yaxis=metric_axis(), shapes=losses[:100]),
            )
        )
    return figures
