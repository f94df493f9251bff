"""A worker is killed with SIGKILL in mid-backward: elastix beside torchft and Ray Train.

Five workers, the same model, data and kill for all (peers.workload), the same arithmetic on the
same step logs (peers.summary says what each figure means). For elastix the samples are counted a
second time, from its own journal, and `join_stall_s` says how much longer the survivors' step was
in which the replacement received its State.

Source of elastix's rows: workers on Ray, as any user has them, the journal written.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
import torch.nn.functional as F

import elastix
from benchmarks.peers.summary import StepRecord, account, read_kill, read_logs, summarise
from benchmarks.peers.workload import (
    GLOBAL_BATCH,
    KILL_STEP,
    VICTIM,
    WORLD_SIZE,
    IndexedSamples,
    StepLog,
    build_model,
    build_optimizer,
    kill_in_mid_backward,
)
from benchmarks.record import save
from elastix.data.cursor import count

_PEERS: dict[str, list[str]] = {
    "torchft": ["torchft_group", "--heartbeat", "5"],
    "torchft, heartbeat 0.5 s": ["torchft_group", "--heartbeat", "0.5"],
    "torchft, heartbeat 0.5 s, operation timeout 1 s": [
        *("torchft_group", "--heartbeat", "0.5", "--op-timeout", "1"),
    ],
    "ray train": ["ray_train"],
}
SYSTEMS = ["elastix", *_PEERS]
_STEPS = 120
"""Of elastix's pass: long enough for a replacement to start and join."""


def train(ctx: elastix.Context) -> None:
    """The workload as an elastix train function."""
    folder = Path(ctx.config["folder"])
    dataset = IndexedSamples(ctx.config["steps"] * GLOBAL_BATCH)
    model = build_model()
    model, optimizer = ctx.prepare(model, build_optimizer(model))
    if ctx.worker == VICTIM:
        kill_in_mid_backward(model, lambda: ctx.step == KILL_STEP, folder / "kill.json")
    log = StepLog(folder / f"steps-{ctx.worker}.jsonl", ctx.worker)
    loader = ctx.loader(dataset, batch_size=GLOBAL_BATCH)
    for epoch in loader.epochs(1):
        for x, y, ids in epoch:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            log.write(ctx.step - 1, ids.tolist(), world=ctx.world_size, counted=True)
            optimizer.step()


def run_elastix(steps: int) -> dict[str, Any]:
    """One pass with one kill; Ray must be up."""
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as folder:
        result = elastix.ElasticTrainer(
            train,
            config={"folder": folder, "steps": steps},
            scaling=elastix.ScalingConfig(num_workers=(2, WORLD_SIZE)),
            run=elastix.RunConfig(name="kill", store=folder),
            quiet=True,
        ).fit()
        records = read_logs(Path(folder).glob("steps-*.jsonl"))
        kill = read_kill(Path(folder) / "kill.json", KILL_STEP)
    repeat: dict[str, Any] = dict(account(records, kill, steps * GLOBAL_BATCH))
    (loader,) = result.audit.loaders
    repeat["audit_dropped"] = steps * GLOBAL_BATCH - loader.samples
    repeat["audit_repeated"] = count(loader.repeated)
    repeat["audit_steps_lost"] = result.audit.steps_lost
    repeat["join_stall_s"] = _join_stall(records, kill.t)
    return repeat


def _join_stall(records: list[StepRecord], killed: float) -> float | None:
    """How much longer than usual the survivors' first step at full size was; None without one."""
    before = {record["pid"] for record in records if record["t"] < killed}
    after = [r for r in records if r["t"] > killed and r["pid"] in before]
    gaps: dict[int, list[float]] = {}
    for pid in before:
        own = [record for record in after if record["pid"] == pid]
        for previous, record in pairwise(own):
            if previous["world"] < WORLD_SIZE and record["world"] == WORLD_SIZE:
                gaps.setdefault(1, []).append(record["t"] - previous["t"])
            elif previous["world"] == WORLD_SIZE:
                gaps.setdefault(0, []).append(record["t"] - previous["t"])
    if 0 not in gaps or 1 not in gaps:
        return None
    return round(max(gaps[1]) - statistics.median(gaps[0]), 3)


def measure_elastix(repeats: int, steps: int) -> dict[str, Any]:
    """Several kills, on one Ray cluster."""
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [root, os.environ.get("PYTHONPATH", "")])
    )
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    runs = []
    try:
        for number in range(repeats):
            runs.append(run_elastix(steps))
            print(f"elastix {number + 1}: {runs[-1]}", flush=True)
    finally:
        ray.shutdown()
    stalls = [run["join_stall_s"] for run in runs if run["join_stall_s"] is not None]
    return {
        **summarise(runs),  # type: ignore[arg-type]
        "audit_dropped": max(run["audit_dropped"] for run in runs),
        "audit_repeated": max(run["audit_repeated"] for run in runs),
        "join_stall_s": statistics.median(stalls) if stalls else None,
        "repeats": repeats,
    }


def measure_peer(system: str, repeats: int) -> dict[str, Any]:
    """Several kills of a peer, in a process of its own."""
    module, *arguments = _PEERS[system]
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", f"benchmarks.peers.{module}", *arguments]
        subprocess.run([*command, "--repeats", str(repeats), "--out", str(out)], check=True)
        result = json.loads(out.read_text())
    return {**result["summary"], "repeats": repeats, "settings": result["settings"]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peer-repeats", type=int, default=3, help="they take up to a minute each")
    parser.add_argument("--steps", type=int, default=_STEPS, help="steps of elastix's pass")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    options = parser.parse_args()
    results = {}
    for system in options.systems:
        if system == "elastix":
            results[system] = measure_elastix(options.repeats, options.steps)
        else:
            results[system] = measure_peer(system, options.peer_repeats)
        print(f"{system}: {json.dumps(results[system])}", flush=True)
        save(options.out, results)


if __name__ == "__main__":
    main()
