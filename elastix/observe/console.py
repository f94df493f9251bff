"""What a person sees while a run goes on: a live block on a terminal, lines in a log.

Reads events only. On a terminal one block of at most 12 lines is redrawn in place; on a pipe and
in a job log there is a line for each event that matters and a summary every 30 s. The first and
the last line name the run, the store and the report.
"""

import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Self

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastix.errors import ElastixError
from elastix.events import Event, Recovered, Reported, RunStarted, where_raised
from elastix.observe.event_text import line, plain, plain_lines
from elastix.observe.notebook_cell import NotebookCell, here, terminal_of
from elastix.observe.progress import Loss, Progress, duration, shown

_SUMMARY_S = 30.0  # between the summaries in a log
_REDRAW_S = 0.25  # between two pictures of the block
_LATEST = 5  # events at the foot of the block
_TRACEBACK = 20  # lines of a traceback that the failure box shows


class Console:
    """Shows a run's events as they come. A context manager: the block ends with it.

    Args:
        name: of the run.
        store: as the user named it: the report command repeats it.
        quiet: print nothing at all.
        progress: what happened before, if the run is continued.
        best: the metric that States are kept by, if any: one that nobody reports is told of.
        judged: the metric that the guard judges, if any; likewise.
        terminal: where to print; standard output by default.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        name: str,
        store: str,
        *,
        quiet: bool = False,
        progress: Progress | None = None,
        best: str | None = None,
        judged: str | None = None,
        terminal: Terminal | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.progress = progress or Progress()
        self._name = plain(name)
        self._where = where(self._name, plain(store))
        self._clock = clock
        self._cell = here() if terminal is None and not quiet else None
        self._terminal = terminal or terminal_of(self._cell, quiet)
        self._started = self._summed = clock()
        self._latest: deque[Text] = deque(maxlen=_LATEST)
        self._recovered_in = 0
        self._wanted = {  # by the setting that names it: a metric, and what is not done without it
            "CheckpointConfig.best": (best, "no best State"),
            "Guard.metric": (judged, "the guard judges gradients alone"),
        }
        self._missed = False  # it has been told that one of them was not reported
        self._live: Live | NotebookCell | None = None
        self._drawn = 0.0

    def __enter__(self) -> Self:
        before = self.progress
        if before.run is None:
            self._print(f"{self._name} starts   {self._where}", "bold")
        else:
            since = f"{datetime.fromtimestamp(before.began_t):%Y-%m-%d %H:%M}"
            stood = f"which began {since} and had come to step {before.step}"
            self._print(f"{self._name}, {stood}, goes on   {self._where}", "bold")
        if self._cell is not None:
            self._live = self._cell
        elif self._terminal.is_terminal and not self._terminal.is_dumb_terminal:
            self._live = Live(
                self._block(), console=self._terminal, auto_refresh=False, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_block()

    def show(self, event: Event) -> None:
        """Take note of an event, and tell of it if it means anything to a person."""
        odd_before = set(self.progress.not_finite)
        self.progress.add(event)
        if isinstance(event, RunStarted):  # before this console, and where the report counts from
            self._started = event.t
        if isinstance(event, Recovered):  # each survivor tells; the first is news
            news = event.generation > self._recovered_in
            self._recovered_in = max(self._recovered_in, event.generation)
        else:
            news = True
        text, style = line(event)
        if text and news:
            self._tell(event.t, text, style)
        for name, step in self.progress.not_finite.items():
            if name not in odd_before:
                self._tell(event.t, _odd(name, step), "bold yellow")
        if isinstance(event, Reported) and not self._missed:
            for what, lacks in self._unreported():
                self._missed = True
                self._tell(event.t, f"{what} yet; {lacks} until it is", "yellow")
        self.tick()

    def tick(self) -> None:
        """Redraw the block, or print a summary, if it is time. Call it about once a second."""
        now = self._clock()
        if self._live is not None:
            if now - self._drawn >= _REDRAW_S:
                self._drawn = now
                self._live.update(self._block(), refresh=True)
        elif now - self._summed >= _SUMMARY_S:
            self._summed = now
            self._tell(now, self._summary(), "")

    # ------------------------------------------------------------------ the last lines

    def finished(self, ref: str, metrics: Mapping[str, Any], account: object) -> None:
        """Sum up a run that went well."""
        self._end_block()
        progress = self.progress
        self._print(f"{self._name} finished   {shown(metrics)}", "bold green")
        for what, lacks in self._unreported():
            self._print(f"  {lacks}: {what}", "bold yellow")
        for name, step in progress.not_finite.items():
            self._print(f"  {_odd(name, step)}", "bold yellow")
        self._print(f"  {progress.step} steps in {self._took}{_goodput(progress)}")
        slowest = progress.slowest_recovery_s
        worst = "" if slowest is None else f", slowest recovery {slowest:.2f} s"
        self._print(f"  workers lost {len(progress.losses)}{worst}, joined {len(progress.joins)}")
        self._account(ref, account)

    def over(self, ref: str, metrics: Mapping[str, Any], account: object) -> None:
        """Say that there was nothing to do, what came of it before, and what makes it go on."""
        done = f"{self._name} is finished ({self.progress.step} steps); nothing to do"
        self._print(f"{done}   {shown(metrics)}", "bold green")
        self._print(
            "  another config or train function lets it go on, RestoreConfig(step=..) goes back, "
            "another name begins anew"
        )
        self._account(ref, account)

    def _account(self, ref: str, account: object) -> None:
        for text in str(account).splitlines():
            self._print(f"  {text}")
        self._print(f"  state {ref[:12]}   {self._where}")

    def failed(self, error: ElastixError) -> None:
        """Sum up a run that did not: the first failure, not the last symptom, at the end."""
        self._end_block()
        kind = type(error).__name__
        self._print(
            f"{self._name} failed: {kind} after step {self.progress.step}, {self._took}",
            "bold red",
        )
        title, lines = self._first_failure(error)
        if self._terminal.is_terminal:
            self._terminal.print(Panel(Text("\n".join(lines)), title=Text(title), style="red"))
        else:
            self._print(f"  {title}:")
            for text in lines:
                self._print(f"    {text}")
        self._print(f"{self._name} failed   {self._where}", "bold red")

    def leaderless(self) -> None:
        """The controller's process died."""
        lost = "controller lost: the workers keep their State; it is started again"
        self._tell(self._clock(), lost, "red")

    def stopping(self) -> None:
        """After Ctrl-C, while the State is stored, if there is one."""
        first = "first" if self.progress.step else "first, if a step was taken"  # and not told yet
        stops = f"interrupted: the State is stored {first}; Ctrl-C again does not wait for it"
        self._tell(self._clock(), stops, "yellow")

    def interrupted(self, *, goes_on: bool = False) -> None:
        """The last lines after Ctrl-C. `goes_on`: the run does not need this process."""
        self._end_block()
        if goes_on:
            what = "goes on", "attaches to it, stop() ends it"
        else:
            what = "interrupted", self._from_where()
        stands = f"{self._name} {what[0]} after step {self.progress.step}"
        self._print(f"{stands}; calling fit() again {what[1]}   {self._where}", "bold yellow")

    def _from_where(self) -> str:
        stored = self.progress.stored
        if stored is None or stored.step > self.progress.step:
            return "begins anew: no State is stored yet"
        return f"goes on from the State after step {stored.step}"

    def _first_failure(self, error: ElastixError) -> tuple[str, list[str]]:
        raised = self.progress.first_failure
        if raised is not None:
            lines = plain_lines(raised.traceback.strip())
            left_out = len(lines) - _TRACEBACK
            if left_out > 0:  # both ends say something: where it began, and what it was
                half = _TRACEBACK // 2
                lines = [*lines[:half], f"... {left_out} lines ...", *lines[-half:]]
            where = where_raised(raised.worker, raised.rank, raised.step)
            return f"first failure: {where}", lines
        lines = plain_lines(str(error))
        if self.progress.losses:
            return f"first failure: {_told(self.progress.losses[0], self._started)}", lines
        return "failure", lines

    # ------------------------------------------------------------------ pieces

    @property
    def _running(self) -> str:
        return duration(self._clock() - self._started)

    @property
    def _took(self) -> str:
        """What its journal says of it, as all other displays of a run have it.

        Ray may have been started before that, and processes be ended after it.
        """
        progress = self.progress
        return duration(progress.took_s) if progress.run else self._running

    def _unreported(self) -> Iterator[tuple[str, str]]:
        """Of metrics that settings name and nobody has reported: that, and what is not done."""
        known = self.progress.metrics
        there = ", ".join(known) or "nothing"
        for setting, (name, lacks) in self._wanted.items():
            if name is not None and name not in known:
                close = get_close_matches(name, known, 1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                yield f"{setting}={name!r} was not reported (but {there}{meant})", lacks

    def _counts(self) -> str:
        progress = self.progress
        epoch, epochs = progress.epoch
        of = f" of {epochs}" if epochs else ""
        parts = [f"step {progress.step}", f"epoch {epoch}{of}" if epoch else "no loader yet"]
        return "   ".join([*parts, f"{progress.samples} samples"])

    def _pace(self) -> str:
        rate, left, done = self.progress.rate, self.progress.left_s, self.progress.done
        parts = [] if done is None else [f"{done:.0%}"]
        parts += [] if rate is None else [f"{rate:.0f} samples/s"]
        parts += [] if left is None else [f"{duration(left)} left"]
        return "   ".join(parts)

    def _summary(self) -> str:
        scores = shown(self.progress.metrics)
        parts = [self._running, self._counts(), self._pace(), group_line(self.progress), scores]
        return plain("   ".join(part for part in parts if part))

    def _block(self) -> RenderableType:
        """At most 12 lines: 5 of facts, a rule, the latest events."""
        progress = self.progress
        head = f"{self._name}   running {self._running}   {self._counts()}"
        rows: list[RenderableType] = [one_line(head, "bold")]
        rows.append(bar(progress.done, self._pace() or "starting"))
        rows.append(one_line(f"group  {group_line(progress)}"))
        if progress.metrics:
            rows.append(
                one_line(f"score  {shown(progress.metrics)}   (step {progress.metrics_step})")
            )
        if progress.stored is not None:
            stored = progress.stored
            size = f"{stored.stored_bytes / 1e6:.1f} MB in {stored.store_s:.2f} s"
            rows.append(one_line(f"state  {stored.ref[:12]} after step {stored.step}, {size}"))
        rows += self._latest
        return Group(*rows)

    def _tell(self, t: float, text: str, style: str) -> None:
        since_s = max(0.0, t - self._started)
        clock = Text(f"{since_s:8.2f}  ", "dim")
        told = clock + Text(text, style)
        if self._live is None:
            self._terminal.print(told)
        else:
            told.no_wrap, told.overflow = True, "ellipsis"
            self._latest.append(told)

    def _print(self, text: str, style: str = "") -> None:
        self._terminal.print(Text(plain(text), style))

    def _end_block(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def where(name: str, store: str) -> str:
    """The store, and the command that makes the report."""
    return f"store {store}   report: {command(('report',), name, store)}"


def command(verb: Sequence[str], name: str, store: str) -> str:
    """What to type for a run or a campaign in a store."""
    return shlex.join(["elastix", *verb, name, "--store", store])


def bar(done: float | None, beside: str) -> RenderableType:
    """A line with a progress bar (one that moves, if nobody knows how far it is) and a text."""
    grid = Table.grid(expand=True, padding=(0, 3, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    moving = ProgressBar(total=1.0, completed=done or 0.0, pulse=done is None)
    grid.add_row(moving, one_line(beside))
    return grid


def one_line(text: str, style: str = "") -> Text:
    """Cut where the terminal ends."""
    return Text(plain(text), style, no_wrap=True, overflow="ellipsis")


def group_line(progress: Progress) -> str:
    """Who is in the group, how well it goes, and what became of the last loss."""
    size = f"workers {len(progress.members)}/{progress.workers_wanted}"
    text = f"gen {progress.generation}   {size}" if progress.members else f"{size}, starting"
    text += _goodput(progress)
    if progress.losses and progress.losses[-1].t >= progress.started_t:  # not one of before
        text += f"   last loss: {_what_became_of(progress.losses[-1])}"
    return text


def _odd(name: str, step: int) -> str:
    """A metric that is no finite number any more."""
    return f"{name} was first reported as not finite at step {step}"


def _goodput(progress: Progress) -> str:
    share = progress.goodput.share
    return "" if share is None else f"   goodput {share:.0%}"


def _told(loss: Loss, since: float) -> str:
    place = f"rank {loss.rank}" if loss.rank >= 0 else "not in the group yet"
    return f"worker {loss.worker} ({place}) {loss.cause} at {loss.t - since:.1f} s"


def _what_became_of(loss: Loss) -> str:
    who = f"rank {loss.rank}" if loss.rank >= 0 else f"worker {loss.worker}"
    if loss.rank < 0:
        return f"{who} {loss.cause} before it was let in"
    if loss.stall_s is None:
        return f"{who} {loss.cause}, recovering"
    return f"{who} {loss.cause}, recovered in {loss.stall_s:.2f} s, 0 steps lost"
