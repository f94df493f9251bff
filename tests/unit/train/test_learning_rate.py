"""RateScaling: the factor, its warm-up, and that nobody but the optimizer's step sees it."""

import pytest
import torch

import elastix
from elastix.train.replica.learning_rate import RateScaling, hold_at_end


def scaled(rule="linear", reference=2, warmup_steps=0):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    return weight, optimizer, RateScaling(optimizer, rule, reference, warmup_steps)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_the_update_is_scaled_and_the_rate_is_not(rule, factor):
    weight, optimizer, scaling = scaled(rule)
    scaling.observe(8)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == pytest.approx(-0.1 * factor)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_change_is_spread_over_the_warm_up():
    _, _, scaling = scaled(warmup_steps=4)
    factors = []
    for workers in (4, 4, 4, 4, 4, 2, 2, 2, 2, 2):
        scaling.observe(workers)
        factors.append(scaling.factor)
    assert factors == pytest.approx([1.25, 1.5, 1.75, 2, 2, 1.75, 1.5, 1.25, 1, 1])


def test_it_goes_on_where_its_state_says():
    _, _, one = scaled(warmup_steps=4)
    one.observe(4)
    _, _, other = scaled(warmup_steps=4)
    other.load_state_dict(one.state_dict())
    one.observe(4)
    other.observe(4)
    assert one.factor == other.factor == 1.5


@pytest.mark.parametrize("bad", [{"rule": "cubic"}, {"reference": 0}, {"warmup_steps": -1}])
def test_what_makes_no_sense_is_refused(bad):
    with pytest.raises(elastix.ConfigError, match="No rate was changed"):
        scaled(**bad)


@pytest.mark.parametrize("within", [False, True])
def test_one_cycle_keeps_its_last_rate_in_the_steps_that_losses_add(within, caplog):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler([cycle]) if within else cycle
    before = scheduler.state_dict().keys()
    hold_at_end(scheduler)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    last = cycle.get_last_lr()
    for _ in range(3):
        scheduler.step()
    assert cycle.get_last_lr() == last
    assert scheduler.state_dict().keys() == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
