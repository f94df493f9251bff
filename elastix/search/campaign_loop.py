"""The loop of a campaign: ask, run, write down, tell. No Ray, no torch, no terminal.

Not here: what stands around it (campaign), where trials run (executors), how they are kept
(trial_database).

Invariant: a searcher is told of a trial, and rungs act on it, only with the transaction that puts
it into the database; a trial that is final there never runs again.
"""

import copy
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from elastix.config import Budget
from elastix.errors import ElastixError, EveryTrialFailed, NeverReported, SearchError, StoreError
from elastix.events import (
    Event,
    TrialEnded,
    TrialLost,
    TrialReported,
    TrialStarted,
    TrialStarved,
)
from elastix.search.advisers import Advisers
from elastix.search.executors import packer
from elastix.search.executors.executor import Ended, EndedKind, Executor, Work, WorkReport
from elastix.search.gate import Gate
from elastix.search.pareto import Front, order
from elastix.search.rungs import Rungs, Verdict
from elastix.search.scores import losses, merged
from elastix.search.trial import (
    Config,
    Objectives,
    Searcher,
    Selects,
    Suggestion,
    Trial,
    TrialState,
)
from elastix.search.trial_database import Role, TrialDatabase, TrialRow
from elastix.state import Ref

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_SNAPSHOT_S = 5.0
_SNAPSHOTS_APART = 20  # times what one takes: they hold all that was tried, and get longer
_HALT_S = 10.0
_REPEATS = 100  # in a row, by a searcher that draws without looking
_REFUSALS = 200  # in a row: nothing that fits is being proposed


@dataclass(frozen=True, kw_only=True)
class LoopTerms:
    """What a loop goes by, beside its parts.

    Attributes:
        name: of the campaign.
        objectives: what is optimised.
        budget: when to stop.
        enqueued: what is tried before the searcher is asked; what was tried already is left out.
        seed: of the first trial; the others have the following ones.
        max_losses: how often a trial may lose its worker before it counts as failed.
        retries: how often a trial that raised is run again.
        give_up_after: so many failed trials, and none that did not fail, end the campaign.
        rerank: how many of the best are run again without inheritance at the end.
    """

    name: str
    objectives: Objectives
    budget: Budget
    enqueued: Sequence[Config] = ()
    seed: int = 0
    max_losses: int = 3
    retries: int = 0
    give_up_after: int = 5
    rerank: int = 0


@dataclass
class _Case:
    """A trial with what the loop knows of it."""

    trial: Trial
    role: Role = "search"
    done: int | None = None
    results: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    losses_of_workers: int = 0
    raised: int = 0
    stop: bool = False
    rung: int | None = None
    kept: int = 0  # reports up to the State from which a run that is cut short begins again

    @property
    def line(self) -> TrialRow:
        return TrialRow(self.trial, self.role, self.done)


@dataclass
class _News:
    """What has happened since the last transaction: it is written first, and only then said."""

    changed: dict[int, _Case] = field(default_factory=dict)
    outgrown: list[Ref] = field(default_factory=list)
    said: list[Event] = field(default_factory=list)


MakeWork = Callable[[Trial, Role, int | None], Work]


class Loop:
    """One `run` of a campaign.

    Args:
        terms: see LoopTerms.
        database: open for writing.
        searcher: started, not told of anything yet.
        rungs: None: every trial runs to its end.
        executor: open.
        make_work: from a trial, its role and the reports after which it pauses.
        emit: is called with what happens.
        clock: seconds, for budgets.
        gate: what it refuses is told to the searcher and never runs.
    """

    def __init__(
        self,
        terms: LoopTerms,
        database: TrialDatabase,
        searcher: Searcher,
        rungs: Rungs | None,
        executor: Executor,
        make_work: MakeWork,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        gate: Gate | None = None,
    ) -> None:
        self._terms = terms
        self._gate = gate
        self._database = database
        self._advisers = Advisers(searcher, rungs)
        self._searcher_name = type(searcher).__name__
        self._selects = self._advisers.selects
        self._executor = executor
        self._objectives = terms.objectives
        self._budget = terms.budget
        self._make_work = make_work
        self._emit = emit
        self._clock = clock
        self._cases: dict[int, _Case] = {}
        self._keys: set[str] = set()
        self._enqueued = deque(terms.enqueued)
        self._waiting: deque[int] = deque()
        self._running: set[int] = set()
        self._news = _News()
        self._parents: set[Ref] = set()  # States that trials go on from
        self._done = 0
        self._searched = 0
        self._epochs = 0.0  # of all trials
        self._exhausted = False
        self._stateless = False  # a trial has paused and left no State
        self._refusals = 0  # since a trial was let in
        self._repeats = 0  # proposals in a row that were tried before
        self._failures = 0
        self._first_failure: Trial | None = None
        self._began_s = clock()
        self._snapshot_s = clock()
        self._snapshots_apart_s = _SNAPSHOT_S
        self._front = Front()

    # ---------------------------------------------------------- from the trial database

    def restore(
        self,
        same_searcher: bool,
        same_rungs: bool = True,
        facts: Mapping[str, Any] | None = None,
    ) -> int:
        """Take up what the database has; the number of final trials.

        Args:
            same_searcher: the searcher and its space are those that wrote its state.
            same_rungs: so are the rungs. Others are told of all that was reported.
            facts: say whose the states are from now on, so they are written with these.
        """
        lines = self._database.lines()
        for line in lines:
            case = _Case(line.trial, line.role, line.done, dict(enumerate(line.trial.results)))
            self._cases[line.trial.number] = case
            self._epochs += line.trial.epochs
            case.kept = 0 if line.trial.state.is_final else len(case.results)
            self._keep_parent(line.trial.suggestion)
            if line.role == "search":
                self._searched += line.trial.state is not TrialState.REFUSED
                if line.trial.state is not TrialState.FAILED:
                    self._learn(line.trial)
                self._keys.add(line.trial.suggestion.key)
            if line.trial.state in (TrialState.RUNNING, TrialState.WAITING):
                case.trial = line.trial.but(state=TrialState.WAITING)
                self._waiting.append(line.trial.number)
            if line.trial.scored:
                self._front.add(line.trial.losses)
        self._done = max((line.done or 0 for line in lines), default=0)
        anew = self._advisers.restore(
            self._database, lines, same_searcher=same_searcher, same_rungs=same_rungs
        )
        if anew and self._selects is None:
            self._judge_anew()
        self._write(snapshot=self._advisers.stale, facts=facts)
        return sum(line.done is not None for line in lines)

    def _judge_anew(self) -> None:
        """Tell other rungs of all reports. Who is paused, and is not to be any more, goes on."""
        for case in self._cases.values():
            if case.role != "search":
                continue
            levels = range(1, len(case.results) + 1)
            found = [(level, losses(self._objectives, case.results, level)) for level in levels]
            reports = [(level, reached) for level, reached in found if reached is not None]
            verdict = self._advisers.judge_anew(case.trial, reports)
            if case.trial.state is TrialState.PAUSED and verdict is Verdict.CONTINUE:
                self._queue(case)

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until the budget is spent or nothing is left to try. Everything is in the database then.

        Raises:
            EveryTrialFailed, NeverReported: it makes no sense to go on.
            SearchError, StoreError: it cannot go on.
            KeyboardInterrupt: as after a kill, the database stands as it was last committed.
        """
        try:
            while True:
                self._plan()
                self._write()
                self._launch()
                if self._out_of_time():
                    self._wind_up()
                    break
                if not self._running and not self._waiting and not self._may_ask():
                    break
                self._await(min(_TICK_S, self._time_left()))
            self._rerank()
            self._look_for_scores()
            self._write(snapshot=True)
        except Exception:  # not Ctrl-C, which may have come in the middle of anything
            self._write(snapshot=False)  # it may have been the searcher's
            raise

    def _await(self, timeout_s: float) -> None:
        """Wait for what happens next, and take it up."""
        try:
            news = self._executor.poll(timeout_s)
        except KeyboardInterrupt:
            self._write(snapshot=True)  # here, where nearly all the time goes, nothing is halfway
            raise
        self._hear(news)

    def _plan(self) -> None:
        """Promotions and new suggestions for the room there is."""
        self._advisers.tell()
        if self._selects is not None:
            self._select(self._selects)
            return
        room = self._executor.room - len(self._waiting)
        if room > 0 and not self._spent():
            for number in self._advisers.promotable()[:room]:
                self._advisers.promote(number)
                self._queue(self._cases[number])
                room -= 1
        room = min(room, self._trials_left())
        while room > 0 and self._enqueued and not self._spent():
            suggestion = Suggestion(self._enqueued.popleft())
            if suggestion.key not in self._keys:
                room -= self._let_in(suggestion)
        while room > 0 and self._may_ask():
            lost = self._advisers.take_lost(room)
            asked = lost or self._advisers.ask(room)
            self._exhausted = not lost and len(asked) < room
            for suggestion in asked:
                if suggestion.key in self._keys:  # enqueued, or a crash took the memory of it
                    self._repeat()
                    continue
                self._repeats = 0
                room -= self._let_in(suggestion)
            if self._advisers.untold:  # refused: it hears of it before it is asked again
                self._write()
                self._advisers.tell()

    def _repeat(self) -> None:
        """What was tried already may be proposed once more each, and now and then by chance.

        Raises:
            SearchError: it goes on and on.
        """
        self._repeats += 1
        if self._repeats > len(self._keys) + _REPEATS:
            raise SearchError(
                f"{self._searcher_name}.ask gives the same configurations again and "
                f"again: the last {self._repeats} were tried before. The campaign was stopped; all "
                "trials are in its database. A searcher gives fewer than it is asked for when it "
                "has no further one."
            )

    def _select(self, searcher: Selects) -> None:
        """When all have paused or ended: who goes on, who does not, and who comes instead.

        All of it is one transaction, with the searcher's state; or none, if it cannot be done.
        """
        if self._running or self._waiting or self._exhausted or self._spent():
            return
        cases = {n: c for n, c in self._cases.items() if c.trial.state is TrialState.PAUSED}
        paused = [case.trial for _, case in sorted(cases.items())]
        if not paused and not self._trials_left():
            return
        self._write()
        try:
            selected = copy.deepcopy(searcher.select(copy.deepcopy(paused), self._trials_left()))
            for number in selected.over:
                ended = Ended(number=number, kind=EndedKind.HALTED, ref=cases[number].trial.ref)
                self._settle(cases[number], ended, TrialState.STOPPED)
            for number in selected.on:
                self._queue(cases[number])
            for child in selected.children:
                self._let_in(self._enqueued_or(child))
            self._exhausted = not (selected.on or selected.children)
            self._write(snapshot=True)
        except Exception:
            self._news = _News()  # whoever goes on with the campaign selects again
            raise

    def _enqueued_or(self, child: Suggestion) -> Suggestion:
        """What a user wants to be tried, where anything fresh is to be."""
        while self._enqueued and child.parent_number is None:
            wanted = Suggestion(self._enqueued.popleft())
            if wanted.key not in self._keys:
                return wanted
        return child

    def _keep_parent(self, suggestion: Suggestion) -> None:
        if suggestion.in_place and suggestion.parent is not None:
            self._parents.add(suggestion.parent)

    def _let_in(self, suggestion: Suggestion) -> bool:
        """Add a suggestion as a trial; whether it is to run.

        Raises:
            ConfigError, SearchError: the gate refuses everything.
        """
        if self._gate is None:
            self._add(suggestion)
            return True
        self._gate.begin(int(getattr(self._executor, "idle_bytes", 0)))
        foreseen = self._gate.foresee(suggestion.config)
        if not foreseen.refusal:
            self._refusals = 0
            self._add(suggestion, predicted_bytes=foreseen.predicted_bytes)
            return True
        self._refusals += 1
        self._refuse(suggestion, foreseen.predicted_bytes, foreseen.refusal)
        if self._refusals >= _REFUSALS:
            raise SearchError(
                f"the gate refused {self._refusals} configurations in a row, the last one since "
                f"{foreseen.refusal}. The campaign was stopped; all trials are in its database. "
                "Widen the gate's limits, or narrow the space to what fits."
            )
        return False

    def _refuse(self, suggestion: Suggestion, predicted_bytes: int, why: str) -> None:
        number = self._next
        trial = Trial(number, suggestion, asked_s=time.time(), predicted_bytes=predicted_bytes)
        case = self._cases[number] = _Case(trial)
        self._keys.add(suggestion.key)
        self._settle(
            case, Ended(number=number, kind=EndedKind.HALTED), TrialState.REFUSED, why, why
        )

    def _learn(self, trial: Trial) -> None:
        if self._gate is not None and trial.peak_bytes:
            self._gate.learn(trial)

    @property
    def _next(self) -> int:
        """The number of the next trial: one after the last, whoever took some of them away."""
        return next(reversed(self._cases), -1) + 1

    def _add(
        self,
        suggestion: Suggestion,
        role: Role = "search",
        *,
        predicted_bytes: int = 0,
        memory_bytes: int = 0,
    ) -> None:
        number = self._next
        trial = Trial(
            number,
            suggestion,
            asked_s=time.time(),
            predicted_bytes=predicted_bytes,
            memory_bytes=memory_bytes,
        )
        case = self._cases[number] = _Case(trial, role)
        self._keep_parent(suggestion)
        if role == "search":
            self._searched += 1
            self._keys.add(suggestion.key)
        self._queue(case)

    def _queue(self, case: _Case) -> None:
        if case.trial.state is not TrialState.WAITING:
            case.trial = case.trial.but(state=TrialState.WAITING)
        self._waiting.append(case.trial.number)
        self._news.changed[case.trial.number] = case

    def _launch(self) -> None:
        """Hand waiting trials out. They are in the database already."""
        for _ in range(min(self._executor.room, len(self._waiting))):
            case = self._cases[self._waiting.popleft()]
            trial = case.trial
            case.stop = False
            case.rung = self._next_rung(len(case.results)) if case.role == "search" else None
            case.trial = trial.but(
                state=TrialState.RUNNING, started_s=trial.started_s or time.time()
            )
            work = self._make_work(case.trial, case.role, case.rung)
            self._executor.submit(work)
            self._running.add(trial.number)
            self._news.changed[trial.number] = case
            self._emit(
                TrialStarted(
                    trial=trial.number,
                    config=trial.config,
                    parent=trial.suggestion.parent_number,
                    attempt=1 + case.losses_of_workers + case.raised + trial.starved,
                    rung=case.rung,
                    name=work.name,
                )
            )

    def _next_rung(self, reports: int) -> int | None:
        """After how many reports a trial pauses, if rungs say so beforehand."""
        if self._selects is not None:
            return reports + self._selects.interval
        return next((level for level in self._advisers.levels if level > reports), None)

    def _write(
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

    # ------------------------------------------------------------------ the budget

    def _trials_left(self) -> int:
        limit = self._budget.trials
        return sys.maxsize if limit is None else max(0, limit - self._searched)

    def _may_ask(self) -> bool:
        return not self._exhausted and self._trials_left() > 0 and not self._spent()

    def _spent(self) -> bool:
        limit = self._budget.epochs
        spent = limit is not None and self._epochs >= limit
        return spent or self._out_of_time()

    def _time_left(self) -> float:
        limit = self._budget.time_s
        return math.inf if limit is None else max(0.0, limit - (self._clock() - self._began_s))

    def _out_of_time(self) -> bool:
        return self._time_left() <= 0

    def _wind_up(self) -> None:
        """Time is up: what runs is asked to end, and starts again in the next `run`."""
        for number in self._running:
            self._executor.halt(number)
        until = self._clock() + _HALT_S
        while self._running and self._clock() < until:
            self._await(_TICK_S)
            self._write()

    # ------------------------------------------------------------------ what comes back

    def _hear(self, happened: Iterable[WorkReport | Ended]) -> None:
        fatal: ElastixError | None = None
        for news in happened:
            case = self._cases[news.number]
            if isinstance(news, WorkReport):
                self._report(case, news.seq, news.metrics)
                continue
            self._running.discard(news.number)
            for seq, metrics in sorted(news.results.items()):
                self._report(case, seq, metrics)
            try:
                self._end(case, news)
            except (SearchError, StoreError) as error:
                fatal = fatal or error  # the others' results are worth keeping
        if fatal is not None:
            raise fatal

    def _report(self, case: _Case, seq: int, metrics: Mapping[str, Any]) -> None:
        if seq in case.results:
            return
        case.results[seq] = metrics
        number = case.trial.number
        self._news.said.append(TrialReported(trial=number, seq=seq, metrics=metrics))
        if case.role != "search" or (case.rung is not None and seq + 1 >= case.rung):
            return  # at a rung it is judged once it has paused, or ended: it runs until then
        verdict = self._judge(case)
        if verdict is Verdict.PAUSE:
            self._advisers.promote(number)  # too late for that rung, and it is on its way already
        if verdict is Verdict.STOP and number in self._running:
            case.stop = True
            self._executor.halt(number)

    def _judge(self, case: _Case) -> Verdict:
        """Tell rungs how far it has come. They hear nothing before there is a score."""
        reached = losses(self._objectives, case.results)
        if reached is None:
            return Verdict.CONTINUE
        return self._advisers.report(case.trial.number, len(case.results), reached)

    def _end(self, case: _Case, ended: Ended) -> None:
        """Decide what becomes of a trial whose run is over."""
        if isinstance(ended.error, StoreError):
            self._restart(case)
            raise ended.error
        match EndedKind(ended.kind):  # an executor of somebody's own may say anything
            case EndedKind.LOST:
                self._lost(case, ended)
            case EndedKind.RAISED:
                self._raised(case, ended)
            case EndedKind.STARVED:
                self._starved(case, ended)
            case EndedKind.PAUSED:
                self._pause(case, ended)
            case EndedKind.FINISHED:
                self._finish(case, ended, TrialState.FINISHED)
            case EndedKind.HALTED if case.stop:
                self._finish(case, ended, TrialState.STOPPED)
            case EndedKind.HALTED | EndedKind.RETURNED:
                self._restart(case)

    def _lost(self, case: _Case, ended: Ended) -> None:
        case.losses_of_workers += 1
        if case.losses_of_workers <= self._terms.max_losses:
            self._again(case, f"{ended.worker} died")
            return
        cause = f"its worker died {case.losses_of_workers} times: {ended.summary}"
        self._fail(case, ended, cause, cause)

    def _raised(self, case: _Case, ended: Ended) -> None:
        case.raised += 1
        if case.raised <= self._terms.retries:
            self._again(case, ended.summary)
        else:
            self._fail(case, ended, ended.summary, ended.traceback)

    def _starved(self, case: _Case, ended: Ended) -> None:
        """For want of memory, and not by its own fault unless it had all that there is."""
        trial = case.trial
        peak = max(ended.peak_bytes, trial.peak_bytes)
        if ended.alone:
            told = f"it had all the memory that there is for one trial: {ended.summary}"
            trace = f"{ended.traceback.rstrip()}\n{told}".strip()
            self._raised(case, replace(ended, summary=told, traceback=trace))
            return
        reserved = packer.more(max(ended.reserved_bytes, trial.memory_bytes), peak)
        times = trial.starved + 1
        case.trial = trial.but(
            starved=times,
            memory_bytes=reserved,
            peak_bytes=peak,
            base_bytes=ended.base_bytes or trial.base_bytes,
        )
        self._learn(case.trial)
        self._news.said.append(
            TrialStarved(
                trial=trial.number,
                times=times,
                peak_bytes=peak,
                reserved_bytes=reserved,
                cause=ended.summary.splitlines()[0] if ended.summary else "",
            )
        )
        self._restart(case)

    def _again(self, case: _Case, cause: str) -> None:
        attempt = case.losses_of_workers + case.raised
        self._news.said.append(TrialLost(trial=case.trial.number, attempt=attempt, cause=cause))
        self._restart(case)

    def _restart(self, case: _Case) -> None:
        """From its last State, or from the beginning; it will report the rest again."""
        case.results = {seq: found for seq, found in case.results.items() if seq < case.kept}
        self._queue(case)

    def _pause(self, case: _Case, ended: Ended) -> None:
        """At a rung, where rungs judge it; one that may go on waits its turn."""
        reports = f"the first at a rung, after {len(case.results)} reports"
        if not self._has_score(case, ended, reports):
            return
        self._settle(case, ended, TrialState.PAUSED)
        case.kept = len(case.results)
        if ended.ref is None:
            self._paused_without_state(case)
        if self._selects is None:
            self._advisers.at_rung(case.trial)
            verdict = self._judge(case)
            if verdict is Verdict.CONTINUE:
                self._queue(case)
            elif verdict is Verdict.STOP:
                self._settle(case, ended, TrialState.STOPPED)

    def _paused_without_state(self, case: _Case) -> None:
        """Its train function prepares no model. Said once; SearchError where States are needed."""
        told = (
            f"trial {case.trial.number} was paused after {len(case.results)} reports and left no "
            "State, as its train function does not call ctx.prepare."
        )
        if self._selects is not None:
            raise SearchError(
                f"{told} {self._searcher_name} lets trials go on from States. The campaign was "
                "stopped. Call ctx.prepare, or take another searcher."
            )
        if not self._stateless:
            logger.warning("%s When it goes on it begins anew; its reports count once.", told)
        self._stateless = True

    def _finish(self, case: _Case, ended: Ended, state: TrialState) -> None:
        if self._has_score(case, ended, "the first to end"):
            self._settle(case, ended, state)

    def _has_score(self, case: _Case, ended: Ended, which: str) -> bool:
        """Whether it has a finite number for each objective; without, it has failed.

        Raises:
            NeverReported: and no trial before it had one.
        """
        try:
            found = self._objectives.losses(merged(case.results))
        except SearchError as error:
            others = self._cases.values()
            if not any(c.trial.losses or losses(self._objectives, c.results) for c in others):
                self._restart(case)  # the train function is to be mended; then this one counts
                raise NeverReported(
                    f"{error} That was trial {case.trial.number}, {which}; it will run "
                    "again in the next run()."
                ) from error
            self._fail(case, ended, str(error))
            return False
        if all(map(math.isfinite, found)):
            return True
        values = dict(zip(self._objectives.names, self._objectives.values(found), strict=True))
        self._fail(case, ended, f"it reported {values}, which is not finite.")
        return False

    def _fail(self, case: _Case, ended: Ended, message: str, trace: str = "") -> None:
        self._settle(case, ended, TrialState.FAILED, message, trace or message)
        self._failures += 1
        self._first_failure = self._first_failure or case.trial
        scored = any(other.trial.scored for other in self._cases.values())
        if self._failures >= self._terms.give_up_after and not scored:
            what = f"the first {self._failures} trials failed, and none did not"
            self._give_up(self._first_failure, f"{what}. The campaign was stopped")

    def _give_up(self, first: Trial, what: str) -> NoReturn:
        raise EveryTrialFailed(
            f"{what}; the failed trials are in its journal. The first was trial {first.number} "
            f"with {dict(first.config)}:\n\n{first.traceback}",
            first.traceback or "",
        )

    def _look_for_scores(self) -> None:
        """At the end: none of so few trials that nobody gave up may be fit for anything."""
        searched = [case.trial for case in self._cases.values() if case.role == "search"]
        failed = [trial for trial in searched if trial.state is TrialState.FAILED]
        over = all(trial.state.is_final for trial in searched)
        if failed and over and not any(trial.scored for trial in searched):
            self._give_up(failed[0], f"all {len(failed)} trials failed")

    def _settle(
        self, case: _Case, ended: Ended, state: TrialState, message: str = "", trace: str = ""
    ) -> None:
        """Enter the results of a run into its trial."""
        inherited = ended.inherited or case.trial.inherited
        before = float(inherited["lineage_epochs"]) if inherited else 0.0
        former = case.trial.ref
        if former and ended.ref not in (None, former) and former not in self._parents:
            self._news.outgrown.append(former)
        epochs = max(ended.epochs, case.trial.epochs)
        self._epochs += epochs - case.trial.epochs
        case.trial = case.trial.but(
            state=state,
            losses=losses(self._objectives, case.results) or (),
            results=tuple(metrics for _, metrics in sorted(case.results.items())),
            metrics=merged(case.results),
            ref=ended.ref or case.trial.ref,
            epochs=epochs,
            lineage_epochs=epochs + before,
            inherited=inherited,
            finished_s=time.time(),
            traceback=trace or None,
            peak_bytes=max(ended.peak_bytes, case.trial.peak_bytes),
            base_bytes=ended.base_bytes or case.trial.base_bytes,
        )
        if ended.peak_bytes and ended.kind != EndedKind.RAISED:
            self._learn(case.trial)  # of one that raised nobody knows what it would have taken
        if state.is_final:
            self._done += 1
            case.done = self._done
            if case.role == "search":
                self._advisers.over(case.trial)
                if case.rung is not None and len(case.results) >= case.rung:
                    self._judge(case)  # it ended at a rung: it counts there for the others
                self._advisers.drop(case.trial.number)
        self._news.changed[case.trial.number] = case
        self._news.said.append(self._ended(case.trial, ended, message))

    def _ended(self, trial: Trial, ended: Ended, message: str) -> TrialEnded:
        names, known = self._objectives.names, trial.losses
        values = zip(names, self._objectives.values(known), strict=True) if known else ()
        return TrialEnded(
            trial=trial.number,
            state=trial.state.value,
            values=dict(values),
            metrics=trial.metrics,
            ref=trial.ref or "",
            epochs=trial.epochs,
            lineage_epochs=trial.lineage_epochs,
            inherited=float((trial.inherited or {}).get("share", 0.0)),
            seconds=ended.finished_s - ended.started_s,
            best=trial.scored and self._front.add(trial.losses),
            message=message,
            ignored=ended.ignored,
            peak_bytes=trial.peak_bytes,
        )

    # ------------------------------------------------------------------ the control from scratch

    def _rerank(self) -> None:
        """Run the best again without inheritance, so that they are compared on equal terms."""
        if not self._terms.rerank or self._out_of_time():
            return
        cases = self._cases.values()
        known = {c.trial.suggestion.parent_number for c in cases if c.role == "rerank"}
        scored = [c.trial for c in cases if c.role == "search" and c.trial.scored]
        best = order([trial.losses for trial in scored])[: self._terms.rerank]
        for origin in (scored[place] for place in best):
            if origin.number in known:  # by an earlier run, for fewer trials
                continue
            again = Suggestion(origin.config, parent_number=origin.number)
            self._add(
                again,
                role="rerank",
                predicted_bytes=origin.predicted_bytes,
                memory_bytes=origin.memory_bytes,
            )
        while (self._waiting or self._running) and not self._out_of_time():
            self._write()
            self._launch()
            self._await(min(_TICK_S, self._time_left()))
        self._wind_up()
