"""`elastix bench SCRIPT`: how a user's own train function scales, beside DDP, and under kills."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from elastix.bench.measures import (
    ScalingMeasured,
    SizeMeasured,
    Timing,
    cores_of_quota,
    parse_sizes,
)
from elastix.commands.output import AsJson, complain, print_table, undisturbed
from elastix.commands.run import Function, Script, Settings, pairs, train_function
from elastix.config import ScalingConfig
from elastix.errors import ConfigError, ElastixError
from elastix.observe.progress import number


def bench(
    script: Script,
    function: Function = "train",
    workers: Annotated[str, typer.Option("--workers", "-w", help="1..4, or 1,2,4.")] = "1..2",
    kill: Annotated[int, typer.Option(help="Workers to kill at each size from 2 on.")] = 1,
    kill_every: Annotated[float, typer.Option(help="Seconds from one kill to the next.")] = 15.0,
    seconds: Annotated[float, typer.Option(help="Seconds of training that are measured.")] = 10.0,
    warmup: Annotated[float, typer.Option(help="Seconds of training before that.")] = 3.0,
    ddp: Annotated[bool, typer.Option("--ddp/--no-ddp", help="Measure DDP as well.")] = True,
    cpus: Annotated[float, typer.Option(help="CPUs of each worker.")] = 1.0,
    config: Settings = None,
    seed: Annotated[int, typer.Option(help="Of weights, the order of samples, and victims.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page; SCRIPT-bench.html by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how a train function scales on this machine's CPUs, beside DDP and under kills.

    For each number of workers it is run on a Ray of its own, then under plain DDP, with endless
    epochs and a store that is thrown away. Nothing of your own runs and stores is touched.
    """
    sizes = parse_sizes(workers)
    timing = Timing(warmup, seconds, kill, kill_every)
    for size in sizes:
        ScalingConfig(num_workers=size, cpus_per_worker=cpus)  # refuses what cannot be
    chosen = pairs(config or [])
    page = out or Path(f"{script.stem}-bench.html")
    if page.suffix != ".html" or page.is_dir():
        raise ConfigError(
            f"{page} cannot be the page: it is no .html file. Nothing was started. Name another: "
            "--out."
        )
    try:  # before minutes are spent
        page.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=page.parent).close()
    except OSError as error:
        raise ConfigError(
            f"{page} cannot be the page: {error}. Nothing was started. Name another: --out."
        ) from error
    measured: list[SizeMeasured] = []
    cut: BaseException | None = None
    with undisturbed(as_json):
        train = train_function(script, function)
        try:
            _measure(train, chosen, sizes, timing, measured, ddp=ddp, cpus=cpus, seed=seed)
        except (ElastixError, KeyboardInterrupt) as error:
            if not measured:
                raise
            cut = error  # what took minutes to measure is told first
    found = ScalingMeasured(
        script=str(script),
        function=function,
        cores=_cores(),
        cpus=cpus,
        timing=timing,
        sizes=measured,
        versions=_versions(),
        cut_short=cut is not None,
    )
    from elastix.report.page import write  # not for --help
    from elastix.report.scaling import COLUMNS, cells, scaling_page

    rows = [[cell.text for cell in cells(found, size)] for size in found.sizes]
    print_table(as_json, as_values(found, page), COLUMNS, rows)
    for note in found.notes:
        complain(note)
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    write(scaling_page(found, shlex.join(["elastix", *sys.argv[1:]]), made), page)
    if not as_json:
        complain(f"page: {page}")
    if cut is not None:
        raise cut


def _measure(
    train: Callable[..., None],
    config: Mapping[str, Any],
    sizes: list[int],
    timing: Timing,
    measured: list[SizeMeasured],
    *,
    ddp: bool,
    cpus: float,
    seed: int,
) -> None:
    """Every size, elastix and DDP in turn, so that what the machine does besides hits both.

    Each is in `measured` as soon as it is known. Ray starts processes ahead of their use when it
    comes up; DDP comes second, when that is over.
    """
    from elastix.bench.ddp_group import measure_ddp  # not for --help
    from elastix.bench.elastic_group import measure_elastix, own_ray, pickled

    code = pickled(train, config, seed)
    with (
        tempfile.TemporaryDirectory(prefix="elastix-scaling-", ignore_cleanup_errors=True) as name,
        own_ray(max(sizes) * cpus),
    ):
        folder = Path(name)
        for size in sizes:
            complain(f"{size} under elastix ...")
            one = measure_elastix(
                train,
                config,
                size,
                timing,
                folder / f"elastix-{size}",
                cpus=cpus,
                seed=seed,
                progress=complain,
            )
            complain(f"{size} under elastix: {number(one.elastix.samples_per_s)} samples/s")
            measured.append(one)
            if ddp:
                complain(f"{size} under DDP ...")
                rate = measure_ddp(
                    code,
                    config,
                    size,
                    timing,
                    folder / f"ddp-{size}",
                    cpus=cpus,
                    seed=seed,
                    step_s=one.elastix.step_s,
                )
                complain(f"{size} under DDP: {number(rate.samples_per_s)} samples/s")
                measured[-1] = replace(one, ddp=rate)


def as_values(found: ScalingMeasured, page: Path) -> dict[str, Any]:
    """All of it as JSON values."""
    return {
        **{k: v for k, v in asdict(found).items() if k != "sizes"},
        "sizes": [
            {
                **asdict(size),
                "oversubscribed": found.oversubscribed(size),
                "elastix_efficiency": found.efficiency(size, "elastix"),
                "ddp_efficiency": found.efficiency(size, "ddp"),
                "of_ddp": size.of_ddp,
                "stall_s": size.stall_s,
            }
            for size in found.sizes
        ],
        "notes": found.notes,
        "page": str(page),
    }


def _cores() -> int:
    """That this process may use: containers have all cores of their host, and a quota."""
    most = float(len(os.sched_getaffinity(0)))
    with suppress(OSError):
        most = min(most, cores_of_quota(Path("/sys/fs/cgroup/cpu.max").read_text()))
    return max(1, int(most))


def _versions() -> dict[str, str]:
    from elastix.train.record.provenance import versions

    return {name: version for name, version in versions().items() if name != "cpus"}
