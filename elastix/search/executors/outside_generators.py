"""Generators of random numbers that a train function finds outside of itself.

Those of torch, NumPy and Python that all code shares are seeded for each trial. One that is made
beside the function (`RNG = np.random.default_rng(0)`) goes on from trial to trial: what a trial
draws would hang on how many came before it in its process. So it is put back after each.

Found is what the function leads to: its closure and defaults, what it names in its own modules, and
so on through functions, objects and containers. Not here: other things that trials may share.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

_MOST = 10_000  # things that are looked at
_MANY = 1000  # parts of one
_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.ndarray, torch.Tensor)
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_OF_LIBRARIES = ("site-packages", "dist-packages")

_known = WeakIdKeyDictionary()  # by train function


@contextmanager
def kept(train: Callable[..., Any]) -> Iterator[None]:
    """Leave them as they were."""
    found = _known.get(train) if type(train).__weakrefoffset__ else None
    if found is None:
        found = list(_generators(train))
        if type(train).__weakrefoffset__:
            _known[train] = found
    before = [(generator, _state(generator)) for generator in found]
    try:
        yield
    finally:
        for generator, state in before:
            _put(generator, state)


def _state(generator: Any) -> Any:  # noqa: ANN401 - of any kind
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _put(generator: Any, state: Any) -> None:  # noqa: ANN401 - of any kind
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _generators(train: Callable[..., Any]) -> Iterator[Any]:
    waiting: deque[Any] = deque([train])
    seen: dict[int, Any] = {}  # which keeps them, and so their ids
    while waiting and len(seen) < _MOST:
        one = waiting.popleft()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, _KINDS) and not isinstance(one, random.SystemRandom):
            yield one
        else:
            waiting.extend(islice(_parts(one), _MANY))


def _parts(one: Any) -> Iterator[Any]:  # noqa: ANN401 - anything
    """What it leads to."""
    if isinstance(one, FunctionType):
        yield from _parts_of_function(one)
    elif isinstance(one, MethodType):
        yield from (one.__func__, one.__self__)
    elif isinstance(one, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, dict):
        yield from one.values()
    elif isinstance(one, list | tuple | set | frozenset | deque):
        yield from one
    elif isinstance(one, type):
        if not _is_of_library(one.__module__):
            yield from vars(one).values()
    elif not isinstance(one, ModuleType):
        yield type(one)
        try:  # a stand-in for something else is not asked for that
            yield from object.__getattribute__(one, "__dict__").values()
        except AttributeError:
            return


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
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield value
        elif not _is_of_library(value.__name__):
            yield from (vars(value)[inner] for inner in names & vars(value).keys())


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
