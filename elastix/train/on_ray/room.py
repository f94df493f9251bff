"""Room for a run's founders: how many workers the cluster could hold, and reserving it.

Not here: slots of workers that come later, and of nodes that go (placement).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from elastix.config import ScalingConfig
from elastix.errors import ConfigError, QuorumLost
from elastix.train.on_ray import takeover
from elastix.train.on_ray.crew_controller import crew_strategy
from elastix.train.on_ray.placement import bundles_elsewhere

_PATIENCE_S = 5.0
_SHARES = (4.0, 2.0, 1.0, 0.5, 0.25, 0.1)  # of a node's CPUs or GPUs, that people ask for


def check_capacity(scaling: ScalingConfig, avoided: Collection[str] = ()) -> int:
    """How many workers the cluster could hold if nothing else ran there; see fit_on_nodes.

    Raises:
        ConfigError: fewer than the minimum.
    """
    room = fit_on_nodes(scaling, avoided)
    if room >= scaling.min_workers:
        return room
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    has = "; ".join(_listed({kind: node.get(kind, 0) for kind in ("CPU", "GPU")}) for node in nodes)
    found = [f"fewer workers (num_workers={room})"] if room else []
    found += [f"less of a node for each ({less})"] if (less := _smaller(scaling)) else []
    advice = f"{', or for '.join(found) or 'what one of these nodes has'}."
    if scaling.gpus_per_worker and not any(node.get("GPU") for node in nodes):
        advice = "gpus_per_worker=0, or see with `elastix doctor` why Ray finds no GPU."
    raise ConfigError(
        f"num_workers={scaling.num_workers} with {_listed(scaling.resources_per_worker)} each can "
        f"never be placed: the cluster has room for {room} (its nodes have {has}). Nothing was "
        f"started. Ask for {advice}"
    )


def _smaller(scaling: ScalingConfig) -> str:
    """What each worker may occupy so that the minimum fits; "" if that alone does not help."""
    for name in ("cpus_per_worker", "gpus_per_worker"):
        for share in _SHARES:
            asked: dict[str, Any] = {name: share}
            less = share < getattr(scaling, name)
            if less and fit_on_nodes(replace(scaling, **asked)) >= scaling.min_workers:
                return f"{name}={share:g}"
    return ""


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def fit_on_nodes(scaling: ScalingConfig, avoided: Collection[str] = ()) -> int:
    """How many workers the cluster could hold if nothing else ran there.

    Args:
        scaling: of the workers.
        avoided: nodes on which none is started, by id.
    """
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"] and n["NodeID"] not in avoided]
    fit = [_fit(node, scaling.resources_per_process) for node in nodes]
    size = scaling.processes
    if crew_strategy(scaling.crew) == "STRICT_PACK":
        return sum(n // size for n in fit)
    return sum(fit) // size


def _fit(resources: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    return int(min((resources.get(kind, 0.0) + 1e-9) / need for kind, need in wanted.items()))


def reserve(
    run: str,
    scaling: ScalingConfig,
    room: int,
    timeout_s: float,
    lifetime: Literal["detached"] | None,
    avoided: Collection[str] = (),
) -> tuple[tuple[PlacementGroup, ...], int]:
    """Room for as many workers as fit now, at least the minimum: of crews a group for each."""
    wanted = scaling.resources_per_worker
    least = scaling.min_workers
    most = max(least, min(scaling.max_workers, room - scaling.spares - scaling.shadows))
    # Resources of a run that has just ended are free a moment later, so the most is tried first.
    free = min(most, max(least, _fit(ray.available_resources(), wanted)))
    for size in sorted({least, free, most}, reverse=True):
        patience_s = timeout_s if size == least else min(_PATIENCE_S, timeout_s)
        groups: list[PlacementGroup] = []
        with ExitStack() as unless_placed:  # nor may Ctrl-C leave any, in a connection that stays
            unless_placed.callback(give_back, groups)
            for bundles, strategy in (
                [(scaling.processes, crew_strategy(scaling.crew))] * size
                if scaling.crew
                else [(size, scaling.placement)]
            ):
                groups.append(
                    placement_group(
                        [dict(scaling.resources_per_process)] * bundles,
                        strategy=strategy,
                        name=takeover.room_name(run),
                        lifetime=lifetime,
                        **bundles_elsewhere(avoided, bundles),
                    )
                )
            until = time.monotonic() + patience_s
            if all(group.wait(max(0.0, until - time.monotonic())) for group in groups):
                unless_placed.pop_all()
                return tuple(groups), size
    raise QuorumLost(
        f"the cluster had no room for {least} workers with {wanted} each within "
        f"start_timeout_s={timeout_s:g}; free are {ray.available_resources()}. Nothing was "
        f"started. {how_to_make_room()}"
    )


def how_to_make_room() -> str:
    """What to do where nothing is free: a trial cannot wait for its own campaign to end."""
    if ray.get_runtime_context().get_actor_id() is None:
        return "Stop what else runs on the cluster, or wait longer."
    return (
        "This was called within an actor of Ray. If that is a trial, the workers of its campaign "
        "take all the room there is: train in the trial itself, by its ctx, or give a campaign "
        "within it executor=Local(), after from elastix.search.executors.serial import Local."
    )


def give_back(groups: Sequence[PlacementGroup]) -> None:
    """Let go of what was reserved. Ends what is there."""
    for group in groups:
        remove_placement_group(group)
