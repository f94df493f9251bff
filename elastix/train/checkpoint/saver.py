"""A worker's part in storing States: takes snapshots, and writes the shares it is asked for.

The training thread takes a snapshot at a boundary and goes on. A thread of its own offers it to the
coordinator, writes what it is told to, and lets go of it when the State is stored. Not here: when
a State is due (schedule), who writes what (assembly).
"""

import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from elastix.errors import ElastixError, StoreError
from elastix.state import State, identity
from elastix.store import Store
from elastix.train.checkpoint import state_digests
from elastix.train.checkpoint.assembly import (
    CheckpointEnded,
    CheckpointId,
    Delivered,
    Message,
    Offer,
    Order,
    Withdrawn,
)
from elastix.train.checkpoint.snapshot import Snapshot, Stager


@dataclass(frozen=True, kw_only=True)
class Occasion:
    """Why and with whom a snapshot is taken. The fields are those of Offer."""

    mark: CheckpointId
    reason: str
    members: tuple[int, ...]
    score: float | None = None
    stored: bool = True
    place: int = 0
    places: int = 1
    processor: int = 0
    by_one: bool = False


class Saver:
    """One worker's. `save`, `finish` and `wait` are for the training thread, `tell` for others.

    Args:
        send: takes a message to the coordinator; may block, and may be called again with the same.
        open_store: opens the store, when something is first written.

    Attributes:
        waiting: the training thread is blocked here, on the store or on other workers.
        waited_s: how long it has been so, since the worker began.
    """

    def __init__(self, send: Callable[[Message], None], open_store: Callable[[], Store]) -> None:
        self.waiting = False
        self.waited_s = 0.0
        self._send = send
        self._open_store = open_store
        self._stager = Stager()
        self._changed = threading.Condition()
        self._current: Snapshot | None = None
        self._occasion: Occasion | None = None
        self._offered: Offer | None = None
        self._torn = ""
        self._ended: CheckpointEnded | None = None
        self._work: queue.SimpleQueue[Snapshot | Offer | Order | CheckpointEnded | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._store: Store | None = None

    @property
    def busy(self) -> bool:
        """Whether the next `save` would have to wait for the one before."""
        return self._current is not None

    # ------------------------------------------------------------------ the training thread

    def save(self, state: State, occasion: Occasion, late: Collection[str]) -> None:
        """Take a snapshot of live tensors, and have it stored in the background.

        Blocks while the one before is not stored yet: two at a time would need the memory of two.

        Args:
            state: views of live tensors.
            occasion: what it is.
            late: tensors that stay as they are until `finish` was called.
        """
        started = time.monotonic()
        self.listen()
        self._wait(lambda: self._current is None)
        waited_s = time.monotonic() - started
        snapshot = self._stager.take(state, occasion.mark.step, late)
        snapshot.stall_s += waited_s
        with self._changed:
            self._current, self._occasion, self._offered = snapshot, occasion, None
            if self._ended is not None and self._ended.lost:
                self._ended = None  # here it is
        self._work.put(snapshot)

    def listen(self) -> None:
        """Begin to heed what the coordinator wants, if this was not done before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="saver", daemon=True)
            self._thread.start()

    def heard(self, mark: CheckpointId) -> bool:
        """Whether that checkpoint, or a later one, is known to be stored or given up."""
        return self._ended is not None and self._ended.mark >= mark

    def finish(self) -> str:
        """What was captured is about to change: block until it is copied.

        Returns:
            Why a copy could not be used, this one or one before; "" if all could.
        """
        snapshot = self._current
        if snapshot is not None:
            snapshot.finish()
            self._torn = self._torn or snapshot.torn
        return self._torn

    def wait(self, mark: CheckpointId) -> CheckpointEnded:
        """Block until that checkpoint is stored, or is known not to be."""
        self._wait(lambda: self.heard(mark))
        return self._ended or CheckpointEnded(mark)

    def settle(self, timeout_s: float) -> None:
        """Block until what was taken last is stored or given up, but not longer than that."""
        self._wait(lambda: self._current is None, timeout_s)

    def _wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> None:
        started = time.monotonic()
        self.waiting = True
        try:
            with self._changed:
                self._changed.wait_for(until, timeout_s)
        finally:
            self.waiting = False
            self.waited_s += time.monotonic() - started

    # ------------------------------------------------------------------ other threads

    def tell(self, order: Order | CheckpointEnded) -> None:
        """What the coordinator wants. Never blocks."""
        self._work.put(order)

    def offer_again(self) -> None:
        """There is a new coordinator, who knows of nothing."""
        offer = self._offered
        if offer is not None:
            self._work.put(offer)

    def close(self) -> None:
        """Seal what was written. Nothing is expected of this worker any more."""
        self._work.put(None)
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, Snapshot):
                self._offer(item)
            elif isinstance(item, Offer):
                self._send(item)
            elif isinstance(item, Order):
                self._write(item)
            else:
                self._release(item)
        if self._store is not None:
            self._store.close()

    def _offer(self, snapshot: Snapshot) -> None:
        occasion = self._occasion
        if snapshot is not self._current or occasion is None:
            return
        snapshot.finish_copy()
        offer, why = None, snapshot.torn
        if why:
            self._torn = why
        else:
            try:
                offer = _offer_of(snapshot, occasion)
            except Exception as error:  # noqa: BLE001 - no memory for it, say; many wait for this
                why = repr(error)
        if offer is None:
            self._send(
                Withdrawn(
                    occasion.mark,
                    why=why,
                    reason=occasion.reason,
                    members=occasion.members,
                    stored=occasion.stored,
                    place=occasion.place,
                )
            )
            self._let_go()
            return
        self._offered = offer
        self._send(offer)
        if not occasion.stored:
            self._let_go()  # the digests are all that was wanted of it

    def _write(self, order: Order) -> None:
        snapshot, occasion = self._current, self._occasion
        if snapshot is None or occasion is None or occasion.mark != order.mark:
            return  # it was released meanwhile
        message: Message
        try:
            if self._store is None:
                self._store = self._open_store()
            share = self._store.put_share(snapshot.state.only(set(order.names)))
            message = Delivered(order.mark, share, occasion.place)
        except StoreError as error:
            message = Withdrawn(order.mark, error, place=occasion.place)
        except Exception as error:  # noqa: BLE001 - who waits for this thread would wait for ever
            why = str(error) if isinstance(error, ElastixError) else repr(error)
            message = Withdrawn(order.mark, StoreError(why), place=occasion.place)
        self._send(message)

    def _release(self, release: CheckpointEnded) -> None:
        with self._changed:
            mine = self._occasion.mark if self._current is not None and self._occasion else None
            if release.lost and mine == release.mark:
                return  # the coordinator has not heard of ours yet
            if self._ended is None or release.mark >= self._ended.mark:
                self._ended = release
            self._changed.notify_all()
        if self._offered is not None and self._offered.mark <= release.mark:
            self._offered = None
        if self._occasion is not None and self._occasion.mark <= release.mark:
            self._let_go()

    def _let_go(self) -> None:
        with self._changed:
            self._current = None
            self._changed.notify_all()


def _offer_of(snapshot: Snapshot, occasion: Occasion) -> Offer:
    """The copy is digested here, where nobody waits for it."""
    state = snapshot.state
    parts = state_digests.manifests(state) if len(occasion.members) > 1 else {}
    return Offer(
        mark=occasion.mark,
        reason=occasion.reason,
        members=occasion.members,
        groups=_groups(state) if occasion.stored else (),
        meta=state.meta if occasion.stored else {},
        score=occasion.score,
        stall_s=snapshot.stall_s,
        digests={name: part.ref for name, part in parts.items()},
        entries=state_digests.entries(state, parts) if occasion.places > 1 else {},
        stored=occasion.stored,
        place=occasion.place,
        places=occasion.places,
        processor=occasion.processor,
        by_one=occasion.by_one,
    )


def _groups(state: State) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Names in the store by the memory that they share, with its bytes."""
    groups: dict[object, list[str]] = {}
    stored = state.stored
    for name, tensor in stored.items():
        groups.setdefault(identity(tensor) if tensor.numel() else name, []).append(name)
    return tuple((tuple(names), stored[names[0]].nbytes) for names in groups.values())
