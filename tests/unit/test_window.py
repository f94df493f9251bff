"""One window of samples for all loaders; buckets that keep out of the way of what users hold."""

import pytest
import torch
from torch import nn

from elastix.comm.buckets import BufferBucket, GradientBucket, build_buckets
from elastix.data.window import Window
from elastix.errors import ConfigError
from tests.unit.test_loader import loader_of


def two_loaders(members=(0, 1)):
    return [loader_of(0, members, length=20, batch_size=size)[0] for size in (7, 3)]


def test_steps_that_draw_nothing_are_about_the_last_batch_that_was_drawn():
    window, loaders = Window(), two_loaders()
    loaders[0].next_batch()
    for _ in range(3):
        assert window.shares(loaders) == {0: 4, 1: 3}
        window.close(loaders)
        loaders[0].commit((0, 1))


def test_a_step_with_another_loader_has_nothing_of_the_one_before():
    window, loaders = Window(), two_loaders()
    loaders[0].next_batch()
    window.close(loaders)
    loaders[0].commit((0, 1))
    loaders[1].next_batch()
    assert window.shares(loaders) == {0: 2, 1: 1}


def test_batches_of_two_loaders_for_one_step_count_together():
    window, loaders = Window(), two_loaders()
    for loader in loaders:
        loader.next_batch()
    assert window.shares(loaders) == {0: 6, 1: 4}


def test_a_joiner_is_given_the_window():
    window, loaders = Window(), two_loaders()
    loaders[0].next_batch()
    window.close(loaders)
    loaders[0].commit((0, 1))
    joiner = Window()
    joiner.load_state_dict(window.state_dict())
    assert joiner.shares(two_loaders()) == {0: 4, 1: 3}
    joiner.forget()
    assert not joiner.shares(two_loaders())


def gradient_bucket(model):
    return next(b for b in build_buckets([model]) if isinstance(b, GradientBucket))


def take_step(model, bucket, value):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    bucket.begin()
    bucket.fill_missing(1.0)
    bucket.touched = [True] * len(bucket.parameters)
    bucket.accept(1.0)


@pytest.mark.parametrize(
    "keep",
    [
        lambda gradient: gradient,
        lambda gradient: gradient.detach(),
        lambda gradient: gradient.view(-1),
        lambda gradient: gradient.numpy(),
    ],
    ids=["itself", "detached", "a view", "as an array"],
)
def test_gradients_that_somebody_keeps_stay_as_they_are(keep):
    model = nn.Linear(3, 2)
    bucket = gradient_bucket(model)
    take_step(model, bucket, 1.0)
    kept = keep(model.weight.grad)
    model.zero_grad()
    take_step(model, bucket, 5.0)
    assert (torch.as_tensor(kept) == 1).all()


def test_memory_that_nobody_keeps_is_used_again():
    model = nn.Linear(3, 2)
    bucket = gradient_bucket(model)
    take_step(model, bucket, 1.0)
    model.zero_grad()
    before = bucket.flat.data_ptr()
    take_step(model, bucket, 5.0)
    assert bucket.flat.data_ptr() == before


def test_buffers_that_nobody_changed_are_not_written():
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.tensor([2.0, 3.0]))
    buffers = next(b for b in build_buckets([module]) if isinstance(b, BufferBucket))
    version = module.scale._version
    buffers.begin()
    buffers.fill_missing(0.5)
    buffers.accept(2.0)
    assert module.scale._version == version


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint16, torch.uint32])
def test_buffers_of_types_that_no_backend_reduces_are_carried_as_wider_ones(dtype):
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.tensor([0, 1]).to(dtype))
    buffers = next(b for b in build_buckets([module]) if isinstance(b, BufferBucket))
    buffers.begin()
    buffers.fill_missing(1.0)
    buffers.views[0].fill_(1)  # as the others had it
    buffers.accept(1.0)
    assert module.table.dtype == dtype
    assert module.table.tolist() == torch.ones(2).to(dtype).tolist()


def test_a_buffer_that_cannot_be_carried_is_refused_by_name():
    module = nn.Linear(2, 2)
    module.register_buffer("bits", torch.zeros(2, dtype=torch.uint64))
    with pytest.raises(ConfigError, match=r"bits of the prepared Linear is torch\.uint64"):
        build_buckets([module])
