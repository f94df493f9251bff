"""Nested dicts and lists, as `state_dict` gives them: a skeleton that is JSON, and tensors by path.

Invariant: what comes out is what went in. Counters, tuples and NumPy's numbers keep their types;
other mappings become dicts. JSON of a store has names in alphabetical order, so a dict of names
comes out in that order, and it does not tell members of an enumeration from their values; see
`restored_as`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from elastix.errors import StateError
from elastix.lazy_import import later

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch")


def flatten(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:  # noqa: ANN401
    """JSON skeleton of a nested state; its tensors are moved to `tensors`.

    Args:
        value: to be taken apart.
        path: under which a tensor is to be found, if no other is there already: two keys may look
            alike, 1 and "1", or "a/b" and "b" within "a".
        tensors: take what is found in it.

    Raises:
        StateError: it holds something that is neither; names its path.
    """
    if isinstance(value, torch.Tensor):
        path = _free(path, tensors)
        tensors[path] = value.detach() if value.requires_grad else value  # slow for parts
        return {"$tensor": path}
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        path = _free(path, tensors)
        tensors[path] = _tensor_of(value, path)
        return {"$array": path}
    if isinstance(value, Counter):  # as MultiStepLR has one, and uses what a dict cannot do
        return {"$counter": flatten(dict(value), path, tensors)}
    if isinstance(value, Mapping):
        if _is_named(value):
            return {k: flatten(v, f"{path}/{k}", tensors) for k, v in value.items()}
        return {
            "$items": [
                [flatten(k, f"{path}/key{i}", tensors), flatten(v, f"{path}/{k}", tensors)]
                for i, (k, v) in enumerate(value.items())
            ]
        }
    if isinstance(value, tuple):
        return {"$tuple": [flatten(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [flatten(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        # Not a plain number: arithmetic goes on in its type.
        return {"$scalar": [str(value.dtype), flatten(value.item(), path, tensors)]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    raise StateError(
        f"{path} is a {type(value).__name__}; a State holds tensors, numbers, text, None, lists "
        "and dicts of these. Nothing was captured. Leave it out of state_dict or turn it into one."
    )


def _tensor_of(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    """In the memory of the array, if torch has a word for how it lies there."""
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:  # of text, or in the byte order of other machines
        raise StateError(
            f"{path} is an array of {array.dtype}, which torch does not have: {error}. Nothing was "
            "captured. Leave it out of state_dict or turn it into numbers of this machine."
        ) from error


def _is_named(value: Mapping[Any, Any]) -> bool:
    """Whether it is an object in JSON, which has no order; others are lists of pairs."""
    return all(isinstance(key, str) and not key.startswith("$") for key in value)


def _free(path: str, tensors: Mapping[str, torch.Tensor]) -> str:
    while path in tensors:
        path += "+"
    return path


def unflatten(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401
    """What `flatten` was given, of such a skeleton and tensors."""
    if isinstance(value, list):
        return [unflatten(v, tensors) for v in value]
    if not isinstance(value, Mapping):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$array" in value:
        return tensors[value["$array"]].numpy().copy()
    if "$items" in value:
        return {unflatten(k, tensors): unflatten(v, tensors) for k, v in value["$items"]}
    if "$tuple" in value:
        return tuple(unflatten(v, tensors) for v in value["$tuple"])
    if "$counter" in value:
        return Counter(unflatten(value["$counter"], tensors))
    if "$scalar" in value:
        kind, number = value["$scalar"]
        return np.dtype(kind).type(unflatten(number, tensors))
    if "$float" in value:
        return float(value["$float"])
    return {k: unflatten(v, tensors) for k, v in value.items()}


def restored_as(value: Any, like: Any) -> Any:  # noqa: ANN401
    """The same, with what JSON has lost of it, as far as the object that takes it shows that.

    Code may go by the order of a dict: an average of weights by name that is updated in step with
    `model.parameters()`, say. What `like` does not have comes last. And it may ask whether
    something `is` a member of an enumeration.
    """
    if type(value) is dict and isinstance(like, Mapping):
        # In another order it comes from a worker or from memory, and has lost nothing.
        sorted_by_name = _is_named(value) and [*value] == sorted(value)
        known = [key for key in like if sorted_by_name and key in value]
        keys = {**dict.fromkeys(known), **value}
        return {key: restored_as(value[key], like.get(key)) for key in keys}
    if type(value) in (list, tuple) and isinstance(like, list | tuple) and len(value) == len(like):
        return type(value)(restored_as(*pair) for pair in zip(value, like, strict=True))
    if isinstance(like, Enum) and not isinstance(value, Enum):
        with suppress(ValueError):  # not one of its values: None, say
            return type(like)(value)
    return value
