"""A metric over a dataset that a group shares out, without a group."""

from types import SimpleNamespace

import pytest
import torch

from elastix.train.replica.evaluation import Evaluation


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3.0])
def test_a_member_without_a_sample_adds_nothing_whatever_the_metric_says(value):
    work = Evaluation(
        torch.nn.Linear(1, 1), lambda *_: value, [0], 4, torch.tensor, torch.device("cpu")
    )
    idle, busy = (work.payload(SimpleNamespace(rank=rank, size=2)) for rank in range(2))
    assert idle.tolist() == [0.0, 0.0]
    assert busy.tolist() == pytest.approx([1.0, value], nan_ok=True)
