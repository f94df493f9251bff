"""Where workers can be placed on the cluster: reserved room that comes and goes with its nodes.

The founders' placement group is reserved by the trainer; every further slot is a placement group
of one bundle. Those that do not fit yet stay requested: they are taken as soon as there is room,
and an autoscaler sees them. Not here: what runs in a slot.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

SLOT = "/slot-"  # in the names of groups that a controller asks for
_LOOK_S = 0.5


@dataclass(frozen=True)
class Slot:
    """Room for one worker: a bundle of a placement group."""

    group: PlacementGroup
    bundle: int
    founding: bool = False


def groups_named(prefix: str) -> list[PlacementGroup]:
    """Placement groups whose names begin like that."""
    found = []
    for entry in placement_group_table().values():
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # it was removed just now
                found.append(get_placement_group(entry["name"]))
    return found


class Slots:
    """All room that a run may use.

    Args:
        founding: the founders' placement group.
        size: its bundles.
        most: slots that the run would use if there were room.
        wanted: what a worker occupies.
        name: of the run; its further groups are detached and named after it, so that they stay
            if the controller's process dies.

    Attributes:
        draining: nodes that are to be taken away (preempted, or idle for the autoscaler), by id.
    """

    def __init__(
        self,
        founding: PlacementGroup,
        size: int,
        most: int,
        wanted: Mapping[str, float],
        name: str,
    ) -> None:
        self.draining: set[str] = set()
        self._wanted = dict(wanted)
        self._name = name
        self._lock = threading.Lock()
        self._free = [Slot(founding, bundle, founding=True) for bundle in reversed(range(size))]
        self._requested: list[PlacementGroup] = []
        self._own: list[PlacementGroup] = []  # all but the founders'
        self._missing = most - size
        self._resting: list[tuple[Slot, str]] = []
        self._looked = 0.0

    def take_over(self, used: Sequence[Slot]) -> None:
        """Another controller had these slots, and its workers live in them."""
        founding = {slot.bundle for slot in used if slot.founding}
        groups = [slot.group for slot in used if not slot.founding]
        with self._lock:
            self._free = [slot for slot in self._free if slot.bundle not in founding]
            taken = {group.id for group in groups}
            for group in groups_named(f"{self._name}{SLOT}"):
                self._own.append(group)
                self._missing -= 1
                if group.id not in taken:
                    self._requested.append(group)

    def _request(self) -> PlacementGroup:
        name = f"{self._name}{SLOT}{secrets.token_hex(4)}"
        group: PlacementGroup = placement_group([self._wanted], name=name, lifetime="detached")
        return group

    @property
    def more(self) -> bool:
        """Whether workers could still be started, now or once the cluster has room."""
        with self._lock:
            return bool(self._free or self._resting or self._requested or self._missing)

    @property
    def free(self) -> int:
        """How many workers can be started now."""
        with self._lock:
            return len(self._free)

    def take(self) -> Slot | None:
        """A slot that a worker can be started in now; None if there is none."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, slot: Slot, node: str = "") -> None:
        """The slot's worker is gone. `node`: where it was, if that is to be taken away."""
        with self._lock:
            if not node:
                self._free.append(slot)
            elif slot.founding:
                self._resting.append((slot, node))  # Ray moves the bundle when the node is gone
            else:
                self._remove(slot.group)
                self._missing += 1

    def drop(self, slot: Slot) -> None:
        """The slot's worker is gone, and no other is to take its place."""
        if not slot.founding:
            with self._lock:
                self._remove(slot.group)

    def look(self) -> None:
        """See what has changed on the cluster, and ask it for what is missing.

        Asks Ray, which takes some milliseconds, twice a second however often it is called.
        """
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        # What Ray Train uses as well; there is no public call.
        self.draining = set(ray._private.state.state.get_draining_nodes() or {})
        created = [g for g in self._requested if placement_group_table(g)["state"] == "CREATED"]
        alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]} if self._resting else set()
        with self._lock:
            self._free += [Slot(group, 0) for group in created]
            self._requested = [group for group in self._requested if group not in created]
            self._free += [slot for slot, node in self._resting if node not in alive]
            self._resting = [(slot, node) for slot, node in self._resting if node in alive]
            missing, self._missing = self._missing, 0
        requested = [self._request() for _ in range(missing)]
        self._requested += requested
        self._own += requested

    def close(self) -> None:
        """Let go of all room but the founders'. Ends what runs there."""
        for group in list(self._own):
            self._remove(group)
        self._requested, self._free = [], []

    def _remove(self, group: PlacementGroup) -> None:
        self._own = [own for own in self._own if own.id != group.id]
        remove_placement_group(group)
