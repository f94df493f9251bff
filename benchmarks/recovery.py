"""A worker is killed with SIGKILL in mid-backward: elastix beside torchft and Ray Train.

Five workers, the same model, data and kill for all (peers.workload), the same arithmetic on the
same step logs (peers.summary says what each figure means). For elastix the samples are counted a
second time, from its own journal, and three figures say how a group comes back to its size:

* `join_gap_steps`: survivors' longest gap between two commits while a cold replacement follows
  them and comes in, less the usual gap, in usual gaps; `join_longest_gap_steps` is not less it.
* `full_strength_cold_s`: from the kill to the commit of the first step to which as many workers
  as before contributed, with a replacement that is started only then.
* `full_strength_spare_s`: the same with a spare (ScalingConfig(spares=1)), in runs of their own,
  which have a row of their own too: a spare comes in while the survivors still recover.

Source of elastix's rows: workers on Ray, as any user has them, the journal written.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
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
    up = folder / f"up-{ctx.worker}"
    ctx.on_phase(lambda name, _: up.touch() if name == "wait" else None)
    model, optimizer = ctx.prepare(model, build_optimizer(model))
    if ctx.rank == VICTIM and ctx.generation == 1:  # whoever was up first founds the group
        kill_in_mid_backward(model, lambda: ctx.step == KILL_STEP, folder / "kill.json")
    wanted = WORLD_SIZE + ctx.config["spares"]
    log = StepLog(folder / f"steps-{ctx.worker}.jsonl", ctx.worker)
    loader = ctx.loader(dataset, batch_size=GLOBAL_BATCH)
    for epoch in loader.epochs(1):
        for x, y, ids in epoch:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            counted = ctx.rank >= 0  # a joiner that only follows has placeholders
            log.write(ctx.step - 1, ids.tolist(), world=ctx.world_size, counted=counted)
            optimizer.step()
            while ctx.step == KILL_STEP - 5 and len(list(folder.glob("up-*"))) < wanted:
                time.sleep(0.01)


def run_elastix(steps: int, spares: int = 0) -> dict[str, Any]:
    """One pass with one kill; Ray must be up."""
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as folder:
        result = elastix.ElasticTrainer(
            train,
            config={"folder": folder, "steps": steps, "spares": spares},
            scaling=elastix.ScalingConfig(num_workers=(2, WORLD_SIZE), spares=spares),
            run=elastix.RunConfig(name="kill", store=folder),
            quiet=True,
        ).fit()
        records = read_logs(Path(folder).glob("steps-*.jsonl"))
        kill = read_kill(Path(folder) / "kill.json", KILL_STEP)
    repeat: dict[str, Any] = dict(account(records, kill, steps * GLOBAL_BATCH))
    check_survivors(repeat)
    (loader,) = result.audit.loaders
    repeat["audit_dropped"] = steps * GLOBAL_BATCH - loader.samples
    repeat["audit_repeated"] = count(loader.repeated)
    repeat["audit_steps_lost"] = result.audit.steps_lost
    repeat["join_gaps"] = _join_gaps(records, kill.t)
    return repeat


def check_survivors(repeat: Mapping[str, Any]) -> None:
    """The slowest survivor counts, so all must have come to a step after the kill.

    Raises:
        RuntimeError: more workers were lost than the one that was killed.
    """
    if len(repeat["stall_s"]) != WORLD_SIZE - 1:
        raise RuntimeError(
            f"{len(repeat['stall_s'])} workers went on after the kill, not {WORLD_SIZE - 1}"
        )


def _join_gaps(records: list[StepRecord], killed: float) -> tuple[float, float] | None:
    """The survivors' longest gap around a join, and their usual one after it; None without one.

    Around: from the newcomer's first step, counted or not, to the third of the full group.
    """
    old = {record["pid"] for record in records if record["t"] < killed}
    new = [r for r in records if r["pid"] not in old]
    entered = [r["t"] for r in new if r["counted"] and r["world"] == WORLD_SIZE]
    if not entered:
        return None
    usual: list[float] = []
    around: list[float] = []
    for pid in old:
        own = [r["t"] for r in records if r["pid"] == pid and r["t"] > killed]
        full = [t for t in own if t > min(entered)]
        usual += [later - t for t, later in pairwise(full[3:])]
        near = [t for t in own if t > new[0]["t"] and (len(full) < 3 or t <= full[2])]
        around += [later - t for t, later in pairwise(near)]
    if not usual or not around:
        return None
    return max(around), statistics.median(usual)


def measure_elastix(repeats: int, steps: int) -> dict[str, dict[str, Any]]:
    """Several kills with and without a spare, on one Ray cluster: a row for each."""
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [root, os.environ.get("PYTHONPATH", "")])
    )
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    cold, spare = [], []
    try:
        for number in range(repeats):
            cold.append(run_elastix(steps))
            print(f"elastix {number + 1}: {cold[-1]}", flush=True)
            spare.append(run_elastix(steps // 2, spares=1))
            print(f"elastix {number + 1}, with a spare: {spare[-1]}", flush=True)
    finally:
        ray.shutdown()
    gaps = [run["join_gaps"] for run in cold if run["join_gaps"] is not None]
    runs = [*cold, *spare]
    row = {
        **summarise(cold),  # type: ignore[arg-type]
        "audit_dropped": max(run["audit_dropped"] for run in runs),
        "audit_repeated": max(run["audit_repeated"] for run in runs),
        "audit_steps_lost": max(run["audit_steps_lost"] for run in runs),
        "join_gap_steps": _median((longest - usual) / usual for longest, usual in gaps),
        "join_longest_gap_steps": _median(longest / usual for longest, usual in gaps),
        "full_strength_cold_s": _median(run["contributes_s"] for run in cold),
        "full_strength_spare_s": _median(run["contributes_s"] for run in spare),
        "repeats": repeats,
    }
    with_spare = {**summarise(spare), "repeats": repeats}  # type: ignore[arg-type]
    return {"elastix": row, "elastix, with a spare": with_spare}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


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
    parser.add_argument("--peer-repeats", type=int, default=10, help="up to a minute each")
    parser.add_argument("--steps", type=int, default=_STEPS, help="steps of elastix's pass")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for system in options.systems:
        if system == "elastix":
            rows = measure_elastix(options.repeats, options.steps)
        else:
            rows = {system: measure_peer(system, options.peer_repeats)}
        for row, found in rows.items():
            print(f"{row}: {json.dumps(found)}", flush=True)
        results |= rows
        save(options.out, results)


if __name__ == "__main__":
    main()
