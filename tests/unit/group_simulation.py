"""A whole group in one thread: the real Roster, `decide` and cursor under a hostile scheduler.

`Worker` mirrors comm.rounds.Rounds and the parts of Reducer, Loader and Member around it, method by
method, as coroutines. Collectives are counted, not computed: one is over when whoever it waits
for has contributed, and each contributor learns so at any later moment, or hears of a newer urgent
generation first. Messages are delayed at will and stay in order; workers die at any moment.

A run is a function of `choose(n)`, which picks one of n; see `simulate`.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from elastix.comm.membership import Membership, Roster
from elastix.comm.recovery import Position, decide
from elastix.data.cursor import Cursor, merge, split

STEP, EVALUATE, FINISH = 1, 2, 3
_BUCKETS = 2

Choose = Callable[[int], int]


class Violation(Exception):
    """A law is broken."""


class Superseded(Exception):
    pass


class Fenced(Exception):
    pass


class Released(Exception):
    pass


class _Pause:
    """What a worker waits for besides collectives."""


COMPUTING = _Pause()
NEWS = _Pause()
NEVER = _Pause()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a run is like; the schedule itself comes from `choose`.

    Attributes:
        kill_every: one of so many moments is a kill or a hiccup, while there are any left.
        hiccups: how often the network fails one worker although nobody is dead.
        leaves: how often a worker is asked to leave.
        rollback: a step that would have to be reduced again is void, and done again.
        spares: whether workers beyond the first number are kept back.
        all_end: everybody has to get out of the last operation, also if others are gone by then.
        founding_kills: workers may die before the controller knows that all founders are in.
        weights: how likely workers go on, news arrives, the controller hears, or notices ends.
    """

    workers: int = 3
    joiners: int = 0
    min_workers: int = 1
    replace: bool = True
    kills: int = 2
    kill_every: int = 60
    hiccups: int = 0
    leaves: int = 0
    spares: bool = False
    rollback: bool = False
    all_end: bool = True
    founding_kills: bool = True
    epochs: int = 1
    length: int = 16
    batch_size: int = 8
    evaluate: bool = False
    weights: tuple[int, int, int, int] = (1, 1, 1, 1)


class Bag:
    """A set from which the n-th element can be picked; all operations take constant time."""

    def __init__(self) -> None:
        self.items: list = []
        self._place: dict = {}

    def __len__(self) -> int:
        return len(self.items)

    def __contains__(self, item) -> bool:
        return item in self._place

    def add(self, item) -> None:
        if item not in self._place:
            self._place[item] = len(self.items)
            self.items.append(item)

    def discard(self, item) -> None:
        place = self._place.pop(item, None)
        if place is not None:
            last = self.items.pop()
            if last is not item:
                self.items[place] = last
                self._place[last] = place


class Collective:
    """One operation of a group; `root` is None unless it is a broadcast."""

    __slots__ = ("missing", "result", "root", "tag", "values", "waiting")

    def __init__(self, tag, size: int, root: int | None) -> None:
        self.tag = tag
        self.root = root
        self.missing = size
        self.values: dict = {}
        self.waiting: list[Worker] = []
        self.result = None

    @property
    def over(self) -> bool:
        return self.root in self.values if self.root is not None else not self.missing


class Group:
    def __init__(self, generation: int, members: tuple[int, ...]) -> None:
        self.generation = generation
        self.members = members
        self.rank = {worker: rank for rank, worker in enumerate(members)}
        self.collectives: list[Collective] = []

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class Left:
    result: object
    complete: int
    generation: int


class Worker:
    """One worker's training thread, with the mailbox that its control thread fills."""

    def __init__(self, simulation: "Simulation", me: int) -> None:
        self.sim = simulation
        self.me = me
        self.alive = True
        self.done = False
        self.released = 0
        self.thread = self.life()
        self.wants = COMPUTING
        self.outbox: deque = deque()
        # news
        self.first_heard = self.heard = len(simulation.log)
        self.urgent = self.proposed = Membership(0, ())
        # rounds
        self.group: Group | None = None
        self.circle: Group | None = None
        self.sent = {}
        self.generation = 0
        self.operation = -1
        self.plan = 0
        self.complete = 0
        self.kind = 0
        self.agreed = 0
        self.begun = False
        self.given = 0
        self.result = None
        self.passed: Left | None = None
        self.outcome = ""
        self.void = self.next_void = False
        # reducer
        self.launched: list[Collective] = []
        self.launch_generation = 0
        self.weighed = 0  # the generation whose members' samples gradients are divided by
        self.buckets: tuple = ()
        self.drawn_plan = 0
        # loader and model
        self.epoch = 0
        self.cursor = Cursor(simulation.scenario.length)
        self.weights = 0

    def members(self, generation: int) -> tuple[int, ...]:
        if not self.first_heard < generation <= self.heard:
            raise Violation(f"worker {self.me} was never told of generation {generation}")
        return self.sim.log[generation - 1].members

    # ------------------------------------------------------------------ the train function

    def life(self):
        scenario = self.sim.scenario
        yield COMPUTING
        self.outbox.append(("ready", 0))
        yield from self.first_entry()
        while self.epoch < scenario.epochs:
            while True:
                yield from self.boundary()
                members = self.members(self.plan)
                draw = self.sim.draw(self.cursor, self.epoch, members)
                if draw is None:
                    break
                yield from self.step(draw)
            if scenario.evaluate:
                yield from self.run(EVALUATE)
            self.epoch += 1
        yield from self.run(FINISH)

    def step(self, draw):
        self.drawn_plan = self.plan
        yield COMPUTING  # forward
        self.launch_generation = self.weighed = self.generation
        self.launched = []
        self.buckets = ()
        for _ in range(_BUCKETS):
            newest = self.urgent.generation <= self.generation
            if self.group is not None and newest and not self.void:
                self.launch_bucket()
            yield COMPUTING  # backward
        left = yield from self.run(STEP)
        highest, lowest, void = left.result
        proposal = highest if highest == lowest else 0
        self.agreed = max(self.agreed, proposal)
        self.plan = max(self.plan, left.generation, proposal)
        if void:
            self.sim.seen["done again"] += 1
            self.cursor = self.sim.give_back(draw)
            return
        contributors = self.members(left.complete)
        self.cursor = self.sim.commit(self, draw, contributors)

    def launch_bucket(self) -> None:
        number = len(self.launched)
        contribution = (self.operation, self.drawn_plan, self.weighed)
        self.launched.append(self.post(("bucket", number), contribution))

    def prepare(self, generation: int) -> None:
        if generation != self.launch_generation:
            self.launch_generation = generation
            self.weighed = self.sim.weighed(self, generation)
            self.launched = []
            self.buckets = ()

    def launch(self) -> list[Collective]:
        if self.kind != STEP:
            return []
        self.prepare(self.group.generation)
        while len(self.launched) < _BUCKETS:
            self.launch_bucket()
        return self.launched

    def ballot(self):
        if self.kind != STEP:
            return self.operation
        proposed = self.proposed
        known = proposed.generation > max(self.generation, self.urgent.generation)
        if not known or (self.me in proposed.members and not self.sim.connected(proposed)):
            return 0, self.void
        return proposed.generation, self.void

    # ------------------------------------------------------------------ Rounds, as it stands

    def first_entry(self):
        while self.operation < 0:
            yield NEWS
            newest = max(self.urgent, self.proposed, key=lambda m: m.generation)
            if self.me in newest.members:
                try:
                    if not newest.urgent and self.sim.donors.get(self.me) in newest.members:
                        yield from self.follow(newest)
                    yield from self.enter(newest)
                except Superseded:
                    continue
            else:
                self.group = None
                self.generation = newest.generation

    def follow(self, proposed: Membership):
        """A joiner outside: its donor says where it enters, and it is where its donor is."""
        donor = self.sim.donors[self.me]
        self.generation = proposed.generation
        circle = self.feed(proposed.generation, donor, self.me)
        told = self.post(("feed",), None, circle, donor)
        yield from self.finish(told)
        self.operation, self.epoch, self.cursor, self.weights = told.values[donor]
        self.sim.seen["followed"] += 1

    def feed(self, generation: int, donor: int, joiner: int) -> Group:
        circle = self.sim.group(generation, (donor, joiner), scope=f"feed {joiner}")
        self.sent.setdefault(circle, 0)
        return circle

    def tell_joiners(self, members: tuple[int, ...]) -> None:
        """Whoever follows this worker and is in the generation enters it here as well."""
        for joiner, donor in self.sim.donors.items():
            if donor == self.me and joiner in members and joiner not in self.group.members:
                state = (self.operation, self.epoch, self.cursor, self.weights)
                circle = self.feed(self.agreed, self.me, joiner)
                self.post(("feed",), state, circle, self.me)

    def run(self, kind: int):
        self.kind = kind
        left = None
        while left is None:
            try:
                yield from self.catch_up()
                left = yield from self.attempt()
            except Superseded:
                continue
        if self.passed is not None:
            self.plan = max(self.plan, left.generation)
        else:
            self.begun = False
        self.kind = 0
        self.sim.left(self, kind, left)
        self.void, self.next_void = self.next_void, False
        self.complete = 0
        self.passed = None
        self.result = left.result
        self.operation += 1
        return left

    def boundary(self):
        while True:
            try:
                if self.urgent.generation > self.generation:
                    yield from self.catch_up()
                    self.sim.seen["between steps"] += 1
                elif self.agreed > self.generation:
                    members = self.members(self.agreed)
                    if self.me not in members:
                        self.released = self.agreed
                        raise Released
                    self.tell_joiners(members)
                    yield from self.enter(Membership(self.agreed, members, urgent=False))
                elif self.too_few():
                    yield from self.pause()
                else:
                    return
            except Superseded:
                continue

    def too_few(self) -> bool:
        few = self.group is not None and self.group.size < self.sim.scenario.min_workers
        return few and not self.begun

    def pause(self):
        self.sim.seen["paused"] += 1
        now = self.generation
        yield NEWS
        if self.urgent.generation <= now:
            self.agreed = self.proposed.generation

    def attempt(self):
        if self.passed is not None:
            return self.passed
        if self.group is None:
            raise Superseded
        if not self.complete:
            for collective in [] if self.void else self.launch():
                yield from self.finish(collective)
            self.complete = self.generation
            self.buckets = tuple(bucket.result for bucket in self.launched)
        collective = self.post(("round", self.kind), self.ballot())
        yield from self.finish(collective)
        return Left(collective.result, self.complete, self.generation)

    def finish(self, collective: Collective):
        if not (yield collective):
            raise Superseded

    def catch_up(self):
        while self.urgent.generation > self.generation:
            yield from self.enter(self.urgent)

    def enter(self, membership: Membership):
        if self.me not in membership.members:
            raise Fenced
        self.passed = None
        self.generation = membership.generation
        if not membership.urgent:
            self.plan = membership.generation
            self.given = 0
        self.group = self.sim.group(membership.generation, membership.members)
        self.sent[self.group] = 0
        complete = self.complete if self.operation >= 0 else self.given
        mine = Position(self.operation, complete, self.plan, self.kind)
        if self.kind == STEP and not self.complete:
            self.prepare(membership.generation)
            yield COMPUTING
        meeting = self.post(("meet",), mine)
        yield from self.finish(meeting)
        decision = meeting.result
        if decision.donor is not None:
            yield from self.finish(self.post(("layout",), None))
            yield from self.transfer(decision.donor, decision.newcomers)
        if self.operation < 0 and decision.founding:
            self.given = membership.generation
            yield from self.finish(self.post(("founded",), None))
        yield from self.go_on(decision)
        self.outbox.append(("entered", membership.generation))

    def transfer(self, donor: int, newcomers: tuple[int, ...]):
        ranks = (donor, *newcomers)
        mine = self.group.rank[self.me]
        if mine not in ranks:
            return
        circle, root = self.group, self.group.members[donor]
        if len(ranks) < self.group.size:
            members = tuple(self.group.members[rank] for rank in ranks)
            circle = self.sim.group(self.generation, members, scope="transfer")
            self.sent[circle] = 0
            yield from self.finish(self.post(("meet transfer",), None, circle))
        state = (self.epoch, self.cursor, self.weights) if mine == donor else None
        copy = self.post(("State",), state, circle, root)
        yield from self.finish(copy)
        if mine != donor:
            self.epoch, self.cursor, self.weights = copy.values[root]

    def go_on(self, decision):
        if self.operation < 0:
            self.operation = decision.operation
            self.sim.seen["joined"] += 1
        behind = self.operation < decision.operation
        if behind and self.kind == STEP and not self.complete:
            raise Violation(f"worker {self.me} is told a result without holding the buckets")
        if decision.source is not None:
            root = self.group.members[decision.source]
            told = self.post(("pass on",), self.result, self.group, root)
            yield from self.finish(told)
            if behind:
                self.passed = Left(told.values[root], self.complete, decision.plan)
        self.begun = decision.begun
        void = self.sim.scenario.rollback and decision.kind == STEP and not decision.complete
        self.next_void = behind and void
        if behind:
            self.sim.seen["passed on"] += 1
        else:
            if not decision.complete:
                self.void = void
            if self.kind:
                self.sim.seen["accepted" if decision.complete else "reduced again"] += 1
            self.complete = self.sim.kept(self, decision.complete)
            self.plan = max(self.plan, decision.plan) or self.generation

    def post(self, tag, value, group: Group | None = None, root: int | None = None) -> Collective:
        group = group or self.group
        number = self.sent[group]
        self.sent[group] = number + 1
        return self.sim.post(self, group, number, tag, value, root)


class Simulation:
    """The controller, the network and the scheduler.

    Attributes:
        seen: how often each kind of event took place.
        trace: what happened, if asked for.
    """

    def __init__(
        self,
        scenario: Scenario,
        choose: Choose,
        decide: Callable = decide,
        roster: type[Roster] = Roster,
        keep_complete: bool = False,
        keep_weight: bool = False,
        tracing: bool = False,
    ) -> None:
        self.scenario = scenario
        self.choose = choose
        self.decide = decide
        self.keep_complete = keep_complete
        self.keep_weight = keep_weight
        self.trace: list[str] | None = [] if tracing else None
        self.seen: Counter[str] = Counter()
        size = scenario.workers if scenario.spares else None
        self.roster = roster(scenario.workers, size, scenario.min_workers)
        self.log: list[Membership] = []
        self.groups: dict = {}
        self.workers: list[Worker] = []
        self.hands: set[int] = set()
        self.runnable = Bag()
        self.uninformed = Bag()
        self.senders = Bag()
        self.gone = Bag()  # dead or ended, and the controller does not know
        self.records: dict = {}
        self.evaluated: dict = {}
        self.committed: dict = {}
        self.kills = scenario.kills
        self.hiccups = scenario.hiccups
        self.leaves = scenario.leaves
        self.arrived: dict[int, set[int]] = {}
        self.donors: dict[int, int] = {}  # joiner to the peer that it follows
        self.draw = cache(self._draw)
        self._after = cache(self._after_commit)
        for _ in range(scenario.workers + scenario.joiners):
            self.spawn()

    # ------------------------------------------------------------------ data

    def _draw(self, cursor: Cursor, epoch: int, members: tuple[int, ...]):
        batch, after = cursor.draw(self.scenario.batch_size, epoch)
        if not batch:
            return None
        shares = split(batch, len(members), self.scenario.batch_size)
        return members, shares, after

    def _after_commit(self, draw, contributors: tuple[int, ...]):
        members, shares, after = draw
        there = set(contributors)
        used = [s for m, share in zip(members, shares, strict=True) if m in there for s in share]
        lost = [
            s for m, share in zip(members, shares, strict=True) if m not in there for s in share
        ]
        return merge(used), after.give_back(lost) if lost else after

    def commit(self, worker: Worker, draw, contributors: tuple[int, ...]) -> Cursor:
        used, after = self._after(draw, contributors)
        operation = worker.operation - 1
        if self.committed.setdefault(operation, used) != used:
            raise Violation(f"worker {worker.me} commits other samples in {operation}")
        return after

    def give_back(self, draw) -> Cursor:
        """Nothing of a void step counts."""
        _, shares, after = draw
        return after.give_back([span for share in shares for span in share])

    def left(self, worker: Worker, kind: int, left: Left) -> None:
        """A worker says how an operation ended; whoever said so before must have said the same."""
        if self.trace is not None:
            self.note(f"worker {worker.me} left {worker.operation} {left} {worker.buckets}")
        record: tuple = (kind, worker.weights)
        if kind == STEP and left.result[2]:
            record += ("void",)
        elif kind == STEP:
            if not worker.buckets:
                raise Violation(f"worker {worker.me} left {worker.operation} without its buckets")
            first = worker.buckets[0]
            if any(bucket is not first and bucket != first for bucket in worker.buckets):
                raise Violation(f"buckets of {worker.operation} from different sets of workers")
            contributors, contribution = first
            if contributors != frozenset(self.log[left.complete - 1].members):
                raise Violation(f"operation {worker.operation} is not what `complete` says it is")
            if contribution != (worker.operation, worker.drawn_plan, left.complete):
                raise Violation(f"operation {worker.operation} got gradients of {contribution}")
            record += (contributors, worker.drawn_plan)
        elif kind == EVALUATE:
            self.evaluated.setdefault(worker.operation, {})[worker.me] = left.result
        before = self.records.setdefault(worker.operation, record)
        if before is not record and before != record:
            raise Violation(f"operation {worker.operation}: {before} or {record}")
        worker.weights = hash((worker.weights, worker.operation, record))

    def kept(self, worker: Worker, complete: int) -> int:
        return worker.complete or complete if self.keep_complete else complete

    def weighed(self, worker: Worker, generation: int) -> int:
        return worker.weighed if self.keep_weight else generation

    # ------------------------------------------------------------------ network

    def group(self, generation: int, members: tuple[int, ...], scope: str = "all") -> Group:
        key = (generation, scope)
        if key not in self.groups:
            self.groups[key] = Group(generation, members)
        if self.groups[key].members != members:
            raise Violation(f"two groups with different members in generation {generation}")
        return self.groups[key]

    def post(self, worker: Worker, group: Group, number: int, tag, value, root) -> Collective:
        if number == len(group.collectives):
            group.collectives.append(Collective(tag, group.size, root))
        collective = group.collectives[number]
        if (collective.tag, collective.root) != (tag, root):
            raise Violation(f"{tag} of worker {worker.me} meets {collective.tag} of others")
        collective.values[worker.me] = value
        collective.missing -= 1
        if not collective.missing:
            self._reduce(collective, group)
        if collective.over:
            for other in collective.waiting:
                if other.alive and other.wants is collective:
                    self.runnable.add(other)
            collective.waiting.clear()
        return collective

    def _reduce(self, collective: Collective, group: Group) -> None:
        name, *rest = collective.tag
        values = collective.values
        if name == "meet":
            collective.result = self.decide([values[member] for member in group.members])
        elif name == "bucket":
            different = set(values.values())
            if len(different) > 1:
                raise Violation(f"a bucket adds up gradients of {different}")
            collective.result = (frozenset(values), different.pop())
        elif name == "round" and rest[0] == STEP:
            known, voids = zip(*values.values(), strict=True)
            if len(set(voids)) > 1:
                raise Violation(f"a step is void on some alone: {values}")
            collective.result = (max(known), min(known), any(voids))
        elif name == "round":
            if len(set(values.values())) > 1:
                raise Violation(f"a round adds up operations {set(values.values())}")
            collective.result = frozenset(values)

    def connected(self, proposed: Membership) -> bool:
        """Whether one member has seen that all have connected for a proposal."""
        arrived = self.arrived.get(proposed.generation, set())
        return arrived >= set(proposed.members) and bool(self.choose(2))

    # ------------------------------------------------------------------ controller

    def spawn(self) -> None:
        worker = Worker(self, len(self.workers))
        self.workers.append(worker)
        self.hands.add(worker.me)
        next(worker.thread)
        self.runnable.add(worker)

    def push(self, membership: Membership | None) -> None:
        if membership is None:
            return
        if self.trace is not None:
            self.note(f"controller: {membership}")
        self.log.append(membership)
        if membership.cause == "start":
            self.start_afresh()
        if membership.generation != len(self.log):
            raise Violation(f"generation {membership.generation} after {len(self.log) - 1}")
        for me in self.hands:
            if self.workers[me].alive:
                self.uninformed.add(self.workers[me])

    def start_afresh(self) -> None:
        """Whoever had the State died before the controller heard of it: a run begins anew."""
        if any(worker.alive and worker.operation >= 0 for worker in self.workers):
            raise Violation("a run begins anew although somebody has the State")
        for kept in (self.records, self.evaluated, self.committed):
            kept.clear()

    def hear(self, worker: Worker) -> None:
        what, generation = worker.outbox.popleft()
        if not worker.outbox:
            self.senders.discard(worker)
        if worker.me not in self.hands:
            return
        if self.trace is not None:
            self.note(f"controller hears {what} {generation} of worker {worker.me}")
        roster = self.roster
        if what == "ready":
            self.push(roster.ready(worker.me))
            if worker.me in roster.watching:
                self.donors[worker.me] = roster.donors()[0]
                self.push(roster.level(worker.me))
        elif what == "entered":
            self.push(roster.entered(worker.me, generation))
        else:
            self.push(roster.doubt(generation))

    def notice(self, worker: Worker) -> None:
        """The controller learns that a process ended."""
        self.gone.discard(worker)
        self.hands.discard(worker.me)
        if self.trace is not None:
            self.note(f"controller notices the end of worker {worker.me}")
        if worker.done:
            self.push(self.roster.finished(worker.me, worker.generation))
            return
        if worker.released:
            self.push(self.roster.left(worker.me, worker.released))
            if self.scenario.replace and not self.roster.over:
                self.spawn()
            return
        self.push(self.roster.lost(worker.me))
        if self.scenario.replace and not self.roster.over:
            self.spawn()

    # ------------------------------------------------------------------ scheduler

    def note(self, line: str) -> None:
        self.trace.append(line)

    def deliver(self, worker: Worker) -> None:
        membership = self.log[worker.heard]
        worker.heard += 1
        if worker.heard == len(self.log):
            self.uninformed.discard(worker)
        if membership.urgent:
            worker.urgent = membership
        else:
            worker.proposed = membership
            self.arrived.setdefault(membership.generation, set()).add(worker.me)
        if worker.wants is not COMPUTING and self._may_run(worker):
            self.runnable.add(worker)

    def _may_run(self, worker: Worker) -> bool:
        wants = worker.wants
        if wants is COMPUTING:
            return True
        news = worker.urgent.generation > worker.generation
        if wants is NEWS:
            return news or worker.proposed.generation > worker.generation
        return news or (wants is not NEVER and wants.over)

    def resume(self, worker: Worker) -> None:
        wants = worker.wants
        answer = None
        if isinstance(wants, Collective):
            answer = wants.over
            if answer and worker.urgent.generation > worker.generation:
                answer = bool(self.choose(2))
        elif wants is NEVER:
            answer = False
        if self.trace is not None:
            what = wants.tag if isinstance(wants, Collective) else "goes on"
            state = (worker.generation, worker.operation, worker.kind, worker.complete)
            self.note(f"worker {worker.me} {state}: {what} {answer}")
        try:
            wants = worker.wants = worker.thread.send(answer)
        except StopIteration:
            worker.done = True
            self.end(worker)
        except Fenced:
            self.seen["fenced"] += 1
            self.end(worker)
        except Released:
            self.seen["released"] += 1
            self.end(worker)
        else:
            if not self._may_run(worker):
                self.runnable.discard(worker)
                if wants.__class__ is Collective:
                    wants.waiting.append(worker)
        if worker.outbox and worker not in self.senders:
            self.senders.add(worker)

    def end(self, worker: Worker) -> None:
        worker.alive = False
        self.runnable.discard(worker)
        self.uninformed.discard(worker)
        self.gone.add(worker)

    def kill(self, worker: Worker) -> None:
        if self.trace is not None:
            self.note(f"KILL worker {worker.me}")
        worker.thread.close()
        self.seen["killed"] += 1
        self.end(worker)

    def hiccup(self, worker: Worker) -> None:
        """The network fails one worker, nobody is dead."""
        if self.trace is not None:
            self.note(f"HICCUP at worker {worker.me} in {worker.wants.tag}")
        self.seen["hiccup"] += 1
        worker.wants = NEVER
        worker.outbox.append(("doubt", worker.generation))
        self.senders.add(worker)
        if not self._may_run(worker):
            self.runnable.discard(worker)

    def mishaps(self) -> None:
        alive = [worker for worker in self.workers if worker.alive]
        worker = alive[self.choose(len(alive))] if alive else None
        if self.leaves:
            self.leaves -= 1
            if worker is not None and worker.me in self.roster.newest.members:
                self.seen["asked to leave"] += 1
                self.push(self.roster.leave(worker.me))
        elif self.kills:
            self.kills -= 1
            if worker is not None:
                self.kill(worker)
        else:
            self.hiccups -= 1
            if worker is not None and isinstance(worker.wants, Collective):
                self.hiccup(worker)

    @property
    def ended(self) -> bool:
        return self.roster.over or self.roster.extinct

    def run(self) -> "Simulation":
        runnable, uninformed = self.runnable.items, self.uninformed.items
        senders, gone = self.senders.items, self.gone.items
        running, informing, hearing, noticing = self.scenario.weights
        choose = self.choose
        every, risky = self.scenario.kill_every, self.scenario.founding_kills
        while not self.ended:
            first = len(runnable) * running
            second = first + len(uninformed) * informing
            third = second + len(senders) * hearing
            total = third + len(gone) * noticing
            risky = risky or len(self.roster.holders) >= self.scenario.workers
            if not total:
                if not self.ask_after_failed_collectives():
                    break
            elif (self.kills or self.hiccups or self.leaves) and risky and not choose(every):
                self.mishaps()
            elif (pick := choose(total)) < first:
                self.resume(runnable[pick // running])
            elif pick < second:
                self.deliver(uninformed[(pick - first) // informing])
            elif pick < third:
                self.hear(senders[(pick - second) // hearing])
            else:
                self.notice(gone[(pick - third) // noticing])
        self.check()
        return self

    def ask_after_failed_collectives(self) -> bool:
        """A connection to a process that ended breaks, in time; a meeting waits without one."""
        asked = False
        for worker in self.workers:
            wants = worker.wants
            if worker.alive and isinstance(wants, Collective) and wants.tag[0] != "meet":
                if all(self.workers[member].alive for member in worker.group.members):
                    continue
                worker.wants = NEVER
                worker.outbox.append(("doubt", worker.generation))
                self.senders.add(worker)
                asked = True
        return asked

    # ------------------------------------------------------------------ at the end

    def check(self) -> None:
        alive = {worker.me for worker in self.workers if worker.alive or worker.done}
        for operation, results in self.evaluated.items():
            if len({result for me, result in results.items() if me in alive}) > 1:
                raise Violation(f"survivors got different results of {operation}: {results}")
        if self.roster.extinct:
            self.seen["extinct"] += 1
            return
        if not self.roster.over and (
            self.scenario.all_end or not any(worker.done for worker in self.workers)
        ):
            stuck = [
                (w.me, w.generation, w.operation, w.kind, getattr(w.wants, "tag", w.wants))
                for w in self.workers
                if w.alive
            ]
            raise Violation(f"nothing can happen any more: {stuck[:10]}")
        scenario = self.scenario
        used = sorted(span for spans in self.committed.values() for span in spans)
        reached = 0
        for start, stop in used:
            if start != reached:
                raise Violation(f"position {min(start, reached)} missing or used twice: {used}")
            reached = stop
        if any(worker.done for worker in self.workers) and (
            reached != scenario.epochs * scenario.length
        ):
            raise Violation(f"samples used up to {reached} alone")


def simulate(scenario: Scenario, choose: Choose, **broken) -> Simulation:
    """Run one schedule to its end.

    Raises:
        Violation: a law is broken.
    """
    return Simulation(scenario, choose, **broken).run()


def scenario_of(choose: Choose, **fixed) -> Scenario:
    """Some small scenario."""
    workers = 2 + choose(4)
    weights = ((1, 1, 1, 1), (4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (1, 1, 1, 8), (8, 8, 1, 1))
    values = {
        "workers": workers,
        "joiners": choose(3),
        "min_workers": 1 + choose(workers),
        "kills": choose(workers + 1),
        "kill_every": (20, 50, 100)[choose(3)],
        "epochs": 1 + choose(2),
        "length": 1 + choose(20),
        "batch_size": workers + 2 + choose(6),
        "evaluate": not choose(2),
        "weights": weights[choose(len(weights))],
    }
    return Scenario(**{**values, **fixed})


def chooser(seed: int) -> Choose:
    """Choices from a generator."""
    draw = Random(seed).random
    return lambda n: math.floor(draw() * n)


def from_bytes(entropy: bytes) -> Choose:
    """Choices from bytes; the last possibility, which is no kill, where they have run out."""
    rest = iter(entropy)

    def choose(n: int) -> int:
        value = next(rest, None)
        return n - 1 if value is None else value % n

    return choose
