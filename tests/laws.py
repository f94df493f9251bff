"""What must hold after any failures, as functions on what a run left."""

from elastix.data.audit import audit
from elastix.events import Event, StepCommitted, WorkerJoined
from tests.trainables import notes


def assert_exactly_once(events: list[Event], epochs: int) -> None:
    """Law 1: no step lost, no sample repeated or dropped."""
    account = audit(events)
    assert account.exact, str(account)
    assert [loader.epochs for loader in account.loaders] == [epochs] * len(account.loaders)
    for loader in account.loaders:
        assert loader.samples == epochs * loader.length


def assert_replicas_identical(directory, lost: set[int], events: list[Event] = ()) -> None:
    """Law 1: all workers held bit-identical States after every step, and nobody missed one.

    A joiner may have followed the group from outside, lost its donor, and begun anew: what counts
    for it is the time from its entry on, if `events` say when that was.
    """
    entered = {join.worker: join.step for join in joins(events)}
    written = notes(directory)
    agreed = {}
    for worker, steps in written.items():
        for step, text in steps.items():
            assert agreed.setdefault(step, text) == text, f"worker {worker} differs at step {step}"
    last = max(agreed)
    assert sorted(agreed) == list(range(1, last + 1))
    for worker, steps in written.items():
        outside = min(steps) > 1 and events and worker not in entered  # watched to the end
        if worker not in lost and not outside:
            first = entered.get(worker, min(steps) - 1) + 1
            assert sorted(s for s in steps if s >= first) == list(range(first, last + 1))


def committed(events: list[Event]) -> list[StepCommitted]:
    return [event for event in events if isinstance(event, StepCommitted)]


def joins(events: list[Event]) -> list[WorkerJoined]:
    return [event for event in events if isinstance(event, WorkerJoined)]
