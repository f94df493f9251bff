"""The group that a proposal asks for, built while training goes on in the present one."""

import threading
from collections.abc import Callable
from dataclasses import replace

from elastix.comm.group import Builder, Wiring
from elastix.comm.membership import Membership


class Ahead:
    """Connects to the members of the newest proposal. Any thread may call.

    Args:
        wiring: this worker's, as it is at the moment; generation and members do not count.
        notify: called, from any thread, when a group is ready or has failed.
    """

    def __init__(self, wiring: Callable[[], Wiring], notify: Callable[[], None]) -> None:
        self._wiring = wiring
        self._notify = notify
        self._lock = threading.Lock()
        self._builder: Builder | None = None

    def begin(self, proposed: Membership) -> None:
        """Begin to connect; what was begun for an older proposal is ended."""
        wiring = replace(self._wiring(), generation=proposed.generation, members=proposed.members)
        with self._lock:
            outdated = self._builder
            if outdated is not None and outdated.generation >= proposed.generation:
                return
            wanted = wiring.me in proposed.members and proposed.size > 1
            self._builder = Builder(wiring, self._notify) if wanted else None
        if outdated is not None:
            outdated.abandon()

    def take(self, generation: int) -> Builder | None:
        """The builder of that generation, if it was begun; one of an older generation is ended."""
        with self._lock:
            builder = self._builder
            if builder is None or builder.generation > generation:
                return None
            self._builder = None
        if builder.generation == generation:
            return builder
        builder.abandon()
        return None

    def look(self, generation: int) -> Builder | None:
        """The builder of that generation, if it was begun; it stays here."""
        with self._lock:
            builder = self._builder
        return builder if builder is not None and builder.generation == generation else None
