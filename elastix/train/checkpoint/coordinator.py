"""The States of a run in the store: puts them together, names them, drops old ones.

Runs beside the controller, in a thread of its own, and never sees a tensor: workers write shares
into packs of their own (saver), who writes what stands in assembly, what is kept in retention.
Tags: `RUN/step-N` for each State that is kept, `RUN/last`, `RUN/best`, `RUN/final`.

Invariants: a run goes on from `RUN/last`, which moves in the very transaction that makes the new
State visible, and not before the journal holds all steps in it durably. Of workers that hold
different States nothing is stored: they are compared before.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from elastix.config import CheckpointConfig
from elastix.errors import Conflict, ElastixError, NotFound, StoreError
from elastix.events import Event, ReplicasCompared, StateDropped, StateNotStored, StateStored
from elastix.state import Ref
from elastix.store import Store, Vanished
from elastix.train.checkpoint import retention
from elastix.train.checkpoint.assembly import (
    LOST,
    Assembly,
    CheckpointEnded,
    CheckpointId,
    Delivered,
    Message,
    Offer,
    Order,
    Withdrawn,
)
from elastix.train.checkpoint.comparison import Comparisons, fault
from elastix.train.checkpoint.restore import newest
from elastix.train.checkpoint.retention import Kept
from elastix.train.checkpoint.state_digests import exact_digest

logger = logging.getLogger(__name__)
PATIENCE_S = 10.0  # how long the offers of all members are waited for
_TICK_S = 0.2
_GC_BYTES = 64 << 20  # what retired States must amount to before gc looks through the packs
_REMEMBERED = 64
_NOBODY, _EVERYBODY = -1, -2  # in place of a worker's id
_MOVING = ("last", "best", "final")  # tags of a run, beside those that name a step
_FINAL = 2  # the order of a mark at the end of the train function
_DIGITS = 10  # of the step in a tag that names one


@dataclass(frozen=True, kw_only=True)
class Outlets:
    """What the coordinator needs of the controller around it. Called in its thread.

    Attributes:
        send: an order to one worker; None: to all.
        emit: an event to the journal.
        journaled: the last step that stands in the journal.
        sync: makes durable what stands in the journal.
        fail: end the run, for this reason.
        parted: have all go back, or end the run for this reason; None: only the latter can be done.
    """

    send: Callable[[int | None, Order | CheckpointEnded], None]
    emit: Callable[[Event], object]
    journaled: Callable[[], int]
    sync: Callable[[], None]
    fail: Callable[[ElastixError], None]
    parted: Callable[[ReplicasCompared, ElastixError], None] | None = None


class Checkpoints:
    """The coordinator of one run. `told`, `lost` and `poke` may be called from any thread."""

    def __init__(
        self, store: Store, run: str, config: CheckpointConfig, outlets: Outlets | None = None
    ) -> None:
        self.store = store
        self._run = run
        self._config = config
        self._outlets = outlets
        self._kept = _kept(store, run)
        self._before: set[Ref] = set()  # stored when this coordinator began
        self._final_before: Ref | None = None  # and which of them was the final one
        self._origin: tuple[Ref, ...] = ()  # parents of the first State of this run
        self._line: tuple[Ref, ...] = ()  # and of the next one
        self._line_before: tuple[Ref, ...] = ()  # and of one that replaces the newest
        self._assemblies: dict[CheckpointId, Assembly] = {}
        self._ended: dict[CheckpointId, CheckpointEnded] = {}
        self._comparisons = Comparisons()
        self._fault: ElastixError | None = None
        self._parted: ElastixError | None = None  # nothing is stored till all have gone back for it
        self._over = False  # and nobody goes back any more
        self._gone: set[int] = set()
        self._retired_bytes = 0
        self._inbox: queue.SimpleQueue[tuple[int, Message | None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._serve, name="checkpoints", daemon=True)
        if outlets is not None:
            self._thread.start()

    # ------------------------------------------------------------------ where the run stands

    def take_up(
        self, parents: tuple[Ref, ...] = (), scored_otherwise: Collection[str] = ()
    ) -> None:
        """See where the run stands, once nobody else can store its States any more.

        Args:
            parents: the models that it begins from.
            scored_otherwise: States whose scores are of no use, as they are of another metric.
        """
        found = _kept(self.store, self._run)
        self._kept = [replace(k, score=None) if k.ref in scored_otherwise else k for k in found]
        self._before = {kept.ref for kept in found}
        self._final_before = self.store.tags().get(f"{self._run}/final")
        newest = max(self._kept, key=lambda kept: kept.step, default=None)
        if newest is not None and self.last() is None:  # whoever took one away was killed
            self.store.tag(f"{self._run}/last", newest.ref)
        self._origin = parents
        self._follow(self.last())

    def last(self) -> Kept | None:
        """The State that the run goes on from."""
        ref = newest(self.store, self._run)
        return next((kept for kept in self._kept if kept.ref == ref), None)

    def choose(self, step: int | None = None, sound: Collection[int] | None = None) -> Kept | None:
        """The last State, or that of an older step. Nothing is changed.

        Args:
            step: the older one.
            sound: of these steps there are States that may be gone on from; None: of any.

        Raises:
            NotFound: no State of that step is kept, or it is not gone on from.
        """
        kept, chosen = self._kept, self.last()
        if sound is not None:
            there = [one for one in kept if one.step in sound]
            chosen = max(there, key=lambda one: one.step, default=None)
            kept = [one for one in kept if chosen is not None and one.step <= chosen.step]
        if step is None:
            return chosen
        found = next((one for one in kept if one.step == step), None)
        if found is not None:
            return found
        why = f"run {self._run!r} has no State of step {step}"
        if any(one.step == step for one in self._kept):
            why = (
                f"run {self._run!r} does not go on from its State of step {step}: workers held "
                "different States, and it may have been computed from what is wrong"
            )
        steps = sorted(one.step for one in kept)
        todo = "Choose one of these" if steps else "Leave the step out: it begins anew"
        raise NotFound(f"{why}; kept are {steps}. Nothing was changed. {todo}.")

    def go_on_from(self, step: int | None = None) -> Kept | None:
        """Begin at the last State, or at that of an older step; later ones are then dropped.

        Raises:
            NotFound: no State of that step is kept; nothing was changed.
        """
        chosen = self.choose(step)
        if step is not None and chosen is not None:
            self.store.tag(f"{self._run}/last", chosen.ref)
        # Also those that whoever went back before was killed before it had dropped: they would
        # stand in the way of what is stored from here on.
        later = [kept for kept in self._kept if chosen is not None and kept.step > chosen.step]
        for kept in later:
            self._drop(kept)
        if later:
            self._tag_best()
        self._follow(chosen)
        return chosen

    def go_back_to(self, steps: Collection[int]) -> tuple[Kept | None, list[StateDropped]]:
        """Go on from the last State of these steps, or from none; what came later is dropped.

        To be called when all workers were given up.

        Returns:
            That State; and what belongs into the journal.
        """
        dropped = []
        chosen = self.choose(sound=steps)
        if chosen is not None:
            self.store.tag(f"{self._run}/last", chosen.ref)
        for later in list(self._kept):
            if chosen is None or later.step > chosen.step:
                self._drop(later)
                dropped.append(StateDropped(ref=later.ref, step=later.step))
        self._tag_best()
        self._follow(chosen)
        return chosen, dropped

    def _follow(self, chosen: Kept | None) -> None:
        """The next State derives from this one, and what replaces it from what it derives from."""
        self._line, self._line_before = self._origin, ()
        if chosen is not None:
            self._line = (chosen.ref,)
            with contextlib.suppress(StoreError):  # whoever reads it says what is wrong
                self._line_before = self.store.manifest(chosen.ref).parents

    # ------------------------------------------------------------------ from the controller

    def told(self, worker: int, message: Message) -> None:
        """A worker's message."""
        self._idle.clear()
        self._inbox.put((worker, message))

    def lost(self, worker: int) -> None:
        """A worker is dead."""
        self._inbox.put((worker, None))

    def poke(self) -> None:
        """The journal has got further."""
        if not self._idle.is_set():
            self._inbox.put((_NOBODY, None))

    def refuse(self, error: ElastixError) -> None:
        """The run ends for this reason, and nothing is stored of it any more."""
        self._fail(error)

    def give_up(self) -> None:
        """All workers are lost: what is not stored by now never will be. Blocks until it is so."""
        self._idle.clear()
        self._inbox.put((_EVERYBODY, None))
        self._idle.wait()

    def settle(self, timeout_s: float) -> bool:
        """The run is over: wait until everything that was offered is stored or given up.

        False if time is up.
        """
        self._over = True
        self._inbox.put((_NOBODY, None))
        return self._idle.wait(timeout_s)

    def stop(self) -> None:
        """Nothing is stored any more. Blocks until that is so."""
        if self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()

    def close(self) -> None:
        """Stop, give back what dropped States occupied, and let go of the store."""
        self.stop()
        try:
            if self._retired_bytes:
                self.store.gc()
        except StoreError as error:
            logger.warning("gc failed run=%s error=%s", self._run, error)
        self.store.close()

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        while True:
            try:
                item = self._inbox.get(timeout=_TICK_S if self._assemblies else None)
            except queue.Empty:
                pass
            else:
                if item is None:
                    return
                self._take_in(*item)
            for mark in sorted(self._assemblies):
                self._advance(self._assemblies[mark])
            if not self._assemblies:
                self._idle.set()
                if not self._inbox.empty():  # it came in between
                    self._idle.clear()

    def _take_in(self, worker: int, message: Message | None) -> None:
        if message is None:
            self._lost(worker)
        elif worker not in self._gone or isinstance(message, Delivered):
            self._hear(worker, message)  # the dead have no snapshots, but what they wrote is there

    def _hear(self, worker: int, message: Message) -> None:
        mark = message.mark
        if isinstance(message, Offer):
            whose = worker // message.places
            where = message.place, message.processor
            self._comparisons.hold(mark, whose, message.digests, *where)
            self._comparisons.hold_entries(mark, whose, message.entries, message.places)
        if mark in self._ended:
            if not isinstance(message, Offer):
                return
            if not (self._ended[mark].lost and message.stored):
                self._send(worker, self._too_late(message))
                return
            del self._ended[mark]
        if any(mark < other < (mark.step + 1,) for other in (*self._assemblies, *self._ended)):
            self._send(worker, CheckpointEnded(mark))  # a joiner that did not hear of the score
            return
        if mark not in self._assemblies:
            if isinstance(message, Delivered):
                return  # it was ended meanwhile
            self._assemblies[mark] = Assembly(mark, time.monotonic(), set(self._gone))
        assembly = self._assemblies[mark]
        match message:
            case Offer():
                assembly.offer(worker, message)
            case Delivered():
                assembly.deliver(message.share, worker)
            case Withdrawn(error=None):
                logger.warning("no snapshot worker=%d step=%d: %s", worker, mark.step, message.why)
                assembly.withdraw(worker, message)
            case Withdrawn():
                self._end(assembly, CheckpointEnded(mark, error=message.error))

    def _too_late(self, offer: Offer) -> CheckpointEnded:
        """The others did not wait for ever; what the worker holds has to be equal nevertheless."""
        ended = self._ended[offer.mark]
        # Who has stored it is through with it, and may have come to the end of the run.
        equal = self._compare(offer.mark, offer.reason, goes_back=False)
        if not equal and ended.ref is not None:
            self._disown(ended.ref)
        return CheckpointEnded(offer.mark, ended.ref, self._fault or ended.error)

    def _lost(self, worker: int) -> None:
        self._gone.add(worker)
        for assembly in list(self._assemblies.values()):
            assembly.lost(worker)
            if worker == _EVERYBODY:
                self._advance(assembly)  # the last chance, if all of it was written
                if assembly.mark in self._assemblies:
                    self._give_up(assembly, LOST)
        if worker == _EVERYBODY:
            self._comparisons.forget()
            self._parted = None
            self._ended.clear()  # those who are founded anew come to the same steps again

    def _give_up(self, assembly: Assembly, why: str) -> None:
        """Nobody has it."""
        error = StoreError(f"{why}.")
        self._end(assembly, CheckpointEnded(assembly.mark, error=error, lost=True))

    def _advance(self, assembly: Assembly) -> None:
        now = time.monotonic()
        if self._fault is not None:
            self._end(assembly, CheckpointEnded(assembly.mark, error=self._fault))
        elif self._parted is not None:
            if self._over:
                self._end(assembly, CheckpointEnded(assembly.mark, error=self._parted))
        elif assembly.hopeless(now, PATIENCE_S):
            self._give_up(assembly, assembly.why)
        elif not assembly.gathered(now, PATIENCE_S):
            return
        elif not self._compare(assembly.mark, assembly.reason):
            if self._parted is None:
                self._end(assembly, CheckpointEnded(assembly.mark, error=self._fault))
        elif not assembly.stored or not self._wanted(assembly):
            self._end(assembly, CheckpointEnded(assembly.mark))
        elif not assembly.complete:
            for worker, order in assembly.orders().items():
                self._send(worker, order)
        elif self._journaled() >= assembly.mark.step:
            self._commit(assembly)

    def _compare(self, mark: CheckpointId, reason: str, *, goes_back: bool = True) -> bool:
        """Put side by side what has been told of a State; False if it differs.

        Then the run ends, or `goes_back` if that can be.
        Of those who come late as well: the others do not wait for them for ever.
        """
        before = self._comparisons.equal_step
        found = self._comparisons.settle(mark, reason)
        if found is not None:
            self._emit(found)
            if not found.equal:
                self._differ(found, fault(found, before), goes_back=goes_back)
        parted = self._comparisons.parted(mark)
        if parted is not None:
            self._fail(parted)
        return self._fault is None and self._parted is None

    def _differ(self, found: ReplicasCompared, error: ElastixError, *, goes_back: bool) -> None:
        part = self._outlets.parted if self._outlets is not None and self._fault is None else None
        if part is not None and goes_back:
            self._parted = error
        if part is not None:  # also if the run ends: else the next one might go on from a State
            part(found, error)  # in which what differs is
        if part is None or not goes_back:
            self._fail(error)

    def _fail(self, error: ElastixError) -> None:
        if self._fault is None:
            self._fault = error
            if self._outlets is not None:
                self._outlets.fail(error)

    def _wanted(self, assembly: Assembly) -> bool:
        """A State taken for its score alone may turn out not to be among the best.

        That of a shadow may come when the group has stored a later one: what a run goes on from
        must not move back.
        """
        if any(kept.step > assembly.mark.step for kept in self._kept):
            return False
        if self._was_stored_before(assembly.mark) and not self._compared(assembly):
            return False  # by who came late to it, and there is nobody to compare that with
        if assembly.reason != "best":
            return True
        return retention.worth_storing(assembly.chief.score, self._kept, self._config.keep_best)

    def _was_stored_before(self, mark: CheckpointId) -> bool:
        """Whether this may be what the coordinator of a controller that was killed has stored."""
        there = {kept.ref for kept in self._kept if kept.step == mark.step} & self._before
        return bool(there) and (mark.order < _FINAL or self._final_before in there)

    def _commit(self, assembly: Assembly) -> None:
        step, chief = assembly.mark.step, assembly.chief
        replaced = [kept for kept in self._kept if kept.step == step]
        parents = self._line_before if replaced else self._line
        tags = [f"{self._run}/{self._label(step)}", f"{self._run}/last"]
        if chief.reason == "final":
            tags.append(f"{self._run}/final")
        try:
            self._sync()
            ref = self.store.put_shares(
                assembly.shares,
                meta={**assembly.meta, "run": self._run},
                parents=parents,
                score=chief.score,
                tags=tags,
            )
        except Vanished as gone:
            assembly.vanished(gone.names)
            return
        except Exception as error:  # noqa: BLE001 - who waits for this thread would wait for ever
            why = str(error) if isinstance(error, ElastixError) else repr(error)
            told = error if isinstance(error, StoreError) else StoreError(why)
            self._end(assembly, CheckpointEnded(assembly.mark, error=told))
            return
        ref = self._consolidated(ref, chief)
        self._line, self._line_before = (ref,), parents
        replaced = [kept for kept in replaced if kept.ref != ref]
        self._kept = [kept for kept in self._kept if kept.step != step]
        self._kept.append(Kept(step, ref, chief.score))
        self._emit(
            StateStored(
                ref=ref,
                step=step,
                reason=chief.reason,
                stored_bytes=sum(share.written_bytes for share in assembly.shares),
                store_s=time.monotonic() - assembly.first_s,
                stall_s=max(offer.stall_s for offer in (chief, *assembly.offers.values())),
                state_bytes=sum(share.nbytes for share in assembly.shares),
                digest=self._digest(ref) if chief.meta.get("exact") else "",
                compared=self._compared(assembly),
            )
        )
        self._end(assembly, CheckpointEnded(assembly.mark, ref))
        self._tidy(replaced)

    def _compared(self, assembly: Assembly) -> bool:
        """Whether all who were in the group have told what they hold; of one there is no other."""
        places = assembly.chief.places
        members = {member // places for member in assembly.members}
        return len(members) == 1 or members <= self._comparisons.told_by(assembly.mark)

    def _digest(self, ref: Ref) -> str:
        """Of a State of an exact run, for who compares; empty if it cannot be had."""
        try:
            return exact_digest(self.store.manifest(ref))
        except StoreError as error:
            logger.warning("no digest run=%s ref=%s error=%s", self._run, ref, error)
            return ""

    def _consolidated(self, ref: Ref, chief: Offer) -> Ref:
        """What a run leaves is kept as one process would have it, not in parts."""
        if chief.reason != "final" or chief.places == 1:
            return ref
        try:
            whole = self.store.consolidate(ref)
            if whole != ref:
                self.store.retire(ref)
        except StoreError as error:  # it can be read as it is
            logger.warning("not consolidated run=%s ref=%s error=%s", self._run, ref, error)
            return ref
        return whole

    def _end(self, assembly: Assembly, release: CheckpointEnded) -> None:
        self._assemblies.pop(assembly.mark, None)
        self._ended[release.mark] = release
        while len(self._ended) > _REMEMBERED:
            self._ended.pop(next(iter(self._ended)))
        if release.error is not None and assembly.stored:
            why = str(release.error)
            step = release.mark.step
            self._emit(StateNotStored(step=step, reason=assembly.reason, why=why))
        self._send(None, release)
        if release.lost:
            for worker in assembly.offers:  # of a crew, whose other places nobody holds
                self._send(worker, replace(release, lost=False))

    def _tidy(self, replaced: Sequence[Kept]) -> None:
        """Name the best, drop what the retention rule does not keep. Never fails the run."""
        try:
            self._tag_best()
            for old in replaced:
                self._drop(old)
            config = self._config
            for old in retention.surplus(self._kept, config.keep_last, config.keep_best):
                self._drop(old)
                self._emit(StateDropped(ref=old.ref, step=old.step))
            if self._retired_bytes >= _GC_BYTES:
                self._retired_bytes = 0
                self.store.gc()
        except StoreError as error:
            logger.warning("retention failed run=%s error=%s", self._run, error)

    def _tag_best(self) -> None:
        best = retention.ranked(self._kept)
        tag = f"{self._run}/best"
        if best and self.store.tags().get(tag) != best[0].ref:
            self.store.tag(tag, best[0].ref)

    def _drop(self, old: Kept) -> None:
        """Take this run's names off a State, and retire it unless others have given it one."""
        self._kept = [kept for kept in self._kept if kept != old]
        ours = {f"{self._run}/{name}" for name in (self._label(old.step), *_MOVING)}
        for tag, ref in self.store.tags().items():
            if ref == old.ref and tag in ours:
                self.store.untag(tag)
        nbytes = self.store.nbytes(old.ref)
        with contextlib.suppress(Conflict):  # somebody else's tag: it stays
            self.store.retire(old.ref)
            self._retired_bytes += nbytes

    def _disown(self, ref: str) -> None:
        """A State that was stored before it was known that a worker held another one."""
        try:
            for kept in [kept for kept in self._kept if kept.ref == ref]:
                self._drop(kept)
                self._emit(StateDropped(ref=kept.ref, step=kept.step))
            newest = max(self._kept, key=lambda kept: kept.step, default=None)
            if newest is not None:
                self.store.tag(f"{self._run}/last", newest.ref)
            self._tag_best()
        except StoreError as error:
            logger.warning("not taken back run=%s ref=%s error=%s", self._run, ref, error)

    def _label(self, step: int) -> str:
        return f"step-{step:0{_DIGITS}d}"

    def _send(self, worker: int | None, order: Order | CheckpointEnded) -> None:
        if self._outlets is not None:
            self._outlets.send(worker, order)

    def _emit(self, event: Event) -> None:
        if self._outlets is not None:
            self._outlets.emit(event)

    def _sync(self) -> None:
        if self._outlets is not None:
            self._outlets.sync()

    def _journaled(self) -> int:
        return self._outlets.journaled() if self._outlets is not None else 0


def _kept(store: Store, run: str) -> list[Kept]:
    """The States of a run that the store holds, from its tags."""
    mine = f"{run}/step-"
    tags = store.tags().items()
    found = [(tag.removeprefix(mine), ref) for tag, ref in tags if tag.startswith(mine)]
    # A tag of the user's own, `RUN/step-8` say, stays when the State of that step is dropped.
    steps = [(step, ref) for step, ref in found if step.isdecimal() and len(step) >= _DIGITS]
    return [Kept(int(step), ref, store.score(ref)) for step, ref in steps]
