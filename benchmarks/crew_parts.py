"""More of benchmarks.crews: pipelines, spares, slices and exact runs, and torchft's HSDP.

* `pipes`: two workers of two stages each beside torch's own pipeline on a mesh of 2 x 2: the same
  schedule (1F1B), micro-batches, model and optimizer, with DistributedDataParallel between the two
  pipelines, as torch has it. Rounds are those of `steps`.
* `pipe_kills`: of three workers of two stages one loses a stage, by SIGKILL in mid-backward. Times
  as for `kills`.
* `spares`: of two workers one loses a process, with a spare that waits and without any. Time from
  the kill until there are two workers again.
* `slices`: steps of two crews whose batches are cut into as many slices as there are workers, over
  steps of whole batches in the same round; and those with exact=True over those without.
* `torchft`: steps of torchft's HSDP over those of FSDP2's; or what ended it.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks import crews
from elastix import Context
from elastix.events import WorkerJoined
from elastix.testing.local import run_local

MICRO, STAGES = 4, 2
"""Samples of a micro-batch; half a batch is the share of a worker."""

SLICES = 2
VICTIM = (1, 1)


def stage_of(model: nn.Sequential, stage: int) -> nn.Sequential:
    """The whole model, in which layers of the other stage let through what they are given."""
    for number in range(len(model)):
        if number * STAGES // len(model) != stage:
            model[number] = nn.Identity()
    return model


def schedule(
    stage: nn.Module, place: int, group: dist.ProcessGroup, samples: int
) -> Schedule1F1B | ScheduleGPipe:
    """Of one share of a batch; 1F1B needs as many micro-batches as there are stages."""
    number = max(1, samples // MICRO)
    made = PipelineStage(stage, place, STAGES, torch.device("cpu"), group=group)
    kind = Schedule1F1B if number >= STAGES else ScheduleGPipe
    return kind(made, number, loss_fn=F.cross_entropy)


def crew_pipes(ctx: Context) -> None:
    """The train function of `pipes`, and of `pipe_kills` where a folder for kills is given."""
    config = ctx.config
    model = stage_of(crews.build(config["width"]), ctx.place)
    if config.get("kills") and (ctx.worker, ctx.place) == VICTIM:
        layer = next(module for module in model.modules() if isinstance(module, nn.Linear))
        layer.register_full_backward_hook(lambda *_: crews.kill_at(ctx, config["folder"]))
    model, optimizer = ctx.prepare(model, crews.optimizer_of(model))
    group = ctx.mesh["pipe"].get_group()  # type: ignore[index]  # they are crews
    schedules: dict[int, Schedule1F1B | ScheduleGPipe] = {}
    times, ends = [], []
    loader = ctx.loader(
        crews.samples(config["width"], config["steps"]), batch_size=crews.BATCH, microbatch=MICRO
    )
    for epoch in loader.epochs(1):
        started = time.perf_counter()
        for x, y in epoch:
            if len(x) not in schedules:
                schedules[len(x)] = schedule(model, ctx.place, group, len(x))
            with ctx.backward():
                schedules[len(x)].step(x, target=y)
            ends.append(time.monotonic())
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
    if config.get("kills"):
        if ctx.worker == 0:
            Path(config["folder"], f"ends-{ctx.place}").write_text(json.dumps(ends))
        return
    crews.tell(config, f"{ctx.worker}-{ctx.place}", times)


def torch_pipe(rank: int, port: int, config: Mapping[str, Any]) -> None:
    """The same loop with torch alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, STAGES), mesh_dim_names=("replicate", "pipe"))
    replica, place = divmod(rank, STAGES)
    model = stage_of(crews.build(config["width"]), place)
    optimizer = crews.optimizer_of(model)
    shared = DistributedDataParallel(model, process_group=mesh["replicate"].get_group())
    data, part, times = crews.samples(config["width"], config["steps"]), crews.BATCH // 2, []
    steps = schedule(shared, place, mesh["pipe"].get_group(), part)
    for step in range(config["steps"]):
        started = time.perf_counter()
        first = step * crews.BATCH + replica * part
        x, y = data[first : first + part]
        steps.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    crews.tell(config, f"{rank}-0", times)
    dist.barrier()
    dist.destroy_process_group()


def measure_pipes(
    rounds: int, width: int = crews.WIDTH, steps: int = crews.STEPS
) -> dict[str, Any]:
    """See the module."""

    def by_torch(config: Mapping[str, Any]) -> None:
        crews.run_ranks(torch_pipe, config)

    kinds: dict[str, crews.Run] = {
        "torch": by_torch,
        "crews": lambda config: crews.run_workers(config, {"pipe": STAGES}, crew_pipes),
        "torch again": by_torch,
    }
    took = crews.rotated("pipes", kinds, rounds, width, steps)
    ours = crews.ratios(took["crews"], took["torch"], took["torch again"])
    noise = ours.pop("hsdp_vs_hsdp_p75")
    return {**ours, "torch_vs_torch_p75": noise, "step_s": took}


def _one_pipe_kill(width: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as folder:
        config = {"width": width, "steps": steps, "folder": folder, "kills": True}
        options: dict[str, Any] = {"directory": Path(folder, "run"), "replace": True}
        run = run_local(
            crew_pipes, 3, config=config, crew={"pipe": STAGES}, timeout_s=200.0, **options
        )
        kills = [json.loads(path.read_text()) for path in Path(folder).glob("kill-*")]
        ends = [json.loads(path.read_text()) for path in Path(folder).glob("ends-*")]
    return crews.account(run, kills, ends, crews.BATCH * steps, victims=1)


def measure_pipe_kills(repeats: int, width: int = 256, steps: int = 150) -> dict[str, Any]:
    """See the module."""
    runs = []
    for number in range(repeats):
        runs.append(_one_pipe_kill(width, steps))
        print(f"pipe kills {number + 1}: {runs[-1]}", flush=True)
    return crews.summed(runs)


# ------------------------------------------------------------------------------------- spares


def crew_spares(ctx: Context) -> None:
    """The train function of `spares`: the victim ends once the spare waits, if there is one.

    Steps take a while, and go on until the new worker is in the group.
    """
    config, folder = ctx.config, Path(ctx.config["folder"])

    def look(phase: str, _detail: int) -> None:
        if phase == "wait":
            Path(folder, f"waits-{ctx.worker}-{ctx.place}").touch()

    ctx.on_phase(look)
    model = crews.build(config["width"])
    waits = [Path(folder, f"waits-2-{place}") for place in range(2)] if config["spares"] else []

    def end(*_: object) -> None:
        if ctx.step >= crews.KILL_STEP and all(path.exists() for path in waits):
            crews.kill(ctx, config["folder"])

    if (ctx.worker, ctx.place) == VICTIM:
        model[crews.LAYERS // 2].register_full_backward_hook(end)
    crews.shard(model, ctx.mesh["shard"])  # type: ignore[index]  # they are crews
    model, optimizer = ctx.prepare(model, crews.optimizer_of(model))
    killed = Path(folder, f"kill-{VICTIM[0]}")
    for epoch in ctx.loader(crews.samples(config["width"], 10), batch_size=crews.BATCH).epochs(400):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        there = float(ctx.world_size == 2 and killed.exists())
        if ctx.mean(there=there)["there"] == 1.0:
            return


def measure_spares(repeats: int, width: int = 256) -> dict[str, Any]:
    """See the module."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(repeats):
        for name, spares in (("with", 1), ("without", 0)):
            with tempfile.TemporaryDirectory(prefix="elastix-bench-") as folder:
                config = {"width": width, "folder": folder, "spares": spares}
                options: dict[str, Any] = {"directory": Path(folder, "run"), "replace": True}
                run = run_local(
                    *(crew_spares, 2),
                    config=config,
                    crew={"shard": 2},
                    spares=spares,
                    timeout_s=200.0,
                    **options,
                )
                (said,) = (json.loads(p.read_text())[1] for p in Path(folder).glob("kill-*"))
            joined = [event.t for event in run.events if isinstance(event, WorkerJoined)]
            found[name].append(min(joined) - said)
            print(f"spares {number + 1}, {name}: {found[name][-1]}", flush=True)
    return {f"rebuilt_{name}_s": spread(values) for name, values in found.items()}


def spread(values: list[float]) -> dict[str, Any]:
    """Of some seconds."""
    return {"median": statistics.median(values), "max": max(values), "counted": len(values)}


# ------------------------------------------------------------------------------------- slices


def crew_slices(ctx: Context) -> None:
    """The train function of `slices`."""
    config = ctx.config
    model = crews.build(config["width"])
    crews.shard(model, ctx.mesh["shard"])  # type: ignore[index]  # they are crews
    model, optimizer = ctx.prepare(model, crews.optimizer_of(model))
    times = []
    data = crews.samples(config["width"], config["steps"])
    loader = ctx.loader(data, batch_size=crews.BATCH, slices=config.get("slices"))
    for epoch in loader.epochs(1):
        started = time.perf_counter()
        for batch in epoch:
            for x, y in batch if config.get("slices") else [batch]:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
    crews.tell(config, f"{ctx.worker}-{ctx.place}", times)


def measure_slices(
    rounds: int, width: int = crews.WIDTH, steps: int = crews.STEPS
) -> dict[str, Any]:
    """See the module."""
    shards = {"shard": 2}

    def sliced(config: Mapping[str, Any]) -> None:
        crews.run_workers({**config, "slices": SLICES}, shards, crew_slices)

    def exactly(config: Mapping[str, Any]) -> None:
        crews.run_workers({**config, "slices": SLICES}, shards, crew_slices, exact=True)

    kinds: dict[str, crews.Run] = {
        "whole": lambda config: crews.run_workers(config, shards, crew_slices),
        "slices": sliced,
        "exact": exactly,
        "whole again": lambda config: crews.run_workers(config, shards, crew_slices),
    }
    took = crews.rotated("slices", kinds, rounds, width, steps)
    found: dict[str, Any] = {"slices_of_a_batch": SLICES, "step_s": took}
    for kind, over in (("slices", "whole"), ("exact", "slices")):
        ours = crews.ratios(took[kind], took[over], took["whole again"])
        ours.pop("hsdp_vs_hsdp_p75")
        found[f"{kind}_over_{over}"] = ours
    noise = crews.ratios(took["whole again"], took["whole"], took["whole again"])
    found["whole_vs_whole_p75"] = noise.pop("hsdp_vs_hsdp_p75")
    return found


# ------------------------------------------------------------------------------------- torchft


def measure_torchft(rounds: int, python: str) -> dict[str, Any]:
    """Its steps in turn with FSDP2's, by an interpreter that has torchft; or why there are none."""
    if not python:
        return {"not_measured": "no --torchft-python was given"}
    took: dict[str, list[float]] = {"torchft": [], "hsdp": []}
    for number in range(rounds):
        command = [python, "-m", "benchmarks.peers.torchft_hsdp"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            return {"not_measured": f"it ended with {done.returncode}: {done.stderr[-300:]}"}
        told = json.loads(lines[-1])
        if "error" in told:
            return {"not_measured": f"on gloo its HSDP ends with: {told['error']}"}
        took["torchft"].append(statistics.median(told["step_s"][crews.WARM :]))
        took["hsdp"].append(crews.measured(crews.run_hsdp, crews.WIDTH, crews.STEPS)["step_s"])
        print(f"torchft {number + 1}: {took['torchft'][-1]}, HSDP {took['hsdp'][-1]}", flush=True)
    ratios = [one / two for one, two in zip(took["torchft"], took["hsdp"], strict=True)]
    return {"over_hsdp_median": statistics.median(ratios), "step_s": took}
