"""One window of samples for all loaders; buckets that keep out of the way of what users hold."""

import json

import pytest
import torch
from torch import nn

from elastix.comm.gradients.buckets import build_buckets
from elastix.comm.gradients.buffer_bucket import BufferBucket
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.data.backward_window import Window, lowest
from elastix.errors import ConfigError


def draw(window, loader, size, members=(0, 1)):
    """A batch, as evenly as can be but for the ratio that binds it."""
    bound = window.binding(loader, members)
    shares = {m: size // len(members) + (n < size % len(members)) for n, m in enumerate(members)}
    window.drawn(loader, size, lowest(shares) if bound is None else bound)
    return bound


def test_steps_that_draw_nothing_are_about_the_last_batch_that_was_drawn():
    window = Window()
    draw(window, 0, 7)
    for _ in range(3):
        assert window.ratio == {0: 4, 1: 3}
        window.close((0, 1), drew=True)


def test_who_is_lost_in_a_further_pass_is_missed_once_and_who_was_lost_in_the_first_is_not():
    window = Window()
    draw(window, 0, 9, members=(0, 1, 2))
    assert window.close((0, 2), drew=True) == []  # the samples of 1 come again
    assert window.close((0, 2), drew=False) == []
    assert window.close((2,), drew=False) == [0]
    assert window.close((2,), drew=False) == []
    draw(window, 0, 1, members=(2, 3))
    assert window.close((2, 3), drew=True) == []
    assert window.close((2,), drew=False) == []  # 3 had none of the batch


def test_a_step_with_another_loader_has_nothing_of_the_one_before():
    window = Window()
    draw(window, 0, 7)
    window.close((0, 1), drew=True)
    draw(window, 1, 3)
    assert window.ratios == [{0: 2, 1: 1}]


def test_what_was_added_up_is_so_until_a_step_is_taken_or_void():
    window = Window()
    draw(window, 0, 7)
    assert not window.added_up  # a batch alone is nothing
    for end in (lambda: window.close((0, 1), drew=True), window.void):
        window.passed()
        draw(window, 0, 7)
        assert window.added_up
        end()
        assert not window.added_up


def test_batches_without_a_pass_between_them_have_one_ratio():
    window = Window()
    assert draw(window, 0, 7) is None
    assert draw(window, 1, 3) == {0: 4, 1: 3}
    assert window.ratios == [{0: 4, 1: 3}]


def test_batches_with_a_pass_between_them_have_their_own_each_told_once():
    window = Window()
    for size in (7, 4, 7, 8):
        assert draw(window, size, size) is None
        window.passed()
    assert window.ratios == [{0: 4, 1: 3}, {0: 1, 1: 1}]
    assert window.now == 1
    window.close((0, 1), drew=True)
    assert (window.ratios, window.ratio, window.several) == ([], {0: 1, 1: 1}, True)


def test_a_pass_before_the_first_batch_of_a_step_is_about_the_one_before():
    window = Window()
    draw(window, 0, 7)
    window.close((0, 1), drew=True)
    window.passed()
    draw(window, 0, 4)
    assert (window.ratios, window.now) == ([{0: 4, 1: 3}, {0: 1, 1: 1}], 1)


def test_a_ratio_that_suits_what_was_drawn_together_is_chosen_from_the_first_batch_on():
    """4 samples and 15: of the 15 each worker has its share, and the 4 are not split."""
    window = Window()
    assert draw(window, 0, 4) is None
    assert draw(window, 1, 15) == {0: 1, 1: 1}
    window.close((0, 1), drew=True)
    assert draw(window, 0, 4) == {0: 8, 1: 7}
    assert draw(window, 1, 15) == {0: 8, 1: 7}
    window.close((0, 1), drew=True)
    assert window.binding(0, (0, 1, 2)) == {0: 1, 1: 1, 2: 1}
    assert window.binding(1, (0, 1)) is None  # as the first it was never drawn with another


def test_a_joiner_is_given_the_window():
    window = Window()
    draw(window, 0, 7)
    draw(window, 1, 15)
    window.close((0, 1), drew=True)
    joiner = Window()
    joiner.load_state_dict(json.loads(json.dumps(window.state_dict())))
    assert joiner.ratio == {0: 4, 1: 3}
    assert joiner.binding(0, (0, 1)) == window.binding(0, (0, 1)) == {0: 8, 1: 7}
    joiner.forget()
    assert not joiner.ratio
    assert joiner.binding(0, (0, 1)) is None


def test_an_older_state_has_samples_by_worker():
    window = Window()
    window.load_state_dict({"0": 10, "1": 5, "2": 0})
    assert window.ratio == {0: 2, 1: 1}


def gradient_bucket(model):
    return next(b for b in build_buckets([model]) if isinstance(b, GradientBucket))


def take_step(model, bucket, value):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    bucket.begin()
    bucket.fill_missing([1.0], 0)
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


def in_two_ratios(model, bucket, between=lambda _: None):
    """Gradients of 1, then of 10 under another ratio, then of 100 under the first again."""
    bucket.keep_apart(0)
    for ratio, value in ((0, 1.0), (1, 10.0), (0, 100.0)):
        for place, parameter in enumerate(bucket.parameters):
            bucket.turn_to(place, ratio)
            fresh = torch.full_like(parameter, value)
            parameter.grad = fresh if parameter.grad is None else parameter.grad.add_(fresh)
            bucket.added(place)
        if ratio == 1:
            between(model)
    bucket.begin()
    bucket.fill_missing([0.5, 0.25], 0)
    found = [view.clone() for view in bucket.views]
    bucket.restart()
    bucket.fill_missing([1.0, 0.0], 0)  # in another group
    return [float(part.flatten()[0]) for part in (found[0], bucket.views[0])]


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (lambda _: None, [53.0, 101.0]),
        (lambda model: model.zero_grad(), [50.0, 100.0]),
        (lambda model: model.zero_grad(set_to_none=False), [50.0, 100.0]),
    ],
    ids=["kept", "dropped", "zeroed"],
)
def test_gradients_of_two_ratios_each_have_their_scale(between, expected):
    model = nn.Linear(3, 2)
    assert in_two_ratios(model, gradient_bucket(model), between) == expected


def test_what_nobody_who_counts_has_is_none():
    """Not zero: an optimizer would decay it. A placeholder's gradient is one that nobody has."""
    model = nn.Linear(3, 2)
    bucket = gradient_bucket(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    bucket.begin()
    bucket.fill_missing([0.0], 0)
    bucket._flag()
    bucket.accept(1.0)
    assert all(parameter.grad is None for parameter in model.parameters())


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
    buffers.fill_missing([0.5], 0)
    buffers.accept(2.0)
    assert module.scale._version == version


def test_of_several_buffers_those_are_written_that_differ_in_the_way_in_which_they_were_changed():
    module = nn.Linear(2, 2)
    given = {
        "first": torch.zeros(3),
        "empty": torch.zeros(0),
        "same": torch.ones(()).expand(2, 2),  # to write to it would be an error
        "counted": torch.zeros(2, 2).t(),
        "last": torch.zeros(()),
    }
    for name, buffer in given.items():
        module.register_buffer(name, buffer)
    buffers = next(b for b in build_buckets([module]) if isinstance(b, BufferBucket))
    buffers.begin()
    module.first.data[2] = 4.0
    module.counted[0, 1] = 8.0
    module.last = torch.tensor(16.0)  # another tensor from now on
    versions = {name: getattr(module, name)._version for name in given}
    buffers.fill_missing([0.5], 0)  # of two workers the other has changed nothing
    buffers.accept(1.0)
    assert module.first.tolist() == [0.0, 0.0, 2.0]
    assert module.counted.tolist() == [[0.0, 4.0], [0.0, 0.0]]
    assert module.last.item() == 8.0
    assert module.same.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    after = {name: getattr(module, name)._version for name in given}
    assert {name for name in given if after[name] != versions[name]} == {"counted"}


def test_a_buffer_that_its_module_has_no_more_is_named():
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2))
    buffers = next(b for b in build_buckets([module]) if isinstance(b, BufferBucket))
    del module.scale
    with pytest.raises(ConfigError, match=r"buffer scale of Linear was .* and is gone"):
        buffers.remember()


def _in_inference(scale):
    with torch.inference_mode():
        return scale.clone()


@pytest.mark.parametrize(
    ("change", "now"),
    [
        (lambda scale: torch.ones(3), r"float32\[3\] now"),
        (lambda scale: torch.ones(1), r"float32\[1\] now"),  # could be copied into two elements
        (lambda scale: torch.ones(2).double(), r"float64\[2\] now"),
        (lambda scale: torch.ones(1).expand(2), "expanded from fewer"),
        (lambda scale: scale.resize_(1), r"float32\[1\] now"),
        (lambda scale: scale.resize_(0), r"float32\[0\] now"),
        (lambda scale: None, "is gone"),
        (_in_inference, "inference mode"),
    ],
)
def test_a_buffer_that_became_something_else_is_refused_by_name(change, now):
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2))
    buffers = next(b for b in build_buckets([module]) if isinstance(b, BufferBucket))
    buffers.begin()
    module.scale = change(module.scale)
    with pytest.raises(ConfigError, match=f"buffer scale of Linear was .*{now}"):
        buffers.fill_missing([1.0], 0)


def test_what_was_not_finite_is_averaged_by_its_value():
    """Of two workers with half of the samples each; the other has seen 4 everywhere."""
    module = nn.Linear(2, 2)
    start = torch.tensor([torch.inf, torch.nan, -torch.inf, 0.0])
    module.register_buffer("lowest", start.clone())
    buffers = next(b for b in build_buckets([module]) if isinstance(b, BufferBucket))
    buffers.begin()
    module.lowest.fill_(2.0)
    buffers.fill_missing([0.5], 0)
    buffers.views[0].add_(0.5 * 4.0)
    buffers.accept(1.0)
    assert module.lowest.tolist() == [3.0, 3.0, 3.0, 3.0]


def test_what_stays_infinite_does_so_and_a_worker_without_samples_adds_nothing():
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    buffers = next(b for b in build_buckets([module]) if isinstance(b, BufferBucket))
    for scale, filled in ((0.5, [0.0, -torch.inf]), (0.0, [0.0, 0.0])):
        buffers.begin()
        buffers.fill_missing([scale], 0)
        assert buffers.views[0].tolist() == filled
    buffers.views[0].fill_(-torch.inf)[0] = 0.0
    buffers.accept(1.0)
    assert module.mask.tolist() == [0.0, -torch.inf]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64])
def test_whole_numbers_that_go_down_do_so_for_who_had_no_samples_or_no_slices(dtype):
    """The other had 0 in the end; or nobody else had anything of the batch."""
    module = nn.Linear(2, 2)
    module.register_buffer("left", torch.ones(3, dtype=dtype))
    buffers = next(b for b in build_buckets([module]) if isinstance(b, BufferBucket))

    def agreed(scale, others):
        buffers.fill_missing([scale], 0)
        buffers.views[0].clamp_(min=others)
        buffers.accept(1.0)
        found = module.left.long().tolist()
        module.left.fill_(1)
        buffers.rebase()
        buffers.begin()
        return found

    buffers.begin()
    assert agreed(0.0, others=0) == [0, 0, 0]  # a placeholder
    module.left.fill_(0)
    assert agreed(0.5, others=0) == [0, 0, 0]
    buffers.begin_slices()
    assert agreed(0.5, others=0) == [0, 0, 0]  # none of its own
    buffers.begin_slices()
    for value in (0, 1):  # of what each leaves
        module.left.fill_(value)
        buffers.end_slice(0, counts=True)
    assert agreed(0.5, others=0) == [1, 1, 1]
    buffers.begin_slices()
    for counts in (True, False):
        module.left.fill_(1 - counts)
        buffers.end_slice(0, counts=counts)
    assert agreed(0.5, others=0) == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint16, torch.uint32])
def test_buffers_of_types_that_no_backend_reduces_are_carried_as_wider_ones(dtype):
    module = nn.Linear(2, 2)
    module.register_buffer("table", torch.tensor([0, 1]).to(dtype))
    buffers = next(b for b in build_buckets([module]) if isinstance(b, BufferBucket))
    buffers.begin()
    buffers.fill_missing([1.0], 0)
    buffers.views[0].fill_(1)  # as the others had it
    buffers.accept(1.0)
    assert module.table.dtype == dtype
    assert module.table.tolist() == torch.ones(2).to(dtype).tolist()


def test_a_buffer_that_cannot_be_carried_is_refused_by_name():
    module = nn.Linear(2, 2)
    module.register_buffer("bits", torch.zeros(2, dtype=torch.uint64))
    with pytest.raises(ConfigError, match=r"bits of the prepared Linear is torch\.uint64"):
        build_buckets([module])
