"""Signatures taken from modules: traced, watched on a sample, or in module order."""

import importlib
import math
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elastix.errors import StateError
from elastix.store import Signature, shared, signature


def mlp(widths: list[int], act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """Residual; in one of two orders, which mean the same."""

    def __init__(self, swap: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.swap = swap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.conv(x)))
        return y + x if self.swap else x + y


class Dynamic(nn.Module):
    """Control flow on values: torch.fx cannot trace it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            if x.sum() > -1e9:
                x = torch.tanh(block(x)) + x
        return x


class Wrapped(nn.Module):
    """The same module where torch.fx cannot follow."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if float(x.sum()) > -1e9 else x


def lp(a: Signature, b: Signature) -> list[str]:
    return [layer.name for layer, _ in shared(a, b, "lp")]


def lcs(a: Signature, b: Signature) -> list[tuple[str, str]]:
    return [(x.name, y.name) for x, y in shared(a, b, "lcs")]


def test_layers_are_those_with_tensors_in_order() -> None:
    found = signature(mlp([8, 16, 4]))
    assert [(la.name, la.tensors) for la in found.layers] == [
        ("0", (("weight", (16, 8)), ("bias", (16,)))),
        ("2", (("weight", (4, 16)), ("bias", (4,)))),
    ]


def test_equal_modules_have_equal_signatures_whatever_their_values() -> None:
    assert signature(mlp([8, 16, 4])) == signature(mlp([8, 16, 4]))


def test_a_prefix_ends_where_anything_differs() -> None:
    a = signature(mlp([8, 16, 16, 4]))
    assert lp(a, signature(mlp([8, 16, 16, 5]))) == ["0", "2"]
    assert lp(a, signature(mlp([8, 16, 16, 4], nn.Tanh))) == ["0"]
    assert lcs(a, signature(mlp([8, 16, 16, 4], nn.Tanh))) == [("0", "0"), ("2", "2"), ("4", "4")]
    assert lp(a, signature(mlp([9, 16, 16, 4]))) == []
    assert lcs(a, signature(mlp([9, 16, 16, 4]))) == [("2", "2"), ("4", "4")]


def test_the_order_of_summands_does_not_matter_and_configuration_does() -> None:
    def net(swap: bool, stride: int = 1) -> nn.Module:
        return nn.Sequential(Block(swap), Block(swap), nn.Conv2d(4, 2, 1, stride=stride))

    assert signature(net(True)) == signature(net(False))
    a, b = signature(net(True)), signature(net(True, stride=2))
    assert len(a.layers) == 5
    assert len(lp(a, b)) == 4


class Sum(nn.Module):
    """Two layers, then whatever is made of both, then another layer."""

    def __init__(self, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 2)
        self.join = join

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x, y = self.a(z), self.b(z)
        return self.last(self.join(x, y))


@pytest.mark.parametrize("wrap", [lambda module: module, Wrapped], ids=["traced", "run"])
@pytest.mark.parametrize(
    "factor",
    [
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x.add(y, alpha=2),
        lambda x, y: torch.add(input=x, other=y, alpha=2),
        lambda x, y: x - y,
    ],
    ids=["function", "method", "named", "difference"],
)
def test_operands_that_cannot_be_exchanged_keep_their_order(
    factor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    example = torch.ones(1, 4)

    def prefix(one: Callable[..., torch.Tensor], other: Callable[..., torch.Tensor]) -> int:
        a, b = (signature(wrap(Sum(join)), example) for join in (one, other))
        return len(lp(a, b))

    assert prefix(lambda x, y: x + y, lambda x, y: y + x) == 3
    assert prefix(lambda x, y: x + y, torch.add) == 3
    assert prefix(factor, factor) == 3
    assert prefix(factor, lambda x, y: factor(y, x)) == 2
    assert prefix(factor, torch.add) == 2


@pytest.mark.parametrize("example", [None, torch.ones(2, 3)])
def test_what_cannot_be_traced_is_run_or_taken_in_order(example: torch.Tensor | None) -> None:
    module = Dynamic(3)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    found = signature(module, example)
    assert {la.name for la in found.layers} == {"scale", "blocks.0", "blocks.1", "blocks.2"}
    assert found == signature(Dynamic(3), example)
    assert len(shared(found, signature(Dynamic(4), example), "lp")) == 4
    assert module.training
    assert not any(m._forward_hooks for m in module.modules())
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())


class Scaled(nn.Module):
    """Calls math on sizes, and runs its layers in another order than it has them."""

    def __init__(self, factor: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.factor = factor
        self.second = nn.Linear(3, 3)
        self.first = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x) / self.factor(x))
        return y


@pytest.mark.parametrize("factor", [lambda x: math.sqrt(x.size(-1)), lambda x: math.prod(x.shape)])
def test_calls_of_math_on_sizes_are_traced(factor: Callable[[torch.Tensor], float]) -> None:
    assert [layer.name for layer in signature(Scaled(factor)).layers] == ["first", "second"]


def test_running_and_tracing_agree_on_what_is_shared() -> None:
    def nets() -> list[nn.Module]:
        return [
            nn.Sequential(Block(), Block(), nn.Conv2d(4, 2, 1)),
            nn.Sequential(Block(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)),
        ]

    a, b = (signature(net) for net in nets())
    x, y = (signature(Wrapped(net), torch.ones(1, 4, 8, 8)) for net in nets())
    assert len(shared(a, b, "lp")) == len(shared(x, y, "lp")) == 2
    assert len(shared(a, b, "lcs")) == len(shared(x, y, "lcs")) == 3


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("mlp", torch.rand(2, 1, 8, 8)),
        ("convnet", torch.rand(2, 1, 8, 8)),
        ("conv1d", torch.rand(2, 1, 300)),
        ("tabular", torch.rand(2, 64)),
        ("transformer", torch.randint(0, 256, (2, 12))),
    ],
)
def test_the_spaces_that_are_shipped(name: str, example: torch.Tensor) -> None:
    space = importlib.import_module(f"search_spaces.{name}")
    taken = []
    for seed in range(6):
        config = space.space.sample(seed)
        model = space.build(config)
        found = signature(model, example)
        named = {
            f"{la.name}.{tensor}" if tensor else la.name
            for la in found.layers
            for tensor, _ in la.tensors
        }
        assert named == set(model.state_dict())
        assert found == signature(space.build(config), example)
        run = signature(Wrapped(model), example)  # what torch.fx cannot follow is told by running
        assert Counter(la.kind for la in run.layers) == Counter(la.kind for la in found.layers)
        taken.append(found)
    assert len({len(shared(a, b, "lp")) for a in taken for b in taken}) > 1


def test_shared_and_unused_layers_come_once() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = nn.Linear(3, 3)
            self.never = nn.Linear(3, 9)
            self.tied = nn.Linear(3, 3)
            self.tied.weight = self.twice.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tied(self.twice(self.twice(x)))

    assert [la.name for la in signature(Odd()).layers] == ["twice", "tied", "never"]


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 4),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        nn.LSTM(3, 4, 2),
        nn.Sequential(nn.Embedding(10, 4), nn.MultiheadAttention(4, 2)),
        nn.Identity(),
        nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ParameterList([torch.ones(3)])}),
    ],
)
def test_any_module_has_one_that_names_every_tensor(module: nn.Module) -> None:
    found = signature(module)
    names = {
        ".".join(part for part in (la.name, own) if part)
        for la in found.layers
        for own, _ in la.tensors
    }
    assert names == set(module.state_dict())
    assert Signature.from_json(found.to_json()) == found


def test_an_example_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(StateError, match="Dynamic does not run"):
        signature(Dynamic(2), torch.ones(2, 5))


class Busy(nn.Module):
    """A forward pass that changes what its module holds, with values that are no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(3))
        self.calls, self.kept = 0, list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.calls += 1
        with torch.no_grad():
            for ours, theirs in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
        y: torch.Tensor = self.teacher(self.student(x)) * torch.ones(3) * self.scale
        self.kept.append(y)
        return y


def test_what_a_forward_pass_changes_is_left_as_it_is() -> None:
    module = Busy()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    names = set(vars(module))
    found = signature(module)
    assert [layer.name for layer in found.layers] == ["student", "teacher", "scale", "seen"]
    assert all(torch.equal(before[name], one) for name, one in module.state_dict().items())
    assert (module.calls, module.kept, set(vars(module))) == (0, [], names)


class Observed(nn.Module):
    """Holds what has no copy: a lock, and what its passes have computed. It runs `b` first."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.seen = threading.Lock(), list[torch.Tensor]()
        self.named = dict[str, list[torch.Tensor]]()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(x)
        with self.lock:
            self.seen.append(y)
        self.named.setdefault("y", []).append(y)
        z: torch.Tensor = self.a(y)
        return z


@pytest.mark.parametrize("wrap", [lambda module: module, nn.Sequential], ids=["alone", "within"])
def test_what_cannot_be_copied_makes_no_other_signature(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    """Fresh and trained: a child of the one inherits from the other."""
    module = Observed()
    fresh = signature(wrap(module))
    assert [layer.name[-1] for layer in fresh.layers] == ["b", "a"]
    module(torch.ones(1, 3))
    assert signature(wrap(module)) == fresh
    assert [type(one) for one in (*module.seen, *module.named["y"])] == [torch.Tensor] * 2


def test_a_parameter_of_a_module_matches_those_of_its_own_name() -> None:
    class Affine(nn.Module):
        def __init__(self, *, scaled: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.scaled = scaled
            if scaled:
                self.gamma = nn.Parameter(torch.ones(3))
            self.beta = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return (y * self.gamma if self.scaled else y) + self.beta

    child, parent = signature(Affine(scaled=False)), signature(Affine(scaled=True))
    for mode in ("lcs", "lp"):
        pairs = shared(child, parent, mode)
        assert [(a.name, b.name) for a, b in pairs] == [("inner", "inner"), ("beta", "beta")]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, stride=2), False),
        (nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, padding=1), False),
        (nn.BatchNorm1d(4), nn.BatchNorm1d(4, eps=0.1), False),
        (nn.GroupNorm(2, 4), nn.GroupNorm(4, 4), False),
        (nn.EmbeddingBag(5, 4, mode="sum"), nn.EmbeddingBag(5, 4, mode="max"), False),
        (nn.MultiheadAttention(4, 1), nn.MultiheadAttention(4, 2), True),
        (nn.RNN(4, 4), nn.RNN(4, 4, nonlinearity="relu"), True),
        (
            nn.TransformerEncoderLayer(4, 1, 8),
            nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", norm_first=True),
            True,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_options_that_torch_prints_tell_layers_of_equal_shapes_apart(
    one: nn.Module, other: nn.Module, alike: bool
) -> None:
    """As docs/search.md says; others, such as the number of heads, do not."""
    ours, theirs = signature(nn.Sequential(one)), signature(nn.Sequential(other))
    assert bool(shared(ours, theirs, "lcs")) is alike
