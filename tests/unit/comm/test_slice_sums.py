"""What a worker adds up of a bucket, slice by slice."""

import random

import numpy
import pytest
import torch

from elastix.comm.gradients import slice_rows
from elastix.comm.gradients.buckets import build_buckets
from elastix.comm.gradients.slice_rows import KeptGradients
from elastix.comm.gradients.slice_sums import SliceSums
from elastix.comm.network.process_group import Alone, Wiring
from elastix.comm.network.tree_reduction import Sharing
from elastix.comm.slice_tree import held_nodes
from elastix.errors import ConfigError
from tests.unit.comm.slice_sums import bits, tree_total

ALONE = Alone(Wiring(address=("", 0), interface="", backend="gloo", me=0, members=(0,)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)


def slices_of(bucket, present):
    """By slice, what the bucket might be filled with: values at its places, and zeros elsewhere."""
    generator = torch.Generator().manual_seed(3)
    filled = {number: torch.zeros_like(bucket.flat) for number in present}
    for flat in filled.values():
        for view in bucket.views_in(flat):
            if bucket.dtype.is_floating_point:
                exponents = torch.randint(-20, 20, view.shape, generator=generator)
                view.copy_(torch.ldexp(torch.randn(view.shape, generator=generator), exponents))
            else:
                view.copy_(torch.randint(-9, 9, view.shape, generator=generator))
    return filled


def complete(filled, bucket, samples):
    """With the flags and the count that the bucket adds by itself."""
    bucket.flat.copy_(filled)
    bucket.close(samples)
    return bucket.flat.clone()


@pytest.mark.parametrize("absent", [(), (2, 5, 6, 7)])
def test_the_bucket_becomes_the_sum_over_the_tree_in_any_order_of_slices(absent):
    present = [number for number in range(8) if number not in absent]
    draws = random.Random(0)
    for bucket in build_buckets([Model()]):
        sums = SliceSums(bucket)
        for _ in range(3):  # memory is used again from step to step
            filled = slices_of(bucket, present)
            leaves = {n: complete(filled[n], bucket, n + 1) for n in present}
            sums.begin(present, 8)
            for number in draws.sample(present, len(present)):
                bucket.flat.copy_(filled[number])
                bucket.close(number + 1)
                assert sums.lacks(number)
                sums.take(number)
                assert not sums.lacks(number)
                bucket.flat.fill_(7)  # what was taken does not lie there
            reduction = sums.launch(ALONE, Sharing((frozenset(present),), 8))
            reduction.finish()
            wanted = tree_total(leaves, bucket.reduce, 0, 8)
            assert torch.equal(bits(bucket.flat), bits(wanted))


def test_what_was_taken_stays_when_it_has_been_reduced():
    bucket = build_buckets([Model()])[0]
    sums = SliceSums(bucket)
    sums.begin(range(4), 4)
    for number, filled in slices_of(bucket, range(4)).items():
        bucket.flat.copy_(filled)
        bucket.close(1)
        sums.take(number)
    sharing = Sharing((frozenset(range(4)),), 4)
    sums.launch(ALONE, sharing).finish()
    first = bucket.flat.clone()
    bucket.flat.fill_(7)
    sums.launch(ALONE, sharing).finish()
    assert torch.equal(bits(bucket.flat), bits(first))


@pytest.mark.parametrize("absent", [(), (2, 5, 6, 7)])
def test_gradients_that_come_one_by_one_add_up_to_the_same_and_the_root_is_scaled(absent):
    """Of some slices; others are given whole. Each lacks the gradient of some parameter."""
    present = [number for number in range(8) if number not in absent]
    draws = random.Random(0)
    bucket = build_buckets([Model()])[0]
    sums = SliceSums(bucket)
    for _ in range(3):
        filled = slices_of(bucket, present)
        lacking = {number: draws.randrange(len(bucket.views)) for number in present}
        for number, place in lacking.items():
            bucket.views_in(filled[number])[place].zero_()
        leaves = {n: complete(filled[n], bucket, n + 1) for n in present}
        sums.begin(present, 8, scale=1 / 8)
        sums.collect(0)
        sums.add(0, bucket.views[0])  # of a placeholder: it counts for nothing
        for number in draws.sample(present, len(present)):
            sums.begin_slice()
            bucket.flat.copy_(filled[number])
            if draws.random() < 0.7:
                sums.collect(number)
                for place in draws.sample(range(len(bucket.views)), len(bucket.views)):
                    gradient = bucket.views_in(filled[number])[place]
                    sums.add(place, None if place == lacking[number] else gradient)
                for view in bucket.views:
                    view.fill_(7)  # nothing of a gradient lies there
            bucket.close(number + 1)
            sums.take(number)
        sums.launch(ALONE, Sharing((frozenset(present),), 8)).finish()
        wanted = tree_total(leaves, bucket.reduce, 0, 8)
        wanted[: bucket.elements].mul_(1 / 8)  # and not flags and counts
        assert torch.equal(bits(bucket.flat), bits(wanted))


def nodes_of(rank, draws, present):
    """What a worker of two ends with, for slices of a random half."""
    held = frozenset(draws.sample(present, max(1, len(present) // 2)))
    both = held, frozenset(present) - held
    return both[rank], held_nodes(both[rank], frozenset(present), 8)


@pytest.mark.parametrize("piece", [1 << 18, 4])  # elements: the whole gradient, and not a divisor
@pytest.mark.parametrize("absent", [(), (2, 5, 6, 7)])
def test_gradients_that_are_kept_as_autograd_left_them_add_up_to_the_same(
    absent, piece, monkeypatch
):
    """Of some slices; some share memory, and some of the slices are taken over from another."""
    monkeypatch.setattr(slice_rows, "_PIECE", piece)
    present = [number for number in range(8) if number not in absent]
    draws = random.Random(1)
    bucket = build_buckets([Model()])[0]
    sums = SliceSums(bucket)
    for _ in range(20):
        filled = slices_of(bucket, present)
        leaves = {n: complete(filled[n], bucket, n + 1) for n in present}
        mine, nodes = nodes_of(0, draws, present)
        sums.begin(present, 8, nodes, scale=1 / 8)
        for number in [*sorted(mine), *draws.sample(present, len(present))]:
            if not sums.lacks(number):
                continue
            sums.begin_slice()
            gradients = [view.clone() for view in bucket.views_in(filled[number])]
            if draws.random() < 0.2:
                flat = filled[number].clone()
                gradients = bucket.views_in(flat)  # each in memory of them all
            bucket.flat.copy_(filled[number])
            if draws.random() < 0.8:
                sums.collect(number)
                for place in draws.sample(range(len(gradients)), len(gradients)):
                    if draws.random() < 0.2:  # not one element after the other
                        gradients[place] = torch.stack([gradients[place]] * 2, dim=-1)[..., 0]
                    sums.add(place, gradients[place])
            bucket.close(number + 1)
            sums.take(number)
            if draws.random() < 0.2:
                assert [node for node, _ in sums.rows]  # whoever asks changes nothing
        sums.launch(ALONE, Sharing((frozenset(present),), 8)).finish()
        wanted = tree_total(leaves, bucket.reduce, 0, 8)
        wanted[: bucket.elements].mul_(1 / 8)
        assert torch.equal(bits(bucket.flat), bits(wanted))


def taken(sums, bucket, number, made):
    """A slice whose gradients, which `made` makes in the shapes of views, come one by one."""
    sums.begin_slice()
    sums.collect(number)
    for place, view in enumerate(bucket.views):
        bucket.parameters[place].grad = made(view)
        sums.add(place, bucket.parameters[place].grad)
    bucket.close(1)
    sums.take(number)
    sums.own()
    for parameter in bucket.parameters:
        parameter.grad = None


def of_one(shape=(6,)):
    """A bucket of one parameter, and its sums at the beginning of a step of two slices."""
    bucket = build_buckets([torch.nn.ParameterList([torch.zeros(shape)])])[0]
    sums = SliceSums(bucket)
    sums.begin(range(2), 2)
    return bucket, sums


def kept(sums):
    (row,) = sums._sums.sums.values()
    assert isinstance(row, KeptGradients)
    return row._gradients[0]


def test_a_gradient_that_nobody_else_has_is_not_copied():
    bucket, sums = of_one()
    memory = []

    def made(view):
        gradient = torch.ones_like(view)
        memory.append(gradient.data_ptr())
        return gradient

    taken(sums, bucket, 0, made)
    assert [kept(sums).data_ptr()] == memory


@pytest.mark.parametrize("hold", [lambda gradient: gradient.view(2, 3), lambda gradient: gradient])
def test_what_somebody_has_of_a_slice_stays_as_it_was_and_may_be_written_to(hold):
    bucket, sums = of_one()
    held = []

    def made(view):
        gradient = torch.ones_like(view)
        held.append(hold(gradient))
        return gradient

    taken(sums, bucket, 0, made)
    held[0].mul_(5)  # a buffer that a hook of theirs uses again
    taken(sums, bucket, 1, lambda view: torch.full_like(view, 2))
    assert torch.equal(held[0].flatten(), torch.full((6,), 5.0))
    ((_, row),) = sums.rows
    assert torch.equal(bucket.views_in(row)[0], torch.full((6,), 3.0))


def test_gradients_in_one_memory_are_not_added_up_in_it():
    """Autograd gives two parameters the same memory if it sends both the same gradient."""
    bucket = build_buckets([torch.nn.ParameterList([torch.zeros(6), torch.zeros(2, 3)])])[0]
    sums = SliceSums(bucket)
    sums.begin(range(2), 2)
    shared = torch.ones(6)
    for number in range(2):
        taken(sums, bucket, number, shared.view_as)
    assert torch.equal(shared, torch.ones(6))
    ((_, row),) = sums.rows
    assert all(torch.equal(view, torch.full_like(view, 2)) for view in bucket.views_in(row))


def test_a_gradient_with_a_graph_is_added_without_it():
    """As `backward(create_graph=True)` leaves them."""
    bucket, sums = of_one()
    for number in range(2):
        taken(sums, bucket, number, lambda view: torch.ones_like(view).requires_grad_())
    ((_, row),) = sums.rows
    assert torch.equal(bucket.views_in(row)[0], torch.full((6,), 2.0))
    assert not row.requires_grad


def test_memory_that_is_not_torchs_is_copied():
    (bucket, sums), foreign = of_one(), numpy.ones(6, dtype=numpy.float32)
    for number in range(2):
        foreign[:] = number + 1  # a backward function of theirs that has one array
        taken(sums, bucket, number, lambda _: torch.from_numpy(foreign))
    ((_, row),) = sums.rows
    assert torch.equal(bucket.views_in(row)[0], torch.full((6,), 3.0))


def test_a_gradient_that_is_changed_all_the_same_is_an_error():
    bucket, sums = of_one()
    taken(sums, bucket, 0, torch.ones_like)
    kept(sums).mul_(2)
    sums.begin_slice()
    sums.collect(1)
    with pytest.raises(ConfigError, match="changed in place"):
        sums.add(0, torch.ones(6))


def test_what_a_worker_ends_with_lies_where_the_others_read_it():
    """Of two workers with a batch of eight slices, the second; without a copy at the end."""
    bucket = build_buckets([torch.nn.Linear(1, 1 << 20)])[0]
    bucket.shared = True
    bucket.renew()
    sums = SliceSums(bucket)
    sums.begin(range(8), 8, held_nodes(frozenset(range(4, 8)), frozenset(range(8)), 8))
    for number in range(4, 8):
        sums.begin_slice()
        sums.collect(number)
        for place, view in enumerate(bucket.views):
            sums.add(place, torch.full_like(view, number))
        bucket.close(1)
        sums.take(number)
    ((node, row),) = sums.rows
    assert node.slices == range(4, 8)
    assert row.is_set_to(bucket.rows[0])
    assert all(torch.equal(view, torch.full_like(view, 22)) for view in bucket.views_in(row))


def test_gradients_that_are_zeroed_in_place_leave_the_bucket_its_memory():
    bucket = build_buckets([Model()])[0]
    memory = bucket.flat.data_ptr()
    for _ in range(3):
        bucket.begin_slices()
        bucket.begin()
        assert bucket.flat.data_ptr() == memory
        bucket.collect = lambda *_: None
        for place, parameter in enumerate(bucket.parameters):
            parameter.grad = torch.ones_like(parameter)
            bucket.fill(place, (), 0)
        bucket.close(1)
        bucket.forget_slice()
        bucket.accept(1.0)
        for parameter in bucket.parameters:
            parameter.grad.zero_()


needs_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have the type of the parameter"
)


@needs_grad_dtype
def test_a_gradient_of_a_wider_type_is_rounded_before_it_is_added_to_others():
    model = Model()
    model.norm.bias.grad_dtype = None
    bucket, taken = build_buckets([model])[0], []
    bucket.begin()
    bucket.collect = lambda _place, gradient: taken.append(gradient)
    bucket.parameters[0].grad = torch.full((3,), 0.1, dtype=torch.float64)
    bucket.fill(0, (), 0)
    assert torch.equal(taken[0], torch.full((3,), 0.1))


@needs_grad_dtype
def test_whose_gradient_is_to_stay_of_another_type_is_refused():
    model = Model()
    model.layer.weight.grad_dtype = torch.float64
    with pytest.raises(ConfigError, match=r"layer\.weight of .*grad_dtype torch\.float64"):
        build_buckets([model])
