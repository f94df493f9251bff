"""Law 6 for workers that are crews; and that nobody waits for ever within one.

What test_law6 shows of workers is shown here of crews: no two survivors disagree, on no rail. The
simulation has user code in which the processes of a worker wait for each other after each
operation.
"""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from elastix.comm.protocol.crew import Crew, Going
from elastix.comm.protocol.follower import Follower
from elastix.comm.protocol.group_protocol import GroupProtocol
from elastix.comm.protocol.wants import Say, Seat
from elastix.errors import TrainError
from tests.unit.comm.crew_simulation import CrewScenario, CrewSimulation, FlatSimulation
from tests.unit.comm.group_simulation import Violation, chooser, scenario_of

KILLS_ALONE = {"joiners": 0, "replace": False, "min_workers": 1, "founding_kills": False}


def without(*names: str, **fixed) -> dict:
    return {**{k: v for k, v in KILLS_ALONE.items() if k not in names}, **fixed}


def run_schedules(seeds: range, fixed: dict, simulation=CrewSimulation, **broken) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        choose = chooser(seed)
        fields = {"crew": 2 + choose(2), "all_end": False, **fixed}
        crew = fields.pop("crew")
        plain = vars(scenario_of(choose, **fields))
        scenario = CrewScenario(**plain, crew=crew)
        try:
            seen += simulation(scenario, choose, **broken).run().seen
        except (Violation, TrainError, KeyError) as error:
            raise Violation(f"schedule {seed}, {scenario}: {error!r}") from error
    return seen


@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param(KILLS_ALONE, id="kills alone"),
        pytest.param(without("joiners", "replace", kill_every=25), id="kills and joiners"),
        pytest.param(without("joiners", "replace", "min_workers"), id="groups below their minimum"),
        pytest.param(without("joiners", "replace", hiccups=2), id="hiccups"),
        pytest.param({"kills": 4, "kill_every": 25}, id="kills in the founding"),
        pytest.param({"kills": 0, "leaves": 3, "kill_every": 20}, id="leaves alone"),
        pytest.param({"hiccups": 1, "rollback": True}, id="rollback"),
        pytest.param({"hiccups": 1, "leaves": 1}, id="everything"),
        pytest.param(
            without("joiners", "replace", "min_workers", kill_every=15, slices=8),
            id="slices: kills and joiners",
        ),
        pytest.param(
            {"kills": 3, "hiccups": 1, "leaves": 1, "kill_every": 20, "slices": 5},
            id="slices: everything",
        ),
        pytest.param({"hiccups": 1, "rollback": True, "slices": 3}, id="slices: rollback"),
    ],
)
@pytest.mark.parametrize(
    "schedules",
    [120, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_no_two_survivors_disagree_on_any_rail(fixed, schedules):
    run_schedules(range(schedules), fixed)


def test_the_schedules_reach_every_way_through_a_recovery():
    seen = run_schedules(range(250), without("joiners", "replace", leaves=1, evaluate=True))
    ways = ("accepted", "passed on", "reduced again", "between steps", "joined", "freed")
    for what in (*ways, "killed a follower", "killed a speaker", "released", "followers released"):
        assert seen[what] >= 5, (what, seen)


# ------------------------------------------------------------- the simulation sees what is broken


def test_processes_that_all_meet_each_other_wait_for_ever():
    fixed = without(workers=4, crew=2, kills=1)
    with pytest.raises(Violation, match="nothing can happen any more"):
        run_schedules(range(2000), fixed, FlatSimulation)


def test_evaluations_in_which_places_gather_parts_are_computed_by_all_of_them():
    seen = run_schedules(range(150), without("joiners", "replace", evaluate=True, hiccups=1))
    assert seen["computed together"] >= 300, seen
    assert seen["freed"] >= 5, seen


def test_slices_of_lost_workers_are_computed_by_all_places_of_another():
    fixed = without(kill_every=12, slices=6, kills=3, workers=4, length=24)
    seen = run_schedules(range(150), fixed)
    assert seen["taken over together"] >= 30, seen
    for what in ("killed a follower", "killed a speaker", "freed", "accepted"):
        assert seen[what] >= 5, (what, seen)


class TakesOverAlone(GroupProtocol):
    """Computes slices of lost workers, and says nothing of it."""

    def _compute(self, group, operation):
        for want in super()._compute(group, operation):
            if not isinstance(want, Say):
                yield want


class LooksForNewsFirst(Follower):
    """Computes no slices for a group that is not going to be."""

    def _take_over(self, order):
        if not self._outdated:
            yield from super()._take_over(order)


class Complete:
    """An operation that says it lacks nothing."""

    def __init__(self, operation):
        self._operation = operation

    def __getattr__(self, name):
        return getattr(self._operation, name)

    def lacks(self, members):
        return False


class ReducesWhatItHas(Follower):
    """Does not wait until it is told to compute what it lacks."""

    def _attempt(self, operation):
        yield from super()._attempt(Complete(operation))


class TakesOverForTheNewest(Follower):
    """Computes what falls to it among the newest members that it has heard of."""

    def _take_over(self, order):
        for want in super()._take_over(order):
            yield want._replace(members=self._inbox.members[max(self._inbox.members)])


@pytest.mark.parametrize(
    "broken",
    [
        {"protocol": TakesOverAlone},
        {"follower": LooksForNewsFirst},
        {"follower": ReducesWhatItHas},
        {"follower": TakesOverForTheNewest},
    ],
    ids=lambda broken: next(iter(broken.values())).__name__,
)
def test_a_broken_way_to_hand_slices_over_within_crews_is_caught(broken):
    with pytest.raises((Violation, IndexError)):
        run_schedules(range(3000), without(slices=6, kills=3, kill_every=12), **broken)


class SaysNothingOfEvaluations(GroupProtocol):
    """Evaluates by itself."""

    def _attempt(self, operation):
        alone = SimpleNamespace(kind=operation.kind, lacks=operation.lacks, together=False)
        yield from super()._attempt(alone if operation.together else operation)


class LooksForNews(Follower):
    """Does not contribute to what will be done again anyway."""

    def _contribute(self, order):
        if not self._outdated:
            yield from super()._contribute(order)


class DividesByItsOwnNews(Follower):
    """Takes the newest members that it has heard of for those of the round."""

    def _contribute(self, order):
        for want in super()._contribute(order):
            newest = max(self._inbox.members)
            members = self._inbox.members[newest]
            yield want._replace(group=Seat(newest, members, 0))


@pytest.mark.parametrize("follower", [LooksForNews, DividesByItsOwnNews])
def test_a_follower_that_goes_by_its_own_news_in_evaluations_is_caught(follower):
    with pytest.raises(Violation, match="nothing can happen any more"):
        run_schedules(range(2000), without(evaluate=True), follower=follower)


def test_a_speaker_that_evaluates_without_its_crew_is_caught():
    with pytest.raises(Violation, match=r"goes round in circles|nothing can happen any more"):
        run_schedules(range(50), without(evaluate=True), protocol=SaysNothingOfEvaluations)


class TellsAllAlike(GroupProtocol):
    """Tells its followers what was decided, also if they are behind and something else holds."""

    def _go_on(self, group, decision):
        self.decided = decision
        yield from super()._go_on(group, decision)

    def _say_going(self):
        going = Going(self.generation, self.hand.number, self.decided.complete)
        yield from self._crew.say(going)


def says_that_nothing_stands(word):
    return replace(word, complete=0) if isinstance(word, Going) else word


class SplitsByItsOwnNews(Follower):
    """By the newest generation that it has heard of, not by what the speaker says."""

    @property
    def planned(self):
        return self._inbox.members[max(self._inbox.members)]


class ForgetsOnNews(Follower):
    """Drops its buckets when it hears of a newer generation, and not on its speaker's word."""

    def _attempt(self, operation):
        if self._outdated:
            self.hand.complete = 0
        yield from super()._attempt(operation)


class KeepsItsBuckets(Follower):
    def _go_on(self, order):
        before = self.hand.complete
        super()._go_on(order)
        self.hand.complete = before or self.hand.complete


class ForgetsAtMeetings(Follower):
    def _meet(self, order):
        self.hand.complete = 0
        yield from super()._meet(order)


class WaitsForNobody(Crew):
    def held(self, operation, generation, kind):
        return True


class HearsOldNews(Crew):
    """Takes what was held in any generation for what is held in this one."""

    def held(self, operation, generation, kind):
        places = range(1, self.size)
        return all(p in self._held and self._held[p].operation == operation for p in places)


BROKEN = {
    "tells who is behind what the others do": {"protocol": TellsAllAlike},
    "does not say what stands": {"retold": says_that_nothing_stands},
    "splits by its own news": {"follower": SplitsByItsOwnNews},
    "forgets its buckets on news": {"follower": ForgetsOnNews},
    "keeps old buckets when all reduce again": {"follower": KeepsItsBuckets},
    "forgets its buckets at a meeting": {"follower": ForgetsAtMeetings},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_caught(broken):
    with pytest.raises(Violation):
        run_schedules(range(3000), KILLS_ALONE, **broken)


@pytest.mark.parametrize("broken", [WaitsForNobody, HearsOldNews])
def test_a_speaker_that_does_not_wait_for_its_crew_is_caught(broken, monkeypatch):
    monkeypatch.setattr("tests.unit.comm.crew_simulation.Crew", broken)
    with pytest.raises(Violation):
        run_schedules(range(3000), KILLS_ALONE)
