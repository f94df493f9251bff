"""The loop of a campaign: ask, run, write down, tell. No Ray, no torch, no terminal.

Not here: what stands around it (campaign), where trials run (executors), what becomes of one whose
run is over (trial_endings), and how all of them are written down (trial_book).

Invariant: a searcher is told of a trial, and rungs act on it, only with the transaction that puts
it into the database; a trial that is final there never runs again.
"""

import copy
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastix.config import Budget
from elastix.errors import ElastixError, OtherCode, SearchError, StoreError
from elastix.events import Event, TrialReported, TrialStarted
from elastix.search.advisers import Advisers
from elastix.search.executors.executor import Ended, EndedKind, Executor, Work, WorkReport
from elastix.search.gate import Gate
from elastix.search.pareto import order
from elastix.search.rungs import Rungs, Verdict
from elastix.search.scores import Latest
from elastix.search.trial import (
    Config,
    Objectives,
    Searcher,
    Selects,
    Suggestion,
    Trial,
    TrialState,
)
from elastix.search.trial_book import Case, TrialBook
from elastix.search.trial_database import Role, TrialDatabase
from elastix.search.trial_endings import Endings

_TICK_S = 1.0
_HALT_S = 10.0
_REPEATS = 100  # in a row, by a searcher that draws without looking
_REFUSALS = 200  # in a row: nothing that fits is being proposed
_BARREN = 1000  # trials that failed before they had made an epoch, and none did


@dataclass(frozen=True, kw_only=True)
class LoopTerms:
    """What a loop goes by, beside its parts.

    Attributes:
        objectives: what is optimised.
        budget: when to stop.
        enqueued: what is tried before the searcher is asked; what was tried already is left out.
        max_losses: how often a trial may lose its worker before it counts as failed.
        retries: how often a trial that raised is run again.
        give_up_after: so many failed trials, and none that did not fail, end the campaign.
        rerank: how many of the best are run again without inheritance at the end.
    """

    objectives: Objectives
    budget: Budget
    enqueued: Sequence[Config] = ()
    max_losses: int = 3
    retries: int = 0
    give_up_after: int = 5
    rerank: int = 0


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
        self._selects = self._advisers.selects
        self._executor = executor
        self._budget = terms.budget
        self._make_work = make_work
        self._emit = emit
        self._clock = clock
        self._began_s = clock()
        self._book = TrialBook(database, self._advisers, emit, clock)
        self._endings = Endings(
            self._book,
            self._advisers,
            gate,
            terms.objectives,
            max_losses=terms.max_losses,
            retries=terms.retries,
            give_up_after=terms.give_up_after,
        )
        self._enqueued = deque(terms.enqueued)
        self._starts: dict[int, TrialStarted] = {}  # of trials that the executor was given
        self._exhausted = False
        self._refusals = 0  # since a trial was let in
        self._repeats = 0  # proposals in a row that were tried before
        self._barren = 0  # trials that failed since one made an epoch, or had a score; see _count

    # ---------------------------------------------------------- from the trial database

    def restore(
        self,
        same_searcher: bool,
        same_rungs: bool = True,
        facts: Mapping[str, Any] | None = None,
    ) -> int:
        """Take up what the database has; how many trials of the search are final and not refused.

        Args:
            same_searcher: the searcher and its space are those that wrote its state.
            same_rungs: so are the rungs. Others are told of all that was reported.
            facts: say whose the states are from now on, so they are written with these.
        """
        lines = self._book.restore()
        self._endings.restore(lines)
        anew = self._advisers.restore(
            self._database, lines, same_searcher=same_searcher, same_rungs=same_rungs
        )
        if anew and self._selects is None:
            self._judge_anew()
        self._book.write(snapshot=self._advisers.stale, facts=facts)
        searched = [line for line in lines if line.role == "search" and line.done is not None]
        return sum(line.trial.state is not TrialState.REFUSED for line in searched)

    def _judge_anew(self) -> None:
        """Tell other rungs of all reports. Who is paused, and is not to be any more, goes on."""
        objectives = self._terms.objectives
        for case in self._book.cases.values():
            if case.role != "search":
                continue
            latest, reports = Latest({}), list[tuple[int, tuple[float, ...]]]()
            for seq, metrics in sorted(case.results.items()):
                latest.add(seq, metrics)
                reached = latest.losses(objectives)
                if reached is not None:
                    reports.append((seq + 1, reached))
            verdict = self._advisers.judge_anew(case.trial, reports)
            if case.trial.state is TrialState.PAUSED and verdict is Verdict.CONTINUE:
                self._book.queue(case)

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until the budget is spent or nothing is left to try. Everything is in the database then.

        Raises:
            EveryTrialFailed, NeverReported: it makes no sense to go on.
            SearchError, StoreError, OtherCode: it cannot go on.
            KeyboardInterrupt: as after a kill, the database stands as it was last committed.
        """
        try:
            while True:
                self._plan()
                self._book.write()
                self._launch()
                if self._out_of_time():
                    self._wind_up()
                    break
                if not self._book.running and not self._book.waiting and not self._goes_on():
                    break
                self._await(min(_TICK_S, self._time_left()))
                self._look_for_progress()
            self._rerank()
            self._endings.look_for_scores()
            self._book.write(snapshot=True)
        except Exception:  # not Ctrl-C, which may have come in the middle of anything
            self._book.write(snapshot=False)  # it may have been the searcher's
            raise

    def _await(self, timeout_s: float) -> None:
        """Wait for what happens next, and take it up."""
        try:
            news = self._executor.poll(timeout_s)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C or SIGTERM
            # Here, where nearly all the time goes, nothing is halfway.
            self._book.write(snapshot=True)
            raise
        self._hear(news)

    def _plan(self) -> None:
        """Promotions and new suggestions for the room there is."""
        self._advisers.tell()
        if self._selects is not None:
            self._select(self._selects)
            return
        room = self._executor.room - len(self._book.waiting)
        if room > 0 and not self._spent():
            for number in self._advisers.promotable()[:room]:
                self._advisers.promote(number)
                self._book.queue(self._book.cases[number])
                room -= 1
        room = min(room, self._trials_left())
        while room > 0 and self._enqueued and not self._spent():
            suggestion = Suggestion(self._enqueued.popleft())
            if suggestion.key not in self._book.keys:
                room -= self._let_in(suggestion)
        while room > 0 and self._may_ask():
            lost = self._advisers.take_lost(room)
            asked = lost or self._advisers.ask(room)
            self._exhausted = not lost and len(asked) < room
            for suggestion in asked:
                if suggestion.key in self._book.keys:  # enqueued, or a crash took the memory of it
                    self._repeat()
                    continue
                self._repeats = 0
                room -= self._let_in(suggestion)
            if self._advisers.untold:  # refused: it hears of it before it is asked again
                self._book.write()
                self._advisers.tell()

    def _repeat(self) -> None:
        """What was tried already may be proposed once more each, and now and then by chance.

        Raises:
            SearchError: it goes on and on.
        """
        self._repeats += 1
        if self._repeats > len(self._book.keys) + _REPEATS:
            raise SearchError(
                f"{self._advisers.searcher_name}.ask gives the same configurations again and "
                f"again: the last {self._repeats} were tried before. The campaign was stopped; all "
                "trials are in its database. A searcher gives fewer than it is asked for when it "
                "has no further one."
            )

    def _select(self, searcher: Selects) -> None:
        """When all have paused or ended: who goes on, who does not, and who comes instead.

        All of it is one transaction, with the searcher's state; or none, if it cannot be done.
        """
        if self._book.running or self._book.waiting or self._exhausted or self._spent():
            return
        cases = {n: c for n, c in self._book.cases.items() if c.trial.state is TrialState.PAUSED}
        paused = [case.trial for _, case in sorted(cases.items())]
        if not paused and not self._trials_left():
            return
        self._book.write()
        try:
            selected = copy.deepcopy(searcher.select(copy.deepcopy(paused), self._trials_left()))
            for number in selected.over:
                self._endings.stop(cases[number])
            for number in selected.on:
                self._book.queue(cases[number])
            wanted = {Suggestion(config).key: config for config in self._enqueued}
            come = wanted.keys() & {child.key for child in selected.children}  # by themselves
            self._enqueued = deque(config for key, config in wanted.items() if key not in come)
            for child in selected.children:
                self._let_in(child if child.key in come else self._enqueued_or(child))
            self._exhausted = not (selected.on or selected.children)
            self._book.write(snapshot=True)
        except Exception:
            self._book.forget_unwritten()  # whoever goes on with the campaign selects again
            raise

    def _enqueued_or(self, child: Suggestion) -> Suggestion:
        """What a user wants to be tried, where anything fresh is to be."""
        while self._enqueued and child.parent_number is None:
            wanted = Suggestion(self._enqueued.popleft())
            if wanted.key not in self._book.keys:
                return wanted
        return child

    def _let_in(self, suggestion: Suggestion) -> bool:
        """Add a suggestion as a trial; whether it is to run.

        Raises:
            ConfigError, SearchError: the gate refuses everything.
        """
        if self._gate is None:
            self._book.add(suggestion)
            return True
        self._gate.begin(int(getattr(self._executor, "idle_bytes", 0)))
        foreseen = self._gate.foresee(suggestion.config)
        if not foreseen.refusal:
            self._refusals = 0
            self._book.add(suggestion, predicted_bytes=foreseen.predicted_bytes)
            return True
        self._refusals += 1
        case = self._book.enter(suggestion, predicted_bytes=foreseen.predicted_bytes)
        self._endings.refuse(case, foreseen.refusal)
        if self._refusals >= _REFUSALS:
            raise SearchError(
                f"the gate refused {self._refusals} configurations in a row, the last one since "
                f"{foreseen.refusal}. The campaign was stopped; all trials are in its database. "
                "Widen the gate's limits, or narrow the space to what fits."
            )
        return False

    def _launch(self) -> None:
        """Hand waiting trials out. They are in the database already."""
        book = self._book
        for _ in range(min(self._executor.room, len(book.waiting))):
            case = book.cases[book.waiting.popleft()]
            trial = case.trial
            case.stop = False
            case.rung = self._next_rung(len(case.results)) if case.role == "search" else None
            started_s = trial.started_s or time.time()
            running = trial.but(state=TrialState.RUNNING, started_s=started_s)
            work = self._make_work(running, case.role, case.rung)
            self._executor.submit(work)
            book.running.add(trial.number)
            book.change(case, running)
            self._starts[trial.number] = TrialStarted(
                trial=trial.number,
                config=trial.config,
                parent=trial.suggestion.parent_number,
                attempt=1 + case.losses_of_workers + case.raised + trial.starved,
                rung=case.rung,
                name=work.name,
                role=case.role,
            )
        self._say_started()

    def _say_started(self) -> None:
        """Of those that have a worker by now. Others run, in our books, and wait for one."""
        waiting = getattr(self._executor, "held_back", ())
        for number in [number for number in self._starts if number not in waiting]:
            self._emit(self._starts.pop(number))

    def _next_rung(self, reports: int) -> int | None:
        """After how many reports a trial pauses, if rungs say so beforehand."""
        if self._selects is not None:
            return reports + self._selects.interval
        return next((level for level in self._advisers.levels if level > reports), None)

    # ------------------------------------------------------------------ the budget

    def _trials_left(self) -> int:
        limit = self._budget.trials
        return sys.maxsize if limit is None else max(0, limit - self._book.searched)

    def _may_ask(self) -> bool:
        return not self._exhausted and self._trials_left() > 0 and not self._spent()

    def _goes_on(self) -> bool:
        """Whether anything is to run as soon as there is room: there may be no worker just now."""
        return self._may_ask() or (not self._spent() and bool(self._advisers.promotable()))

    def _spent(self) -> bool:
        limit = self._budget.epochs
        spent = limit is not None and self._book.epochs >= limit
        return spent or self._out_of_time()

    def _time_left(self) -> float:
        limit = self._budget.time_s
        return math.inf if limit is None else max(0.0, limit - (self._clock() - self._began_s))

    def _out_of_time(self) -> bool:
        return self._time_left() <= 0

    def _count(self, trial: Trial) -> None:
        if trial.epochs or trial.scored:  # not every executor counts epochs
            self._barren = 0
        elif trial.state is TrialState.FAILED and trial.number < min(
            self._book.running, default=math.inf
        ):  # an older one may be learning
            self._barren += 1

    def _look_for_progress(self) -> None:
        """Trials that fail at once use up nothing of a budget that has epochs alone.

        Raises:
            SearchError: it goes on and on.
        """
        budget = self._budget
        if self._barren >= _BARREN and budget.trials is None and budget.time_s is None:
            trials = [case.trial for case in self._book.cases.values()]
            last = [trial for trial in trials if trial.state is TrialState.FAILED][-1]
            raise SearchError(
                f"{self._barren} trials have failed before they had made an epoch, and none has "
                f"made one since the first of them: Budget(epochs={budget.epochs:g}) is never used "
                "up. The campaign was stopped; all trials are in its database. Mend what fails, or "
                f"give trials= or time_s= as well. The last was trial {last.number} with "
                f"{dict(last.config)}:\n\n{last.traceback}"
            )

    def _wind_up(self) -> None:
        """Time is up: what runs is asked to end, and starts again in the next `run`."""
        for number in self._book.running:
            self._executor.halt(number)
        until = self._clock() + _HALT_S
        while self._book.running and self._clock() < until:
            self._await(_TICK_S)
            self._book.write()

    # ------------------------------------------------------------------ what comes back

    def _hear(self, happened: Iterable[WorkReport | Ended]) -> None:
        fatal: ElastixError | None = None
        for news in happened:
            case = self._book.cases[news.number]
            started = self._starts.pop(news.number, None)
            returned = isinstance(news, Ended) and news.kind == EndedKind.RETURNED
            if started is not None and not returned:
                self._emit(started)
            if isinstance(news, WorkReport):
                self._report(case, news.seq, news.metrics)
                continue
            self._book.running.discard(news.number)
            for seq, metrics in sorted(news.results.items()):
                self._report(case, seq, metrics)
            try:
                self._endings.end(case, news)
                self._count(case.trial)
            except (SearchError, StoreError, OtherCode) as error:
                fatal = fatal or error  # the others' results are worth keeping
        if fatal is not None:
            raise fatal

    def _report(self, case: Case, seq: int, metrics: Mapping[str, Any]) -> None:
        if not case.says_new(seq, metrics):
            return
        latest = case.report(seq, metrics)
        number = case.trial.number
        self._book.say(TrialReported(trial=number, seq=seq, metrics=metrics))
        if case.role != "search" or (case.rung is not None and seq + 1 >= case.rung):
            return  # at a rung it is judged once it has paused, or ended: it runs until then
        verdict = self._endings.judge_at(case, seq + 1, latest)
        if verdict is Verdict.PAUSE:
            self._advisers.promote(number)  # too late for that rung, and it is on its way already
        if verdict is Verdict.STOP and number in self._book.running:
            case.stop = True
            self._executor.halt(number)

    # ------------------------------------------------------------------ the control from scratch

    def _rerank(self) -> None:
        """Run the best again without inheritance, so that they are compared on equal terms."""
        if not self._terms.rerank or self._out_of_time():
            return
        cases = self._book.cases.values()
        known = {c.trial.suggestion.parent_number for c in cases if c.role == "rerank"}
        scored = [c.trial for c in cases if c.role == "search" and c.trial.scored]
        best = order([trial.losses for trial in scored])[: self._terms.rerank]
        for origin in (scored[place] for place in best):
            if origin.number in known:  # by an earlier run, for fewer trials
                continue
            again = Suggestion(origin.config, parent_number=origin.number)
            self._book.add(
                again,
                role="rerank",
                predicted_bytes=origin.predicted_bytes,
                memory_bytes=origin.memory_bytes,
            )
        while (self._book.waiting or self._book.running) and not self._out_of_time():
            self._book.write()
            self._launch()
            self._await(min(_TICK_S, self._time_left()))
        self._wind_up()
