"""A checkpoint put together from shares of several processes, some of whom may die. Pure.

Every worker that has a snapshot of a step offers it. The coordinator, which holds no tensors,
divides the tensors among those who offered; when one is lost, the others are asked for what it had
not delivered, from their own snapshots of the same step. So a checkpoint that was offered is
completed while one holder lives. No clock, no threads, no store.

A worker is one process here and has all tensors; if workers are crews, each process has what is at
its place, and is counted by itself, under a number of its own (`holder`). Those at one place hold
the same, some tensors are at several places, and a checkpoint is complete when what is at every
place is written.

Invariant: every tensor is at any time delivered, in the hands of a living holder, to be handed
out by the next `orders`, or held by nobody that lives, which makes the checkpoint hopeless.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastix.errors import ElastixError, StoreError
from elastix.state_entries import meta_of_stages
from elastix.store import Share


class CheckpointId(NamedTuple):
    """Names one checkpoint of a run; of the same step the later one replaces the earlier.

    Attributes:
        step: committed steps in it.
        passed: void steps since, and epochs that were begun: loaders stand elsewhere after each.
        order: of several there: -1 if nothing is stored, 0, then 1 with a score reported since,
            then 2 for the end of the train function. Reports may have moved on in between.
    """

    step: int
    passed: int = 0
    order: int = 0


def holder(worker: int, place: int, places: int) -> int:
    """The number of a process among all that hold snapshots; its worker's, if it is alone."""
    return worker * places + place


_Group = tuple[tuple[str, ...], int]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A worker holds a snapshot, or a process of a crew that of what is at its place.

    Attributes:
        mark: of which checkpoint.
        reason: why it was taken.
        members: the group in which all take one at this boundary; every process of it.
        groups: names that share memory, with their bytes; each is written by one worker.
        meta: the State's metadata, this worker's random numbers among them.
        score: what was reported for this State, higher is better; None if nothing was.
        stall_s: how long it held up training.
        digests: of its parts, to be compared with those of the other members; empty without any.
        entries: of a crew, digests by stored name, to be compared with those of its other places.
        stored: the State is to be stored; else it is compared, and that is all.
        place: of the process in its crew.
        places: how many there are; what is at each of them makes up the checkpoint.
        processor: a number for what it computes with; what is stored is of one kind, if can be.
        by_one: each worker has tensors of its own, which belong together: one writes all of it.
    """

    mark: CheckpointId
    reason: str
    members: tuple[int, ...]
    groups: tuple[tuple[tuple[str, ...], int], ...]
    meta: Mapping[str, Any]
    score: float | None = None
    stall_s: float = 0.0
    digests: Mapping[str, str] = field(default_factory=dict)
    entries: Mapping[str, str] = field(default_factory=dict)
    stored: bool = True
    place: int = 0
    places: int = 1
    processor: int = 0
    by_one: bool = False


@dataclass(frozen=True)
class Withdrawn:
    """A worker has no snapshot after all, or (with an error) cannot write its share.

    Attributes:
        why: it has none.
        reason, members, stored, place: as in the Offer that does not come.
    """

    mark: CheckpointId
    error: StoreError | None = None
    why: str = ""
    reason: str = ""
    members: tuple[int, ...] = ()
    stored: bool = True
    place: int = 0


@dataclass(frozen=True)
class Delivered:
    """A worker wrote some tensors, durably; or a process of a crew, at that place."""

    mark: CheckpointId
    share: Share
    place: int = 0


@dataclass(frozen=True)
class Order:
    """A holder is asked to write these tensors; of a crew, that at this place."""

    mark: CheckpointId
    names: tuple[str, ...]
    place: int = 0


@dataclass(frozen=True)
class CheckpointEnded:
    """The checkpoint is stored, or given up: its snapshots are not needed any more.

    Attributes:
        ref: its name; None if it was not stored.
        error: why not, if that is a failure.
        lost: as nobody holds it. Whoever comes to it later, such as a shadow that the run goes on
            from, may offer it.
    """

    mark: CheckpointId
    ref: str | None = None
    error: ElastixError | None = None
    lost: bool = False


Message = Offer | Withdrawn | Delivered
"""From a worker to the coordinator."""


LOST = "every worker that held it is lost"


@dataclass
class Assembly:
    """One checkpoint in the making.

    Attributes:
        first_s: when the first offer came.
        absent: workers that are lost, or have no snapshot.
        offers: by living worker.
        shares: what was delivered.
        why: nobody has it, if somebody had withdrawn; else they are lost.
    """

    mark: CheckpointId
    first_s: float
    absent: set[int] = field(default_factory=set)
    offers: dict[int, Offer] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    why: str = LOST
    _members: set[int] = field(default_factory=set)  # of the groups of those who have offered
    _hands: dict[str, int] = field(default_factory=dict)  # name to the worker asked for it
    _done: set[str] = field(default_factory=set)
    _writer: int | None = None  # if one writes all of it
    _begun: bool = False
    _reason: str = ""
    _stored: bool = True
    _known: dict[int, Offer] = field(default_factory=dict)  # by place, even after all are gone
    _groups: dict[_Group, set[int]] = field(default_factory=dict)  # and at which places they are

    def offer(self, worker: int, offer: Offer) -> None:
        """A worker holds a snapshot. Offering again takes back what it was asked."""
        if worker not in self.absent:
            if offer.place not in self._known:
                for group in offer.groups:
                    self._groups.setdefault(group, set()).add(offer.place)
            self.offers[worker] = self._known[offer.place] = offer
            self._members.update(offer.members)
            self._take_back(worker)

    def withdraw(self, worker: int, withdrawn: Withdrawn) -> None:
        """A worker has no snapshot."""
        self._members.update(withdrawn.members)
        self._reason, self._stored = withdrawn.reason, withdrawn.stored
        self.why = withdrawn.why
        self.lost(worker)

    def deliver(self, share: Share, worker: int) -> None:
        """Tensors are durable. They do not count if another one was chosen since to write all."""
        if self._writer is not None and worker // self.chief.places != self._writer:
            return
        self.shares.append(share)
        self._done.update(share.infos)
        for name in share.infos:
            self._hands.pop(name, None)

    def lost(self, worker: int) -> None:
        """A worker is dead."""
        self.absent.add(worker)
        self.offers.pop(worker, None)
        self._take_back(worker)

    def vanished(self, names: Iterable[str]) -> None:
        """Tensors that were durable must be written again; nobody has been asked for them yet."""
        self._done.difference_update(names)

    def gathered(self, now_s: float, patience_s: float) -> bool:
        """Whether to begin: all members have offered, or some have and the rest is late.

        More hands are quicker, and one is enough.
        """
        if not self._begun:
            self._begun = bool(self.offers) and not self._awaits(now_s, patience_s)
        return self._begun

    def _awaits(self, now_s: float, patience_s: float) -> bool:
        """Whether members that live have not offered, and may still do so."""
        late = now_s - self.first_s >= patience_s
        return not late and bool(self._members - self.absent - set(self.offers))

    def orders(self) -> dict[int, Order]:
        """Who is to write what, as far as it is not in somebody's hands yet; once `gathered`."""
        if not self.offers:
            return {}
        load = dict.fromkeys(sorted(self.offers), 0)
        names: dict[int, list[str]] = {worker: [] for worker in load}
        at: dict[int, list[int]] = {}
        asked = self._asked()
        for worker in load:
            if worker in asked:
                at.setdefault(self.offers[worker].place, []).append(worker)
        groups = sorted(self._groups.items(), key=lambda g: (-g[0][1], g[0][0]))
        for (group, nbytes), places in groups:
            owners = {self._hands[name] for name in group if name in self._hands}
            if owners or self._done.issuperset(group):
                for worker in owners:
                    load[worker] += nbytes
                continue
            holders = [worker for place in places for worker in at.get(place, ())]
            if not holders:
                continue
            worker = min(holders, key=lambda w: (load[w], w))
            load[worker] += nbytes
            names[worker] += group
            self._hands.update(dict.fromkeys(group, worker))
        return {w: Order(self.mark, tuple(mine)) for w, mine in names.items() if mine}

    def _asked(self) -> set[int]:
        """Who may be asked to write: those whose processor is of the first one's kind.

        If it has to be done by one, the processes of the first worker all of whose have offered.
        What another one had written before it was lost is written again.
        """
        kind, chief = self.chief.processor, self.chief
        alike = {w for w, offer in self.offers.items() if offer.processor == kind}
        if not chief.by_one:
            return alike
        processes = Counter(holder // chief.places for holder in alike)
        whole = [worker for worker, number in processes.items() if number == chief.places]
        if not whole:
            self._writer = None  # if there was one it is lost: what others have counts again
            return alike
        if self._writer not in whole:  # nor does one count of whose processes some were asked
            self._writer = min(whole)
            self._done.clear()
            self._hands.clear()
            self.shares.clear()
        return {h for h in alike if h // chief.places == self._writer}

    @property
    def complete(self) -> bool:
        """Every tensor is durable."""
        return self._begun and not self._unheard() and not self._lacking()

    def hopeless(self, now_s: float, patience_s: float) -> bool:
        """Something is not written, and no holder of it lives or will come forward any more."""
        if self.complete or self._awaits(now_s, patience_s):
            return False
        living = {offer.place for offer in self.offers.values()}
        held_by_none = any(places.isdisjoint(living) for places in self._lacking().values())
        return not self.offers or self._unheard() or held_by_none

    def _unheard(self) -> bool:
        """Whether nobody has told yet what is at some place."""
        return len(self._known) < max((o.places for o in self._known.values()), default=1)

    def _lacking(self) -> dict[_Group, set[int]]:
        """What is not durable."""
        groups = self._groups.items()
        return {group: at for group, at in groups if not self._done.issuperset(group[0])}

    @property
    def members(self) -> Collection[int]:
        """Of the group at that boundary, lost ones as well."""
        return self._members

    @property
    def chief(self) -> Offer:
        """The offer of the lowest worker, or of the one that writes all: what it says counts."""
        offers = self.offers or self._known
        if not offers:
            raise ValueError("nobody has offered this checkpoint yet")
        writes = [h for h, offer in self.offers.items() if h // offer.places == self._writer]
        return offers[min(writes or offers)]

    @property
    def meta(self) -> dict[str, Any]:
        """Metadata of the whole, to which each place has what is of it alone."""
        rest = [offer.meta for place, offer in sorted(self._known.items())]
        return meta_of_stages([self.chief.meta, *rest])

    @property
    def reason(self) -> str:
        """Why the checkpoint was taken."""
        return self.chief.reason if self._known else self._reason

    @property
    def stored(self) -> bool:
        """Whether it is to be stored, and not only compared."""
        return self.chief.stored if self._known else self._stored

    def _take_back(self, worker: int) -> None:
        for name in [n for n, w in self._hands.items() if w == worker]:
            del self._hands[name]
