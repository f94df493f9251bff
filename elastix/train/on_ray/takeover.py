"""How a run outlives its controller: names under which Ray keeps it, and taking stock of workers.

Workers are detached actors with names, so that they live on when the controller's process dies.
Ray starts the controller anew; it finds them by name, asks each what it holds, and makes a new
generation of those that have the State. Nobody is left behind: a worker whose controller is gone
for good ends itself, and a run that begins ends what it finds of an earlier one.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from blake3 import blake3
from ray.util.placement_group import PlacementGroup, remove_placement_group

from elastix.comm.network.door import Address
from elastix.errors import Conflict
from elastix.events import Span
from elastix.train.on_ray.placement import Slot, groups_named

logger = logging.getLogger(__name__)
NAMESPACE = "elastix"
CONTROLLER = "/controller"  # the end of every controller's name
LET_GO_S = 120.0  # for the journal of a controller that is gone; over NFS its host has a lease
_GONE_S = 15.0  # Ray needs a moment to end what belonged to a driver that was killed
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Presence:
    """What a process says of itself to a new controller.

    Attributes:
        process: its number; that of its worker, if workers are single processes.
        worker: of which it is, or was last; negative for none.
        place: in that.
        broken: a process of that worker is lost.
        generation: the newest it has heard of.
        catch_up: where joiners can watch it; None if they cannot.
        ready: it is up to `prepare`, or was.
        holder: it has the State.
        shadow: it has a State from outside the group.
        operation: number of its next one; negative without a State.
        lifeline: see the module of that name.
        noticed: it had notice to leave.
        left_out: what it goes by; see Settings.
    """

    process: int
    worker: int
    place: int
    broken: bool
    slot: Slot
    pid: int
    node: str
    device: str
    generation: int
    catch_up: Address | None
    ready: bool
    holder: bool
    shadow: bool
    operation: int
    lifeline: str
    noticed: bool
    left_out: Mapping[int, tuple[Span, ...]]


def run_id(store: str, name: str) -> str:
    """Tells runs of the same name in different stores apart."""
    return f"{name}@{blake3(str(Path(store).resolve()).encode()).hexdigest(8)}"


def controller_name(run: str) -> str:
    """Of the controller's actor."""
    return f"{run}{CONTROLLER}"


def worker_name(run: str, process: int) -> str:
    """Of the actor of a worker, or of a process of a crew."""
    return f"{run}/worker-{process}"


def room_name(run: str) -> str:
    """Of a placement group that the trainer reserves; no two have the same.

    Ray removes the groups of a process that has died, but not one that it was about to place when
    the process died with its node: `sweep` finds that one by its name.
    """
    return f"{run}/room-{secrets.token_hex(4)}"


def find_controller(run: str) -> Any | None:  # noqa: ANN401 - a handle
    """The controller of a run that is going on; None if there is none."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(controller_name(run), namespace=NAMESPACE)
    return None


def find_workers(run: str) -> dict[int, Any]:
    """The living processes of a run: number to handle."""
    prefix = worker_name(run, 0)[:-1]
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        if entry["namespace"] == NAMESPACE and name.startswith(prefix):
            with contextlib.suppress(ValueError):  # it died just now
                found[int(name.removeprefix(prefix))] = ray.get_actor(name, namespace=NAMESPACE)
    return found


def take_stock(
    run: str,
    address: tuple[str, int],
    left_out: Mapping[int, tuple[Span, ...]],
    timeout_s: float,
) -> tuple[dict[int, Any], list[Presence]]:
    """Tell every living process where its new controller meets them; who answers is present.

    One that has not begun yet goes by that `left_out`. Who does not answer in time is ended.

    Returns:
        All that were found, by number, and what those said that answered.
    """
    actors = find_workers(run)
    asked = {actor.adopt.remote(address, left_out): process for process, actor in actors.items()}
    answered, _ = (
        ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    )
    present = []
    for ref in answered:
        try:
            present.append(ray.get(ref))
        except ray.exceptions.RayError as error:
            logger.warning("process did not answer process=%d error=%s", asked[ref], error)
    for process in set(actors) - {presence.process for presence in present}:
        ray.kill(actors[process], no_restart=True)
    return actors, present


def own_groups(run: str, kind: str = "/") -> list[PlacementGroup]:
    """Placement groups asked for in the name of this run; `kind`: SLOT for slots alone."""
    return groups_named(f"{run}{kind}")


def remove_groups(run: str, kind: str = "/") -> None:
    """Give back the room of a run whose controller is gone. Ends what is there."""
    for group in own_groups(run, kind):
        with contextlib.suppress(ValueError):
            remove_placement_group(group)


def sweep(run: str) -> None:
    """End what is left of an earlier run of this name whose controller is gone.

    Raises:
        Conflict: its controller lives: another process is at this run.
    """
    deadline = time.monotonic() + _GONE_S
    while find_controller(run) is not None:
        if time.monotonic() > deadline:
            raise Conflict(
                f"another process is training run {run.split('@')[0]!r} of this store. Nothing was "
                "started. Wait for it, end it, or choose another name."
            )
        time.sleep(_LOOK_S)
    for actor in find_workers(run).values():
        ray.kill(actor, no_restart=True)
    remove_groups(run)
