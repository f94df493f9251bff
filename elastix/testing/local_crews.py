"""A local run whose workers are crews: the controller of several processes to a worker.

See local. What is particular: processes outlive their worker. When one of them dies, the others are
told, come out, and are free for another worker.
"""

import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from elastix.testing.local import LocalController, heard
from elastix.testing.local_worker import work_in_crews
from elastix.train.control.actions import Vacated
from elastix.train.control.crews import Crews
from elastix.train.control.messages import (
    Disband,
    Outcome,
    OutcomeKind,
    ToWorker,
)
from elastix.train.record.crew_shell import CrewShell
from elastix.train.replica.link import Life


class LocalCrewController(CrewShell, LocalController):
    """`_lines` and `_processes` are by process here."""

    _lines: dict[int, Connection]
    _processes: dict[int, BaseProcess]

    def _prepare(self) -> None:
        size = self._settings.processes
        self._crews = Crews(size, {"": self._room.free * size}, again=self._room.again)

    # ------------------------------------------------------------------ what processes say

    def _serve(self, process: int, line: Connection) -> None:
        if self._lines.get(process) is not line:
            return
        message = heard(line)
        at = self._crews.at(process)
        if message is None and at is not None and at[0] not in self._conductor.state.started:
            self._look_why(self._processes[process])
        with self._lock:
            now = time.monotonic()
            if message is None:
                self._lines.pop(process).close()
                over = self._crews.ended(process)
                lost = self._crews.gone(process)
                if at is not None and not over:
                    self.run.lost_places.append((*at, now))
                if lost is not None:
                    self._do(self._conductor.died(lost, now))
                self._look_for_room()
            elif isinstance(message, Outcome):
                self._hear_end(process, message, now)
            elif at is not None:
                said = self._crews.passed_on(process, at[0], message)
                if said is not None:
                    self._do(self._conductor.hear(at[0], said, now))

    def _hear_end(self, process: int, outcome: Outcome, now: float) -> None:
        at = self._crews.at(process)
        if at is None:
            return
        worker, place = at
        if outcome.kind is OutcomeKind.FREE:
            self.run.freed.append((worker, place, now))
            self._do(self._conductor.ended(worker, outcome, now))  # if it is not known yet
            self._crews.freed(process, outcome.kept)
            self._look_for_room()
            return
        if self._crews.over(process, outcome.kind):
            self.run.outcomes[worker] = outcome
            self._do(self._conductor.ended(worker, outcome, now))

    # ------------------------------------------------------------------ what the conductor wants

    def _look_for_room(self) -> None:
        now = time.monotonic()
        for process in self._crews.overdue(now):
            self._processes[process].kill()
        self._do(self._conductor.room(self._free, more=self._crews.more, now=now))

    def _start(self, worker: int) -> None:
        if not self._founds(worker):
            self._do(self._conductor.died(worker, time.monotonic()))
            return
        chosen, ended = self._crews.start(worker)
        for process in ended:
            self._processes[process].kill()
            self._lines.pop(process).close()
        for place, process in enumerate(chosen):
            life = Life(worker, place, self._settings, self._crews.founds(worker))
            if process in self._lines:
                self._send(process, life)
                continue
            here, there = self._spawner.Pipe()
            run = (self._train, self._config, self._store, process, self._gpus)
            args = (life, there, self._rendezvous.address, *run)
            self._processes[process] = self._spawn(work_in_crews, args)
            there.close()
            self._lines[process] = here

    def _vacate(self, worker: int, place: Vacated) -> None:
        """Room is counted in processes, as they end."""

    def _kill(self, worker: int) -> None:
        now = time.monotonic()
        self.run.lost[worker] = now
        for process in self._crews.break_up(worker, now):
            self._send(process, Disband())

    def _end(self, worker: int) -> None:
        for process in self._crews.of(worker):
            line = self._lines.pop(process, None)
            if line is None:
                continue
            if not self._crews.ended(process):
                self._processes[process].kill()
            self._crews.gone(process)
            line.close()

    def _send(self, process: int, message: Any) -> None:  # noqa: ANN401
        try:
            self._lines[process].send(message)
        except (OSError, KeyError):
            return  # it is dead, and `wait` will say so

    def _tell(self, to: int | None, message: ToWorker) -> None:
        with self._lock:
            for process in list(self._lines):
                if self._crews.hears(process, to, message) is not None:
                    self._send(process, message)
