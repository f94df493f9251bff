"""Counts what a training step does and holds, on fake tensors: shapes without memory.

Two steps are traced and the second counts, since the first makes the optimizer's state. What the
reducer keeps is modelled as it is: flat buckets as large as the gradients, and the local
gradients of a step until the backward of the next has begun.

Source: torch.utils.flop_counter for the FLOPs of each operator; a multiply-add counts as two.
"""

import copy
import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from elastix.cost.convolutions import copied_bytes
from elastix.cost.heap import Block, Heap
from elastix.cost.recurrent import kept_bytes, layer_backward_flops, layer_flops, used_bytes
from elastix.errors import ConfigError, ElastixError
from elastix.mesh_check import check, places_of, pretended
from elastix.sharding import is_sharded, local

if TYPE_CHECKING:
    from elastix.mesh_check import DeviceMesh

logger = logging.getLogger(__name__)

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}

_ATEN = torch.ops.aten
_told: set[str] = set()
_COMPLEX = 4  # multiply-adds of real numbers in one of complex ones
_CONVOLUTIONS = (_ATEN.convolution, _ATEN.convolution_backward)
_LOOKS = DataDependentOutputException, DynamicOutputShapeException
_COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")
_SENT: dict[tuple[str, ...], int] = {
    ("reduce_scatter", "allgather", "all_gather_into", "all_to_all"): 1,
    ("reduce",): 2,
}
"""By words in the name of a collective, how often what it is about goes through each member."""
_FORMULAS: dict[Any, Any] = {
    **flop_registry,  # which lacks the attention of CPUs; it computes what that of GPUs does
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _ATEN._scaled_dot_product_flash_attention
    ],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
    _ATEN.mkldnn_rnn_layer: layer_flops,
    _ATEN.mkldnn_rnn_layer_backward: layer_backward_flops,
}
# What torch has no formula for, as models seldom have it.
_FORMULAS |= {
    _ATEN.mv: lambda matrix, *_, **__: 2 * matrix.numel(),
    _ATEN.addmv: lambda _, matrix, *__, **___: 2 * matrix.numel(),
    _ATEN.dot: lambda one, *_, **__: 2 * one.numel(),
    _ATEN._cdist_forward: lambda one, *_, out_val, **__: 3 * out_val.numel() * one.shape[-1],
    _ATEN._cdist_backward: lambda grad, one, *_, **__: 3 * grad.numel() * one.shape[-1],
    _ATEN._euclidean_dist: lambda one, *_, out_val, **__: 2 * out_val.numel() * one.shape[-1],
    _ATEN._trilinear: lambda *given, **_: _trilinear_flops(*given),
}
_KNOWN = ("aten", "prim", "prims", "profiler", "mkldnn", *_COLLECTIVES)
"""Libraries of operators that compute nothing to speak of where there is no formula for them."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one training step of one worker costs, for the batch that was traced.

    Of a worker that is a crew: at one place of its mesh, but for the number of parameters.

    Attributes:
        parameters: how many, shared ones once.
        forward_flops, step_flops: of the forward pass; of forward, backward and optimizer.
        model_bytes: parameters and buffers.
        gradients_bytes: local gradients; elastix's buckets hold as much again.
        batch_bytes: inputs.
        peak_bytes: the most that is alive at once.
        operators: (FLOPs, bytes read and written) of an operator to how often it ran.
        sent_bytes: what one place sends to others of its worker, in a step, at least.
        pass_operators: those of forward and backward, as `operators`.
        sums: of slices, that an exact run keeps beside the buckets, each as large as these.
        holes_bytes: what malloc's heap has beyond the peak, and nothing fits into; on CPUs alone.
    """

    parameters: int
    forward_flops: int
    step_flops: int
    model_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    peak_bytes: int
    operators: Mapping[tuple[int, int], int]
    sent_bytes: int = 0
    pass_operators: Mapping[tuple[int, int], int] = field(default_factory=dict)
    sums: int = 0
    holes_bytes: int = 0

    @property
    def buckets_bytes(self) -> int:
        """Flat copies of the gradients, which are reduced, and sums of slices."""
        return self.gradients_bytes * (1 + self.sums)

    @property
    def activations_bytes(self) -> int:
        """What the peak has beyond model, gradients, buckets, optimizer and batch."""
        held = self.model_bytes + self.gradients_bytes + self.buckets_bytes
        return max(0, self.peak_bytes - held - self.optimizer_bytes - self.batch_bytes)

    def roofline_s(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Seconds of a step if every operator ran at the device's limit: arithmetic or memory.

        Source: Williams et al., "Roofline: an insightful visual performance model", CACM 2009.
        """
        return sum(
            often * max(flops / flops_per_s, moved / bytes_per_s)
            for (flops, moved), often in self.operators.items()
        )


def trace(
    build: Callable[[], torch.nn.Module],
    inputs: Callable[[], Sequence[torch.Tensor]],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str = "adamw",
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    foreach: bool = True,
    mesh: Mapping[str, int] | None = None,
    parallelize: Callable[[torch.nn.Module, Any], object] | None = None,
) -> Cost:
    """Count a training step. No memory is taken and nothing is computed.

    Args:
        build: makes the model, under a mode in which tensors have no data.
        inputs: makes the batch of one worker, or of one place of its mesh, for `model(*inputs)`.
        loss: of the model's output to one number; by default the mean square of all outputs.
        optimizer: adam, adamw or sgd (with momentum).
        dtype: torch's default while the model is built.
        autocast: run the forward pass under torch.autocast with this dtype.
        foreach: the optimizer works on all parameters at once, as torch's do on GPUs; not on CPUs.
        mesh: axes and sizes, if a worker is a crew.
        parallelize: shards the model on a mesh, as in the train function; given with `mesh`.

    Raises:
        ConfigError: the model cannot be made, or traced: it looks at values, or its shapes do not
            fit; or it cannot be sharded on that mesh.
    """
    if optimizer not in OPTIMIZERS:
        raise ConfigError(
            f"the optimizer is one of {sorted(OPTIMIZERS)}, not {optimizer!r}. Nothing was "
            "estimated."
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    told = logging.getLogger("torch._subclasses.fake_tensor")
    told.disabled = True  # it logs the traceback of what is an error of the caller's here
    shapes = Shapes()
    try:
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.filterwarnings("ignore", message="Accessing the data pointer")  # of copies
            with shapes:
                model = made(build)
            if mesh and parallelize is not None:
                _shard(model, stack.enter_context(pretended(mesh)), parallelize)
            with shapes:
                return _trace(model, inputs, loss or _mean_square, optimizer, autocast, foreach)
    except _LOOKS as error:
        raise ConfigError(
            f"the model looks at values of tensors ({error.func}), and an estimate has only their "
            "shapes. Nothing was estimated. Leave the branch out for the estimate."
        ) from error
    except ElastixError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model does not run on such a batch: {_said(error)}. Nothing was "
            "estimated. Give the shape of one sample without the batch, and its dtype."
        ) from error
    finally:
        told.disabled = False
        torch.set_default_dtype(before)


def made(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """What it makes, in a mode without data; a copy without, if it has data.

    Raises:
        ConfigError: it makes none.
    """
    try:
        model = build()
    except (*_LOOKS, ElastixError):
        raise
    except Exception as error:
        raise ConfigError(
            f"the model cannot be made: {_said(error)}. Nothing was estimated."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"what makes the model gave a {type(model).__name__}, which is no torch.nn.Module. "
            "Nothing was estimated."
        )
    if all(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers())):
        return model
    # What was made before has data, which the steps would change.
    known = {id(buffer): buffer.clone() for buffer in model.buffers()}
    return copy.deepcopy(model, known)


def _said(error: Exception) -> str:
    """On one line, without torch's own lines, which follow."""
    why = str(error).partition("\nException raised from")[0]
    return f"{type(error).__name__}: {why.rstrip('.')}"


def _shard(
    model: torch.nn.Module,
    mesh: "DeviceMesh",
    parallelize: Callable[[torch.nn.Module, Any], object],
) -> None:
    """As the train function will do it; outside of the mode, in which a mesh cannot be sliced."""
    try:
        parallelize(model, mesh)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be sharded on this mesh: {_said(error)}. Nothing was estimated."
        ) from error
    check({"": model}, mesh)


def _trace(
    model: torch.nn.Module,
    inputs: Callable[[], Sequence[torch.Tensor]],
    loss: Callable[[Any], torch.Tensor],
    optimizer: str,
    autocast: torch.dtype | None,
    foreach: bool,
) -> Cost:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            "the model has no parameter that requires a gradient. Nothing was estimated."
        )
    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "sgd" else {}
    mixed_kinds = len({is_sharded(p) for p in parameters}) > 1  # which torch does not take at once
    options["foreach"] = foreach and not mixed_kinds
    stepper = OPTIMIZERS[optimizer](parameters, lr=0.1, **options)  # type: ignore[call-arg]
    meter = _Meter()
    for tensor in (*model.parameters(), *model.buffers()):
        meter.hold(local(tensor))
    model_bytes = meter.alive
    buckets = [torch.empty_like(local(p)) for p in parameters]
    for bucket in buckets:
        meter.hold(bucket)
    spent: list[torch.Tensor | None] = []

    def accumulated(parameter: torch.Tensor) -> None:
        spent.clear()
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()  # as the average of a group is

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(accumulated)
    mixed: AbstractContextManager[Any] = (
        torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
    )
    with meter:
        for _ in range(2):
            meter.begin()
            batch = _batch(inputs)
            with mixed:
                result = loss(model(*batch))
            forward_flops = meter.flops
            result.backward()
            batch_bytes = sum(_size(tensor) for tensor in _tensors(batch))
            del result, batch
            gradients_bytes = sum(_size(p.grad) for p in parameters if p.grad is not None)
            passes = dict(meter.operators)
            stepper.step()
            spent.extend(p.grad for p in parameters)
            stepper.zero_grad()
    if fresh := sorted(meter.unknown - _told):  # once each: a gate asks for each configuration
        _told.update(fresh)
        logger.warning(
            "the estimate has no FLOPs of %s, which are of no library that it knows.",
            ", ".join(fresh),
        )
    return Cost(
        parameters=sum(p.numel() for p in model.parameters()),
        forward_flops=forward_flops,
        step_flops=meter.flops,
        model_bytes=model_bytes,
        gradients_bytes=gradients_bytes,
        optimizer_bytes=sum(_size(state) for state in _tensors(dict(stepper.state))),
        batch_bytes=batch_bytes,
        peak_bytes=meter.peak,
        operators=dict(meter.operators),
        sent_bytes=round(meter.sent),
        pass_operators=passes,
        holes_bytes=max(0, meter.heap.peak - meter.peak),
    )


def _batch(inputs: Callable[[], Sequence[Any]]) -> tuple[Any, ...]:
    batch = inputs()
    if isinstance(batch, torch.Tensor | Mapping):
        raise ConfigError(
            f"inputs gave a {type(batch).__name__}, of which model(*inputs) would take the parts. "
            "Nothing was estimated. Give a tuple of what the model takes: (batch,)."
        )
    return tuple(batch)


class Shapes(FakeTensorMode):
    """Tensors without data, also those of layers that are made as copies of others.

    They can change their type, device or format: `module.to` exchanges tensors, which torch refuses
    while anybody has a weak reference, as the converter has of whatever it makes.
    """

    def __init__(self) -> None:
        # Tensors with data may be torch's own, of meshes, or what a module has made when imported.
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Forgetful()

    def __deepcopy__(self, memo: object) -> "Shapes":
        return self


class _Forgetful(FakeTensorConverter):
    """Keeps no reference of what an operator gives. Of real tensors it does."""

    def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor) -> None:
        """See FakeTensorConverter. What an operator gives is never looked up again."""


class _Meter(TorchDispatchMode):
    """Sees every operator: what it computes, what it moves, and which memory lives how long.

    Attributes:
        alive, peak: bytes of the storages that exist, now and at most.
        flops, sent: since `begin`.
        heap: where they would be.
        unknown: operators of which nobody says what they compute.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = 0
        self.heap = Heap()
        self.unknown: set[str] = set()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._blocks: dict[int, Block] = {}
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.peak = self.alive
        self.flops = 0
        self.sent = 0.0
        self.operators: Counter[tuple[int, int]] = Counter()

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once, until it is gone. Sparse ones have none of their own."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def gone(_ref: object) -> None:
            self.alive -= self._sizes.pop(key)
            self.heap.give(self._blocks.pop(key))
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, gone)
        self._sizes[key] = size
        self._blocks[key] = self.heap.take(size)
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _use(self, size: int) -> None:
        """An operator has had so many bytes beside what it read and has written."""
        self.peak = max(self.peak, self.alive + size)
        self.heap.give(self.heap.take(size))

    def _look_again(self) -> None:
        """FSDP2 gathers parameters into storages that it keeps, and empties them after use."""
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is not None and (size := storage.nbytes()) != self._sizes[key]:
                self.alive += size - self._sizes[key]
                self._sizes[key] = size
                self.heap.give(self._blocks[key])
                self._blocks[key] = self.heap.take(size)
        self.peak = max(self.peak, self.alive)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if any(is_sharded(leaf) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented  # it comes back as what this place computes
        read = _tensors((args, kwargs))
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket is _ATEN.mkldnn_rnn_layer and torch.is_grad_enabled():
            out = (*out[:3], out[3].new_empty(kept_bytes(args[0], out[0])))  # torch says: nothing
        written = _tensors(out)
        if func.namespace in _COLLECTIVES:
            self._look_again()
            self.sent += _sent(str(func), tree_leaves((args, kwargs, out)))
        for tensor in written:
            self.hold(tensor)
        flops = 0
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            flops = int(formula(*args, **(kwargs or {}), out_val=out))
            if any(tensor.is_complex() for tensor in read):
                flops *= _COMPLEX
        elif func.namespace not in _KNOWN:
            self.unknown.add(str(func._overloadpacket))
        self.flops += flops
        if func._overloadpacket in _CONVOLUTIONS:
            self._use(copied_bytes(args, out))
        elif func._overloadpacket is _ATEN.mkldnn_rnn_layer_backward:
            self._use(used_bytes(args[0], args[7]))  # what it was given, and its result
        if not func.is_view:
            self.operators[flops, sum(_size(tensor) for tensor in (*read, *written))] += 1
        return out


def _trilinear_flops(
    one: torch.Tensor,
    two: torch.Tensor,
    three: torch.Tensor,
    *expanded: Sequence[int],
    **_: Any,  # noqa: ANN401
) -> int:
    """Of `Bilinear`: a product of three numbers, and a sum, for each place of all dimensions."""
    factors = [one, two, three]
    for place, dims in enumerate(expanded[:3]):
        for dim in sorted(dims):
            factors[place] = factors[place].unsqueeze(dim)
    places: int = torch.broadcast_shapes(*(factor.shape for factor in factors)).numel()
    return 3 * places


def _sent(name: str, given: Sequence[Any]) -> float:
    """Bytes that one member of a group sends in a collective: no algorithm sends less.

    Source: Chan et al., "Collective communication: theory, practice, and experience", 2007.
    """
    often = next((n for words, n in _SENT.items() if any(word in name for word in words)), 0)
    if not often:
        return 0.0
    whole = max(_size(leaf) for leaf in given if isinstance(leaf, torch.Tensor))
    size = places_of(given)
    return often * whole * (size - 1) / size


def _tensors(of: Any) -> list[torch.Tensor]:  # noqa: ANN401 - whatever is given or comes out
    return [leaf for leaf in tree_leaves(of) if isinstance(leaf, torch.Tensor)]


def _size(tensor: torch.Tensor) -> int:
    tensor = local(tensor)
    return tensor.numel() * tensor.element_size()


def _mean_square(output: Any) -> torch.Tensor:  # noqa: ANN401 - whatever the model gives
    parts = [leaf.float().square().mean() for leaf in _tensors(output) if leaf.requires_grad]
    if not parts:
        raise ConfigError(
            "the model's output does not depend on its parameters. Nothing was estimated."
        )
    return torch.stack(parts).sum()
