"""Modules without what torch.compile wraps them in, which puts a prefix before all names.

A State has the names of the plain module, so that a run which compiles, one which does not, and
whoever loads the model mean the same tensors.

Invariant: what is compiled stays so, and computes the same.
"""

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

_WRAPPER = "OptimizedModule"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def plain(module: "torch.nn.Module") -> "torch.nn.Module":
    """The module itself; its parts that were compiled alone are compiled in place from now on.

    A part whose wrapper has hooks keeps it, and its prefix: without it they would not be called.
    """
    if type(module).__name__ == _WRAPPER:
        module = cast("torch.nn.Module", module._orig_mod)
    for part in list(module.modules()):
        for name, child in list(part._modules.items()):
            if child is None or type(child).__name__ != _WRAPPER:
                continue
            if not any(getattr(child, hooks) for hooks in _HOOKS):
                part._modules[name] = _compiled_in_place(child)
    return module


def _compiled_in_place(wrapper: Any) -> Any:  # noqa: ANN401 - torch has no type for it
    """As if its module had been compiled by `module.compile()`, in the way the wrapper was."""
    module = wrapper._orig_mod

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a frame: torch skips its own
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = wrapper.dynamo_ctx(call)
    return module
