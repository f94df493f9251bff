"""The group that a proposal asks for, built while training goes on in the present one."""

import threading
from collections.abc import Callable
from dataclasses import replace

from elastix.comm.network.process_group import Builder, Wiring
from elastix.comm.protocol.membership import Membership


class NextGroup:
    """Connects to the members of proposals. Any thread may call.

    Args:
        wiring: this worker's, as it is at the moment; generation and members do not count.
        notify: called, from any thread, when a group is ready or has failed.
    """

    def __init__(self, wiring: Callable[[], Wiring], notify: Callable[[], None]) -> None:
        self._wiring = wiring
        self._notify = notify
        self._lock = threading.Lock()
        self._builders: dict[int, Builder] = {}

    def begin(self, proposed: Membership) -> None:
        """Begin to connect. An older proposal may be agreed on already, so its group stays."""
        wiring = replace(self._wiring(), generation=proposed.generation, members=proposed.members)
        if wiring.me not in proposed.members or proposed.size == 1:
            return
        with self._lock:
            if proposed.generation > max(self._builders, default=0):
                self._builders[proposed.generation] = Builder(wiring, self._notify)

    def connect(self, membership: Membership) -> None:
        """Begin to connect these, if it was not begun; what is older is ended."""
        generation, members = membership.generation, membership.members
        wiring = replace(self._wiring(), generation=generation, members=members)
        with self._lock:
            outdated = [g for g in self._builders if g < generation]
            ended = [self._builders.pop(g) for g in outdated]
            if membership.size > 1 and generation not in self._builders:
                self._builders[generation] = Builder(wiring, self._notify)
        for other in ended:
            other.abandon()

    def unblock(self, generation: float) -> None:
        """See Builder.unblock, of those older than this generation."""
        with self._lock:
            outdated = [one for one in self._builders.values() if one.generation < generation]
        for builder in outdated:
            builder.unblock()

    def end(self) -> None:
        """Nobody wants any of them."""
        with self._lock:
            ended, self._builders = list(self._builders.values()), {}
        for builder in ended:
            builder.abandon()

    def take(self, generation: int) -> Builder | None:
        """The builder of that generation, if it was begun; those of older ones are ended."""
        with self._lock:
            builder = self._builders.pop(generation, None)
            outdated = [g for g in self._builders if g < generation]
            ended = [self._builders.pop(g) for g in outdated]
        for other in ended:
            other.abandon()
        return builder

    def look(self, generation: int) -> Builder | None:
        """The builder of that generation, if it was begun; it stays here."""
        with self._lock:
            return self._builders.get(generation)
