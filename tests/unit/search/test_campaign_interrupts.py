"""Ctrl-C at every line of a campaign's loop, its trial database and its rungs."""

import os
import random
import tempfile
from pathlib import Path

import pytest

from elastix.config import Budget
from elastix.errors import NotFound
from elastix.search import (
    advisers,
    campaign_loop,
    rungs,
    trial_book,
    trial_database,
    trial_endings,
)
from elastix.search.trial_database import TrialDatabase
from tests.interrupts import CtrlC
from tests.search_parts import Drawing
from tests.virtual import Rig, climbs, state_of

BUDGET = Budget(trials=9)
LEVELS = (1, 2, 4)
MODULES = (advisers, campaign_loop, rungs, trial_book, trial_database, trial_endings)
FILES = (*(module.__file__ for module in MODULES), __file__)


class Remembering(Drawing):
    """Its state says whom it was told of. It hears of one trial after the other."""

    def tell(self, trials):
        known = self.told
        for trial in trials:
            super().tell([trial])
        assert len(set(known)) == len(known), "told of a trial again"

    def state_dict(self):
        return {**super().state_dict(), "told": list(self.told)}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.told = list(state_dict["told"])


def play(work):
    """Some trials fail, the others climb from rung to rung."""
    return ([], "raised") if work.config["depth"] == 3 else climbs(4)(work)


def make_rig(folder):
    asha = lambda: rungs.Asha(first=LEVELS[0], eta=2, last=LEVELS[-1])  # noqa: E731
    return Rig(folder, play, searcher=Remembering, rungs=asha, slots=3, give_up_after=99)


def interrupt(folder, ctrl_c):
    """One run, cut off. Returns its clock."""
    rig = make_rig(folder)
    try:
        with ctrl_c:
            rig.run(BUDGET)
    except KeyboardInterrupt:
        rig.loop = None  # nothing keeps the database now, nor a lock left locked
        return rig.clock
    raise AssertionError("it was not interrupted")


def written(folder):
    """Its trials, and the States that its paused trials have gone beyond."""
    try:
        with TrialDatabase(folder, read_only=True) as there:
            return {line.trial.number: line for line in there.lines()}, there.superseded()
    except NotFound:  # it had not begun
        return {}, []


def check(folder, ctrl_c):
    clock = interrupt(folder, ctrl_c)
    before, superseded = written(folder)
    final = {number: line for number, line in before.items() if line.done}
    kept = {line.trial.ref for line in before.values()}
    assert not kept & set(superseded), "a State that is needed would be retired"
    again = make_rig(folder)
    again.clock = clock
    trials = again.run(BUDGET)
    after, superseded = written(folder)
    assert len(trials) == len({trial.suggestion.key for trial in trials}) == BUDGET.trials
    assert final.items() <= after.items(), "a final trial was lost or changed"
    assert not set(again.executor.ran) & set(final), "a final trial ran again"
    reached = {number: len(line.trial.results) for number, line in after.items()}
    outgrown = {state_of(n, level) for n in reached for level in LEVELS if level < reached[n]}
    assert outgrown, "no trial was promoted"
    assert set(superseded) == outgrown, "a State that nobody needs would stay stored"
    assert sorted(again.searcher.told) == sorted(n for n, line in after.items() if line.done)


def test_a_searcher_that_raises_midway_is_told_again_from_its_last_whole_state(tmp_path):
    class Clumsy(Remembering):
        def tell(self, trials):
            super().tell(trials[:1])
            rig.clock.now += 100.0  # time for its state to be written
            raise RuntimeError("a bug in it")

    rig = make_rig(tmp_path)
    rig.make_searcher = Clumsy
    with pytest.raises(RuntimeError, match="a bug"):
        rig.run(BUDGET)
    rig.make_searcher = Remembering
    rig.run(BUDGET)
    assert sorted(rig.searcher.told) == [line.trial.number for line in rig.lines if line.done]


@pytest.fixture
def folder(tmp_path):
    """In memory where there is such a file system: thousands of commits wait for no disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as found:
        yield Path(found)


@pytest.mark.parametrize("seed", [1, pytest.param(range(2, 12), marks=pytest.mark.slow)])
def test_ctrl_c_at_any_line_loses_nothing_and_repeats_nothing(folder, seed):
    """Before each line once, in one of its turns."""
    rig = make_rig(folder / "whole")
    with CtrlC(FILES) as whole:
        rig.run(BUDGET)
    assert len(whole.visits) > 250
    for each in [seed] if isinstance(seed, int) else seed:
        rng = random.Random(each)
        for number, (place, visits) in enumerate(sorted(whole.visits.items())):
            visit = rng.randint(1, visits)
            print(f"{place}, visit {visit} of {visits}")
            check(folder / f"{each}-{number}", CtrlC(FILES, place, visit))
