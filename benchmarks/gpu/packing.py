"""Trials of a campaign, so many at a time on one GPU: an executor on processes, without Ray.

Each process runs one trial after the other as a worker of the pool does (in_process.execute). All
of them are there and warm before anything is measured, and those that a campaign does not use idle.
"""

import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.gpu.models import Terms
from elastix import Budget, Campaign, Context, InheritConfig, RunConfig
from elastix.search.executors.executor import Ended, TrainFunction, Work, WorkReport
from elastix.search.executors.in_process import execute
from elastix.search.model_sources import StoreDirectory
from elastix.search.searchers.random import Random

AT_ONCE = (1, 2, 4, 8)
_SAMPLES, _INPUTS, _BATCH, _EPOCHS = 8192, 256, 256, 8
_START_S = 60.0


def trial(ctx: Context) -> None:
    """The train function: a small model, through a loader."""
    tiny = bool(os.environ.get("ELASTIX_GPU_TINY"))
    samples, epochs = (512, 1) if tiny else (_SAMPLES, _EPOCHS)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, _INPUTS, generator=generator)
    dataset = TensorDataset(x, x[:, :10].argmax(1))
    width = ctx.config["width"]
    layers = [nn.Linear(_INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=ctx.config["lr"])
    model, optimizer = ctx.prepare(model, optimizer)
    loss = torch.zeros(())
    for epoch in ctx.loader(dataset, batch_size=_BATCH).epochs(epochs):
        for inputs, labels in epoch:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ctx.report(loss=loss)


def _serve(line: Any, number: int, device: str) -> None:  # noqa: ANN401 - a Connection
    """A process: ready, then work after work until nobody sends any more."""
    torch.set_num_threads(1)
    on = torch.device(device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    torch.zeros(1, device=on).add_(1).item()
    line.send(None)
    with suppress(EOFError, BrokenPipeError):
        while True:
            train, work = line.recv()
            tell = line.send
            tell(execute(train, work, worker=f"process {number}", tell=tell, device=on))


@dataclass
class Processes:
    """An Executor. What `close` leaves is used again; `end` ends it.

    Attributes:
        at_once: as many trials run.
    """

    at_once: int = 1
    _processes: list[Any] = field(default_factory=list)
    _lines: list[Any] = field(default_factory=list)
    _busy: set[int] = field(default_factory=set)
    _train: TrainFunction | None = None

    def start(self, count: int, device: torch.device) -> None:
        """Have so many, ready.

        Raises:
            RuntimeError: one did not come.
        """
        spawner = multiprocessing.get_context("spawn")
        for number in range(count):
            mine, its = spawner.Pipe()
            arguments = (its, number, str(device))
            process = spawner.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            its.close()
            self._processes.append(process)
            self._lines.append(mine)
        for line in self._lines:
            if not line.poll(_START_S):
                raise RuntimeError("a process for trials has not come")
            line.recv()

    def end(self) -> None:
        """End them."""
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def open(self, train: TrainFunction) -> None:
        """See Executor."""
        self._train = train

    def reach(self, store: str) -> StoreDirectory:
        """See Executor."""
        return StoreDirectory(store)

    @property
    def room(self) -> int:
        """See Executor."""
        return self.at_once - len(self._busy)

    def submit(self, work: Work) -> None:
        """See Executor."""
        free = next(n for n in range(self.at_once) if n not in self._busy)
        self._busy.add(free)
        self._lines[free].send((self._train, work))

    def poll(self, timeout_s: float) -> Sequence[WorkReport | Ended]:
        """See Executor. EOFError: a process has died, and with it the measurement."""
        busy: dict[Any, int] = {self._lines[number]: number for number in self._busy}
        ready: list[Any] = multiprocessing.connection.wait(list(busy), timeout_s) if busy else []
        told: list[WorkReport | Ended] = []
        for line in ready:
            told.append(line.recv())
            if isinstance(told[-1], Ended):
                self._busy.discard(busy[line])
        return told

    def halt(self, number: int) -> None:
        """Not needed here: nothing is halted."""

    def close(self) -> None:
        """See Executor."""
        self._train = None


def space() -> Any:  # noqa: ANN401 - a ConfigurationSpace
    """Of the trials."""
    from ConfigSpace import Categorical, ConfigurationSpace, Float

    return ConfigurationSpace(
        space=[Float("lr", (1e-4, 1e-2), log=True), Categorical("width", [256, 384, 512])]
    )


def per_hour(executor: Processes, at_once: int, trials: int, terms: Terms) -> dict[str, float]:
    """One campaign; from the beginning of its first trial to the end of its last.

    Raises:
        RuntimeError: a trial has failed.
    """
    executor.at_once = at_once
    name = f"packed-{at_once}-{trials}"
    results = Campaign(
        trial,
        space=space(),
        searcher=Random(),
        metric="loss",
        mode="min",
        budget=Budget(trials=trials, parallel=at_once),
        inherit=InheritConfig(mode="none"),
        run=RunConfig(name=name, store=str(terms.folder / name)),
        executor=executor,
        quiet=True,
    ).run()
    failed = [one.traceback for one in results if not one.scored]
    if failed:
        raise RuntimeError(f"{len(failed)} trials have failed, one of them: {failed[0]}")
    begun = [one.started_s or 0.0 for one in results]
    ended = [one.finished_s or 0.0 for one in results]
    seconds = max(ended) - min(begun)
    alone_s = sum(ended) - sum(begun)
    return {
        "trials_per_hour": 3600 * trials / seconds,
        "trial_s": alone_s / trials,
        "trials": trials,
    }


def measure(terms: Terms) -> dict[str, Any]:
    """See the package. `gain`: trials an hour over those of one at a time."""
    if terms.tiny:
        os.environ["ELASTIX_GPU_TINY"] = "1"
    many = AT_ONCE[:2] if terms.tiny else AT_ONCE
    executor = Processes()
    try:
        executor.start(many[-1], terms.device)
        per_hour(executor, many[-1], 2 * many[-1], terms)  # what torch sets up in a first step
        once = per_hour(executor, 1, 3, terms)
        found: dict[str, Any] = {"cores": os.cpu_count()}
        share_s = terms.seconds / len(many)
        for at_once in many:
            # As many as there is time for if nothing is gained, and some rounds in any case.
            trials = max(4 * at_once, min(60, int(share_s / once["trial_s"])))
            found[str(at_once)] = per_hour(executor, at_once, trials, terms)
    finally:
        executor.end()
    single: Mapping[str, float] = found["1"]
    for at_once in many:
        row = found[str(at_once)]
        row["gain"] = row["trials_per_hour"] / single["trials_per_hour"]
    return found
