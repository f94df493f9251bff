"""What a run has told so far: its journal, and what a controller must know of it. No Ray.

A controller that takes the run over reads the journal; one that is there writes it. Both go
through the same `_take`, so a successor knows what its predecessor knew.

A driver may ask for any event since the opening, and asks for the newest. Those are kept; older
ones are read from the file again, as a long run's would fill the memory.

Not thread-safe: the controller calls it under its lock.
"""

import time
from collections import deque
from pathlib import Path
from typing import Any

from elastix.data.left_out import LeftOut
from elastix.events import Event, Events, RunEnded, RunStarted
from elastix.observe import journal
from elastix.observe.journal import Journal
from elastix.observe.progress import Progress
from elastix.train.control.run_state import RunState

KEPT = 256
"""So many events are kept. Of a group of a thousand each takes some hundred KiB."""


class Logbook:
    """One run's, from its opening on.

    Args:
        listeners: told of every event that is written.

    Attributes:
        count: events since the opening.
        state: what they come to for whoever leads the run.
        left_out: which samples are, by all events of the journal.
    """

    def __init__(self, listeners: Events) -> None:
        self.count = 0
        self.state = RunState()
        self.left_out = LeftOut()
        self._newest: deque[Event] = deque(maxlen=KEPT)
        self._end = 0  # of what is read or written, in bytes of the file
        self._places: list[int] = []  # where every KEPT-th event begins
        self._listeners = listeners
        self._progress = Progress()

    def open(self, path: Path, opening: Event, stays: bool, patience_s: float) -> None:
        """Read the journal, and write it from now on.

        Args:
            path: the file; it may hold earlier runs of this name.
            opening: the first event of this run. If it is there already, this controller is not
                the run's first, and what came since counts.
            stays: see Journal.
            patience_s: see Journal.

        Raises:
            Conflict: another process writes it, and did not end in time.
            Corrupt: a line is no event.
        """
        self._journal = Journal(path, stays=stays, patience_s=patience_s)
        ours = False
        for event, sequence, end in journal.read_placed(path) if path.exists() else ():
            self._progress.add(event)
            self.left_out.take(event)
            ours = ours or (isinstance(event, RunStarted) and event.t == opening.t)
            if ours:
                self._take(event, sequence, end)
            self._end = end

    def events(self, start: int) -> list[Event]:
        """Events since the opening from number `start` on: all of them, or the next few hundred.

        Raises:
            Corrupt: a line of the file is no event.
        """
        first = self.count - len(self._newest)
        if start >= first:
            return list(self._newest)[start - first :]
        place, skip = self._places[start // KEPT], start % KEPT
        return journal.read_part(self._journal.path, place, skip, KEPT)

    @property
    def ended(self) -> RunEnded | None:
        """How the run ended, if it did."""
        last = self._newest[-1] if self._newest else None
        return last if isinstance(last, RunEnded) else None

    def write(self, event: Event, sequence: int | None = None) -> None:
        """Add an event to the journal, and tell everybody."""
        self._journal.append(event, sequence)
        self._listeners.emit(event)
        self._progress.add(event)
        self.left_out.take(event)
        self._take(event, sequence, self._journal.size)

    def _take(self, event: Event, sequence: int | None, end: int) -> None:
        if self.count % KEPT == 0:
            self._places.append(self._end)
        self._end = end
        self.count += 1
        self._newest.append(event)
        self.state.take(event, sequence)

    def summary(self) -> dict[str, Any]:
        """Where the run stands; see Progress.summary."""
        return self._progress.summary(time.time())

    def sync(self) -> None:
        """Make durable what is written. Any thread may call it."""
        self._journal.sync()

    def close(self) -> None:
        """Make the journal durable, and let others write it."""
        self._journal.close()
