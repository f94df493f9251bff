"""What becomes of a trial whose run is over: it is final, waits at its rung, or runs again.

Not here: who tries and runs trials (campaign_loop), and how what is decided is written down
(trial_book).

Invariant: a trial that ended without a finite number for each objective has failed, and one is
final once.
"""

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

from elastix.errors import (
    Corrupt,
    EveryTrialFailed,
    NeverReported,
    NotFound,
    OtherCode,
    SearchError,
    StoreDamaged,
    StoreError,
)
from elastix.events import TrialEnded, TrialLost, TrialStarved
from elastix.search.advisers import Advisers
from elastix.search.executors import packer
from elastix.search.executors.executor import CUT_SHORT, Ended, EndedKind
from elastix.search.gate import Gate
from elastix.search.pareto import Front
from elastix.search.rungs import Verdict
from elastix.search.scores import Latest, losses, merged
from elastix.search.trial import Objectives, Trial, TrialState
from elastix.search.trial_book import Case, TrialBook
from elastix.search.trial_database import Role, TrialRow

logger = logging.getLogger(__name__)


class Endings:
    """One campaign's.

    Args:
        book: of its trials.
        advisers: hear of what is final, and of what has come to a rung.
        gate: learns what trials took; None for none.
        objectives: by which a trial has a score.
        max_losses: how often a trial may lose its worker before it counts as failed.
        retries: how often a trial that raised is run again.
        give_up_after: so many failed trials, and none that did not fail, end the campaign.
    """

    def __init__(
        self,
        book: TrialBook,
        advisers: Advisers,
        gate: Gate | None,
        objectives: Objectives,
        *,
        max_losses: int,
        retries: int,
        give_up_after: int,
    ) -> None:
        self._book = book
        self._advisers = advisers
        self._gate = gate
        self._objectives = objectives
        self._max_losses = max_losses
        self._retries = retries
        self._give_up_after = give_up_after
        self._front = Front()
        self._stateless = False  # a trial has paused and left no State
        self._failures = 0
        self._first_failure: Trial | None = None

    def restore(self, lines: Iterable[TrialRow]) -> None:
        """Take up what earlier runs of the campaign have come to."""
        for line in lines:
            if line.role == "search" and line.trial.state is not TrialState.FAILED:
                self._learn(line.trial)
            if line.trial.scored:
                self._front.add(line.trial.losses)

    def end(self, case: Case, ended: Ended) -> None:
        """Decide what becomes of a trial whose run is over."""
        error = ended.error
        # A model that is gone or damaged is its heirs' affair; a store that is full, or whose index
        # is damaged, is everybody's, and so is a node with other code: no trial has failed of that.
        one = isinstance(error, NotFound | Corrupt) and not isinstance(error, StoreDamaged)
        if isinstance(error, StoreError | OtherCode) and not one:
            self._restart(case)
            raise error
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

    def judge(self, case: Case) -> Verdict:
        """Tell rungs how far it has come. They hear nothing before there is a score."""
        return self.judge_at(case, len(case.results), Latest(case.results))

    def judge_at(self, case: Case, level: int, latest: Latest) -> Verdict:
        """Likewise, of one of its reports; one that goes on from its State may lack those before.

        Args:
            case: of the trial.
            level: how many reports there are with that one.
            latest: of them.
        """
        reached = latest.losses(self._objectives)
        if reached is None:
            return Verdict.CONTINUE
        return self._advisers.report(case.trial.number, level, reached)

    def stop(self, case: Case) -> None:
        """A trial that is paused does not go on."""
        number, ref = case.trial.number, case.trial.ref
        ended = Ended(number=number, kind=EndedKind.HALTED, ref=ref)
        self._settle(case, ended, TrialState.STOPPED)

    def refuse(self, case: Case, why: str) -> None:
        """The gate says that it cannot fit."""
        ended = Ended(number=case.trial.number, kind=EndedKind.HALTED)
        self._settle(case, ended, TrialState.REFUSED, why, why)

    def look_for_scores(self) -> None:
        """At the end: none of so few trials that nobody gave up may be fit for anything."""
        searched = [case.trial for case in self._book.cases.values() if case.role == "search"]
        if searched and all(trial.state is TrialState.REFUSED for trial in searched):
            raise SearchError(
                f"the gate refused all {len(searched)} configurations that were proposed, the last "
                f"one since {searched[-1].traceback}. No trial was run. Widen the gate's limits, "
                "or extend the space by what fits."
            )
        failed = [trial for trial in searched if trial.state is TrialState.FAILED]
        over = all(trial.state.is_final for trial in searched)
        if failed and over and not any(trial.scored for trial in searched):
            self._give_up(failed[0], f"all {len(failed)} trials that ran failed")

    def _lost(self, case: Case, ended: Ended) -> None:
        case.losses_of_workers += 1
        if case.losses_of_workers <= self._max_losses:
            of_itself = ended.worker and ended.error is None
            self._again(case, f"{ended.worker} died" if of_itself else ended.summary)
            return
        cause = f"its worker was lost {case.losses_of_workers} times: {ended.summary}"
        self._fail(case, ended, cause, f"{ended.traceback.rstrip()}\n{cause}".strip())

    def _raised(self, case: Case, ended: Ended) -> None:
        case.raised += 1
        if case.raised <= self._retries:
            self._again(case, ended.summary, raised=True)
        else:
            self._fail(case, ended, ended.summary, ended.traceback)

    def _starved(self, case: Case, ended: Ended) -> None:
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
        starved = trial.but(
            starved=times,
            memory_bytes=reserved,
            peak_bytes=peak,
            base_bytes=ended.base_bytes or trial.base_bytes,
        )
        self._book.change(case, starved)
        self._learn(starved)
        self._book.say(
            TrialStarved(
                trial=trial.number,
                times=times,
                peak_bytes=peak,
                reserved_bytes=reserved,
                cause=ended.summary.splitlines()[0] if ended.summary else "",
            )
        )
        self._restart(case)

    def _again(self, case: Case, cause: str, *, raised: bool = False) -> None:
        attempt = case.losses_of_workers + case.raised
        number = case.trial.number
        self._book.say(TrialLost(trial=number, attempt=attempt, cause=cause, raised=raised))
        self._restart(case)

    def _restart(self, case: Case) -> None:
        """From its last State, or from the beginning."""
        case.go_back()
        self._book.queue(case)

    def _pause(self, case: Case, ended: Ended) -> None:
        """At a rung, where rungs judge it; one that may go on waits its turn."""
        reports = f"the first at a rung, after {len(case.results)} reports"
        if not self._has_score(case, ended, reports):
            return
        self._settle(case, ended, TrialState.PAUSED)
        case.kept = len(case.results)
        if ended.ref is None:
            self._paused_without_state(case)
        if self._advisers.selects is None:
            self._advisers.at_rung(case.trial)
            verdict = self.judge(case)
            if verdict is Verdict.CONTINUE:
                self._book.queue(case)
            elif verdict is Verdict.STOP:
                self._settle(case, ended, TrialState.STOPPED)

    def _paused_without_state(self, case: Case) -> None:
        """Its train function prepares no model. Said once; SearchError where States are needed."""
        reports = "1 report" if len(case.results) == 1 else f"{len(case.results)} reports"
        told = (
            f"trial {case.trial.number} was paused after {reports} and left no State, as its "
            "train function does not call ctx.prepare."
        )
        if self._advisers.selects is not None:
            raise SearchError(
                f"{told} {self._advisers.searcher_name} lets trials go on from States. The "
                "campaign was stopped. Call ctx.prepare, or take another searcher."
            )
        if not self._stateless:
            logger.warning("%s When it goes on it begins anew; its reports count once.", told)
        self._stateless = True

    def _finish(self, case: Case, ended: Ended, state: TrialState) -> None:
        if self._has_score(case, ended, "the first to end"):
            self._settle(case, ended, state)

    def _has_score(self, case: Case, ended: Ended, which: str) -> bool:
        """Whether it has a finite number for each objective; without, it has failed.

        Raises:
            NeverReported: and no trial before it had one.
        """
        try:
            found = self._objectives.losses(merged(case.results))
        except SearchError as error:
            others = self._book.cases.values()
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

    def _fail(self, case: Case, ended: Ended, message: str, trace: str = "") -> None:
        self._settle(case, ended, TrialState.FAILED, message, trace or message)
        self._failures += 1
        self._first_failure = self._first_failure or case.trial
        scored = any(other.trial.scored for other in self._book.cases.values())
        if self._failures >= self._give_up_after and not scored:
            what = f"the first {self._failures} trials failed, and none has a score"
            self._give_up(self._first_failure, f"{what}. The campaign was stopped")

    def _give_up(self, first: Trial, what: str) -> NoReturn:
        raise EveryTrialFailed(
            f"{what}; the failed trials are in its journal. The first was trial {first.number} "
            f"with {dict(first.config)}:\n\n{first.traceback}",
            first.traceback or "",
        )

    def _settle(
        self, case: Case, ended: Ended, state: TrialState, message: str = "", trace: str = ""
    ) -> None:
        """Enter the results of a run into its trial."""
        inherited = ended.inherited or case.trial.inherited
        before = float(inherited["lineage_epochs"]) if inherited else 0.0
        former = case.trial.ref
        if former and ended.ref not in (None, former):
            self._book.outgrow(former)
        epochs = max(ended.epochs, case.trial.epochs)
        trial = case.trial.but(
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
        best = self._is_best(case.trial, trial)
        self._book.change(case, trial)
        if ended.peak_bytes and ended.kind not in CUT_SHORT:
            self._learn(trial)  # of these nobody knows what they would have taken
        if state.is_final and case.role == "search":
            self._advisers.over(trial)
            if case.rung is not None and len(case.results) >= case.rung:
                self.judge(case)  # it ended at a rung: it counts there for the others
            self._advisers.drop(trial.number)
        self._book.say(self._ended(trial, ended, message, best=best, role=case.role))

    def _is_best(self, before: Trial, trial: Trial) -> bool:
        """Whether no other one is as good by now. What it had itself at a rung counts no more."""
        if before.scored and tuple(before.losses) in self._front.losses:
            self._front = Front()
            for case in self._book.cases.values():
                if case.trial.scored and case.trial.number != trial.number:
                    self._front.add(case.trial.losses)
        return trial.scored and self._front.add(trial.losses)

    def _ended(
        self, trial: Trial, ended: Ended, message: str, *, best: bool, role: Role
    ) -> TrialEnded:
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
            best=best,
            message=message,
            ignored=ended.ignored,
            peak_bytes=trial.peak_bytes,
            role=role,
        )

    def _learn(self, trial: Trial) -> None:
        if self._gate is not None and trial.peak_bytes:
            self._gate.learn(trial)
