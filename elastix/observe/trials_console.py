"""What a person sees while a campaign runs: a live block on a terminal, lines in a log.

Reads events only, like console.py, which does it for one training run and whose rules hold here:
at most 12 lines on a terminal, a line per event and a summary each 30 s elsewhere, the run, the
store and the report in the first line and in the last.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from elastix.errors import ElastixError
from elastix.events import (
    CampaignEnded,
    CampaignStarted,
    Event,
    StoreMeasured,
    TrialEnded,
    TrialLost,
    TrialStarted,
    TrialStarved,
)
from elastix.observe.best_trial import BestTrial
from elastix.observe.console import bar, command, group_line, one_line, where
from elastix.observe.event_text import IGNORED, plain, plain_lines
from elastix.observe.journal import Tail
from elastix.observe.notebook_cell import NotebookCell, here, terminal_of
from elastix.observe.progress import Progress, duration, shown

_SUMMARY_S = 30.0
_LATEST = 5  # events at the foot of the block
_GROUPS = 3  # trials that are groups of workers, a line each
_FINAL = ("finished", "stopped", "failed")
_TOLD_FAILURES = 3  # the first ones say it; `campaign show --failed` has them all
_ANCESTORS = 6  # of the best, named
_STYLES = {"finished": "bold green", "failed": "bold red"}


class _GroupTrial:
    """How a trial that is a group of workers gets on, from the journal of its run.

    A trial that is not has no such journal, and `line` is empty.
    """

    def __init__(self, trial: int, journal: Path) -> None:
        self._trial = trial
        self._tail = Tail(journal)
        self._progress = Progress()
        self._unreadable = False

    @property
    def line(self) -> str:
        try:
            for event in self._tail.news():
                self._progress.add(event)
        except (ElastixError, OSError):  # this is asked in the thread that draws
            self._unreadable = True
        if self._unreadable:
            return f"group  trial {self._trial}   its journal cannot be read"
        if not self._progress.members:
            return ""
        return f"group  trial {self._trial}   {group_line(self._progress)}"


def _said(best: TrialEnded) -> tuple[int, dict[str, float]]:
    """What makes it worth saying again."""
    return best.trial, dict(best.values)


class TrialsConsole:
    """Shows a campaign's events as they come; the block begins and ends with the campaign.

    Args:
        name: of the campaign.
        directory: of its trial database and journal, STORE/runs/NAME.
        budget: trials wanted; None for no limit.
        quiet: print nothing at all.
        terminal: where to print; standard output by default.
        clock: any clock that counts seconds.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        budget: int | None,
        *,
        quiet: bool = False,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = plain(name)
        self._runs = directory.parent
        store = plain(str(directory.parents[1]))
        self._where = where(self._name, store)
        self._table = command(("campaign", "show"), self._name, store)
        self._budget = budget
        self._cell = here() if terminal is None and not quiet else None
        self._terminal = terminal or terminal_of(self._cell, quiet)
        self._clock = clock
        self._began = self._summed = clock()
        self._known = 0
        self._states: dict[int, str] = {}  # of trials that ended or paused, the latest of each
        self._tally: Counter[str] = Counter()
        self._lost = self._raised = self._starved = 0
        self._running: dict[int, _GroupTrial] = {}
        self._parents: dict[int, int | None] = {}
        self._best = BestTrial()
        self._controls: dict[int, bool] = {}  # from scratch: whether it has ended
        self._best_is = "best"
        self._store: StoreMeasured | None = None
        self._inherited: dict[int, float] = {}  # by trial: one may pause at several rungs
        self._models = False
        self._ignored: set[int] = set()
        self._mode = "none"
        self._longest = 0.0
        self._first_failure = ""
        self._latest: deque[Text] = deque(maxlen=_LATEST)
        self._live: Live | NotebookCell | None = None

    def show(self, event: Event) -> None:
        """Take note of an event, and tell of it if it means anything to a person."""
        match event:
            case CampaignStarted():
                self._start(event)
            case TrialStarted():
                journal = self._runs / event.name / "journal.jsonl"
                self._running[event.trial] = _GroupTrial(event.trial, journal)
                self._now(event, "")
                self._parents[event.trial] = event.parent
            case TrialLost():
                self._running.pop(event.trial, None)
                self._raised += event.raised
                self._lost += not event.raised
                what = "raised" if event.raised else "lost"
                self._tell(f"trial {event.trial} {what}: {event.cause}; it starts again", "red")
            case TrialStarved():
                self._running.pop(event.trial, None)
                self._starved += 1
                if self._starved <= _TOLD_FAILURES:
                    reserved = decimal(event.reserved_bytes)
                    self._tell(
                        f"trial {event.trial} ran out of memory; it starts again with {reserved}",
                        "yellow",
                    )
            case TrialEnded():
                self._end_trial(event)
            case StoreMeasured():
                self._store = event
            case CampaignEnded():
                self._end(event)
        if isinstance(self._live, NotebookCell):
            self._live.update(self._block())
        now = self._clock()
        if self._live is None and self._running and now - self._summed >= _SUMMARY_S:
            self._summed = now
            self._tell(f"{self._trials()}   {self._pace()}{self._size()}", "")

    def interrupted(self) -> None:
        """The only line if Ctrl-C came before the campaign had begun."""
        stands = f"{self._name} interrupted; calling run() again goes on"
        self._print(f"{stands}   {self._where}", "bold yellow")

    # ------------------------------------------------------------------ what happened

    def _start(self, event: CampaignStarted) -> None:
        self._known = event.known
        self._models = event.known > 0  # nobody has said what became of those
        self._best.begin(event)
        if len(event.objectives) > 1:  # none that ended before beats it in all of them
            self._best_is = "on the front"
        goal = ", ".join(f"{mode} {name}" for name, mode in event.objectives.items())
        after = f"   goes on after {event.known} trials" if event.known else ""
        self._print(f"{self._name} starts   {self._where}", "bold")
        self._mode = event.inherit
        self._print(f"  {goal} with {event.searcher}   ctx.inherit: {event.inherit}{after}")
        if self._cell is not None:
            self._live = self._cell
        elif self._terminal.is_terminal and not self._terminal.is_dumb_terminal:
            # Redrawn by a thread of its own: between two events of a campaign minutes may pass.
            self._live = Live(
                get_renderable=self._block,
                console=self._terminal,
                refresh_per_second=2,
                transient=True,
            )
            self._live.start()

    def _end_trial(self, event: TrialEnded) -> None:
        self._running.pop(event.trial, None)
        self._now(event, event.state)
        if event.state == "refused":
            if self._tally["refused"] <= _TOLD_FAILURES:
                self._tell(f"trial {event.trial} refused: {event.message}", "yellow")
            return
        self._inherited[event.trial] = event.inherited
        self._models = self._models or bool(event.ref)
        if event.ignored:
            if not self._ignored:
                self._tell(f"trial {event.trial} {IGNORED}", "yellow")
            self._ignored.add(event.trial)
        self._longest = max(self._longest, event.lineage_epochs - event.epochs)
        if event.state == "failed":
            self._first_failure = self._first_failure or f"trial {event.trial}: {event.message}"
            if self._tally["failed"] <= _TOLD_FAILURES:
                self._tell(f"trial {event.trial} failed: {event.message}", "red")
        before = self._best.event
        self._best.end(event)
        best = self._best.event
        if best is not None and (before is None or _said(best) != _said(before)):
            self._tell(f"{self._best_is}  {self._describe(best)}", "green")

    def _end(self, event: CampaignEnded) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        style = _STYLES.get(event.outcome, "bold yellow")
        idle = event.outcome == "finished" and self._known and not (self._states or self._controls)
        told = "is finished; nothing to do" if idle else event.outcome
        self._print(f"{self._name} {told}   {self._trials('unfinished')}", style)
        if idle:
            self._print(
                "  a larger Budget(trials=..) lets it go on, another RunConfig(name=..) begins anew"
            )
        elif event.outcome == "finished" and not self._done():
            self._print("  no trial came to an end within this Budget")
        for text in (*self._best_at_end(event.best), *self._inheritance()):
            self._print(f"  {text}")
        if self._store is not None:
            self._print(f"  {self._size().strip()}")
        if event.outcome == "failed" and self._first_failure:
            self._print(f"  first failure: {self._first_failure}", "red")
        if event.message:
            for part in plain_lines(event.message):
                self._print(f"  {part}")
        self._print(f"  table: {self._table}")
        if self._tally["failed"]:
            self._print(f"  why trials failed: {self._table} --failed")
        self._print(f"  {self._where}")

    # ------------------------------------------------------------------ pieces

    def _best_at_end(self, number: int) -> Iterator[str]:
        """A control from scratch decides, if there is one; others may have better scores."""
        single = self._best_is == "best"
        best = self._best.latest_of(number) if single else self._best.event
        if best is not None:
            yield f"{'' if single else 'latest '}{self._best_is}  {self._describe(best)}"
        elif number >= 0:
            yield f"{self._best_is}  trial {number}, as before"

    def _inheritance(self) -> Iterator[str]:
        """What came of it: a campaign that was to inherit and did not says so."""
        shares = [share for share in self._inherited.values() if share]
        if shares:
            yield (
                f"{len(shares)} trials inherited {sum(shares) / len(shares):.0%} of their bytes on "
                f"average, from lineages of up to {self._longest:g} epochs"
            )
        if self._ignored:
            yield (
                f"{len(self._ignored)} trials had a model to inherit from and did not: the train "
                "function never calls ctx.inherit(model)"
            )
        elif not shares and self._inherited and self._mode != "none":
            made = any(parent is not None for parent in self._parents.values())
            why = "none was made from another one"
            if made:
                why = "no layers were equal" if self._models else "none has left a model"
            yield f"no trial inherited anything: {why}"

    def _describe(self, event: TrialEnded) -> str:
        line = [event.trial]
        while (parent := self._parents.get(line[-1])) is not None and len(line) < _ANCESTORS:
            line.append(parent)
        parts = [shown(event.values), f"trial {' <- '.join(map(str, line))}"]
        if event.inherited:
            parts.append(f"inherited {event.inherited:.0%}")
        epochs = f"epochs {event.epochs:.4g}"
        if event.lineage_epochs > event.epochs:
            epochs += f" ({event.lineage_epochs:.4g} with its lineage)"
        return "   ".join([*parts, epochs])

    def _done(self) -> int:
        return self._known + sum(self._tally[state] for state in _FINAL)

    def _now(self, event: TrialStarted | TrialEnded, state: str) -> None:
        """A trial counts for its present state alone: it may pause at several rungs."""
        if event.role != "search":
            self._controls[event.trial] = state in _FINAL
            return
        self._tally[self._states.get(event.trial, "")] -= 1
        self._states[event.trial] = state
        self._tally[state] += 1

    def _trials(self, under_way: str = "running") -> str:
        failed = self._tally["failed"]
        new = f"of {self._done() - self._known} new " if self._known else ""
        parts = [f"{self._done()} done" + (f" ({failed} {new}failed)" if failed else "")]
        if self._running or under_way == "running":
            parts.append(f"{len(self._running)} {under_way}")
        parts += [f"{self._tally[s]} {s}" for s in ("paused", "refused") if self._tally[s]]
        if controls := sum(self._controls.values()):
            parts.append(f"{controls} from scratch")
        again = ((self._lost, "lost"), (self._raised, "raised"), (self._starved, "starved"))
        for count, what in again:
            if count:
                parts.append(f"{count} {what}\N{RIGHTWARDS ARROW}again")
        if self._budget is not None:
            parts.append(f"{self._budget} budget")
        return "trials " + " \N{MIDDLE DOT} ".join(parts)

    def _pace(self) -> str:
        elapsed = self._clock() - self._began
        new = self._done() - self._known
        if not new or elapsed <= 0:
            return "no trial has ended yet"
        parts = [f"{new / elapsed:.3g} trials/s"]
        if self._budget is not None:
            left = max(0, self._budget - self._done()) * elapsed / new
            parts.append(f"{duration(left)} left")
        return "   ".join(parts)

    def _size(self) -> str:
        if self._store is None:
            return ""
        size = f"   store {decimal(self._store.physical_bytes)}"
        if not self._store.unique_bytes:
            return size  # no model is in it yet
        return f"{size} (dedup {self._store.logical_bytes / self._store.unique_bytes:.1f}x)"

    def _block(self) -> RenderableType:
        """At most 11 lines."""
        running = duration(self._clock() - self._began)
        share = None if not self._budget else min(1.0, self._done() / self._budget)
        rows: list[RenderableType] = [
            one_line(f"{self._name}   running {running}   {self._trials()}{self._size()}", "bold"),
            bar(share, self._pace()),
        ]
        if (best := self._best.event) is not None:
            rows.append(one_line(f"{self._best_is}   {self._describe(best)}"))
        lines = (group.line for group in tuple(self._running.values()))
        rows += [one_line(line) for line in islice(filter(None, lines), _GROUPS)]
        return Group(*rows, *self._latest)

    def _tell(self, text: str, style: str) -> None:
        told = Text(f"{self._clock() - self._began:8.2f}  ", "dim") + Text(plain(text), style)
        if self._live is None:
            self._terminal.print(told)
        else:
            told.no_wrap, told.overflow = True, "ellipsis"
            self._latest.append(told)

    def _print(self, text: str, style: str = "") -> None:
        self._terminal.print(Text(plain(text), style))
