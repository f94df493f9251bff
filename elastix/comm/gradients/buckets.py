"""The buckets of a model: which tensors go into which, and in what order."""

from collections.abc import Iterable, Sequence

import torch

from elastix.comm.gradients.bucket import Bucket
from elastix.comm.gradients.buffer_bucket import WIDER, BufferBucket
from elastix.comm.gradients.gradient_bucket import COUNTS, GradientBucket
from elastix.comm.network import shared_memory
from elastix.comm.network.process_group import Reduce
from elastix.errors import ConfigError
from elastix.sharding import local

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that reducing starts early."""

BUCKET_BYTES = 25 << 20
"""A bucket is closed when it holds so many bytes of gradients."""

_REDUCED = (
    *COUNTS,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
"""What backends can add up, or take the maximum of."""


def build_buckets(
    modules: Sequence[torch.nn.Module], wire: torch.dtype | None = None
) -> list[Bucket]:
    """Buckets for everything that replicas must agree on.

    Gradients in reverse order of parameters, a small first bucket so that reducing starts early,
    25 MiB each after it; then buffers. One bucket counts.

    Args:
        modules: whose parameters and buffers.
        wire: what gradients of float32 and float64 travel as, except for `keep_whole`; None: as
            they are.

    Raises:
        ConfigError: a tensor is of a type that no backend reduces; names it.
    """
    _check_types(modules)
    groups = _parameter_groups(modules)
    buckets: list[Bucket] = [
        GradientBucket(group, None if travels_whole(group[0]) else wire) for group in groups
    ]
    buckets += [BufferBucket(places, how) for how, places in _buffer_groups(modules)]
    counter = next((b for b in buckets if b.reduce == "sum" and b.dtype in COUNTS), None)
    if counter is None:
        counter = Bucket([], "sum", torch.float32)
        buckets.insert(0, counter)
    counter.counts = True
    for bucket in buckets:
        bucket.shared = shared_memory.available() and len(buckets) <= shared_memory.MOST
        bucket.renew()
        if isinstance(bucket, BufferBucket):
            bucket.rebase()
    return buckets


def keep_whole(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter, whose gradient always travels in its own type: it tells numbers that count."""
    parameter.travels_whole = True  # type: ignore[attr-defined]
    return parameter


def travels_whole(parameter: torch.nn.Parameter) -> bool:
    """Whether `keep_whole` was said of it."""
    return getattr(parameter, "travels_whole", False)


def _check_types(modules: Sequence[torch.nn.Module]) -> None:
    for module in modules:
        named: list[tuple[str, torch.Tensor, torch.dtype]] = [
            *((name, p, p.dtype) for name, p in module.named_parameters() if p.requires_grad),
            *((name, b, WIDER.get(b.dtype, b.dtype)) for name, b in module.named_buffers()),
        ]
        for name, tensor, dtype in named:
            if dtype not in _REDUCED or tensor.layout != torch.strided:
                raise ConfigError(
                    f"{name} of the prepared {type(module).__name__} is {tensor.dtype}, "
                    f"{tensor.layout}, which no backend can average over workers. Nothing was "
                    "prepared. Keep it in another type; a constant need not be a buffer."
                )
        for name, parameter in module.named_parameters():
            wanted = getattr(parameter, "grad_dtype", None)  # None: of any type
            if parameter.requires_grad and wanted not in (None, parameter.dtype):
                raise ConfigError(
                    f"{name} of the prepared {type(module).__name__} is {parameter.dtype}, and its "
                    f"grad_dtype {wanted}; the average over workers has the parameter's type. "
                    "Nothing was prepared. Leave grad_dtype as it is."
                )


def _parameter_groups(modules: Sequence[torch.nn.Module]) -> list[list[torch.nn.Parameter]]:
    wanted = (p for module in modules for p in module.parameters() if p.requires_grad)
    parameters = list({id(p): p for p in wanted}.values())
    groups: list[list[torch.nn.Parameter]] = []
    open_groups: dict[tuple[object, ...], tuple[list[torch.nn.Parameter], int]] = {}
    cap = FIRST_BUCKET_BYTES
    for parameter in reversed(parameters):
        key = (parameter.dtype, parameter.device, travels_whole(parameter))
        group, size = open_groups.get(key, ([], 0))
        if not group:
            groups.append(group)
        group.append(parameter)
        size += local(parameter).nbytes
        if size >= cap:
            cap = BUCKET_BYTES
            open_groups.pop(key, None)
        else:
            open_groups[key] = (group, size)
    return groups


def _buffer_groups(
    modules: Sequence[torch.nn.Module],
) -> Iterable[tuple[Reduce, list[tuple[torch.nn.Module, str]]]]:
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[torch.nn.Module, str]]] = {}
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    groups.setdefault((buffer.dtype, buffer.device), []).append((module, name))
    for (dtype, _), places in groups.items():
        yield ("sum" if dtype.is_floating_point or dtype.is_complex else "max"), places
