"""The group of group_simulation, with workers that are crews of several processes.

Speakers run GroupProtocol and followers Follower, as they ship. What is made up beside the world of
group_simulation: the lines within a worker, on which words come as late as the scheduler likes and
in order; and user code that waits for its mates in a collective after each operation, as clipping
or the next forward pass do, in evaluations, and for each slice. Nobody comes out of that but
together, or when the worker is broken and this process knows.

FlatSimulation is the way not taken: all processes meet each other.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elastix.comm.protocol import wants
from elastix.comm.protocol.crew import Crew
from elastix.comm.protocol.follower import Follower
from elastix.comm.protocol.membership import Membership
from elastix.comm.protocol.participant import Fenced, Released
from elastix.comm.protocol.wants import Await
from tests.unit.comm.group_simulation import (
    Choose,
    Collective,
    Group,
    Scenario,
    Simulation,
    Violation,
    Worker,
)

_END = None
"""On a line: nothing more will come."""


@dataclass(frozen=True, kw_only=True)
class CrewScenario(Scenario):
    """How many processes each worker is."""

    crew: int = 2


class Freed(Fenced):
    """A collective among mates was cut: user code raised."""


class Line:
    """One direction between a speaker and a follower."""

    def __init__(self, sender: "Process", receiver: "Process") -> None:
        self.sender = sender
        self.receiver = receiver
        self.words: deque = deque()


class Mates:
    """User code of one worker: its processes wait for each other again and again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.there: dict[object, set[int]] = {}
        self.processes: list[Process] = []


class Process(Worker):
    """One process of a worker; the one at place 0 stands for it."""

    def __init__(self, simulation: "CrewSimulation", me: int, place: int, mates: Mates) -> None:
        self.place = place
        self.mates = mates
        self.lines: list[Line] = []  # to others
        self.connecting: dict[int, Collective] = {}
        self.killed = False
        self._turn = 0
        super().__init__(simulation, me)
        mates.processes.append(self)

    def make_protocol(self):
        if self.place:
            return self.sim.follower(self.me, self.inbox)
        return super().make_protocol(crew=Crew(self.mates.size))

    @property
    def cut(self) -> bool:
        """Whether this process knows that its worker is broken, or taken out."""
        urgent = self.inbox.urgent
        fenced = urgent.generation > self.protocol.generation > 0 and self.me not in urgent.members
        broken = self.protocol.broken if self.place else self.protocol._crew.broken
        return broken or fenced

    @property
    def let_go(self) -> bool:
        return self.released is not None

    def prepare(self):
        yield from self.protocol.assemble()
        if not self.place:
            yield from super().prepare()
            self.outbox.append(("level", 0))  # it follows nobody outside

    def life(self):
        """As every worker's; where all places compute a payload, they wait for each other."""
        life, answer, error = super().life(), None, None
        while True:
            try:
                wanted = life.send(answer) if error is None else life.throw(error)
            except StopIteration:
                return
            answer = error = None
            try:
                if isinstance(wanted, wants.Payload) and wanted.operation.together:
                    at = self.protocol.hand.number, wanted.group.generation, wanted.group.members
                    yield from self.wait_for_mates(at)
                    self.sim.seen["computed together"] += self.place > 0
                if isinstance(wanted, wants.Compute):
                    yield from self.slice(self.train_step.own(wanted.members)[0])
                    self.sim.seen["taken over together"] += self.place > 0
                answer = yield wanted
            except BaseException as raised:  # noqa: BLE001 - the protocol's to handle
                error = raised

    def left(self):
        turn, self._turn = self._turn, self._turn + 1
        yield from self.wait_for_mates(turn)

    def slice(self, number: int):
        yield from self.wait_for_mates(
            (self.protocol.hand.number, self.protocol.generation, number)
        )

    def wait_for_mates(self, turn: object):
        there = self.mates.there.setdefault(turn, set())
        there.add(self.place)
        if len(there) == self.mates.size:
            for other in self.mates.processes:
                self.sim.wake(other)
        yield Await(lambda: len(there) == self.mates.size or self.cut)
        if len(there) < self.mates.size:
            raise Freed

    def check_size(self) -> None:
        if not self.place:
            super().check_size()

    def hear(self, place: int, word) -> None:
        """A word, or the end of a line."""
        if word is _END and not self.place:
            self.protocol._crew.broken = True
        elif word is _END:
            self.protocol.broken = True
        elif self.place:
            self.protocol.hear(word)
        else:
            self.protocol._crew.hear(place, word)


class CrewSimulation(Simulation):
    """Workers are crews."""

    def __init__(
        self,
        scenario: CrewScenario,
        choose: Choose,
        follower: type[Follower] = Follower,
        retold: Callable = lambda word: word,
        **broken,
    ) -> None:
        self.follower = follower
        self.retold = retold
        self.everybody: list[Process] = []
        super().__init__(scenario, choose, **broken)

    @property
    def processes(self) -> list[Process]:
        return self.everybody

    def make_worker(self, me: int) -> Process:
        mates = Mates(self.scenario.crew)
        speaker = Process(self, me, 0, mates)
        for place in range(1, mates.size):
            other = Process(self, me, place, mates)
            speaker.lines.append(Line(speaker, other))
            other.lines.append(Line(other, speaker))
            self.begin(other)
        self.everybody += mates.processes
        return speaker

    def peer(self, worker: Process, member: int) -> Process:
        return self.workers[member].mates.processes[worker.place]

    # ------------------------------------------------------------------ what a process wants

    def say(self, worker: Process, want: wants.Say) -> None:
        for line in worker.lines:
            line.words.append(self.retold(want.word))
            self.uninformed.add(line)

    def rail(self, worker: Process, generation: int, members: tuple[int, ...], scope: str) -> Group:
        return self.group(generation, members, f"{scope} {worker.place}")

    def connect(self, worker: Process, want: wants.Connect) -> None:
        if worker.protocol.group is not None:
            raise Violation(f"a follower of worker {worker.me} has not left its rail")
        worker.posted.clear()  # of a rail that it has not waited for
        rail = self.rail(worker, want.generation, want.members, "all")
        worker.posted[rail] = 0
        there = worker.connecting[want.generation] = worker.post(rail, "rail", None)
        there.result = rail

    def await_connected(self, worker: Process, want: wants.Connected) -> Collective:
        return worker.connecting[want.generation]

    def build_circle(self, worker: Process, want: wants.Build):
        if not worker.place:
            return self.build(worker, want)
        circle = self.rail(worker, want.generation, want.members, want.scope)
        worker.posted[circle] = 0
        connected = worker.post(circle, "connect", None)
        connected.result = circle
        return connected

    # ------------------------------------------------------------------ controller

    def whole(self, worker: Process) -> bool:
        return all(process.alive for process in worker.mates.processes)

    def send(self, worker: Process, message) -> None:
        for process in worker.mates.processes:
            super().send(process, message)

    def deliver(self, to) -> None:
        if not isinstance(to, Line):
            if not to.mail or isinstance(to.mail[0], Membership):
                super().deliver(to)
                return
            to.mail.popleft()  # whom to follow from outside
            if not to.mail:
                self.uninformed.discard(to)
            return
        word = to.words.popleft()
        if not to.words:
            self.uninformed.discard(to)
        if self.trace is not None:
            self.note(f"worker {to.receiver.me} place {to.receiver.place} is told {word}")
        to.receiver.hear(to.sender.place, word)
        self.wake(to.receiver)

    def kill(self, worker: Process) -> None:
        worker.killed = True
        self.seen["killed a follower" if worker.place else "killed a speaker"] += 1
        super().kill(worker)

    def through(self, worker: Process, over: BaseException) -> None:
        if worker.place and isinstance(over, Released):
            self.seen["followers released"] += 1
        super().through(worker, over)

    def end(self, worker: Process) -> None:
        super().end(worker)
        for line in worker.lines:
            line.words.append(_END)
            self.uninformed.add(line)

    def notice(self, worker: Process) -> None:
        """Of one process of a worker, the first that tells something of it."""
        speaker = self.workers[worker.me]
        clean = worker.done or worker.released is not None
        if worker is speaker and worker.me in self.hands:
            if not clean:
                self.tell_mates(worker)
            super().notice(worker)
        elif worker.me in self.hands and not (clean or speaker.done or speaker.let_go):
            self.tell_mates(worker)
            self.hands.discard(worker.me)
            self.push(self.roster.lost(worker.me))
            if self.scenario.replace and not self.roster.over:
                self.spawn()
        self.gone.discard(worker)

    def tell_mates(self, worker: Process) -> None:
        """The processes of a lost worker are told so."""
        for mate in worker.mates.processes:
            mate.hear(worker.place if worker.place else 1, _END)
            self.wake(mate)

    # ------------------------------------------------------------------ at the end

    def check(self) -> None:
        self.drain()
        super().check()
        for speaker in self.workers:
            crew = speaker.mates.processes
            if speaker.done and not any(p.killed for p in crew) and not all(p.done for p in crew):
                raise Violation(f"worker {speaker.me} is done, its followers are not")
            if any(p.killed for p in crew) and any(p.alive for p in crew):
                raise Violation(f"a process of worker {speaker.me} waits for ever")
            self.seen["freed"] += sum(not p.alive and not p.killed and not p.done for p in crew)

    def drain(self) -> None:
        """Whatever goes on when the controller has seen enough."""
        for _ in range(self.moments):
            if self.gone.items:
                worker = self.gone.items[0]
                self.gone.discard(worker)
                if worker.killed:
                    self.tell_mates(worker)
            elif self.runnable.items or self.uninformed.items:
                waiting = len(self.runnable.items)
                pick = self.choose(waiting + len(self.uninformed.items))
                if pick < waiting:
                    self.resume(self.runnable.items[pick])
                else:
                    self.deliver(self.uninformed.items[pick - waiting])
            else:
                return
        raise Violation("processes go round in circles")


CrewSimulation.answers = {
    **Simulation.answers,
    wants.Say: CrewSimulation.say,
    wants.Connect: CrewSimulation.connect,
    wants.Connected: CrewSimulation.await_connected,
    wants.Build: CrewSimulation.build_circle,
}


class FlatWorker(Worker):
    """A process that meets all others, and waits for its mates in user code."""

    def __init__(self, simulation: Simulation, me: int) -> None:
        self._turn = 0
        super().__init__(simulation, me)

    def left(self):
        size = self.sim.scenario.crew
        turn, self._turn = self._turn, self._turn + 1
        there = self.sim.there.setdefault((self.me // size, turn), set())
        there.add(self.me)
        first = self.me // size * size
        mates = [w for w in self.sim.workers[first : first + size] if w is not self]
        for mate in mates:
            self.sim.wake(mate)
        yield Await(lambda: len(there) == size or not all(mate.alive for mate in mates))
        if len(there) < size:
            raise Freed


class FlatSimulation(Simulation):
    """All processes of all workers are members of one group."""

    def __init__(self, scenario: CrewScenario, choose: Choose, **broken) -> None:
        self.there: dict = {}
        super().__init__(scenario, choose, **broken)

    def make_worker(self, me: int) -> FlatWorker:
        return FlatWorker(self, me)

    def end(self, worker: Worker) -> None:
        super().end(worker)
        for other in self.workers:
            self.wake(other)
