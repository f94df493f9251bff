"""What a run has told so far: its journal, and what a controller must know of it. No Ray.

A controller that takes the run over reads the journal; one that is there writes it. Both go
through the same `_take`, so a successor knows what its predecessor knew.

Not thread-safe: the controller calls it under its lock.
"""

import time
from pathlib import Path
from typing import Any

from elastix.events import Event, Events, RunEnded, RunStarted
from elastix.observe import journal
from elastix.observe.journal import Journal
from elastix.observe.progress import Progress
from elastix.train.control.run_state import RunState


class Logbook:
    """One run's, from its opening on.

    Args:
        listeners: told of every event that is written.

    Attributes:
        history: events since the opening, in order.
        state: what they come to for whoever leads the run.
    """

    def __init__(self, listeners: Events) -> None:
        self.history: list[Event] = []
        self.state = RunState()
        self._listeners = listeners
        self._progress = Progress()

    def open(self, path: Path, opening: Event, stays: bool, patience_s: float) -> list[Event]:
        """Read the journal, and write it from now on.

        Args:
            path: the file; it may hold earlier runs of this name.
            opening: the first event of this run. If it is there already, this controller is not
                the run's first, and everything since is in `history` afterwards.
            stays: see Journal.
            patience_s: see Journal.

        Returns:
            All that the file held.

        Raises:
            Conflict: another process writes it, and did not end in time.
            Corrupt: a line is no event.
        """
        self._journal = Journal(path, stays=stays, patience_s=patience_s)
        before = list(journal.read_numbered(path)) if path.exists() else []
        ours = False
        for event, serial in before:
            self._progress.add(event)
            ours = ours or (isinstance(event, RunStarted) and event.t == opening.t)
            if ours:
                self._take(event, serial)
        return [event for event, _ in before]

    @property
    def ended(self) -> RunEnded | None:
        """How the run ended, if it did."""
        last = self.history[-1] if self.history else None
        return last if isinstance(last, RunEnded) else None

    def write(self, event: Event, serial: int | None = None) -> None:
        """Add an event to the journal, and tell everybody."""
        self._journal.append(event, serial)
        self._listeners.emit(event)
        self._progress.add(event)
        self._take(event, serial)

    def _take(self, event: Event, serial: int | None) -> None:
        self.history.append(event)
        self.state.take(event, serial)

    def summary(self) -> dict[str, Any]:
        """Where the run stands; see Progress.summary."""
        return self._progress.summary(time.time())

    def sync(self) -> None:
        """Make durable what is written. Any thread may call it."""
        self._journal.sync()

    def close(self) -> None:
        """Make the journal durable, and let others write it."""
        self._journal.close()
