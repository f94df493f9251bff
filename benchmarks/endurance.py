"""Half an hour under fire: `python -m benchmarks.endurance --out FILE`.

A small exact run on Ray (`--workers`, a spare and a shadow) in which `--harms` things happen in
`--seconds`, at random to whom:

- `kill`: SIGKILL. `stop`: SIGSTOP, so that it is silent until it is evicted. `leave`: SIGTERM, upon
  which it goes at the next step boundary. `cut`: all its connections are broken.
- `pair`: two are killed at once. `all`: all workers and the shadow's donor with them, once, after
  an eighth of the time. `driver`: the process that called fit, once, after a quarter; fit is called
  again. `controller`: once, after half of it.

Each process that ends is replaced. When time is up the run finishes its epoch, and a quiet run of
one process trains for as many epochs. What is shown, by key:

- `struck`: by kind, whoever was still there; `losses`, `joins`, `epochs`, `steps` of the run.
- `exact`: every sample of every epoch was used once. `byte_equal`: the final State has the bytes of
  the quiet run's.
- `growth`: of the processes that are there for longest, the driver, the controller and a worker
  that is never struck alone: how long each was watched, and its open descriptors, threads and MiB,
  the median of each at the beginning and at the end of that time.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from torch import nn

import elastix
from benchmarks.record import save
from elastix.data.audit import audit
from elastix.events import (
    Event,
    RunEnded,
    StepCommitted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from elastix.observe import journal
from elastix.testing.chaos import cut
from elastix.testing.local import run_local
from elastix.train.on_ray import takeover

NAME = "endurance"
SLICES = 4
SHARES = {"kill": 60, "stop": 6, "leave": 12, "cut": 12, "pair": 10}
"""Of a hundred harms."""
ONCE = {"all": 1 / 8, "driver": 1 / 4, "controller": 1 / 2}
"""After which share of the time."""
HANG_S = 8.0
LOOK_S = 2.0
SETTLE_S = 20.0


class Net(nn.Module):
    """What makes it hard to be exact: batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of rows of 32 numbers: one score for each of ten classes."""
        return self.head(self.body(x))  # type: ignore[no-any-return]


def train(ctx: elastix.Context) -> None:
    """Until `over` is there at the end of an epoch, or for `epochs` of them."""
    config = ctx.config
    folder = Path(config["folder"])

    def look(phase: str, _detail: int) -> None:
        if phase == "batch":
            time.sleep(config["pace_s"])
            with contextlib.suppress(FileNotFoundError):
                (folder / f"cut-{ctx.worker}").unlink()
                cut()

    ctx.on_phase(look)
    model: nn.Module = Net()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(960, 32, generator=draw), torch.randint(10, (960,), generator=draw)
    samples = torch.utils.data.TensorDataset(x, y)
    loader = ctx.loader(samples, batch_size=48, slices=SLICES)
    for epoch in loader.epochs(1_000_000):
        for step in epoch:
            for inputs, labels in step:
                F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        last = epoch.number + 1 == config.get("epochs") or (folder / "over").exists()
        if sum(ctx.evaluate(lambda *_, last=last: float(last), samples, batch_size=960).values()):
            return


def drive(folder: Path, address: str, workers: int) -> None:
    """The driver's process: ends when the run does."""
    ray.init(address=address, log_to_driver=False)
    elastix.ElasticTrainer(
        train,
        config={"folder": str(folder), "pace_s": 0.05},
        scaling=elastix.ScalingConfig(
            num_workers=workers, spares=1, shadows=1, cpus_per_worker=0.5
        ),
        run=elastix.RunConfig(name=NAME, store=str(folder / "store"), exact=True),
        failure=elastix.FailureConfig(hang_timeout_s=HANG_S),
        checkpoint=elastix.CheckpointConfig(every_s=10.0),
        quiet=True,
    ).fit()


class Fire:
    """Who is there, as the journal tells, and what befalls them.

    Args:
        folder: of the run.
        address: of Ray.
        workers: of the group.
        seed: of what happens to whom.
    """

    def __init__(self, folder: Path, address: str, workers: int, seed: int) -> None:
        self.struck: Counter[str] = Counter()
        self.events: Counter[type[Event]] = Counter()
        self.looks: dict[tuple[str, int], list[tuple[float, list[float]]]] = defaultdict(list)
        self._folder, self._address, self._workers = folder, address, workers
        self._draws = random.Random(seed)
        self._tail = journal.Tail(folder / "store" / "runs" / NAME / "journal.jsonl")
        self._there: dict[int, int] = {}
        self.driver = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.endurance", "--drive", str(self._folder)]
        return subprocess.Popen(
            [*command, "--address", self._address, "--workers", str(self._workers)]
        )

    def look(self) -> None:
        """What the journal says, and what processes use that are there for long."""
        for event in self._tail.news():
            self.events[type(event)] += 1
            match event:
                case WorkerStarted():
                    self._there[event.worker] = event.pid
                case WorkerLost() | WorkerLeft():
                    self._there.pop(event.worker, None)
        controller = takeover.find_controller(takeover.run_id(str(self._folder / "store"), NAME))
        roles = {"driver": self.driver.pid}
        with contextlib.suppress(ray.exceptions.RayError):
            if controller is not None:
                roles["controller"] = ray.get(controller.process.remote(), timeout=1)
        if self._there:
            roles["worker"] = self._there[min(self._there)]
        for role, pid in roles.items():
            with contextlib.suppress(OSError):  # it ends just then
                used = resources(pid)
                self.looks[role, pid].append((time.monotonic(), used))

    def strike(self, kind: str) -> None:
        """Let it happen, when there is somebody whom it can happen to."""
        self.look()
        while len(self._there) < 2:
            alive(self.driver)
            time.sleep(0.5)
            self.look()
        others = sorted(self._there)[1:]  # the oldest tells what grows
        victims = self._draws.sample(others, min(len(others), 2 if kind == "pair" else 1))
        struck = True
        match kind:
            case "driver":
                self.driver.kill()
                self.driver.wait()
                self._there.clear()
                self.driver = self._start()
            case "controller":
                pids = [pid for (role, pid), _ in self.looks.items() if role == "controller"]
                os.kill(pids[-1], signal.SIGKILL)
            case "all":
                struck = self._signal(sorted(self._there), signal.SIGKILL) > 0
            case "cut":
                for worker in victims:
                    (self._folder / f"cut-{worker}").touch()
            case "pair":
                killed = self._signal(victims, signal.SIGKILL)
                struck, kind = killed > 0, "pair" if killed > 1 else "kill"
            case _:
                number = {"stop": signal.SIGSTOP, "leave": signal.SIGTERM}
                struck = self._signal(victims, number.get(kind, signal.SIGKILL)) > 0
        self.struck[kind] += struck

    def _signal(self, workers: list[int], number: signal.Signals) -> int:
        """How many were there to get it."""
        reached = 0
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):  # it has gone by itself
                os.kill(self._there[worker], number)
                reached += 1
        return reached

    def spared(self) -> None:
        """Who was to cut its connections and went before it came to do so was not struck."""
        self.struck["cut"] -= len(list(self._folder.glob("cut-*")))

    def moments(self, seconds: float, harms: int) -> Iterator[tuple[float, str]]:
        """When what happens, from the first on."""
        once = sorted((share * seconds, kind) for kind, share in ONCE.items())
        for number in range(harms - len(once)):
            at = seconds * number / (harms - len(once))
            while once and once[0][0] <= at:
                yield once.pop(0)
            yield at, self._draws.choices(list(SHARES), list(SHARES.values()))[0]
        yield from once

    def growth(self) -> dict[str, Any]:
        """Of each role, the process that was looked at for longest."""
        found = {}
        for role in ("driver", "controller", "worker"):
            series = [looks for (name, _), looks in self.looks.items() if name == role]
            longest = max(series, key=lambda looks: looks[-1][0] - looks[0][0])
            start, end = longest[0][0], longest[-1][0]
            settled = [used for at, used in longest if at >= start + SETTLE_S] or [
                used for _, used in longest
            ]
            part = max(1, len(settled) // 5)
            first, last = usual(settled[:part]), usual(settled[-part:])
            names = ("descriptors", "threads", "mib")
            found[role] = {"seconds": round(end - start, 1)} | {
                name: [before, after]
                for name, before, after in zip(names, first, last, strict=True)
            }
        return found


def resources(pid: int) -> list[float]:
    """Open descriptors, threads and resident MiB of a process."""
    root = Path(f"/proc/{pid}")
    pages = int((root / "statm").read_text().split()[1])
    counts = [float(len(list((root / kind).iterdir()))) for kind in ("fd", "task")]
    return [*counts, round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)]


def usual(looks: list[list[float]]) -> list[float]:
    """The median of each: the least may be of a moment between two groups."""
    return [statistics.median(column) for column in zip(*looks, strict=True)]


def under_fire(folder: Path, seconds: float, harms: int, workers: int, seed: int) -> Fire:
    """The run, to its end."""
    address = ray.get_runtime_context().gcs_address
    fire = Fire(folder, address, workers, seed)
    while fire.events[StepCommitted] < 20:
        fire.look()
        alive(fire.driver)
        time.sleep(0.2)
    start = looked = time.monotonic()
    for at, kind in fire.moments(seconds, harms):
        while (now := time.monotonic()) < start + at:
            if now > looked + LOOK_S:
                fire.look()
                looked = now
            alive(fire.driver)
            time.sleep(0.05)
        fire.strike(kind)
    while time.monotonic() < start + seconds:
        fire.look()
        time.sleep(LOOK_S)
    (folder / "over").touch()
    while fire.driver.poll() is None:
        fire.look()
        time.sleep(0.5)
    fire.look()
    fire.spared()
    alive(fire.driver)
    return fire


def alive(driver: subprocess.Popen[bytes]) -> None:
    if driver.poll() not in (None, 0):
        raise SystemExit(f"fit ended with exit code {driver.returncode}; see its error above.")


def main() -> None:
    os.environ.setdefault("RAY_worker_niceness", "0")  # else replacements wait behind all else
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--harms", type=int, default=360)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive is not None:
        drive(given.drive, given.address, given.workers)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
        try:
            fire = under_fire(folder, given.seconds, given.harms, given.workers, given.seed)
        finally:
            ray.shutdown()
        events = list(journal.read(folder / "store" / "runs" / NAME / "journal.jsonl"))
        account = audit(events)
        ended = [event for event in events if isinstance(event, RunEnded)]
        epochs = account.loaders[0].epochs
        quiet = run_local(
            train,
            1,
            exact=True,
            config={"folder": str(folder / "nobody"), "pace_s": 0.0, "epochs": epochs},
            directory=folder / "quiet",
            timeout_s=3600.0,
        )
        found = {
            "seconds": given.seconds,
            "struck": dict(sorted(fire.struck.items())),
            "losses": fire.events[WorkerLost],
            "joins": fire.events[WorkerJoined],
            "epochs": epochs,
            "steps": account.steps,
            "outcome": ended[-1].outcome,
            "exact": account.exact,
            "byte_equal": account.state is not None and account.state == audit(quiet.events).state,
            "growth": fire.growth(),
        }
    print(json.dumps(found, indent=2))
    if given.out is not None:
        save(given.out, found)
    if not (found["exact"] and found["byte_equal"]):
        raise SystemExit("the run under fire is not the quiet run.")


if __name__ == "__main__":
    main()
