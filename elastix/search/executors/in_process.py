"""One piece of work in this process, at world size 1. No Ray: the executors' common core."""

import sys
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from elastix.config import CheckpointConfig
from elastix.events import AncestorIgnored, Event, Reported, StateStored, TensorsInherited
from elastix.search.executors import outside_generators, process_settings
from elastix.search.executors.executor import Ended, EndedKind, TrainFunction, Work, WorkReport
from elastix.search.executors.trial_memory import PeakMemory, out_of_memory, refused_bytes
from elastix.state import Ref
from elastix.train.control.messages import Outcome, OutcomeKind
from elastix.train.replica.link import Settings
from elastix.train.replica.solo import run_alone
from elastix.train.replica.train_function import let_go_of_memory

_NOWHERE = Path("/nonexistent")  # States go to the model source; nothing is written to a directory
_CHECKPOINT = CheckpointConfig()
_OWN = ("final", "paused")  # why a run leaves its State to the model source, and not to itself


class Findings:
    """Collects what an Ended will say from the events of a run."""

    def __init__(self, number: int, tell: Callable[[WorkReport], None]) -> None:
        self.results: dict[int, Mapping[str, Any]] = {}
        self.inherited: Mapping[str, Any] | None = None
        self.ignored = False
        self.ref: Ref | None = None
        self.reason = ""  # of that State
        self._number = number
        self._tell = tell
        self._is_over = False

    def over(self) -> None:
        """The run is: what a thread that it has left reports later is no part of the trial."""
        self._is_over = True

    def hear(self, event: Event) -> None:
        """One event of the run."""
        if self._is_over:
            return
        if isinstance(event, Reported):
            if event.seq in self.results:  # a group has gone back, and does the rest again
                self.results = {n: found for n, found in self.results.items() if n < event.seq}
            self.results[event.seq] = event.metrics
            self._tell(WorkReport(number=self._number, seq=event.seq, metrics=event.metrics))
        elif isinstance(event, TensorsInherited):
            self.inherited = event.found
        elif isinstance(event, AncestorIgnored):
            self.ignored = True
        elif isinstance(event, StateStored) and event.reason in _OWN:
            # A group stores States of its own as well, and may be told of the last one later.
            self.ref, self.reason = Ref(event.ref), event.reason


def execute(
    train: TrainFunction,
    work: Work,
    *,
    worker: str,
    tell: Callable[[WorkReport], None],
    device: torch.device | None = None,
    halted: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run a piece of work to its end, here. Raises nothing but KeyboardInterrupt.

    The train function may change its config, the working folder, the environment and settings, and
    draw from generators that it finds outside of itself: the next one begins with what this one
    began with, and the model is stored with the config that was tried.
    """
    settings = Settings(
        directory=_NOWHERE,
        run=work.name,
        seed=work.seed,
        order_seed=work.order_seed,
        min_workers=1,
        checkpoint=_CHECKPOINT,
        model_source=work.model_source,
        until_reports=work.until_reports,
        alone=True,
    )
    found = Findings(work.number, tell)
    started_s, began = time.time(), time.monotonic()
    memory = PeakMemory(device or torch.device("cpu"))
    with process_settings.kept(), outside_generators.kept(train):
        config = deepcopy(work.config)
        outcome = run_alone(train, config, settings, found.hear, device=device, halted=halted)
    found.over()
    kind, summary, peak = _kind(outcome), _summary(outcome), memory.read()
    failed = outcome.kind is OutcomeKind.DEVICE_FAILED
    if failed:
        summary = f"its GPU failed: {summary.splitlines()[0]}"
    spent = failed or not computes()
    _forget_compiled()
    if kind is EndedKind.STARVED and peak:
        peak += refused_bytes(summary)  # what it would have come to
    if device is not None and device.type == "cuda" and not spent:
        let_go_of_memory()  # others may share it, and whoever is idle counts as holding nothing
    return Ended(
        number=work.number,
        kind=kind,
        results=found.results,
        ref=found.ref,
        epochs=outcome.epochs,
        inherited=found.inherited,
        ignored=found.ignored,
        error=outcome.error,
        summary=summary,
        traceback=outcome.traceback,
        started_s=started_s,
        finished_s=started_s + time.monotonic() - began,  # clocks are set
        worker="" if failed else worker,  # which did not die by itself
        peak_bytes=peak,
        base_bytes=memory.base,
        spent=spent,
    )


def computes() -> bool:
    """Whether GPUs do anything for this process, if it uses any: after most errors they do not."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _forget_compiled() -> None:
    """Have torch compile the next trial as the first: other shapes would be compiled as dynamic."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if getattr(compiler, "FRAME_COUNTER", 0):
        torch.compiler.reset()


def _kind(outcome: Outcome) -> EndedKind:
    if outcome.kind is OutcomeKind.RAISED and out_of_memory(_summary(outcome)):
        return EndedKind.STARVED
    if outcome.kind is OutcomeKind.DEVICE_FAILED:
        return EndedKind.LOST
    return EndedKind.PAUSED if outcome.paused else EndedKind(outcome.kind)


def _summary(outcome: Outcome) -> str:
    return outcome.summary or (str(outcome.error) if outcome.error else "")
