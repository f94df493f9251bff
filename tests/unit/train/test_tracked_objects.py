"""The objects of one worker, where a process has had several."""

import gc
from dataclasses import replace

import pytest
import torch
from torch.optim import optimizer as hooks

from elastix.errors import ConfigError, StateError
from elastix.train.replica.tracked_objects import TrackedObjects


def tracked():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = TrackedObjects()
    live.prepare([model, optimizer], torch.device("cpu"))
    return live, model, optimizer


def test_an_optimizer_takes_its_step_where_earlier_runs_of_the_process_are_over():
    before = len(hooks._global_optimizer_pre_hooks)
    for _ in range(3):
        live, model, optimizer = tracked()
        others = [tracked(), tracked()]
        del others
        gc.collect()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        del live, model, optimizer
    gc.collect()
    tracked()
    assert len(hooks._global_optimizer_pre_hooks) <= before + 2


def test_an_optimizer_that_is_tracked_late_goes_on_with_its_moments() -> None:
    """As it has to in a run that is continued, and on a joiner."""

    def made() -> tuple[TrackedObjects, torch.nn.Linear, torch.optim.Adam]:
        live, model = TrackedObjects(), torch.nn.Linear(2, 2)
        live.prepare([model], torch.device("cpu"))
        return live, model, torch.optim.Adam(model.parameters())

    before, model, optimizer = made()
    before.track({"late": optimizer})
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    after, _, again = made()
    after.adopt(before.capture({}))
    after.track({"late": again})
    for live, restored in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert torch.equal(live["exp_avg"], restored["exp_avg"])


SCHEDULES = {
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=8),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1, step / 8)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=12),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_scheduler_that_is_made_and_tracked_late_leaves_the_rates_of_the_state(
    schedule, rate
) -> None:
    """As it is made it sets them to those of its first step, and most go on from what they find."""

    def made():
        model = torch.nn.Linear(2, 1)
        start = rate.clone() if isinstance(rate, torch.Tensor) else rate
        optimizer = torch.optim.Adam(model.parameters(), lr=start)
        live = TrackedObjects()
        live.prepare([model, optimizer], torch.device("cpu"))
        return live, model, optimizer

    def steps(number, optimizer, scheduler):
        found = []
        for _ in range(number):
            optimizer.step()
            scheduler.step()
            group = optimizer.param_groups[0]
            found.append((float(group["lr"]), group["betas"]))
        return found

    before, _, optimizer = made()
    scheduler = schedule(optimizer)
    before.track({"schedule": scheduler})
    steps(3, optimizer, scheduler)
    after, _, other = made()
    after.adopt(before.capture({}).clone())
    again = schedule(other)
    assert list(after.track({"schedule": again})) == []
    after.set_out()
    assert [after.capture({}).meta[f"@{name}"] for name in ("optimizer", "schedule")] == [
        before.capture({}).meta[f"@{name}"] for name in ("optimizer", "schedule")
    ]
    assert steps(4, other, again) == steps(4, optimizer, scheduler)


class Count:
    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state_dict):
        self.number = state_dict["number"]


class Count2(Count):
    """A name that ends like that of a second object."""


@pytest.mark.parametrize("names", [("ema", "ema1"), ("ema1", "ema"), ("ema2", "ema")])
def test_names_that_differ_by_a_number_alone_are_kept_apart(names) -> None:
    before, *_ = tracked()
    before.track({name: Count(7 + place) for place, name in enumerate(names)})
    after, *_ = tracked()
    after.adopt(before.capture({}))
    again = {name: Count() for name in names}
    after.track(again)
    assert [again[name].number for name in names] == [7, 8]


def test_what_is_prepared_takes_no_name_that_is_taken() -> None:
    live, counts = TrackedObjects(), [Count(1), Count(2)]
    live.track({"count1": counts[0], "count2": counts[1]})
    further = [Count(3), Count(4), Count2(5), Count2(6)]
    live.prepare([torch.nn.Linear(2, 1), *further], torch.device("cpu"))
    meta = live.capture({}).meta
    numbers = [value["number"] for key, value in meta.items() if key.startswith("@count")]
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]


class Unread(dict):
    """Tensors of a store, of which a process reads those alone that it has a part of."""

    def items(self):
        raise AssertionError("all of them were read")

    values = items


def test_of_a_stored_state_no_more_is_read_than_a_process_asks_for() -> None:
    live, _, _ = tracked()
    stored = replace(live.capture({}), tensors=Unread())
    assert live.take_passing(stored) is stored


class Masked(torch.nn.Linear):
    def __init__(self, seen: float) -> None:
        super().__init__(2, 1)
        self.register_buffer("mask", torch.ones(1, 2).expand(3, 2), persistent=False)
        self.register_buffer("seen", torch.tensor(seen), persistent=False)


def test_a_newcomer_has_a_mask_that_was_expanded_and_other_buffers_as_they_are() -> None:
    """Nobody can write to a tensor whose elements lie in one place."""
    (first, model), (second, other) = (TrackedObjects(), Masked(7.0)), (TrackedObjects(), Masked(0))
    first.prepare([model], torch.device("cpu"))
    second.prepare([other], torch.device("cpu"))
    state = second.take_passing(first.for_joiners(first.capture({})))
    assert float(other.seen) == 7.0
    assert state.tensors.keys() == first.capture({}).tensors.keys()


def test_what_only_an_outer_optimizer_holds_is_not_copied_late() -> None:
    """The train function changes it when it likes, an average of weights for one."""
    live, model, average = TrackedObjects(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live.prepare([model, average, optimizer], torch.device("cpu"))
    both = [*model.parameters(), *average.parameters()]
    live.keep_outer(torch.optim.SGD(both, lr=0.7))
    assert live.late(live.capture({})) == {"weight", "bias"}


def test_an_optimizer_that_is_tracked_late_keeps_its_own_options_in_an_ancestors_place() -> None:
    """A child of a population has other hyperparameters than its parent."""
    parent, model = TrackedObjects(), torch.nn.Linear(2, 2)
    parent.prepare([model], torch.device("cpu"))
    parent.track({"late": torch.optim.SGD(model.parameters(), lr=0.1)})
    child, own = TrackedObjects(), torch.nn.Linear(2, 2)
    child.prepare([own], torch.device("cpu"))
    child.take_place(parent.capture({}), {}, whole=True)
    late = torch.optim.SGD(own.parameters(), lr=0.7)
    assert list(child.track({"late": late})) == ["late"], "it begins with this run"
    assert late.param_groups[0]["lr"] == 0.7


def test_what_goes_on_with_a_run_does_not_begin_with_it() -> None:
    before, *_ = tracked()
    before.track({"known": Count(7)})
    after, *_ = tracked()
    after.adopt(before.capture({}))
    assert list(after.track({"known": Count(), "fresh": Count()})) == ["fresh"]


def test_a_tensor_with_the_name_of_a_part_is_refused_before_anything_is_trained() -> None:
    """No State of such a model could be stored, and the run would end without one."""
    model = torch.nn.ParameterDict({"w[0:2]": torch.nn.Parameter(torch.ones(2))})
    with pytest.raises(ConfigError, match=r"'w\[0:2\]'.* Nothing was prepared"):
        TrackedObjects().prepare([model], torch.device("cpu"))


def test_a_state_with_tensors_that_no_module_here_has_is_refused() -> None:
    """They were left out of all States from there on, and nothing said so."""
    before, model = TrackedObjects(), torch.nn.ModuleDict({"body": torch.nn.Linear(2, 1)})
    head, critic = torch.nn.Linear(2, 1).requires_grad_(False), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model["head"] = head
    before.prepare([model, critic, optimizer], torch.device("cpu"))
    before.track({"module7": critic})  # whatever it is called, it is kept for who asks for it
    state = before.capture({})
    for lost, given in (
        ("head.weight", [torch.nn.ModuleDict({"body": model["body"]}), critic, optimizer]),
        ("@module1/weight", [model, optimizer]),
    ):
        live = TrackedObjects()
        live.prepare(given, torch.device("cpu"))
        with pytest.raises(StateError, match=f"that no module .* has: {lost}, "):
            live.adopt(state)
    live = TrackedObjects()
    live.prepare([model, critic, optimizer], torch.device("cpu"))
    live.adopt(state)
