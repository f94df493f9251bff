"""State: what goes in comes out to the last bit."""

import json
import random
from collections import Counter
from enum import StrEnum

import numpy as np
import pytest
import torch

from elastix.data.random_numbers import RandomState
from elastix.errors import ConfigError, StateError
from elastix.state import (
    OF_MODEL,
    HeldState,
    Ref,
    State,
    capture,
    check_optimizer,
    parameter_names,
    restore,
    warm_start,
)
from elastix.store import Store
from elastix.store.exchange import export, read


class Net(torch.nn.Module):
    def __init__(self, seed: int = 0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 4)
        if tied:
            self.last.weight = torch.nn.Parameter(torch.randn(4, 4))
            self.again = torch.nn.Linear(4, 4, bias=False)
            self.again.weight = self.last.weight

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
}
SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "MultiStepLR after a warm-up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=8),
            torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
        ],
        [8],
    ),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
}


def train(model, optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def same_bits(one: State, other: State) -> bool:
    return one.manifest() == other.manifest()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_restored_model_and_optimizer_go_on_to_the_same_bits(make):
    model = Net(0)
    optimizer = make(model.parameters())
    train(model, optimizer)
    state = capture({"": model}, {"optimizer": optimizer}).clone()
    other = Net(1)
    other_optimizer = make(other.parameters())
    restore(state, {"": other}, {"optimizer": other_optimizer})
    assert same_bits(capture({"": other}, {"optimizer": other_optimizer}), state)
    train(model, optimizer)
    train(other, other_optimizer)
    later = capture({"": model}, {"optimizer": optimizer})
    assert same_bits(capture({"": other}, {"optimizer": other_optimizer}), later)
    assert not same_bits(later, state)


class InWider(torch.optim.Optimizer):
    """Gathers in float32 and in tables, whatever type the parameters have."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                slot = self.state[parameter]
                if not slot:
                    slot["kept"] = [torch.zeros(parameter.shape)]
                    slot["more"] = {"mean": torch.zeros(parameter.shape, dtype=torch.float64)}
                slot["kept"][0].lerp_(parameter.grad.float(), 0.3)
                slot["more"]["mean"] += slot["kept"][0].double() / 3
                parameter -= (group["lr"] * slot["more"]["mean"]).to(parameter.dtype)


OF_OTHER_TYPES = {
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, lambd=0.3, t0=1),
    "of one's own": InWider,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", OF_OTHER_TYPES.values(), ids=OF_OTHER_TYPES)
def test_what_an_optimizer_gathers_keeps_the_type_that_it_has(make, dtype):
    """Torch rounds it to that of the parameters, so that a joiner took other steps."""
    made = []
    for seed in range(2):
        model = torch.nn.Linear(3, 4, dtype=dtype)
        torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(seed))
        made.append((model, make(model.parameters())))
    (model, optimizer), (other, its) = made

    def train(model, optimizer, steps):
        for number in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 3), number / 7, dtype=dtype)).square().mean().backward()
            optimizer.step()

    train(model, optimizer, 4)
    state = capture({"": model}, {"optimizer": optimizer}).clone()
    restore(state, {"": other}, {"optimizer": its})
    assert same_bits(capture({"": other}, {"optimizer": its}), state)
    train(model, optimizer, 4)
    train(other, its, 4)
    later = capture({"": model}, {"optimizer": optimizer})
    assert same_bits(capture({"": other}, {"optimizer": its}), later)


def test_a_model_of_another_type_has_an_optimizer_of_that_type():
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    state = capture({"": model}, {"optimizer": optimizer}).clone()
    half = torch.nn.Linear(3, 4).bfloat16()
    own = torch.optim.Adam(half.parameters())
    restore(state, {"": half}, {"optimizer": own})
    assert own.state[half.weight]["exp_avg"].dtype == torch.bfloat16
    half(torch.ones(2, 3).bfloat16()).sum().backward()
    own.step()


class Strides(torch.nn.Module):
    """Its parameters do not lie in memory in the order of their elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = torch.nn.Parameter(torch.randn(3, 5).t())
        self.body = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.body((x @ self.turned)[:, :, None, None].expand(-1, -1, 2, 2))


@pytest.mark.parametrize("fused", [True, False])
def test_moments_lie_in_memory_as_their_parameters_do_whichever_way_they_came(fused):
    """A fused kernel goes through both in that order."""
    made = []
    for _ in range(2):
        model = Strides()
        made.append((model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)))
    (model, optimizer), (other, other_optimizer) = made

    def train(model, optimizer):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 20).view(4, 5)).square().mean().backward()
        optimizer.step()

    train(model, optimizer)
    state = capture({"": model}, {"optimizer": optimizer})
    travelled = {
        name: tensor.detach().contiguous().clone() for name, tensor in state.tensors.items()
    }
    restore(State(travelled, state.meta), {"": other}, {"optimizer": other_optimizer})
    for one, its in made:
        for parameter, slot in its.state.items():
            assert slot["exp_avg"].stride() == parameter.stride()
        train(one, its)
    later, others = (capture({"": one}, {"optimizer": its}) for one, its in made)
    assert same_bits(later, others)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_takes_over_what_was_gathered_on_inherited_tensors(make):
    model = Net(0)
    optimizer = make(model.parameters())
    train(model, optimizer)
    ancestor = capture({"": model}, {"optimizer": optimizer}).clone()
    child = Net(1)
    names = [name for name, _ in child.named_parameters()]
    sources = {name: name for name in names[:2]}
    own = make(child.parameters())
    number = warm_start({"": child}, {"optimizer": own}, ancestor, sources)
    gathered = optimizer.state_dict()["state"]
    assert number == len([place for place in gathered if place < 2])
    found = own.state_dict()["state"]
    assert found.keys() == {place for place in gathered if place < 2}
    for place, slot in found.items():
        for key, value in slot.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, gathered[place][key])
                assert (
                    value.data_ptr()
                    != ancestor.tensors.get(
                        f"@optimizer/state/{names[place]}/{key}", torch.empty(0)
                    ).data_ptr()
                )
    train(child, own)  # what is missing is begun as ever


@pytest.mark.parametrize(
    "other",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9)),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    ],
)
def test_what_was_averaged_otherwise_is_not_taken_over(other):
    model = Net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    ancestor = capture({"": model}, {"optimizer": optimizer})
    same = {name: name for name in model.state_dict()}
    child = Net(1)
    own = other(child.parameters())
    assert warm_start({"": child}, {"optimizer": own}, ancestor, same) == 0
    train(child, own)


def test_rates_stay_the_optimizers_own_and_a_model_alone_gives_nothing():
    model = Net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    same = {name: name for name in model.state_dict()}
    child = Net(1)
    own = torch.optim.AdamW(child.parameters(), lr=0.5, weight_decay=0.3)
    others = {"optimizer": own}
    assert warm_start({"": child}, others, capture({"": model}, {}), same) == 0
    ancestor = capture({"": model}, {"optimizer": optimizer})
    assert warm_start({"": child}, others, ancestor, same) == len(list(child.parameters()))
    assert (own.param_groups[0]["lr"], own.param_groups[0]["weight_decay"]) == (0.5, 0.3)


@pytest.mark.parametrize("before", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_how_torch_computes_is_the_optimizers_own_affair(before):
    """A mesh may want `foreach=False` where the State is of one process that had it otherwise."""
    model = Net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **before)
    train(model, optimizer)
    state = capture({"": model}, {"optimizer": optimizer}).clone()
    child = Net(1)
    own = torch.optim.AdamW(child.parameters(), lr=0.5, foreach=False, fused=False)
    restore(state, {"": child}, {"optimizer": own})
    (group,) = own.param_groups
    assert (group["foreach"], group["fused"], group["lr"]) == (False, False, 0.01)
    grandchild = Net(2)
    own = torch.optim.AdamW(grandchild.parameters(), lr=0.5, foreach=False, fused=False)
    same = {name: name for name in model.state_dict()}
    adopted = warm_start({"": grandchild}, {"optimizer": own}, state, same)
    assert adopted == len(list(grandchild.parameters()))


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_restored_scheduler_goes_on_with_the_same_rates(make):
    def made():
        optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
        return optimizer, make(optimizer)

    def rates(optimizer, scheduler) -> list[float]:
        found = []
        for _ in range(6):
            optimizer.step()
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = made()
    rates(optimizer, scheduler)
    state = capture({}, {"scheduler": scheduler}).clone()
    text = json.loads(json.dumps(state.meta))
    other_optimizer, other = made()
    restore(State(state.tensors, text), {}, {"scheduler": other})
    other_optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    assert other.state_dict() == scheduler.state_dict()
    assert rates(other_optimizer, other) == rates(optimizer, scheduler)


def test_a_grad_scaler_is_restored():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=True)
    scaler.scale(torch.tensor(1.0))
    scaler.update(4.0)
    state = capture({}, {"scaler": scaler}).clone()
    other = torch.amp.GradScaler("cpu", enabled=True)
    restore(state, {}, {"scaler": other})
    assert other.get_scale() == 4.0
    assert other.state_dict() == scaler.state_dict()


def test_random_numbers_go_on_the_same():
    def draw():
        return random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()

    random.gauss(0, 1)
    np.random.randn()
    state = capture({}, {"rng": RandomState()}).clone()
    expected = draw()
    draw()
    meta = json.loads(json.dumps(state.meta))
    restore(State(state.tensors, meta), {}, {"rng": RandomState()})
    assert draw() == expected
    restore(State(state.tensors, meta), {}, {"rng": RandomState()})
    gauss = random.gauss(0, 1), np.random.randn()
    restore(State(state.tensors, meta), {}, {"rng": RandomState()})
    assert (random.gauss(0, 1), np.random.randn()) == gauss


def test_an_optimizer_is_restored_by_parameter_name_not_by_place():
    model = Net(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = capture({"": model}, {"optimizer": optimizer}).clone()
    other = Net(1)
    backwards = torch.optim.AdamW(reversed(list(other.parameters())), lr=0.1)
    restore(state, {"": other}, {"optimizer": backwards})
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            assert torch.equal(backwards.state[two][key], value), (name, key)
    assert "@optimizer/state/first.weight/exp_avg" in state.tensors


def lbfgs(out: int = 1, backwards: bool = False):
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, out)
    model = torch.nn.Sequential(*layers).double()
    parameters = list(model.parameters())[:: -1 if backwards else 1]
    return {"": model}, {"optimizer": torch.optim.LBFGS(parameters, lr=0.5, max_iter=3)}


def descend(modules, others) -> None:
    model, optimizer = modules[""], others["optimizer"]

    def closure():
        optimizer.zero_grad()
        x = torch.linspace(-3, 3, 24, dtype=torch.float64).sin().reshape(8, 3)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_an_lbfgs_goes_on_with_what_it_has_gathered_in_another_order():
    """It begins with the gradient alone if that is lost, and with nonsense if rows are mixed up."""
    one, other = lbfgs(), lbfgs(backwards=True)
    descend(*one)
    descend(*one)
    restore(capture(*one).clone(), *other)
    descend(*one)
    descend(*other)
    for ours, theirs in zip(
        *(modules[""].parameters() for modules, _ in (one, other)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_an_lbfgs_takes_over_what_was_gathered_on_all_its_tensors_or_nothing():
    """What it has gathered are rows over all of them: those of another model have other lengths."""
    begun = lbfgs()
    descend(*begun)
    ancestor = capture(*begun).clone()
    names = [name for name, _ in begun[0][""].named_parameters()]
    same, other = lbfgs(), lbfgs(out=2)
    assert warm_start(*other, ancestor, {name: name for name in names[:2]}) == 0
    descend(*other)
    assert warm_start(*same, ancestor, {name: name for name in names}) == 1
    descend(*same)


def test_names_in_a_group_stay_beside_their_parameters():
    def made(order):
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.AdamW(order(model.named_parameters()))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"": model}, {"optimizer": optimizer}

    modules, others = made(lambda named: list(named)[::-1])
    restore(capture(*made(list)), modules, others)
    (group,) = others["optimizer"].param_groups
    assert group["param_names"] == ["bias", "weight"]
    assert [p.dim() for p in group["params"]] == [1, 2]


def test_restored_objects_share_no_memory_with_the_state():
    model = Net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    state = capture({"": model}, {"optimizer": optimizer}).clone()
    ref = state.manifest().ref
    restore(state, {"": model}, {"optimizer": optimizer})
    train(model, optimizer)
    assert state.manifest().ref == ref


def test_a_clone_does_not_change_with_training():
    model = Net(0)
    state = capture({"": model}, {})
    clone = state.clone()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not same_bits(state, clone)


def test_tied_tensors_stay_tied_and_count_for_the_optimizer_once(tmp_path):
    model = Net(0, tied=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    names = parameter_names({"": model})
    assert names[id(model.again.weight)] == "last.weight"
    check_optimizer(optimizer, names)
    train(model, optimizer)
    state = capture({"": model}, {"optimizer": optimizer}).clone()
    assert state.tensors["again.weight"] is state.tensors["last.weight"]
    export(state, tmp_path / "state")
    found = read(tmp_path / "state")
    assert found.tensors["again.weight"] is found.tensors["last.weight"]
    restore(found, {"": model}, {"optimizer": optimizer})
    assert model.again.weight is model.last.weight


def test_modules_are_told_apart_by_prefix():
    one, two = Net(0), Net(1)
    state = capture({"": one, "@module1/": two}, {}).clone()
    other, another = Net(2), Net(3)
    restore(state, {"": other, "@module1/": another}, {})
    assert torch.equal(other.first.weight, one.first.weight)
    assert torch.equal(another.first.weight, two.first.weight)
    assert set(state.model) == set(one.state_dict())


def test_an_optimizer_of_other_parameters_is_refused_with_their_place_and_shape():
    model = Net(0)
    stranger = torch.nn.Parameter(torch.zeros(2, 5))
    groups = [{"params": list(model.parameters())}, {"params": [model.first.weight[:0], stranger]}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups.append({**groups[1], "params": [model.first.weight, stranger]})
    with pytest.raises(ConfigError, match=r"parameter 1 of group 1 of the SGD, shape \(2, 5\)"):
        check_optimizer(optimizer, parameter_names({"": model}))


def test_a_missing_tensor_is_named():
    state = capture({"": Net(0)}, {})
    tensors = {k: v for k, v in state.tensors.items() if k != "norm.running_mean"}
    with pytest.raises(StateError, match=r"'norm\.running_mean'"):
        restore(State(tensors, state.meta), {"": Net(1)}, {})


def test_a_missing_object_is_named():
    with pytest.raises(StateError, match="'optimizer'"):
        restore(capture({"": Net(0)}, {}), {}, {"optimizer": RandomState()})


def test_a_tensor_of_another_shape_is_a_state_error():
    state = capture({"": torch.nn.Linear(3, 4)}, {})
    with pytest.raises(StateError, match="does not fit the model"):
        restore(state, {"": torch.nn.Linear(3, 5)}, {})


def test_an_optimizer_entry_of_an_unknown_parameter_is_named():
    model = Net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = capture({"": model}, {"optimizer": optimizer})
    fewer = torch.optim.SGD(list(model.parameters())[1:], lr=0.1)
    with pytest.raises(StateError, match=r"'first\.weight'"):
        restore(state, {"": model}, {"optimizer": fewer})


class CountsSteps(torch.optim.SGD):
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_keeps_of_no_parameter_is_restored():
    def made() -> tuple[Net, CountsSteps]:
        model = Net(0)
        return model, CountsSteps(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = capture({"": model}, {"optimizer": optimizer}).clone()
    model, optimizer = made()
    restore(state, {"": model}, {"optimizer": optimizer})
    assert optimizer.state["steps"] == 1
    assert capture({"": model}, {"optimizer": optimizer}).manifest() == state.manifest()


class HasMore(torch.nn.Linear):
    """A model whose state_dict has more than tensors."""

    def __init__(self, more) -> None:
        super().__init__(2, 2)
        self.more = more

    def get_extra_state(self):
        return self.more

    def set_extra_state(self, state):
        self.more = state


def test_a_model_is_loaded_with_what_it_has_besides_tensors(tmp_path):
    more = {"seen": 7, "scale": torch.tensor([0.5])}
    with Store(tmp_path) as store:
        ref = store.put(capture({"": HasMore(more)}, {}))
        loaded = store.get(ref, OF_MODEL).load_into(HasMore(None))
    assert loaded.more["seen"] == 7
    assert torch.equal(loaded.more["scale"], more["scale"])


def test_a_model_without_what_it_had_besides_tensors_is_refused():
    state = capture({"": HasMore({"scale": torch.tensor([0.5])})}, {})
    with pytest.raises(StateError, match=r"(?s)Missing key.*_extra_state"):
        State(state.model, state.meta).load_into(HasMore(None))


def pair(*, tied):
    made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    if tied:
        made[1].weight = made[0].weight
    return made


def test_two_tensors_are_not_loaded_into_a_model_where_they_are_one():
    state, model = State(pair(tied=False).state_dict()), pair(tied=True)
    before = model[0].weight.clone()
    with pytest.raises(StateError, match=r"'0\.weight' and '1\.weight' are one tensor"):
        state.load_into(model)
    assert torch.equal(model[0].weight, before)
    State(pair(tied=True).state_dict()).load_into(model)
    State(pair(tied=True).state_dict()).load_into(pair(tied=False))
    with torch.device("meta"):
        state.load_into(pair(tied=False))  # where all tensors have one address


def test_two_tensors_do_not_become_those_of_a_run_where_they_are_one():
    state, model = capture({"": pair(tied=False)}, {}), pair(tied=True)
    before = model[0].weight.clone()
    with pytest.raises(StateError, match=r"'0\.weight' and '1\.weight' are one tensor"):
        restore(state, {"": model}, {})
    assert torch.equal(model[0].weight, before)
    restore(capture({"": pair(tied=True)}, {}), {"": model}, {})
    apart = capture({"": pair(tied=True)}, {})
    apart = State({name: one.clone() for name, one in apart.tensors.items()}, apart.meta)
    restore(apart, {"": model}, {})  # as it comes over a network: equal, and not one
    assert torch.equal(model[1].weight, apart.tensors["0.weight"])
    restore(apart, {"": pair(tied=False)}, {})


class Grows(torch.nn.Module):
    """Buffers that are empty until there is something, as observers of torch.ao have them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.empty(0))
        self.register_buffer("high", torch.empty(0))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name, buffer in self.named_buffers():
            buffer.resize_(state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_buffers_that_are_empty_before_they_are_loaded_are_not_one():
    model = Grows()
    model.low, model.high = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0])
    state = capture({"": model}, {})
    loaded, restored = State(state.model).load_into(Grows()), Grows()
    restore(state, {"": restored}, {})
    for each in (loaded, restored):
        assert each.low.tolist() == [-1.0, -2.0]
        assert each.high.tolist() == [1.0, 2.0]


def test_a_model_whose_shapes_are_known_once_it_is_loaded_takes_them_from_the_state():
    state = State(pair(tied=False).state_dict())
    model = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.LazyLinear(2))
    state.load_into(model)
    assert all(torch.equal(state.tensors[name], one) for name, one in model.state_dict().items())


class Holds:
    def __init__(self, value) -> None:
        self.value = value

    def state_dict(self):
        return {"here": [1, {"deep": self.value}]}

    def load_state_dict(self, state_dict):
        self.value = state_dict["here"][1]["deep"]


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j, np.longdouble(1)])
def test_a_value_that_is_no_tensor_and_no_json_is_named_by_its_path(value):
    with pytest.raises(StateError, match=rf"@thing/here/1/deep is a {type(value).__name__}"):
        capture({}, {"thing": Holds(value)})


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        "text",
        1.5,
        -0.0,
        float("inf"),
        float("-inf"),
        (1, (2, [3])),
        {1: "a", (2, 3): "b"},
        {"$odd": 1},
        {},
        [],
        np.float32(0.1),
        np.float64(0.1),
        np.float16("nan"),
        np.int32(-7),
        np.bool_(True),
        Counter({3: 2, "x": 1}),
    ],
)
def test_plain_values_survive_json(value):
    state = capture({}, {"thing": Holds(value)})
    meta = json.loads(json.dumps(state.meta, allow_nan=False))
    other = Holds(None)
    restore(State(state.tensors, meta), {}, {"thing": other})
    assert type(other.value) is type(value)
    assert repr(other.value) == repr(value)


def test_a_value_that_is_not_a_number_survives_json():
    state = capture({}, {"thing": Holds(float("nan"))})
    other = Holds(None)
    restore(State({}, json.loads(json.dumps(state.meta, allow_nan=False))), {}, {"thing": other})
    assert other.value != other.value


def test_arrays_and_tensors_inside_values_keep_type_and_bits():
    array = np.array([[1.5, -0.0]], dtype=np.float32)
    state = capture({}, {"thing": Holds([array, torch.tensor(3, dtype=torch.int8)])})
    other = Holds(None)
    restore(state, {}, {"thing": other})
    assert isinstance(other.value[0], np.ndarray)
    assert other.value[0].tobytes() == array.tobytes()
    assert other.value[1].dtype == torch.int8


def test_an_array_that_is_seen_from_its_end_is_taken_as_it_is_seen():
    array = np.arange(6.0).reshape(2, 3)[::-1, ::-1]
    other = Holds(None)
    restore(capture({}, {"thing": Holds(array)}), {}, {"thing": other})
    assert other.value.tolist() == array.tolist() == [[5, 4, 3], [2, 1, 0]]


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([1, 2], dtype=">i4")])
def test_an_array_that_torch_does_not_have_is_named_by_its_path(array):
    with pytest.raises(StateError, match="@thing/here/1/deep is an array of"):
        capture({}, {"thing": Holds(array)})


@pytest.mark.parametrize(
    "value",
    [
        {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {1: torch.zeros(1), "1": torch.ones(1)},
        {"x": {2: torch.zeros(1), "key0": torch.ones(1)}, "x/2": np.full(1, 2.0)},
    ],
    ids=["a key with a slash", "a number and its text", "several"],
)
def test_keys_that_look_alike_keep_their_own_tensors(value):
    state = capture({}, {"thing": Holds(value)}).clone()
    other = Holds(None)
    restore(State(state.tensors, json.loads(json.dumps(state.meta))), {}, {"thing": other})
    assert repr(other.value) == repr(value)


# ----------------------------------------------------------------------------------------- refs


class ByName:
    """An average of weights by name, which is updated in step with the model's parameters."""

    def __init__(self, **values):
        self.values = {name: torch.full((2,), float(value)) for name, value in values.items()}
        self.rest = {"since": 3, "a": {"z": 1, "b": 2}}
        self.seen = {}

    def state_dict(self):
        return {"values": self.values, "more": [self.rest], "seen": self.seen}

    def load_state_dict(self, state):
        self.values, (self.rest,), self.seen = state["values"], state["more"], state["seen"]


def test_a_dict_comes_back_from_a_store_in_the_order_of_the_object_that_takes_it(tmp_path):
    """A store sorts names; the tenth layer would get the average of the second."""
    with Store(tmp_path) as store:
        given = ByName(layer2=2, layer10=10, bias=3)
        given.seen = {7: "a", 4: "b"}
        ref = store.put(capture({}, {"average": given}, {"step": 1}))
    with Store(tmp_path, read_only=True) as store:
        state = store.get(ref)
    taken = ByName(layer2=0, layer10=0)
    taken.rest, taken.seen = {"since": 0, "a": {"z": 0}}, {4: "c"}
    restore(state, {}, {"average": taken})
    assert [(name, value[0].item()) for name, value in taken.values.items()] == [
        ("layer2", 2.0),
        ("layer10", 10.0),
        ("bias", 3.0),
    ]
    assert list(taken.rest) == ["since", "a"]
    assert list(taken.rest["a"].items()) == [("z", 1), ("b", 2)]
    assert list(taken.seen.items()) == [(7, "a"), (4, "b")]  # pairs are compared in their order


def test_a_dict_that_another_worker_gives_comes_in_the_order_that_it_has_there():
    """It was in no store, so nothing has sorted it: what was used last may come last."""
    given, taken = ByName(layer2=2, layer10=10, bias=3), ByName(bias=0, layer10=0, layer2=0)
    restore(capture({}, {"average": given}, {"step": 1}), {}, {"average": taken})
    assert list(taken.values) == ["layer2", "layer10", "bias"]


class Phase(StrEnum):
    WARM = "warm"
    COOL = "cool"


class Phased:
    def __init__(self, phase=Phase.COOL, before=(Phase.COOL,)):
        self.phase, self.before = phase, list(before)

    def state_dict(self):
        return {"phase": self.phase, "before": self.before}

    def load_state_dict(self, state):
        self.phase, self.before = state["phase"], state["before"]


@pytest.mark.parametrize("phase", [Phase.WARM, None])
def test_members_of_an_enumeration_come_back_from_a_store_as_such(tmp_path, phase):
    with Store(tmp_path) as store:
        given = Phased(phase, [Phase.WARM])
        ref = store.put(capture({}, {"phased": given}, {"step": 1}))
    with Store(tmp_path, read_only=True) as store:
        restore(store.get(ref), {}, {"phased": (taken := Phased())})
    assert taken.phase is phase
    assert taken.before[0] is Phase.WARM


def test_an_array_with_a_mask_is_refused_as_it_would_come_back_without():
    masked = Holds(np.ma.masked_less(np.arange(4), 2))
    with pytest.raises(StateError, match="is a MaskedArray"):
        capture({}, {"seen": masked}, {})


def test_a_ref_does_not_depend_on_the_layout_in_memory_nor_on_the_order_of_names():
    x = torch.randn(2, 3, 4, 5)
    ref = State({"a": x, "b": x[0]}, {"p": 1, "q": 2}).manifest().ref
    laid_out = x.to(memory_format=torch.channels_last)
    assert State({"b": x[0].clone(), "a": laid_out}, {"q": 2, "p": 1}).manifest().ref == ref


def test_a_ref_changes_with_whatever_changes():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    flipped = x.clone()
    flipped.view(torch.int32)[0, 3] ^= 1
    variants = [
        State({"a": x}),
        State({"a": flipped}),
        State({"a": torch.tensor([[-0.0, 1.0, 2.0, 3.0]])}),
        State({"a": x.view(2, 2)}),
        State({"a": x.view(torch.int32)}),
        State({"b": x}),
        State({"a": x, "b": x}),
        State({"a": x}, {"step": 1}),
        State({"a": x}, {"step": 2}),
        State({"a": x}, {}, (Ref("1"),)),
        State({"a": x}, {}, (Ref("2"),)),
        State({"a": x}, {}, (Ref("1"), Ref("2"))),
        State({"a": x}, {}, (Ref("2"), Ref("1"))),
    ]
    assert len({variant.manifest().ref for variant in variants}) == len(variants)


def test_logical_bytes_count_each_name():
    x = torch.zeros(10)
    assert State({"a": x, "b": x}).nbytes == 80


def held_model():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_what_is_held_is_the_state_as_it_was_as_long_as_nobody_changes_it():
    model, optimizer = held_model()
    meta = {"step": 3}
    held = HeldState({"": model}, {"optimizer": optimizer}, meta)
    before = capture({"": model}, {"optimizer": optimizer}, meta).clone()
    model.eval()
    model(torch.randn(5, 3)).sum().backward()  # gradients are no part of it
    state = held.state()
    assert state is not None
    assert state.meta == before.meta
    assert state.tensors.keys() == before.tensors.keys()
    assert all(torch.equal(state.tensors[name], before.tensors[name]) for name in state.tensors)


def in_place(model, optimizer):
    with torch.no_grad():
        model.last.bias.clamp_(0)


def buffers(model, optimizer):
    model(torch.randn(5, 3))  # statistics of the batch


def moments(model, optimizer):
    next(iter(optimizer.state.values()))["exp_avg"].mul_(2)


@pytest.mark.parametrize("change", [in_place, buffers, moments, lambda _, o: o.step()])
def test_what_was_changed_in_place_is_held_no_longer(change):
    model, optimizer = held_model()
    model.first.weight.grad = torch.ones(4, 3)
    held = HeldState({"": model}, {"optimizer": optimizer}, {})
    change(model, optimizer)
    assert held.state() is None


class Counted:
    """A table that is filled as the loop goes."""

    def __init__(self) -> None:
        self.table = np.zeros(3)

    def state_dict(self):
        return {"table": self.table}


def array(model, table):
    table.table[1] += 1


def data_of_a_buffer(model, table):
    model.norm.running_mean.data.add_(1)


def step_by_hand(model, table):
    model.last.weight.data -= 0.1


@pytest.mark.parametrize("change", [array, data_of_a_buffer, step_by_hand])
def test_what_was_changed_past_torchs_count_is_held_no_longer(change):
    model, table = Net(), Counted()
    held = HeldState({"": model}, {"table": table}, {})
    assert held.state() is not None
    change(model, table)
    assert held.state() is None


def test_what_is_too_large_to_be_copied_is_not_held_if_an_array_of_it_was_changed():
    """Losses by sample, say, that the loop writes before an optimizer steps: nobody counts that."""
    model, table = Net(), Counted()
    table.table = np.zeros(1 << 18)  # 2 MiB
    held = HeldState({"": model}, {"table": table}, {})
    assert held.state() is not None
    table.table += 1
    assert held.state() is None


def test_an_average_too_large_to_be_copied_is_not_held_if_it_was_written_through_data():
    average = torch.nn.Linear(1024, 512)  # 2 MiB; no optimizer has it
    held = HeldState({"": Net(), "@module1/": average}, {}, {})
    assert held.state() is not None
    average.weight.data.mul_(0.5)
    assert held.state() is None


def test_what_an_optimizer_steps_is_not_held_if_it_was_changed_by_hand():
    """Weights that are decayed or clamped by `.data` before a step: torch does not count that."""
    model, optimizer = held_model()
    held = HeldState({"": model}, {"optimizer": optimizer}, {})
    assert held.state() is not None
    step_by_hand(model, optimizer)
    assert held.state() is None


def test_what_torch_does_not_count_is_not_held():
    with torch.inference_mode():
        model = Net()
    assert HeldState({"": model}, {}, {}).state() is None


@pytest.mark.parametrize("given", [([torch.ones(1)],), (torch.nn.Linear(1, 1),), ({}, [1])])
def test_a_state_of_something_else_is_refused_when_it_is_made(given):
    with pytest.raises(ConfigError, match=r"State: (tensors|meta) must be a mapping, not \w+\."):
        State(*given)
