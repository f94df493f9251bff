"""The coordinator of checkpoints: verdicts and messages of workers that are gone. No processes."""

import queue

import pytest
import torch

from elastix.config import CheckpointConfig
from elastix.events import StateNotStored, StateStored
from elastix.state import State
from elastix.store import Store
from elastix.train.checkpoint.assembly import (
    CheckpointId,
    Delivered,
    Offer,
    Order,
    Release,
    Withdrawn,
)
from elastix.train.checkpoint.coordinator import Checkpoints, Outlets

MARK = CheckpointId(20, 2)
TENSOR = {"w": torch.arange(4.0)}


class Run:
    """A coordinator, and what it says to workers."""

    def __init__(self, directory):
        self.sent = queue.Queue()
        self.events = []
        self.store = directory / "store"
        self.synced = []
        outlets = Outlets(
            send=lambda worker, order: self.sent.put((worker, order)),
            emit=self.events.append,
            journaled=lambda: MARK.step,
            sync=lambda: self.synced.append(len(self.stored())),
            fail=self.events.append,
        )
        self.checkpoints = Checkpoints(Store(self.store), "run", CheckpointConfig(), outlets)

    def offer(self, worker, members):
        groups = ((("w",), 16),)
        meta = {"step": MARK.step}
        offer = Offer(mark=MARK, reason="final", members=members, groups=groups, meta=meta)
        self.checkpoints.told(worker, offer)

    def deliver(self, worker):
        with Store(self.store) as store:
            self.checkpoints.told(worker, Delivered(MARK, store.put_share(State(TENSOR))))

    def stored(self):
        with Store(self.store, read_only=True) as store:
            return store.log()

    def heard(self, kind):
        """The next of that kind, and to whom."""
        while True:
            worker, order = self.sent.get(timeout=20)
            if isinstance(order, kind):
                return worker, order


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    made.checkpoints.close()


def test_a_group_that_is_founded_anew_stores_what_the_lost_one_could_not(run):
    """All workers are lost while the State is written; the new ones come to the same step."""
    run.offer(0, (0, 1))
    run.offer(1, (0, 1))
    run.heard(Order)
    for worker in (0, 1):
        run.checkpoints.lost(worker)
    run.checkpoints.give_up()
    assert run.heard(Release)[1].error is not None
    run.offer(2, (2,))
    while (order := run.sent.get(timeout=20))[0] != 2:
        pass
    assert order == (2, Order(MARK, ("w",)))
    run.deliver(2)
    verdict = run.heard(Release)[1]
    assert verdict.error is None
    assert [event.ref for event in run.events if isinstance(event, StateStored)] == [verdict.ref]


def test_what_a_dead_worker_offered_is_not_waited_for(run):
    """Its message may come after the news of its death."""
    run.checkpoints.lost(0)
    run.offer(0, (0,))
    run.offer(1, (1,))
    assert run.heard(Order) == (1, Order(MARK, ("w",)))
    run.deliver(1)
    assert run.heard(Release)[1].ref is not None


def test_it_is_told_if_no_worker_has_a_snapshot_that_can_be_used(run):
    for worker in (0, 1):
        torn = Withdrawn(MARK, why="'w' has changed", reason="every_steps", members=(0, 1))
        run.checkpoints.told(worker, torn)
    assert "'w' has changed" in str(run.heard(Release)[1].error)
    (told,) = run.events
    assert isinstance(told, StateNotStored)
    assert (told.step, told.reason) == (MARK.step, "every_steps")


def test_one_worker_with_a_snapshot_is_enough(run):
    torn = Withdrawn(MARK, why="'w' has changed", reason="final", members=(0, 1))
    run.checkpoints.told(0, torn)
    run.offer(1, (0, 1))
    assert run.heard(Order) == (1, Order(MARK, ("w",)))
    run.deliver(1)
    assert run.heard(Release)[1].ref is not None


def test_a_state_appears_after_the_journal_that_accounts_for_it_is_durable(run):
    run.offer(0, (0,))
    run.heard(Order)
    run.deliver(0)
    assert run.heard(Release)[1].ref is not None
    assert run.synced == [0]
    assert len(run.stored()) == 1
