"""Gradients that travel in a narrower type than theirs."""

import pytest
import torch
from torch import nn

from elastix.comm.gradients.buckets import build_buckets, keep_whole
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.comm.network.shared_memory import norm_of

TYPES = [torch.bfloat16, torch.float16]


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layer = nn.Linear(5, 3, dtype=dtype)
        self.norm = nn.BatchNorm1d(3)


def bucket_of(model, wire):
    (bucket,) = (b for b in build_buckets([model], wire) if isinstance(b, GradientBucket))
    return bucket


def random_gradients(bucket, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in bucket.parameters:
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = drawn.to(parameter.dtype)


def gradients_of(bucket):
    return [parameter.grad.clone() for parameter in bucket.parameters]


def filled(bucket, scale=1.0):
    bucket.begin()
    bucket.fill_missing([scale], 0)
    bucket.close(1)
    return bucket


@pytest.mark.parametrize("wire", TYPES)
def test_a_number_that_is_told_as_a_gradient_is_not_rounded(wire):
    model = nn.Linear(5, 3, dtype=torch.float64)
    model.told = keep_whole(nn.Parameter(torch.zeros(1, dtype=torch.float64)))
    buckets = [b for b in build_buckets([model], wire) if isinstance(b, GradientBucket)]
    assert [bucket.flat.dtype for bucket in buckets] == [torch.float64, wire]
    assert [p is model.told for p in buckets[0].parameters] == [True]


@pytest.mark.parametrize("own", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire", TYPES)
def test_gradients_are_rounded_once_after_their_scale_and_come_back_in_their_own_type(own, wire):
    model = Model(own)
    model.norm = nn.Identity()
    bucket = bucket_of(model, wire)
    random_gradients(bucket, 1)
    local = gradients_of(bucket)
    filled(bucket, 0.3)
    assert bucket.flat.dtype == wire
    assert all(map(torch.equal, gradients_of(bucket), local))  # until the step is agreed
    bucket.accept(1.0)
    for gradient, before in zip(gradients_of(bucket), local, strict=True):
        assert gradient.dtype == own
        assert torch.equal(gradient, (before * 0.3).to(wire).to(own))


@pytest.mark.parametrize("wire", TYPES)
def test_who_is_sent_a_bucket_has_the_gradients_of_who_has_reduced_it(wire):
    """After a loss, too: the mean is over fewer samples than it was scaled for."""
    theirs, ours = bucket_of(Model(), wire), bucket_of(Model(), wire)
    for seed in range(3):
        random_gradients(theirs, seed)
        filled(theirs).accept(4 / 3)
        ours.imitate(theirs.accepted())
        assert all(map(torch.equal, gradients_of(ours), gradients_of(theirs)))


def test_what_a_user_holds_stays_as_it_is_in_the_next_step():
    bucket = bucket_of(Model(), torch.bfloat16)
    random_gradients(bucket, 1)
    filled(bucket).accept(1.0)
    kept = [parameter.grad for parameter in bucket.parameters]
    values = gradients_of(bucket)
    random_gradients(bucket, 2)
    filled(bucket).accept(1.0)
    assert all(map(torch.equal, kept, values))


def test_memory_that_nobody_holds_is_used_again():
    bucket = bucket_of(Model(), torch.bfloat16)
    places = set()
    for seed in range(4):
        random_gradients(bucket, seed)
        filled(bucket).accept(1.0)
        places.add(bucket.parameters[0].grad.data_ptr())
    assert len(places) == 1


def test_gradients_zeroed_in_place_are_not_taken_for_gradients_that_are_left():
    bucket = bucket_of(Model(), torch.bfloat16)
    random_gradients(bucket, 1)
    filled(bucket).accept(1.0)
    bucket.look_for_left(None)
    assert bucket.still_left(None)
    for parameter in bucket.parameters:
        parameter.grad.zero_()
    bucket.look_for_left(None)
    assert not bucket.still_left(None)


def test_the_norm_is_that_of_the_gradients_that_come_back():
    bucket = bucket_of(Model(), torch.bfloat16)
    random_gradients(bucket, 1)
    filled(bucket)
    norm = bucket.norm()
    bucket.accept(1.0)
    assert norm == pytest.approx(norm_of(torch.cat([g.flatten() for g in gradients_of(bucket)])))


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_types_travel_as_they_are(own):
    model = nn.Linear(5, 3, dtype=own)
    assert bucket_of(model, torch.bfloat16).dtype == own


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_gradient_that_nobody_has_is_none_for_who_reduced_it_and_who_is_sent_it(own):
    theirs, ours = (bucket_of(nn.Linear(5, 3, dtype=own), None) for _ in range(2))
    theirs.parameters[0].grad = torch.ones_like(theirs.parameters[0])
    filled(theirs).accept(1.0)
    for bucket in (theirs, ours):
        if bucket is ours:
            ours.imitate(theirs.accepted())
        assert torch.equal(bucket.parameters[0].grad, torch.ones_like(bucket.parameters[0]))
        assert bucket.parameters[1].grad is None


@pytest.mark.parametrize("norm", [True, False])
def test_samples_are_counted_without_rounding_and_buffers_travel_as_they_are(norm):
    model = Model()
    if not norm:
        model.norm = nn.Identity()
    buckets = build_buckets([model], torch.bfloat16)
    (counter,) = (bucket for bucket in buckets if bucket.counts)
    assert counter.dtype == torch.float32
    counter.close(12345)
    assert counter.samples() == 12345
    others = [b for b in buckets if not isinstance(b, GradientBucket)]
    assert all(b.dtype in (torch.float32, torch.int64) for b in others)
