"""What a person sees while a run goes on: a line per event that matters, and a summary.

Reads events only. Not here: live displays and reports.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.markup import escape

from elastix.errors import ElastixError
from elastix.events import (
    Event,
    GenerationFormed,
    Recovered,
    Reported,
    Resumed,
    RunStarted,
    StateNotStored,
    StateStored,
    StepCommitted,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerSlow,
)

_PROGRESS_S = {True: 5.0, False: 30.0}  # on a terminal, in a log


class Console:
    """Prints a run's events as they come.

    Args:
        name: of the run.
        directory: of the run, named in the first and last line.
        quiet: print nothing at all.
    """

    def __init__(self, name: str, directory: Path, *, quiet: bool = False) -> None:
        self._name = name
        self._directory = directory
        self._terminal = Terminal(quiet=quiet, highlight=False, soft_wrap=True)
        self._started = time.time()
        self._told = self._started
        self._steps = 0
        self._samples = 0
        self._samples_told = 0
        self._losses = 0
        self._recoveries: dict[int, float] = {}

    def show(self, event: Event) -> None:
        """Print what the event means, if it means anything to a person."""
        if isinstance(event, StepCommitted):
            self._steps = event.step
            self._samples += sum(batch.samples for batch in event.batches)
            self._progress(event)
        elif isinstance(event, Recovered):
            self._recovered(event)
        else:
            line = self._line(event)
            if line:
                self._say(event, line)

    def finished(self, ref: str, metrics: Mapping[str, Any], account: object) -> None:
        """The last lines of a run that went well."""
        shown = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())
        worst = (
            f", slowest recovery {max(self._recoveries.values()):.2f} s" if self._recoveries else ""
        )
        self._print(f"[bold]{escape(self._name)} finished[/]  {escape(shown)}")
        self._print(f"  workers lost {self._losses}{worst}")
        self._print(f"  samples {escape(str(account))}")
        self._print(f"  state {ref[:12]}  in {escape(str(self._directory))}")

    def failed(self, error: ElastixError) -> None:
        """The last line of a run that did not."""
        kind = type(error).__name__
        self._print(f"[bold red]{escape(self._name)} failed[/]: {kind} after step {self._steps}")
        self._print(f"  journal in {escape(str(self._directory))}")

    def interrupted(self, *, goes_on: bool = False) -> None:
        """The last line after Ctrl-C. `goes_on`: the run does not need this process."""
        name, where = escape(self._name), escape(str(self._directory))
        if goes_on:
            self._print(
                f"[bold yellow]{name} goes on[/] after step {self._steps}; fit() again attaches "
                f"to it, stop() ends it. Its journal is in {where}"
            )
            return
        self._print(
            f"[bold yellow]{name} interrupted[/] after step {self._steps}; fit() "
            f"again goes on from the last stored State. Its journal is in {where}"
        )

    def leaderless(self) -> None:
        """The controller's process died."""
        self._print("[red]controller lost[/]: the workers keep their State; it is started again")

    def _line(self, event: Event) -> str:
        match event:
            case RunStarted():
                return f"[bold]{escape(event.name)}[/]  {escape(str(self._directory))}"
            case Resumed():
                return f"goes on from the State after step {event.step}"
            case GenerationFormed():
                who = " ".join(map(str, event.members))
                return f"[cyan]generation {event.generation}[/] ({event.cause}): workers {who}"
            case WorkerLost():
                self._losses += 1
                return f"[red]worker {event.worker} lost[/] (rank {event.rank}, {event.cause})"
            case WorkerLeft():
                return f"worker {event.worker} left after step {event.step} ({event.cause})"
            case WorkerSlow():
                return (
                    f"[yellow]worker {event.worker} is slow[/]: its part of a step takes "
                    f"{event.factor:.1f} times as long as the others'"
                )
            case WorkerJoined():
                size = event.copy_bytes / 1e6
                return (
                    f"[green]worker {event.worker} joined[/] after step {event.step}: "
                    f"{size:.1f} MB of State in {event.copy_s:.2f} s"
                )
            case Reported():
                shown = "  ".join(f"{k} {_number(v)}" for k, v in event.metrics.items())
                return f"step {event.step}  {escape(shown)}"
            case StateNotStored():
                return f"[red]state after step {event.step} not stored[/]: {escape(event.why)}"
            case StateStored():
                return f"state {event.ref[:12]} stored after step {event.step} ({event.reason})"
        return ""

    def _recovered(self, event: Recovered) -> None:
        """The slowest survivor counts; each prints if it is slower than those before."""
        before = self._recoveries.get(event.generation)
        self._recoveries[event.generation] = max(before or 0.0, event.stall_s)
        if before is None:
            step = "" if event.outcome == "between steps" else f" step {event.step}"
            stall = f"{event.stall_s:.2f} s ({event.outcome})"
            self._say(event, f"[green]recovered[/]{step} in {stall}, 0 steps lost")

    def _progress(self, event: StepCommitted) -> None:
        elapsed = event.t - self._told
        if elapsed < _PROGRESS_S[self._terminal.is_terminal]:
            return
        rate = (self._samples - self._samples_told) / elapsed
        self._told, self._samples_told = event.t, self._samples
        self._say(event, f"step {event.step}  workers {event.world_size}  {rate:.0f} samples/s")

    def _say(self, event: Event, line: str) -> None:
        self._print(f"[dim]{event.t - self._started:7.2f}[/]  {line}")

    def _print(self, line: str) -> None:
        self._terminal.print(line)


def _number(value: Any) -> str:  # noqa: ANN401 - whatever was reported
    return f"{value:.4g}" if isinstance(value, float) else str(value)
