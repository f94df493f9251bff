"""Under the conductor that ships nothing is lost, doubled or stuck, whoever is killed."""

from collections import Counter
from dataclasses import replace

import pytest

from elastix.comm.protocol.membership import Roster
from elastix.errors import TrainError
from elastix.train.control.run_state import RunState
from tests.unit.comm.group_simulation import Violation, chooser, scenario_of
from tests.unit.train.led_simulation import LedSimulation

MANY = [pytest.mark.slow, pytest.mark.timeout(900)]
FEW = {"workers": 2, "min_workers": 1, "joiners": 2, "batch_size": 6, "length": 40}
SHADOWED = {**FEW, "spares": True, "kill_every": 40}


def run_schedules(
    seeds: range,
    fixed: dict,
    shadows: int,
    takeovers: int,
    stops: bool = False,
    flips: int = 0,
    voids: int = 0,
    silent: int = 0,
) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        choose = chooser(seed)
        scenario = scenario_of(choose, **fixed)
        options = takeovers, shadows, stops, flips, voids, silent
        try:
            seen += LedSimulation(scenario, choose, *options).run().seen
        except (Violation, TrainError, KeyError) as error:
            raise Violation(f"schedule {seed}, {scenario}: {error}") from error
    return seen


@pytest.mark.parametrize(
    ("fixed", "shadows"),
    [
        pytest.param({**FEW, "kills": 2}, 0, id="joiners"),
        pytest.param({**FEW, "kills": 2, "kill_every": 40, "rollback": True}, 0, id="rollback"),
        pytest.param({**FEW, "kills": 2, "kill_every": 40, "slices": 4}, 0, id="slices"),
        pytest.param({"kills": 1, "kill_every": 15, "length": 8, "epochs": 1}, 0, id="founding"),
        pytest.param({"kills": 2, "kill_every": 40}, 0, id="kills"),
        pytest.param({"kills": 1, "hiccups": 2}, 0, id="hiccups"),
        pytest.param({"kills": 1, "leaves": 2, "kill_every": 40, "spares": True}, 0, id="leavers"),
        pytest.param({"kills": 2, "kill_every": 30, "replace": False}, 0, id="not replaced"),
        pytest.param({**SHADOWED, "kills": 3}, 1, id="shadow"),
        pytest.param({**SHADOWED, "kills": 4}, 2, id="shadows"),
        pytest.param({**SHADOWED, "kills": 2, "leaves": 2}, 1, id="shadow and leavers"),
    ],
)
@pytest.mark.parametrize("takeovers", [0, 2])
@pytest.mark.parametrize("schedules", [40, pytest.param(3000, marks=MANY)])
def test_nothing_is_lost_or_told_twice_under_any_conductor(fixed, shadows, takeovers, schedules):
    seen = run_schedules(range(schedules), fixed, shadows, takeovers)
    failed = seen["failed"] if not fixed.get("replace", True) else 0
    assert seen["finished"] + failed == schedules, seen
    assert seen["another controller"] >= takeovers * schedules / 2, seen


@pytest.mark.parametrize(
    ("fixed", "shadows"),
    [
        pytest.param({**FEW, "kills": 2, "leaves": 2}, 0, id="joiners"),
        pytest.param(
            {**FEW, "kills": 1, "kill_every": 30, "leaves": 2, "slices": 4}, 0, id="slices"
        ),
        pytest.param({"kills": 1, "kill_every": 15, "length": 8, "epochs": 1}, 0, id="founding"),
        pytest.param({**SHADOWED, "kills": 2, "leaves": 1}, 2, id="shadows"),
    ],
)
@pytest.mark.parametrize("takeovers", [0, 2])
@pytest.mark.parametrize("schedules", [40, pytest.param(3000, marks=MANY)])
def test_nothing_comes_of_a_worker_that_is_taken_for_lost_and_lives(
    fixed, shadows, takeovers, schedules
):
    seen = run_schedules(range(schedules), fixed, shadows, takeovers, silent=2)
    assert seen["finished"] == schedules, seen
    assert seen["taken for lost"] > schedules / 3, seen


@pytest.mark.parametrize(
    ("fixed", "shadows"),
    [({**FEW, "kills": 2}, 0), ({"kills": 2}, 0), ({**SHADOWED, "kills": 4}, 2)],
)
@pytest.mark.parametrize("takeovers", [0, 1])
@pytest.mark.parametrize("schedules", [60, pytest.param(3000, marks=MANY)])
def test_the_state_is_stored_whenever_a_run_is_stopped(fixed, shadows, takeovers, schedules):
    seen = run_schedules(range(schedules), fixed, shadows, takeovers, stops=True)
    assert seen["finished"] + seen["interrupted"] == schedules, seen
    assert seen["stored"] > seen["interrupted"] * 0.9, seen


@pytest.mark.parametrize(
    ("fixed", "shadows"),
    [
        pytest.param({"kills": 2, "kill_every": 40}, 0, id="kills"),
        pytest.param({**SHADOWED, "kills": 4}, 2, id="shadows"),
    ],
)
@pytest.mark.parametrize(("takeovers", "stops"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("schedules", [100, pytest.param(3000, marks=MANY)])
def test_all_go_back_when_workers_have_parted_and_nobody_goes_on_from_what_they_had(
    fixed, shadows, takeovers, stops, schedules
):
    seen = run_schedules(range(schedules), fixed, shadows, takeovers, stops, flips=2, voids=2)
    assert seen["finished"] + seen["interrupted"] == schedules, seen
    assert seen["went back as workers had parted"] > schedules / 10, seen
    assert seen["left out"] > schedules / 10, seen
    assert bool(seen["a shadow alone says so"]) == (fixed["kills"] == 4), seen
    assert stops or bool(seen["another controller judges"]) == bool(takeovers), seen


def forgets_whom_it_called(monkeypatch):
    """Another conductor takes those who are about to enter a group for workers that wait."""
    take = RunState.take

    def forgetful(self, event, sequence=None):
        take(self, event, sequence)
        self.founding = set()
        self.called = set()

    monkeypatch.setattr(RunState, "take", forgetful)


def forgets_the_dead(monkeypatch):
    """Those who were lost when nobody had the State are in the next group again."""
    regroup = Roster._regroup

    def forgetful(self, *without, cause):
        issued = regroup(self, *without, cause=cause)
        self._dead = set()
        return issued

    monkeypatch.setattr(Roster, "_regroup", forgetful)


def takes_all_for_informed(monkeypatch):
    """Another conductor founds the group with who was started before samples were left out."""
    of_use = RunState.of_use

    def trusting(self, found):
        return of_use(self, [replace(one, misinformed=False) for one in found])

    monkeypatch.setattr(RunState, "of_use", trusting)


def judges_nothing(monkeypatch):
    """Another conductor goes on with workers of which the journal has it that they have parted."""
    monkeypatch.setattr(RunState, "unjudged", property(lambda _: None, lambda *_: None))


FORWARD = {**FEW, "kills": 2, "kill_every": 40, "rollback": True}
ALL_GO = {**SHADOWED, "kills": 4}


@pytest.mark.parametrize(
    ("breaks", "fixed", "options"),
    [
        (forgets_whom_it_called, FORWARD, {"takeovers": 2}),
        (forgets_the_dead, FORWARD, {"takeovers": 0}),
        (takes_all_for_informed, ALL_GO, {"takeovers": 2, "voids": 3}),
        (judges_nothing, FORWARD, {"takeovers": 2, "flips": 2}),
    ],
)
def test_what_is_broken_is_caught(monkeypatch, breaks, fixed, options):
    breaks(monkeypatch)
    with pytest.raises(Violation):
        run_schedules(range(4000), fixed, shadows=2 * (fixed is ALL_GO), **options)
