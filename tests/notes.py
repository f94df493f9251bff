"""A logger for tests."""

import threading


class Notes:
    """Keeps what it hears.

    Args:
        gate: an Event that it waits for before it takes anything.
        fails_at: says of an event whether to raise at it.
    """

    def __init__(self, gate=None, fails_at=lambda event: False):
        self.seen = []
        self.closed = 0
        self.thread = None
        self._gate = gate
        self._fails_at = fails_at

    def log(self, event):
        if self._gate is not None:
            self._gate.wait(30)
        if self._fails_at(event):
            raise OSError("no more room")
        self.thread = threading.current_thread()
        self.seen.append(event)

    def close(self):
        self.closed += 1
