"""Searcher and rungs of a campaign, which stand where they stood even after a kill.

What passes between them and the loop is noted in order, and written in the transaction that has
what came of it. Their states are written now and then, as they hold all that was tried. After a
kill the states are read, and what has passed since then passes again.

Not here: what becomes of a proposal or a verdict (campaign_loop).

Invariant: a searcher is told once of each trial that is final, and once of each rung that a trial
has come to, in the order in which these were written down. What it does to the values that it has
given or been told changes no trial.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastix.errors import SearchError
from elastix.search.pareto import Losses
from elastix.search.rungs import Rungs, Verdict
from elastix.search.trial import Searcher, Selects, Suggestion, Trial, TrialState, ask
from elastix.search.trial_database import TrialDatabase, TrialRow

Note = list[Any]
"""Of something that has passed: a name and what goes with it, as JSON."""


class Advisers:
    """Both, as one loop speaks to them.

    Args:
        searcher: started, not told of anything yet.
        rungs: None: nobody is paused.

    Attributes:
        searcher_name: of its class.
        selects: the searcher, if it is one that selects.
        untold: trials that the searcher has not heard of yet.
        stale: what is written does not lead to where they stand: their states must be written next.
    """

    def __init__(self, searcher: Searcher, rungs: Rungs | None) -> None:
        self._searcher = searcher
        self._rungs = rungs
        self.searcher_name = type(searcher).__name__
        self.selects = searcher if isinstance(searcher, Selects) else None
        hears = getattr(searcher, "hears_of_paused", False)
        self._hears = bool(hears) and self.selects is None
        # Of some rules all follows from the reports, which are kept anyway.
        follows = getattr(rungs, "follows_from_reports", False)
        self._noted = rungs if rungs is not None and not follows else None
        self.untold: list[Trial] = []
        self._lost: list[Suggestion] = []  # it had proposed them, and nobody has written them down
        self.stale = False
        self._notes: list[Note] = []
        self._place = 1

    # ------------------------------------------------------------------ the searcher

    def over(self, trial: Trial) -> None:
        """A trial is final: the searcher will be told."""
        self.untold.append(trial)
        self._notes.append(["over", trial.number])

    def at_rung(self, trial: Trial) -> None:
        """A trial has come to a rung: a searcher that wants to know of it will be told."""
        if self._hears and trial.losses:
            self.untold.append(trial)
            self._notes.append(["rung", trial.to_json()])

    def tell(self) -> None:
        """Tell the searcher of all that it has not heard of."""
        if self.untold:
            self._searcher.tell(copy.deepcopy(self.untold))
            self._notes.append(["tell", len(self.untold)])
            self.untold = []

    def take_lost(self, n: int) -> Sequence[Suggestion]:
        """Up to `n` of those that the searcher had proposed when a kill took the memory of them."""
        taken, self._lost = self._lost[:n], self._lost[n:]
        return taken

    def ask(self, n: int) -> Sequence[Suggestion]:
        """Up to `n` suggestions. SearchError: they are none."""
        asked = ask(self._searcher, n)
        self._notes.append(["ask", n])
        return copy.deepcopy(asked)

    # ------------------------------------------------------------------ rungs

    def report(self, number: int, level: int, losses: Losses) -> Verdict:
        """See Rungs; without any, all go on."""
        if self._rungs is None or not self._counts(losses):
            return Verdict.CONTINUE
        if self._noted is not None:
            self._notes.append(["report", number, level, [repr(loss) for loss in losses]])
        return self._rungs.report(number, level, losses)

    def promotable(self) -> list[int]:
        """See Rungs."""
        return [] if self._rungs is None else self._rungs.promotable()

    def promote(self, number: int) -> None:
        """See Rungs."""
        if self._rungs is not None:
            if self._noted is not None:
                self._notes.append(["promote", number])
            self._rungs.promote(number)

    def drop(self, number: int) -> None:
        """See Rungs."""
        if self._rungs is not None:
            if self._noted is not None:
                self._notes.append(["drop", number])
            self._rungs.drop(number)

    @property
    def levels(self) -> Sequence[int]:
        """After how many reports trials pause, as far as that is known beforehand."""
        levels: Sequence[int] = getattr(self._rungs, "levels", ())
        return levels

    def _counts(self, losses: Losses) -> bool:
        """Whether a report counts: where trials pause, one that is no finite number does not.

        So of whatever else a trial fails, at a rung counts who had a number there.
        """
        return not self.levels or all(map(math.isfinite, losses))

    def judge_anew(self, trial: Trial, reports: Iterable[tuple[int, Losses]]) -> Verdict:
        """All reports of a trial, for rungs that have heard of none; the last verdict."""
        verdict = Verdict.CONTINUE
        if self._rungs is None:
            return verdict
        for level, losses in reports:
            if self._counts(losses):
                verdict = self._rungs.report(trial.number, level, losses)
        if trial.state.is_final:
            self._rungs.drop(trial.number)
        elif trial.state is not TrialState.PAUSED:
            self._rungs.promote(trial.number)  # it is on its way already
        return verdict

    # ------------------------------------------------------------------ what is written

    def states(self, done: int) -> dict[str, Any]:
        """Both states, as facts.

        Args:
            done: how many trials are final; an earlier version goes by that.
        """
        known = done - sum(trial.state.is_final for trial in self.untold)
        facts: dict[str, Any] = {
            "searcher": {
                "state": self._searcher.state_dict(),
                "done": known,
                "place": self._place,
            }
        }
        if self._noted is not None:
            facts["rungs"] = {"state": self._noted.state_dict(), "place": self._place}
        return facts

    def passed(self, *, after_states: bool) -> tuple[int, list[Note]] | None:
        """What has passed since the last transaction, with its place; None for nothing.

        Args:
            after_states: the states go with it, so nothing counts but what is still to be told,
                and what is still to be tried.
        """
        notes = self._notes
        if after_states:
            notes = [
                ["over", trial.number] if trial.state.is_final else ["rung", trial.to_json()]
                for trial in self.untold
            ]
            notes += [["lost", suggestion.to_json()] for suggestion in self._lost]
        return (self._place, notes) if notes else None

    def written(self, passed: tuple[int, list[Note]] | None) -> None:
        """It is in the database."""
        self._notes = []
        self._place += passed is not None
        self.stale = False

    def restore(
        self,
        database: TrialDatabase,
        lines: Sequence[TrialRow],
        *,
        same_searcher: bool,
        same_rungs: bool,
    ) -> bool:
        """Stand where the database says; whether rungs have to be told of all reports.

        Args:
            database: what both were told is there.
            lines: its trials.
            same_searcher: the searcher and its space are those that wrote its state.
            same_rungs: so are the rungs.

        Raises:
            SearchError: one of them cannot read its state.
        """
        of_searcher, of_rungs = database.fact("searcher"), database.fact("rungs")
        rows = database.passed()
        base = 1 if of_searcher is None else of_searcher.get("place")
        self._place = max([base or 1, *(place + 1 for place, _ in rows)])
        whole = [place for place, _ in rows] == [*range(base or 1, self._place)]
        notes = [note for _, found in rows for note in found] if base and whole else []
        known = 0
        trials = {line.trial.number: line for line in lines}
        if same_searcher:
            if of_searcher is not None:
                _load(self._searcher, of_searcher["state"])
                known = of_searcher["done"]
            known = max([known, *self._replay(notes, trials)])
        self.stale = not (same_searcher and same_rungs and base and whole)
        anew = True
        if self._noted is not None and same_rungs and base and whole:
            reported = any(note[0] == "report" for note in notes)
            if of_rungs is not None and "place" in of_rungs:
                _load(self._noted, of_rungs["state"])
                reported = True
            if reported:
                self._rungs_again(notes, self._noted)
            anew = not reported
        later = [line for line in lines if line.role == "search" and (line.done or 0) > known]
        for line in sorted(later, key=lambda line: line.done or 0):
            self.over(line.trial)
        if not same_searcher or base is None:
            for line in lines:
                if line.role == "search" and line.trial.results and not line.done:
                    self.at_rung(line.trial.but(state=TrialState.PAUSED))
        return anew

    def _replay(self, notes: Sequence[Note], trials: Mapping[int, TrialRow]) -> list[int]:
        """Tell and ask the searcher again; the places of the final trials that were told of."""
        known = {line.trial.suggestion.key for line in trials.values()}
        waiting: list[Trial | None] = []
        done = []
        for name, *rest in notes:
            if name == "over":
                line = trials.get(rest[0])  # somebody may have taken it out
                waiting.append(None if line is None else line.trial)
                done.append(0 if line is None else line.done or 0)
            elif name == "rung":
                waiting.append(Trial.from_json(rest[0]))
            elif name == "tell":
                told, waiting = waiting[: rest[0]], waiting[rest[0] :]
                self._searcher.tell([copy.deepcopy(trial) for trial in told if trial is not None])
            elif name == "ask":
                asked = copy.deepcopy(ask(self._searcher, rest[0]))
                self._lost += [each for each in asked if each.key not in known]
            elif name == "lost":
                each = Suggestion(**rest[0])
                self._lost += [] if each.key in known else [each]
        self.untold = [trial for trial in waiting if trial is not None]
        return done

    def _rungs_again(self, notes: Sequence[Note], rungs: Rungs) -> None:
        for name, *rest in notes:
            if name == "report":
                rungs.report(rest[0], rest[1], tuple(map(float, rest[2])))
            elif name == "promote":
                rungs.promote(rest[0])
            elif name == "drop":
                rungs.drop(rest[0])


def _load(adviser: Searcher | Rungs, state: Mapping[str, Any]) -> None:
    try:
        adviser.load_state_dict(state)
    except Exception as error:  # whatever a class of now does with a state of then
        name = type(adviser).__name__
        raise SearchError(
            f"{name} cannot read the state that it has in the campaign's database: "
            f"{type(error).__name__}: {error}. No trial was started, and none is lost. Take the "
            f"{name} that wrote the state; or give the class another name: one that is new to the "
            "campaign is told of all its trials."
        ) from error
