"""Which samples are left out on purpose, as a journal tells it in order. Pure."""

from collections.abc import Iterable

from elastix.data.cursor import union
from elastix.events import Event, ReplicasDiverged, Resumed, SamplesLeftOut, Span


class LeftOut:
    """The samples that are left out, by the events taken so far.

    The guard leaves a batch out because of what workers have computed. If all go back because that
    may have been wrong, what was left out after the State that they go back to is used again.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._told: list[tuple[int, SamplesLeftOut]] = []  # States of later steps know of it
        self._parted = False
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """One more event, in order; only KINDS change anything."""
        if isinstance(event, SamplesLeftOut):
            self._told.append((event.step, event))
        elif isinstance(event, ReplicasDiverged):
            self._parted = self._parted or (event.unseen and event.cure == "went back")
        elif isinstance(event, Resumed):
            if self._parted:
                self._told = [(step, one) for step, one in self._told if step < event.step]
            else:  # those that are stored from here on have been told of all of it
                self._told = [(min(step, event.step), one) for step, one in self._told]
            self._parted = False

    def after(self, event: Event) -> dict[int, tuple[Span, ...]]:
        """By loader, the positions that stand when this is told as well."""
        then = LeftOut()
        then._told, then._parted = [*self._told], self._parted
        then.take(event)
        return then.spans

    @property
    def told(self) -> list[SamplesLeftOut]:
        """The events by which something is still left out, in order."""
        return [one for _, one in self._told]

    @property
    def spans(self) -> dict[int, tuple[Span, ...]]:
        """The positions that are left out, by loader."""
        found: dict[int, tuple[Span, ...]] = {}
        for one in self.told:
            found[one.loader] = union(found.get(one.loader, ()), one.spans)
        return found


KINDS = (SamplesLeftOut, ReplicasDiverged, Resumed)
"""The events that LeftOut goes by."""
