"""Where workers can be placed on the cluster: reserved room that comes and goes with its nodes.

The founders' placement group is reserved by the trainer; every further slot is a placement group
of one bundle. Those that do not fit yet stay requested: they are taken as soon as there is room,
and an autoscaler sees them. Not more than 64 at once are: each costs Ray work all the time, and a
maximum of a million workers means as many as there is room for. Where workers are crews, each
worker's room is a group of its own, of a bundle for each process (CrewSlots). Not here: what runs
in a slot.

Ray needs ten seconds and more to find out that a node is gone, and places workers there until then.
Of what a cloud says about a node it never hears. So a slot counts as free only while its node is
alive to Ray, answers, and is not to be taken away. In place of idle slots on a node that is to be
taken away others are requested, which must not be there; and so where a worker was refused, since
its elastix has other code. Not without end: whoever brings nodes may have no others.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from elastix.train.on_ray.answering_nodes import answering
from elastix.train.on_ray.preemption_notices import draining_nodes

logger = logging.getLogger(__name__)
SLOT = "/slot-"  # in the names of groups that a controller asks for
_WAITING = 64  # slots that are requested at once and are not there yet
_REFUSED = 8  # nodes in a row with other code, after which no others are asked for
_FAILURES = 5  # in a row of the GPU of one slot, after which that is taken to be broken
_BROKEN = 8  # such slots for which others are asked for
_LOOK_S = 0.5
_ANSWER_S = 0.3


@dataclass(frozen=True)
class Slot:
    """Room for one process: a bundle of a placement group.

    Attributes:
        node: where it is, if that is known.
    """

    group: PlacementGroup
    bundle: int
    founding: bool = False
    node: str = ""


def groups_named(prefix: str) -> list[PlacementGroup]:
    """Placement groups whose names begin like that."""
    found = []
    for entry in placement_group_table().values():
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # it was removed just now
                found.append(get_placement_group(entry["name"]))
    return found


class _Room:
    """What both kinds of slots have in common: notices, and nodes that have other elastix code.

    Args:
        slots: the founders'.
        missing: how many groups of its own the run would use beside if there were room.
        name: of the run; its further groups are detached and named after it, so that they stay
            if the controller's process dies.
        avoided: nodes that are known to have other elastix code.

    Attributes:
        draining: nodes that are to be taken away (preempted, or idle for the autoscaler), by id,
            as Ray says, or somebody else whom `look` is told of.
        nodes: where there are slots that nobody uses.
    """

    def __init__(
        self, slots: list[Slot], missing: int, name: str, avoided: Collection[str]
    ) -> None:
        self.draining: set[str] = set()
        self.nodes: set[str] = set()
        self._refused = RefusedNodes("run", avoided)
        self._missing = missing
        self._name = name
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._resting = slots  # nobody's, and not to be used as far as is known
        self._own: list[PlacementGroup] = []  # all but the founders'
        self._left: list[Slot] = []  # others are requested in their place
        self._noticed: set[str] | None = set()  # None: what was requested is of another controller
        self._failures: dict[tuple[Any, int], int] = {}  # in a row, by group and bundle
        # Where nobody is started any more: the node, and whether no other room was asked for though
        # some is missing.
        self._broken: dict[Slot, tuple[str, bool]] = {}
        self._looked = 0.0

    def give_back(self, slot: Slot, failure: str = "") -> None:
        """The slot's process is gone.

        If several in a row could do nothing with its GPU, nobody is started there any more. The
        room stays reserved, or Ray would give that GPU to the next; and other room is asked for. If
        Ray moves it to another node, as that one is gone, it is of use again.

        Args:
            slot: where it was.
            failure: what the GPU said, if the process came to nothing for that; else empty.
        """
        place = slot.group.id, slot.bundle
        with self._lock:
            self._looked = 0.0
            before = self._failures.pop(place, 0)
            failures = before + 1 if failure else 0
            if failures >= _FAILURES:
                self._give_up_broken(slot, failures, failure)
                return
            if failure:
                self._failures[place] = failures
            self._resting.append(slot)  # Ray moves the bundle when the node is gone

    def _give_up_broken(self, slot: Slot, failures: int, failure: str) -> None:
        known, node = self._broken_room(), _nodes(slot.group).get(slot.bundle, "")
        self._broken[slot] = node, False
        lacks = self._broken_room() > known
        asks = lacks and len(self._broken) <= _BROKEN
        self._broken[slot] = node, lacks and not asks
        self._missing += asks
        logger.error(
            "%d workers in a row could do nothing with a GPU of node %s, the last one of: %s. None "
            "is started there any more%s. Look at it with nvidia-smi.",
            *(failures, node or "?", failure),
            "; other room is asked for" if asks else "",
        )

    def _moved(self, where: Mapping[Slot, str]) -> list[Slot]:
        """Slots that were given up and are on another node now. Others may stand in for them."""
        moved = [s for s, (node, _) in self._broken.items() if where.get(s, "") not in ("", node)]
        for slot in moved:
            self._missing += self._broken.pop(slot)[1]
        return moved

    def _broken_room(self) -> int:
        """For how many workers the room is lost."""
        return len(self._broken)

    def welcome(self) -> None:
        """A worker has the driver's elastix code: not all nodes that come have another one."""
        self._refused.in_row = 0

    def avoid(self, node: str) -> bool:
        """Start nobody on that node any more; False if this was known. Who is there may stay."""
        with self._lock:
            new = self._refused.add(node)
            self._looked = 0.0
            self._resting += self._free  # some may be there
            self._free = []
            return new

    def look(self, noticed: Collection[str] = ()) -> None:
        """See what has changed on the cluster, and ask it for what is missing.

        Asks Ray, which takes some milliseconds, twice a second however often it is called.

        Args:
            noticed: nodes that are to be taken away, beside those that Ray knows of.
        """
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        draining = draining_nodes() | set(noticed)
        self._look(draining, {*noticed, *self._refused.nodes}, draining | self._refused.nodes)

    def _look(self, draining: set[str], noticed: set[str], avoided: set[str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of all room but the founders'. Ends what runs there."""
        with self._lock:
            own, self._own, self._resting, self._free = self._own, [], [], []
        for group in own:
            remove_placement_group(group)


class Slots(_Room):
    """All room that a run may use.

    Args:
        founding: the founders' placement group.
        size: its bundles.
        most: slots that the run would use if there were room.
        wanted: what a worker occupies.
        name, avoided: see _Room.
    """

    def __init__(
        self,
        founding: PlacementGroup,
        size: int,
        most: int,
        wanted: Mapping[str, float],
        name: str,
        avoided: Collection[str] = (),
    ) -> None:
        slots = [Slot(founding, bundle, founding=True) for bundle in reversed(range(size))]
        super().__init__([], most - size, name, avoided)
        self._free = slots  # they are there
        self._wanted = dict(wanted)
        self._requested: list[PlacementGroup] = []

    def take_over(self, used: Sequence[Slot], unused: int = 0) -> None:
        """Another controller had these slots, and its workers live in them.

        Args:
            used: these.
            unused: how many others stay empty, because who was there is not replaced.
        """
        founding = {slot.bundle for slot in used if slot.founding}
        groups = [slot.group for slot in used if not slot.founding]
        with self._lock:
            self._noticed = None
            idle = [slot for slot in self._free if slot.bundle not in founding]
            self._resting += idle[unused:]
            self._free = []
            self._missing -= max(0, unused - len(idle))
            taken = {group.id for group in groups}
            for group in groups_named(f"{self._name}{SLOT}"):
                self._own.append(group)
                self._missing -= 1
                if group.id not in taken:
                    self._requested.append(group)

    @property
    def more(self) -> bool:
        """Whether workers could still be started, now or once the cluster has room."""
        with self._lock:
            asks = self._missing > 0 and not self._refused.too_many
            return bool(self._free or self._resting or self._requested or asks)

    @property
    def free(self) -> int:
        """How many workers can be started now."""
        with self._lock:
            return len(self._free)

    def take(self) -> Slot | None:
        """A slot that a worker can be started in now; None if there is none."""
        with self._lock:
            return self._free.pop() if self._free else None

    def drop(self, slot: Slot) -> None:
        """The slot's worker is gone, and no other is to take its place."""
        if not slot.founding:
            with self._lock:
                self._remove(slot.group)

    def _look(self, draining: set[str], noticed: set[str], avoided: set[str]) -> None:
        created = [g for g in self._requested if placement_group_table(g)["state"] == "CREATED"]
        with self._lock:
            self._resting += [Slot(group, 0) for group in created]
            self._requested = [group for group in self._requested if group not in created]
            idle, broken = [*self._free, *self._resting, *self._left], [*self._broken]
        groups = {slot.group.id: _nodes(slot.group) for slot in (*idle, *broken)}
        where = {slot: groups[slot.group.id].get(slot.bundle, "") for slot in (*idle, *broken)}
        there = {where[slot] for slot in idle}
        usable = _usable(there, avoided)
        with self._lock:
            self.draining, self.nodes = draining, there - {""}
            if self._noticed != noticed:  # what was requested may not be where it should
                self._noticed = noticed
                for group in self._requested:
                    self._remove(group)
                self._missing += len(self._requested)
                self._requested = []
            idle = [*self._free, *self._resting]
            self._free = [slot for slot in idle if where.get(slot) in usable]
            self._resting = [slot for slot in idle if where.get(slot) not in usable]
            for slot in self._moved(where):
                if slot.founding:
                    self._left.append(slot)
                else:
                    self._remove(slot.group)
            self._leave(where, usable, avoided)
            asked = _to_ask(self._missing, len(self._requested), self._refused)
            self._missing -= asked
        requested = [_request([self._wanted], "PACK", self._name, avoided) for _ in range(asked)]
        with self._lock:
            self._requested += requested
            self._own += requested

    def _leave(self, where: Mapping[Slot, str], usable: set[str], avoided: set[str]) -> None:
        """Look for others in place of slots on nodes that are to be avoided."""
        for slot in [slot for slot in self._resting if where.get(slot) in avoided]:
            self._resting.remove(slot)
            self._missing += 1
            if slot.founding:
                self._left.append(slot)
            else:
                self._remove(slot.group)
        for slot in [slot for slot in self._left if where.get(slot) in usable]:
            if self._missing < 1 and self._requested:
                self._remove(self._requested.pop())
                self._missing += 1
            if self._missing < 1:
                break  # there is another in its place
            self._left.remove(slot)
            self._free.append(slot)
            self._missing -= 1

    def close(self) -> None:
        """See _Room."""
        super().close()
        self._requested = []

    def _remove(self, group: PlacementGroup) -> None:
        self._own = [own for own in self._own if own.id != group.id]
        remove_placement_group(group)


class CrewSlots(_Room):
    """All room that a run may use whose workers are crews, by process.

    A bundle is used again when its process has ended, beside mates that live on. So it is looked at
    before that: Ray moves the bundles of a node that is lost when there is room elsewhere.

    Args:
        founding: the founders' placement groups, one for each.
        bundle: what a process occupies.
        size: processes of a worker.
        most: workers that the run would have if there were room.
        strategy: of each group.
        name, avoided: see _Room.
    """

    def __init__(
        self,
        founding: Sequence[PlacementGroup],
        bundle: Mapping[str, float],
        size: int,
        most: int,
        strategy: str,
        name: str,
        avoided: Collection[str] = (),
    ) -> None:
        slots = [Slot(g, b, founding=True) for g in founding for b in range(size)]
        super().__init__(slots, most - len(founding), name, avoided)
        self._bundles = [dict(bundle)] * size
        self._strategy = strategy

    def take_over(self, used: Sequence[Slot], unused: int = 0) -> None:
        """As Slots.take_over; of processes."""
        taken = {(slot.group.id, slot.bundle) for slot in used}
        own = groups_named(f"{self._name}{SLOT}")
        with self._lock:
            self._noticed = None
            self._own += own
            self._missing -= len(own)
            self._resting += [Slot(group, n) for group in own for n in range(len(self._bundles))]
            unseen = {(slot.group.id, slot.bundle): slot for slot in self._resting}
            idle = [slot for where, slot in unseen.items() if where not in taken]
            there = {group for group, _ in taken}  # beside those who are left, others were lost
            idle.sort(key=lambda slot: slot.group.id not in there)
            self._resting = idle[unused:]

    def _broken_room(self) -> int:
        return len({slot.group.id for slot in self._broken})

    def free(self) -> list[Slot]:
        """Where processes can be started now."""
        with self._lock:
            return list(self._free)

    @property
    def coming(self) -> int:
        """How many further ones there would be if the cluster had room."""
        with self._lock:
            asks = 0 if self._refused.too_many else max(0, self._missing)
            return len(self._resting) + asks * len(self._bundles)

    def take(self, slot: Slot) -> None:
        """A process is started there."""
        with self._lock:
            self._free.remove(slot)

    def _look(self, draining: set[str], noticed: set[str], avoided: set[str]) -> None:
        with self._lock:
            idle, broken = [*self._free, *self._resting, *self._left], [*self._broken]
        where = {slot.group.id: _nodes(slot.group) for slot in (*idle, *broken)}
        there = {node for slot in idle for node in where[slot.group.id].values()} - {""}
        usable = _usable(there, avoided)
        with self._lock:
            self.draining, self.nodes = draining, there
            idle = [
                replace(slot, node=where.get(slot.group.id, {}).get(slot.bundle, ""))
                for slot in (*self._free, *self._resting)
            ]
            self._free = [slot for slot in idle if slot.node in usable]
            self._resting = [slot for slot in idle if slot.node not in usable]
            self._left += self._moved(
                {slot: where[slot.group.id].get(slot.bundle, "") for slot in broken}
            )
            self._leave(where, usable, avoided, again=self._noticed != noticed)
            self._noticed = noticed
            waiting = len({slot.group.id for slot in self._resting})
            asked = _to_ask(self._missing, waiting, self._refused)
            self._missing -= asked
        requested = [
            _request(self._bundles, self._strategy, self._name, avoided) for _ in range(asked)
        ]
        with self._lock:
            self._own += requested
            for group in requested:
                self._resting += [Slot(group, bundle) for bundle in range(len(self._bundles))]

    def _leave(
        self,
        where: Mapping[Any, Mapping[int, str]],
        usable: set[str],
        avoided: set[str],
        again: bool,
    ) -> None:
        """Look for others in place of groups on nodes that are to be avoided.

        Of groups, whole: where processes of one still live, its room is waited for.

        Args:
            where: by group the nodes of its bundles.
            usable: nodes that processes can be started on.
            avoided: nodes that are to be taken away, or have other elastix code.
            again: what is not there yet is requested anew as well.
        """
        groups: dict[PlacementGroup, list[Slot]] = {}
        for slot in (*self._free, *self._resting):
            groups.setdefault(slot.group, []).append(slot)
        whole = {
            group: slots for group, slots in groups.items() if len(slots) == len(self._bundles)
        }
        pending = []
        for group, slots in whole.items():
            nodes = {slot.node for slot in slots} - {""}
            if nodes & avoided or (again and not nodes and not slots[0].founding):
                self._give_up(group, slots)
            elif not nodes and not slots[0].founding:
                pending.append((group, slots))
        for group in {slot.group for slot in self._left}:
            if not _all_usable(where.get(group.id, {}), usable):
                continue
            if self._missing < 1 and pending:
                self._give_up(*pending.pop())
            if self._missing < 1:
                break  # there is another in its place
            self._resting += [slot for slot in self._left if slot.group == group]
            self._left = [slot for slot in self._left if slot.group != group]
            self._missing -= 1

    def _give_up(self, group: PlacementGroup, slots: Sequence[Slot]) -> None:
        """Another one is to be requested in place of this group, which nobody uses."""
        self._free = [slot for slot in self._free if slot not in slots]
        self._resting = [slot for slot in self._resting if slot not in slots]
        self._missing += 1
        if slots[0].founding:
            self._left += slots
        else:
            self._own = [own for own in self._own if own.id != group.id]
            remove_placement_group(group)


def elsewhere(avoided: Collection[str]) -> dict[str, str]:
    """A label selector of all nodes but these."""
    return {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"}


def bundles_elsewhere(avoided: Collection[str], bundles: int) -> dict[str, Any]:
    """What a placement group of so many bundles is asked for with, so that it is not there."""
    return {"bundle_label_selector": [elsewhere(avoided)] * bundles} if avoided else {}


class RefusedNodes:
    """Nodes with other elastix code.

    Args:
        what: asks for room, a run or a campaign.
        known: nodes that are known to have it.

    Attributes:
        nodes: by id.
        in_row: how many there were since a worker was welcomed.
    """

    def __init__(self, what: str, known: Collection[str] = ()) -> None:
        self.nodes = set(known)
        self.in_row = 0
        self._what = what

    @property
    def too_many(self) -> bool:
        """Whether no further room is to be asked for: whoever brings nodes has no others."""
        return self.in_row >= _REFUSED

    def add(self, node: str) -> bool:
        """Note one; whether that is new."""
        if node in self.nodes:
            return False
        self.nodes.add(node)
        self.in_row += 1
        if self.in_row == _REFUSED:
            logger.error(
                "%d nodes in a row had other elastix code than the driver. The %s asks for no "
                "further room, and goes on with the workers that it has. Install the same elastix "
                "where nodes are made, and start the %s again: it goes on from where it is.",
                *(self.in_row, self._what, self._what),
            )
        return True


def _to_ask(missing: int, waiting: int, refused: RefusedNodes) -> int:
    """How many to request now, of those that are missing, while others are waited for.

    `missing` is below 0 where others stand for founders' room that is usable as far as is known:
    who takes over hears of notices later.
    """
    return 0 if refused.too_many else max(0, min(missing, _WAITING - waiting))


def _all_usable(bundles: Mapping[int, str], usable: set[str]) -> bool:
    return bool(bundles) and usable.issuperset(bundles.values())


def _request(
    bundles: Sequence[Mapping[str, float]], strategy: str, name: str, avoided: Collection[str]
) -> PlacementGroup:
    """A further group of a run, detached, on none of the nodes that are to be avoided."""
    group: PlacementGroup = placement_group(
        [dict(bundle) for bundle in bundles],
        strategy=strategy,
        name=f"{name}{SLOT}{secrets.token_hex(4)}",
        lifetime="detached",
        **bundles_elsewhere(avoided, len(bundles)),
    )
    return group


def _usable(wanted: Collection[str], draining: Collection[str]) -> set[str]:
    """Of these nodes those that a worker can be started on. Takes a third of a second at most."""
    nodes = {
        node["NodeID"]: (node["NodeManagerAddress"], int(node["NodeManagerPort"]))
        for node in (ray.nodes() if wanted else ())
        if node["Alive"] and node["NodeID"] in wanted and node["NodeID"] not in draining
    }
    there = answering(nodes.values(), _ANSWER_S)
    return {node for node, address in nodes.items() if address in there}


def _nodes(group: PlacementGroup) -> dict[int, str]:
    """By bundle, the node on which it is."""
    table = placement_group_table(group)
    if table["state"] not in ("CREATED", "RESCHEDULING"):
        return {}
    return dict(table["bundles_to_node_id"])
