"""What all workers tell alike is told once, by the first; and not before the shadows have it."""

import math
from collections import deque

from elastix.events import Reported
from elastix.train.replica.replicated_events import ReplicatedEvents


class Worker:
    """One whose part in the group is set by hand."""

    def __init__(self, first=True):
        self.first, self.operation, self.held = first, 0, math.inf
        self.sent = []
        self.events = ReplicatedEvents(
            lambda event, sequence: self.sent.append(sequence),
            lambda: self.first,
            operation=lambda: self.operation,
            held=lambda: self.held,
        )

    def does(self, operation):
        """An operation ends, and something is told of it."""
        self.operation = operation + 1
        self.events.emit(Reported(seq=operation, step=operation, metrics={}))


def test_without_shadows_the_first_tells_at_once_and_the_others_when_they_are_first():
    first, other = Worker(), Worker(first=False)
    for worker in (first, other):
        worker.does(0)
        worker.does(1)
    assert (first.sent, other.sent) == ([0, 1], [])
    other.first = True
    other.events.send_again()
    assert other.sent == [0, 1]


class Looked(deque):
    """Counts how many of it are looked at."""

    looks = 0

    def __iter__(self):
        return self._counted(super().__iter__())

    def __reversed__(self):
        return self._counted(super().__reversed__())

    def _counted(self, them):
        for one in them:
            self.looks += 1
            yield one


def test_who_makes_no_steps_does_not_go_through_all_its_reports_at_each():
    """Nothing is confirmed then: a trial's twenty thousandth report took 10 ms."""
    worker = Worker()
    kept = worker.events._unconfirmed = Looked()
    for operation in range(500):
        worker.does(operation)
    assert worker.sent == [*range(500)]
    assert kept.looks <= 2 * 500


def test_what_the_shadows_have_not_received_is_held_back():
    worker = Worker()
    worker.held = 1  # they have all before operation 1
    worker.does(0)
    worker.does(1)
    assert worker.sent == [0]
    worker.events.send_held()
    assert worker.sent == [0]
    worker.held = 2
    worker.events.send_held()
    assert worker.sent == [0, 1]


def test_a_new_first_tells_again_but_nothing_that_is_held_back():
    worker = Worker(first=False)
    worker.held = 1
    worker.does(0)
    worker.does(1)
    worker.first = True
    worker.events.send_again()
    assert worker.sent == [0]
    worker.held = math.inf  # the shadows are gone
    worker.events.send_held()
    assert worker.sent == [0, 1]


def test_it_has_all_since_the_last_that_was_confirmed():
    worker = Worker()
    assert worker.events.since == 0
    for operation in range(3):
        worker.does(operation)
    worker.events.confirm(1)
    assert (worker.events.since, worker.events.sequence) == (2, 3)
    worker.events.confirm(2)
    assert worker.events.since == 3


def test_whoever_ends_the_run_with_an_error_tells_what_is_not_confirmed():
    worker = Worker(first=False)
    for operation in range(3):
        worker.does(operation)
    worker.events.confirm(0)
    worker.held = 2
    worker.events.send_unconfirmed()
    assert worker.sent == [1]
    worker.held = math.inf
    worker.events.send_unconfirmed()
    assert worker.sent == [1, 2]


def test_who_is_given_a_state_tells_what_has_led_to_it_if_all_others_are_lost():
    donor, joiner = Worker(first=False), Worker(first=False)
    donor.does(0)
    donor.does(1)
    donor.does(2)
    donor.events.confirm(0)
    joiner.events.go_on(donor.events.sequence, donor.events.hand_on())
    joiner.does(3)
    joiner.first = True
    joiner.events.send_again()
    assert joiner.sent == [1, 2, 3]


def test_what_ends_before_a_newer_state_begins_does_not_pass_for_all():
    """A shadow has lost its donor, and another one gives it what comes after the next step."""
    donor, shadow = Worker(first=False), Worker(first=False)
    for operation in range(3):
        donor.does(operation)
    shadow.does(0)
    donor.events.confirm(1)
    shadow.events.go_on(donor.events.sequence, donor.events.hand_on())
    assert (shadow.events.since, shadow.events.sequence) == (2, 3)
