"""From the cost of a step to that of a run: FLOPs, time, devices, and whether it fits. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastix.cost.devices import Device
from elastix.cost.trace import Cost
from elastix.errors import ConfigError

PFLOP_DAY = 1e15 * 86400
"""FLOPs of a machine that does 1e15 a second for a day."""

_USABLE = 0.9  # of a device's memory: the rest goes to its runtime and to what falls between blocks


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of some steps on some equal devices. Communication is not in the time.

    Attributes:
        steps: of the whole run.
        total_flops: of all workers.
        step_s, total_s: of the group.
        utilization: share of the device's peak that this means.
        workers: as many as it takes to be through in time, if a time was given.
        devices: one for each worker, or for each place of a worker that is a crew.
        memory_bytes: what one worker holds, by ZeRO stage. elastix's own groups are stage 0, which
            is the only one for crews: what a place holds.
        fits: the same stages, against what a device has.
    """

    device: str
    dtype: str
    workers: int
    devices: int
    steps: int
    total_flops: float
    step_s: float
    total_s: float
    utilization: float
    memory_bytes: Mapping[int, float]
    fits: Mapping[int, bool]

    @property
    def pflop_days(self) -> float:
        """All FLOPs in PFLOP-days."""
        return self.total_flops / PFLOP_DAY

    @property
    def device_hours(self) -> float:
        """Hours of all devices together."""
        return self.total_s * self.devices / 3600


def plan(
    cost: Cost,
    device: Device,
    *,
    steps: int,
    dtype: str = "float32",
    workers: int = 1,
    utilization: float | None = None,
    within_s: float | None = None,
    places: int = 1,
    bubble: float = 0.0,
    worker_flops: float | None = None,
) -> Plan:
    """Put a step's cost on devices.

    Args:
        cost: of one worker's step, at one of its places.
        device: each place has one.
        steps: of the run, with `workers` workers that each do `cost` in a step.
        dtype: in which most of the arithmetic happens.
        workers: in the group.
        utilization: share of the peak that is reached, from 0 to 1; None takes the roofline of
            each operator, which nothing can beat and good kernels come near.
        within_s: be through in so many seconds: adds workers, each of which brings its batch, so
            that fewer steps go through the same samples.
        places: of a worker; more than one if it is a crew.
        bubble: the share of a step in which a place waits for others.
        worker_flops: of a worker's step, if its places do not all do `cost`.

    Raises:
        ConfigError: a number out of range, or a dtype that the device does not have.
    """
    if utilization is not None and not 0 < utilization <= 1:
        raise ConfigError(
            f"utilization is a share above 0 and up to 1, not {utilization}. Nothing was estimated."
        )
    if steps < 1 or workers < 1 or (within_s is not None and within_s <= 0):
        raise ConfigError(
            f"steps={steps}, workers={workers}, within_s={within_s}: all must be > 0."
        )
    peak = device.peak(dtype)
    step_s = (
        cost.roofline_s(peak, device.bytes_per_s)
        if utilization is None
        else cost.step_flops / (peak * utilization)
    ) / (1 - bubble)
    worker_steps = steps * workers
    if within_s is not None:
        workers = max(workers, math.ceil(worker_steps * step_s / within_s))
        steps = math.ceil(worker_steps / workers)
    stages = range(4) if places == 1 else range(1)
    memory = {stage: zero_bytes(cost, stage, workers) for stage in stages}
    return Plan(
        device=device.name,
        dtype=dtype,
        workers=workers,
        devices=workers * places,
        steps=steps,
        total_flops=(worker_flops or float(cost.step_flops) * places) * worker_steps,
        step_s=step_s,
        total_s=step_s * steps,
        utilization=cost.step_flops / (step_s * peak) if step_s else 0.0,
        memory_bytes=memory,
        fits={s: held <= _USABLE * device.memory_bytes for s, held in memory.items()},
    )


def zero_bytes(cost: Cost, stage: int, workers: int) -> float:
    """What one of `workers` holds if the optimizer (1), gradients (2), parameters (3) are shared.

    Stage 0 is elastix: replicas, and buckets beside the gradients. The others reduce gradients
    in place.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020, section 5.
    """
    model, gradients, optimizer = cost.model_bytes, cost.gradients_bytes, cost.optimizer_bytes
    rest = cost.activations_bytes + cost.batch_bytes
    if stage == 0:
        return float(model + gradients + cost.buckets_bytes + optimizer + rest)
    return (
        model / (workers if stage >= 3 else 1)
        + gradients / (workers if stage >= 2 else 1)
        + optimizer / workers
        + rest
    )
