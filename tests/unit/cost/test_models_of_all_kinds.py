"""Estimates of models that are made, fed or computed otherwise than most."""

import pytest
import torch
from torch import nn

from elastix.cost.trace import trace
from elastix.errors import ConfigError
from elastix.search.gate import Gate

STEPS, BATCH, WIDTH, STATE = 40, 16, 24, 32


def plain():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))


def cost(build, *batch, **options):
    return trace(build, lambda: batch or (torch.zeros(2, 3, 8, 8),), foreach=False, **options)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.to(torch.float64).cpu().float(),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.to_empty(device="cpu"),
    ],
)
def test_a_model_may_be_moved_while_it_is_made(move):
    found, unmoved = cost(lambda: move(plain())), cost(plain)
    assert (found.model_bytes, found.step_flops) == (unmoved.model_bytes, unmoved.step_flops)


def test_a_model_that_is_converted_is_one_that_was_made_so():
    def half(model):
        return trace(model, lambda: (torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16),))

    made = trace(plain, lambda: (torch.zeros(2, 3, 8, 8),), dtype=torch.bfloat16)
    found = half(lambda: plain().bfloat16())
    assert (found.model_bytes, found.peak_bytes) == (made.model_bytes, made.peak_bytes)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.last.weight = self.first.weight

    def forward(self, tokens):
        return self.last(self.first(tokens))


def test_what_is_shared_is_shared_after_a_conversion():
    found = cost(lambda: Tied().double(), torch.zeros(2, 3, dtype=torch.long))
    assert (found.parameters, found.model_bytes) == (80, 640)


class Recurrent(nn.Module):
    def __init__(self, embedded=False, **options):
        super().__init__()
        self.before = nn.Embedding(10, WIDTH) if embedded else nn.Identity()
        self.layer = nn.LSTM(WIDTH, STATE, **options)

    def forward(self, x):
        return self.layer(self.before(x))[0]


@pytest.mark.parametrize("embedded", [False, True])
def test_what_an_lstm_computes_and_keeps_is_counted(embedded):
    """Its steps are one operator of oneDNN, of which fake tensors know nothing."""
    batch = torch.zeros(STEPS, BATCH, WIDTH)
    if embedded:
        batch = torch.zeros(STEPS, BATCH, dtype=torch.long)
    found = cost(lambda: Recurrent(embedded), batch)
    assert found.forward_flops == 2 * STEPS * BATCH * 4 * STATE * (WIDTH + STATE)
    assert found.step_flops == 3 * found.forward_flops
    layer = nn.LSTM(WIDTH, STATE)
    weights = [weight.detach() for weight in layer.parameters()]
    states = [torch.zeros(1, BATCH, STATE)] * 2
    sizes = (False, [], 2, STATE, 1, True, False, False, True)
    real = torch.ops.aten.mkldnn_rnn_layer(
        torch.zeros(STEPS, BATCH, WIDTH), *weights, *states, *sizes
    )
    assert 0.9 * real[3].nbytes < found.activations_bytes < 1.3 * real[3].nbytes


def test_an_lstm_that_nobody_trains_keeps_nothing():
    class Frozen(Recurrent):
        def forward(self, x):
            with torch.no_grad():
                x = super().forward(x)
            return self.head(x)

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(STATE, 1)

    found = cost(Frozen, torch.zeros(STEPS, BATCH, WIDTH))
    assert found.activations_bytes < 5 * 4 * STEPS * BATCH * STATE


MEANS = torch.ones(4)
MADE_BEFORE = nn.Sequential(plain(), nn.BatchNorm1d(4))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = plain()
        self.register_buffer("scale", MEANS)

    def forward(self, x):
        return self.first(x) * MEANS + self.scale


def test_tensors_of_a_module_that_was_imported_are_those_of_any_other():
    assert cost(Scaled).step_flops == cost(plain).step_flops


@pytest.mark.parametrize("around", [lambda model: model, nn.Sequential])
def test_an_estimate_changes_no_model_that_was_made_before(around):
    before = {name: value.clone() for name, value in MADE_BEFORE.state_dict().items()}
    found = cost(lambda: around(MADE_BEFORE), torch.zeros(4, 3, 8, 8))
    assert found.parameters == sum(p.numel() for p in MADE_BEFORE.parameters())
    for name, value in MADE_BEFORE.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, before[name]), name
    assert all(
        p.grad is None and not p._post_accumulate_grad_hooks for p in MADE_BEFORE.parameters()
    )


class OfNamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, given, factor):
        return {"out": self.layer(given["x"]) * factor, "rest": None}


def test_a_batch_may_have_names_and_numbers_in_it():
    found = cost(OfNamed, {"x": torch.zeros(2, 8), "of": "train"}, 3.0)
    assert found.batch_bytes == 4 * 2 * 8


@pytest.mark.parametrize("batch", [torch.zeros(1, 8), {"x": torch.zeros(1, 8)}])
def test_a_batch_that_would_be_taken_apart_is_refused(batch):
    with pytest.raises(ConfigError, match="Give a tuple"):
        trace(lambda: nn.Linear(8, 4), lambda: batch)


def test_sparse_gradients_become_dense_ones_as_in_a_group():
    tokens = torch.zeros(2, 3, dtype=torch.long)
    dense, sparse = (cost(lambda s=s: nn.Embedding(50, 8, sparse=s), tokens) for s in (False, True))
    assert sparse.gradients_bytes == dense.gradients_bytes == 4 * 50 * 8
    assert sparse.optimizer_bytes == dense.optimizer_bytes


class Selects(nn.Linear):
    def forward(self, x):
        return super().forward(x[x.sum(1) > 0])


class Width:
    def __init__(self, config):
        raise KeyError("width")


@pytest.mark.parametrize(
    ("build", "fact"),
    [
        (lambda: Selects(8, 8), "looks at values"),
        (lambda: nn.BatchNorm1d(8), "does not run on such a batch: ValueError: Expected more than"),
        (lambda: Width({}), "cannot be made: KeyError: 'width'"),
        (lambda: None, "gave a NoneType"),
    ],
)
def test_why_no_estimate_can_be_made_is_told(build, fact):
    with pytest.raises(ConfigError, match=fact):
        cost(build, torch.zeros(1, 8))
    gate = Gate(lambda _: build(), lambda _: (torch.zeros(1, 8),), parameters=1)
    with pytest.raises(ConfigError, match=f"gate cannot estimate .*{fact}"):
        gate.check({"depth": 1})


def test_a_gate_says_once_that_it_lets_in_what_it_cannot_estimate(caplog):
    gate = Gate(lambda _: Selects(8, 8), lambda _: (torch.zeros(1, 8),), parameters=1)
    assert [gate.foresee({"depth": n}).refusal for n in range(3)] == [""] * 3
    (told,) = caplog.messages
    assert told.startswith("the gate cannot estimate {'depth': 0}: the model looks at values")


@pytest.mark.parametrize(
    ("kind", "options", "images"),
    [
        (nn.Conv2d, {}, 16),
        (nn.Conv2d, {"groups": 2}, 8),
        (nn.Conv2d, {"dilation": 2, "padding": 4}, 1),
        (nn.ConvTranspose2d, {}, 16),
    ],
)
def test_convolutions_of_64_bits_make_a_matrix_of_neighbourhoods(kind, options, images):
    """A float32 one is oneDNN's, which makes none; in both directions it is the same."""
    rows, channels, size, kernel = 16, 32, 12, 5
    options = {"padding": 2, "bias": False, **options}

    def layers():
        return nn.Sequential(*(kind(channels, channels, kernel, **options) for _ in range(2)))

    batch = torch.zeros(rows, channels, size, size, dtype=torch.float64)
    found = cost(lambda: layers().double(), batch)
    matrix = images * channels * kernel**2 * 8 * size**2
    assert matrix < found.activations_bytes < matrix + 6 * batch.nbytes


class Scores(nn.Module):
    """A product with a vector, as in additive attention."""

    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x @ self.vector


class Distances(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p, self.centres = p, nn.Parameter(torch.ones(100, 64))

    def forward(self, x):
        return torch.cdist(x, self.centres, p=self.p)


class Pairs(nn.Bilinear):
    def forward(self, x):
        return super().forward(x, x)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 16, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(x.to(torch.complex64) @ self.weight)


@pytest.mark.parametrize(
    ("build", "rows", "each"),
    [
        (Scores, 80, 2 * 64),
        (lambda: Distances(1.0), 80, 3 * 100 * 64),
        (lambda: Distances(2.0), 80, 2 * 100 * 64),
        (lambda: Pairs(64, 64, 32), 80, 3 * 64 * 64 * 32),
        (Complex, 80, 4 * 2 * 64 * 16),
    ],
)
def test_what_torch_has_no_formula_for_is_counted(build, rows, each):
    """It was no arithmetic at all, and of complex numbers a quarter."""
    assert cost(build, torch.zeros(rows, 64)).forward_flops == rows * each


def test_an_operator_of_an_unknown_library_is_warned_of_once(caplog):
    @torch.library.custom_op("elastix_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda ctx, grad: 2 * grad)

    class Doubles(nn.Linear):
        def forward(self, x):
            return doubled(super().forward(x))

    for _ in range(2):
        assert cost(lambda: Doubles(8, 4), torch.zeros(2, 8)).forward_flops == 2 * 2 * 8 * 4
    (told,) = caplog.messages
    assert "elastix_tests.doubled" in told
