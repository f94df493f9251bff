"""What a campaign of very many trials costs its driver. A part of benchmarks.size.

A whole campaign with the default searcher, four parameters, journal, trial database and an empty
store. Its executor costs nothing: it runs a hundred trials at once, and each is over at once, with
one report. Each of these in a process of its own:

- `driver_us`: CPU of `Campaign.run` per trial, all of it.
- `driver_kib`: memory that it took per trial. `peak_mib`: the most that the process held.
- `journal_bytes`, `database_bytes`: per trial, on the disk.
- `resume_s`: CPU seconds from the call of `run` to the first trial that is submitted, in a
  campaign whose driver was killed with SIGKILL after so many trials. `resumed`: how many it knew.
- `results_s`: `Results.open`. `dataframe_s`: then `dataframe()`. `show_s`: `elastix campaign show`.
  `report_s`: the page of `elastix report`.
"""

import contextlib
import io
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import elastix
from benchmarks.processes import Died, apart, resident
from elastix.search.executors.executor import Ended, EndedKind, TrainFunction, Work
from elastix.search.model_sources import StoreDirectory

SIZES = (1_000, 10_000, 100_000)
NAME = "long"
AT_ONCE = 100
AGAIN = 100  # trials of the campaign that was killed, after it goes on


def _score(config: Any) -> float:  # noqa: ANN401 - a configuration
    """So smooth that there is something to search for."""
    return float(config["x"] * (1 - config["y"]) - 0.01 * config["depth"])


def _train(ctx: elastix.Context) -> None:
    """What would run if the executor ran anything."""
    ctx.report(score=_score(ctx.config))


class Instant:
    """An executor whose trials are over at once.

    Args:
        die_after: so many trials, by SIGKILL; None: never.

    Attributes:
        first_s: process_time of the first `submit`.
        submitted: how many trials were.
    """

    def __init__(self, die_after: int | None = None) -> None:
        self._die_after = die_after
        self._live: dict[int, Work] = {}
        self.first_s = 0.0
        self.submitted = 0

    def open(self, train: TrainFunction) -> None:
        """See Executor."""

    def reach(self, store: str) -> StoreDirectory:
        """See Executor."""
        return StoreDirectory(store)

    @property
    def room(self) -> int:
        """See Executor."""
        return AT_ONCE - len(self._live)

    def submit(self, work: Work) -> None:
        """See Executor."""
        self.first_s = self.first_s or time.process_time()
        self.submitted += 1
        self._live[work.number] = work

    def poll(self, timeout_s: float) -> Sequence[Ended]:
        """See Executor. What was told last is in the database by now."""
        del timeout_s
        if self._die_after is not None and self.submitted > self._die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        some = list(self._live.values())[: AT_ONCE // 2]
        self._live = {n: work for n, work in self._live.items() if n > some[-1].number}
        return [
            Ended(
                number=work.number,
                kind=EndedKind.FINISHED,
                results={0: {"score": _score(work.config)}},
                epochs=1.0,
            )
            for work in some
        ]

    def halt(self, number: int) -> None:
        """See Executor."""

    def close(self) -> None:
        """See Executor."""


def campaign(store: Path, trials: int, executor: Instant) -> elastix.Campaign:
    """So many trials."""
    from ConfigSpace import Categorical, ConfigurationSpace, Float, Integer

    space = ConfigurationSpace(
        space=[
            Float("x", (0.0, 1.0)),
            Float("y", (1e-4, 1.0), log=True),
            Integer("depth", (1, 12)),
            Categorical("kind", ["a", "b", "c"]),
        ]
    )
    return elastix.Campaign(
        _train,
        space=space,
        searcher=elastix.Evolution(),  # the default one would take twenty times as long as the rest
        metric="score",
        budget=elastix.Budget(trials=trials),
        run=elastix.RunConfig(name=NAME, store=str(store)),
        executor=executor,
        quiet=True,
    )


def _drive(store: Path, trials: int) -> dict[str, float]:
    made = campaign(store, trials, Instant())
    before, begun = resident(), time.process_time()
    results = made.run()
    spent, held = time.process_time() - begun, resident() - before
    if len(results) != trials:
        raise RuntimeError(f"{len(results)} of {trials} trials are in the results")
    folder = store / "runs" / NAME
    return {
        "driver_us": 1e6 * spent / trials,
        "driver_kib": held / trials / 1024,
        "journal_bytes": (folder / "journal.jsonl").stat().st_size / trials,
        "database_bytes": sum(p.stat().st_size for p in folder.glob("*.sqlite*")) / trials,
    }


def _be_killed(store: Path, trials: int) -> dict[str, float]:
    campaign(store, 2 * trials, Instant(die_after=trials)).run()
    raise RuntimeError("nobody killed this campaign")


def _resume(store: Path, trials: int) -> dict[str, float]:
    executor = Instant()
    made = campaign(store, trials + AGAIN, executor)
    begun = time.process_time()
    results = made.run()
    if [trial.number for trial in results] != list(range(trials + AGAIN)):
        raise RuntimeError("trials are missing, or are there twice")
    return {
        "resume_s": executor.first_s - begun,
        "resumed": trials + AGAIN - executor.submitted,
    }


def _read(store: Path) -> dict[str, float]:
    import pandas as pd  # noqa: F401 - what importing it costs is no matter of size

    from elastix.search.results import Results

    begun = time.process_time()
    results = Results.open(store, NAME)
    opened = time.process_time()
    results.dataframe()
    return {"results_s": opened - begun, "dataframe_s": time.process_time() - opened}


def _show(store: Path) -> dict[str, float]:
    from elastix.commands.campaigns import show

    begun = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        show(NAME, store=str(store), top=10, failed=False, parquet=None, as_json=False)
    return {"show_s": time.process_time() - begun}


def _report(store: Path) -> dict[str, float]:
    from elastix.report import report_page

    begun = time.process_time()
    report_page(NAME, store)
    return {"report_s": time.process_time() - begun}


def campaign_of(trials: int, folder: Path | None = None) -> dict[str, Any]:
    """What a campaign of so many trials costs."""
    found: dict[str, Any] = {"trials": trials}
    peaks = {}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store, killed = Path(place) / "store", Path(place) / "killed"
        with contextlib.suppress(Died):
            apart(_be_killed, killed, trials)
        for name, ask, arguments in (
            ("driver", _drive, (store, trials)),
            ("resume", _resume, (killed, trials)),
            ("dataframe", _read, (store,)),
            ("show", _show, (store,)),
            ("report", _report, (store,)),
        ):
            figures, peaks[name] = apart(ask, *arguments)
            found |= {key: round(value, 3) for key, value in figures.items()}
    found["peak_mib"] = {name: round(peak, 1) for name, peak in peaks.items()}
    return found
