"""When a run is ended early, and what it is told to whom."""

import pytest

from elastix.config import FailureConfig
from elastix.errors import ConfigError, QuorumLost, TooManyFailures, WorkerFailed
from elastix.train.control import limits
from elastix.train.control.messages import Outcome, OutcomeKind
from elastix.train.control.run_state import RunState

UNLIMITED = FailureConfig(max_worker_losses=None)


@pytest.mark.parametrize("allowed", [0, 1, 5])
def test_as_many_workers_may_be_lost_as_are_allowed(allowed):
    failure = FailureConfig(max_worker_losses=allowed)
    assert limits.too_many_losses(failure, allowed, 0, size=4, step=9) is None
    error = limits.too_many_losses(failure, allowed + 1, 0, size=4, step=9)
    assert isinstance(error, TooManyFailures)
    assert f"{allowed + 1} workers were lost" in str(error)
    assert "stopped after step 9" in str(error)
    assert limits.too_many_losses(UNLIMITED, 10_000, 0, size=4, step=9) is None


@pytest.mark.parametrize(("size", "most"), [(1, 8), (2, 8), (3, 9), (100, 300)])
def test_losses_in_a_row_are_no_accident_when_the_group_is_lost_three_times_over(size, most):
    assert limits.too_many_losses(UNLIMITED, most, most, size=size, step=0) is None
    error = limits.too_many_losses(UNLIMITED, most + 1, most + 1, size=size, step=0)
    assert isinstance(error, TooManyFailures)
    assert f"{most + 1} workers in a row" in str(error)


def test_workers_that_part_three_times_within_twenty_steps_do_so_for_a_reason():
    assert not limits.diverges_often([])
    assert not limits.diverges_often([5, 6])
    assert limits.diverges_often([5, 6, 7])
    assert limits.diverges_often([5, 6, 24])
    assert not limits.diverges_often([5, 6, 25])
    assert limits.diverges_often([5, 100, 101, 119])
    assert not limits.diverges_often([5, 6, 7, 30])
    assert not limits.diverges_often([500, 900, 490])  # it has gone back the last time
    assert limits.diverges_often([490, 490, 490])


def raised(error=None, summary="KeyError('x')"):
    return Outcome(
        kind=OutcomeKind.RAISED, rank=1, step=7, error=error, summary=summary, traceback="T"
    )


def test_what_a_train_function_raised_is_said_with_where_and_how():
    error = limits.raised(raised(), 3)
    assert isinstance(error, WorkerFailed)
    assert (error.rank, error.worker, error.traceback) == (1, 3, "T")
    assert "raised KeyError('x') on worker 3, rank 1, after step 7" in str(error)


def test_a_script_that_ends_itself_is_told_how_to():
    instead = "To end training, return from the train function, on all workers."
    assert instead in str(limits.raised(raised(summary="SystemExit: 0"), 3))
    assert instead not in str(limits.raised(raised(), 3))


def test_an_error_of_ours_stays_what_it_is_and_says_where():
    ours = ConfigError("no batch")
    assert limits.raised(raised(ours), 3) is ours
    assert ours.__notes__ == [
        "Raised on worker 3, rank 1, after step 7; the other workers were stopped."
    ]


def test_where_nobody_is_left_it_is_said_what_to_do():
    assert isinstance(limits.none_left(4), QuorumLost)
    assert "lost after step 4. Calling fit() again" in str(limits.none_left(4))


def test_founders_that_are_lost_are_named_with_what_befell_them():
    error = limits.too_few_founders(1, 2, RunState(gone={4: "silent", 0: "died"}))
    assert isinstance(error, QuorumLost)
    assert str(error).startswith("worker 0 (died) and worker 4 (silent) were gone before the group")
    assert "1 is left" in str(error)
    assert "Look at the workers' logs" in str(error)
    twelve = RunState(gone=dict.fromkeys(range(12), "died"))
    many = str(limits.too_few_founders(0, 2, twelve))
    assert "worker 7 (died) and 4 others were gone" in many
