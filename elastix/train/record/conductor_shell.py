"""What is common to the shells around a conductor, which carry out what it wants done.

A run is led in an actor of Ray's (train.on_ray.controller), or in the calling thread of a local
run (testing.local). They differ in what a worker is: how it is started, reached and ended. What
becomes of the journal and of the checkpoints, and how a run goes back, is the same, and here.

Invariant: the conductor is asked, and its actions are carried out, under one lock.
"""

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from elastix.errors import ElastixError, StoreError
from elastix.events import (
    Event,
    Events,
    ReplicasCompared,
    Resumed,
    StateNotStored,
    StateStored,
    StepCommitted,
)
from elastix.observe import journal
from elastix.store import Store
from elastix.train.checkpoint.assembly import CheckpointEnded, Order, holder
from elastix.train.checkpoint.comparison import fault_before
from elastix.train.checkpoint.coordinator import Checkpoints, Outlets
from elastix.train.control.actions import (
    Action,
    EndWorker,
    Forget,
    KillWorker,
    Relay,
    StartWorker,
    Tell,
    Vacate,
    Vacated,
    Write,
)
from elastix.train.control.conductor import Conductor
from elastix.train.control.messages import Diverged, ToWorker
from elastix.train.control.terms import RunTerms
from elastix.train.record.logbook import Logbook
from elastix.train.record.start_or_resume import OF_SCORES, paused_step, take_up
from elastix.train.replica.link import Settings

logger = logging.getLogger(__name__)


class Shell(ABC):
    """See the module. What is abstract is called under the lock, but for `_tell`.

    Args:
        terms: for the conductor.
        listeners: told of every event that is written.
    """

    _checkpoints: Checkpoints
    _settings: Settings
    """What workers that are started from now on are told."""

    def __init__(self, terms: RunTerms, listeners: Events) -> None:
        self._lock = threading.RLock()
        self._conductor = Conductor(terms)
        self._log = Logbook(listeners)

    @abstractmethod
    def _tell(self, to: int | None, message: ToWorker) -> None:
        """Send a message to one worker, or to all that are at work. Any thread."""

    @abstractmethod
    def _start(self, worker: int) -> None:
        """Start a worker under this id, where there is room."""

    @abstractmethod
    def _kill(self, worker: int) -> None:
        """The worker is lost: end its process at once, even a stopped one."""

    @abstractmethod
    def _end(self, worker: int) -> None:
        """The worker's work is done, or not needed: end its process."""

    @abstractmethod
    def _vacate(self, worker: int, place: Vacated) -> None:
        """The worker's place is free, or is not to be used again."""

    @abstractmethod
    def _look_for_room(self) -> None:
        """Tell the conductor for how many more workers there is room."""

    @abstractmethod
    def _let_go(self) -> None:
        """All workers were ended: give back what they ran in."""

    def _keep_checkpoints(self, store: Store, settings: Settings) -> None:
        outlets = Outlets(
            send=self._tell_holder,
            emit=self._emit,
            journaled=lambda: self._log.state.step,
            sync=self._log.sync,
            fail=self._fail,
            parted=self._parted if settings.goes_back else None,
        )
        self._checkpoints = Checkpoints(store, settings.run, settings.checkpoint, outlets)

    def _do(self, actions: Sequence[Action]) -> None:
        """Carry out what the conductor wants done. Under the lock."""
        for action in actions:
            match action:
                case Tell():
                    self._tell(action.to, action.message)
                case Write():
                    self._emit(action.event, action.sequence)
                    if isinstance(action.event, StepCommitted):
                        self._checkpoints.poke()
                case StartWorker():
                    self._start(action.worker)
                case KillWorker():
                    self._kill(action.worker)
                case EndWorker():
                    self._end(action.worker)
                case Vacate():
                    self._vacate(action.worker, action.place)
                case Relay():
                    place, places = action.message.place, self._settings.processes
                    self._checkpoints.told(holder(action.worker, place, places), action.message)
                case Forget():
                    self._forget(action.worker)
        if any(isinstance(action, Vacate) for action in actions):
            self._look_for_room()

    def _forget(self, worker: int) -> None:
        """None of its snapshots can be counted on."""
        places = self._settings.processes
        for place in range(places):
            self._checkpoints.lost(holder(worker, place, places))

    def _tell_holder(self, to: int | None, message: Order | CheckpointEnded) -> None:
        """Send what the coordinator of checkpoints has to say; `to` is a holder. Any thread."""
        if to is None:
            self._tell(None, message)
            return
        worker, place = divmod(to, self._settings.processes)
        named = replace(message, place=place) if isinstance(message, Order) else message
        self._tell(worker, named)

    def _emit(self, event: Event, sequence: int | None = None) -> bool:
        """Write an event; False, and the end of the run, if it cannot be written. Any thread."""
        with self._lock:
            try:
                self._log.write(event, sequence)
            except StoreError as error:
                self._conductor.fail(error)
                return False
            if isinstance(event, StateStored):
                self._conductor.stored(event)
            elif isinstance(event, StateNotStored):
                self._do(self._conductor.not_stored(event))
            return True

    def _fail(self, error: ElastixError) -> None:
        """The run cannot go on. Any thread; what came first counts."""
        with self._lock:
            self._conductor.fail(error)

    def _parted(self, found: ReplicasCompared, error: ElastixError) -> None:
        """States that were to be stored differ, and nobody can say since when. Any thread."""
        with self._lock:
            self._conductor.differ(
                Diverged(
                    step=found.step,
                    workers=found.workers,
                    apart=found.apart,
                    parts=found.parts,
                    error=error,
                    unseen=True,
                )
            )

    def _stored(self) -> Resumed:
        """Where the run goes on from if nobody has the State; what is unsound is dropped.

        Workers are told from now on what is left out then: the guard may have left out more since.
        """
        state = self._log.state
        if state.sound is not None:
            last, dropped = self._checkpoints.go_back_to(state.sound)
            for event in dropped:
                self._emit(event)
        else:
            last = self._checkpoints.last()
        step, ref = (last.step, last.ref) if last else (0, "")
        with contextlib.suppress(StoreError):  # whoever begins from it says what is wrong
            if (paused := paused_step(self._settings)) > step:
                step, ref = paused, ""
        again = 0 if state.sound is None else state.step - step
        found = Resumed(step=step, ref=ref, again=again)
        self._settings = replace(self._settings, left_out=self._log.left_out.after(found))
        return found

    def _take_up(self) -> Resumed:
        """The shell that led the run was killed: where it goes on from if nobody has the State.

        It may have been so when it had said that States differ, and no more than that. Whoever held
        another one may be dead, and nobody would find it again. So all go back, or the run ends, as
        it would have.
        """
        path = self._settings.directory / "journal.jsonl"
        take_up(self._checkpoints, self._settings, journal.read_only(path, *OF_SCORES))
        with self._lock:
            unjudged = self._log.state.unjudged
            if unjudged is not None and self._settings.goes_back:
                self._emit(unjudged)
            elif unjudged is not None:
                self._checkpoints.refuse(fault_before(unjudged))
            return self._stored()

    def _go_back(self) -> None:
        """The last worker with the State is lost: found the group anew, from the furthest State."""
        parted = self._log.state.parted is not None
        logger.warning(
            "%s; it goes on from what others hold of the State, or from a stored one run=%s",
            "what workers of the group hold differs" if parted else "all workers of the group lost",
            self._settings.run,
        )
        self._checkpoints.give_up()
        with self._lock:
            before = self._settings.left_out
            self._do(self._conductor.judge(time.monotonic()))
            try:
                stored = self._stored()
            except StoreError as error:
                self._conductor.fail(error)
                return
            # Whoever was started before would draw other samples than the others.
            anew = self._settings.left_out != before
            self._do(self._conductor.went_back(stored, time.monotonic(), anew=anew))

    def _close(self) -> None:
        """The run is over: end its workers, and what is kept of it."""
        with self._lock:
            self._do(self._conductor.close())
            self._let_go()
        self._checkpoints.stop()  # else it might store what is dropped, or find what nobody judges
        with self._lock:
            self._do(self._conductor.judge(time.monotonic()))
            if self._log.state.parted is not None:  # and it was not gone back for it yet
                with contextlib.suppress(StoreError):
                    self._stored()
        self._checkpoints.close()
        with self._lock:
            self._emit(self._conductor.ending())
            self._log.close()
