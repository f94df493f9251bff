"""Several training runs on one page: curves over each other, and where their settings differ."""

import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elastix.observe.progress import duration, number
from elastix.report.figures import Figure, Trace, axis, figure, finite, metric_axis
from elastix.report.page import Cell, Page, Section, Table
from elastix.report.training import Training
from elastix.report.training_part import settings


def comparison_page(runs: Mapping[str, Training], store: Path, now: float) -> Page:
    """The page of these runs, by name, at `now`, seconds since the Unix epoch."""
    names = list(runs)
    curves = list(_curves(runs))
    parts = [Section("runs", "Runs", (), [_overview(runs)])]
    if curves:
        parts.append(Section("curves", "Curves", curves))
    parts.append(Section("settings", "Settings", (), [_settings(runs)]))
    return Page(
        name=" · ".join(names),
        kind="comparison",
        status=f"{len(names)} runs",
        about=[f"store {store}"],
        tiles=[],
        sections=parts,
        command=shlex.join(["elastix", "runs", "compare", *names, "--store", str(store)]),
        made=f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M:%S} UTC",
    )


def differing(runs: Mapping[str, Training]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs: name to the value in each; None for none."""
    rows = [_set_up(training) for training in runs.values()]
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [row.get(name) for row in rows] for name in names}
    return {name: values for name, values in found.items() if len(set(map(repr, values))) > 1}


def _set_up(training: Training) -> dict[str, Any]:
    run = training.progress.run
    return {} if run is None else {"train function": run.code, **settings(run)}


def _settings(runs: Mapping[str, Training]) -> Table:
    rows = [
        [Cell(name), *(Cell("" if value is None else number(value)) for value in values)]
        for name, values in differing(runs).items()
    ]
    same = "What else their journals have is the same" if rows else "Their journals have the same"
    caption = f"{same} in all of them. No journal has a FailureConfig."
    return Table("differing", "Settings that differ", ("setting", *runs), rows, caption, wide=True)


def _overview(runs: Mapping[str, Training]) -> Table:
    metrics = list(dict.fromkeys(n for t in runs.values() for n in t.progress.metrics))
    rows = []
    for name, training in runs.items():
        progress = training.progress
        share, best = progress.goodput.share, progress.best.value
        values = [progress.metrics.get(metric) for metric in metrics]
        shown = None if best is None else f"{best.metric} {number(best.value)}, step {best.step}"
        rows.append(
            [
                Cell(name, name),
                Cell(progress.outcome or "not over"),
                Cell(f"{progress.step:,}", progress.step),
                Cell(shown or "", best.value if best is not None else ""),
                *(Cell("" if v is None else number(v), _key(v)) for v in values),
                Cell(duration(progress.took_s), progress.took_s),
                Cell("" if share is None else f"{share:.1%}", "" if share is None else share),
                Cell(str(len(progress.losses)), len(progress.losses)),
            ]
        )
    columns = ("run", "state", "steps", "best", *metrics, "took", "goodput", "workers lost")
    return Table("overview", "At a glance", columns, rows, "", sortable=True, wide=True)


def _key(value: Any) -> float | str:  # noqa: ANN401 - whatever was reported
    return value if isinstance(value, int | float) else ""


def _curves(runs: Mapping[str, Training]) -> Iterator[Figure]:
    """A figure for each metric that any of them reported as a number."""
    metrics = dict.fromkeys(name for training in runs.values() for name in training.curves)
    for place, metric in enumerate(metrics):
        traces: list[Trace] = []
        for colour, (name, training) in enumerate(runs.items()):
            if metric not in training.curves:
                continue
            points = training.curves[metric].points
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines" if len(points) > 1 else "markers",
                    "name": name,
                    "x": [point.step for point in points],
                    "y": [finite(point.value) for point in points],
                    "line": {"color": f"@{colour % 8}"},
                }
            )
        shown = figure(traces, 320, xaxis=axis("step"), yaxis=metric_axis(metric), showlegend=True)
        yield Figure(f"compared-{place}", metric, "A line for each run, against its steps.", shown)
