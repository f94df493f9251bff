"""The world of group_simulation with shadows: all members of a group may be lost.

Who is a shadow, whom it follows and which one goes on is decided by the Shadows that ship. The
journal has an operation when the first member of the group has left it and its shadows were told.
"""

from contextlib import contextmanager

from elastix.comm.protocol import wants
from elastix.comm.protocol.membership import Membership
from elastix.config import FailureConfig
from elastix.events import Resumed
from elastix.train.control.shadows import Shadows
from elastix.train.control.terms import RunTerms
from tests.unit.comm.group_simulation import Simulation, Violation, Worker


class ShadowSimulation(Simulation):
    """See the module."""

    def __init__(self, scenario, choose, shadows=1, **broken) -> None:
        terms = RunTerms(
            founders=scenario.workers,
            min_workers=scenario.min_workers,
            max_workers=scenario.workers if scenario.spares else 10**6,
            failure=FailureConfig(),
            first_step_s=0.0,
            shadows=shadows,
        )
        self.shadows = Shadows(terms)
        self.journaled, self.told_by = -1, -1
        self.since = 0  # generation in which a shadow went on
        super().__init__(scenario, choose, **broken)

    @property
    def lost(self) -> bool:
        return self.roster.extinct and self.shadows.heir is None

    def conclude(self, worker: Worker, want: wants.Conclude) -> None:
        if self.outdated(worker):
            with self.void():
                super().conclude(worker, want)
            return
        super().conclude(worker, want)
        group = worker.protocol.group
        if group is not None and group.members[0] == worker.me and want.number > self.journaled:
            self.journaled, self.told_by = want.number, worker.me

    def commit(self, worker: Worker, drawn, contributors):
        """What a joiner does that a dead donor told it may be void, and counts for nothing."""
        joiner = worker.protocol.joiner
        told = joiner.following and not joiner.shadow and not self.workers[worker.donor].alive
        if not (told or self.outdated(worker)):
            return super().commit(worker, drawn, contributors)
        with self.void():
            return super().commit(worker, drawn, contributors)

    def outdated(self, worker: Worker) -> bool:
        """Whether it was in a group, unknown to all, that a shadow has gone on in place of.

        It has just been given the State, as the last one that had it died. It will hear of it.
        """
        joiner = worker.protocol.joiner
        whose = self.workers[worker.donor] if joiner.following else worker
        return whose.protocol.generation < self.since and not whose.protocol.joiner.following

    @contextmanager
    def void(self):
        """Within: what is recorded counts for nothing."""
        kept = self.records, self.evaluated, self.committed
        self.records, self.evaluated, self.committed = {}, {}, {}
        yield
        self.records, self.evaluated, self.committed = kept

    def entered(self, worker: Worker, want: wants.TellEntered) -> None:
        shadow = worker.protocol.joiner.shadow and want.joined is not None
        self.seen["took a seat"] += shadow
        super().entered(worker, want)

    def take_state(self, worker: Worker, want: wants.TakeState):
        self.seen["a shadow was given the State"] += worker.protocol.joiner.shadow
        return super().take_state(worker, want)

    def deliver(self, worker: Worker) -> None:
        if isinstance(worker.mail[0], Membership) or not isinstance(worker.mail[0][0], tuple):
            super().deliver(worker)
            return
        (donors,) = worker.mail.popleft()
        if not worker.mail:
            self.uninformed.discard(worker)
        worker.inbox.invite(donors, shadow=True)
        self.wake(worker)

    def hear(self, worker: Worker) -> None:
        me, (what, said) = worker.me, worker.outbox[0]
        shadows = self.shadows
        here = me in self.hands
        if here and what == "ready" and shadows.takes(me, self.roster):
            self.seen["shadow asks"] += 1
            self.push(self.roster.shadow_lonely(me))
        elif here and what == "level" and me in shadows:
            shadows.level(me, worker.protocol.hand.number)
            if said:
                self.push(self.roster.shadow_level(me))
        elif here and what == "succeeded":
            self.seen["succeeded"] += 1
        else:
            super().hear(worker)
            if what == "entered":
                shadows.entered(me)
            self.invite()
            return
        worker.outbox.popleft()
        if not worker.outbox:
            self.senders.discard(worker)
        self.invite()

    def invite(self) -> None:
        for shadow, donors in self.shadows.invitations(self.roster, lambda member: member):
            self.send(self.workers[shadow], (donors,))

    def succeed(self, worker: Worker, want: wants.Succeed) -> None:
        """What is beyond its State is void; that may be journaled only if it had lost its donor."""
        super().succeed(worker, want)
        number = worker.protocol.hand.number
        if number <= self.journaled:
            if worker.donor == self.told_by:
                raise Violation(f"{self.journaled} is journaled, and the shadow is at {number}")
            self.seen["rolled back"] += 1
            self.journaled = number - 1
        for kept in (self.records, self.evaluated, self.committed):
            for operation in [operation for operation in kept if operation >= number]:
                del kept[operation]

    def subscribe(self, worker: Worker, want: wants.Subscribe):
        stream = super().subscribe(worker, want)
        worker.asked = want.donor
        return stream

    def adopt(self, worker: Worker, want: wants.Adopt):
        worker.donor = worker.asked
        return super().adopt(worker, want)

    def notice(self, worker: Worker) -> None:
        self.shadows.forget(worker.me)
        super().notice(worker)
        if self.lost:
            heir = self.shadows.call(Resumed(step=0, ref=""))
            if heir is not None:
                self.seen["all lost"] += 1
                self.push(self.roster.start_over(heir))
                self.since = self.generations


ShadowSimulation.answers = {  # looked up when asked, since tests break some of them
    **Simulation.answers,
    wants.Succeed: lambda sim, worker, want: sim.succeed(worker, want),
    wants.Conclude: lambda sim, worker, want: sim.conclude(worker, want),
    wants.Subscribe: lambda sim, worker, want: sim.subscribe(worker, want),
    wants.Adopt: lambda sim, worker, want: sim.adopt(worker, want),
    wants.TellEntered: lambda sim, worker, want: sim.entered(worker, want),
}
