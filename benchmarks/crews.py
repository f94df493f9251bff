"""Workers that are crews of processes, beside FSDP2's own hybrid sharding, and slow networks.

Parts, of which `--parts` takes some; a file keeps what is not measured anew:

* `steps`: two workers of two processes each (FSDP2 within, elastix between) beside FSDP2's HSDP on
  a mesh of 2 x 2, with the same model, batch and optimizer on the same machine. A round is HSDP,
  crews and HSDP again, in rotating order; its ratio is that of the runs' median steps. HSDP
  against itself is the noise. Memory is each process's peak beyond what it had before its model;
  what torch imports for sharding is most of that here.
* `kills`: of three workers two lose a process in one step, by SIGKILL in mid-backward; the halves
  that are left become one worker. Times from the first kill: until both processes of the worker
  that is left have the agreed gradient; until the mates of the dead are free; until the first new
  worker is in the group. Samples are counted from the journal.
* `wire`: gradients in bfloat16 over those in float32, over links of 200 Mbit/s and 1 Gbit/s
  between two network namespaces (slow_link); and the bytes of DiLoCo with 20 inner steps.
* `diloco`: accuracy on scikit-learn's digits, as in synchronous training, with 20 inner steps.

The others, `pipes`, `pipe_kills`, `spares`, `slices` and `torchft`, are in crew_parts.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks import slow_link
from benchmarks.record import save
from elastix import Context, ExchangeConfig
from elastix.comm.network.crew_world import DeviceMesh
from elastix.data.audit import audit
from elastix.data.cursor import count
from elastix.events import Recovered, Reported, WorkerJoined
from elastix.testing.local import LocalRun, run_local

PARTS = (
    *("steps", "kills", "wire", "diloco"),
    *("pipes", "pipe_kills", "spares", "slices", "torchft"),
)
WIDTH, LAYERS, BATCH = 1024, 6, 32
WARM, STEPS = 5, 30
KILL_STEP = 10
VICTIMS = ((1, 1), (2, 0))
INNER = 20

Run = Callable[[Mapping[str, Any]], None]
"""Of what is measured; it writes to the folder that it is told."""


def build(width: int) -> nn.Sequential:
    """Equal layers, each of which FSDP2 gathers by itself."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """As a train function does it, on either mesh."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def samples(width: int, steps: int) -> TensorDataset:
    """For so many steps."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(BATCH * steps, width, generator=generator)
    return TensorDataset(x, torch.randint(10, (len(x),), generator=generator))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The same for both."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


def _warm_up() -> None:
    """Import what torch imports with the first step of an optimizer, which is no model's memory."""
    small = nn.Linear(2, 2)
    small(torch.zeros(1, 2)).sum().backward()
    optimizer_of(small).step()


def _peak_mb() -> float:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ------------------------------------------------------------------------------------- steps


def crew_steps(ctx: Context) -> None:
    """The train function of `steps`."""
    _warm_up()
    config, before = ctx.config, _peak_mb()
    model = build(config["width"])
    if ctx.mesh is not None:
        shard(model, ctx.mesh["shard"])
    model, optimizer = ctx.prepare(model, optimizer_of(model))
    times = []
    for epoch in ctx.loader(samples(config["width"], config["steps"]), batch_size=BATCH).epochs(1):
        started = time.perf_counter()
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
            started = time.perf_counter()
    tell(config, f"{ctx.worker}-{ctx.place}", times, before)


def hsdp_rank(rank: int, port: int, config: Mapping[str, Any]) -> None:
    """The same loop on FSDP2's own mesh of 2 x 2."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    _warm_up()
    before = _peak_mb()
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=4)
    model = build(config["width"])
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = optimizer_of(model)
    data, times, part = samples(config["width"], config["steps"]), [], BATCH // 4
    for step in range(config["steps"]):
        started = time.perf_counter()
        x, y = data[step * BATCH + rank * part : step * BATCH + (rank + 1) * part]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    tell(config, f"{rank}-0", times, before)
    dist.barrier()
    dist.destroy_process_group()


def tell(
    config: Mapping[str, Any], name: str, times: list[float], before: float | None = None
) -> None:
    """Of one process, to a file: its median step, and its memory beyond what it had before."""
    found = {"step_s": statistics.median(times[WARM:])}
    if before is not None:
        found["memory_mb"] = _peak_mb() - before
    Path(config["folder"], name).write_text(json.dumps(found), encoding="utf-8")


def free_port() -> int:
    """At which nobody listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_hsdp(config: Mapping[str, Any]) -> None:
    """FSDP2's own, in four ranks."""
    run_ranks(hsdp_rank, config)


def run_ranks(function: Callable[[int, int, Mapping[str, Any]], None], config: Any) -> None:  # noqa: ANN401
    """Four processes that torch alone connects.

    Raises:
        RuntimeError: one of them failed.
    """
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=function, args=(r, port, dict(config))) for r in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
        if process.exitcode != 0:
            raise RuntimeError(f"a rank of torch's ended with {process.exitcode}")


def run_workers(
    config: Mapping[str, Any],
    crew: Mapping[str, int],
    function: Callable[[Context], None] = crew_steps,
    **options: Any,  # noqa: ANN401 - those of run_local
) -> None:
    """Two workers of elastix's."""
    directory = Path(config["folder"], "run")
    options |= {"config": dict(config), "directory": directory, "crew": crew}
    run_local(function, 2, **options, timeout_s=240.0)


def measured(run: Run, width: int, steps: int) -> dict[str, float]:
    """Of the first process, whose steps are those of all; memory is the largest of all."""
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as folder:
        run({"width": width, "steps": steps, "folder": folder})
        told = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("*-*")]
        first = json.loads(Path(folder, "0-0").read_text(encoding="utf-8"))
    memory = max(one.get("memory_mb", 0.0) for one in told)
    return {"step_s": first["step_s"], "memory_mb": memory}


def rotated(
    what: str,
    kinds: Mapping[str, Run],
    rounds: int,
    width: int,
    steps: int,
) -> dict[str, list[float]]:
    """Median steps in seconds of each kind, in one round after the other, in rotating order."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for turn in range(len(kinds)):
            kind = list(kinds)[(number + turn) % len(kinds)]
            found[kind].append(measured(kinds[kind], width, steps)["step_s"])
            print(f"{what}, round {number + 1}, {kind}: {found[kind][-1]}", flush=True)
    return found


def measure_steps(rounds: int, width: int = WIDTH, steps: int = STEPS) -> dict[str, Any]:
    """See the module."""
    kinds: dict[str, Run] = {
        "hsdp": run_hsdp,
        "crews": lambda config: run_workers(config, {"shard": 2}),
        "hsdp again": run_hsdp,
    }
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for turn in range(len(kinds)):
            kind = list(kinds)[(number + turn) % len(kinds)]
            found[kind].append(measured(kinds[kind], width, steps))
            print(f"steps, round {number + 1}, {kind}: {found[kind][-1]}", flush=True)
    plain = measured(lambda config: run_workers(config, {}), width, steps)
    took = {kind: [one["step_s"] for one in runs] for kind, runs in found.items()}
    memory = {
        kind: statistics.median(one["memory_mb"] for one in found[kind])
        for kind in ("hsdp", "crews")
    }
    return {
        **ratios(took["crews"], took["hsdp"], took["hsdp again"]),
        "step_s": took,
        "memory_mb": {**memory, "one process": plain["memory_mb"]},
    }


def ratios(ours: list[float], theirs: list[float], again: list[float]) -> dict[str, float]:
    """Ours over theirs, round by round, and theirs over themselves: the noise.

    Of two equal runs neither is the first, so each ratio of the noise counts either way round.
    """
    found = sorted(one / two for one, two in zip(ours, theirs, strict=True))
    noise = [one / two for one, two in zip([*again, *theirs], [*theirs, *again], strict=True)]
    return {
        "ratio_median": statistics.median(found),
        "ratio_min": found[0],
        "ratio_max": found[-1],
        "hsdp_vs_hsdp_p75": statistics.quantiles(noise, n=4, method="inclusive")[2],
    }


# ------------------------------------------------------------------------------------- kills


def kill_at(ctx: Context, folder: Path) -> None:
    """End this process if the step is that one."""
    if ctx.step == KILL_STEP:
        kill(ctx, folder)


def kill(ctx: Context, folder: Path) -> None:
    """End this process, and leave word of when."""
    now = json.dumps([time.monotonic(), time.time()])
    Path(folder, f"kill-{ctx.worker}").write_text(now, encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def crew_kills(ctx: Context) -> None:
    """The train function of `kills`: two processes end in the middle of one backward pass."""
    config, folder = ctx.config, Path(ctx.config["folder"])
    model = build(config["width"])

    if (ctx.worker, ctx.place) in VICTIMS:
        model[LAYERS // 2].register_full_backward_hook(lambda *_: kill_at(ctx, folder))
    shard(model, ctx.mesh["shard"])  # type: ignore[index]  # they are crews
    model, optimizer = ctx.prepare(model, optimizer_of(model))
    ends = []
    for epoch in ctx.loader(samples(config["width"], config["steps"]), batch_size=BATCH).epochs(1):
        for x, y in epoch:
            F.cross_entropy(model(x), y).backward()
            ends.append(time.monotonic())
            optimizer.step()
            optimizer.zero_grad()
    if ctx.worker == 0:
        Path(folder, f"ends-{ctx.place}").write_text(json.dumps(ends), encoding="utf-8")


def _one_kill(width: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as folder:
        config = {"width": width, "steps": steps, "folder": folder}
        options: dict[str, Any] = {"directory": Path(folder, "run"), "replace": True}
        run = run_local(crew_kills, 3, config=config, crew={"shard": 2}, timeout_s=200.0, **options)
        kills = [json.loads(path.read_text()) for path in Path(folder).glob("kill-*")]
        ends = [json.loads(path.read_text()) for path in Path(folder).glob("ends-*")]
    return account(run, kills, ends, BATCH * steps)


def account(
    run: LocalRun,
    kills: list[list[float]],
    ends: list[list[float]],
    samples: int,
    step: int = KILL_STEP,
    victims: int = len(VICTIMS),
) -> dict[str, Any]:
    """Of one run of `kills`.

    Args:
        run: what it has left.
        kills: of each killed process time.monotonic() and time.time().
        ends: of each process of the worker that is left, when its backward passes were over, one
            for each step.
        samples: of one epoch.
        step: in which the processes are to be killed, from 0.
        victims: how many these are.

    Raises:
        RuntimeError: another number of processes were killed, so it is no measurement of that.
    """
    if len(kills) != victims:
        raise RuntimeError(f"{len(kills)} processes were killed, not {victims}: not counted")
    killed, said = min(kills)
    found = audit(run.events)
    (loader,) = found.loaders
    joined = [event.t for event in run.events if isinstance(event, WorkerJoined)]
    return {
        "stall_s": max(own[step] for own in ends) - killed,
        "free_s": max((at - killed for *_, at in run.freed), default=None),
        "rebuilt_s": min(joined) - said if joined else None,
        "recoveries": [event.outcome for event in run.events if isinstance(event, Recovered)],
        "steps_lost": found.steps_lost,
        "samples_dropped": samples - loader.samples,
        "samples_repeated": count(loader.repeated),
    }


def measure_kills(repeats: int, width: int = 256, steps: int = 150) -> dict[str, Any]:
    """See the module."""
    runs = []
    for number in range(repeats):
        runs.append(_one_kill(width, steps))
        print(f"kills {number + 1}: {runs[-1]}", flush=True)
    return summed(runs)


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of several accounts."""
    found: dict[str, Any] = {"repeats": len(runs)}
    for key in ("stall_s", "free_s", "rebuilt_s"):
        values = [run[key] for run in runs if run[key] is not None]
        found[key] = {
            "median": statistics.median(values) if values else None,
            "max": max(values, default=None),
            "counted": len(values),
        }
    for key in ("steps_lost", "samples_dropped", "samples_repeated"):
        found[key] = sum(run[key] for run in runs)
    return found


# ------------------------------------------------------------------------------------- networks


def measure_wire(rounds: int, steps: int = 12) -> dict[str, Any]:
    """See the module; a reason in words where namespaces cannot be made."""
    if not slow_link.possible():
        return {"not_measured": "network namespaces need root, ip and tc"}
    found: dict[str, Any] = {}
    for name, rate in (("200_mbit", "200mbit"), ("1_gbit", "1gbit")):
        own: dict[str, list[dict[str, float]]] = {"float32": [], "bfloat16": []}
        with slow_link.link(rate) as names:
            for _ in range(rounds):
                for wire in own:
                    told = {} if wire == "float32" else {"wire": wire}
                    own[wire].append(slow_link.measure(names, steps, told))
                    print(f"{name}, {wire}: {own[wire][-1]}", flush=True)
            if "diloco" not in found:
                found["diloco"] = slow_link.measure(names, 3 * INNER + 1, {"every_steps": INNER})
                print(f"{name}, DiLoCo: {found['diloco']}", flush=True)
        step_s = {wire: [one["step_s"] for one in runs] for wire, runs in own.items()}
        gains = [a / b for a, b in zip(step_s["float32"], step_s["bfloat16"], strict=True)]
        found[name] = {
            "bfloat16_gain": statistics.median(gains),
            "gains": gains,
            "step_s": step_s,
            "bytes": {wire: runs[0]["bytes"] for wire, runs in own.items()},
        }
    synchronous = found["200_mbit"]["bytes"]["float32"]
    found["diloco_fewer_bytes"] = synchronous / found["diloco"]["bytes"]
    return found


# ------------------------------------------------------------------------------------- accuracy


def digits(ctx: Context) -> None:
    """The train function of `diloco`."""
    from sklearn.datasets import load_digits

    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    x = (x / 16).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    known, unknown = order[:1437], order[1437:]
    torch.manual_seed(ctx.config["seed"])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader = ctx.loader(TensorDataset(x[known], y[known]), batch_size=32)
    for epoch in loader.epochs(ctx.config["epochs"]):
        for inputs, targets in epoch:
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    test = TensorDataset(x[unknown], y[unknown])
    ctx.report(**ctx.evaluate(accuracy, test, batch_size=360))


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Share of a batch."""
    right: torch.Tensor = model(batch[0]).argmax(1) == batch[1]
    return right.double().mean()


def measure_diloco(seeds: int, epochs: int = 20) -> dict[str, Any]:
    """See the module."""
    found: dict[str, list[float]] = {"synchronous": [], "diloco": []}
    for seed in range(seeds):
        for kind, every in (("synchronous", None), ("diloco", INNER)):
            config = {"seed": seed, "epochs": epochs}
            exchange = ExchangeConfig(every_steps=every)
            run = run_local(digits, 2, config=config, exchange=exchange, seed=seed, timeout_s=200.0)
            told = [event.metrics for event in run.events if isinstance(event, Reported)]
            found[kind].append(told[-1]["accuracy"])
        print(f"digits, seed {seed}: {found}", flush=True)
    means = {kind: statistics.mean(values) for kind, values in found.items()}
    lost = 100 * (means["synchronous"] - means["diloco"])
    return {"accuracy": found, "inner_steps": INNER, "points_lost": lost}


# ------------------------------------------------------------------------------------- command


def measure(
    parts: list[str], rounds: int, known: Mapping[str, Any], torchft_python: str = ""
) -> dict[str, Any]:
    """These parts anew, the others as they are known."""
    from benchmarks import crew_parts as more

    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "steps": lambda: measure_steps(rounds),
        "kills": lambda: measure_kills(rounds),
        "wire": lambda: measure_wire(-(-rounds // 2)),
        "diloco": lambda: measure_diloco(rounds),
        "pipes": lambda: more.measure_pipes(rounds),
        "pipe_kills": lambda: more.measure_pipe_kills(rounds),
        "spares": lambda: more.measure_spares(rounds),
        "slices": lambda: more.measure_slices(rounds),
        "torchft": lambda: more.measure_torchft(rounds, torchft_python),
    }
    return {
        part: ways[part]() if part in parts else known[part]
        for part in PARTS
        if part in parts or part in known
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--torchft-python", default="", help="an interpreter that has torchft")
    given = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "elastix.testing.local"])
    known = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    for part in given.parts:
        known = measure([part], given.rounds, known, given.torchft_python)
        save(given.out, known, parts=[part])


if __name__ == "__main__":
    from benchmarks.crews import main as run  # workers import functions by this name

    run()
