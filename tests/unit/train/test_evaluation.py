"""A metric over a dataset that a group shares out, without a group."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from elastix.train.replica.evaluation import (
    Evaluation,
    ExactEvaluation,
    MetricsUnderWay,
    buffers_kept,
    measure,
    name_of,
)
from elastix.train.replica.schedule_runs import required


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3.0])
def test_a_member_without_a_sample_adds_nothing_whatever_the_metric_says(value):
    work = Evaluation(
        torch.nn.Linear(1, 1), lambda *_: value, [0], 4, torch.tensor, torch.device("cpu")
    )
    idle, busy = (work.payload(SimpleNamespace(rank=rank, size=2)) for rank in range(2))
    assert idle.tolist() == [0.0, 0.0]
    assert busy.tolist() == pytest.approx([1.0, value], nan_ok=True)


@pytest.mark.parametrize("seen_to", [lambda metric: metric, MetricsUnderWay().watched, required])
def test_a_single_number_has_the_name_of_its_function_if_that_has_one(seen_to):
    def loss(_model, _batch, power=1):
        return 2.0**power

    model, batch = torch.nn.Linear(1, 1), torch.zeros(1)
    assert measure(MetricsUnderWay().watched(loss), model, batch) == {"loss": 2.0}
    assert name_of(seen_to(loss)) == "loss"
    assert name_of(seen_to(partial(loss, power=3))) == "metric"


def spread(_model, batch):
    """As scores have it that compare samples with each other: of a single one there is none."""
    assert len(batch) > 1
    return batch.float().var()


def exact():
    given = torch.nn.Linear(1, 1), spread, list(range(8)), 4, torch.tensor, torch.device("cpu")
    return ExactEvaluation(*given, seed=0)


def test_a_metric_is_given_batches_alone_by_who_has_none_and_by_who_follows():
    alone, follower = exact(), exact()
    idle = exact().payload(SimpleNamespace(rank=0, size=3))
    follower.imitate(None)
    sums = alone.payload(SimpleNamespace(rank=0, size=1))
    assert not idle.any()
    assert follower.means(sums) == alone.means(sums)


class Places:
    """Eight that split a worker's samples, as one of them sees them."""

    last_stage = None

    def __init__(self, index):
        self.part = self.stream = index, 8

    def agree(self, *_numbers):
        return True

    def add_up(self, sums):
        pass


@pytest.mark.parametrize("kind", [Evaluation, partial(ExactEvaluation, seed=0)])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("index", range(8))
def test_a_place_without_a_sample_runs_no_more_of_them_than_the_others(kind, rank, index):
    """What does not fit into its memory would end the run at the end of an evaluation."""
    seen = []
    work = kind(
        torch.nn.Linear(1, 1),
        lambda _, batch: seen.append(len(batch)) or 1.0,
        list(range(64 + 5)),
        64,
        torch.tensor,
        torch.device("cpu"),
        Places(index),
    )
    work.payload(SimpleNamespace(rank=rank, size=3))
    work.imitate(None)
    assert max(seen) <= 64 // 8


class Observed(torch.nn.Module):
    """It looks at what it is given in eval mode too, as observers of quantization do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.max())
        self.seen += len(x)
        return x * self.largest + self.seen


def test_what_batches_move_in_buffers_is_the_same_for_any_number_of_members():
    found = []
    for size in (1, 2):
        model, average = Observed(), Observed()
        buffers = dict(model.named_buffers())

        def metric(model, x, average=average):
            return (model(x.float()) + average(x.float())).mean()

        given = model, metric, list(range(12)), 2, torch.tensor, torch.device("cpu")
        work = ExactEvaluation(*given, seed=0, modules=[model, average])
        parts = [work.payload(SimpleNamespace(rank=rank, size=size)) for rank in range(size)]
        found.append(work.means(sum(parts)))
        assert not any(buffer.any() for buffer in (*model.buffers(), *average.buffers()))
        assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert found[0] == found[1]


def test_a_mask_that_was_expanded_and_stays_as_it_is_is_not_written_to():
    module = torch.nn.Module()
    module.register_buffer("mask", torch.tensor([1.0, float("nan")]).expand(3, 2), persistent=False)
    module.register_buffer("seen", torch.zeros(2))
    with buffers_kept([module]):
        module.seen += 1
    assert module.seen.tolist() == [0.0, 0.0]
    assert module.mask._version == 0
