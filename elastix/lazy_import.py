"""Modules that take seconds to import, imported when something in them is first used.

    if TYPE_CHECKING:
        import torch
    else:
        torch = later("torch")

For files that `elastix --help`, a listing or a completion goes through and that need torch for a
part of what they do. They have `from __future__ import annotations`, or an annotation would be a
use. Whoever cannot do without the module anyway imports it as ever.
"""

from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """Has nothing until it is asked for something; then all that the module has."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        module = import_module(self.__name__)
        # From now on as fast as any module, and what is added to that one later is found there.
        vars(self).update(vars(module), __getattr__=partial(getattr, module))
        self.__class__ = ModuleType  # type: ignore[assignment]
        return getattr(module, name)


def later(name: str) -> ModuleType:
    """What stands in for the module of that name."""
    return _Later(name)
