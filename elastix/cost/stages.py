"""What the stages of a pipeline cost, and a step of them with its bubble.

Each stage is traced by itself, on one micro-batch of what the stage before it gives. The schedule
is 1F1B: a stage holds the activations of as many micro-batches as there are stages from it on.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastix.cost.passes import several
from elastix.cost.trace import Cost, Shapes, made, trace
from elastix.errors import ConfigError
from elastix.mesh_check import check_layers, check_stages, trained_names

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A worker's step at each of its stages.

    Attributes:
        costs: by stage.
        microbatches: in a step.
    """

    costs: Sequence[Cost]
    microbatches: int

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits, if all take equally long.

        Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
        Using Megatron-LM", SC 2021, section 2.2.
        """
        waits = len(self.costs) - 1
        return waits / (self.microbatches + waits)

    def worst(self, flops_per_s: float, bytes_per_s: float) -> Cost:
        """The memory of the largest stage, and the work of the slowest on such a device."""
        largest = max(self.costs, key=lambda cost: cost.peak_bytes)
        slowest = max(self.costs, key=lambda cost: cost.roofline_s(flops_per_s, bytes_per_s))
        return replace(
            largest,
            parameters=sum(cost.parameters for cost in self.costs),
            forward_flops=slowest.forward_flops,
            step_flops=slowest.step_flops,
            operators=slowest.operators,
            sent_bytes=max(cost.sent_bytes for cost in self.costs),
        )


def trace_stages(
    stage: Callable[[int], torch.nn.Module],
    stages: int,
    sample: Callable[[], torch.Tensor],
    microbatches: int,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    **how: Any,  # noqa: ANN401 - see trace
) -> Stages:
    """Count a training step at each stage.

    Args:
        stage: makes the model of one, which is what it prepares; called in a mode without data.
        stages: how many.
        sample: makes a micro-batch as the first is given it.
        microbatches: in a step.
        dtype: see trace.
        autocast: see trace.
        **how: whatever else trace takes.

    Raises:
        ConfigError: see trace; or a stage is no model, has nothing to train, gives something else
            than tensors, or is refused in training: see mesh_check.
    """

    def made_stage(place: int) -> torch.nn.Module:
        """The stage, looked at."""
        found = stage(place)
        of = f"stage {place} of {stages}"
        if not isinstance(found, torch.nn.Module):
            raise ConfigError(
                f"the function that makes stages gave a {type(found).__name__} for {of}, which is "
                "no torch.nn.Module. Nothing was estimated. Let it return the model of that stage."
            )
        check_stages({"": found})
        trained[place] = trained_names({"": found})
        if not trained[place]:
            raise ConfigError(
                f"{of} has nothing to train. Nothing was estimated. Use fewer stages, or give each "
                "at least one layer with parameters."
            )
        check_layers(trained.items())
        return found

    trained: dict[int, list[str]] = {}
    costs: list[Cost] = []
    given: list[Shape] | None = None  # what the stage before has made of it
    for place in range(stages):
        fed = _maker(given)
        cost = trace(
            lambda at=place: made_stage(at),  # type: ignore[misc]
            fed or (lambda: (sample(),)),
            dtype=dtype,
            autocast=autocast,
            **how,
        )
        received = 0 if given is None else sum(map(_bytes, given))
        last = place + 1 == stages
        if not last:
            given = _outputs(lambda at=place: made_stage(at), fed, sample, dtype, autocast)  # type: ignore[misc]
        sent = received + (0 if last else sum(map(_bytes, given or ())))
        costs.append(several(cost, microbatches, min(microbatches, stages - place), sent))
    return Stages(costs=costs, microbatches=microbatches)


def _maker(given: Sequence[Shape] | None) -> Callable[[], tuple[torch.Tensor, ...]] | None:
    if given is None:
        return None

    def made() -> tuple[torch.Tensor, ...]:
        made = (torch.zeros(shape, dtype=dtype) for shape, dtype in given)
        return tuple(one.requires_grad_(one.is_floating_point()) for one in made)

    return made


def _outputs(
    build: Callable[[], torch.nn.Module],
    inputs: Callable[[], tuple[torch.Tensor, ...]] | None,
    sample: Callable[[], torch.Tensor],
    dtype: torch.dtype,
    autocast: torch.dtype | None,
) -> list[Shape]:
    """Of what a stage gives to the next."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    mixed = torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
    try:
        with Shapes(), torch.no_grad(), mixed:
            found = made(build)(*(inputs() if inputs is not None else (sample(),)))
    finally:
        torch.set_default_dtype(before)
    outputs = found if isinstance(found, tuple | list) else [found]
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"a stage gives the next one a {type(output).__name__}, and schedules of "
                "torch.distributed.pipelining pass on tensors alone. Nothing was estimated. Let "
                "stages return a tensor, or a tuple of them."
            )
    return [(tuple(output.shape), output.dtype) for output in outputs]


def _bytes(given: Shape) -> int:
    shape, dtype = given
    return torch.Size(shape).numel() * dtype.itemsize
