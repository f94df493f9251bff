"""What a person sees while a campaign runs: a line per event that matters, and a summary.

Reads events only, like console.py, which does it for one training run.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.markup import escape

from elastix.events import (
    CampaignEnded,
    CampaignStarted,
    Event,
    TrialEnded,
    TrialLost,
    TrialStarted,
)

_PROGRESS_S = {True: 5.0, False: 30.0}  # on a terminal, in a log


class TrialsConsole:
    """Prints a campaign's events as they come.

    Args:
        name: of the campaign.
        directory: of its book and journal, named in the first and last line.
        budget: trials wanted; None for no limit.
        quiet: print nothing at all.
    """

    def __init__(
        self, name: str, directory: Path, budget: int | None, *, quiet: bool = False
    ) -> None:
        self._name = name
        self._directory = directory
        self._budget = budget
        self._terminal = Terminal(quiet=quiet, highlight=False, soft_wrap=True)
        self._began = self._told = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._running: set[int] = set()
        self._parents: dict[int, int | None] = {}
        self._best: TrialEnded | None = None
        self._inherited: list[float] = []
        self._longest = 0.0

    def show(self, event: Event) -> None:
        """Print what the event means, if it means anything to a person."""
        match event:
            case CampaignStarted():
                self._started(event)
            case TrialStarted():
                self._running.add(event.trial)
                self._parents[event.trial] = event.parent
            case TrialLost():
                self._running.discard(event.trial)
                self._counts["lost"] += 1
                self._say(f"[red]trial {event.trial} lost[/]: {escape(event.cause)}; again")
            case TrialEnded():
                self._ended(event)
            case CampaignEnded():
                self._over(event)
        if isinstance(event, TrialEnded | TrialStarted):
            self._progress()

    def _started(self, event: CampaignStarted) -> None:
        goal = ", ".join(f"{mode} {name}" for name, mode in event.objectives.items())
        known = f", goes on after {event.known} trials" if event.known else ""
        self._counts["known"] = event.known
        self._say(
            f"[bold]{escape(event.name)}[/]  {escape(goal)} with {event.searcher}, inherit "
            f"{escape(event.inherit)}{known}  {escape(str(self._directory))}"
        )

    def _ended(self, event: TrialEnded) -> None:
        self._running.discard(event.trial)
        self._counts[event.state] += 1
        self._inherited.append(event.inherited)
        self._longest = max(self._longest, event.lineage_epochs - event.epochs)
        if event.state == "failed":
            if self._counts["failed"] <= 3:  # the first ones say it; the table has them all
                self._say(f"[red]trial {event.trial} failed[/]: {escape(event.message)}")
        elif event.best:
            self._best = event
            self._say(f"[green]best[/]  {self._describe(event)}")

    def _describe(self, event: TrialEnded) -> str:
        values = "  ".join(f"{escape(k)} {_number(v)}" for k, v in event.values.items())
        line = f"trial {event.trial}"
        parent = self._parents.get(event.trial)
        while parent is not None and len(line) < 60:
            line += f" <- {parent}"
            parent = self._parents.get(parent)
        share = f"  inherited {event.inherited:.0%}" if event.inherited else ""
        epochs = f"  epochs {event.epochs:g}"
        if event.lineage_epochs > event.epochs:
            epochs += f" ({event.lineage_epochs:g} with its lineage)"
        return f"{values}  {line}{share}{epochs}"

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._told < _PROGRESS_S[self._terminal.is_terminal]:
            return
        self._told = now
        self._say(self._summary(now - self._began))

    def _summary(self, elapsed_s: float) -> str:
        final = ("finished", "stopped", "failed")
        done = sum(self._counts[state] for state in final)
        parts = [f"{done + self._counts['known']} done", f"{len(self._running)} running"]
        parts += [f"{self._counts[s]} {s}" for s in ("paused", "failed", "lost") if self._counts[s]]
        if self._budget is not None:
            parts.append(f"{self._budget} budget")
        rate = f"  {done / elapsed_s:.3g} a second" if elapsed_s > 0 and done else ""
        return f"trials {' · '.join(parts)}{rate}"

    def _over(self, event: CampaignEnded) -> None:
        colour = {"finished": "bold", "failed": "bold red"}.get(event.outcome, "bold yellow")
        self._say(f"[{colour}]{escape(self._name)} {event.outcome}[/]  {event.trials} trials")
        self._say(f"  {self._summary(time.monotonic() - self._began)}")
        if self._best is not None:
            self._say(f"  best {self._describe(self._best)}")
        inherited = [share for share in self._inherited if share]
        if inherited:
            mean = sum(inherited) / len(inherited)
            self._say(
                f"  {len(inherited)} trials inherited {mean:.0%} of their bytes on average, from "
                f"lineages of up to {self._longest:g} epochs"
            )
        if event.message and event.outcome != "failed":
            self._say(f"  {escape(event.message)}")
        self._say(f"  table: elastix campaign show {escape(self._name)}")

    def _say(self, line: str) -> None:
        elapsed = time.monotonic() - self._began
        self._terminal.print(f"{elapsed:7.2f}  {line}")


def _number(value: Any) -> str:  # noqa: ANN401 - any metric
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
