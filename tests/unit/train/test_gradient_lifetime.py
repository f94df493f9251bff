"""How long a worker holds the gradients that it has computed, beside those agreed on."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastix.comm.gradients import slice_rows
from elastix.comm.gradients.gpu_streams import GpuStreams
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.comm.gradients.slice_sums import SliceSums
from elastix.train.replica.solo import run_alone
from tests.unit.train.solo import solo

STEPS = 3


class Watched:
    """A model with one parameter, and which of the gradients are there that autograd has left.

    Attributes:
        counts: how many were, before each forward pass, that are no `param.grad` any more.
    """

    def __init__(self):
        self.model = nn.Linear(4, 3, bias=False)
        self.counts = []
        self._left = []
        self.model.weight.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter):
        if parameter.grad is not None:
            self._left.append(weakref.ref(parameter.grad))

    @property
    def _alive(self):
        return {id(one): one for left in self._left if (one := left()) is not None}

    @property
    def in_place(self):
        """Whether `param.grad` is one of them."""
        return id(self.model.weight.grad) in self._alive

    def count(self):
        self.counts.append(len(self._alive) - self.in_place)


def batches(ctx, watched, **options):
    model, optimizer = ctx.prepare(
        watched.model, torch.optim.SGD(watched.model.parameters(), lr=0.1)
    )
    dataset = TensorDataset(torch.rand(8 * STEPS, 4), torch.arange(8 * STEPS) % 3)
    for epoch in ctx.loader(dataset, batch_size=8, **options).epochs(1):
        for batch in epoch:
            optimizer.zero_grad()
            yield model, batch
            optimizer.step()


def whole(ctx):
    watched = ctx.config["watched"]
    for model, (x, y) in batches(ctx, watched):
        watched.count()
        F.cross_entropy(model(x), y).backward()


def sliced(ctx):
    watched = ctx.config["watched"]
    for model, slices in batches(ctx, watched, slices=4):
        for x, y in slices:
            watched.count()
            F.cross_entropy(model(x), y).backward()


def run(tmp_path, train, watched, *, exact=False):
    settings = solo(tmp_path, exact=exact)
    outcome = run_alone(train, {"watched": watched}, settings, lambda _: None)
    assert outcome.kind == "finished", outcome.traceback


WAYS = pytest.mark.parametrize(
    ("train", "options"),
    [(whole, {}), (sliced, {}), (sliced, {"exact": True})],
    ids=["whole", "sliced", "exact"],
)


@WAYS
def test_on_a_processor_they_stay_until_backward_takes_as_much_memory_again(
    tmp_path, train, options
):
    """Freed before that, it would go back to the system."""
    watched = Watched()
    run(tmp_path, train, watched, **options)
    assert len(watched.counts) >= STEPS
    assert (watched.counts[0], max(watched.counts)) == (0, 1)


@WAYS
def test_elsewhere_they_are_freed_when_they_are_not_needed_any_more(
    tmp_path, train, options, monkeypatch
):
    monkeypatch.setattr(GradientBucket, "freed_late", ())
    monkeypatch.setattr(SliceSums, "keeps", ())
    watched = Watched()
    run(tmp_path, train, watched, **options)
    assert len(watched.counts) >= STEPS
    assert set(watched.counts) == {0}


@WAYS
def test_the_streams_that_computed_them_wait_for_who_has_read_them_before_they_are_freed(
    tmp_path, train, options, monkeypatch
):
    parted = []
    monkeypatch.setattr(GradientBucket, "freed_late", ())
    watched = Watched()
    monkeypatch.setattr(GpuStreams, "wait_for_current", lambda _: parted.append(watched.in_place))
    run(tmp_path, train, watched, **options)
    assert sum(parted) >= STEPS


def test_gradients_of_several_streams_are_copied_after_all_of_them(tmp_path, monkeypatch):
    """A bucket that is filled at once is so on the stream of its last gradient."""
    called = []

    def noted(kind, name):
        before = getattr(kind, name)

        def call(*args):
            called.append(name)
            return before(*args)

        monkeypatch.setattr(kind, name, call)

    monkeypatch.setattr(GradientBucket, "at_once", ("cpu",))
    noted(GpuStreams, "join")
    noted(GradientBucket, "_fill_all")
    run(tmp_path, whole, Watched())
    filled = [place for place, name in enumerate(called) if name == "_fill_all"]
    assert len(filled) == STEPS
    for place in filled[1:]:  # one is that of the launch before; the first step's waits for its end
        assert called[place - 2 : place] == ["join", "join"]


def test_gradients_of_slices_that_nobody_has_are_kept_as_autograd_left_them(tmp_path, monkeypatch):
    found = []

    def looked(gradients, place):
        found.append(is_sole(gradients, place))
        return found[-1]

    is_sole = slice_rows._is_sole
    monkeypatch.setattr(slice_rows, "_is_sole", looked)
    run(tmp_path, sliced, Watched(), exact=True)
    assert len(found) >= STEPS
    assert all(found)
