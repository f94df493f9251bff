"""A metric over a dataset that a group shares out, without a group."""

from types import SimpleNamespace

import pytest
import torch

from elastix.train.replica.evaluation import Evaluation, ExactEvaluation


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3.0])
def test_a_member_without_a_sample_adds_nothing_whatever_the_metric_says(value):
    work = Evaluation(
        torch.nn.Linear(1, 1), lambda *_: value, [0], 4, torch.tensor, torch.device("cpu")
    )
    idle, busy = (work.payload(SimpleNamespace(rank=rank, size=2)) for rank in range(2))
    assert idle.tolist() == [0.0, 0.0]
    assert busy.tolist() == pytest.approx([1.0, value], nan_ok=True)


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
