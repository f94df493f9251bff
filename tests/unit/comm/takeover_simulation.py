"""The world of group_simulation with controllers that are killed.

Another controller takes stock of the workers. It knows who has the State in the group, and from the
journal the newest generation, who may be in the group, and who was taken out; nothing else.
Whatever workers have told the old one is lost, and the last things that it told each of them. Who
holds no State is ended, as long as somebody does; see Conductor.take_over.
"""

from contextlib import contextmanager

from elastix.comm.protocol import wants
from elastix.comm.protocol.membership import Membership
from elastix.comm.protocol.wants import Failed
from tests.unit.comm.group_simulation import Choose, Scenario, Simulation, Worker


class TakeoverSimulation(Simulation):
    """See the module."""

    def __init__(self, scenario: Scenario, choose: Choose, takeovers: int, **broken) -> None:
        self.takeovers_left = takeovers
        self.nobody = False  # has the State, of those who had it
        self.taken_out: set[int] = set()
        self.called: set[int] = set()  # since the last urgent generation; these may be in the group
        self.moments_left = 0  # until the controller is killed; 0: not while a joiner enters
        super().__init__(scenario, choose, **broken)

    @property
    def lost(self) -> bool:
        return self.nobody or super().lost

    def mishap(self) -> None:
        if self.takeovers_left and self.roster.founded and not self.choose(2):
            self.take_over()
        else:
            super().mishap()

    def announce_entry(self, worker: Worker, want: wants.AnnounceEntry) -> None:
        """A joiner enters: a moment at which the controller had better not die."""
        super().announce_entry(worker, want)
        if self.takeovers_left and not self.moments_left and self.choose(2):
            self.moments_left = 1 + self.choose(25)

    def resume(self, worker: Worker, failure: Failed | None = None) -> None:
        super().resume(worker, failure)
        if self.moments_left:
            self.moments_left -= 1
            if not self.moments_left:
                self.take_over()

    def take_over(self) -> None:
        """The controller is killed, perhaps with some workers, and there is another one."""
        self.takeovers_left, self.moments_left = self.takeovers_left - 1, 0
        if not self.choose(2):
            for worker in [one for one in self.workers if one.alive]:
                if self.choose(3):
                    self.kill(worker)
        if not self.choose(3):
            self.take_out()
        self.go_on_without(self.choose(40))
        self.lose_messages()
        present = [
            one for one in self.workers if one.alive or (one in self.gone and self.over(one))
        ]
        holders = [one for one in present if one.protocol.holder and not self.knows(one)]
        if not holders:
            self.nobody = True
            return
        if self.trace is not None:
            self.note(f"ANOTHER CONTROLLER finds {[one.me for one in holders]} with the State")
        self.seen["another controller"] += 1
        for worker in present:
            if worker not in holders:
                worker.thread.close()
                self.end(worker)
        self.hands = {one.me for one in holders}
        self.roster = type(self.roster)(
            self.scenario.workers,
            self.scenario.workers if self.scenario.spares else None,
            self.scenario.min_workers,
        )
        self.push(self.roster.take_over(self.generations, self.hands, ()))

    def lose_messages(self) -> None:
        """What the old controller was told is lost, and the last things that it told some workers.

        What it did tell has arrived when the new one asks, though not everybody has acted on it.
        """
        for worker in self.workers:
            worker.outbox.clear()
            self.senders.discard(worker)
            self.lose_mail(worker)

    def push(self, membership: Membership | None) -> None:
        if membership is not None:  # it is in the journal before anybody is told
            called = set() if membership.urgent else self.called
            self.called = called.union(membership.members)
        super().push(membership)

    def take_out(self) -> None:
        """The old controller takes a worker for lost that lives, and dies before it ends it.

        Not the last one with the State: without it the run would have gone back to a stored one.
        """
        able = [one for one in self.workers if one.alive and one.me in self.roster.holders]
        if len(able) > 1:
            worker = able[self.choose(len(able))]
            self.seen["taken for lost"] += 1
            self.hands.discard(worker.me)
            self.taken_out.add(worker.me)
            self.push(self.roster.lost(worker.me))

    def go_on_without(self, moments: int) -> None:
        """Nobody leads the run for so long."""
        for _ in range(moments):
            able = [*self.runnable.items, *self.uninformed.items]
            if not able:
                return
            place = self.choose(len(able))
            (self.resume if place < len(self.runnable) else self.deliver)(able[place])

    def conclude(self, worker: Worker, want: wants.Conclude) -> None:
        with self.void_if(worker.me in self.taken_out):
            super().conclude(worker, want)

    def commit(self, worker: Worker, drawn, contributors):
        with self.void_if(worker.me in self.taken_out):
            return super().commit(worker, drawn, contributors)

    @contextmanager
    def void_if(self, taken_out: bool):
        """Nobody hears any more what one does that was taken out: it counts for nothing."""
        kept = self.records, self.evaluated, self.committed
        if taken_out:
            self.records, self.evaluated, self.committed = {}, {}, {}
        yield
        self.records, self.evaluated, self.committed = kept

    def knows(self, worker: Worker) -> bool:
        """Whether the journal says that it was taken out, or left out."""
        return worker.me in self.taken_out or worker.me not in self.called

    def over(self, worker: Worker) -> bool:
        """It is through with its part, which the next controller hears from its process."""
        return worker.done or worker.released is not None

    def check(self) -> None:
        if not self.nobody:
            super().check()


TakeoverSimulation.answers = {
    **Simulation.answers,
    wants.Conclude: TakeoverSimulation.conclude,
    wants.AnnounceEntry: TakeoverSimulation.announce_entry,
}
