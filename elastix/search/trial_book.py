"""All trials of a campaign as they stand, and what of it is still to be written and said.

A unit of work: whatever has changed since the last transaction goes into the database with the
next one, beside what has passed between the loop and its advisers. Events are said after it.

Not here: what is tried (campaign_loop), what becomes of a trial (trial_endings), and how a
transaction is made (trial_database).

Invariant: nothing is said of a trial that its database does not hold.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastix.events import Event
from elastix.search.advisers import Advisers
from elastix.search.scores import Latest
from elastix.search.trial import Suggestion, Trial, TrialState
from elastix.search.trial_database import Role, TrialDatabase, TrialRow
from elastix.state import Ref

_SNAPSHOT_S = 5.0
_SNAPSHOTS_APART = 20  # times what one takes: they hold all that was tried, and get longer


@dataclass(slots=True)
class Case:
    """A trial with what is known of it beside.

    Attributes:
        done: see TrialRow.
        losses_of_workers: how often its worker died.
        raised: how often its train function did.
        stop: rungs stop it, so that it is halted for good.
        rung: after how many reports its run pauses; None: it does not.
        kept: reports up to the State from which a run that is cut short begins again.
    """

    trial: Trial
    role: Role = "search"
    done: int | None = None
    losses_of_workers: int = 0
    raised: int = 0
    stop: bool = False
    rung: int | None = None
    kept: int = 0
    _results: dict[int, Mapping[str, Any]] | None = field(default=None, init=False, repr=False)
    _latest: Latest | None = field(default=None, init=False, repr=False)  # of `results`

    @property
    def results(self) -> Mapping[int, Mapping[str, Any]]:
        """Its reports by their place, from 0; `report` adds to them."""
        known = self._results
        return dict(enumerate(self.trial.results)) if known is None else known

    @results.setter
    def results(self, results: Mapping[int, Mapping[str, Any]]) -> None:
        self._results, self._latest = dict(results), None

    def close(self) -> None:
        """It is over, or has paused. What its trial holds is not held beside: there may be many."""
        self._latest = None
        if self._results is not None and sorted(self._results) == [*range(len(self._results))]:
            self._results = None

    @property
    def line(self) -> TrialRow:
        """As it is to stand in the database."""
        return TrialRow(self.trial, self.role, self.done)

    def says_new(self, seq: int, metrics: Mapping[str, Any]) -> bool:
        """Whether a report is one more, or one that is made anew, as a group does that goes back.

        What one that begins anew without a State reports once more counts as it did at its pause.
        """
        known = self._known(seq)
        if known is None:
            return True
        same = known == metrics or repr(known) == repr(metrics)  # NaN is not equal to itself
        return seq >= self.kept and not same

    def _known(self, seq: int) -> Mapping[str, Any] | None:
        """One of its `results`, which are not copied for each report of a long run."""
        if self._results is not None:
            return self._results.get(seq)
        reports = self.trial.results
        return reports[seq] if 0 <= seq < len(reports) else None

    def report(self, seq: int, metrics: Mapping[str, Any]) -> Latest:
        """One more of its reports; the last values of all up to it. Those after it are void."""
        results = self._results
        if results is None or seq in results:
            results = {n: found for n, found in self.results.items() if n < seq}
            self._results, self._latest = results, None
        latest = self._latest = self._latest or Latest(results)
        results[seq] = metrics
        latest.add(seq, metrics)
        if seq == latest.seq:
            return latest
        return Latest({place: found for place, found in results.items() if place <= seq})

    def go_back(self) -> None:
        """It begins again from its last State, or from the beginning, and reports the rest anew."""
        self.results = {seq: found for seq, found in self.results.items() if seq < self.kept}


@dataclass
class _News:
    """What has happened since the last transaction."""

    changed: dict[int, Case] = field(default_factory=dict)
    outgrown: list[Ref] = field(default_factory=list)
    said: list[Event] = field(default_factory=list)


class TrialBook:
    """One campaign's.

    Args:
        database: open for writing.
        advisers: what passes between them and the loop is written with the trials.
        emit: is called with what happens.
        clock: seconds, for the times at which states are written.

    Attributes:
        cases: by number, in that order.
        keys: of all that searchers have proposed; see Suggestion.
        waiting: numbers of those that are to run, in order.
        running: numbers of those that do.
        searched: how many proposals count for the budget.
        epochs: of all trials.
    """

    def __init__(
        self,
        database: TrialDatabase,
        advisers: Advisers,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self.cases: dict[int, Case] = {}
        self.keys: set[str] = set()
        self.waiting: deque[int] = deque()
        self.running: set[int] = set()
        self.searched = 0
        self.epochs = 0.0
        self._done = 0
        self._parents: set[Ref] = set()  # States that trials go on from
        self._news = _News()
        self._database = database
        self._advisers = advisers
        self._emit = emit
        self._clock = clock
        self._snapshot_s = clock()
        self._snapshots_apart_s = _SNAPSHOT_S

    def restore(self) -> list[TrialRow]:
        """Take up what the database has. Who was running waits, to run again."""
        lines = self._database.lines()
        for line in lines:
            trial = line.trial
            case = Case(trial, line.role, line.done)
            case.kept = 0 if trial.state.is_final else len(trial.results)
            self.cases[trial.number] = case
            self.epochs += trial.epochs
            self._keep_parent(trial.suggestion)
            if line.role == "search":
                self.searched += trial.state is not TrialState.REFUSED
                self.keys.add(trial.suggestion.key)
            if trial.state in (TrialState.RUNNING, TrialState.WAITING):
                case.trial = trial.but(state=TrialState.WAITING)
                self.waiting.append(trial.number)
        self._done = max((line.done or 0 for line in lines), default=0)
        return lines

    # ------------------------------------------------------------------ what changes

    def enter(
        self,
        suggestion: Suggestion,
        role: Role = "search",
        *,
        predicted_bytes: int = 0,
        memory_bytes: int = 0,
    ) -> Case:
        """Make a trial of a suggestion, numbered after the last: somebody may have taken some out.

        It neither runs nor counts for the budget.
        """
        number = next(reversed(self.cases), -1) + 1
        trial = Trial(
            number,
            suggestion,
            asked_s=time.time(),
            predicted_bytes=predicted_bytes,
            memory_bytes=memory_bytes,
        )
        case = self.cases[number] = Case(trial, role)
        if role == "search":
            self.keys.add(suggestion.key)
        return case

    def add(
        self,
        suggestion: Suggestion,
        role: Role = "search",
        *,
        predicted_bytes: int = 0,
        memory_bytes: int = 0,
    ) -> None:
        """Make a trial of a suggestion, which is to run."""
        case = self.enter(
            suggestion, role, predicted_bytes=predicted_bytes, memory_bytes=memory_bytes
        )
        self._keep_parent(suggestion)
        self.searched += role == "search"
        self.queue(case)

    def queue(self, case: Case) -> None:
        """It is to run, after those that wait."""
        if case.trial.state is not TrialState.WAITING:
            case.trial = case.trial.but(state=TrialState.WAITING)
        self.waiting.append(case.trial.number)
        self._news.changed[case.trial.number] = case

    def change(self, case: Case, trial: Trial) -> None:
        """Something has become of it; a trial that is final now gets its place among these."""
        self.epochs += trial.epochs - case.trial.epochs
        case.trial = trial
        if trial.state.is_final:
            self._done += 1
            case.done = self._done
        if trial.state.is_final or trial.state is TrialState.PAUSED:
            case.close()
        self._news.changed[trial.number] = case

    def outgrow(self, ref: Ref) -> None:
        """A trial has a later State than that one; it may go, unless others go on from it."""
        if ref not in self._parents:
            self._news.outgrown.append(ref)

    def say(self, event: Event) -> None:
        """Emit it after the next transaction."""
        self._news.said.append(event)

    def _keep_parent(self, suggestion: Suggestion) -> None:
        if suggestion.in_place and suggestion.parent is not None:
            self._parents.add(suggestion.parent)

    # ------------------------------------------------------------------ the transaction

    def write(
        self, *, snapshot: bool | None = None, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Put what has changed into the database, and only then say so.

        Args:
            facts: further ones.
            snapshot: with the states of searcher and rungs; None: if it is time for it. To write
                them every time, or every so many seconds, would cost the square of the number of
                trials. Without them what has passed since is written, and passes again.
        """
        news = self._news
        lines = [case.line for case in news.changed.values()]
        facts = dict(facts or {})
        if snapshot is None:
            due = self._clock() - self._snapshot_s > self._snapshots_apart_s
            snapshot = bool(lines) and due
        began_s = self._clock()
        if snapshot:
            facts |= self._advisers.states(self._done)
        if snapshot or lines or facts:
            passed = self._advisers.passed(after_states=snapshot)
            self._database.commit(lines, facts, news.outgrown, passed, forget_passed=snapshot)
            self._advisers.written(passed)
        if snapshot:
            self._snapshot_s = self._clock()
            took_s = self._snapshot_s - began_s
            self._snapshots_apart_s = max(_SNAPSHOT_S, _SNAPSHOTS_APART * took_s)
        self._news = _News()
        for event in news.said:
            self._emit(event)

    def forget_unwritten(self) -> None:
        """What has changed since the last transaction never was, for whoever goes on after this."""
        self._news = _News()
