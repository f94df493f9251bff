"""Many real processes under fire on one machine. A part of benchmarks.size.

So many bare workers train a small model together: forked processes, gloo, no Ray. When the first
generation has formed, one of them is killed with SIGKILL every so often, at random, and replaced;
after `seconds` the run finishes its epoch. What is shown, by key:

- `workers`, `kills`, `seconds` and `every_s`; `losses`, `joins`, `generations`, `steps`, `epochs`
  as the journal has them, and `least` and `most` workers of a committed step.
- `exact`: every sample of every epoch was used once. `replicas`: how many workers ended in the
  group; `equal`: their models have the same bytes.
- `pss_mib`: memory of a worker, with its share of what it has in common with others: the largest
  of the means that were seen. `total_mib`: the most that all workers had together.
- `founded_s`, `generation_s`, `step_s`: from the start to the first generation; from a loss to the
  next generation, median and most; from step to step, median. Elapsed seconds, where as many
  processes share so few cores: they say what goes on such a machine, not what the protocol costs.
"""

import contextlib
import hashlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elastix.data.audit import audit
from elastix.events import Event, GenerationFormed, StepCommitted, WorkerJoined, WorkerLost
from elastix.testing.local import LocalRun, run_local
from elastix.train.replica.context import Context

SAMPLES, BATCH, WIDTH = 5_120, 640, 32
TIMEOUT_S = 600.0


def train(ctx: Context) -> None:
    """Until `over` is there at the end of an epoch."""
    folder = Path(ctx.config["folder"])
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH, generator=draw)
    y = torch.randint(10, (SAMPLES,), generator=draw)
    samples = torch.utils.data.TensorDataset(x, y)
    (folder / f"{ctx.worker}.pid").write_text(str(os.getpid()), encoding="ascii")
    for epoch in ctx.loader(samples, batch_size=BATCH).epochs(1_000_000):
        for inputs, labels in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        over = float((folder / "over").exists())
        told = ctx.evaluate(lambda *_, over=over: over, samples, batch_size=SAMPLES)
        if sum(told.values()):
            break
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    (folder / f"{ctx.worker}.digest").write_text(digest.hexdigest(), encoding="ascii")


class Fire(threading.Thread):
    """Kills a worker every so often, and looks at how much memory they have.

    Args:
        folder: where workers leave their process ids.
        workers: of the group.
        seconds: how long, from the moment when so many are there.
        every_s: between two kills.
    """

    def __init__(self, folder: Path, workers: int, seconds: float, every_s: float) -> None:
        super().__init__(daemon=True)
        self.kills = 0
        self.means: list[float] = []
        self.totals: list[float] = []
        self.ended = threading.Event()
        self._known: dict[int, int] = {}
        self._folder, self._workers = folder, workers
        self._seconds, self._every_s = seconds, every_s

    def run(self) -> None:
        """Until it is over, or the run is."""
        while len(self._alive()) < self._workers:
            if self.ended.wait(0.2):
                return
        rng = random.Random(0)
        self._weigh()
        now = time.monotonic()
        due, until = now + self._every_s, now + self._seconds
        while due <= until and not self.ended.wait(max(0.0, due - time.monotonic())):
            due += self._every_s  # one that came late does not put the next ones off
            alive = self._alive()
            if len(alive) > 1:
                worker = rng.choice(sorted(alive))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(alive[worker], signal.SIGKILL)
                    self.kills += 1
        self._weigh()
        (self._folder / "over").touch()

    def _alive(self) -> dict[int, int]:
        """Process ids of those that have come as far as to train, by worker."""
        for path in self._folder.glob("*.pid"):
            if int(path.stem) not in self._known and (text := path.read_text(encoding="ascii")):
                self._known[int(path.stem)] = int(text)
        return {w: pid for w, pid in self._known.items() if Path(f"/proc/{pid}/fd").exists()}

    def _weigh(self) -> None:
        held = [mib for pid in self._alive().values() if (mib := _pss_mib(pid))]
        if held:
            self.means.append(statistics.mean(held))
            self.totals.append(sum(held))


def _pss_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def workers_of(workers: int, seconds: float, every_s: float) -> dict[str, Any]:
    """What became of so many workers."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "notes"
        folder.mkdir()
        fire = Fire(folder, workers, seconds, every_s)
        fire.start()
        try:
            run = run_local(
                train,
                workers,
                config={"folder": str(folder)},
                directory=Path(place) / "run",
                replace=True,
                timeout_s=TIMEOUT_S + seconds,
            )
        finally:
            fire.ended.set()
            fire.join()
        digests = {path.read_text(encoding="ascii") for path in folder.glob("*.digest")}
        ended = len(list(folder.glob("*.digest")))
    return {
        "workers": workers,
        "seconds": seconds,
        "every_s": every_s,
        "kills": fire.kills,
        **_told(run),
        "replicas": ended,
        "equal": len(digests) == 1,
        "pss_mib": round(max(fire.means), 1),
        "total_mib": round(max(fire.totals)),
    }


def _told(run: LocalRun) -> dict[str, Any]:
    """What the journal has."""
    steps = [event for event in run.events if isinstance(event, StepCommitted)]
    formed = [event for event in run.events if isinstance(event, GenerationFormed)]
    account = audit(run.events)
    apart = [later.t - one.t for one, later in pairwise(steps)]
    waits = _waits(run.events)
    return {
        "losses": len(run.lost),
        "joins": sum(isinstance(event, WorkerJoined) for event in run.events),
        "generations": len(formed),
        "steps": len(steps),
        "epochs": sum(loader.epochs for loader in account.loaders),
        "least": min(step.world_size for step in steps),
        "most": max(step.world_size for step in steps),
        "exact": account.exact,
        "founded_s": round(formed[0].t - run.events[0].t, 2),
        "generation_s": [round(statistics.median(waits), 2), round(max(waits), 2)] if waits else [],
        "step_s": round(statistics.median(apart), 3),
    }


def _waits(events: list[Event]) -> list[float]:
    """Seconds from each loss to the next generation."""
    found, lost = [], []
    for event in events:
        if isinstance(event, WorkerLost):
            lost.append(event.t)
        elif isinstance(event, GenerationFormed):
            found += [event.t - t for t in lost]
            lost.clear()
    return found
