"""What runs in this process have trained, so that no other run goes on from it unawares.

A worker of a campaign runs one trial after another. A model that the train function finds outside
of itself is the same object in all of them: each would begin with what the one before has learned.
So would a model that is made in the function of tensors that are found outside, and shares their
memory: `Embedding.from_pretrained(VECTORS, freeze=False)`, `load_state_dict(BEFORE, assign=True)`.
Hence it is memory that is remembered, and not objects. It does not matter whether the model was
given to `ctx.prepare`: an optimizer that takes its first step in a run is looked at as well.

Optimizers, schedulers and whatever else has a state are remembered themselves.

Invariant: a model that the function itself has given another beginning is as good as new. Torch
counts the changes of each tensor, and those after the end of a run are not its own. It does not
count what goes through `tensor.data`, so a few elements are compared, too.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from elastix.state import Stateful, raw_bytes, sample_of
from elastix.train.replica import refusals

Looks = Sequence[tuple[torch.Tensor, bool, torch.Tensor]]
_CHANGED = -1

# By storage and place in it: what a run has changed, with torch's count and a few elements as it
# was left. Of memory that is not torch's, as that of an array of NumPy, each tensor has another.
_left = WeakIdKeyDictionary()
_left_elsewhere: dict[Any, Any] = {}
_MOST_ELSEWHERE = 4096  # nobody says when such memory is gone
_left_states = WeakIdKeyDictionary()  # by object, what of its state a run has changed
_LOOKED_AT = 8  # tensors of a state
_MANY = 4096  # parts of one


class Used:
    """What one run was given, and how it was then."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._counts: list[tuple[torch.Tensor, int, bool]] = []
        self._values: list[tuple[Stateful, Mapping[str, Any]]] = []

    def check(self, objects: Iterable[object]) -> None:
        """Refuse what is as an earlier run has left it: a tensor of a module, another's state.

        Raises:
            ConfigError: names it.
        """
        for one in objects:
            if isinstance(one, torch.nn.Module):
                for name, tensor in _tensors(one):
                    if _as_left(tensor):
                        raise refusals.trained_before(repr(name))
            elif _has_state(one):
                left = _left_states.get(one)
                if left and _values(one).items() >= left.items():
                    raise refusals.used_before(type(one).__name__)

    def begin(self, objects: Iterable[object], inherited: Looks = ()) -> None:
        """From now on the run may change these.

        Args:
            objects: of which.
            inherited: what was looked at before a model inherited. What that has changed has a
                count that no tensor has: it is as the run has made it.
        """
        every = list({id(one): one for one in objects}.values())
        modules = [one for one in every if isinstance(one, torch.nn.Module)]
        self._modules += modules
        self._counts += _counts(modules, inherited)
        self._values += [(one, _values(one)) for one in every if _has_state(one)]

    def leave(self) -> None:
        """The run is over."""
        known = {id(tensor): count for tensor, count, _ in self._counts}
        elsewhere = {id(tensor) for tensor, _, of_torch in self._counts if not of_torch}
        for tensor, count, _ in _counts(self._modules):
            if known.get(id(tensor)) != count:
                _leave(tensor, count, elsewhere=id(tensor) in elsewhere)
        for one, had in self._values:
            try:
                has = _values(one)
            except Exception:  # noqa: BLE001 - code of the user's, and the run may have failed for it
                continue
            changed = {name: value for name, value in has.items() if had.get(name) != value}
            if changed:
                _left_states[one] = changed
        self._modules, self._counts, self._values = [], [], []


def _has_state(one: object) -> TypeGuard[Stateful]:
    """Whether it is no module, whose tensors are looked at, and can be remembered."""
    weakly = type(one).__weakrefoffset__ != 0
    return isinstance(one, Stateful) and weakly and not isinstance(one, torch.nn.Module)


def _values(one: Any) -> Mapping[str, Any]:  # noqa: ANN401 - whatever has a state
    """Its numbers and text, and a few elements of some of its tensors."""
    state = one.state_dict()
    found: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    _take_apart(state, "", found, plain)
    strided = {name: one for name, one in found.items() if one.layout is torch.strided}
    for name in list(strided)[:: max(1, -(-len(strided) // _LOOKED_AT))]:
        sample = raw_bytes(sample_of(strided[name]))
        plain[name] = str(strided[name].shape), sample.numpy().tobytes()
    return plain


def _take_apart(
    value: Any,  # noqa: ANN401 - any part of a state
    path: str,
    tensors: dict[str, torch.Tensor],
    plain: dict[str, Any],
) -> None:
    if len(plain) + len(tensors) > _MANY:
        return
    if isinstance(value, torch.Tensor):
        tensors[path] = value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _take_apart(part, f"{path}/{key}", tensors, plain)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            _take_apart(part, f"{path}/{number}", tensors, plain)
    elif isinstance(value, int | float | str):
        plain[path] = value


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
    storage, place = tensor.untyped_storage(), _place(tensor)
    found = _left.get(storage, {}).get(place)
    if found is None and tensor._version == 0:  # nobody has changed it in this run
        found = _left_elsewhere.get((storage.data_ptr(), *place))
    if found is None:
        return _has_part_of_others(storage, place, tensor._version)
    count, sample = found
    if tensor._version > count:
        return False  # of two that share memory one may have a count of its own, which is lower
    return sample is None or torch.equal(sample, raw_bytes(sample_of(tensor)))


def _has_part_of_others(
    storage: torch.UntypedStorage, place: tuple[Any, ...], version: int
) -> bool:
    """Whether it has elements of a tensor that is as it was left: as a slice of what they share."""
    start, stop = _bytes(place)
    for other, (count, sample) in _left.get(storage, {}).items():
        first, last = _bytes(other)
        if start < last and first < stop and version <= count and sample is not None:
            offset, shape, stride, dtype = other
            there = torch.empty(0, dtype=dtype, device=storage.device)
            there.set_(storage, offset, shape, stride)
            if torch.equal(sample, raw_bytes(sample_of(there))):
                return True
    return False


def _bytes(place: tuple[Any, ...]) -> tuple[int, int]:
    """Of the storage, from where to where."""
    offset, shape, stride, dtype = place
    if 0 in shape:
        return 0, 0
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset * dtype.itemsize, (last + 1) * dtype.itemsize


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _counts(
    modules: Iterable[torch.nn.Module], inherited: Looks = ()
) -> list[tuple[torch.Tensor, int, bool]]:
    """How often each parameter and buffer was changed until now, and whether its memory is torch's.

    That can be told only at the beginning of a run: whoever looks at a tensor through NumPy, as
    storing a State does, makes its memory look like NumPy's.
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


def _leave(tensor: torch.Tensor, count: int, *, elsewhere: bool) -> None:
    """A run has changed a tensor.

    Args:
        tensor: which.
        count: of its changes.
        elsewhere: its memory is not torch's.
    """
    if tensor.layout is not torch.strided:
        return
    try:
        sample = raw_bytes(sample_of(tensor))
    except RuntimeError:  # the device has failed, or is full: the run may have ended for it
        sample = None
    storage, place = tensor.untyped_storage(), _place(tensor)
    _left.setdefault(storage, {})[place] = count, sample
    if elsewhere:
        _left_elsewhere[storage.data_ptr(), *place] = count, sample
        while len(_left_elsewhere) > _MOST_ELSEWHERE:
            del _left_elsewhere[next(iter(_left_elsewhere))]


@contextmanager
def optimizers_watched() -> Iterator[None]:
    """Look at what optimizers train in a run of this thread, whether it calls `ctx.prepare` or not.

    One that takes its first step raises a ConfigError if it would go on from another run.
    """
    thread, known = threading.get_ident(), WeakIdKeyDictionary()
    trained: dict[int, tuple[torch.Tensor, int, bool]] = {}

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401
        if optimizer in known or threading.get_ident() != thread:
            return
        known[optimizer] = None
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if id(parameter) in trained or parameter.is_inference():
                continue
            if _as_left(parameter):
                raise refusals.trained_before(f"a parameter of shape {list(parameter.shape)}")
            trained[id(parameter)] = parameter, parameter._version, _is_of_torch(parameter)

    hook = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        hook.remove()
        for tensor, count, of_torch in trained.values():
            if tensor._version != count:
                _leave(tensor, tensor._version, elsewhere=not of_torch)
