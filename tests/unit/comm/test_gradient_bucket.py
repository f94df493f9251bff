"""Gradients of sharded parameters in a bucket: FSDP2 sets them, and tells nobody before it does."""

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.mesh_check import pretended
from elastix.sharding import local
from tests.crew import skip_if_refused

HALF, DOUBLE = 0, 1


@pytest.fixture
def bucket():
    """Of two parameters, of which this place has one half each."""
    skip_if_refused()
    with pretended({"shard": 2}) as mesh:
        whole = torch.zeros(4, dtype=torch.float64)
        made = [torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])) for _ in range(2)]
        bucket = GradientBucket(made)
        bucket.renew()
        bucket.begin_slices()
        yield bucket


def add(bucket, place, value):
    """As FSDP2 does it."""
    parameter = bucket.parameters[place]
    if parameter.grad is None:
        gradient = torch.full_like(local(parameter.detach()), value)
        parameter.grad = type(parameter.data).from_local(
            gradient, parameter.device_mesh, parameter.placements, run_check=False
        )
    else:
        parameter.grad._local_tensor += value
    bucket.added_in_slice(place)


def filled(bucket):
    bucket.begin()
    bucket.fill_missing([0.5, 2.0], bucket._parts[0].ratio if bucket._parts else HALF)
    return [view.tolist() for view in bucket.views]


def test_slices_of_two_sizes_are_kept_apart_whether_or_not_each_has_a_gradient(bucket):
    add(bucket, 0, 1.0)
    add(bucket, 1, 10.0)
    bucket.keep_apart(HALF)
    bucket.turn_all_to(DOUBLE)
    add(bucket, 0, 3.0)  # the second parameter was not used in that slice
    assert not bucket.meddled
    assert filled(bucket) == [[0.5 + 6.0] * 2, [5.0] * 2]


def test_slices_of_either_size_may_come_again(bucket):
    """As those of a lost worker do."""
    add(bucket, 0, 1.0)
    bucket.keep_apart(HALF)
    bucket.turn_all_to(DOUBLE)
    add(bucket, 0, 3.0)
    bucket.turn_all_to(HALF)
    add(bucket, 0, 7.0)
    add(bucket, 1, 9.0)
    assert not bucket.meddled
    assert filled(bucket) == [[4.0 + 6.0] * 2, [4.5] * 2]


def test_a_change_behind_autograd_shows(bucket):
    add(bucket, 0, 1.0)
    add(bucket, 1, float("nan"))
    assert not bucket.meddled
    bucket.parameters[0].grad.mul_(0.5)
    assert bucket.meddled


def test_a_gradient_of_the_step_before_is_known_again(bucket):
    add(bucket, 0, 1.0)
    filled(bucket)
    bucket._flags.fill_(1)
    bucket.accept(1.0)
    bucket.begin_slices()
    assert bucket.carried == bucket.parameters[:1]


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_come_back_aligned_as_memory_of_their_own(dtype, wire):
    """Else kernels that go by it would add them up in another order than plain torch does."""
    sizes = [10, 960, 1, 6, 324, 0, 54]
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    bucket = GradientBucket(parameters, wire)
    for _ in range(2):
        bucket.renew()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        bucket.begin()
        bucket.fill_missing([1.0], 0)
        bucket.close(1)
        bucket.accept(0.5)
        assert [p.grad.data_ptr() % 64 for p in parameters if p.numel()] == [0] * 6
        assert all(torch.equal(p.grad, torch.full_like(p, 0.5)) for p in parameters)
        assert float(bucket.flat[: bucket.elements].double().sum()) == 0.5 * sum(sizes)
        assert bucket.norm() == pytest.approx(0.5 * sum(sizes) ** 0.5)


@pytest.mark.parametrize("at_once", [(), ("cpu",)])
def test_what_travels_as_half_is_scaled_before_it_is_rounded(monkeypatch, at_once):
    """Rounded first, a gradient that fits with its scale would be infinite."""
    monkeypatch.setattr(GradientBucket, "at_once", at_once)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 5)]
    bucket = GradientBucket(parameters, torch.float16)
    bucket.renew()
    bucket.begin()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e5)
    bucket.fill_missing([0.25], 0)
    bucket.close(1)
    bucket.accept(1.0)
    half = float(torch.tensor(25000.0).half())
    assert [p.grad.tolist() for p in parameters] == [[half] * 3, [half] * 5]


@pytest.mark.parametrize("at_once", [(), ("cpu",)])
def test_a_gradient_with_a_graph_is_copied_without_it(at_once, monkeypatch):
    """As `backward(create_graph=True)` leaves it."""
    monkeypatch.setattr(GradientBucket, "at_once", at_once)
    bucket = GradientBucket([torch.nn.Parameter(torch.zeros(3))])
    bucket.renew()
    bucket.begin()
    bucket.parameters[0].grad = torch.ones(3, requires_grad=True)
    bucket.fill_missing([0.5], 0)
    assert bucket.views[0].tolist() == [0.5] * 3
    assert not bucket.flat.requires_grad
