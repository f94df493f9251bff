"""`elastix estimate`: what a training run costs before it is started."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from elastix.commands.output import AsJson, print_table, undisturbed
from elastix.commands.run import load
from elastix.cost.devices import DEVICES, this_machine
from elastix.errors import ConfigError
from elastix.lazy_import import later
from elastix.mesh_check import parsed

if TYPE_CHECKING:
    import torch

    from elastix.cost.plan import Plan
    from elastix.cost.stages import Stages
    from elastix.cost.trace import Cost

    _Found = tuple[Cost, Plan, Stages | None]
else:
    torch = later("torch")

_HALVES = ("bfloat16", "float16")
_FLOATS = ("float32", *_HALVES, "float64")


def estimate(
    model: Annotated[
        str, typer.Argument(help="MODULE[:FUNCTION] or FILE.py[:FUNCTION]; the default is :build.")
    ],
    shape: Annotated[str, typer.Option(help="Of one sample, without the batch: 3,224,224.")],
    batch_size: Annotated[int, typer.Option(min=1, max=10**12, help="Of the whole group.")] = 256,
    samples: Annotated[int, typer.Option(min=1, max=10**15, help="In one epoch.")] = 50_000,
    epochs: Annotated[
        float, typer.Option(min=0.001, max=1e9, help="Passes over the samples.")
    ] = 1.0,
    workers: Annotated[int, typer.Option(min=1, max=10**9, help="One device each.")] = 1,
    device: Annotated[
        str, typer.Option(help=f"One of {', '.join(DEVICES)}; or here: this CPU, measured.")
    ] = "here",
    utilization: Annotated[
        float | None,
        typer.Option(help="Share of the device's peak, 0 to 1. Default: a roofline per operator."),
    ] = None,
    within_hours: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1e9, help="Add workers until it is through in so many hours."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="JSON for FUNCTION(config). Default: that of the module's `space`."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the parameters.")] = "float32",
    autocast: Annotated[
        str | None, typer.Option(help="Of the forward pass: bfloat16 or float16.")
    ] = None,
    input_dtype: Annotated[str, typer.Option(help="Of a sample; int64 for tokens.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    mesh: Annotated[
        str | None,
        typer.Option(help="Each worker is a crew: shard=4,tensor=2, pipe=2."),
    ] = None,
    parallelize: Annotated[
        str | None,
        typer.Option(help="FUNCTION(model, mesh), or MODULE:FUNCTION. Default: the model's own."),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(help="FUNCTION(model, place, places), or MODULE:FUNCTION; for pipe=2."),
    ] = None,
    microbatch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a pipeline's micro-batch; for pipe=2.")
    ] = None,
    slices: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 16, help="Of a batch, as in ctx.loader(..., slices=8)."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="With sums of slices, as RunConfig(exact=True) has.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tell what a training run costs: FLOPs, memory by part, time, devices, and whether it fits.

    Nothing is trained: two steps of the model are traced on tensors without memory.
    """
    from elastix.cost import passes
    from elastix.cost.plan import plan  # not for --help
    from elastix.cost.stages import trace_stages
    from elastix.cost.trace import trace

    if device not in ("here", *DEVICES):
        raise ConfigError(
            f"--device is here or one of {sorted(DEVICES)}, not {device!r}. Nothing was estimated."
        )
    axes = parsed(mesh) if mesh else {}
    if slices is None and workers > batch_size:
        raise ConfigError(
            f"--batch-size {batch_size} is that of the whole group, and ctx.loader refuses one "
            f"with less than a sample for each of --workers {workers}. Nothing was estimated. Give "
            "fewer workers or a larger batch."
        )
    share = math.ceil(batch_size / workers)
    _check_slices(slices, batch_size, exact=exact, pipe="pipe" in axes)
    each = 1 if slices is None else math.ceil(slices / workers)  # slices, one pass each
    made, sample = _dtype(dtype, "--dtype", _FLOATS), input_dtype_of(input_dtype)
    if sample.is_floating_point:
        sample = made
    sizes = shape_of(shape)
    places = axes.pop("pipe", 1)
    build, split = builder(model, config), _parallelizer(model, parallelize) if axes else None
    cut = _cutter(model, stage, microbatch) if places > 1 else None
    machine = this_machine() if device == "here" else DEVICES[device]

    def of(mesh: Mapping[str, int]) -> tuple[Cost, Plan]:
        """What one worker costs that is as many processes, or one."""
        of_pass = share if slices is None else batch_size // slices
        rows = math.ceil(of_pass / mesh.get("shard", 1))
        cost = trace(build, lambda: (torch.zeros(rows, *sizes, dtype=sample),), mesh=mesh, **how)
        cost = passes.several(cost, each)
        if exact and slices is not None:
            cost = passes.exact(cost, slices, workers)
        return cost, plan(cost, machine, places=math.prod(mesh.values()), **run)

    def of_stages(cut: Callable[[torch.nn.Module, int, int], Any], micro: int) -> _Found:
        """What one worker costs that is so many stages, each over the other axes."""
        unit = micro * axes.get("shard", 1)
        if batch_size % unit:
            raise ConfigError(
                f"--batch-size {batch_size} is no whole number of micro-batches of {micro} for "
                f"each of {unit // micro} places that share out samples; ctx.loader refuses it. "
                f"Nothing was estimated. Use {max(unit, batch_size // unit * unit)}, say."
            )
        several = trace_stages(
            lambda place: cut(build(), place, places),
            places,
            lambda: torch.zeros(micro, *sizes, dtype=sample),
            math.ceil(share / (micro * axes.get("shard", 1))),
            mesh=axes,
            **how,
        )
        cost = several.worst(machine.peak(autocast or dtype), machine.bytes_per_s)
        others = math.prod(axes.values())
        flops = float(sum(one.step_flops for one in several.costs) * others)
        crew: dict[str, Any] = {
            "places": places * others,
            "bubble": several.bubble,
            "worker_flops": flops,
        }
        return cost, plan(cost, machine, **crew, **run), several

    how: dict[str, Any] = {
        "optimizer": optimizer,
        "dtype": made,
        "autocast": _dtype(autocast, "--autocast", _HALVES) if autocast else None,
        "foreach": device != "here",
        "parallelize": split,
    }
    run: dict[str, Any] = {
        "steps": math.ceil(samples * epochs / batch_size),
        "dtype": autocast or dtype,
        "workers": workers,
        "utilization": utilization,
        "within_s": None if within_hours is None else within_hours * 3600,
    }
    with undisturbed(as_json):
        found: _Found = (*of(axes), None) if cut is None else of_stages(*cut)
        whole = of({}) if mesh else None
    value, rows = _told(*found[:2]), _rows(*found[:2])
    if found[2] is not None:
        value["stages"] = _told_of_stages(found[2])
        rows += _rows_of_stages(found[2])
    if whole is None:
        print_table(as_json, value, ("what", "how much"), rows)
        return
    value["one_process"], beside = _told(*whole), dict(_rows(*whole))
    columns = "what", f"a process, {mesh}", "workers of one process"
    compared = [(what, text, beside.get(_OF_ONE.get(what, what), "")) for what, text in rows]
    print_table(as_json, value, columns, compared)


_PER_PLACE, _PER_WORKER = "FLOPs per step and place", "FLOPs per step and worker"
_A_PLACE, _A_WORKER = "a place of a worker's mesh", "a worker, elastix's replicas"
_OF_ONE = {_PER_PLACE: _PER_WORKER, _A_PLACE: _A_WORKER}
"""How a row of a crew's is called where each worker is one process."""


def _check_slices(slices: int | None, batch_size: int, *, exact: bool, pipe: bool) -> None:
    """Refuse what ctx.loader refuses, and what is not counted."""
    if exact and (slices is None or slices & (slices - 1)):
        raise ConfigError(
            "--exact needs --slices, a power of two, as RunConfig(exact=True) does. Nothing was "
            "estimated. Add --slices 8, say."
        )
    if slices is None:
        return
    if batch_size % slices:
        raise ConfigError(
            f"--batch-size {batch_size} cannot be cut into {slices} equal slices; ctx.loader "
            f"refuses it. Nothing was estimated. Use {max(1, batch_size // slices) * slices}, say."
        )
    if pipe:
        raise ConfigError(
            "--slices and a mesh with pipe: what stages hold between slices is not estimated. "
            "Nothing was estimated. Leave --slices out."
        )


def _told_of_stages(stages: Stages) -> dict[str, Any]:
    return {
        "peak_bytes": [cost.peak_bytes for cost in stages.costs],
        "step_flops": [cost.step_flops for cost in stages.costs],
        "parameters": [cost.parameters for cost in stages.costs],
        "microbatches": stages.microbatches,
        "bubble": stages.bubble,
    }


def _rows_of_stages(stages: Stages) -> list[tuple[str, str]]:
    held = ", ".join(decimal(cost.peak_bytes) for cost in stages.costs)
    waits = f"{stages.bubble:.0%} of a step, with {stages.microbatches} micro-batches (1F1B)"
    return [("memory by stage", held), ("bubble", waits)]


def _told(cost: Cost, planned: Plan) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "cost": {
            **{k: v for k, v in asdict(cost).items() if not k.endswith("operators")},
            "buckets_bytes": cost.buckets_bytes,
            "activations_bytes": cost.activations_bytes,
        },
        "plan": {
            **asdict(planned),
            "pflop_days": planned.pflop_days,
            "device_hours": planned.device_hours,
        },
    }


def _rows(cost: Cost, planned: Plan) -> list[tuple[str, str]]:
    crew = list(planned.memory_bytes) == [0]
    rows = [
        ("parameters", f"{cost.parameters:,}"),
        (_PER_PLACE if crew else _PER_WORKER, f"{cost.step_flops:.3g}"),
        ("FLOPs in total", f"{planned.total_flops:.3g} ({planned.pflop_days:.3g} PFLOP-days)"),
        ("steps", f"{planned.steps:,}"),
        ("model", decimal(cost.model_bytes)),
        ("gradients", decimal(cost.gradients_bytes)),
        (
            "gradient buckets" + (f", and {cost.sums} sums of slices" if cost.sums else ""),
            decimal(cost.buckets_bytes),
        ),
        ("optimizer", decimal(cost.optimizer_bytes)),
        ("activations and temporaries", decimal(cost.activations_bytes)),
    ]
    for stage, held in planned.memory_bytes.items():
        worker = f"a worker, with ZeRO stage {stage}" if stage else _A_WORKER
        verdict = "fits" if planned.fits[stage] else "does NOT fit"
        who = _A_PLACE if crew else worker
        rows.append((who, f"{decimal(round(held))}, {verdict} ({planned.device})"))
    if crew:
        rows.append(("sent to others of the worker, per step", decimal(cost.sent_bytes)))
    rows += [
        ("devices", f"{planned.devices} x {planned.device}, {planned.dtype}"),
        ("time of a step", f"{planned.step_s:.3g} s at {planned.utilization:.0%} of the peak"),
        ("time", f"{_duration(planned.total_s)} ({planned.device_hours:.3g} device hours)"),
    ]
    return rows


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.3g} s"


def _dtype(name: str, option: str, known: tuple[str, ...]) -> torch.dtype:
    if name not in known:
        raise ConfigError(f"{option} is one of {', '.join(known)}, not {name!r}. Nothing was done.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def input_dtype_of(name: str) -> torch.dtype:
    """What --input-dtype says.

    Raises:
        ConfigError: there is no such type.
    """
    return _dtype(name, "--input-dtype", (*_FLOATS, "int64"))


def shape_of(text: str) -> tuple[int, ...]:
    """What --shape says.

    Raises:
        ConfigError: it is no list of numbers.
    """
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(
            f"--shape is numbers with commas, as in 3,224,224, not {text!r}. Nothing was done."
        ) from error


def builder(target: str, config: str | None) -> Callable[[], torch.nn.Module]:
    """What makes the model: FUNCTION(config), or FUNCTION() if there is no config and no space."""
    module_name, _, name = target.partition(":")
    module = _module(module_name)
    build = getattr(module, name or "build", None)
    if not callable(build):
        raise ConfigError(
            f"{module_name} has no function {name or 'build'!r}. Nothing was done. Name what "
            f"builds the model: {module_name}:FUNCTION."
        )
    try:
        values: Mapping[str, Any] | None = None if config is None else json.loads(config)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--config is no JSON: {error}. Nothing was done.") from error
    if values is None and hasattr(module, "space"):
        values = dict(module.space.get_default_configuration())
    return build if values is None else lambda: build(values)


def _parallelizer(model: str, named: str | None) -> Callable[[torch.nn.Module, Any], object]:
    """What shards the model."""
    return _function(
        model,
        named or "parallelize",
        "--mesh needs one that takes model and mesh and shards as the train function does, with "
        "fully_shard and parallelize_module.",
    )


def _function(model: str, named: str, wanted: str) -> Callable[..., Any]:
    """A function of the module that makes the model, or MODULE:FUNCTION.

    Raises:
        ConfigError: there is none; `wanted` says what it would be.
    """
    first, _, last = named.rpartition(":")
    module = first or model.partition(":")[0]
    found = getattr(_module(module), last, None)
    if not callable(found):
        raise ConfigError(f"{module} has no function {last!r}. Nothing was estimated. {wanted}")
    function: Callable[..., Any] = found
    return function


def _cutter(
    model: str, named: str | None, microbatch: int | None
) -> tuple[Callable[[torch.nn.Module, int, int], Any], int]:
    """What makes a stage of the model, and the samples of a micro-batch."""
    found = _function(
        model,
        named or "stage",
        "A mesh with pipe needs one that takes model, place and places, and returns the stage of "
        "that place as the train function prepares it: with torch.nn.Identity() for layers of "
        "other stages.",
    )
    if microbatch is None:
        raise ConfigError(
            "a mesh with pipe needs --microbatch, the samples of one: how many there are in a step "
            "says how long stages wait, and what they hold. Nothing was estimated."
        )
    return found, microbatch


def _module(name: str) -> Any:  # noqa: ANN401 - a module has whatever it has
    path = Path(name)
    if path.suffix == ".py":
        return load(path, path.stem)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name} cannot be imported: {error}. Nothing was done. Name a module that can be, or "
            "a file: FILE.py."
        ) from error
