"""Committed samples per second under a kill every 30 s, over the undisturbed rate.

    python -m benchmarks.goodput --out FILE

Five workers, the workload of peers.workload, SIGKILL from outside at random workers, one every
`--kill-every` seconds for `--minutes` minutes, the same moments and victims for every system:

* elastix with a replacement for each loss (`elastix`), and what elastix.testing.simulate predicts
  from the costs that this run's journal shows (`predicted_elastix`);
* Ray Train 2.60, an elastic group, checkpoint every ten steps (`ray_train`);
* torchft, a process group of replicas that are started again by a watcher (`torchft`).

Work that is redone counts once: what counts is what stands in the weights at the end. The rate is
over the time from the first kill to the last plus one interval. The undisturbed rate is that of the
same run in the last third of each interval, and before the first kill: by then all of these
systems are whole again (`SYSTEM_whole_share` says of what part of the steps there that is so), and
a machine that is faster now and slower then is so for both. A replacement costs CPU seconds to
start, which 2 cores have to find among the workers' own: `start_share` says how much of what they
have in an interval.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch.nn.functional as F

import elastix
from benchmarks.peers.summary import StepRecord, read_logs
from benchmarks.peers.workload import (
    GLOBAL_BATCH,
    WORLD_SIZE,
    IndexedSamples,
    StepLog,
    build_model,
    build_optimizer,
)
from benchmarks.record import save
from elastix.events import Event, StepCommitted
from elastix.testing.simulate import Scenario, costs_of, simulate

SYSTEMS = ["elastix", "torchft", "ray_train"]
_SETTLE_S = 15.0
"""From the first steps to what is measured."""
_QUIET_SHARE = 1 / 3
"""Of each interval, at its end."""

Window = tuple[float, float]
"""From when to when, in seconds of time.monotonic."""


def train(ctx: elastix.Context) -> None:
    """The workload as an elastix train function; ends when `until` has come."""
    folder = Path(ctx.config["folder"])
    dataset = IndexedSamples(20_000)
    model = build_model()
    model, optimizer = ctx.prepare(model, build_optimizer(model))
    log = StepLog(folder / f"steps-{ctx.worker}.jsonl", ctx.worker)
    loader = ctx.loader(dataset, batch_size=GLOBAL_BATCH)
    for epoch in loader.epochs(1_000_000):
        for x, y, ids in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            counted = ctx.rank >= 0  # a joiner that only follows has placeholders
            log.write(ctx.step - 1, ids.tolist(), world=ctx.world_size, counted=counted)
            if (folder / "over").exists() and ctx.step % 10 == 0:
                over = ctx.evaluate(_is_over(folder), dataset, batch_size=len(dataset))
                if sum(over.values()) > 0:
                    return


def _is_over(folder: Path) -> Callable[..., float]:
    return lambda *_: float((folder / "over").exists())


class Killer(threading.Thread):
    """Waits for the first steps, lets train undisturbed, then kills a worker every interval.

    Attributes:
        kills: when, in seconds of time.monotonic.
        quiet: windows of undisturbed training.
        end: when the interval of the last kill was over.
    """

    def __init__(self, folder: Path, every_s: float, minutes: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.kills: list[float] = []
        self.quiet: list[Window] = []
        self.end = 0.0
        self._folder = folder
        self._every_s = every_s
        self._count = max(1, round(60 * minutes / every_s))
        self._choice = random.Random(seed)

    def run(self) -> None:
        """See the class."""
        while not self._alive():
            time.sleep(0.2)
        time.sleep(_SETTLE_S)
        self._watch_quiet()
        for _ in range(self._count):
            victims = self._alive()
            if victims:
                os.kill(self._choice.choice(victims), signal.SIGKILL)
            self.kills.append(time.monotonic())
            time.sleep(self._every_s * (1 - _QUIET_SHARE))
            self._watch_quiet()
        self.end = time.monotonic()
        (self._folder / "over").touch()

    def _watch_quiet(self) -> None:
        start = time.monotonic()
        time.sleep(self._every_s * _QUIET_SHARE)
        self.quiet.append((start, time.monotonic()))

    def _alive(self) -> list[int]:
        """Processes whose last step is not long ago, in the order of their places."""
        newest: dict[int, StepRecord] = {}
        for record in read_logs(self._folder.glob("steps-*.jsonl")):
            newest[record["pid"]] = record
        alive = [r for r in newest.values() if Path(f"/proc/{r['pid']}").exists() and r["counted"]]
        return [r["pid"] for r in sorted(alive, key=lambda r: r["worker"])]


def goodput(records: Sequence[StepRecord], killer: Killer) -> float:
    """Samples that stand per second under the kills, over those in the quiet windows."""
    attempts: dict[int, float] = {}
    for record in records:
        if record["counted"]:
            attempts[record["step"]] = max(attempts.get(record["step"], 0.0), record["attempt"])
    standing: dict[int, tuple[float, int]] = {}
    for record in records:
        if record["counted"] and record["attempt"] == attempts[record["step"]]:
            t, samples = standing.get(record["step"], (record["t"], 0))
            standing[record["step"]] = (min(t, record["t"]), samples + len(record["ids"]))

    def rate(window: Window) -> float:
        start, end = window
        return sum(n for t, n in standing.values() if start < t <= end) / (end - start)

    undisturbed = [rate(window) for window in killer.quiet]
    disturbed = rate((killer.kills[0], killer.end))
    shown = " ".join(f"{one:.0f}" for one in undisturbed)
    print(f"samples/s: {shown} undisturbed, {disturbed:.0f} under the kills", flush=True)
    return disturbed / statistics.fmean(undisturbed)


def whole_share(records: Sequence[StepRecord], killer: Killer) -> float:
    """Of what was logged in the quiet windows, how much was of a group of all workers.

    Below 1 the undisturbed rate is not that of a whole group, and the goodput looks too good.
    """
    quiet = [
        record["world"] == WORLD_SIZE
        for record in records
        if record["counted"] and any(start < record["t"] <= end for start, end in killer.quiet)
    ]
    return statistics.fmean(quiet) if quiet else 0.0


def told(system: str, folder: Path, killer: Killer) -> dict[str, float]:
    """What the steps that workers logged say of one system."""
    records = read_logs(folder.glob("steps-*.jsonl"))
    return {
        system: round(goodput(records, killer), 4),
        f"{system}_whole_share": round(whole_share(records, killer), 4),
    }


def run_elastix(
    every_s: float, minutes: float, seed: int
) -> tuple[dict[str, float], list[Event], Killer]:
    """One run on Ray; what its steps say, its journal, and when workers were killed."""
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as name:
        folder = Path(name)
        killer = Killer(folder, every_s, minutes, seed)
        killer.start()
        result = elastix.ElasticTrainer(
            train,
            config={"folder": name},
            scaling=elastix.ScalingConfig(num_workers=(2, WORLD_SIZE)),
            run=elastix.RunConfig(name="goodput", store=name),
            quiet=True,
        ).fit()
        if not result.audit.exact:
            raise RuntimeError(f"samples were lost: {result.audit}")
        return told("elastix", folder, killer), list(result.events), killer


def predict(events: Iterable[Event], killer: Killer) -> float:
    """What the simulation says of the same kills, with the costs that the journal shows."""
    events = list(events)
    costs = costs_of(events)
    duration_s = killer.end - killer.kills[0]
    plan = Scenario(workers=WORLD_SIZE, duration_s=duration_s, mtbf_s=duration_s)
    failures = [kill - killer.kills[0] for kill in killer.kills]
    return simulate(plan, costs, random.Random(1), failures).goodput


def start_cpu_s() -> float:
    """CPU seconds that a fresh worker process takes until it could train."""
    before = os.times()
    code = "import torch, ray, elastix; from torch._dynamo import config"
    subprocess.run([sys.executable, "-c", code], check=True)
    after = os.times()
    return (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )


def measure_elastix(every_s: float, minutes: float, seed: int = 1) -> dict[str, Any]:
    """Goodput, prediction, what the journal says things took, and what starting costs."""
    share = start_cpu_s() / (every_s * (os.cpu_count() or 1))
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [root, os.environ.get("PYTHONPATH", "")])
    )
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        found, events, killer = run_elastix(every_s, minutes, seed)
    finally:
        ray.shutdown()
    sizes = [event.world_size for event in events if isinstance(event, StepCommitted)]
    print(
        f"elastix: {len(killer.kills)} kills, mean size {statistics.fmean(sizes):.2f}", flush=True
    )
    return {
        **found,
        "predicted_elastix": round(predict(events, killer), 4),
        "start_share": round(share, 4),
        "costs": {name: round(cost, 4) for name, cost in asdict(costs_of(events)).items()},
    }


def measure_peer(system: str, every_s: float, minutes: float) -> dict[str, float]:
    """The same kills for a peer, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="elastix-bench-") as name:
        folder = Path(name)
        killer = Killer(folder, every_s, minutes, seed=1)
        killer.start()
        command = [sys.executable, "-m", f"benchmarks.peers.{system}_goodput", "--folder", name]
        subprocess.run(command, check=True, timeout=60 * minutes + 600)
        return told(system, folder, killer)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill-every", type=float, default=30.0, help="seconds")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for system in options.systems:
        if system == "elastix":
            results |= measure_elastix(options.kill_every, options.minutes)
        else:
            results |= measure_peer(system, options.kill_every, options.minutes)
        print(json.dumps(results), flush=True)
        save(options.out, results)


if __name__ == "__main__":
    main()
