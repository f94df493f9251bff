"""Models that runs in this process have trained, so that no other run goes on from them unawares.

A worker of a campaign runs one trial after another. A model that the train function finds outside
of itself is the same object in all of them: each would begin with what the one before has learned.

Invariant: a model that the function itself has given another beginning is as good as new. Torch
counts the changes of each tensor, and those after the end of a run are not its own. It does not
count what goes through `tensor.data`, so a few elements are compared, too.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from elastix.state import raw_bytes, sample_of
from elastix.train.replica import refusals

Counts = Sequence[tuple[torch.nn.Parameter, int]]

# What a run has changed, with torch's count and a few elements as it was left.
_left = WeakTensorKeyDictionary()


def check(objects: Iterable[object]) -> None:
    """Refuse modules with a parameter that is as an earlier run has left it.

    Raises:
        ConfigError: names the parameter.
    """
    for module in objects:
        if not isinstance(module, torch.nn.Module):
            continue
        for name, parameter in module.named_parameters():
            if parameter in _left and _as_left(parameter):
                raise refusals.trained_before(name)


def _as_left(parameter: torch.nn.Parameter) -> bool:
    count, sample = _left[parameter]
    if parameter._version != count:
        return False
    return sample is None or torch.equal(sample, raw_bytes(sample_of(parameter)))


def counts(modules: Iterable[torch.nn.Module]) -> Counts:
    """How often each parameter was changed until now."""
    every = [parameter for module in modules for parameter in module.parameters()]
    return [(each, each._version) for each in every if not each.is_inference()]


def leave(before: Counts) -> None:
    """A run is over, at whose beginning the counts were these."""
    for parameter, count in before:
        if parameter._version == count:
            continue
        try:
            sample = raw_bytes(sample_of(parameter))
        except RuntimeError:  # the device has failed, or is full: the run may have ended for it
            sample = None
        _left[parameter] = parameter._version, sample
