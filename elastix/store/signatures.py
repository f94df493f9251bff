"""The signature of a torch module: which layers, of which shapes, in which order, after what.

A layer is a leaf module that has tensors, or a parameter that a module uses by itself. What has
no tensors (activations, additions, reshapes) is no layer of its own, but part of what the next
one's input went through. Not here: comparing signatures (lineage.py).

Three ways, the first that works: torch.fx traces the module without running it; a sample input
runs through it while every function is watched; the order of its modules is taken for a chain.
Models are only comparable by prefix if their signatures were taken in the same way.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from elastix.errors import StateError
from elastix.store.lineage import Layer, Signature, digest64

_Tensors = tuple[tuple[str, tuple[int, ...]], ...]
_SYMMETRIC = frozenset({"add", "iadd", "mul", "imul", "maximum", "minimum", "logical_or"})


def signature(module: nn.Module, example: Any = None) -> Signature:  # noqa: ANN401 - any input
    """The signature of `module`.

    Args:
        module: any module; it is left as it is.
        example: an input, or a tuple of them, for modules that torch.fx cannot trace.

    Returns:
        Its layers in the order in which they first run; layers that never run come last, in the
        order of `named_modules`.
    """
    graph = _Graph(module)
    inputs = example if isinstance(example, tuple) else (example,)
    traced = _from_fx(module, graph) or (example is not None and _from_run(module, graph, inputs))
    if not traced:
        graph.clear()
    last = 0
    for name, part in graph.parts.items():
        if name not in graph.found:  # in the order of modules: a chain
            last = graph.enter(name, part, [last])
    return Signature(tuple(graph.found.values()))


class _Graph:
    """Layers found so far, each under its name, once."""

    def __init__(self, module: nn.Module) -> None:
        self._described: dict[int, tuple[str, _Tensors]] = {}
        self.parts = {name: part for name, part in _parts(module) if self._describe(name, part)[1]}
        self.names = {id(part): name for name, part in reversed(self.parts.items())}
        self.found: dict[str, Layer] = {}

    def clear(self) -> None:
        self.found.clear()

    def enter(self, name: str, part: nn.Module | torch.Tensor, inputs: Iterable[int]) -> int:
        """Enter a layer if it is new; the Merkle id of what comes out of it."""
        kind, tensors = self._describe(name, part)
        path = digest64(kind, tensors, list(inputs))
        if tensors and name not in self.found:
            self.found[name] = Layer(name, kind, tensors, path)
        return path

    def _describe(self, name: str, part: nn.Module | torch.Tensor) -> tuple[str, _Tensors]:
        known = self._described.get(id(part))
        if known is None:
            known = self._described[id(part)] = _describe(name, part)
        return known


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module | torch.Tensor]]:
    for name, part in module.named_modules():
        if _is_leaf(part):
            yield name, part
        else:
            yield from part.named_parameters(name, recurse=False)
            yield from (
                (where, buffer)
                for where, buffer in part.named_buffers(name, recurse=False)
                if where.rpartition(".")[2] not in part._non_persistent_buffers_set
            )


def _is_leaf(module: nn.Module) -> bool:
    """A module of torch's own that is more than a container, or one without children."""
    own = type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return (own or not any(True for _ in module.children())) and not isinstance(module, containers)


def _describe(name: str, part: nn.Module | torch.Tensor) -> tuple[str, _Tensors]:
    if isinstance(part, torch.Tensor):  # its own name is all that tells a scale from a shift
        return f"Tensor {name.rpartition('.')[2]}", (("", tuple(part.shape)),)
    tensors = tuple(
        (name, tuple(tensor.shape))
        for name, tensor in part.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    )
    inner = [f"{name}:{_kind(child)}" for name, child in part.named_modules() if name]
    return " ".join([_kind(part), *inner]), tensors


def _kind(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


# ------------------------------------------------------------------------------------ torch.fx


class _Tracer(fx.Tracer):
    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - whatever the module returns
        """As fx does it, but without its record of where each call stands."""
        if _is_leaf(m):
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)
        return forward(*args, **kwargs)


def _trace(module: nn.Module, wrapped: tuple[ModuleType, ...]) -> fx.Graph | None:
    try:
        tracer = _Tracer(autowrap_modules=wrapped)  # type: ignore[arg-type]
        return tracer.trace(_stand_in(module))
    except Exception:  # noqa: BLE001 - the border to arbitrary user code, which may do anything
        return None


def _stand_in(module: nn.Module) -> nn.Module:
    """A copy for a trace, which runs whatever of a forward pass does not come from its inputs.

    So counts, averages and lists that a forward pass changes are not those of the module.
    Parameters have no memory in the copy; other tensors that it holds may be large, and are shared.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    parts = [*module.modules()]
    for part in parts:
        memo |= {id(each): each for each in vars(part).values() if isinstance(each, torch.Tensor)}
        plain = [held for held in vars(part).values() if isinstance(held, dict | list | tuple)]
        within = (each for each in _tensors(plain) if not each.is_leaf)
        memo |= {id(each): each for each in within}  # computed, and there are no copies of it
        memo |= {id(b): b.detach().clone() for b in part._buffers.values() if b is not None}
        if _is_leaf(part) and not part._modules:  # never looked into; deepcopy takes ten times that
            memo[id(part)] = twin = copy.copy(part)
            twin._parameters = {n: memo.get(id(p)) for n, p in part._parameters.items()}
            twin._buffers = {n: memo.get(id(b)) for n, b in part._buffers.items()}
    for part in reversed(parts):  # what a module is made of comes before it
        if id(part) not in memo:
            _copy_each([each for name, each in vars(part).items() if name != "_modules"], memo)
            copy.deepcopy(part, memo)
    stand_in: nn.Module = memo[id(module)]
    return stand_in


def _copy_each(values: list[Any], memo: dict[int, Any]) -> None:
    """Copy what can be copied; of the rest a shell, or itself if there is none, as of a lock.

    A trained model may hold what its last pass has computed, with all that this came from: such
    tensors have no copies. Its children, which are fresh, have to find the same signature.
    """
    for value in values:
        known = len(memo)
        try:
            copy.deepcopy(value, memo)
        except Exception:  # noqa: BLE001 - of any kind
            for begun in [*memo][known:]:
                del memo[begun]
            memo[id(value)] = value
            with suppress(Exception):
                memo[id(value)] = copy.copy(value)


def _from_fx(module: nn.Module, graph: _Graph) -> bool:
    if _is_leaf(module):
        return False
    traced = _trace(module, ()) or _trace(module, (math,))  # wrapping math takes a while
    if traced is None:
        return False
    paths: dict[fx.Node, Any] = {}
    for place, node in enumerate(traced.nodes):
        arguments = [_plain(arg, paths) for arg in (*node.args, *node.kwargs.items())]
        if node.op == "placeholder":
            paths[node] = digest64("input", place)
        elif node.op == "call_module":
            name = str(node.target)
            paths[node] = graph.enter(name, module.get_submodule(name), arguments)
        elif node.op == "get_attr":
            name = str(node.target)
            part = graph.parts.get(name)
            paths[node] = digest64(name) if part is None else graph.enter(name, part, [])
        elif node.op != "output":
            paths[node] = _operation(node.target, arguments)
    return True


def _plain(value: Any, paths: Mapping[Any, Any]) -> Any:  # noqa: ANN401 - any argument
    """An argument with Merkle ids in place of tensors, as JSON."""
    if isinstance(value, list | tuple):
        return [_plain(inner, paths) for inner in value]
    if isinstance(value, Mapping):
        return [[str(key), _plain(inner, paths)] for key, inner in value.items()]
    if isinstance(value, slice):
        return ["slice", *(_plain(v, paths) for v in (value.start, value.stop, value.step))]
    if isinstance(value, str | int | float | bool | None):
        return value
    try:
        return paths[value]
    except (KeyError, TypeError):
        return str(type(value).__name__)


def _operation(target: Any, arguments: list[Any]) -> int:  # noqa: ANN401 - function or name
    name = (target if isinstance(target, str) else getattr(target, "__name__", "?")).strip("_")
    if name in _SYMMETRIC and len(arguments) == 2:  # a third is a factor of one: add(x, y, alpha=2)
        arguments = sorted(arguments, key=repr)
    return digest64(name, arguments)


# ----------------------------------------------------------------------------- a sample that runs


class _Watch(TorchFunctionMode):
    """Carries Merkle ids from tensor to tensor through every function outside of leaf modules."""

    def __init__(self, graph: _Graph) -> None:
        super().__init__()
        self.graph = graph
        self.paths: dict[int, int] = {}
        self.kept: list[Any] = []  # ids are those of living objects
        self.depth = 0

    def mark(self, value: Any, path: int) -> None:  # noqa: ANN401 - any output
        for place, tensor in enumerate(_tensors(value)):
            self.paths[id(tensor)] = path if place == 0 else digest64(path, place)
            self.kept.append(tensor)

    def inputs(self, values: Any) -> list[Any]:  # noqa: ANN401 - any arguments
        for tensor in _tensors(values):
            if id(tensor) in self.graph.names and id(tensor) not in self.paths:
                name = self.graph.names[id(tensor)]
                self.mark(tensor, self.graph.enter(name, self.graph.parts[name], []))
        return [_plain(value, _ById(self.paths)) for value in values]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - torch's own signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        arguments = [] if self.depth else self.inputs((*args, *(kwargs or {}).items()))
        result = func(*args, **(kwargs or {}))
        if not self.depth and getattr(func, "__name__", "") != "__get__":
            self.mark(result, _operation(func, arguments))
        return result


class _ById(dict[Any, Any]):
    """Looks objects up by identity."""

    def __init__(self, paths: Mapping[int, int]) -> None:
        super().__init__()
        self._paths = paths

    def __getitem__(self, key: Any) -> int:  # noqa: ANN401 - any object
        return self._paths[id(key)]


def _tensors(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - nested outputs
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def _from_run(module: nn.Module, graph: _Graph, inputs: tuple[Any, ...]) -> bool:
    watch = _Watch(graph)
    waiting: dict[int, list[list[Any]]] = {}

    def before(leaf: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not watch.depth:
            waiting.setdefault(id(leaf), []).append(watch.inputs((*args, *kwargs.items())))
        watch.depth += 1

    def after(leaf: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401 - torch's hook
        watch.depth -= 1
        if not watch.depth:
            path = graph.enter(names[id(leaf)], leaf, waiting[id(leaf)].pop())
            watch.mark(output, path)

    names: dict[int, str] = {}
    hooks = []
    for name, leaf in module.named_modules():
        if _is_leaf(leaf):
            names[id(leaf)] = name
            hooks.append(leaf.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(leaf.register_forward_hook(after))
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), watch:
            for place, value in enumerate(inputs):
                watch.mark(value, digest64("input", place))
            module(*inputs)
    except Exception as error:  # the border to arbitrary user code: it must run with its own input
        raise StateError(
            f"{type(module).__name__} does not run on the example: {error!r}. No signature was "
            "taken. Give an example that it takes, or none: then its modules' order is used."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for part, mode in training.items():
            part.training = mode
    return True
