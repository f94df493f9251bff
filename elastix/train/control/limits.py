"""What ends a run early, in words: the fact, what was done, what to do next. Pure.

Not here: a group that waits for workers in vain (quorum.py).
"""

from collections.abc import Mapping, Sequence

from elastix.config import FailureConfig
from elastix.errors import ElastixError, QuorumLost, TooManyFailures, WorkerFailed
from elastix.events import where_raised
from elastix.train.control.messages import Outcome
from elastix.train.control.run_state import RunState

_IN_A_ROW = 8
_TIMES_THE_GROUP = 3
_DIVERGENCES = 3
_DIVERGENCE_STEPS = 20
_NAMED = 8


def too_many_losses(
    failure: FailureConfig, losses: int, in_a_row: int, size: int, step: int
) -> ElastixError | None:
    """More workers lost than are allowed, or one after the other without a step.

    Args:
        failure: the run's.
        losses: so far.
        in_a_row: of them, and of those that could not be started, since the last committed step.
        size: of the group.
        step: the last committed one.
    """
    allowed = failure.max_worker_losses
    if allowed is not None and losses > allowed:
        return TooManyFailures(
            f"{losses} workers were lost, and FailureConfig.max_worker_losses is {allowed}. The "
            f"run was stopped after step {step}. Calling fit() again goes on from the last stored "
            "State."
        )
    if in_a_row > max(_IN_A_ROW, _TIMES_THE_GROUP * size):
        return TooManyFailures(
            f"{in_a_row} workers in a row were lost, or could not be started, without a step in "
            "between: they do not die by chance. The run was stopped. Look at the workers' logs; a "
            "crash in native code, too little memory or a GPU that fails are the usual causes."
        )
    return None


def diverges_often(steps: Sequence[int]) -> bool:
    """Whether workers part so often that it is no accident of one of them.

    Code that treats workers differently does so in every step, whoever is evicted for it.

    Args:
        steps: after which they were seen to have parted.
    """
    last = steps[-_DIVERGENCES:]  # not in order where a run has gone back
    return len(last) == _DIVERGENCES and max(last) - min(last) < _DIVERGENCE_STEPS


def raised(outcome: Outcome, worker: int) -> ElastixError:
    """The train function raised on a worker."""
    where = where_raised(worker, outcome.rank, outcome.step)
    if outcome.error is not None:
        outcome.error.add_note(f"Raised on {where}; the other workers were stopped.")
        return outcome.error
    ends = outcome.summary.startswith(SystemExit.__name__)  # sys.exit, at the end of a script
    instead = " To end training, return from the train function, on all workers." if ends else ""
    return WorkerFailed(
        f"the train function raised {outcome.summary} on {where}. The other workers were "
        f"stopped and nothing was retried.{instead}",
        outcome.rank,
        worker,
        outcome.traceback,
    )


def none_left(step: int) -> QuorumLost:
    """The last holder of the State is lost, and nobody is to be started in its place."""
    return QuorumLost(
        f"no worker is left that has the State; the last one was lost after step {step}. Calling "
        "fit() again goes on from the last stored State. More workers, or "
        "CheckpointConfig(every_steps=...), make this cheaper."
    )


def too_few_founders(left: int, minimum: int, state: RunState) -> QuorumLost:
    """Workers were lost before there was a group, none can come, and the others are too few."""
    when = "" if state.trained else " before the group had come about"
    return QuorumLost(
        f"{who_is_gone(state.gone)}{when}, and no other can come "
        f"(FailureConfig has replace=False). {left} {'is' if left == 1 else 'are'} left, and "
        f"num_workers has a minimum of {minimum}. {what_stands(state)} Look at the workers' logs."
    )


def what_stands(state: RunState) -> str:
    """What a run has come to whose group has not come about, or not again."""
    if not state.trained:  # a group was announced, it may be, and could not be connected
        return "No step was taken."
    return (
        "An earlier group was lost, and with it what was not stored. Calling fit() again goes on "
        "from the last stored State, if there is one."
    )


def who_is_gone(gone: Mapping[int, str]) -> str:
    """Workers that were lost, or have left, and why, in words: the first of them by name.

    Of those that were lost together with a controller its successor does not know all.
    """
    if not gone:
        return "some workers were gone"
    named = [f"worker {worker} ({gone[worker]})" for worker in sorted(gone)[:_NAMED]]
    others = len(gone) - len(named)
    named += [f"{others} {'other' if others == 1 else 'others'}"] if others else []
    *first, last = named
    return f"{', '.join(first)} and {last} were gone" if first else f"{last} was gone"
