"""What exact=True asks of a worker: operators, random numbers, evaluations, what is refused."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from elastix.comm.network.model_layout import compare, layout_of
from elastix.config import ExchangeConfig, FailureConfig, Guard, RunConfig
from elastix.errors import ConfigError
from elastix.state import State
from elastix.train.checkpoint.state_digests import exact_digest
from elastix.train.replica.evaluation import Evaluation, ExactEvaluation
from elastix.train.replica.exactness import (
    RandomPlaces,
    check_configs,
    computes_with,
    deterministic_operators,
    look_at_origin,
)

CPU = torch.device("cpu")


def drawn():
    return [torch.rand(1).item(), random.random(), np.random.rand()]


# ------------------------------------------------------------------------------------ evaluation


class Samples(torch.utils.data.Dataset):
    """The last batch is a short one; a sample draws a number."""

    def __len__(self):
        return 103

    def __getitem__(self, index):
        return torch.tensor([index * 1.1e5]) + torch.rand(1)


def dropped(model, batch):
    """A metric that draws."""
    return {"loss": model(batch).mean() * torch.rand(1).item(), "largest": batch.max() / 3}


def evaluated(kind, size, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    sums = 0
    for rank in range(size):
        torch.manual_seed(rank)  # whatever was drawn before
        work = kind(model, dropped, Samples(), 10, torch.stack, CPU, **more)
        before = drawn()
        torch.manual_seed(rank)
        sums = sums + work.payload(SimpleNamespace(rank=rank, size=size))
        if kind is ExactEvaluation:
            assert drawn()[0] == before[0], "an evaluation drew from what comes after it"
    return work.means(sums)


def test_an_exact_evaluation_is_the_same_to_the_last_bit_for_any_number_of_members():
    alone = evaluated(ExactEvaluation, 1, seed=3)
    assert set(alone) == {"loss", "largest"}
    for size in (2, 3, 5, 20):  # of twenty some have no batch
        assert evaluated(ExactEvaluation, size, seed=3) == alone
    assert evaluated(ExactEvaluation, 1, seed=4) != alone


def test_an_exact_evaluation_means_what_any_evaluation_means():
    exact, usual = evaluated(ExactEvaluation, 2, seed=3), evaluated(Evaluation, 1)
    assert exact["largest"] == pytest.approx(usual["largest"], rel=1e-5)


# -------------------------------------------------------------------------------- random numbers


def test_each_place_has_random_numbers_of_its_own():
    at = {"step": 0}
    seen = []
    for seed in (0, 1):
        places = RandomPlaces(seed, lambda: at["step"])
        comings = [places.boundary, partial(places.slice, 0), partial(places.slice, 1), places.over]
        for at["step"] in (0, 1):
            for come_to in comings:
                come_to()
                seen.append(drawn())
        places.prepared()
        seen.append(drawn())
    assert len({numbers[0] for numbers in seen}) == len(seen)
    RandomPlaces(0, lambda: 0).slice(1)
    assert drawn() == seen[2]


# ------------------------------------------------------------------------------------- operators


def test_an_operator_that_may_give_other_bits_is_refused_by_name():
    def put():
        with deterministic_operators():
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

    with pytest.raises(ConfigError, match=r"exact=True\) and put_: torch has no implementation"):
        put()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))[0] == 1


def test_other_errors_stay_what_they_are():
    def raised():
        with deterministic_operators():
            torch.zeros(2) @ torch.zeros(3)

    with pytest.raises(RuntimeError, match="size"):
        raised()
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_was_asked_for_before_is_asked_for_afterwards():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_operators():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


# --------------------------------------------------------------------------------------- refused


def test_workers_that_compute_differently_are_named():
    model = {"": torch.nn.Linear(2, 1)}
    kinds = ["torch 2.9, AVX512, 1 thread", "torch 2.9, AVX2, 1 thread"]
    layouts = [layout_of(model, kinds[n]) for n in (0, 1, 0)]
    compare(layouts[::2], ["worker 3", "worker 5"])
    with pytest.raises(ConfigError) as raised:
        compare(layouts, ["worker 3", "worker 4", "worker 5"])
    assert f"worker 3, worker 5: {kinds[0]}; worker 4: {kinds[1]}" in str(raised.value)


def test_who_has_prepared_another_model_is_named():
    """A joiner of a group that runs is no rank of it."""
    layouts = [layout_of({"": torch.nn.Linear(size, 1)}) for size in (2, 3)]
    with pytest.raises(ConfigError) as raised:
        compare(layouts, ["the group", "worker 7"])
    said = "entry 0 of the group is parameter weight float32[1, 2], of worker 7 parameter weight"
    assert said in str(raised.value)


def test_who_has_laid_out_its_weights_otherwise_is_named():
    """Gradients would be added up element by element in two orders."""
    plain = torch.nn.Conv2d(2, 3, 2)
    turned = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    assert layout_of({"": plain}) == [
        "parameter weight float32[3, 2, 2, 2]",
        "parameter bias float32[3]",
    ]
    with pytest.raises(ConfigError, match=r"of worker 1 .* with strides \[8, 1, 4, 2\]"):
        compare([layout_of({"": plain}), layout_of({"": turned})], ["worker 0", "worker 1"])


def test_what_a_worker_computes_with_has_all_that_its_last_bits_depend_on(monkeypatch):
    here = computes_with(CPU)
    assert torch.__version__ in here
    assert torch.backends.cpu.get_cpu_capability() in here
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert computes_with(CPU) != here


def test_a_guard_that_goes_by_what_one_worker_reports_is_refused():
    run = RunConfig(exact=True)
    sent = ExchangeConfig()
    check_configs(run, FailureConfig(guard=Guard()), sent)
    check_configs(RunConfig(), FailureConfig(guard=Guard(metric="loss")), sent)
    with pytest.raises(ConfigError, match="Guard"):
        check_configs(run, FailureConfig(guard=Guard(metric="loss")), sent)


def test_sums_that_are_rounded_on_the_way_are_refused():
    narrow = ExchangeConfig(wire="bfloat16")
    check_configs(RunConfig(), FailureConfig(), narrow)
    with pytest.raises(ConfigError, match="wire='bfloat16'"):
        check_configs(RunConfig(exact=True), FailureConfig(), narrow)


def test_a_state_that_was_computed_otherwise_is_told_of(caplog):
    look_at_origin("torch 2.9", "torch 2.9")
    assert not caplog.messages
    look_at_origin("torch 2.8", "torch 2.9")
    assert "computed with torch 2.8, and what is here is torch 2.9" in caplog.messages[-1]
    look_at_origin(None, "torch 2.9")
    assert "without exact=True" in caplog.messages[-1]


# --------------------------------------------------------------------------------------- digests


def stored(**changes):
    tensors = {"w": torch.ones(2), "@rng/torch": torch.zeros(3), "@optimizer/w/m": torch.ones(2)}
    loader = {"position": 8, "owed": [], "paces": {"us": [[0, 12]]}}
    meta = {"step": 3, "reports": 1, "serial": 9, "stored_step": 2, "window": {}, "sentinel": {}}
    meta |= {"@loader/0": loader, "@optimizer": {"lr": 0.1}, "run": "a", "exact": True}
    meta["guard"] = {"gradient": [0.5], "metric": [], "void": [3], "steps": 4}
    for name, value in changes.items():
        (tensors if isinstance(value, torch.Tensor) else meta)[name] = value
    return exact_digest(State(tensors, meta).manifest())


def test_the_digest_of_an_exact_state_leaves_out_what_tells_of_the_way():
    loader = {"position": 8, "owed": [], "paces": {"us": [[0, 99], [1, 7]]}}
    way = {"serial": 10, "stored_step": 3, "window": {"now": 1}, "sentinel": {"n": 1}, "run": "b"}
    way |= {"reports": 2, "guard": {"gradient": [0.5], "metric": [], "void": [], "steps": 3}}
    assert stored(**way, **{"@loader/0": loader}) == stored()


@pytest.mark.parametrize(
    "change",
    [
        {"w": torch.tensor([1.0, 1.0000001])},
        {"@rng/torch": torch.ones(3)},
        {"@optimizer/w/m": torch.zeros(2)},
        {"step": 4},
        {"@optimizer": {"lr": 0.2}},
        {"@loader/0": {"position": 9, "owed": []}},
        {"@tracked": 1},
        {"guard": {"gradient": [0.25], "metric": [], "void": [3], "steps": 4}},
    ],
    ids=str,
)
def test_the_digest_of_an_exact_state_covers_everything_else(change):
    assert stored(**change) != stored()
