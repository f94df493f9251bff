"""What of a sharded model cannot work on a mesh, and a mesh for finding that out beforehand.

`pretended` makes a mesh in which this process is the only one: all that others would send is
missing, and shapes are right. So what torch and elastix refuse is known before workers start, and
what one place holds and computes can be counted (cost.trace).

Not here: the mesh of a crew (comm), or which part of a tensor is where (sharding).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

from elastix.config import check_torch
from elastix.errors import ConfigError
from elastix.lazy_import import later
from elastix.sharding import fsdp_groups, is_sharded

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
else:
    torch = later("torch")

AXES = ("shard", "tensor", "pipe")
"""shard splits samples, parameters, gradients and an optimizer's slots; tensor splits layers; pipe
splits the model between layers."""


def parsed(text: str) -> dict[str, int]:
    """A mesh as the command line has it: `shard=4,tensor=2`.

    Raises:
        ConfigError: it is none.
    """
    mesh: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = entry.strip().partition("=")
        if axis not in AXES or axis in mesh or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"a mesh is axes with their sizes, as in shard=4,tensor=2, each of {AXES} at most "
                f"once and with 1 or more; {entry!r} of {text!r} is not. Nothing was done."
            )
        mesh[axis] = int(size)
    return mesh


@contextmanager
def pretended(axes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """A mesh at whose first place this process is, and nobody at the others.

    Args:
        axes: names and sizes, the outermost first.

    Raises:
        ConfigError: this process is part of a world already, or torch is too old.
    """
    check_torch()
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake"

    if distributed.is_initialized():
        raise ConfigError(
            "this process is part of a torch.distributed world already, and a mesh cannot be tried "
            "in it. Nothing was done. Try it in a process of its own."
        )
    size = prod(axes.values())
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        distributed.destroy_process_group()


def places_of(given: Sequence[Any]) -> int:
    """How many places take part in a collective that was given these arguments, as torch has it."""
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.distributed import ProcessGroup

    names: list[Any] = [leaf for leaf in given if isinstance(leaf, str)]  # after the operation's
    if names:
        return int(_resolve_process_group(names[-1]).size())
    boxed = next(leaf for leaf in given if isinstance(leaf, torch.ScriptObject))
    return int(ProcessGroup.unbox(boxed).size())


def check(modules: Mapping[str, torch.nn.Module], mesh: DeviceMesh) -> None:
    """Refuse sharded models whose gradients would be wrong, or that torch will refuse in training.

    Args:
        modules: prefix to module, as for state.capture.
        mesh: that of the crew.

    Raises:
        ConfigError: names the parameter, the buffer or the layer.
    """
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True))
    for prefix, module in modules.items():
        for name, buffer in module.named_buffers():
            if is_sharded(buffer):
                raise _buffer_on_mesh(prefix + name)
        for name, parameter in module.named_parameters():
            if sizes.get("tensor", 1) > 1:
                _check_even(prefix + name, parameter, sizes["tensor"])
        if sizes.get("shard", 1) > 1:
            on_shard = _on_shard(module)
            for name, parameter in module.named_parameters():
                if parameter.requires_grad and id(parameter) not in on_shard:
                    raise _not_on_shard(prefix + name)
            for name, layer in module.named_modules():
                _check_statistics(prefix + name, layer)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that torch cannot run on these parameters.

    Raises:
        ConfigError: they are parts, or not all of them alike, and it would need them whole.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded: list[Any] = [p for p in parameters if is_sharded(p)]
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adafactor) and sharded:
        raise ConfigError(
            f"{name} takes norms of rows and columns in place, which torch cannot do where "
            "processes hold parts of them. Nothing was prepared. Use AdamW or SGD, or workers of "
            "one process."
        )
    if isinstance(optimizer, torch.optim.Rprop) and sharded:
        raise ConfigError(
            f"{name} puts zeros where a gradient has changed its sign, in place, which torch "
            "cannot do where processes hold parts of it. Nothing was prepared. Use AdamW or SGD, "
            "or workers of one process."
        )
    if not isinstance(optimizer, torch.optim.LBFGS) or not sharded:
        return
    alike = len(sharded) == len(parameters) and len({p.device_mesh for p in sharded}) == 1
    if not alike or not all(map(_in_even_parts, sharded)):
        raise ConfigError(
            f"{name} makes one long vector of all parameters, which torch can do only if all of "
            "them are sharded over one mesh whose places divide them evenly. Nothing was prepared. "
            "Use crew={'shard': n} with sizes that n divides and fully_shard for the whole model, "
            "another optimizer, or workers of one process."
        )


def check_scaling(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a GradScaler for an optimizer whose gradients torch cannot unscale together.

    Raises:
        ConfigError: it steps parts and whole tensors.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len({is_sharded(p) for p in parameters}) > 1:
        raise ConfigError(
            "a GradScaler unscales all gradients of an optimizer in one operation, which torch "
            "can do only if the mesh holds all of them in parts or none; of these parameters some "
            "are whole. Nothing was prepared. Use float32 or bfloat16 without a GradScaler, or "
            "give the parameters that are whole to an optimizer of their own."
        )


def _in_even_parts(parameter: Any) -> bool:  # noqa: ANN401 - a DTensor
    placed = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return all(p.dim is None or not parameter.shape[p.dim] % n for p, n in placed if p.is_shard())


def take_sums(module: torch.nn.Module) -> None:
    """From now on gradients that come as terms of a sum over places are summed, in backward.

    Those of SequenceParallel's layers do: each place has seen other positions. FSDP2 sums what it
    shards; of what nobody shards nobody does.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and is_sharded(parameter):
            parameter.register_hook(_summed)


def _summed(gradient: Any) -> Any:  # noqa: ANN401 - of a DTensor
    if not any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        return None
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=whole)


def _on_shard(module: torch.nn.Module) -> set[int]:
    """By id, the parameters whose gradients FSDP2 adds up over the axis 'shard', and nowhere else.

    A placement does not tell: over a mesh of two axes FSDP2 adds up over both, and tensor parallel
    over 'shard' takes the samples of its places for the same.
    """
    return {
        id(one.sharded_param)
        for group in fsdp_groups([module])
        if group.mesh_info.mesh.mesh_dim_names == ("shard",)
        for one in group.fsdp_params
    }


def _not_on_shard(name: str) -> ConfigError:
    return ConfigError(
        f"parameter {name!r} is not sharded by fully_shard over the axis 'shard' alone, so its "
        "gradient would not be the mean over the samples of all places. Nothing was prepared. Wrap "
        "the whole model, after its layers: fully_shard(model, mesh=ctx.mesh['shard'])."
    )


def _buffer_on_mesh(name: str) -> ConfigError:
    return ConfigError(
        f"buffer {name!r} is a DTensor, as distribute_tensor and distribute_module make them, and "
        "buffers are averaged whole. Nothing was prepared. Keep it as a plain tensor, which all "
        "places have alike: register it after distribute_module."
    )


def _check_even(name: str, parameter: torch.Tensor, places: int) -> None:
    for axis, placement in _axes_of(parameter).items():
        dim = getattr(placement, "dim", None)
        if axis == "tensor" and dim is not None and parameter.shape[dim] % places:
            raise ConfigError(
                f"parameter {name!r} is {tuple(parameter.shape)}, and {places} places of the axis "
                f"'tensor' do not divide its axis {dim} evenly; torch computes with even parts "
                "alone. Nothing was prepared. Choose another width, or leave this layer out of "
                "the plan of parallelize_module."
            )


def _check_statistics(name: str, layer: torch.nn.Module) -> None:
    norms = torch.nn.modules.batchnorm
    of_batch = isinstance(layer, norms._BatchNorm) and not isinstance(layer, torch.nn.SyncBatchNorm)
    of_each = isinstance(layer, torch.nn.modules.instancenorm._InstanceNorm)
    if of_batch or (of_each and layer.track_running_stats):
        raise ConfigError(
            f"{name!r} is a {type(layer).__name__}: the places of the axis 'shard' see other "
            "samples each, so its statistics would differ between them. Nothing was prepared. "
            "Use SyncBatchNorm, LayerNorm or GroupNorm, or InstanceNorm without running statistics."
        )


def check_stages(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuse layers of a pipeline whose running statistics torch would spoil.

    A schedule runs its stage once more at its first use, on memory that was never written.

    Raises:
        ConfigError: such a layer is in training mode.
    """
    for prefix, module in modules.items():
        for name, layer in module.named_modules():
            if layer.training and getattr(layer, "running_mean", None) is not None:
                raise ConfigError(
                    f"{prefix + name!r} is a {type(layer).__name__} with running statistics, and "
                    "crew has an axis 'pipe': torch runs a stage once on unwritten memory when it "
                    "uses a schedule for the first time, which may make them infinite. Nothing was "
                    "prepared. Use LayerNorm or GroupNorm, track_running_stats=False, or put the "
                    "layer into eval mode before ctx.prepare."
                )


def trained_names(modules: Mapping[str, torch.nn.Module]) -> list[str]:
    """Of the parameters that require a gradient, as a State has them."""
    return [
        prefix + name
        for prefix, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]


def check_layers(trained: Iterable[tuple[int, Iterable[str]]]) -> None:
    """Refuse stages that train the same layers.

    Args:
        trained: stages, and the names of what each trains; a stage may come several times.

    Raises:
        ConfigError: a parameter is trained at several of them.
    """
    stages: dict[str, set[int]] = {}
    for stage, names in trained:
        for name in names:
            stages.setdefault(name, set()).add(stage)
    for name, found in stages.items():
        if len(found) > 1:
            raise _stages_share(name, sorted(found))


def _stages_share(name: str, places: Sequence[int]) -> ConfigError:
    at = " and ".join(map(str, places))
    return ConfigError(
        f"parameter {name!r} is trained at places {at} of the axis 'pipe'. Nothing was prepared. A "
        "stage holds layers of its own, under the names that they have in the whole model; weights "
        "that two stages share (tied embeddings) are not supported. Build the whole model, and "
        "replace the layers of other stages by torch.nn.Identity()."
    )


def _axes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The axes of the mesh that a parameter is placed on, with how it is."""
    if not is_sharded(parameter):
        return {}
    sharded: Any = parameter
    names = sharded.device_mesh.mesh_dim_names or ()
    return dict(zip(names, sharded.placements, strict=True))
