import pytest
import torch
from torch import nn

from elastix.errors import ConfigError, StateError
from elastix.search.inherit import copy_tensors, inherit
from elastix.state import Ref, State
from elastix.store import Store, signature


def net(*widths: int, norm: bool = True) -> nn.Sequential:
    """Convolutions of these widths, with batch norm, on one channel."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip((1, *widths), widths, strict=False):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 3))


def put(store: Store, model: nn.Module, **meta: float | str) -> Ref:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)  # nothing that a fresh initialisation could have by itself
    return store.put(State(model.state_dict(), meta), signature=signature(model), score=1.0)


def copied(before: dict[str, torch.Tensor], model: nn.Module) -> set[str]:
    return {n for n, t in model.state_dict().items() if not torch.equal(before[n], t)}


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "store") as opened:
        yield opened


@pytest.mark.parametrize(
    ("mode", "parts"),
    [("lp", {"0", "1"}), ("lcs", {"0", "1", "6", "7", "11"}), ("none", set())],
)
def test_what_matches_is_copied_and_the_rest_stays(store, mode, parts):
    ancestor = net(4, 8, 8)
    ref = put(store, ancestor, lineage_epochs=2.5)
    model = net(4, 4, 8, 8)  # a layer inserted
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = inherit(model, store, mode=mode, parent=ref)
    parts = {"lcs": {"0", "1", "6", "7", "9", "10", "14"}}.get(mode, parts)
    names = {name for name in before if name.split(".")[0] in parts}
    changed = copied(before, model)
    assert changed == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    if mode == "none":
        assert found is None
        return
    assert (found.ref, found.lineage_epochs) == (ref, 2.5)
    assert (found.layers, found.of_layers) == (len(parts), 9)
    assert set(found.tensors) == names
    theirs = ancestor.state_dict()
    for own, other in found.tensors.items():
        assert torch.equal(model.state_dict()[own], theirs[other])
    assert found.nbytes == sum(before[name].nbytes for name in names)


def test_the_copies_belong_to_the_model_alone(store):
    ref = put(store, net(4))
    model = net(4)
    inherit(model, store, parent=ref)
    before = store.get(ref).manifest()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert store.get(ref).manifest() == before
    assert store.verify() == []


def test_the_store_provides_the_model_that_shares_most(store):
    put(store, net(8, 8), campaign="a")
    best = put(store, net(4, 8, 8), campaign="b")
    found = inherit(net(4, 8, 16), store, mode="lp", provider="store")
    assert found is not None
    assert found.ref == best
    here = inherit(net(4, 8, 16), store, provider="store", where={"campaign": "a"})
    assert here is None or here.ref != best


def test_a_trial_that_runs_again_is_not_its_own_ancestor(store):
    """Its driver was killed when the model was stored, and before the campaign had heard of it."""
    other = put(store, net(4, 8, 8), campaign="a", trial=2)
    own = put(store, net(4, 8, 16), campaign="a", trial=3)
    put(
        store, net(4, 8, 16), campaign="a", trial=3, again=1
    )  # the next driver was killed there, too
    for trial, ancestor in ((3, other), (4, own)):
        model = net(4, 8, 16)
        where = {"campaign": "a"}
        found = inherit(model, store, provider="store", where=where, trial=trial)
        assert found is not None
        assert found.ref == ancestor


def test_no_ancestor_and_a_retired_one_leave_the_model_fresh(store):
    ref = put(store, net(4))
    store.retire(ref)
    model = net(4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert inherit(model, store, parent=ref) is None
    assert inherit(model, store, parent=None) is None
    assert inherit(model, store, provider="store") is None
    assert copied(before, model) == set()


@pytest.mark.parametrize(("trial", "asked"), [(7, "manifest"), (None, "signature"), (7, "get")])
def test_the_next_best_is_inherited_if_the_nearest_goes_just_now(store, trial, asked, monkeypatch):
    """Another process retires it, between one question to the store and the next."""
    near, next_best = put(store, net(4, 8, 16), trial=1), put(store, net(4, 8, 8), trial=2)
    answer = getattr(store, asked)

    def late(ref, *names, **options):
        if ref == near and near in [entry.ref for entry in store.log()]:
            store.retire(near)
        return answer(ref, *names, **options)

    monkeypatch.setattr(store, asked, late)
    found = inherit(net(4, 8, 16), store, provider="store", trial=trial)
    assert found.ref == next_best
    assert near not in [entry.ref for entry in store.log()]


def test_an_ancestor_without_a_signature_has_nothing_to_match(store):
    ref = store.put(State(net(4).state_dict()))
    assert inherit(net(4), store, parent=ref) is None


def test_frozen_tensors_cost_no_bytes_in_the_store(store):
    ref = put(store, net(4, 8))
    model = net(4, 8, 16)
    found = inherit(model, store, parent=ref, freeze=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        model(torch.rand(6, 1, 8, 8)).sum().backward()
        optimizer.step()
    blobs = store.stats().blobs
    child = store.put(State(model.state_dict()), parents=[ref])
    fresh = [name for name in model.state_dict() if name not in found.tensors]
    assert fresh
    assert store.stats().blobs - blobs <= len(fresh)
    assert all(
        store.owner(child, own) == ref for own, other in found.tensors.items() if own == other
    )


def test_a_shape_that_differs_copies_nothing():
    model = net(4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = State({"a": torch.ones(4), "b": torch.ones(7)})
    with pytest.raises(StateError, match=r"'0\.weight'.*\(4, 1, 3, 3\) here, \(7,\) there"):
        copy_tensors(model, state, {"0.bias": "a", "0.weight": "b"})
    assert copied(before, model) == set()


@pytest.mark.parametrize("wrong", [{"mode": "best"}, {"provider": "friend"}])
def test_words_that_do_not_exist(store, wrong):
    with pytest.raises(ConfigError):
        inherit(net(4), store, **wrong)


class Language(nn.Module):
    """Reads and writes words, with one table of them or two."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.read = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.write = nn.Linear(4, 7, bias=False)
        if tied:
            self.write.weight = self.read.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.write(self.inner(self.read(words)))


@pytest.mark.parametrize("freeze", [False, True])
def test_a_tensor_with_two_names_has_what_is_said_of_it(store, freeze):
    """The last name won, and the first was said to have been copied as well."""
    ancestor, model = Language(tied=False), Language(tied=True)
    found = inherit(model, store, parent=put(store, ancestor), freeze=freeze)
    theirs = ancestor.state_dict()
    assert found.tensors == {name: name for name in ("read.weight", "inner.weight", "inner.bias")}
    for own, other in found.tensors.items():
        assert torch.equal(model.state_dict()[own], theirs[other])
    assert found.nbytes == sum(parameter.nbytes for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == [not freeze] * 3


def test_of_a_tensor_of_another_precision_the_bytes_of_the_model_count(store):
    """A model in float32 had inherited 200 % of its bytes from one in float64."""
    model = net(4)
    found = inherit(model, store, parent=put(store, net(4).double()))
    assert found.nbytes == sum(tensor.nbytes for tensor in model.state_dict().values())


class Renames(nn.Module):
    """Its state_dict has one of its tensors under another name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self._register_state_dict_hook(renamed)

    def forward(self, x):
        return self.layer(x)


def renamed(module, state, prefix, local):
    state[f"{prefix}weight"] = state.pop(f"{prefix}layer.weight")


def test_what_a_state_dict_has_under_another_name_is_not_inherited_and_said(tmp_path, caplog):
    parent, child = Renames(), Renames()
    with Store(tmp_path) as store:
        ref = store.put(State(dict(parent.state_dict())), signature=signature(parent))
        found = inherit(child, store, parent=ref)
    assert found is not None
    assert dict(found.tensors) == {"layer.bias": "layer.bias"}
    assert torch.equal(child.layer.bias, parent.layer.bias)
    assert "Renames has layer.weight under another name" in caplog.text


class Calibrated(nn.Module):
    """Keeps a tensor beside its state, and gives a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scales = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight / self.scales

    def get_extra_state(self) -> torch.Tensor:
        return self.scales.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scales = state.clone()


def test_a_tensor_that_a_layer_keeps_beside_its_state_is_inherited(store):
    ancestor, model = (nn.Sequential(nn.Linear(3, 3), Calibrated()) for _ in range(2))
    ancestor[1].scales.fill_(7.0)
    found = inherit(model, store, parent=put(store, ancestor))
    assert "1._extra_state" in found.tensors
    assert model[1].scales.tolist() == [7.0] * 3
