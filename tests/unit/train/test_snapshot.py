"""Snapshots: what was captured is what is kept, or it says that it is not."""

import threading

import pytest
import torch

from elastix.state import State, capture, raw_bytes
from elastix.train.checkpoint import snapshot as snapshots
from elastix.train.checkpoint.snapshot import Stager


def bits(state):
    return {name: bytes(raw_bytes(t).numpy()) for name, t in state.tensors.items()}


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(8, 30)).sum().backward()
    optimizer.step()


def late(state):
    buffers = ("running", "num_batches")
    return {name for name in state.tensors if not any(word in name for word in buffers)}


def test_a_snapshot_is_the_state_at_its_beginning_whatever_training_does_after_finish():
    model, optimizer = trained()
    stager = Stager()
    for _ in range(3):
        state = capture({"": model}, {"optimizer": optimizer}, {"step": 1})
        before = bits(state)
        snapshot = stager.take(state, 1, late(state))
        model.train()(torch.randn(8, 30))  # forward: batch norm's buffers change at once
        snapshot.finish()
        step(model, optimizer)
        assert not snapshot.torn
        assert bits(snapshot.state) == before
        assert snapshot.state.meta == state.meta


def test_finish_waits_for_the_copy(monkeypatch):
    gate = threading.Event()
    copy_into = snapshots.copy_into

    def slow(copy, source, *, wait):
        assert wait or gate.wait(20)
        copy_into(copy, source, wait=wait)

    monkeypatch.setattr(snapshots, "copy_into", slow)
    state = State({"w": torch.ones(4)})
    snapshot = Stager().take(state, 1, {"w"})
    over = threading.Event()
    thread = threading.Thread(target=lambda: (snapshot.finish(), over.set()))
    thread.start()
    assert not over.is_set()
    gate.set()
    thread.join(20)
    assert over.is_set()
    assert snapshot.state.tensors["w"].tolist() == [1.0] * 4


def test_a_tensor_that_changes_under_the_copy_is_noticed(monkeypatch):
    """The control of the invariant: code that does not wait spoils a snapshot, and it says so."""
    state = State({"a": torch.ones(4), "b": torch.ones(4)})
    copy_into = snapshots.copy_into

    def meddle(copy, source, *, wait):
        state.tensors["b"].add_(1)
        copy_into(copy, source, wait=wait)

    monkeypatch.setattr(snapshots, "copy_into", meddle)
    snapshot = Stager().take(state, 1, {"a", "b"})
    snapshot.finish()
    assert "'b'" in snapshot.torn


def no_grad(parameter):
    with torch.no_grad():
        parameter.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    "change",
    [
        no_grad,
        lambda parameter: parameter.data.clamp_(-0.01, 0.01),
        lambda parameter: parameter.detach().numpy().__setitem__(..., 0.01),
        lambda parameter: setattr(parameter, "data", parameter.data.clone().zero_()),
    ],
    ids=["in place", ".data in place", "numpy", ".data replaced"],
)
def test_what_code_does_to_parameters_under_the_copy_is_in_no_snapshot(monkeypatch, change):
    """The thread that copies is held up after the first of three; then the loop's code runs."""
    gate, begun, calls = threading.Event(), threading.Event(), []
    copy_into = snapshots.copy_into

    def slow(copy, source, *, wait):
        calls.append(source)
        if len(calls) == 2:
            begun.set()
            assert gate.wait(20)
        copy_into(copy, source, wait=wait)

    monkeypatch.setattr(snapshots, "copy_into", slow)
    model = torch.nn.ParameterList([torch.ones(100, 10), torch.ones(7), torch.ones(30, 40).t()])
    state = capture({"": model}, {})
    before = bits(state)
    snapshot = Stager().take(state, 1, set(state.tensors))
    assert begun.wait(20)
    for parameter in model:
        change(parameter)
    gate.set()
    snapshot.finish()
    assert snapshot.torn or bits(snapshot.state) == before


def test_memory_is_used_again_and_ties_are_kept_apart():
    shared = torch.randn(5)
    stager = Stager()
    first = stager.take(State({"a": shared, "b": shared}), 1, {"a", "b"})
    first.finish()
    assert first.state.tensors["a"] is first.state.tensors["b"]
    where = first.state.tensors["a"].data_ptr()
    second = stager.take(State({"a": shared, "b": torch.zeros(5)}), 2, {"a", "b"})
    second.finish()
    assert second.state.tensors["a"].data_ptr() == where
    assert second.state.tensors["b"].data_ptr() != where
    assert second.state.tensors["b"].tolist() == [0.0] * 5
    assert torch.equal(second.state.tensors["a"], shared)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.randn(4, 6).t()[::2],
        torch.randn(1, 3).expand(4, 3),
        torch.randn(5).bfloat16(),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([float("nan"), -0.0]),
    ],
    ids=lambda t: f"{str(t.dtype)[6:]}{list(t.shape)}",
)
@pytest.mark.parametrize("when", ["at once", "late"])
def test_any_tensor_is_copied_to_the_last_bit(tensor, when):
    snapshot = Stager().take(State({"x": tensor}), 1, {"x"} if when == "late" else set())
    snapshot.finish()
    copy = snapshot.state.tensors["x"]
    assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(raw_bytes(copy), raw_bytes(tensor.resolve_conj()))
