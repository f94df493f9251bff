"""What is common to the shells of runs whose workers are crews: going on from the parts of a State.

If no worker is whole any more, each process that has come out may have its part of the State as it
was at the last boundary. If there is a process for every part they found the group anew, as one
worker, and nothing is read from the store. What they had not told yet is then written to the
journal: their worker may have been lost sooner than that was heard. Else the run goes back to what
it has stored.

Not here: who has what (control.crews), and when a part is as it was (state.HeldState).
"""

from elastix.events import Event, Resumed, WorkerLost
from elastix.train.control.crews import Crews
from elastix.train.record.conductor_shell import Shell


class CrewShell(Shell):
    """A shell whose workers are several processes each; comes before the other bases."""

    _crews: Crews

    def _go_back(self) -> None:
        """Not before all have come out who can: till then nobody knows what they have."""
        with self._lock:
            if self._crews.leaving:
                return
        super()._go_back()

    def _stored(self) -> Resumed:
        stored, state = super()._stored(), self._conductor.state
        if not self._conductor.extinct:
            return stored
        found = self._crews.found_from(state, stored.step)
        if found is None:
            return stored
        self._do(self._conductor.told_late(found.untold))
        return Resumed(step=found.step, ref="", held=True, sequence=found.following)

    @property
    def _free(self) -> int:
        """For how many more workers there is room: none while it is open what the next one is."""
        return 0 if self._conductor.extinct else self._crews.workers

    def _emit(self, event: Event, sequence: int | None = None) -> bool:
        if isinstance(event, WorkerLost) and event.cause == "diverged":
            with self._lock:
                self._crews.distrust(event.worker)
        return super()._emit(event, sequence)

    def _founds(self, worker: int) -> bool:
        """Whether a worker that is to be started can be: its processes have what it needs."""
        return self._conductor.founder != worker or self._crews.founding
