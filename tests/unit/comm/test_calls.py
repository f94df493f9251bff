"""Workers that are in one operation with different calls are told apart, the odd ones first."""

import pytest

from elastix.comm.protocol.calls import OperationKind, apart, call, fewest_first, name, unlike

STEP, EVALUATION, END = OperationKind.STEP, OperationKind.EVALUATION, OperationKind.END


def test_those_who_say_the_same_stand_together_the_fewest_first():
    said = {5: "b", 1: "a", 4: "b", 0: "a", 2: "c", 3: "b"}
    assert fewest_first(said) == [("c", [2]), ("a", [0, 1]), ("b", [3, 4, 5])]
    assert fewest_first({}) == []


def test_nothing_is_wrong_where_all_are_in_the_same_call():
    assert apart(7, {0: STEP, 1: STEP, 2: STEP}) is None
    assert apart(7, {0: STEP}) is None
    assert unlike(EVALUATION, {0: 3, 1: 3}) is None
    assert unlike(EVALUATION, {0: 3}) is None


def test_who_is_in_which_call_is_said():
    error = str(apart(7, {0: STEP, 1: END, 2: STEP, 3: EVALUATION}))
    assert "(operation 7): worker 1 at the end of the train function; worker 3 in ctx.eval" in error
    assert "; workers 0 and 2 in a backward pass. None of" in error
    assert "worker 1 at the end" in str(apart(7, {0: STEP, 1: END, 2: STEP}))


def test_who_evaluates_something_else_is_said():
    error = str(unlike(EVALUATION, {0: 10, 1: 11, 2: 10, 4: 12}))
    assert error.startswith("worker 1 called ctx.evaluate with a dataset of another length")
    assert "than workers 0, 2 and 4. Nothing was computed" in error


def test_who_holds_more_or_fewer_things_is_said():
    error = str(unlike(OperationKind.FINGERPRINTS, {0: 5, 1: 5, 2: 4}))
    assert error.startswith("worker 2 prepared or tracked more or fewer optimizers than workers 0")


@pytest.mark.parametrize("kind", OperationKind)
def test_every_kind_of_operation_has_a_place_in_the_train_function(kind):
    assert call(kind).startswith(("in ", "at "))
    assert "of kind" not in call(kind)


def test_workers_are_named_as_in_a_sentence():
    assert name([3]) == "worker 3"
    assert name([3, 1]) == "workers 1 and 3"
    assert name([3, 1, 2]) == "workers 1, 2 and 3"
