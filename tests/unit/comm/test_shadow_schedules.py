"""Schedules in which all members of a group are lost, and a shadow goes on in their place.

All that law 6 asks for holds; and what the journal has, a shadow has that follows the first member.
"""

from collections import Counter

import pytest

from elastix.errors import TrainError
from tests.unit.comm.group_simulation import Violation, chooser, scenario_of
from tests.unit.comm.shadow_simulation import ShadowSimulation


def run_schedules(seeds: range, world=ShadowSimulation, **fixed) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        choose = chooser(seed)
        scenario = scenario_of(choose, founding_kills=False, all_end=False, **fixed)
        try:
            seen += world(scenario, choose).run().seen
        except (Violation, TrainError, KeyError) as error:
            raise Violation(f"schedule {seed}, {scenario}: {error}") from error
    return seen


SLOW = pytest.mark.slow
FEW = {"workers": 2, "min_workers": 1, "joiners": 1, "batch_size": 8, "kill_every": 30}


@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param({**FEW, "kills": 4, "replace": True}, id="replaced"),
        pytest.param({**FEW, "kills": 2, "replace": False}, id="alone"),
        pytest.param({**FEW, "workers": 1, "kills": 3, "evaluate": True}, id="evaluations"),
        pytest.param({**FEW, "kills": 4, "slices": 4}, id="slices"),
        pytest.param({**FEW, "kills": 3, "hiccups": 2}, id="hiccups"),
        pytest.param({**FEW, "kills": 4, "rollback": True}, id="rollback"),
        pytest.param({**FEW, "kills": 4, "joiners": 2, "spares": True}, id="spares"),
    ],
)
@pytest.mark.parametrize("schedules", [300, pytest.param(5000, marks=SLOW)])
def test_the_run_goes_on_from_a_shadow(fixed, schedules):
    seen = run_schedules(range(schedules), length=40, epochs=2, **fixed)
    assert seen["succeeded"] > 5, seen


@pytest.mark.parametrize(
    "fixed",
    [
        pytest.param({"kills": 2}, id="few"),
        pytest.param({"kills": 5, "kill_every": 15}, id="many"),
        pytest.param({"kills": 3, "hiccups": 3}, id="hiccups"),
        pytest.param({"kills": 3, "slices": 4}, id="slices"),
        pytest.param({"kills": 3, "leaves": 2}, id="leavers"),
        pytest.param({"kills": 3, "rollback": True, "evaluate": True}, id="rollback"),
    ],
)
@pytest.mark.parametrize("schedules", [300, pytest.param(3000, marks=SLOW)])
def test_a_shadow_takes_the_seat_of_one_that_died_with_what_it_has(fixed, schedules):
    """And is still there if all die while it is on its way in."""
    world = {**FEW, "joiners": 2, "spares": True, "replace": True, "length": 60}
    seen = run_schedules(range(schedules), epochs=2, **{**world, **fixed})
    assert seen["took a seat"] > 10, seen
    assert seen["succeeded"] > 0, seen


@pytest.mark.parametrize(
    ("fixed", "seed"),
    [
        # A shadow had a new State, not compared yet, when it was called in; the call was taken
        # back, all were lost, and it began the run anew.
        pytest.param({"length": 40, "kills": 4}, 1416, id="spares"),
        pytest.param({"length": 60, "kills": 3, "slices": 4, "replace": True}, 2265, id="slices"),
        pytest.param({"length": 60, "kills": 3, "leaves": 2, "replace": True}, 809, id="leavers"),
    ],
)
def test_schedules_that_were_lost_once(fixed, seed):
    run_schedules(range(seed, seed + 1), epochs=2, **{**FEW, "joiners": 2, "spares": True, **fixed})


def test_one_that_follows_another_than_the_first_would_lack_steps():
    """So the schedules can tell."""

    class Late(ShadowSimulation):
        def conclude(self, worker, want):
            super().conclude(worker, want)
            self.journaled += worker.protocol.group.members[0] == worker.me  # before all are told

    fixed = {**FEW, "kills": 3, "length": 40}
    with pytest.raises(Violation, match="journaled"):
        run_schedules(range(300), Late, **fixed)
