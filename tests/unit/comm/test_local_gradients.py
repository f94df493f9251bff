"""Gradients before buckets take them: kept apart by ratio, set aside, and unchanged."""

import pytest
import torch

from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.comm.gradients.local_gradients import LocalGradients
from elastix.errors import ConfigError

HALF, DOUBLE = 0, 1
SCALES = [0.5, 2.0]


class Desk:
    """Two parameters, each in a bucket of its own, whose gradients are noted as by the reducer."""

    def __init__(self, *, piped=False):
        self.told = []
        self.parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        self.buckets = [GradientBucket([parameter]) for parameter in self.parameters]
        for bucket in self.buckets:
            bucket.renew()
        self.local = LocalGradients(self.buckets, self, piped=piped)

    def carried(self, parameters):
        self.told += parameters

    def backward(self, *factors):
        """A pass in which each parameter gets that gradient; None for none."""
        losses = [(p * f).sum() for p, f in zip(self.parameters, factors, strict=True) if f]
        sum(losses).backward()
        for bucket, factor in zip(self.buckets, factors, strict=True):
            if not factor:
                continue
            if self.local.set_out or bucket.left:
                self.local.look_for_left(bucket, 0)
            if self.local.apart:
                bucket.added(0)
            bucket.note(0)

    def filled(self):
        """What would go to the other workers."""
        for bucket in self.buckets:
            bucket.begin()
            bucket.fill_missing(SCALES, self.local.ratio)
        return [bucket.views[0][0].item() for bucket in self.buckets]

    def take_step(self):
        self.filled()
        for bucket in self.buckets:
            bucket.close(1)
            bucket.accept(1.0)
        self.local.over()


def test_gradients_of_two_ratios_are_scaled_each_by_its_own():
    desk = Desk()
    desk.backward(1.0, 3.0)
    desk.local.turn_to(DOUBLE)
    desk.backward(10.0, None)
    assert desk.filled() == [0.5 + 20.0, 1.5]


def test_a_ratio_may_come_again():
    desk = Desk()
    desk.backward(1.0, 1.0)
    desk.local.turn_to(DOUBLE)
    desk.backward(10.0, 10.0)
    desk.local.turn_to(HALF)
    desk.backward(5.0, None)
    assert desk.filled() == [3.0 + 20.0, 0.5 + 20.0]


def test_when_the_step_is_over_the_next_one_has_one_ratio_and_no_hook():
    desk = Desk()
    desk.backward(1.0, 1.0)
    desk.local.turn_to(DOUBLE)
    desk.backward(1.0, 1.0)
    desk.take_step()
    assert (desk.local.ratio, desk.local.apart) == (HALF, [])
    for parameter in desk.parameters:
        parameter.grad = None
    desk.backward(4.0, 4.0)
    assert desk.filled() == [2.0, 2.0]


def test_what_is_set_aside_is_neither_seen_nor_scaled_within():
    desk = Desk()
    desk.backward(8.0, 8.0)
    with desk.local.set_aside():
        assert desk.local.aside
        assert not desk.local.given
        desk.parameters[0].grad = torch.ones(2)
        assert desk.local.given
    assert [p.grad[0].item() for p in desk.parameters] == [9.0, 8.0]
    desk.local.look_if_changed()  # what was put together is meant to be so


def test_frozen_parameters_have_all_the_gradients_that_they_will_have():
    desk = Desk()
    assert not desk.local.given
    for parameter in desk.parameters:
        parameter.requires_grad_(False)
    assert desk.local.given


def clipped(desk):
    desk.parameters[1].grad.mul_(0.5)


def exchanged(desk):
    desk.parameters[1].grad = torch.ones(2)


def zeroed(desk):
    desk.parameters[1].grad.zero_()


def dropped(desk):
    desk.parameters[1].grad = None


@pytest.mark.parametrize(
    ("change", "refused"), [(clipped, True), (exchanged, True), (zeroed, False), (dropped, False)]
)
def test_what_is_added_up_may_be_given_up_and_not_changed(change, refused):
    desk = Desk()
    desk.backward(1.0, 1.0)
    desk.local.look_if_changed()
    change(desk)
    if refused:
        with pytest.raises(ConfigError, match="changed within a step that is added up"):
            desk.local.look_if_changed()
        desk.local.as_they_are()
    desk.local.look_if_changed()


@pytest.mark.parametrize("change", [clipped, exchanged, zeroed, dropped])
def test_within_slices_they_may_not_be_given_up_either(change):
    desk = Desk()
    for bucket in desk.buckets:
        bucket.begin_slices()
    desk.backward(1.0, 1.0)
    for bucket in desk.buckets:
        bucket.added_in_slice(0)
    desk.local.look_if_meddled()
    change(desk)
    with pytest.raises(ConfigError, match="within the loop over a step's slices"):
        desk.local.look_if_meddled()


def nothing(desk):
    pass


@pytest.mark.parametrize(("between", "carried"), [(nothing, [0]), (zeroed, []), (dropped, [])])
def test_who_adds_to_the_gradient_of_the_step_before_is_told(between, carried):
    """Where the others' were given up, this one's was too, by a way that leaves no trace."""
    desk = Desk()
    desk.backward(1.0, 1.0)
    desk.take_step()
    desk.local.set_out = True
    between(desk)
    desk.backward(1.0, None)
    assert [desk.parameters.index(p) for p in desk.told] == carried
