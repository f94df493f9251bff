"""Gradients clipped by the norm of a model of which each place has a part; here without any."""

import pytest
import torch

from elastix.train.replica.stage_norms import clip


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    made = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 40, 1)]
    for one in made:
        one.grad = torch.randn(one.shape, generator=generator).to(dtype)
    return [*made, torch.nn.Parameter(torch.zeros(2))]  # one without a gradient


@pytest.mark.parametrize("most", [0.5, 100.0])
@pytest.mark.parametrize("places", [1, 2])
def test_places_that_hold_the_same_count_once(most, places):
    ours, theirs = parameters(), parameters()
    want = torch.nn.utils.clip_grad_norm_(theirs, most)
    found = clip(ours, most, places, lambda squares: squares.mul_(places))
    assert found.item() == pytest.approx(want.item(), rel=1e-6)
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=0)


def test_what_other_stages_have_counts():
    ours = parameters()
    alone = clip(parameters(), 1e9, 1, lambda squares: None)
    found = clip(ours, 1.0, 1, lambda squares: squares.add_(16.0))
    assert found.item() == pytest.approx((alone.item() ** 2 + 16) ** 0.5)
    after = torch.nn.utils.get_total_norm([p.grad for p in ours[:3]])
    assert after.item() == pytest.approx(alone.item() / found.item(), rel=1e-5)


def test_a_stage_without_gradients_takes_part():
    assert clip([], 1.0, 1, lambda squares: squares.add_(4.0)).item() == 2.0


def test_sparse_gradients():
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    want = table.weight.grad.to_dense().norm().item()
    assert clip([table.weight], 1.0, 1, lambda squares: None).item() == pytest.approx(want)
    assert table.weight.grad.to_dense().norm().item() == pytest.approx(1.0, rel=1e-5)
