"""The plots of what workers use and where their time goes."""

from collections.abc import Callable

from elastix.report.figures import Clock, Figure, Trace, axis, figure
from elastix.report.training import Training

_PARTS = ("data", "compute", "reduce", "wait", "checkpoint", "evaluate", "recover", "start")
_GIB = float(1 << 30)


def usage_figures(training: Training) -> list[Figure]:
    """Empty if nothing was measured: the run was too short, or an older elastix made it."""
    shown = [
        _over_time(training, "cpu", "Processor", "cores", lambda value: value),
        _over_time(training, "memory", "Memory", "GiB", lambda value: value / _GIB),
        _over_time(training, "gpu", "GPU", "share of the time", lambda value: value),
        _over_time(training, "gpu_memory", "Memory of the GPU", "GiB", lambda value: value / _GIB),
        _parts(training),
    ]
    return [one for one in shown if one is not None]


def _over_time(
    training: Training, name: str, title: str, unit: str, scaled: Callable[[float], float]
) -> Figure | None:
    """A line for each worker."""
    clock = Clock.over(training.length_s)
    traces: list[Trace] = []
    for number, worker in sorted(training.workers.items()):
        if name in worker.usage:
            points = worker.usage[name].points
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines" if len(points) > 1 else "markers",
                    "name": f"worker {number}",
                    "x": [clock(point.t) for point in points],
                    "y": [round(scaled(point.value), 4) for point in points],
                    "line": {"color": f"@{number % 8}"},
                }
            )
    if not traces:
        return None
    caption = f"{unit[0].upper()}{unit[1:]} of each worker, a point every few seconds."
    drawn = figure(
        traces,
        260,
        xaxis=clock.axis("run"),
        yaxis=axis(unit, rangemode="tozero"),
        showlegend=1 < len(traces) <= 8,
    )
    return Figure(f"usage-{name.replace('_', '-')}", title, caption, drawn)


def _parts(training: Training) -> Figure | None:
    """A bar for each worker."""
    workers = {n: w for n, w in sorted(training.workers.items()) if w.measured}
    if not workers:
        return None
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": [f"worker {number}" for number in workers],
            "x": [round(worker.share(part), 4) for worker in workers.values()],
            "marker": {"color": f"@{colour}"},
        }
        for colour, part in enumerate(_PARTS)
        if any(worker.share(part) > 0 for worker in workers.values())
    ]
    drawn = figure(
        traces,
        max(220, min(700, 130 + 24 * len(workers))),
        barmode="stack",
        xaxis=axis("share of the time", tickformat=".0%", range=[0, 1]),
        yaxis={"autorange": "reversed"},
        showlegend=True,
    )
    caption = (
        "What the training thread was at: reading data, computing, waiting for buckets to be "
        "reduced, waiting for the others, checkpoints, evaluation, recoveries, the start."
    )
    return Figure("parts", "Where the time goes", caption, drawn, wide=True)
