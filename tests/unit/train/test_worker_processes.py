"""Whether a process of this worker is lost, and that the others come out of what they wait in."""

import threading
from types import SimpleNamespace

import pytest

from elastix.comm.protocol.membership import Membership
from elastix.comm.thread_safe_inbox import ThreadSafeInbox
from elastix.train.replica import worker_processes
from elastix.train.replica.worker_processes import WorkerProcesses

ME = 3


class Desk:
    def __init__(self, *, crew=True):
        self.done = []
        self.inbox = ThreadSafeInbox()
        self.driver = SimpleNamespace(
            broken=False, has_state=True, generation=2, break_up=lambda: self.does("left the group")
        )
        settings = SimpleNamespace(crew={"shard": 2} if crew else {})
        self.processes = WorkerProcesses(ME, settings, self.driver, self.inbox)
        if crew:
            self.processes.mates = SimpleNamespace(
                cut=lambda: self.does("cut"), look=lambda: self.does("looked"), parted=None
            )

    def does(self, what):
        self.done.append(what)

    def hears(self, generation, *members):
        self.inbox.publish(Membership(generation, members, urgent=True))
        self.processes.cut_if_broken()


def test_who_is_lost_is_cut_from_the_others():
    desk = Desk()
    assert not desk.processes.broken
    desk.driver.broken = True
    assert desk.processes.broken
    desk.processes.break_up()
    assert desk.done == ["left the group", "cut"]


def test_a_worker_that_was_taken_out_is_broken_and_one_that_stays_is_not():
    desk = Desk()
    desk.hears(3, 0, ME)
    assert (desk.processes.broken, desk.done) == (False, [])
    desk.hears(4, 0)
    assert (desk.processes.broken, desk.done) == (True, ["cut"])


@pytest.mark.parametrize("fields", [{"has_state": False}, {"generation": 4}])
def test_a_newcomer_that_a_generation_leaves_out_is_let_in_by_a_later_one(fields):
    desk = Desk()
    vars(desk.driver).update(fields)
    desk.hears(4, 0)
    assert (desk.processes.broken, desk.done) == (False, [])


def test_a_worker_of_one_process_has_nothing_that_can_break():
    desk = Desk(crew=False)
    desk.hears(4, 0)
    desk.driver.broken = True
    desk.processes.assemble(None)
    desk.processes.look()
    assert not desk.processes.broken
    assert (desk.processes.mesh, desk.processes.parted, desk.processes.mates) == (None,) * 3


def test_who_hears_of_a_loss_before_the_others_are_met_does_not_wait_for_them(monkeypatch):
    """As does a process that was left over, and whose next worker loses another one at once."""
    desk = Desk()
    desk.processes.mates = None
    desk.driver.broken = True
    desk.processes.break_up()
    assert desk.done == ["left the group"]

    class Mates:
        def __init__(self, *_):
            pass

        def cut(self):
            desk.does("cut")

        def assemble(self):
            desk.does("met")

    monkeypatch.setattr(worker_processes, "Mates", Mates)
    desk.processes.assemble(None)
    assert desk.done == ["left the group", "cut", "met"]


def test_who_waits_to_hear_of_it_hears_at_once():
    desk = Desk()
    heard = []
    waiting = threading.Thread(target=lambda: heard.append(desk.processes.await_broken(60)))
    waiting.start()
    desk.driver.broken = True
    desk.processes.break_up()
    waiting.join(60)
    assert heard == [True]
    assert not Desk().processes.await_broken(0.01)
