"""Unequal parts of a worker's samples: FSDP2's reduce-scatter with weights instead of a plain mean.

FSDP2 divides by the number of places. That is the mean over samples only if all have as many. So
each place multiplies by its part of the worker's samples, and the sum is taken.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastix.errors import ConfigError
from elastix.sharding import fsdp_groups, fsdp_layers

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class WeightedReduceScatter:
    """What FSDP2 calls for its gradients; see FSDPModule.set_custom_reduce_scatter.

    Args:
        part: this place's part of the samples, from 0 to 1, as of now.
        groups: of FSDP2, whose gradients these are.
    """

    def __init__(self, part: Callable[[], float], groups: Sequence[Any]) -> None:
        self._part = part
        self._groups = groups

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Memory for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,  # noqa: ANN401 - a ProcessGroup
        op: Any,  # noqa: ANN401 - a ReduceOp
        async_op: bool = False,
    ) -> Any:  # noqa: ANN401 - a Work
        """The weighted sum, scattered.

        Raises:
            ConfigError: FSDP2 was told since to divide it.
        """
        del op
        for one in self._groups:
            if one.gradient_divide_factor != 1.0:
                raise _divides(one.gradient_divide_factor)
        part = self._part()
        if part == 0:  # not 0 * gradient: NaN for one that overflowed
            input_tensor.zero_()
        else:
            input_tensor.mul_(part)
        return _reduce_scatter(
            output_tensor, input_tensor, op=dist.ReduceOp.SUM, group=group, async_op=async_op
        )


def waiting(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether FSDP2 has gradients that it was told not to reduce yet: they get the next weight."""
    return any(
        one.unsharded_accumulated_grad is not None
        or getattr(getattr(one, "_unsharded_param", None), "grad", None) is not None
        for group in fsdp_groups(modules)
        for one in group.fsdp_params
    )


def weigh(modules: Sequence[torch.nn.Module], part: Callable[[], float]) -> None:
    """From now on FSDP2 weighs the gradients of these modules by `part`.

    Raises:
        ConfigError: it was told to divide them by something.
    """
    groups = list(fsdp_groups(modules))
    for one in groups:
        if one.gradient_divide_factor is not None:
            raise _divides(one.gradient_divide_factor)
    reduce_scatter = WeightedReduceScatter(part, groups)
    for layer in fsdp_layers(modules):
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
        layer.set_custom_reduce_scatter(reduce_scatter)


def _divides(factor: float | None) -> ConfigError:
    return ConfigError(
        f"FSDP2 was told to divide gradients by {factor} (set_gradient_divide_factor). elastix "
        "has it add up means that are weighed by the samples of each place, so the gradient would "
        "not be the mean over the samples. The step was not taken. Leave that call out, and "
        "multiply the loss instead."
    )
