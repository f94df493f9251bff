"""What the journal of a very long run costs those who read it. A part of benchmarks.size.

A journal is written as a run of so many steps writes it: four workers, batches of 32, a report and
a stored State every thousand steps, one worker lost and replaced every ten thousand. Then whoever
reads such a journal does so, each in a process of its own: what it took in CPU and memory.

- `open_s`: a controller that goes on with the run, or takes it over.
- `result_s`: a Result: the account of samples and what was reported.
- `report_s`: the page of `elastix report`.
- `peak_mib`: the most that any of these processes held.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.processes import apart
from elastix.events import (
    BatchShares,
    EpochsPlanned,
    Event,
    Events,
    GenerationFormed,
    LoaderOpened,
    Reported,
    Resumed,
    RunStarted,
    StateStored,
    StepCommitted,
    WorkerJoined,
    WorkerLost,
    WorkerStarted,
)
from elastix.observe.journal import Journal
from elastix.report import report_page
from elastix.train.record.logbook import Logbook
from elastix.train.record.result import Result

WORKERS = 4
BATCH = 32
BATCHES_AN_EPOCH = 10_000
REPORT_EVERY = 1_000
LOSS_EVERY = 10_000
NAME = "long"


def history(steps: int) -> Iterator[tuple[Event, int | None]]:
    """The events of such a run, each with its serial if several workers may send it."""
    length = BATCHES_AN_EPOCH * BATCH
    t = 1.7e9
    yield RunStarted(t=t, name=NAME, seed=0, config={"lr": 0.1}, scaling={}, versions={}), None
    for worker in range(WORKERS):
        yield WorkerStarted(t=t, worker=worker, pid=1000 + worker, node="", device="cpu"), None
    members = tuple(range(WORKERS))
    generation = 1
    yield GenerationFormed(t=t, generation=1, members=members, cause="start"), None
    yield (
        LoaderOpened(t=t, loader=0, length=length, batch_size=BATCH, shuffle=True, seed=0),
        0,
    )
    yield EpochsPlanned(t=t, loader=0, epochs=-(-steps // BATCHES_AN_EPOCH)), 1
    serial = 1
    share = BATCH // WORKERS
    for step in range(1, steps + 1):
        t += 0.1
        start = (step - 1) * BATCH
        spans = {
            worker: ((start + rank * share, start + (rank + 1) * share),)
            for rank, worker in enumerate(members)
        }
        batch = BatchShares(loader=0, epoch=(step - 1) // BATCHES_AN_EPOCH, shares=spans)
        serial += 1
        yield (
            StepCommitted(
                t=t, step=step, generation=generation, world_size=WORKERS, batches=(batch,)
            ),
            serial,
        )
        if not step % REPORT_EVERY:
            serial += 1
            yield (
                Reported(t=t, seq=step // REPORT_EVERY, step=step, metrics={"loss": 1.0 / step}),
                serial,
            )
            ref = f"{step:064x}"
            stored = StateStored(
                t=t,
                ref=ref,
                step=step,
                reason="every",
                stored_bytes=1000,
                store_s=0.1,
                stall_s=0.01,
            )
            yield stored, None
        if not step % LOSS_EVERY:
            lost, joined = members[0], members[-1] + 1
            yield WorkerLost(t=t, worker=lost, rank=0, generation=generation, cause="died"), None
            yield WorkerStarted(t=t, worker=joined, pid=1000, node="", device="cpu"), None
            generation += 1
            members = (*members[1:], joined)
            yield (
                GenerationFormed(t=t, generation=generation, members=members, cause="join"),
                None,
            )
            came = WorkerJoined(
                t=t, worker=joined, generation=generation, step=step, copy_s=0.1, copy_bytes=1000
            )
            yield came, None


def write(path: Path, steps: int) -> float:
    """The journal of `steps` steps, and the CPU seconds that it took."""
    begun = time.process_time()
    with Journal(path) as journal:
        for event, serial in history(steps):
            journal.append(event, serial)
    return time.process_time() - begun


def _open(path: Path) -> None:
    log = Logbook(Events())
    log.open(path, Resumed(step=0, ref=""), stays=False, patience_s=0.0)
    log.close()


def _result(path: Path) -> None:
    result = Result.of(path.parent)
    if not result.audit.exact:
        raise SystemExit(f"the account of the journal is wrong: {result.audit}")


def _report(path: Path) -> None:
    report_page(NAME, path.parents[2])


READERS: dict[str, Callable[[Path], None]] = {
    "open": _open,
    "result": _result,
    "report": _report,
}


def _measured(read: Callable[[Path], None], path: Path) -> dict[str, float]:
    begun = time.process_time()
    read(path)
    return {"cpu_s": time.process_time() - begun}


def journal_of(steps: int, folder: Path | None = None) -> dict[str, Any]:
    """What the journal of a run of `steps` steps costs."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "store" / "runs" / NAME / "journal.jsonl"
        path.parent.mkdir(parents=True)
        cpu_s = write(path, steps)
        found: dict[str, Any] = {"steps": steps, "write_us_per_step": round(1e6 * cpu_s / steps, 2)}
        found["bytes_per_step"] = round(path.stat().st_size / steps, 1)
        peaks = {}
        for name, read in READERS.items():
            told, peaks[name] = apart(_measured, read, path)
            found[f"{name}_s"] = round(told["cpu_s"], 2)
        found["peak_mib"] = {name: round(peak, 1) for name, peak in peaks.items()}
    return found
