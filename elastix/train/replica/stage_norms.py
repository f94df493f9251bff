"""Gradients are clipped by the norm of the whole model, wherever its parts are.

torch.nn.utils.clip_grad_norm_ knows the gradients that it is given, which are those of this
process's stage, and takes parameters of one mesh at a time. Each stage would be scaled by another
factor, so it is refused in pipelines. clip_grads_with_norm_ is told the norm, so there all stages
must have been told the same.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.nn.utils import clip_grad

from elastix.errors import ConfigError
from elastix.sharding import is_sharded, local


def clip(
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    places: int,
    add_up: Callable[[torch.Tensor], None],
) -> torch.Tensor:
    """Scale the gradients at this place. Collective in the worker.

    Args:
        parameters: of this place's stage.
        max_norm: that all gradients of the model have together after it.
        places: of the worker that hold the same layers.
        add_up: in place, over all places of the worker.

    Returns:
        The norm before it, in float64, the same at all places.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    mine = [local(gradient) for gradient in gradients]
    device = mine[0].device if mine else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, part in zip(gradients, mine, strict=True):
        values = part.coalesce().values() if part.is_sparse else part
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)
        squares += norm**2 * (_parts(gradient) / places)  # others hold the same part
    add_up(squares)
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in mine:
        part.mul_(factor.to(part.device, part.dtype))
    return norm


def _parts(gradient: Any) -> int:  # noqa: ANN401 - perhaps a DTensor
    """Over how many places it is split."""
    if not is_sharded(gradient):
        return 1
    parts = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        parts *= 1 if placement.is_replicate() else size
    return parts


_check: Callable[[float, float], None]
"""That all places clip to the same norm, by the same norm."""


def watch(check: Callable[[float, float], None]) -> None:
    """From now on, in this process. What torch's functions call is replaced: scripts import them.

    Args:
        check: is given `max_norm` and the norm where clip_grads_with_norm_ is called.

    Raises:
        ConfigError: where clip_grad_norm_ is called; or what `check` raises.
    """
    global _check
    _check = check
    clip_grad._get_total_norm = _refused
    public: Any = clip_grad._clip_grads_with_norm_
    (cell,) = public.__closure__  # behind torch.no_grad
    own = cell.cell_contents
    if not hasattr(own, "checked"):
        cell.cell_contents = _checked(own)


def _checked(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def clip_grads_with_norm_(
        parameters: Any,  # noqa: ANN401 - as torch has it
        max_norm: float,
        total_norm: Any,  # noqa: ANN401 - perhaps a DTensor
        foreach: bool | None = None,
    ) -> None:
        whole = total_norm.full_tensor() if is_sharded(total_norm) else total_norm
        _check(float(max_norm), float(whole))
        own(parameters, max_norm, total_norm, foreach)

    clip_grads_with_norm_.checked = True  # type: ignore[attr-defined]
    return clip_grads_with_norm_


def _refused(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - whatever it is called with
    raise ConfigError(
        "torch.nn.utils.clip_grad_norm_ was called, and crew has an axis 'pipe': it goes by the "
        "norm of this process's stage, and each stage would be scaled by another factor. Nothing "
        "was clipped; the run ends. Use ctx.clip_grad_norm_(model.parameters(), 1.0) at all "
        "stages: it goes by the norm of the whole model."
    )
