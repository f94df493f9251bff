"""Models that runs in this process have trained, so that no other run goes on from them unawares.

A worker of a campaign runs one trial after another. A model that the train function finds outside
of itself is the same object in all of them: each would begin with what the one before has learned.
So would a model that is made in the function of tensors that are found outside, and shares their
memory: `Embedding.from_pretrained(VECTORS, freeze=False)`, `load_state_dict(BEFORE, assign=True)`.
Hence it is memory that is remembered, and not objects.

Invariant: a model that the function itself has given another beginning is as good as new. Torch
counts the changes of each tensor, and those after the end of a run are not its own. It does not
count what goes through `tensor.data`, so a few elements are compared, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from elastix.state import raw_bytes, sample_of
from elastix.train.replica import refusals

Counts = Sequence[tuple[torch.Tensor, int, bool]]
Looks = Sequence[tuple[torch.Tensor, bool, torch.Tensor]]
_CHANGED = -1

# By storage and place in it: what a run has changed, with torch's count and a few elements as it
# was left. Of memory that is not torch's, as that of an array of NumPy, each tensor has another.
_left = WeakIdKeyDictionary()
_left_elsewhere: dict[Any, Any] = {}
_MOST_ELSEWHERE = 4096  # nobody says when such memory is gone


def check(objects: Iterable[object]) -> None:
    """Refuse modules with a parameter or a buffer that is as an earlier run has left it.

    Raises:
        ConfigError: names it.
    """
    for module in objects:
        if not isinstance(module, torch.nn.Module):
            continue
        for name, tensor in _tensors(module):
            if _as_left(tensor):
                raise refusals.trained_before(name)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What it learns: not the buffers that torch keeps in no State, which are caches mostly."""
    yield from module.named_parameters()
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _as_left(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_inference():
        return False
    storage = tensor.untyped_storage()
    found = _left.get(storage, {}).get(_place(tensor))
    if found is None and tensor._version == 0:  # nobody has changed it in this run
        found = _left_elsewhere.get((storage.data_ptr(), *_place(tensor)))
    if found is None:
        return False
    count, sample = found
    if tensor._version > count:
        return False  # of two that share memory one may have a count of its own, which is lower
    return sample is None or torch.equal(sample, raw_bytes(sample_of(tensor)))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def counts(modules: Iterable[torch.nn.Module], inherited: Looks = ()) -> Counts:
    """How often each parameter and buffer was changed until now, and whether its memory is torch's.

    That can be told only at the beginning of a run: whoever looks at a tensor through NumPy, as
    storing a State does, makes its memory look like NumPy's.

    Args:
        modules: of which.
        inherited: what was looked at before a model inherited. What that has changed has a count
            that no tensor has: it is as the run has made it.
    """
    own = {id(tensor) for tensor, trained, few in inherited if not _is_still(tensor, trained, few)}
    every = [tensor for module in modules for _, tensor in _tensors(module)]
    return [
        (each, _CHANGED if id(each) in own else each._version, _is_of_torch(each))
        for each in every
        if not each.is_inference()
    ]


def _is_of_torch(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or bool(tensor.untyped_storage().resizable())


def look(module: torch.nn.Module) -> Looks:
    """Its parameters and buffers: whether they are trained, and a few elements."""
    every = [tensor for _, tensor in _tensors(module) if tensor.layout is torch.strided]
    return [(each, each.requires_grad, raw_bytes(sample_of(each))) for each in every]


def _is_still(tensor: torch.Tensor, trained: bool, sample: torch.Tensor) -> bool:
    return tensor.requires_grad is trained and torch.equal(sample, raw_bytes(sample_of(tensor)))


def leave(modules: Iterable[torch.nn.Module], before: Counts) -> None:
    """A run with these modules is over, at whose beginning the counts were these."""
    known = {id(tensor): count for tensor, count, _ in before}
    elsewhere = {id(tensor) for tensor, _, of_torch in before if not of_torch}
    for tensor, count, _ in counts(modules):
        if known.get(id(tensor)) == count or tensor.layout is not torch.strided:
            continue
        try:
            sample = raw_bytes(sample_of(tensor))
        except RuntimeError:  # the device has failed, or is full: the run may have ended for it
            sample = None
        storage, place = tensor.untyped_storage(), _place(tensor)
        _left.setdefault(storage, {})[place] = count, sample
        if id(tensor) in elsewhere:
            _left_elsewhere[storage.data_ptr(), *place] = count, sample
    while len(_left_elsewhere) > _MOST_ELSEWHERE:
        del _left_elsewhere[next(iter(_left_elsewhere))]
