"""Law 6: no two survivors ever disagree on whether an operation counts, nor on its outcome.

Each schedule also shows that collectives of different kinds never meet, that a step never adds up
gradients of different plans, that every sample is committed exactly once, and that nobody waits
for ever. The protocol that runs is the one that ships; for the world around it see
group_simulation.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastix.comm.protocol.group_protocol import GroupProtocol
from elastix.comm.protocol.membership import Membership, Roster
from elastix.comm.protocol.recovery import Decision, decide
from elastix.comm.protocol.wants import Compute
from elastix.errors import TrainError
from tests.unit.comm.group_simulation import (
    Scenario,
    Violation,
    chooser,
    from_bytes,
    scenario_of,
    simulate,
)

KILLS_ALONE = {
    "joiners": 0,
    "replace": False,
    "min_workers": 1,
    "founding_kills": False,
    "all_end": False,
}


def without(*names: str, **fixed) -> dict:
    """Scenarios in which less is ruled out."""
    return {**{k: v for k, v in KILLS_ALONE.items() if k not in names}, **fixed}


def run_schedules(seeds: range, fixed: dict, **broken) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        choose = chooser(seed)
        scenario = scenario_of(choose, **fixed)
        try:
            seen += simulate(scenario, choose, **broken).seen
        except (Violation, TrainError, KeyError) as error:
            raise Violation(f"schedule {seed}, {scenario}: {error}") from error
    return seen


@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param(KILLS_ALONE, id="kills alone"),
        pytest.param(
            without("joiners", "replace", "all_end", kill_every=25), id="kills and joiners"
        ),
        pytest.param(
            without("joiners", "replace", "all_end", "min_workers"), id="groups below their minimum"
        ),
        pytest.param(without("joiners", "replace", "all_end", hiccups=2), id="hiccups"),
        pytest.param({"kills": 4, "kill_every": 25}, id="kills in the founding"),
        pytest.param({"kills": 0, "leaves": 3, "kill_every": 20}, id="leaves alone"),
        pytest.param({"leaves": 2, "kill_every": 20, "spares": True}, id="kills, leaves, spares"),
        pytest.param({"hiccups": 1, "rollback": True}, id="rollback"),
        pytest.param({"hiccups": 1, "leaves": 1}, id="everything"),
        pytest.param(
            without("joiners", "replace", "min_workers", "all_end", kill_every=15, slices=8),
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
    [200, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_no_two_survivors_disagree(fixed, schedules):
    run_schedules(range(schedules), fixed)


@pytest.mark.parametrize(
    ("fixed", "seed"),
    [
        # A leaver whose last round failed went on alone when the others had finished without it,
        pytest.param({"hiccups": 1, "leaves": 1}, 7820, id="left and led"),
        # or met a newcomer, which had no result of an operation before its time;
        pytest.param({"hiccups": 1, "leaves": 1}, 18711, id="left and met"),
        # and of those who waited for more members each entered another proposal.
        pytest.param({"hiccups": 1, "leaves": 1}, 15435, id="two proposals"),
        pytest.param({"leaves": 2, "kill_every": 20, "spares": True}, 9101, id="two leave"),
    ],
)
def test_schedules_that_were_lost_once(fixed, seed):
    run_schedules(range(seed, seed + 1), fixed)


def test_the_schedules_reach_every_way_through_a_recovery():
    fixed = without("joiners", "replace", "min_workers", "all_end", leaves=1)
    seen = run_schedules(range(2000), fixed)
    ways = ("accepted", "passed on", "reduced again", "between steps", "paused", "fenced", "joined")
    ways = (*ways, "released", "followed")
    for what in ways:
        assert seen[what] >= 10, (what, seen)


def test_schedules_hand_slices_over_and_kill_those_who_compute_them():
    fixed = without("all_end", kill_every=12, slices=8, kills=3, workers=5, length=24)
    seen = run_schedules(range(1000), fixed)
    for what in ("handed over", "killed while it computed for another", "accepted", "passed on"):
        assert seen[what] >= 30, (what, seen)


def test_nobody_disagrees_in_runs_that_last():
    """Long enough for joiners to come in, and for others to go on without one that was let go."""
    fixed = {"joiners": 2, "min_workers": 1, "kills": 3, "hiccups": 3, "leaves": 1}
    fixed |= {"kill_every": 60, "length": 90, "batch_size": 9, "epochs": 2, "evaluate": True}
    seen = run_schedules(range(250), fixed)
    for what in ("followed", "lonely", "fenced", "stream lost", "released"):
        assert seen[what] >= 20, (what, seen)


@settings(max_examples=300)
@given(
    workers=st.integers(2, 5),
    kills=st.integers(0, 4),
    length=st.integers(1, 12),
    evaluate=st.booleans(),
    entropy=st.binary(min_size=20, max_size=400),
)
def test_no_two_survivors_disagree_in_schedules_that_can_be_shrunk(
    workers, kills, length, evaluate, entropy
):
    scenario = Scenario(
        workers=workers,
        kills=kills,
        kill_every=8,
        length=length,
        batch_size=workers + 3,
        evaluate=evaluate,
        replace=False,
        founding_kills=False,
        all_end=False,
    )
    simulate(scenario, from_bytes(entropy))


@pytest.mark.parametrize(
    ("workers", "kills", "steps"),
    [(2000, 20, 2), pytest.param(4000, 5, 1, marks=pytest.mark.slow)],
)
def test_no_two_survivors_disagree_among_thousands_of_workers(workers, kills, steps):
    scenario = Scenario(
        workers=workers,
        kills=kills,
        kill_every=workers * 8 * steps // kills,
        length=2 * workers * steps,
        batch_size=2 * workers,
        replace=False,
        founding_kills=False,
        all_end=False,
        weights=(1, 8, 4, workers),
    )
    simulation = simulate(scenario, chooser(workers))
    assert simulation.seen["killed"] == kills
    ways = ("accepted", "passed on", "reduced again", "between steps")
    assert sum(simulation.seen[way] for way in ways) >= workers - kills
    assert simulation.roster.over


# ------------------------------------------------------------- the simulation sees what is broken


def accepts_what_some_hold(positions, members) -> Decision:
    decision = decide(positions, members)
    front = [p for p in positions if p.operation == decision.operation]
    return replace(decision, complete=max((p.complete for p in front), default=0))


def goes_back_to_the_last(positions, members) -> Decision:
    decision = decide(positions, members)
    holders = [p.operation for p in positions if p.has_state]
    return replace(decision, operation=min(holders, default=0), source=None)


def passes_nothing_on(positions, members) -> Decision:
    return replace(decide(positions, members), source=None)


def plans_for_the_own_generation(positions, members) -> Decision:
    decision = decide(positions, members)
    return replace(decision, plan=decision.plan + bool(decision.plan))


class KeepsItsBuckets(GroupProtocol):
    def _go_on(self, group, decision):
        before = self.hand.complete
        yield from super()._go_on(group, decision)
        self.hand.complete = before or self.hand.complete


class HandsNothingOver(GroupProtocol):
    def _compute(self, group, operation):
        yield from ()


class ComputesForWhoeverIsThere(GroupProtocol):
    """What falls to it in the plan, whoever of that is left."""

    def _compute(self, group, operation):
        while operation.lacks((self._me,)):
            yield Compute((self._me,))


class KeepsTheDead(Roster):
    def lost(self, worker: int) -> Membership | None:
        super().lost(worker)
        return None


BROKEN = {
    "accepts a step when some hold every bucket": {"decide": accepts_what_some_hold},
    "goes back to the last operation": {"decide": goes_back_to_the_last},
    "passes no result on": {"decide": passes_nothing_on},
    "splits a batch in hand anew": {"decide": plans_for_the_own_generation},
    "keeps old buckets when all reduce again": {"protocol": KeepsItsBuckets},
    "keeps the weight when all reduce again": {"keep_weight": True},
    "never takes the dead out": {"roster": KeepsTheDead},
}


@pytest.mark.parametrize("broken", [HandsNothingOver, ComputesForWhoeverIsThere])
def test_a_broken_way_to_hand_slices_over_is_caught(broken):
    with pytest.raises(Violation):
        run_schedules(range(4000), without(slices=6), protocol=broken)


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_caught(broken):
    with pytest.raises(Violation):
        run_schedules(range(4000), KILLS_ALONE, **broken)
