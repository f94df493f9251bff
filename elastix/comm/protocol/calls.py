"""Whether workers are in the same operation together: its kind, and what it is about. Pure.

An operation of one number is of one kind on all workers. A train function that treats them
differently breaks this: one evaluates, or has come to its end, while the others are in a step.
"""

from collections.abc import Hashable, Iterable, Mapping
from enum import IntEnum
from typing import TypeVar

from elastix.errors import TrainError

T = TypeVar("T", bound=Hashable)


class OperationKind(IntEnum):
    """What members do together; the number is what they tell each other."""

    STEP = 1
    EVALUATION = 2
    END = 3
    DRAWS = 4
    MEAN_LOSS = 5
    FINGERPRINTS = 6
    REGROUP = 7
    MEAN = 8
    SLICES = 9
    SUSPECTS = 10
    LEVEL = 11


_NAMES: Mapping[int, str] = {
    OperationKind.STEP: "in a backward pass",
    OperationKind.EVALUATION: "in ctx.evaluate",
    OperationKind.END: "at the end of the train function",
    OperationKind.DRAWS: "in the roll call after a step",
    OperationKind.FINGERPRINTS: "in the roll call of what workers hold, after a step",
    OperationKind.SLICES: "in the roll call of what a slice gave, after a step",
    OperationKind.SUSPECTS: "in the roll call of what the gradient was made of, after a step",
    OperationKind.LEVEL: "at the boundary where workers with other processors get the State anew",
    OperationKind.REGROUP: "in the round after workers had parted",
    OperationKind.MEAN_LOSS: "in the step of an LBFGS optimizer",
    OperationKind.MEAN: "in ctx.mean",
}


def call(kind: int) -> str:
    """Where the train function is that has led to an operation of this kind."""
    return _NAMES.get(kind, f"in a call of kind {kind}")


def apart(operation: int, kinds: Mapping[int, int]) -> TrainError | None:
    """The error if workers are in one operation with different calls; None if they are not.

    Args:
        operation: its number.
        kinds: of those who are in it, by worker.
    """
    groups = fewest_first(kinds)
    if len(groups) < 2:
        return None
    who = "; ".join(f"{name(workers)} {call(kind)}" for kind, workers in groups)
    return TrainError(
        f"workers wait for each other in different calls (operation {operation}): {who}. None of "
        "them can be completed, and the run was stopped. All workers must take the same batches "
        "from the loaders, call backward for each and make the same calls on ctx in the same "
        "order, whatever their rank and their share. If one of them joined during the run, look "
        "for a variable that counts steps, batches or epochs: there it began anew (use ctx.step "
        "and epoch.number, or ctx.track). Calling fit() again goes on from the last stored State."
    )


def unlike(kind: int, details: Mapping[int, int]) -> TrainError | None:
    """The error if workers evaluate, average or hold different things; None if they do not.

    Args:
        kind: of the operation that they are in.
        details: by worker, a number that stands for what it evaluates, averages or holds.
    """
    (_, few), *rest = fewest_first(details)
    if not rest:
        return None
    others = [worker for _, group in rest for worker in group]
    if kind == OperationKind.FINGERPRINTS:
        return TrainError(
            f"{name(few)} prepared or tracked more or fewer optimizers than {name(others)}. The "
            "step does not count, and the run was stopped. Whoever joins, or goes on from a stored "
            "State, does not pass what was done in an earlier step or epoch: make and track a "
            "further optimizer there too (`if epoch.number >= 3`, and not `== 3`). Calling "
            "fit() again goes on from the last stored State."
        )
    return TrainError(
        f"{name(few)} called ctx.evaluate with a dataset of another length, or ctx.evaluate or "
        f"ctx.mean with other names, than {name(others)}. Nothing was computed, and the run was "
        "stopped. All workers must give ctx.evaluate the whole dataset, which is shared out among "
        "them, and names that depend neither on the batch nor on the rank."
    )


def fewest_first(said: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """What workers have said, each with those who said it, in the order of how few they are.

    Args:
        said: by worker.
    """
    groups: dict[T, list[int]] = {}
    for worker, what in sorted(said.items(), key=lambda item: item[0]):
        groups.setdefault(what, []).append(worker)
    return sorted(groups.items(), key=lambda group: len(group[1]))


def name(workers: Iterable[int]) -> str:
    """Workers as a sentence has them: `worker 3`, `workers 0, 1 and 3`."""
    *most, last = sorted(workers)
    if not most:
        return f"worker {last}"
    return f"workers {', '.join(map(str, most))} and {last}"
