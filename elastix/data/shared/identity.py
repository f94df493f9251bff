"""What a dataset is known by: what it holds, and the code that makes its samples.

A pickle names functions and classes, and says nothing of what they do: one name may stand for other
code in another script, or before and after an edit. So what is not of an installed library goes in
as its code, with the functions, classes and plain values that the code refers to. Then it does not
matter either whether a pickle could name it: a lambda, or a class of a script that Ray sent here.

Not seen: files that a dataset reads later, what a function imports when it runs, and what global
objects of other kinds hold.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper, cached_property, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from elastix.data.shared.packing import Pickler

_INSTALLED = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def digest_into(digest: Any, value: Any) -> None:  # noqa: ANN401 - blake3 has no types
    """Add to a digest what tells a value from another, the same in each process.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: something in it cannot be pickled.
    """
    _ByCode(_Digesting(digest), protocol=5).dump(value)


class _Digesting:
    """A file that keeps nothing but a digest."""

    def __init__(self, digest: Any) -> None:  # noqa: ANN401 - blake3 has no types
        self._digest = digest

    def write(self, raw: bytes | memoryview) -> int:
        self._digest.update(raw)
        return len(raw)


class _ByCode(Pickler):
    """Nothing reads what it writes, so code may stand as a list of what makes it up."""

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - as pickle has it
        if isinstance(value, ModuleType):
            return list, (), None, iter([f"module {value.__name__}"])
        if isinstance(value, FunctionType) and not _is_installed(value):
            return list, (), None, _of_function(value)  # it may refer to itself
        if isinstance(value, type) and not _is_installed(value):
            return list, (), None, _of_class(value)
        return super().reducer_override(value)


def _is_installed(value: FunctionType | type) -> bool:
    """Whether it is found by its name in a library: that is taken to be the same everywhere."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or not _is_library(module):
        return False
    found: Any = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _is_library(module: ModuleType) -> bool:
    folders = iter(getattr(module, "__path__", ()))  # of a package without __init__.py
    file = getattr(module, "__file__", None) or next(folders, None)
    return file.startswith(_INSTALLED) if file else module.__name__ != "__main__"


def _of_function(function: FunctionType) -> Iterator[Any]:
    """Its code, and what it refers to."""
    yield f"{function.__qualname__} {_text(function.__code__)}"
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it has none yet
            yield None
    names = sorted(_names(function.__code__))
    yield from _looked_up(names, function.__globals__, "", set())


def _looked_up(
    names: Sequence[str], where: Mapping[str, Any], path: str, seen: set[ModuleType]
) -> Iterator[Any]:
    """What these names mean there, and in the modules that some of them mean."""
    for name in names:
        value = where.get(name)
        if isinstance(value, ModuleType) and not _is_library(value):
            if value not in seen:  # modules may refer to each other
                seen.add(value)
                yield from _looked_up(names, vars(value), f"{path}{name}.", seen)
        else:
            yield from _referred(f"{path}{name}", value)


def _of_class(a_class: type) -> Iterator[Any]:
    """What it is derived from, its methods, and its plain values."""
    yield f"class {a_class.__qualname__}"
    yield from a_class.__bases__
    for name, value in sorted(vars(a_class).items()):
        if isinstance(value, property):
            yield from (value.fget, value.fset)
        elif isinstance(value, staticmethod | classmethod):
            yield from _referred(name, value.__func__)
        elif isinstance(value, cached_property):
            yield from _referred(name, value.func)
        elif isinstance(value, FunctionType | type) or not name.startswith("__"):
            yield from _referred(name, value)  # others with such names come and go


def _referred(name: str, value: Any) -> Iterator[Any]:  # noqa: ANN401
    if isinstance(value, FunctionType | type):
        yield value
    elif (text := _plain(value)) is not None:
        yield f"{name}={text}"
    elif isinstance(value, _lru_cache_wrapper):
        yield from _referred(name, value.__wrapped__)
    elif isinstance(value, partial):
        yield from _referred(name, [value.func, value.args, value.keywords])
    elif type(value) in (list, tuple, dict):
        for part in value.values() if type(value) is dict else value:
            yield from _referred(name, part)


def _plain(value: Any) -> str | None:  # noqa: ANN401
    """What a constant holds; None for what is none."""
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) is dict:
        value = [part for pair in value.items() for part in pair]
    elif type(value) in (set, frozenset):
        value = sorted(value, key=repr)
    elif type(value) not in (list, tuple):
        return None
    texts = [_plain(part) for part in value]
    return None if None in texts else f"({','.join(map(str, texts))})"


def _text(code: CodeType) -> str:
    """What it does, wherever it stands."""
    constants = [
        _text(each) if isinstance(each, CodeType) else f"{type(each).__name__} {_plain(each)}"
        for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {constants}"


def _names(code: CodeType) -> set[str]:
    """What it may look up by name, with the functions that are made in it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)
