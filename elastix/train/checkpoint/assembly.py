"""A checkpoint put together from shares of several workers, some of whom may die. Pure.

Every worker that has a snapshot of a step offers it. The coordinator, which holds no tensors,
divides the tensors among those who offered; when one is lost, the others are asked for what it had
not delivered, from their own snapshots of the same step. So a checkpoint that was offered is
completed while one holder lives. No clock, no threads, no store.

Invariant: every tensor is at any time delivered, in the hands of a living holder, or to be handed
out by the next `orders`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastix.errors import ElastixError, StoreError
from elastix.store import Share


class CheckpointId(NamedTuple):
    """Names one checkpoint of a run; of the same step the later one replaces the earlier.

    Attributes:
        step: committed steps in it.
        order: of several at one step: -1 if nothing is stored, 0, then 1 with a score reported
            since, then 2 for the end of the train function. Loaders and reports may have moved on
            in between.
    """

    step: int
    order: int = 0


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A worker holds a snapshot.

    Attributes:
        mark: of which checkpoint.
        reason: why it was taken.
        members: the group in which all take one at this boundary.
        groups: names that share memory, with their bytes; each is written by one worker.
        meta: the State's metadata, this worker's random numbers among them.
        score: what was reported for this State, higher is better; None if nothing was.
        stall_s: how long it held up training.
        digests: of its parts, to be compared with those of the other members; empty without any.
        stored: the State is to be stored; else it is compared, and that is all.
    """

    mark: CheckpointId
    reason: str
    members: tuple[int, ...]
    groups: tuple[tuple[tuple[str, ...], int], ...]
    meta: Mapping[str, Any]
    score: float | None = None
    stall_s: float = 0.0
    digests: Mapping[str, str] = field(default_factory=dict)
    stored: bool = True


@dataclass(frozen=True)
class Withdrawn:
    """A worker has no snapshot after all, or (with an error) cannot write its share.

    Attributes:
        why: it has none.
        reason, members, stored: as in the Offer that does not come.
    """

    mark: CheckpointId
    error: StoreError | None = None
    why: str = ""
    reason: str = ""
    members: tuple[int, ...] = ()
    stored: bool = True


@dataclass(frozen=True)
class Delivered:
    """A worker wrote some tensors, durably."""

    mark: CheckpointId
    share: Share


@dataclass(frozen=True)
class Order:
    """A holder is asked to write these tensors."""

    mark: CheckpointId
    names: tuple[str, ...]


@dataclass(frozen=True)
class Release:
    """The checkpoint is stored, or given up: its snapshots are not needed any more.

    Attributes:
        ref: its name; None if it was not stored.
        error: why not, if that is a failure.
    """

    mark: CheckpointId
    ref: str | None = None
    error: ElastixError | None = None


Message = Offer | Withdrawn | Delivered
"""From a worker to the coordinator."""


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
    why: str = "every worker that held it is lost"
    _members: set[int] = field(default_factory=set)  # of the groups of those who have offered
    _hands: dict[str, int] = field(default_factory=dict)  # name to the worker asked for it
    _done: set[str] = field(default_factory=set)
    _begun: bool = False
    _reason: str = ""
    _stored: bool = True
    _known: Offer | None = None  # what is in it, even after every holder is gone

    def offer(self, worker: int, offer: Offer) -> None:
        """A worker holds a snapshot. Offering again takes back what it was asked."""
        if worker not in self.absent:
            self.offers[worker] = self._known = offer
            self._members.update(offer.members)
            self._take_back(worker)

    def withdraw(self, worker: int, withdrawn: Withdrawn) -> None:
        """A worker has no snapshot."""
        self._members.update(withdrawn.members)
        self._reason, self._stored = withdrawn.reason, withdrawn.stored
        self.why = withdrawn.why
        self.lost(worker)

    def deliver(self, share: Share) -> None:
        """Tensors are durable."""
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
        """Tensors must be written again."""
        for name in names:
            self._done.discard(name)
            self._hands.pop(name, None)

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
        for group, nbytes in sorted(self._groups(), key=lambda g: (-g[1], g[0])):
            owners = {self._hands[name] for name in group if name in self._hands}
            if owners or self._done.issuperset(group):
                for worker in owners:
                    load[worker] += nbytes
                continue
            worker = min(load, key=lambda w: (load[w], w))
            load[worker] += nbytes
            names[worker] += group
            self._hands.update(dict.fromkeys(group, worker))
        return {w: Order(self.mark, tuple(mine)) for w, mine in names.items() if mine}

    @property
    def complete(self) -> bool:
        """Every tensor is durable."""
        return self._begun and all(self._done.issuperset(names) for names, _ in self._groups())

    def hopeless(self, now_s: float, patience_s: float) -> bool:
        """No holder lives, none will come forward any more, and something is not written."""
        return not (self.offers or self.complete or self._awaits(now_s, patience_s))

    @property
    def chief(self) -> Offer:
        """The offer of the lowest worker: its metadata and its score count."""
        offer = self.offers[min(self.offers)] if self.offers else self._known
        if offer is None:
            raise ValueError("nobody has offered this checkpoint yet")
        return offer

    @property
    def reason(self) -> str:
        """Why the checkpoint was taken."""
        return self._known.reason if self._known is not None else self._reason

    @property
    def stored(self) -> bool:
        """Whether it is to be stored, and not only compared."""
        return self._known.stored if self._known is not None else self._stored

    def _groups(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        return self.chief.groups

    def _take_back(self, worker: int) -> None:
        for name in [n for n, w in self._hands.items() if w == worker]:
            del self._hands[name]
