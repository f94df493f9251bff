"""A campaign's loop with an executor that lives in virtual time, for its tests."""

from collections import Counter

from elastix.search.campaign_loop import Loop, LoopTerms
from elastix.search.executors.executor import Ended, Work, WorkReport
from elastix.search.trial import Objectives
from elastix.search.trial_database import TrialDatabase
from elastix.state import Ref
from tests.search_parts import SPACE, Drawing


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def state_of(number, reports):
    """The State that a trial leaves after so many reports."""
    return Ref(f"{number:032x}{reports:032x}")


class Virtual:
    """Runs work in virtual time; `play(work)` says what becomes of it.

    A play is a list of reports, then how it ends. Work takes a second a report, and one at least.
    """

    def __init__(self, clock, play, slots=2):
        self.clock = clock
        self.play = play
        self.slots = slots
        self.live = {}
        self.ran = []
        self.halted = []

    @property
    def room(self):
        return self.slots - len(self.live)

    def submit(self, work):
        assert work.number not in self.live
        assert self.room > 0
        self.ran.append(work.number)
        reports, kind = self.play(work)
        self.live[work.number] = (work, list(reports), kind, 0)

    def poll(self, timeout_s):
        self.clock.now += timeout_s
        news = []
        for number, (work, reports, kind, told) in list(self.live.items()):
            if number in self.halted:
                kind, reports = "halted", reports[:told]
            if told < len(reports):
                if told + 1 < len(reports):
                    news.append(WorkReport(number=number, seq=told, metrics=reports[told]))
                told += 1
                self.live[number] = (work, reports, kind, told)
            if told >= len(reports):
                del self.live[number]
                ref = state_of(number, len(reports)) if kind in ("finished", "paused") else None
                results = dict(enumerate(reports))
                fields = kind if isinstance(kind, dict) else {"kind": kind}
                ended = {"number": number, "results": results, "ref": ref, **fields}
                news.append(Ended(epochs=len(reports), worker="virtual", **ended))
        return news

    def halt(self, number):
        self.halted.append(number)


def finishes(work):
    return [{"score": work.config["x"]}], "finished"


class Rig:
    """A campaign in a folder: `run` may be called again, as after a crash."""

    def __init__(self, folder, play=finishes, searcher=None, rungs=None, slots=2, **terms):
        self.folder = folder
        self.play = play
        self.make_searcher = searcher or Drawing
        self.rungs = rungs
        self.slots = slots
        self.terms = {"objectives": Objectives.of("score"), **terms}
        self.clock = Clock()
        self.works = []
        self.loop = None

    def make_work(self, trial, role, rung):
        work = Work(
            number=trial.number,
            name=role,
            config=trial.config,
            seed=0,
            until_reports=rung,
            memory_bytes=trial.memory_bytes,
            predicted_bytes=trial.predicted_bytes,
        )
        self.works.append((role, work))
        return work

    def run(self, budget, **given):
        self.searcher = self.make_searcher()
        self.searcher.start(SPACE, objectives=1, seed=1)
        self.events = []
        self.executor = Virtual(self.clock, given.get("play", self.play), self.slots)
        rungs = self.rungs() if self.rungs else None
        with TrialDatabase(self.folder) as database:
            self.loop = Loop(
                LoopTerms(**self.terms, budget=budget, enqueued=given.get("enqueued", ())),
                database,
                self.searcher,
                rungs,
                self.executor,
                self.make_work,
                self.events.append,
                self.clock,
                given.get("gate"),
            )
            self.known = self.loop.restore(given.get("same", True), given.get("same_rungs", True))
            try:
                self.loop.run()
            finally:
                self.lines = database.lines()
        return [line.trial for line in self.lines]

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def climbs(levels=9):
    """Reports its x until it is paused or through; goes on where it was."""
    reached = Counter()

    def play(work):
        stop = min(levels, work.until_reports or levels)
        reached[work.number] = stop
        return [{"score": work.config["x"]}] * stop, "paused" if stop < levels else "finished"

    return play
