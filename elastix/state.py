"""State: named tensors, small JSON metadata, parents. The one noun that everything moves.

Live training is captured into a State and restored from one; a joiner receives one; a stored
checkpoint is one. Not here: where States are kept, how they travel, and which of their entries are
whose (state_entries).

Names: a tensor of the model keeps its own name (`encoder.0.weight`); everything else stands
below `@`: `@optimizer/state/encoder.0.weight/exp_avg`, `@rng/torch`. Optimizer entries are keyed by
parameter name, never by index, so they survive a change of the model around them. Where a process
holds a part of a tensor only, the State of that process does too (`parts`); see sharding.

Invariant: `restore(capture(objects), objects)` changes no bit of the objects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from blake3 import blake3

from elastix import sharding
from elastix.compiled_modules import plain
from elastix.errors import ConfigError, StateError
from elastix.lazy_import import later
from elastix.nested_state import flatten, restored_as, unflatten
from elastix.notebook import facts, size, table

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch")

_SHOWN = 20  # tensors of a model in a notebook
OF_MODEL = ("[!@]*", "@extra/*")
"""Patterns of the tensors that `State.load_into` needs."""
BY_PARAMETER = ("params", "param_names")
"""Lists in a group of an optimizer, with an entry for each parameter."""
_HOW = ("foreach", "fused")  # the same numbers in other ways, of which a mesh may refuse some
_FEW_BYTES = 1 << 20  # of a tensor that is copied in every step
_SAMPLE = 64  # elements of a tensor, at the most


class Ref(str):
    """Digest of a manifest, 64 hexadecimal digits: the name of a State that never changes."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<code title="{escape(self)}">{escape(self[:12])}</code>'


@runtime_checkable
class Stateful(Protocol):
    """torch's protocol: whatever has state_dict and load_state_dict can be part of a State."""

    def state_dict(self) -> dict[str, Any]:
        """The object's state as nested dicts and lists of tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:  # noqa: ANN401 - torch's own
        """Take over such a state."""
        ...


@dataclass(frozen=True)
class TensorInfo:
    """What a manifest says of one tensor. The digest is BLAKE3-256 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shape) * dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """A State with digests in place of bytes. Equal States have equal manifests."""

    tensors: Mapping[str, TensorInfo]
    meta: Mapping[str, Any]
    parents: tuple[Ref, ...] = ()

    def to_json(self) -> str:
        """Canonical text: sorted keys, no blanks. `ref` is the digest of its UTF-8 bytes."""
        tensors = {
            name: [info.dtype, list(info.shape), info.digest] for name, info in self.tensors.items()
        }
        body = {"meta": self.meta, "parents": self.parents, "tensors": tensors}
        return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=True)

    @property
    def ref(self) -> Ref:
        """The State's name."""
        return Ref(blake3(self.to_json().encode()).hexdigest())

    def __repr__(self) -> str:
        return f"Manifest({self.ref[:12]}, {len(self.tensors)} tensors)"


@dataclass(frozen=True)
class State:
    """Named tensors, JSON metadata, parents. Tensors may be views of live ones: see `clone`.

    Attributes:
        tensors: by name. Those of optimizers and the like have names that begin with "@"; `model`
            has the others.
        meta: JSON values by name.
        parents: the models that it derives from.
        parts: of the tensors of which this process holds a part, which part that is.
    """

    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any] = field(default_factory=dict)
    parents: tuple[Ref, ...] = ()
    parts: Mapping[str, sharding.Shard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot hold tensors by name; the tensors are looked at where one is put."""
        for name in ("tensors", "meta"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"State: {name} must be a mapping, not {type(value).__name__}. Nothing was "
                    "made. Give tensors by name, as model.state_dict() has them."
                )

    @property
    def nbytes(self) -> int:
        """Logical bytes: each name counts, tied or not."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def clone(self) -> State:
        """A copy on the CPU that later training cannot change. Tied tensors stay tied."""
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        tensors = {}
        for name, tensor in self.tensors.items():
            key = identity(tensor)
            if key not in copies:
                copies[key] = tensor.detach().to("cpu", copy=True)
            tensors[name] = copies[key]
        return State(tensors, json.loads(json.dumps(self.meta)), self.parents, self.parts)

    @property
    def stored(self) -> Mapping[str, torch.Tensor]:
        """The tensors under the names that a store has them under; parts without elements in none.

        Of one process and of a crew: a tensor held whole has the same name in both.
        """
        if not self.parts:
            return self.tensors
        names = {name: self.stored_name(name) for name in self.tensors}
        return {stored: self.tensors[name] for name, stored in names.items() if stored is not None}

    def stored_name(self, name: str) -> str | None:
        """That of one tensor; None for a part without elements."""
        held = self.parts.get(name)
        if held is None:
            return name
        return None if held.part.empty else sharding.stored_name(name, held.part)

    def only(self, stored: Collection[str]) -> State:
        """The tensors that a store has under these names, without metadata and parents."""
        chosen = [name for name in self.tensors if self.stored_name(name) in stored]
        parts = {name: self.parts[name] for name in chosen if name in self.parts}
        return State({name: self.tensors[name] for name in chosen}, parts=parts)

    def manifest(self) -> Manifest:
        """Digest every tensor (reads all bytes once, tied ones once)."""
        digests: dict[tuple[Any, ...], str] = {}
        infos = {}
        for name, tensor in self.stored.items():
            key = identity(tensor)
            if key not in digests:
                digests[key] = blake3(raw_bytes(tensor).numpy().data).hexdigest()
            infos[name] = TensorInfo(dtype_name(tensor), tuple(tensor.shape), digests[key])
        return Manifest(infos, self.meta, self.parents)

    @property
    def model(self) -> dict[str, torch.Tensor]:
        """The model's tensors under their own names, as `load_state_dict` takes them."""
        return {name: t for name, t in self.tensors.items() if not name.startswith("@")}

    def load_into(self, model: torch.nn.Module) -> torch.nn.Module:
        """Give a model these weights and put it in evaluation mode; it is returned.

        Raises:
            ConfigError: it is no module. StateError: it is another model than the State's, or the
                State holds parts of its tensors.
        """
        if self.parts:
            raise StateError(
                f"the State holds parts of {len(self.parts)} tensors, {min(self.parts)!r} among "
                "them. Nothing was loaded. Take the model from the store, which has it whole."
            )
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"build(config) must return a torch.nn.Module, not {model!r}. Nothing was loaded."
            )
        own: dict[str, Any] = self.model
        inner = plain(model)
        for name in inner.state_dict().keys() - own.keys():
            # What its get_extra_state gave; tensors of it may have been left out, by an export.
            with suppress(KeyError):
                own[name] = unflatten(self.meta[f"@{name}"], self.tensors)
        advice = "Give the function that the train function builds its model with."
        _check_tied(inner.state_dict(), own, f" Nothing was loaded. {advice}")
        try:
            inner.load_state_dict(own)
        except RuntimeError as error:
            raise StateError(
                f"build(config) gives another model than was stored: {str(error).rstrip(' .')}. "
                f"{advice}"
            ) from error
        return model.eval()

    def __repr__(self) -> str:
        return f"State({len(self.model)} tensors of the model, {size(self.nbytes)} in all)"

    def _repr_html_(self) -> str:
        """The facts, and the tensors of the model, as many as one wants to scroll past."""
        own = [
            (n, dtype_name(t), str(list(t.shape)), size(t.nbytes)) for n, t in self.model.items()
        ]
        left_out = len(own) - _SHOWN
        if left_out > 0:
            own = [*own[:_SHOWN], (f"... {left_out} more", "", "", "")]
        plain = {k: v for k, v in self.meta.items() if isinstance(v, bool | int | float | str)}
        pairs = [
            ("tensors", f"{len(self.tensors)}, of these {len(self.model)} of the model"),
            ("bytes", size(self.nbytes)),
            ("parents", " ".join(ref[:12] for ref in self.parents) or None),
            *plain.items(),
        ]
        return facts("State", pairs) + table("Model", ("tensor", "dtype", "shape", "size"), own)


def _check_tied(live: Mapping[str, Any], given: Mapping[str, Any], advice: str = "") -> None:
    """Refuse two values for what is one tensor there: torch would keep the last without a word."""
    firsts: dict[tuple[Any, ...], str] = {}
    for name, held in live.items():
        if not (isinstance(held, torch.Tensor) and isinstance(given.get(name), torch.Tensor)):
            continue
        if held.is_meta or torch.nn.parameter.is_lazy(held):  # it has no memory until it is loaded
            continue
        tensor = sharding.local(held)
        if not tensor.numel() or not tensor.data_ptr():  # nor has this
            continue
        if (first := firsts.setdefault(identity(tensor), name)) == name:
            continue
        one, other = sharding.local(given[first]), sharding.local(given[name])
        if identity(one) != identity(other) and not torch.equal(raw_bytes(one), raw_bytes(other)):
            raise StateError(
                f"{first!r} and {name!r} are one tensor in the model, and two different ones in "
                f"the State.{advice}"
            )


def raw_bytes(tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """As `bytes_in_place`, on the CPU."""
    return bytes_in_place(tensor, start, stop).cpu()


def bytes_in_place(tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Bytes of these elements in row-major order, flat uint8; a view if they lie so."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)[start:stop]


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of a grid: the same of a tensor and of its copy. On a GPU nothing waits for it."""
    grid = tuple(slice(None, None, step) for step in _steps(tuple(tensor.shape)))
    sample = tensor.detach()[grid].clone(memory_format=torch.contiguous_format)
    return sample.resolve_conj().resolve_neg()


@lru_cache(maxsize=4096)
def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """By dimension, between elements of a grid that has _SAMPLE of them at the most."""
    steps = [1] * len(shape)
    picked = list(shape)
    while math.prod(picked) > _SAMPLE:
        longest = max(range(len(shape)), key=picked.__getitem__)
        steps[longest] *= 2
        picked[longest] = -(-shape[longest] // steps[longest])
    return tuple(steps)


def dtype_name(tensor: torch.Tensor) -> str:
    """As manifests have it: `float32`, `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two names of one piece of memory seen in the same way."""
    if tensor.numel() == 0:
        return ("empty", tensor.dtype, tuple(tensor.shape))
    seen = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *seen)


# ------------------------------------------------------------------------ live objects <-> State


def parameter_names(modules: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """`id(parameter)` to the name its tensor has in a State; a tied one has its first name."""
    names: dict[int, str] = {}
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), prefix + name)
    return names


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    done: str = "Nothing was prepared.",
) -> None:
    """Refuse an optimizer that holds parameters which are not in `names`.

    Args:
        optimizer: part of the State.
        names: of prepared parameters, by id.
        done: what to say of it.

    Raises:
        ConfigError: names the group, the place in it and the shape of the first stranger.
    """
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ConfigError(
                    f"parameter {place} of group {index} of the {type(optimizer).__name__}, shape "
                    f"{tuple(parameter.shape)}, belongs to no model given to ctx.prepare. {done} "
                    "Build the optimizer from the parameters of the models that you prepare (a "
                    "copied or re-created model has other parameters)."
                )


def capture(
    modules: Mapping[str, torch.nn.Module],
    others: Mapping[str, Stateful],
    meta: Mapping[str, Any] | None = None,
) -> State:
    """A State of live objects. Its tensors share memory with them; `clone` it to keep it.

    Args:
        modules: prefix to module; the main model has the empty prefix.
        others: name to optimizer, scheduler, scaler or any other Stateful; stored below `@name/`.
        meta: further JSON metadata, stored beside.

    Raises:
        StateError: a value is neither a tensor nor JSON, with its place.
    """
    return _of_this_process(*_live(modules, others, meta or {}))


class HeldState:
    """What `capture` would give, if nobody has touched the tensors until it is asked for.

    Its metadata are those of now; only small tensors are copied, and little is computed. Of what an
    optimizer steps, of what is frozen, and of large tensors a sample is kept: that sees what
    changes all of a tensor or much of it.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        others: Mapping[str, Stateful],
        meta: Mapping[str, Any],
    ) -> None:
        """Arguments and errors are those of `capture`."""
        self._live, self._meta = _live(modules, others, meta)
        self._versions = [_version(tensor) for tensor in self._live.values()]
        # Changes of arrays, and by `tensor.data`, go past torch's count: bytes are compared. Not
        # all of what an optimizer steps, for whoever holds this hears of the step.
        stepped = {n: o for n, o in others.items() if isinstance(o, torch.optim.Optimizer)}
        theirs = {id(p) for o in stepped.values() for g in o.param_groups for p in g["params"]}
        left_alone = {
            prefix + name
            for prefix, module in modules.items()
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in theirs or not parameter.requires_grad
        }
        moments = tuple(f"@{name}/" for name in stepped)
        self._copies = {
            name: sharding.local(tensor).clone()
            for name, tensor in self._live.items()
            if tensor.nbytes <= _FEW_BYTES
            and name not in left_alone
            and not name.startswith(moments)
        }
        self._samples = {
            name: sample_of(sharding.local(tensor))
            for name, tensor in self._live.items()
            if name not in self._copies and not name.startswith(moments)
        }

    def state(self) -> State | None:
        """It; None if something was changed in place since, as steps of optimizers do."""
        if [_version(tensor) for tensor in self._live.values()] != self._versions:
            return None
        state = _of_this_process(self._live, self._meta)
        for name, copied in self._copies.items():
            if not torch.equal(raw_bytes(state.tensors[name]), raw_bytes(copied)):
                return None
        for name, sample in self._samples.items():
            if not torch.equal(raw_bytes(sample_of(state.tensors[name])), raw_bytes(sample)):
                return None
        return state


def _version(tensor: torch.Tensor) -> float:
    """How often it was changed in place; unlike itself if torch does not count."""
    # A new one each time: lists take an object for equal to itself, even if it is not a number.
    return float("nan") if tensor.is_inference() else tensor._version


def _live(
    modules: Mapping[str, torch.nn.Module],
    others: Mapping[str, Stateful],
    meta: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors as the objects have them, sharded or not, and all else."""
    live: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = dict(meta)
    names = parameter_names(modules)
    for prefix, module in modules.items():
        for name, value in module.state_dict().items():
            if isinstance(value, torch.Tensor):
                live[prefix + name] = value.detach()
            else:  # a module's get_extra_state
                values[f"@{prefix}{name}"] = flatten(value, f"@extra/{prefix}{name}", live)
    for name, other in others.items():
        state = other.state_dict()
        if isinstance(other, torch.optim.Optimizer):
            state = _by_name(other, state, names)
        values[f"@{name}"] = flatten(state, f"@{name}", live)
    return live, values


def _of_this_process(live: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> State:
    tensors, parts = {}, {}
    for name, tensor in live.items():
        tensors[name] = sharding.local(tensor)
        held = sharding.held(tensor)
        if held is not None:
            parts[name] = held
    return State(tensors, values, parts=parts)


def restore(
    state: State, modules: Mapping[str, torch.nn.Module], others: Mapping[str, Stateful]
) -> None:
    """Load `state` into live objects of the same make-up.

    Of what is sharded here this process takes its part: out of whole tensors, or from the State of
    a process at the same place.

    Raises:
        StateError: the State lacks something that the objects need, a shape differs, or two of its
            tensors are one here.
    """
    for prefix, module in modules.items():
        own = {}
        live = module.state_dict()
        tensors = _fitted(state, prefix, live)
        for name in live:
            if prefix + name in state.tensors:
                own[name] = tensors[prefix + name]
            elif f"@{prefix}{name}" in state.meta:
                extra = unflatten(state.meta[f"@{prefix}{name}"], tensors)
                own[name] = restored_as(extra, live[name])
            else:
                raise StateError(f"the State holds no tensor {prefix + name!r}.")
        _check_tied(live, own)
        try:
            module.load_state_dict(own)
        except RuntimeError as error:
            raise StateError(f"the State does not fit the model: {error}") from error
    restore_others(state, modules, others)


def restore_others(
    state: State, modules: Mapping[str, torch.nn.Module], others: Mapping[str, Stateful]
) -> None:
    """The same for `others` alone; `modules` have the parameters of optimizers among them.

    Raises:
        StateError: see `restore`.
    """
    names = parameter_names(modules)
    for name, other in others.items():
        if f"@{name}" not in state.meta:
            raise StateError(f"the State holds nothing for {name!r}.")
        values = unflatten(state.meta[f"@{name}"], _fitted_other(state, name, other, names))
        if isinstance(other, torch.optim.Optimizer):
            _load(other, _by_index(other, values, names), names, state.tensors)
        else:
            other.load_state_dict(restored_as(values, other.state_dict()))


def _fitted(
    state: State,
    prefix: str,
    live: Mapping[str, Any],
    owners: Mapping[str, torch.Tensor] | None = None,
) -> Mapping[str, torch.Tensor]:
    """The State's tensors as the `live` ones are, whose names there begin with `prefix`."""
    if not sharding.possible():
        if state.parts:
            raise StateError(
                f"the State holds parts of {len(state.parts)} tensors, {min(state.parts)!r} among "
                "them, and nothing here is sharded. Take it from the store, which has it whole."
            )
        return state.tensors
    found = {prefix + n: t for n, t in live.items() if isinstance(t, torch.Tensor)}
    return sharding.Fitted(state.tensors, state.parts, found, owners or {})


def _fitted_other(
    state: State, key: str, other: Stateful, names: Mapping[int, str]
) -> Mapping[str, torch.Tensor]:
    """The same for an optimizer, whose slots are as its parameters are, and for anything else."""
    if not sharding.possible():
        return state.tensors
    if isinstance(other, torch.optim.Optimizer):
        parameters = [p for group in other.param_groups for p in group["params"]]
        owners = {f"@{key}/state/{names[id(p)]}": p for p in parameters}
        return _fitted(state, "", {}, owners)
    live: dict[str, torch.Tensor] = {}
    flatten(other.state_dict(), f"@{key}", live)
    return _fitted(state, "", live)


def warm_start(
    modules: Mapping[str, torch.nn.Module],
    others: Mapping[str, Stateful],
    ancestor: State,
    sources: Mapping[str, str],
) -> int:
    """Give optimizers what those of an ancestor had gathered on tensors that were copied from it.

    Without it Adam's first steps have full size whatever the gradient, and undo some of what was
    inherited. Options stay as they are. Nothing is taken over where they differ in more than
    learning rate and weight decay: moments that were averaged otherwise mean something else.

    Args:
        modules: as for `capture`.
        others: as for `capture`; optimizers among them have taken no step.
        ancestor: with or without optimizers.
        sources: name of each tensor that was copied, with the prefix of its module, to its name in
            the ancestor.

    Returns:
        Of how many parameters.
    """
    names = parameter_names(modules)
    number = 0
    for key, other in others.items():
        if isinstance(other, torch.optim.Optimizer) and f"@{key}" in ancestor.meta:
            number += _adopt_slots(other, ancestor, key, names, sources)
    return number


_PLACE = ("last_epoch", "_step_count", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter")
"""How far a scheduler has come, whatever its settings."""


def take_place(ancestor: State, others: Mapping[str, Stateful]) -> None:
    """Go on where an ancestor stands with what is no module, under options of one's own.

    Optimizers keep the options that they were made with, but their rates are as far along a
    schedule as the ancestor's; schedulers go on from its epoch, with settings of their own.

    Args:
        ancestor: with or without its model.
        others: as for `capture`; those of which it has nothing stay as they are. Optimizers have
            what they inherit already (`warm_start`).
    """
    schedulers = []
    for key, other in others.items():
        if f"@{key}" not in ancestor.meta:
            continue
        theirs = unflatten(ancestor.meta[f"@{key}"], ancestor.tensors)
        if isinstance(other, torch.optim.Optimizer):
            _follow_rates(other, theirs["param_groups"])
        elif isinstance(other, torch.optim.lr_scheduler.LRScheduler):
            schedulers.append((other, theirs))
        else:
            other.load_state_dict(restored_as(theirs, other.state_dict()))
    for scheduler, theirs in schedulers:  # once the rates are there
        scheduler.load_state_dict(_at_place(scheduler, theirs))


def _follow_rates(optimizer: torch.optim.Optimizer, theirs: Sequence[Mapping[str, Any]]) -> None:
    """Put the rates of groups where those of the ancestor's groups are, relative to their bases."""
    for own, other in zip(optimizer.param_groups, theirs, strict=False):
        if "initial_lr" in own and other.get("initial_lr"):
            same = own["initial_lr"] == other["initial_lr"]
            share = 1.0 if same else own["initial_lr"] / other["initial_lr"]
            own["lr"] = other["lr"] * share


def _at_place(scheduler: Any, theirs: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """A scheduler's own state, as far along as the ancestor's."""
    found = {**scheduler.state_dict(), **{key: theirs[key] for key in _PLACE if key in theirs}}
    found["_last_lr"] = [group["lr"] for group in scheduler.optimizer.param_groups]
    if "_schedulers" in theirs:
        pairs = zip(getattr(scheduler, "_schedulers", ()), theirs["_schedulers"], strict=False)
        found["_schedulers"] = [_at_place(one, its) for one, its in pairs]
    return found


def _adopt_slots(
    optimizer: torch.optim.Optimizer,
    ancestor: State,
    key: str,
    names: Mapping[int, str],
    sources: Mapping[str, str],
) -> int:
    theirs = ancestor.meta[f"@{key}"]
    groups = unflatten(theirs["param_groups"], ancestor.tensors)
    if isinstance(optimizer, torch.optim.LBFGS):  # its rows have the elements of all parameters
        mine = [sources.get(names[id(p)], "") for p in optimizer.param_groups[0]["params"]]
        if mine != groups[0]["params"]:
            return 0
    ours = optimizer.state_dict()
    number = 0
    for live, packed in zip(optimizer.param_groups, ours["param_groups"], strict=True):
        if any(_averaging(group) != _averaging(packed) for group in groups):
            continue
        for parameter, index in zip(live["params"], packed["params"], strict=True):
            source = sources.get(names[id(parameter)], "")
            slot = theirs["state"].get(source)
            if slot is not None:  # the others' tensors are not read
                tensors = _fitted(ancestor, "", {}, {f"@{key}/state/{source}": parameter})
                ours["state"][index] = _copied(unflatten(slot, tensors), parameter)
                number += 1
    if number:
        renamed = {key: sources.get(name, "") for key, name in names.items()}
        _load(optimizer, ours, renamed, ancestor.tensors)
    return number


def _load(
    optimizer: torch.optim.Optimizer,
    values: dict[str, Any],
    names: Mapping[int, str],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Load its state, of the types that it has there if parameters have theirs.

    Torch gives it the types of parameters: NAdam's product of momenta, a float32 beside weights of
    bfloat16, would be rounded to eight bits, and steps from there on would be others.

    Args:
        optimizer: takes it.
        values: as torch numbers them.
        names: of parameters, among `tensors`.
        tensors: of the State that the values are from.
    """
    optimizer.load_state_dict(values)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return  # it knows how its types are to be
    indices = [index for group in values["param_groups"] for index in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        there = tensors.get(names.get(id(parameter), ""))
        if index in values["state"] and there is not None and there.dtype == parameter.dtype:
            loaded = optimizer.state[parameter]
            loaded.update(_of_types(loaded, values["state"][index]))


def _of_types(loaded: Any, given: Any) -> Any:  # noqa: ANN401 - any part of an optimizer's state
    """What was loaded; in place of tensors that have lost their type, the given ones."""
    if isinstance(loaded, torch.Tensor) and isinstance(given, torch.Tensor):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(given, dict):
        return {key: _of_types(value, given.get(key)) for key, value in loaded.items()}
    if isinstance(loaded, list) and isinstance(given, list) and len(loaded) == len(given):
        return [_of_types(*both) for both in zip(loaded, given, strict=True)]
    return loaded


def _averaging(group: Mapping[str, Any]) -> dict[str, str]:
    """The options of a parameter group that its slots depend on."""
    free = (*BY_PARAMETER, *_HOW, "lr", "initial_lr", "max_lr", "min_lr", "weight_decay")
    return {key: repr(value) for key, value in group.items() if key not in free}


def _copied(slot: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """An optimizer adopts the very tensors of matching dtype that it is given.

    What has an element for each of the parameter's lies in memory as that does: fused kernels go
    through both in the order of memory. A State that has travelled has lost that order.
    """
    return {
        key: _laid_out(value, parameter) if isinstance(value, torch.Tensor) else value
        for key, value in slot.items()
    }


def _laid_out(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if value.shape != parameter.shape or sharding.is_sharded(parameter):
        return value.clone()
    laid = torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False)
    return laid.copy_(value)


def _by_name(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    index_to_name = {}
    groups = []
    for live, packed in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, index in zip(live["params"], packed["params"], strict=True):
            index_to_name[index] = names[id(parameter)]
        groups.append({**packed, "params": [index_to_name[i] for i in packed["params"]]})
    # Under a key of its own an optimizer may keep what belongs to no parameter.
    slots = {index_to_name.get(index, index): slot for index, slot in state["state"].items()}
    return {**state, "state": slots, "param_groups": groups}


def _by_index(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """Number the entries as this optimizer's parameters stand, whatever their order was."""
    index: dict[str, int] = {}
    owners: dict[str, torch.Tensor] = {}
    groups = []
    if len(state["param_groups"]) != len(optimizer.param_groups):
        raise StateError(
            f"the State's optimizer has {len(state['param_groups'])} parameter groups, the one "
            f"here has {len(optimizer.param_groups)}."
        )
    for number, (live, packed) in enumerate(
        zip(optimizer.param_groups, state["param_groups"], strict=True)
    ):
        here = [names[id(parameter)] for parameter in live["params"]]
        if set(here) != set(packed["params"]):
            odd = sorted(set(here) ^ set(packed["params"]))[0]
            raise StateError(
                f"group {number} of the optimizer does not hold the same parameters as in the "
                f"State; the first that differs is {odd!r}."
            )
        index |= {name: len(index) + place for place, name in enumerate(here)}
        owners |= zip(here, live["params"], strict=True)
        how = {key: live[key] for key in _HOW if key in live}
        place = {name: number for number, name in enumerate(packed["params"])}
        lists = {
            key: [packed[key][place[n]] for n in here] for key in BY_PARAMETER if key in packed
        }
        groups.append({**packed, **how, **lists, "params": [index[name] for name in here]})
    slots = {
        index.get(name, name): _copied(slot, owners[name]) if name in owners else slot
        for name, slot in state["state"].items()
    }
    if isinstance(optimizer, torch.optim.LBFGS):
        slots = _rows_in_order(optimizer, state, names) or slots
    return {**state, "state": slots, "param_groups": groups}


def _rows_in_order(
    optimizer: torch.optim.LBFGS, state: dict[str, Any], names: Mapping[int, str]
) -> dict[int, Any]:
    """The slots of an LBFGS whose parameters come in another order; none if it is the same.

    What it has gathered stands under the first of them, in rows with the elements of all of them.
    """
    here = {names[id(p)]: p for p in optimizer.param_groups[0]["params"]}
    before = state["param_groups"][0]["params"]
    if before == [*here] or before[0] not in state["state"]:
        return {}
    if any(map(sharding.is_sharded, here.values())):
        raise StateError("a sharded LBFGS has its parameters in another order than in the State.")
    sizes = [here[name].numel() * (1 + here[name].is_complex()) for name in before]

    def ordered(value: Any) -> Any:  # noqa: ANN401 - any part of its state
        if isinstance(value, list):
            return [ordered(one) for one in value]
        if not isinstance(value, torch.Tensor) or value.shape != (sum(sizes),):
            return value.clone() if isinstance(value, torch.Tensor) else value
        parts = dict(zip(before, value.split(sizes), strict=True))
        return torch.cat([parts[name] for name in here])

    return {0: {key: ordered(value) for key, value in state["state"][before[0]].items()}}
