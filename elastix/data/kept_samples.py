"""A sample in memory of its own, and as a State holds it. Not here: which are kept (reservoir).

Invariant: what is read back is what was kept, in type and order too. Who read a sample from its
dataset and who was given it by a State train on the same.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from elastix import state as states
from elastix.errors import StateError


def copied(sample: Any) -> Any:  # noqa: ANN401 - whatever a sample is
    """The same in memory of its own: a row of a large tensor keeps all of that alive."""
    copy = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), sample)
    return tree_map_only(np.ndarray, lambda a: a.copy(), copy)


def packed(sample: Any) -> Any:  # noqa: ANN401
    """What a State can hold of it. A State forgets the order of a dict and NumPy's numbers.

    Raises:
        StateError: a State would forget its type.
    """
    if type(sample) is dict:
        values = [packed(value) for value in sample.values()]
        return {"keys": [packed(key) for key in sample], "values": values}
    if isinstance(sample, np.generic):
        return {"dtype": sample.dtype.name, "value": sample.item()}
    if type(sample) in (list, tuple):
        return type(sample)(map(packed, sample))
    if isinstance(sample, Mapping | list | tuple):
        raise StateError(f"a State would not give back a {type(sample).__name__} as one.")
    return sample


def unpacked(value: Any) -> Any:  # noqa: ANN401
    """The sample again."""
    if isinstance(value, dict):
        if "dtype" in value:
            return np.dtype(value["dtype"]).type(value["value"])
        keys, values = (map(unpacked, value[name]) for name in ("keys", "values"))
        return dict(zip(keys, values, strict=True))
    if isinstance(value, list | tuple):
        return type(value)(map(unpacked, value))
    return value


def check(sample: Any) -> None:  # noqa: ANN401
    """That a State can hold it and gives back the same.

    Raises:
        StateError: it cannot.
    """
    try:
        held = _Held(packed(sample))
        state = states.capture({}, {"sample": held}).clone()
        states.restore(state, {}, {"sample": held})
        wrong = _differing(sample, unpacked(held.value))
    except StateError:
        raise
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise StateError(f"a State cannot hold it: {error}.") from error
    if wrong is not None:
        raise StateError(f"a State would not give back a {type(wrong).__name__} as it is.")


class _Held:
    def __init__(self, value: Any) -> None:  # noqa: ANN401
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def _differing(ours: Any, theirs: Any) -> Any:  # noqa: ANN401
    """The first part that is of another type or value; None if there is none."""
    if type(ours) is not type(theirs):
        return ours
    if isinstance(ours, dict):
        parts = [(list(ours), list(theirs)), *zip(ours.values(), theirs.values(), strict=True)]
    elif isinstance(ours, list | tuple):
        parts = list(zip(ours, theirs, strict=True))
    elif isinstance(ours, torch.Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        same = same and torch.equal(states.raw_bytes(ours), states.raw_bytes(theirs))
        return None if same else ours
    else:
        return None if repr(ours) == repr(theirs) else ours
    found = (_differing(*pair) for pair in parts)
    return next((part for part in found if part is not None), None)
