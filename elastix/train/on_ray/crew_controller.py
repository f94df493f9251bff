"""The controller of a run whose workers are crews: several processes to a worker.

See controller. What is particular: a process outlives its worker. When one of them dies, its mates
are told, come out, and are free for another worker. Who is where is the business of
train.control.crews.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastix.events import Event, WorkerStarted
from elastix.train.control.actions import Vacated
from elastix.train.control.crews import Crews
from elastix.train.control.messages import (
    Disband,
    FromWorker,
    Outcome,
    OutcomeKind,
    RecordEvents,
    ToWorker,
)
from elastix.train.control.terms import Found
from elastix.train.on_ray.controller import Controller
from elastix.train.on_ray.placement import CrewSlots, Slot
from elastix.train.on_ray.takeover import Presence
from elastix.train.on_ray.worker_handle import WorkerHandle
from elastix.train.record.crew_shell import CrewShell
from elastix.train.replica.link import Life

_OF_NO_USE = {OutcomeKind.OUT_OF_MEMORY, OutcomeKind.DEVICE_FAILED, OutcomeKind.OTHER_CODE}
"""Of these ends a process does not come out for another worker, and others go on."""


class CrewController(CrewShell, Controller):
    """See the module."""

    _slots: CrewSlots  # type: ignore[assignment]  # has what the methods here ask for

    def _open_room(self, most: int) -> None:
        plan = self._plan
        scaling = plan.scaling
        size = scaling.processes
        strategy = crew_strategy(scaling.crew)
        wanted = scaling.resources_per_process
        self._slots = CrewSlots(plan.placement, wanted, size, most, strategy, plan.run_id)
        self._together = strategy == "STRICT_PACK"
        self._crews = Crews(size, {}, again=False)  # the slots know
        self._unused: list[Slot] = []

    def _site(self, slot: Slot) -> str:
        return slot.node if self._together else ""

    # ------------------------------------------------------------------ what processes say

    def _heed(self, process: int, worker: int, message: FromWorker) -> bool:
        """What is said of a worker that is lost is let drop, so that nobody says it for ever."""
        if process not in self._handles:
            return False
        said = self._crews.passed_on(process, worker, message)
        if said is None:
            return True
        if worker not in self._conductor.workers:
            return True
        self._do(self._conductor.hear(worker, said, time.monotonic()))
        return not (isinstance(message, RecordEvents) and self._unwritable)

    def _lost(self, handle: WorkerHandle, now: float) -> None:
        if self._handles.pop(handle.process, None) is None:
            return  # it was ended
        lost = self._crews.gone(handle.process)
        self._give_back(handle.process)
        if lost is not None:
            self._do(self._conductor.died(lost, now))
        self._look_for_room()

    def _through(self, handle: WorkerHandle, worker: int, outcome: Outcome, now: float) -> None:
        process = handle.process
        at = self._crews.at(process)
        if process not in self._handles or at is None or at[0] != worker:
            return
        handle.run, handle.over = handle.actor.outcome.remote(worker), False  # of its next one
        if outcome.kind is OutcomeKind.FREE:
            self._do(self._conductor.ended(worker, outcome, now))  # if it is not known yet
            self._crews.freed(process, outcome.kept)
            self._look_for_room()
        elif self._crews.over(process, outcome.kind):
            self._do(self._conductor.ended(worker, outcome, now))
            if outcome.kind in _OF_NO_USE:
                self._end_process(process)
                self._look_for_room()

    def _emit(self, event: Event, sequence: int | None = None) -> bool:
        if isinstance(event, WorkerStarted):
            mates = (self._handles[process] for process in self._crews.of(event.worker)[1:])
            event = replace(event, mates=tuple((mate.node, mate.pid) for mate in mates))
        return super()._emit(event, sequence)

    # ------------------------------------------------------------------ acting

    def _look_for_room(self) -> None:
        now, crews, slots = time.monotonic(), self._crews, self._slots
        draining = slots.draining
        there = {n for n, handle in self._handles.items() if handle.node in draining}
        for process in {*crews.overdue(now), *there.intersection(crews.free)}:
            self._end_process(process)
        self._unused = slots.free()
        crews.room = dict(Counter(map(self._site, self._unused)))
        crews.coming = slots.coming
        partly = {at[0] for at in map(crews.at, there) if at is not None}
        self._do(
            self._conductor.room(
                self._free, more=crews.more, draining=draining, partly=partly, now=now
            )
        )

    def _start(self, worker: int) -> None:
        if not self._founds(worker):
            self._do(self._conductor.died(worker, time.monotonic()))
            return
        chosen, ended = self._crews.start(worker)
        site = self._crews.site(worker)
        room = [slot for slot in self._unused if self._site(slot) == site]
        for process in ended:
            self._handles.pop(process).end()
            room.append(self._places.pop(process))
        for place, process in enumerate(chosen):
            if process not in self._handles:
                slot = room.pop()
                if slot in self._unused:
                    self._unused.remove(slot)
                    self._slots.take(slot)
                self._start_process(process, slot)
            life = Life(worker, place, self._settings, self._crews.founds(worker))
            self._handles[process].actor.run.remote(life)

    def _kill(self, worker: int) -> None:
        """Its processes are of use yet, if they come out."""
        for process in self._crews.break_up(worker, time.monotonic()):
            self._handles[process].actor.hear.remote(worker, Disband())

    def _end(self, worker: int) -> None:
        for process in self._crews.of(worker):
            self._crews.gone(process)
            self._handles.pop(process).end()
            self._give_back(process)

    def _end_process(self, process: int) -> None:
        self._crews.gone(process)
        self._kill_process(process)
        self._give_back(process)

    def _give_back(self, process: int) -> None:
        slot = self._places.pop(process)
        if self._plan.failure.replace:
            self._slots.give_back(slot, self._failed.pop(process, ""))

    def _vacate(self, worker: int, place: Vacated) -> None:
        """Room is counted in processes, as they end."""

    def _let_go(self) -> None:
        for handle in self._handles.values():  # free ones: they are of no worker
            handle.end()
        super()._let_go()

    def _tell(self, to: int | None, message: ToWorker) -> None:
        """To one worker, or to all that are at work. Any thread."""
        with self._lock:
            for process, handle in self._handles.items():
                worker = self._crews.hears(process, to, message)
                if worker is not None:
                    handle.actor.hear.remote(worker, message)

    # ------------------------------------------------------------------ taking over

    def _take_slots_over(self) -> None:
        """Where nobody is replaced, the room of lost crews stays empty, but for who is of others.

        Of what could not be started one process at least was lost.
        """
        state, replaces = self._conductor.state, self._plan.failure.replace
        alive = {(handle.node, handle.pid) for handle in self._handles.values()}
        unused = 0 if replaces else len(state.crews_lost - alive) + state.not_started
        self._slots.take_over(list(self._places.values()), unused)

    def _find(self, actors: Mapping[int, Any], present: Sequence[Presence]) -> list[Found]:
        """Workers that are whole. What is left of others is ended: another one is not far.

        So are those that are not up to `prepare`: until then their processes meet by the controller
        that was killed, and they would raise.
        """
        size = self._plan.scaling.processes
        whole: dict[int, list[Presence]] = {}
        for one in sorted(present, key=lambda one: one.place):
            whole.setdefault(one.worker, []).append(one)
        whole = {
            worker: places
            for worker, places in whole.items()
            if worker >= 0
            and len(places) == size
            and places[0].ready
            and not any(one.broken for one in places)
        }
        for one in present:
            if one.worker not in whole:
                self._kill_process(one.process)
        processes = {
            worker: [(one.process, self._site(one.slot)) for one in places]
            for worker, places in whole.items()
        }
        self._crews.take_over(processes, max(actors, default=-1) + 1)
        return [
            Found(
                worker=worker,
                pid=places[0].pid,
                node=places[0].node,
                device=places[0].device,
                generation=max(one.generation for one in places),
                address=None,
                ready=places[0].ready,
                holder=all(one.holder for one in places),
                noticed=any(one.noticed for one in places),
                misinformed=any(one.left_out != self._settings.left_out for one in places),
            )
            for worker, places in whole.items()
        ]


def crew_strategy(crew: Mapping[str, int]) -> str:
    """How the processes of a worker are placed: `tensor` talks in every layer."""
    return "STRICT_PACK" if crew.get("tensor", 1) > 1 else "PACK"
