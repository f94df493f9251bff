"""Generators of random numbers that a train function finds outside of itself.

Those of torch, NumPy and Python that all code shares are seeded for each trial. One that is made
beside the function (`RNG = np.random.default_rng(0)`) goes on from trial to trial: what a trial
draws would hang on how many came before it in its process. So it is put back after each. Workers of
a DataLoader have such generators too: those that stay for the next epoch end with the trial.

Found is what the function leads to: its closure and defaults, what it names in its own modules, and
so on through functions, objects and containers; and what is in modules that a trial imports. Not
here: other things that trials may share.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from elastix.search.executors import process_settings

_MOST = 10_000  # things that are looked at
_MANY = 1000  # parts of one
_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.ndarray, torch.Tensor)
_KINDS = (
    torch.Generator,
    np.random.Generator,
    np.random.BitGenerator,
    np.random.RandomState,
    random.Random,
    DataLoader,
)
_OF_LIBRARIES = ("site-packages", "dist-packages")

_known = WeakIdKeyDictionary()  # by train function
_imported: dict[int, Any] = {}  # by id, what modules have made that trials imported


def look_again(train: Callable[..., Any]) -> None:
    """Find them anew for its next trial: names may stand for others now, as in a notebook."""
    if type(train).__weakrefoffset__:
        _known.pop(train, None)


@contextmanager
def kept(train: Callable[..., Any]) -> Iterator[None]:
    """Leave them as they were; those that are imported meanwhile, as their modules made them."""
    found = _known.get(train) if type(train).__weakrefoffset__ else None
    if found is None:
        found = list(_generators(train))
        if type(train).__weakrefoffset__:
            _known[train] = found
    every = {id(one): one for one in found} | _imported
    before = {name: (one, _state(one)) for name, one in every.items()}

    def hear(module: ModuleType) -> None:
        if _is_of_library(module.__name__):
            return
        for one in _generators(*vars(module).values()):
            if id(one) not in before:
                _imported[id(one)] = one
                before[id(one)] = one, _state(one)

    try:
        with process_settings.imports_told(hear):
            yield
    finally:
        for generator, state in before.values():
            _put(generator, state)


def _state(generator: Any) -> Any:  # noqa: ANN401 - of any kind
    if isinstance(generator, DataLoader):
        return None
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _put(generator: Any, state: Any) -> None:  # noqa: ANN401 - of any kind
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, DataLoader):
        generator._iterator = None
    else:
        generator.set_state(state)


def _generators(*roots: Any) -> Iterator[Any]:  # noqa: ANN401 - anything
    waiting: deque[Any] = deque(roots)
    seen: dict[int, Any] = {}  # which keeps them, and so their ids
    while waiting and len(seen) < _MOST:
        one = waiting.popleft()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, _KINDS) and not isinstance(one, random.SystemRandom):
            yield one
        if not isinstance(one, _KINDS) or isinstance(one, DataLoader):
            waiting.extend(islice(_parts(one), _MANY))


def _parts(one: Any) -> Iterator[Any]:  # noqa: ANN401 - anything
    """What it leads to."""
    if isinstance(one, FunctionType):
        yield from _parts_of_function(one)
    elif isinstance(one, MethodType):
        yield from (one.__func__, one.__self__)
    elif isinstance(one, staticmethod | classmethod):
        yield one.__func__
    elif isinstance(one, property):
        yield one.fget
    elif isinstance(one, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, dict | MappingProxyType):
        yield from tuple(islice(one.values(), _MANY))  # other threads may change it meanwhile
    elif isinstance(one, list | tuple | set | frozenset | deque):
        yield from tuple(islice(one, _MANY))
    elif isinstance(one, type):
        if not _is_of_library(one.__module__):
            yield from vars(one).values()
    elif not isinstance(one, ModuleType):
        yield from (type(one), *_attributes(one))


def _attributes(one: object) -> Iterator[Any]:
    """Those of its own: all in one, and what is in slots."""
    names = [vars(cls).get("__slots__", ()) for cls in type(one).__mro__]
    slots = [name for each in names for name in ([each] if isinstance(each, str) else each)]
    for name in ("__dict__", *slots):
        try:  # a stand-in for something else is not asked for that
            yield object.__getattribute__(one, name)
        except AttributeError:  # it has none, or nothing is in it
            continue


def _parts_of_function(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if _is_of_library(function.__module__):
        return
    names = set(_names(function.__code__))
    own = [function.__globals__[name] for name in names & function.__globals__.keys()]
    imports = [sys.modules[name] for name in names & sys.modules.keys()]  # within it, for one
    yield from _named([*own, *(one for one in imports if isinstance(one, ModuleType))], names)


def _named(found: Iterable[Any], names: set[str]) -> Iterator[Any]:
    """What was found, and in place of modules what has one of the names there, and so on."""
    waiting, seen = deque(found), set()
    while waiting:
        one = waiting.popleft()
        if not isinstance(one, ModuleType):
            yield one
        elif one.__name__ not in seen and not _is_of_library(one.__name__):
            seen.add(one.__name__)
            waiting.extend(vars(one)[name] for name in names & vars(one).keys())


def _names(code: CodeType) -> Iterator[str]:
    """What it looks up, functions and classes within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_library(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    known = root in sys.stdlib_module_names or root == "elastix"
    return known or any(folder in file for folder in _OF_LIBRARIES)
