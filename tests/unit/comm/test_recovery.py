"""decide(): what survivors do, as a table over where they are."""

from dataclasses import replace

import pytest
from hypothesis import given as on
from hypothesis import strategies as st

from elastix.comm.protocol.recovery import STATELESS, Decision, Position, decide
from elastix.errors import TrainError

STEP, EVALUATE = 1, 2


def in_step(operation: int, complete: int = 0, plan: int = 1) -> Position:
    return Position(operation, complete, plan, STEP)


def before(operation: int, plan: int = 1) -> Position:
    return Position(operation, 0, plan, 0)


NEWCOMER = Position(STATELESS)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        pytest.param(
            [before(8), in_step(7, complete=1), in_step(7, complete=1)],
            Decision(8, source=0, complete=0, plan=1),
            id="case 1: one survivor left the round, it passes the result on",
        ),
        pytest.param(
            [in_step(7, complete=1), in_step(8), in_step(8)],
            Decision(8, source=1, complete=0, plan=1, kind=STEP),
            id="case 1: those already in the next step launch its buckets again",
        ),
        pytest.param(
            [in_step(7, complete=1), before(8, plan=4)],
            Decision(8, source=1, complete=0, plan=4),
            id="case 1: the plan is that of whoever is ahead",
        ),
        pytest.param(
            [in_step(7, complete=1), in_step(7, complete=1)],
            Decision(7, source=None, complete=1, plan=1, kind=STEP),
            id="case 2: all hold every bucket of one generation",
        ),
        pytest.param(
            [in_step(7, complete=1), in_step(7)],
            Decision(7, source=None, complete=0, plan=1, kind=STEP),
            id="case 3: one survivor lacks a bucket",
        ),
        pytest.param(
            [in_step(7), in_step(7)],
            Decision(7, source=None, complete=0, plan=1, kind=STEP),
            id="case 3: nobody holds every bucket",
        ),
        pytest.param(
            [in_step(7, complete=2), in_step(7, complete=1)],
            Decision(7, source=None, complete=0, plan=1, kind=STEP),
            id="case 4: buckets of different generations never stand together",
        ),
        pytest.param(
            [in_step(7, complete=3), in_step(7, complete=3)],
            Decision(7, source=None, complete=3, plan=1, kind=STEP),
            id="case 4: buckets that were reduced again in a recovery stand",
        ),
        pytest.param(
            [before(7), before(7)],
            Decision(7, source=None, complete=0, plan=1),
            id="case 5: between steps",
        ),
        pytest.param(
            [before(7), in_step(7)],
            Decision(7, source=None, complete=0, plan=1, kind=STEP),
            id="case 5: some have begun",
        ),
        pytest.param(
            [before(7, plan=2), before(7, plan=5)],
            Decision(7, source=None, complete=0, plan=5),
            id="case 5: the newest plan counts",
        ),
        pytest.param(
            [Position(7, 0, 1, EVALUATE), before(7)],
            Decision(7, source=None, complete=0, plan=1, kind=EVALUATE),
            id="a plain collective is simply run again",
        ),
        pytest.param(
            [in_step(7, complete=2)],
            Decision(7, source=None, complete=2, plan=1, kind=STEP),
            id="a single survivor accepts what it holds",
        ),
        pytest.param(
            [in_step(7)],
            Decision(7, source=None, complete=0, plan=1, kind=STEP),
            id="a single survivor reduces again what it lacks",
        ),
        pytest.param(
            [NEWCOMER, NEWCOMER, NEWCOMER],
            Decision(0, source=None, complete=0, plan=0, founding=True, donor=0, newcomers=(1, 2)),
            id="a run begins from rank 0",
        ),
        pytest.param(
            [NEWCOMER],
            Decision(0, source=None, complete=0, plan=0, founding=True, donor=0),
            id="a run of one",
        ),
        pytest.param(
            [before(7, plan=3), before(7, plan=3), NEWCOMER, NEWCOMER],
            Decision(7, source=None, complete=0, plan=3, donor=0, newcomers=(2, 3)),
            id="newcomers at a boundary get the State of the lowest rank",
        ),
        pytest.param(
            [NEWCOMER, before(0)],
            Decision(0, source=None, complete=0, plan=1, donor=1, newcomers=(0,)),
            id="a newcomer may have a lower rank than the donor",
        ),
        pytest.param(
            [in_step(7, complete=1), before(8), NEWCOMER],
            Decision(8, source=1, complete=0, plan=1, donor=1, newcomers=(2,)),
            id="the donor is one of those ahead",
        ),
    ],
)
def test_the_decision_for_each_case_of_forward_recovery(positions, expected):
    assert decide(positions) == expected


def given(generation: int) -> Position:
    """A founder with the State that does not know whether all have it."""
    return Position(STATELESS, complete=generation)


def test_a_founding_is_done_again_while_nobody_knows_that_all_have_the_state():
    decision = decide([given(1), NEWCOMER, given(1)])
    assert decision.founding
    assert (decision.donor, decision.newcomers) == (0, (1, 2))


def test_founders_that_were_given_the_state_need_no_other_once_one_knows_that_all_have_it():
    decision = decide([given(1), in_step(0), given(1)])
    assert (decision.operation, decision.founding, decision.newcomers) == (0, False, ())
    assert decision.plan == 1


@pytest.mark.parametrize("lag", [2, 3, 40])
def test_whoever_is_two_operations_behind_has_no_say(lag):
    positions = [before(50), in_step(50 - lag, complete=1), before(50)]
    decision = decide(positions)
    assert decision == replace(decide([before(50)] * 2), gone=(1,))
    assert decide([before(50), in_step(49, complete=1)]).gone == ()
    # One that has not all of it had no part in it: it was taken out, and has not heard of it.
    assert decide([before(50), in_step(49)]).gone == (1,)
    assert decide([before(50), before(49)]).source is None


def test_workers_in_different_calls_of_one_operation_are_refused_by_rank():
    positions = [before(3), in_step(3), Position(3, 0, 1, EVALUATE)]
    with pytest.raises(
        TrainError, match=r"operation 3.*: worker 1 in a backward pass; worker 2 in ctx"
    ):
        decide(positions)


def test_different_calls_among_those_behind_are_refused_too():
    positions = [before(4), in_step(3, complete=1), Position(3, 1, 1, EVALUATE)]
    with pytest.raises(TrainError, match="worker 1 in a backward pass; worker 2 in ctx"):
        decide(positions)


def test_those_ahead_may_be_in_another_kind_of_call_than_those_behind():
    decision = decide([Position(4, 0, 1, EVALUATE), in_step(3, complete=1)])
    assert (decision.operation, decision.source) == (4, 0)


def test_nobody_may_wait_once_somebody_is_in_the_operation():
    assert decide([before(7), in_step(7)]).begun
    assert not decide([before(7), before(7)]).begun


holders = st.builds(
    Position,
    operation=st.integers(7, 8),
    complete=st.integers(0, 3),
    plan=st.integers(1, 4),
    kind=st.sampled_from([0, STEP]),
)


@on(st.lists(holders | st.just(NEWCOMER), min_size=1, max_size=8))
def test_buckets_stand_only_if_every_holder_is_in_one_operation_with_all_of_one_generation(
    positions,
):
    decision = decide(positions)
    there = [p for rank, p in enumerate(positions) if p.has_state and rank not in decision.gone]
    agreed = {(p.operation, p.complete) for p in there}
    if decision.complete:
        assert agreed == {(decision.operation, decision.complete)}
    elif there and len(agreed) == 1:
        assert there[0].complete == 0


@on(st.lists(holders | st.just(NEWCOMER), min_size=1, max_size=8), st.randoms())
def test_the_decision_does_not_depend_on_who_has_which_rank_but_for_the_ranks_in_it(
    positions, random
):
    shuffled = positions[:]
    random.shuffle(shuffled)
    one, other = decide(positions), decide(shuffled)
    assert (one.operation, one.complete, one.plan, one.begun) == (
        other.operation,
        other.complete,
        other.plan,
        other.begun,
    )
    assert (one.source is None) == (other.source is None)
    assert len(one.newcomers) == len(other.newcomers)


@on(st.lists(holders | st.just(NEWCOMER), min_size=1, max_size=8))
def test_whoever_passes_on_or_gives_is_at_the_front(positions):
    decision = decide(positions)
    if decision.source is not None:
        assert positions[decision.source].operation == decision.operation
        assert any(0 <= p.operation < decision.operation for p in positions)
    if decision.donor is not None and any(p.has_state for p in positions):
        assert positions[decision.donor].operation == decision.operation
        assert [positions[r] for r in decision.newcomers] == positions.count(NEWCOMER) * [NEWCOMER]
