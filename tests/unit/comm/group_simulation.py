"""A whole group in one thread: the protocol that ships, under a hostile scheduler.

Every member runs GroupProtocol itself, with the Inbox, Roster, `decide`, Vote and cursor that ship.
What is made up here is the world that it asks for: a network, in which a
collective is over when whoever it waits for has contributed, and each contributor learns so at any
later moment, or hears of a newer urgent generation first; catch-up streams; a controller whose
messages are delayed at will and stay in order; and of the training step, the few lines of Reducer
and Loader that say which gradients stand in which bucket. Workers die at any moment.

A run is a function of `choose(n)`, which picks one of n; see `simulate`.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from types import SimpleNamespace

from elastix.comm.protocol import wants
from elastix.comm.protocol.catch_up_messages import Digest, DigestMark, Entering, Given, Watched
from elastix.comm.protocol.group_protocol import GroupProtocol
from elastix.comm.protocol.inbox import Inbox
from elastix.comm.protocol.membership import Membership, Roster
from elastix.comm.protocol.participant import Fenced, Joined, Released
from elastix.comm.protocol.recovery import decide
from elastix.comm.protocol.wants import Await, Failed, Superseded
from elastix.data.cursor import Cursor, merge, split
from elastix.data.slice_assignment import Assignment, shares
from elastix.train.replica.vote import Vote, decode

STEP, EVALUATE, FINISH = 1, 2, 3
_BUCKETS = ("bucket 0", "bucket 1")
_ROUNDS = {STEP: "round of a step", EVALUATE: "evaluation", FINISH: "end"}
_EVALUATION = SimpleNamespace(kind=EVALUATE, lacks=lambda members: False, together=True)
_END = SimpleNamespace(kind=FINISH, lacks=lambda members: False, together=False)

Choose = Callable[[int], int]


class Violation(Exception):
    """A law is broken."""


class Computing:
    """A worker is busy for a while, and cannot be interrupted; then it goes on with `answer`."""

    __slots__ = ("answer",)

    def __init__(self, answer=None) -> None:
        self.answer = answer


COMPUTING = Computing()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a run is like; the schedule itself comes from `choose`.

    Attributes:
        kill_every: one of so many moments is a kill or a hiccup, while there are any left.
        hiccups: how often the network fails one worker although nobody is dead.
        leaves: how often a worker is asked to leave.
        slices: into so many each batch is cut; 0: into a share for each worker.
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
    slices: int = 0
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
    """Something that members of a group do together; `root` is None unless it is a broadcast."""

    __slots__ = ("members", "missing", "result", "root", "tag", "values", "waiting")

    def __init__(self, tag, members: tuple[int, ...], root: int | None) -> None:
        self.tag = tag
        self.root = root
        self.members = members
        self.missing = len(members)
        self.values: dict = {}
        self.waiting: list[Worker] = []
        self.result = None

    @property
    def over(self) -> bool:
        return self.root in self.values if self.root is not None else not self.missing

    def __str__(self) -> str:
        return f"{self.tag}, {self.missing} missing"


class Group:
    def __init__(self, generation: int, members: tuple[int, ...]) -> None:
        self.generation = generation
        self.members = members
        self.collectives: list[Collective] = []


class Stream:
    """Both ends of a joiner's connection to its donor. What is told arrives at once, in order."""

    def __init__(self, joiner: "Worker") -> None:
        self.joiner = joiner
        self.given: Given | None = None
        self.failed = False
        self.told: deque = deque()
        self.fed = self.asked = False
        self.steps = 0

    @property
    def head(self):
        return self.told[0] if self.told else None

    @property
    def backlog(self) -> int:
        return len(self.told)

    def pop(self):
        return self.told.popleft()

    def say_able(self, able: bool) -> None:
        raise AssertionError(able)

    def ask_digest(self) -> None:
        self.asked = True

    def close(self) -> None:
        self.failed = True

    def tell(self, *told) -> None:
        self.told += told
        self.joiner.sim.wake(self.joiner)


class Step:
    """A training step as an operation: what Reducer does to its buckets, without gradients."""

    kind = STEP
    together = False

    def __init__(self, worker: "Worker") -> None:
        self.worker = worker
        self.plan = 0  # the generation whose members share the batch
        self.members: tuple[int, ...] = ()
        self.generation = 0  # of the group in which buckets are being launched
        self.weighed = 0  # the generation by whose members' samples gradients are divided
        self.launched: list[Collective] = []
        self.computed: set[int] = set()  # slices

    def begin(self, members: tuple[int, ...]) -> None:
        protocol = self.worker.protocol
        self.members, self.plan = members, protocol.plan
        self.generation = self.weighed = protocol.generation
        self.launched = []
        self.computed = set()

    def own(self, members: tuple[int, ...]) -> list[int]:
        """Slices that fall to this worker if these members do the step, and are not computed."""
        if not self.worker.sim.scenario.slices:
            return []
        owners = self.worker.sim.owners(self.members, frozenset(members))
        mine = (number for number, owner in enumerate(owners) if owner == self.worker.me)
        return [number for number in mine if number not in self.computed]

    def lacks(self, members: tuple[int, ...]) -> bool:
        return bool(self.own(members))

    def backward(self) -> None:
        if self.worker.protocol.usable:
            self.launch_next()

    def prepare(self, generation: int) -> None:
        if generation != self.generation:
            self.generation = generation
            self.weighed = self.worker.sim.weighed(self, generation)
            self.launched = []

    def launch(self) -> Collective:
        self.prepare(self.worker.protocol.generation)
        while len(self.launched) < len(_BUCKETS):
            self.launch_next()
        return self.launched[-1]  # none of those before it can be over later

    def launch_next(self) -> None:
        worker = self.worker
        tag = _BUCKETS[len(self.launched)]
        contribution = (worker.protocol.hand.number, self.plan, self.weighed)
        value = contribution, tuple(self.computed)
        self.launched.append(worker.post(worker.protocol.group, tag, value))


class Worker:
    """A train function, with what it shares with a controller and with peers."""

    def __init__(self, simulation: "Simulation", me: int) -> None:
        self.sim = simulation
        self.me = me
        self.alive = True
        self.done = False
        self.released: int | None = None
        self.waits = COMPUTING
        self.mail: deque = deque()  # from the controller, not delivered yet
        self.outbox: deque = deque()
        self.inbox = Inbox()
        self.protocol = self.make_protocol()
        self.posted: dict[Group, int] = {}
        self.following: Stream | None = None
        self.streams: list[Stream] = []  # to joiners
        self.train_step = Step(self)
        self.epoch = 0
        self.cursor = Cursor(simulation.scenario.length)
        self.weights = 0
        self.thread = self.life()

    def make_protocol(self, **options):
        return self.sim.protocol(
            self.me,
            self.inbox,
            min_members=self.sim.scenario.min_workers,
            redo=STEP if self.sim.scenario.rollback else 0,
            rule=self.sim.rule,
            **options,
        )

    @property
    def state(self):
        return self.epoch, self.cursor, self.weights

    @property
    def given(self):
        """What others are given."""
        return self.state

    def prepare(self):
        """Up to where the controller hears of this worker."""
        self.outbox.append(("ready", self.protocol.hand.number))
        yield from ()

    def left(self):
        """User code after an operation."""
        yield from ()

    def slice(self, number: int):
        """User code on a slice."""
        yield from ()

    def life(self):
        scenario, protocol = self.sim.scenario, self.protocol
        yield COMPUTING
        yield from self.prepare()
        yield from protocol.come_in()
        while self.epoch < scenario.epochs:
            while True:
                yield from protocol.boundary()
                if self.streams:
                    self.feed_joiners()
                drawn = draw(self.cursor, self.epoch, protocol.planned, scenario.batch_size)
                if drawn is None:
                    break
                self.check_size()
                yield from self.step(drawn)
                yield from self.left()
            if scenario.evaluate:
                yield from protocol.run(_EVALUATION)
                yield from self.left()
            self.epoch += 1
        if protocol.joiner.following and protocol.joiner.shadow:
            yield from protocol.succeed()
        if not protocol.joiner.following:
            yield from protocol.run(_END)

    def check_size(self) -> None:
        """A group below its minimum only finishes what somebody has begun."""
        protocol = self.protocol
        if protocol.joiner.following or protocol.hand.begun:
            return
        if len(protocol.group.members) < self.sim.scenario.min_workers:
            raise Violation(f"worker {self.me} begins a step in too small a group")

    def step(self, drawn):
        protocol, step = self.protocol, self.train_step
        follows = protocol.joiner.following
        step.begin(drawn[0])
        yield COMPUTING  # forward
        own = not follows and self.sim.scenario.slices
        for number in step.own(self.inbox.members[protocol.generation]) if own else []:
            yield from self.slice(number)
            step.computed.add(number)
            yield COMPUTING
        for _ in _BUCKETS:
            if not follows:
                step.backward()
            yield COMPUTING
        left = yield from protocol.run(step)
        agreed = verdict_of(left.result)
        protocol.step_left(left, agreed.proposal)
        if agreed.void:
            self.sim.seen["done again"] += 1
            self.cursor = self.sim.give_back(drawn)
        else:
            self.cursor = self.sim.commit(self, drawn, left.contributors)

    def feed_joiners(self) -> None:
        """At a boundary, as CatchUpSender does: a State for newcomers, a digest for who asked."""
        if self.protocol.joiner.following:
            return
        for stream in self.streams:
            if not stream.fed:
                stream.fed = True
                stream.given = Given(self.protocol.hand.number, [], self.given)
                self.sim.wake(stream.joiner)
            elif stream.steps and stream.asked:
                stream.asked = False
                stream.tell(DigestMark(), Digest(self.state))

    def post(self, group: Group, tag: str, value, root: int | None = None) -> Collective:
        """Contribute to the group's next collective."""
        number = self.posted[group]
        self.posted[group] = number + 1
        if number == len(group.collectives):
            group.collectives.append(Collective(tag, group.members, root))
        collective = group.collectives[number]
        if collective.tag != tag or collective.root != root:
            raise Violation(f"{tag} of worker {self.me} meets {collective.tag} of others")
        collective.values[self.me] = value
        collective.missing -= 1
        if not collective.missing:
            self.sim.reduce(collective)
        if collective.waiting and collective.over:
            for other in collective.waiting:
                if other.alive and other.waits is collective:
                    self.sim.runnable.add(other)
            collective.waiting.clear()
        return collective


@lru_cache(maxsize=1 << 14)
def draw(cursor: Cursor, epoch: int, members: tuple[int, ...], batch_size: int):
    """A global batch, as Loader draws it: whose samples are which, and the cursor after it."""
    batch, after = cursor.draw(batch_size, epoch)
    return (members, split(batch, len(members), batch_size), after) if batch else None


@lru_cache(maxsize=1 << 14)
def committed(drawn, contributors: tuple[int, ...]):
    """What counts of a batch, and the cursor that owes the rest."""
    members, shares, after = drawn
    there = set(contributors)
    used: list = []
    lost: list = []
    for member, share in zip(members, shares, strict=True):
        (used if member in there else lost).extend(share)
    return merge(used), after.give_back(lost) if lost else after


@lru_cache(maxsize=1 << 14)
def vote(proposal: int, void: bool) -> tuple[int, ...]:
    told = {"drawn": 0, "journaled": -1, "store": False, "compare": False}
    return Vote(proposal=proposal, void=void, **told).encode()


verdict_of = lru_cache(maxsize=1 << 14)(decode)


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
        protocol: type[GroupProtocol] = GroupProtocol,
        keep_weight: bool = False,
        tracing: bool = False,
    ) -> None:
        self.scenario = scenario
        self.choose = choose
        self.decide = decide
        self.protocol = protocol
        self.keep_weight = keep_weight
        self.trace: list[str] | None = [] if tracing else None
        self.seen: Counter[str] = Counter()
        size = scenario.workers if scenario.spares else None
        self.roster = roster(scenario.workers, size, scenario.min_workers)
        self.moments = 5_000 + 300 * scenario.workers  # many times what a run takes
        self.generations = 0
        self.groups: dict = {}
        self.decisions: dict = {}
        self.owned: dict = {}
        self.workers: list[Worker] = []
        self.hands: set[int] = set()
        self.runnable = Bag()
        self.uninformed = Bag()
        self.senders = Bag()
        self.gone = Bag()  # dead or ended, and the controller does not know
        self.records: dict = {}
        self.evaluated: dict = {}
        self.committed: dict = {}
        self.mishaps_left = scenario.leaves + scenario.kills + scenario.hiccups  # in that order
        self.arrived: dict[int, set[int]] = {}
        for _ in range(scenario.workers + scenario.joiners):
            self.spawn()

    def rule(self, positions, members):
        """Decide once for all who meet: they see the same positions."""
        known = self.decisions.get(id(positions))
        if known is None:
            known = self.decisions[id(positions)] = self.decide(positions, members)
        return known

    # ------------------------------------------------------------------ data

    def commit(self, worker: Worker, drawn, contributors: tuple[int, ...]) -> Cursor:
        # Of a batch that is cut into slices whatever was handed over is in the step.
        used, after = committed(drawn, drawn[0] if self.scenario.slices else contributors)
        operation = worker.protocol.hand.number - 1
        if self.committed.setdefault(operation, used) != used:
            raise Violation(f"worker {worker.me} commits other samples in {operation}")
        return after

    def owners(self, members: tuple[int, ...], alive: frozenset[int]) -> tuple[int, ...]:
        """By slice of a batch that was planned for `members`."""
        known = self.owned.get((members, alive))
        if known is None:
            even = [1] * len(members)
            assignment = Assignment(members, shares(even, self.scenario.slices), tuple(even))
            known = self.owned[members, alive] = assignment.owners(alive)
        return known

    def give_back(self, drawn) -> Cursor:
        """Nothing of a void step counts."""
        _, shares, after = drawn
        return after.give_back([span for share in shares for span in share])

    def weighed(self, step: Step, generation: int) -> int:
        return step.weighed if self.keep_weight else generation

    # ------------------------------------------------------------------ what a worker wants

    def build(self, worker: Worker, want: wants.Build):
        group = self.group(want.generation, want.members, want.scope)
        if len(worker.posted) != (want.scope != "all"):
            raise Violation(f"worker {worker.me} has not left {worker.posted}")
        worker.posted[group] = 0
        if want.scope != "all":
            connected = worker.post(group, "connect", None)
            connected.result = group
            return connected
        if want.prepare is None or want.prepare.kind != STEP:
            return group
        want.prepare.prepare(want.generation)
        return Computing(group)

    def abandon(self, worker: Worker, want: wants.Abandon) -> None:
        del worker.posted[want.group]

    def meet(self, worker: Worker, want: wants.Meet) -> Collective:
        return worker.post(want.group, "meet", want.position)

    def compare_layouts(self, worker: Worker, want: wants.CompareLayouts) -> Collective:
        return worker.post(want.group, "layout", None)

    def give_state(self, worker: Worker, want: wants.GiveState) -> Collective:
        if want.founding != (not worker.protocol.hand.has_state and worker.weights == 0):
            raise Violation(f"worker {worker.me} founds a run that goes on, or the reverse")
        return worker.post(want.group, "State", worker.state, worker.me)

    def take_state(self, worker: Worker, want: wants.TakeState) -> Collective:
        return worker.post(want.group, "State", None, want.group.members[want.root])

    def all_have_state(self, worker: Worker, want: wants.AllHaveState) -> Collective:
        return worker.post(want.group, "founded", None)

    def pass_on(self, worker: Worker, want: wants.PassOn) -> Collective:
        return worker.post(want.group, "pass on", want.held, want.group.members[want.source])

    def compute(self, worker: Worker, want: wants.Compute) -> Computing:
        """One slice of a member that was lost."""
        step = worker.train_step
        step.computed.add(step.own(want.members)[0])
        self.seen["handed over"] += 1
        return Computing()

    def reduce_buckets(self, worker: Worker, want: wants.ReduceBuckets):
        return want.operation.launch() if want.operation.kind == STEP else None

    def payload(self, worker: Worker, want: wants.Payload):
        if want.operation.kind == STEP:
            return vote(worker.protocol.vote(self.connected), worker.protocol.hand.void), None
        return worker.protocol.hand.number, worker.protocol.hand.number

    def compare_calls(self, worker: Worker, want: wants.CompareCalls) -> Collective:
        return worker.post(want.group, "calls", (want.kind, want.detail))

    def reduce_payload(self, worker: Worker, want: wants.ReducePayload) -> Collective:
        return worker.post(want.group, _ROUNDS[want.operation.kind], want.payload)

    def conclude(self, worker: Worker, want: wants.Conclude) -> None:
        """A worker says how an operation ended; whoever said so before must have said the same."""
        kind, left, number = want.operation.kind, want.outcome, want.number
        if self.trace is not None:
            self.note(f"worker {worker.me} left {number} {left}")
        record: tuple = (kind, worker.weights)
        if kind == STEP and verdict_of(left.result).void:
            record += ("void",)
        elif kind == STEP:
            record += self.accepted(worker.train_step, want)
        elif kind == EVALUATE:
            self.evaluated.setdefault(number, {})[worker.me] = left.result
        before = self.records.setdefault(number, record)
        if before is not record and before != record:
            raise Violation(f"operation {number}: {before} or {record}")
        worker.weights = hash((worker.weights, number, record))
        for stream in worker.streams:
            if stream.fed:
                stream.steps += kind == STEP
                stream.tell(
                    Watched(
                        number,
                        kind,
                        want.plan,
                        left.contributors,
                        left.complete,
                        left.generation,
                        left.result,
                        (record,),
                    )
                )

    def accepted(self, step: Step, want: wants.Conclude) -> tuple:
        """What the buckets of a step hold, if it counts."""
        number, left = want.number, want.outcome
        if len(step.launched) < len(_BUCKETS) or not all(bucket.over for bucket in step.launched):
            raise Violation(f"worker {step.worker.me} left {number} without its buckets")
        first = step.launched[0].result
        if any(bucket.result is not first and bucket.result != first for bucket in step.launched):
            raise Violation(f"buckets of {number} from different sets of workers")
        contributors, contribution = first
        if contributors != frozenset(left.contributors):
            raise Violation(f"operation {number} is not what `complete` says it is")
        if contribution != (number, step.plan, left.complete):
            raise Violation(f"operation {number} got gradients of {contribution}")
        if want.plan is not step.members and want.plan != step.members:
            raise Violation(f"joiners are told another plan of {number} than was used")
        return contributors, step.plan

    def entered(self, worker: Worker, want: wants.TellEntered) -> None:
        self.seen["followed"] += want.joined is not None and want.joined.watched_steps > 0
        worker.following = None
        worker.outbox.append(("entered", want.generation))

    def recovered(self, worker: Worker, want: wants.TellRecovered) -> None:
        self.seen[want.outcome] += 1

    def doubt(self, worker: Worker, want: wants.Doubt) -> None:
        worker.outbox.append(("doubt", want.generation))

    def announce_entry(self, worker: Worker, want: wants.AnnounceEntry) -> None:
        for stream in worker.streams:
            if stream.joiner.me in want.members:
                stream.tell(Entering(want.generation))

    def subscribe(self, worker: Worker, want: wants.Subscribe) -> Stream:
        donor = self.workers[want.donor]
        stream = worker.following = Stream(worker)
        if donor.alive:
            donor.streams = [s for s in donor.streams if not s.failed] + [stream]
        else:
            stream.failed = True
        return stream

    def adopt(self, worker: Worker, want: wants.Adopt) -> Joined:
        worker.epoch, worker.cursor, worker.weights = want.given.state
        return Joined(0.0, 0)

    def take_digest(self, worker: Worker, want: wants.TakeDigest):
        return worker.state

    def unequal(self, worker: Worker, want: wants.Unequal) -> None:
        raise Violation(f"joiner {worker.me} has another State than its donor")

    def level(self, worker: Worker, want: wants.Level) -> None:
        worker.outbox.append(("level", int(want.equal)))

    @property
    def lost(self) -> bool:
        """Nobody has the State, and there is nowhere to go back to."""
        return self.roster.extinct

    def succeed(self, worker: Worker, want: wants.Succeed) -> None:
        worker.outbox.append(("succeeded", worker.protocol.hand.number))

    def lonely(self, worker: Worker, want: wants.Lonely) -> None:
        self.seen["lonely"] += 1
        worker.outbox.append(("ready", worker.protocol.hand.number))

    def imitate(self, worker: Worker, want: wants.Imitate) -> None:
        watched = want.watched
        (record,) = watched.parts
        if record[1] != worker.weights:
            raise Violation(f"joiner {worker.me} is not where the group was")
        if watched.kind == STEP and watched.plan != worker.train_step.members:
            raise Violation(f"joiner {worker.me} has drawn another batch than the group")
        worker.weights = hash((worker.weights, watched.operation, record))

    # ------------------------------------------------------------------ network

    def group(self, generation: int, members: tuple[int, ...], scope: str = "all") -> Group:
        key = (generation, scope)
        if key not in self.groups:
            self.groups[key] = Group(generation, members)
        if self.groups[key].members != members:
            raise Violation(f"two groups with different members in generation {generation}")
        return self.groups[key]

    def reduce(self, collective: Collective) -> None:
        tag, values = collective.tag, collective.values
        if tag in ("meet", "calls"):
            collective.result = [values[member] for member in collective.members]
        elif tag in _BUCKETS:
            different = {contribution for contribution, _ in values.values()}
            if len(different) > 1:
                raise Violation(f"a bucket adds up gradients of {different}")
            slices = [number for _, computed in values.values() for number in computed]
            if sorted(slices) != list(range(self.scenario.slices)):
                raise Violation(f"a bucket adds up the slices {slices}")
            collective.result = (frozenset(values), different.pop())
        elif tag == _ROUNDS[STEP]:
            votes = set(values.values())
            if len({vote[-1] for vote in votes}) > 1:
                raise Violation(f"a step is void on some alone: {votes}")
            collective.result = tuple(map(max, *votes)) if len(votes) > 1 else votes.pop()
        elif tag in _ROUNDS.values():
            if len(set(values.values())) > 1:
                raise Violation(f"a round adds up operations {set(values.values())}")
            collective.result = frozenset(values)

    def connected(self, proposed: Membership) -> bool:
        """Whether one member has seen that all have connected for a proposal."""
        arrived = self.arrived.get(proposed.generation, set())
        return arrived >= set(proposed.members) and bool(self.choose(2))

    # ------------------------------------------------------------------ controller

    def spawn(self) -> None:
        worker = self.make_worker(len(self.workers))
        self.workers.append(worker)
        self.hands.add(worker.me)
        self.begin(worker)

    def make_worker(self, me: int) -> Worker:
        return Worker(self, me)

    def begin(self, worker: Worker) -> None:
        next(worker.thread)
        self.runnable.add(worker)

    def push(self, membership: Membership | None) -> None:
        if membership is None:
            return
        if self.trace is not None:
            self.note(f"controller: {membership}")
        self.generations += 1
        if membership.cause == "start":
            self.start_afresh()
        if membership.generation != self.generations:
            raise Violation(f"generation {membership.generation} after {self.generations - 1}")
        for me in self.hands:
            self.send(self.workers[me], membership)

    def send(self, worker: Worker, message) -> None:
        if worker.alive:
            worker.mail.append(message)
            self.uninformed.add(worker)

    def start_afresh(self) -> None:
        """Whoever had the State died before the controller heard of it: a run begins anew."""
        if any(self.whole(worker) and worker.protocol.hand.has_state for worker in self.workers):
            raise Violation("a run begins anew although somebody has the State")
        for kept in (self.records, self.evaluated, self.committed):
            kept.clear()

    def whole(self, worker: Worker) -> bool:
        return worker.alive

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
                self.send(worker, roster.donors())
        elif what == "level":
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
            self.push(self.roster.finished(worker.me, worker.protocol.generation))
            return
        if worker.released is not None:
            self.push(self.roster.left(worker.me, worker.released))
        else:
            self.push(self.roster.lost(worker.me))
        if self.scenario.replace and not self.roster.over:
            self.spawn()

    # ------------------------------------------------------------------ scheduler

    def note(self, line: str) -> None:
        self.trace.append(line)

    def deliver(self, worker: Worker) -> None:
        message = worker.mail.popleft()
        if not worker.mail:
            self.uninformed.discard(worker)
        if not isinstance(message, Membership):
            worker.inbox.invite(message)
        else:
            worker.inbox.publish(message)
            if not message.urgent:
                self.arrived.setdefault(message.generation, set()).add(worker.me)
        self.wake(worker)

    def lose_mail(self, worker: Worker) -> None:
        """What it was told last is lost, and the rest arrives: whoever told it is no more."""
        for _ in range(self.choose(len(worker.mail) + 1)):
            worker.mail.pop()
        while worker.alive and worker.mail:
            self.deliver(worker)
        worker.mail.clear()
        self.uninformed.discard(worker)

    def wake(self, worker: Worker) -> None:
        """Something has changed that it may wait for."""
        if worker.alive and worker not in self.runnable and self._may_run(worker):
            self.runnable.add(worker)

    def _may_run(self, worker: Worker) -> bool:
        waits = worker.waits
        if waits.__class__ is Collective:
            return waits.over or worker.protocol.superseded
        return waits.__class__ is Computing or waits.until()

    def resume(self, worker: Worker, failure: Failed | None = None) -> None:
        """Until it has to wait for something."""
        waits = worker.waits
        if self.trace is not None:
            self.note(f"worker {worker.me} {worker.protocol.generation} {waits} {failure or ''}")
        error: Exception | None = failure
        answer = None
        if waits.__class__ is Computing:
            answer = waits.answer
        elif waits.__class__ is Collective and error is None:
            if not waits.over or (worker.protocol.superseded and self.choose(2)):
                error = Superseded()
            else:
                answer = waits.result if waits.root is None else self.take(worker, waits)
        if error is not None and waits.tag == "connect":
            del worker.posted[waits.result]
        thread = worker.thread
        try:
            wanted = thread.send(answer) if error is None else thread.throw(error)
            while wanted.__class__ not in _WAITING:
                wanted = self.answers[wanted.__class__](self, worker, wanted)
                if wanted.__class__ not in _WAITING:
                    wanted = thread.send(wanted)
        except (StopIteration, Fenced, Released) as over:
            self.through(worker, over)
        else:
            worker.waits = wanted
            if wanted is not COMPUTING and not self._may_run(worker):
                self.pause(worker, wanted)
        if worker.outbox:
            self.senders.add(worker)

    def take(self, worker: Worker, told: Collective):
        """What a broadcast has brought."""
        value = told.values[told.root]
        if told.tag != "State":
            return value
        if worker.me == told.root:
            return None
        self.seen["joined"] += 1
        worker.epoch, worker.cursor, worker.weights = value
        return Joined(0.0, 0)

    def pause(self, worker: Worker, waits) -> None:
        """It goes on when somebody else has done something."""
        self.runnable.discard(worker)
        if waits.__class__ is Collective:
            waits.waiting.append(worker)
        elif waits.phase:
            self.seen["paused"] += 1

    def through(self, worker: Worker, over: BaseException) -> None:
        """Its thread has come to an end."""
        if isinstance(over, Released):
            worker.released = over.generation
        elif isinstance(over, StopIteration):
            worker.done = not worker.protocol.joiner.following
            worker.released = None if worker.done else 0  # nobody has to know that it is through
        self.seen[type(over).__name__.lower()] += 1
        self.end(worker)

    def end(self, worker: Worker) -> None:
        worker.alive = False
        self.runnable.discard(worker)
        self.uninformed.discard(worker)
        self.gone.add(worker)
        for stream in worker.streams:
            stream.failed = True
            self.wake(stream.joiner)

    def kill(self, worker: Worker) -> None:
        if self.trace is not None:
            self.note(f"KILL worker {worker.me}")
        worker.thread.close()
        self.seen["killed"] += 1
        at_work = worker.waits.__class__ is Computing and worker.waits is not COMPUTING
        if at_work and worker.waits.answer is None:
            self.seen["killed while it computed for another"] += 1
        self.end(worker)

    def hiccup(self, worker: Worker) -> None:
        """The network fails one worker, nobody is dead."""
        if self.trace is not None:
            self.note(f"HICCUP at worker {worker.me}")
        if isinstance(worker.waits, Collective):
            self.seen["hiccup"] += 1
            self.resume(worker, Failed(OSError("hiccup")))
        elif worker.following is not None:
            self.seen["stream lost"] += 1
            worker.following.failed = True
            self.wake(worker)

    @property
    def processes(self) -> list[Worker]:
        return self.workers

    def mishap(self) -> None:
        alive = [worker for worker in self.processes if worker.alive]
        worker = alive[self.choose(len(alive))] if alive else None
        number, self.mishaps_left = self.mishaps_left, self.mishaps_left - 1
        if worker is None:
            return
        if number > self.scenario.kills + self.scenario.hiccups:
            if worker.me in self.roster.newest.members:
                self.seen["asked to leave"] += 1
                self.push(self.roster.leave(worker.me))
        elif number > self.scenario.hiccups:
            self.kill(worker)
        else:
            self.hiccup(worker)

    def run(self) -> "Simulation":
        runnable, uninformed = self.runnable.items, self.uninformed.items
        senders, gone = self.senders.items, self.gone.items
        running, informing, hearing, noticing = self.scenario.weights
        choose = self.choose
        every, risky = self.scenario.kill_every, self.scenario.founding_kills
        resume = self.resume
        for _ in range(self.moments):
            first = len(runnable) * running
            second = first + len(uninformed) * informing
            third = second + len(senders) * hearing
            total = third + len(gone) * noticing
            if not total:
                if not self.ask_after_failed_collectives():
                    break
            elif risky and self.mishaps_left and not choose(every):
                self.mishap()
            elif (pick := choose(total)) < first:
                resume(runnable[pick // running])
            elif pick < second:
                self.deliver(uninformed[(pick - first) // informing])
            else:  # the controller does something
                if pick < third:
                    self.hear(senders[(pick - second) // hearing])
                else:
                    self.notice(gone[(pick - third) // noticing])
                if self.roster.over or self.lost:
                    break
                if not risky:
                    confirmed = self.roster.holders.difference(self.roster.joining)
                    risky = len(confirmed) >= self.scenario.workers
        else:
            raise Violation("the run goes round in circles")
        self.check()
        return self

    def ask_after_failed_collectives(self) -> bool:
        """A connection to a process that ended breaks, in time; a meeting waits without one."""
        asked = False
        for worker in self.processes:
            waits = worker.waits
            if worker.alive and isinstance(waits, Collective) and waits.tag != "meet":
                if all(self.peer(worker, member).alive for member in waits.members):
                    continue
                self.resume(worker, Failed(OSError("connection reset")))
                asked = True
        return asked

    def peer(self, worker: Worker, member: int) -> Worker:
        """Who of another worker is in groups with this process."""
        del worker
        return self.workers[member]

    # ------------------------------------------------------------------ at the end

    def check(self) -> None:
        alive = {worker.me for worker in self.workers if worker.alive or worker.done}
        for operation, results in self.evaluated.items():
            if len({result for me, result in results.items() if me in alive}) > 1:
                raise Violation(f"survivors got different results of {operation}: {results}")
        if self.roster.extinct:
            self.seen["extinct"] += 1
            founders = [w.me for w in self.workers if w.alive and w.protocol._founded]
            if not set(founders).isdisjoint(self.roster.newest.members):
                raise Violation(f"nobody is taken to have the State, but {founders} have it")
            return
        if not self.roster.over and (
            self.scenario.all_end or not any(worker.done for worker in self.workers)
        ):
            stuck = [
                (w.me, w.protocol.generation, w.protocol.call, getattr(w.waits, "tag", w.waits))
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


_WAITING = {Collective, Computing, Await}
Simulation.answers = {
    wants.Build: Simulation.build,
    wants.Abandon: Simulation.abandon,
    wants.Meet: Simulation.meet,
    wants.CompareLayouts: Simulation.compare_layouts,
    wants.GiveState: Simulation.give_state,
    wants.TakeState: Simulation.take_state,
    wants.AllHaveState: Simulation.all_have_state,
    wants.PassOn: Simulation.pass_on,
    wants.Compute: Simulation.compute,
    wants.ReduceBuckets: Simulation.reduce_buckets,
    wants.Payload: Simulation.payload,
    wants.CompareCalls: Simulation.compare_calls,
    wants.ReducePayload: Simulation.reduce_payload,
    wants.Conclude: Simulation.conclude,
    wants.TellEntered: Simulation.entered,
    wants.TellRecovered: Simulation.recovered,
    wants.Doubt: Simulation.doubt,
    wants.AnnounceEntry: Simulation.announce_entry,
    wants.Subscribe: Simulation.subscribe,
    wants.Adopt: Simulation.adopt,
    wants.TakeDigest: Simulation.take_digest,
    wants.Unequal: Simulation.unequal,
    wants.Level: Simulation.level,
    wants.Lonely: Simulation.lonely,
    wants.Succeed: Simulation.succeed,
    wants.Imitate: Simulation.imitate,
}


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
    return lambda n: int(draw() * n)


def from_bytes(entropy: bytes) -> Choose:
    """Choices from bytes; the last possibility, which is no kill, where they have run out."""
    rest = iter(entropy)

    def choose(n: int) -> int:
        value = next(rest, None)
        return n - 1 if value is None else value % n

    return choose
