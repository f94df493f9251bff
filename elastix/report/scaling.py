"""The page of a scaling benchmark: rates beside DDP's, efficiency, stalls, goodput. Pure."""

from collections.abc import Sequence
from pathlib import Path

from elastix.bench.measures import Rate, ScalingMeasured, SizeMeasured
from elastix.observe.progress import number
from elastix.report.figures import Figure, Trace, axis, figure
from elastix.report.page import Cell, Page, Section, Table, Tile

COLUMNS = (
    "workers",
    "samples/s",
    "efficiency",
    "DDP samples/s",
    "DDP efficiency",
    "of DDP",
    "stall",
    "goodput",
)


def cells(found: ScalingMeasured, size: SizeMeasured) -> list[Cell]:
    """What the table says of one size, under COLUMNS."""
    shared = "*" if found.oversubscribed(size) else ""
    return [
        Cell(f"{size.workers}{shared}", size.workers),
        _rate(size.elastix),
        _percent(found.efficiency(size, "elastix")),
        _rate(size.ddp),
        _percent(found.efficiency(size, "ddp")),
        _percent(size.of_ddp),
        Cell("-") if size.stall_s is None else Cell(f"{size.stall_s:.2f} s", size.stall_s),
        _percent(size.goodput),
    ]


def _rate(rate: Rate | None) -> Cell:
    if rate is None:
        return Cell("-")
    return Cell(number(rate.samples_per_s), rate.samples_per_s)


def _percent(share: float | None) -> Cell:
    return Cell("-") if share is None else Cell(f"{share:.0%}", share)


def scaling_page(found: ScalingMeasured, command: str, made: str) -> Page:
    """The whole page.

    Args:
        found: what was measured.
        command: makes the page again.
        made: when it was made.
    """
    largest = found.sizes[-1]
    tiles = [
        Tile(
            f"samples/s with {largest.workers}",
            number(largest.elastix.samples_per_s),
            _beside(largest),
            meaning="samples of committed steps a second, undisturbed",
        ),
        Tile(
            "efficiency",
            _percent(found.efficiency(largest, "elastix")).text,
            "cores are shared" if found.oversubscribed(largest) else "",
            meaning=f"rate per worker over that with {found.sizes[0].workers}",
        ),
    ]
    if largest.stall_s is not None:
        known = sum(death.stall_s is not None for death in largest.deaths)
        tiles.append(
            Tile(
                "stall",
                f"{largest.stall_s:.2f} s",
                f"median of {known}",
                meaning="from a SIGKILL to the next step that those left have committed",
            )
        )
    if largest.goodput is not None:
        tiles.append(
            Tile(
                "goodput",
                f"{largest.goodput:.0%}",
                f"a kill every {found.timing.kill_every_s:g} s",
                meaning="samples under the kills over what the undisturbed rate had made",
            )
        )
    rows = [cells(found, size) for size in found.sizes]
    shared = any(map(found.oversubscribed, found.sizes))
    table = Table(
        "sizes",
        "All sizes",
        COLUMNS,
        rows,
        "*: more workers than cores." if shared else "Rates are of undisturbed training.",
        wide=True,
    )
    notes = Table("notes", "How to read this", ("",), [[Cell(n)] for n in found.notes], wide=True)
    return Page(
        name=Path(found.script).name,
        kind="scaling benchmark",
        status="",
        about=[
            f"function {found.function}",
            f"{found.cores} usable cores, {found.cpus:g} for each worker",
            f"made {made}",
            *(f"{name} {version}" for name, version in found.versions.items()),
        ],
        tiles=tiles,
        sections=[
            Section("scaling", "Scaling", _figures(found), [table, notes]),
            Section("spread", "How quiet the machine was", (), [_spread(found)]),
            *_kills(found),
        ],
        command=command,
        made=made,
    )


def _beside(size: SizeMeasured) -> str:
    return "" if size.of_ddp is None else f"{size.of_ddp:.0%} of DDP's"


def _figures(found: ScalingMeasured) -> list[Figure]:
    sizes = found.sizes
    first = sizes[0].elastix.samples_per_s / sizes[0].workers
    lines = [
        _line("elastix", "@0", [(s.workers, s.elastix.samples_per_s) for s in sizes]),
        _line("DDP", "@1", [(s.workers, s.ddp.samples_per_s) for s in sizes if s.ddp is not None]),
    ]
    ideal = _line("in proportion", "@muted", [(s.workers, first * s.workers) for s in sizes])
    ideal["line"] = {"color": "@muted", "dash": "dot"}
    x = axis("workers", dtick=1)
    drawn = figure([ideal, *lines], xaxis=x, yaxis=axis("samples/s", rangemode="tozero"))
    caption = "Samples a second by number of workers, undisturbed."
    return [Figure("rates", "Samples a second", caption, drawn, wide=True)]


def _line(name: str, colour: str, points: Sequence[tuple[int, float]]) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": colour},
    }


def _spread(found: ScalingMeasured) -> Table:
    rows = []
    for size in found.sizes:
        for system, rate in (("elastix", size.elastix), ("DDP", size.ddp)):
            if rate is not None:
                numbers = (rate.low, rate.samples_per_s, rate.high, rate.steps, rate.seconds)
                rows.append(
                    [
                        Cell(str(size.workers), size.workers),
                        Cell(system),
                        *(Cell(number(float(n)), n) for n in numbers),
                    ]
                )
    columns = ("workers", "system", "slowest fifth", "all", "fastest fifth", "steps", "seconds")
    caption = "Samples a second in the slowest and the fastest fifth of each window."
    return Table("windows", "Spread", columns, rows, caption, wide=True)


def _kills(found: ScalingMeasured) -> list[Section]:
    rows = [
        [
            Cell(str(size.workers), size.workers),
            Cell(str(death.worker), death.worker),
            Cell("none came" if death.stall_s is None else f"{death.stall_s:.3f} s"),
        ]
        for size in found.sizes
        for death in size.deaths
    ]
    if not rows:
        return []
    caption = (
        "Each worker was sent SIGKILL from outside. Stall: until those left have committed a step."
    )
    table = Table("kills-table", "Kills", ("workers", "killed", "stall"), rows, caption)
    return [Section("kills", "Kills", (), [table])]
