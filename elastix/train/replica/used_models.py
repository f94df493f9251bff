"""Models that runs in this process have trained, so that no other run goes on from them unawares.

A worker of a campaign runs one trial after another. A model that the train function finds outside
of itself is the same object in all of them: each would begin with what the one before has learned.

Invariant: a model that the function itself has given another beginning is as good as new. Torch
counts the changes of each tensor, and those after the end of a run are not its own.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from elastix.train.replica import refusals

Counts = Sequence[tuple[torch.nn.Parameter, int]]

_left = WeakTensorKeyDictionary()  # what a run has changed, with torch's count as it was left


def check(objects: Iterable[object]) -> None:
    """Refuse modules with a parameter that is as an earlier run has left it.

    Raises:
        ConfigError: names the parameter.
    """
    for module in objects:
        if not isinstance(module, torch.nn.Module):
            continue
        for name, parameter in module.named_parameters():
            if _left.get(parameter) == parameter._version:
                raise refusals.trained_before(name)


def counts(modules: Iterable[torch.nn.Module]) -> Counts:
    """How often each parameter was changed until now."""
    return [(each, each._version) for module in modules for each in module.parameters()]


def leave(before: Counts) -> None:
    """A run is over, at whose beginning the counts were these."""
    for parameter, count in before:
        if parameter._version != count:
            _left[parameter] = parameter._version
