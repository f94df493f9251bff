"""One piece of work in this process, at world size 1. No Ray: the executors' common core."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastix.config import CheckpointConfig
from elastix.events import AncestorIgnored, Event, Reported, StateStored, TensorsInherited
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
_TO_RETURN = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY  # without the right to read it


def _set_default_device(device: torch.device) -> None:
    """The CPU is the default without any, and then no operator looks for one."""
    torch.set_default_device(None if device.type == "cpu" else device)


def _flag(of: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:  # noqa: ANN401
    return partial(getattr, of, name), partial(setattr, of, name)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_device, _set_default_device),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *(_flag(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    _flag(torch.backends.mkldnn, "enabled"),
)
"""Of torch in this process: how each is read and set."""


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

    def hear(self, event: Event) -> None:
        """One event of the run."""
        if isinstance(event, Reported):
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

    The train function has the very config of `work`, and may change it. It may change the working
    folder, the environment and torch's settings as well: the next one begins with those with which
    this one began.
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
    with _folder_kept(), _environment_kept(), _settings_kept():
        outcome = run_alone(train, work.config, settings, found.hear, device=device, halted=halted)
    kind, peak = _kind(outcome), memory.read()
    if kind is EndedKind.STARVED and peak:
        peak += refused_bytes(_summary(outcome))  # what it would have come to
    if device is not None and device.type == "cuda":
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
        summary=_summary(outcome),
        traceback=outcome.traceback,
        started_s=started_s,
        finished_s=started_s + time.monotonic() - began,  # clocks are set
        worker=worker,
        peak_bytes=peak,
        base_bytes=memory.base,
    )


@contextmanager
def _folder_kept() -> Iterator[None]:
    """Leave the working folder as it was; it may have been renamed or removed meanwhile."""
    try:
        folder = os.open(".", _TO_RETURN)
    except OSError:  # there is none to come back to
        yield
        return
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Leave the environment as it was, so that no trial depends on those before it here.

    What libraries set in C stays: `os.environ` does not know it. Those that set something from
    Python, as torch's compiler does for its cache, look for it again before they use it.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, was in before.items():  # without need nothing is set: other threads may read
            if os.environ.get(name) != was:
                os.environ[name] = was


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Leave torch's settings as they were. Those that have not changed are not set again."""
    before = [_read(get) for get, _ in _SETTINGS]
    try:
        yield
    finally:
        for (get, put), was in zip(_SETTINGS, before, strict=True):
            if was is not None and _read(get) != was:
                put(was)


def _read(get: Callable[[], Any]) -> Any:  # noqa: ANN401 - of any setting
    """None if torch cannot say: of precisions there are older names, and they may not fit."""
    try:
        return get()
    except RuntimeError:
        return None


def _kind(outcome: Outcome) -> EndedKind:
    if outcome.kind is OutcomeKind.RAISED and out_of_memory(_summary(outcome)):
        return EndedKind.STARVED
    return EndedKind.PAUSED if outcome.paused else EndedKind(outcome.kind)


def _summary(outcome: Outcome) -> str:
    return outcome.summary or (str(outcome.error) if outcome.error else "")
