"""Contexts of torch that a trial has entered and not left, which would hold for all that follow.

An ExitStack that nobody closes leaves them, and so does `__enter__` that is called by hand.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

_autograd: Any = torch._C._autograd
_dispatch: Any = _python_dispatch
_overrides: Any = overrides
_inference: list[Any] = []


def _leave_inference(was: bool) -> None:
    """By one more context within: the trial's own may end later, when it is collected."""
    mode: Any = torch.inference_mode(was)
    mode.__enter__()
    _inference.append(mode)  # it would end with the last reference to it


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _leave_autocast(depth: int) -> None:
    """Until the outermost is left, torch keeps weights as it has once cast them."""
    for _ in range(_autocast_depth() - depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def _function_modes() -> list[Any]:
    """Without the default device, which is one and is set otherwise; it is always the first."""
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return [m for m in _overrides._get_current_function_mode_stack() if m is not default]


def _leave_function_modes(kept: list[Any]) -> None:
    while (there := _function_modes()) and there[-1] not in kept:
        _overrides._pop_mode()


def _dispatch_modes() -> list[Any]:
    return list(_dispatch._get_current_dispatch_mode_stack())


def _leave_dispatch_modes(kept: list[Any]) -> None:
    for mode in reversed(_dispatch_modes()):
        if mode in kept:
            return
        mode.__exit__(None, None, None)


def _saved_tensors_hooks() -> Any:  # noqa: ANN401 - a pair of functions, or ()
    return _autograd._top_saved_tensors_default_hooks(True) or ()


def _leave_saved_tensors_hooks(kept: Any) -> None:  # noqa: ANN401
    while (there := _saved_tensors_hooks()) and there != kept:
        _autograd._pop_saved_tensors_default_hooks()


CONTEXTS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_function_modes, _leave_function_modes),
    (_dispatch_modes, _leave_dispatch_modes),
    (_saved_tensors_hooks, _leave_saved_tensors_hooks),
    (_autocast_depth, _leave_autocast),
    (torch.is_inference_mode_enabled, _leave_inference),
)
"""How each is read and left. To be left before anything is set that they set as well."""
