"""Schedules in which controllers are killed: law 6 holds, whoever is found with the State."""

from collections import Counter

import pytest

from elastix.comm.protocol.group_protocol import GroupProtocol
from elastix.comm.protocol.operation_in_hand import InHand
from elastix.comm.protocol.recovery import Decision, decide
from elastix.errors import TrainError
from tests.unit.comm.group_simulation import Violation, chooser, scenario_of
from tests.unit.comm.takeover_simulation import TakeoverSimulation

SLOW = pytest.mark.slow
FEW = {"workers": 2, "min_workers": 1, "joiners": 2, "batch_size": 6, "length": 60}


def run_schedules(seeds: range, fixed: dict, world=TakeoverSimulation, **broken) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        choose = chooser(seed)
        scenario = scenario_of(choose, founding_kills=False, **fixed)
        try:
            seen += world(scenario, choose, takeovers=2, **broken).run().seen
        except (Violation, TrainError, KeyError) as error:
            raise Violation(f"schedule {seed}, {scenario}: {error}") from error
    return seen


@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param({**FEW, "kills": 2, "kill_every": 30}, id="joiners"),
        pytest.param({**FEW, "kills": 1, "evaluate": True}, id="evaluations"),
        pytest.param({**FEW, "kills": 2, "slices": 4}, id="slices"),
        pytest.param({**FEW, "kills": 2, "rollback": True}, id="rollback"),
        pytest.param({"kills": 2}, id="kills"),
        pytest.param({"kills": 1, "hiccups": 2}, id="hiccups"),
        pytest.param({"kills": 1, "leaves": 2, "kill_every": 20, "spares": True}, id="leavers"),
    ],
)
@pytest.mark.parametrize(
    "schedules", [120, pytest.param(10_000, marks=[SLOW, pytest.mark.timeout(900)])]
)
def test_no_two_disagree_under_another_controller(fixed, schedules):
    seen = run_schedules(range(schedules), fixed)
    assert seen["another controller"] > schedules / 10, seen


class TakesItselfForNew(GroupProtocol):
    """It forgets at the door what it has, although it has passed for one that has the State."""

    def _enter(self, membership, joined=None):
        try:
            yield from super()._enter(membership, joined)
        except BaseException:
            if joined is not None:
                self.hand = InHand()
                self.joiner.has_followed = False
            raise


def takes_nobody_for_gone(positions, members) -> Decision:
    """Whoever is one operation behind is told how that ended, also if it had no part in it."""
    whole = [p if p.complete or not p.has_state else _with_all(p) for p in positions]
    return decide(whole, members)


def _with_all(position):
    return type(position)(position.operation, 1, position.plan, position.kind, position.processor)


class KnowsOfNoLoss(TakeoverSimulation):
    """Its controllers take whoever is there for a member, though an earlier one took it out."""

    def knows(self, worker):
        return False


@pytest.mark.parametrize(
    "broken",
    [{"protocol": TakesItselfForNew}, {"decide": takes_nobody_for_gone}, {"world": KnowsOfNoLoss}],
    ids=["at the door", "behind", "taken out"],
)
def test_what_is_broken_is_caught(broken):
    with pytest.raises(Violation):
        run_schedules(range(4000), {**FEW, "kills": 2, "kill_every": 30}, **broken)
