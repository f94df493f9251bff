"""Snapshots: what was captured is what is kept, or it says that it is not."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastix import state as states
from elastix.state import State, capture, raw_bytes, sample_of
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


def test_a_single_element_that_changes_before_the_thread_begins_is_noticed(monkeypatch):
    """The versions are those at the boundary, and not those that the thread finds."""
    gate = threading.Event()
    copy = snapshots.Snapshot._copy

    def late(self, *arguments):
        assert gate.wait(20)
        copy(self, *arguments)

    monkeypatch.setattr(snapshots.Snapshot, "_copy", late)
    weights = torch.zeros(1000)
    snapshot = Stager().take(State({"w": weights}), 1, {"w"})
    weights[1] = 7.0
    gate.set()
    snapshot.finish()
    assert snapshot.torn or not snapshot.state.tensors["w"].any()


@pytest.mark.parametrize("error", [RuntimeError("oh"), MemoryError("oh"), KeyError("oh")], ids=repr)
def test_a_copy_that_did_not_end_is_never_used(monkeypatch, error):
    def fail(copy, source, *, wait):
        raise error

    monkeypatch.setattr(snapshots, "copy_into", fail)
    snapshot = Stager().take(State({"w": torch.ones(4)}), 1, {"w"})
    snapshot.finish()
    assert "oh" in snapshot.torn


LAYOUTS = {
    "plain": torch.randn(300, 40),
    "transposed": torch.randn(300, 40).t(),
    "channels_last": torch.randn(16, 8, 3, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 30).expand(90, 30),
    "a number": torch.tensor(2.0),
    "long": torch.randn(100_003),
    "empty": torch.empty(3, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_is_the_same_of_a_tensor_and_its_copy_and_as_large_for_any_shape(layout):
    tensor = LAYOUTS[layout]
    sample = sample_of(tensor)
    assert torch.equal(sample, sample_of(tensor.contiguous()))
    assert min(tensor.numel(), states._SAMPLE // 3) <= sample.numel() <= states._SAMPLE


class Noted(TorchDispatchMode):
    """Notes each operator, and whether it was called in the stream."""

    def __init__(self, within=lambda: False):
        super().__init__()
        self.calls = []
        self._within = within

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self.calls.append((func, [t.untyped_storage().data_ptr() for t in tensors], self._within()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_needs_nothing_that_the_host_has_to_give_a_gpu(layout):
    """Views and one copy. Places as tensors would come from the host, which waits for that."""
    with Noted() as noted:
        sample_of(LAYOUTS[layout])
    assert [f for f, *_ in noted.calls if not f.is_view] in (
        [torch.ops.aten.clone.default],
        [torch.ops.aten.clone.default, torch.ops.aten.copy_.default],
    )


class Stream:
    """Stands for one of CUDA's: what is issued in it, and up to when."""

    def __init__(self):
        self.within = self.over = False

    @contextlib.contextmanager
    def begun(self):
        self.within = True
        yield
        self.within = False

    def synchronize(self):
        self.over = True


def test_what_is_on_a_gpu_is_read_in_the_side_stream_alone(monkeypatch):
    """Other streams have the kernels of the step: whoever reads there waits for all of them."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "stream", lambda given: given.begun())
    sources = {f"t{n}": torch.randn(100, 4) for n in range(3)}
    late = [
        snapshots.Late(
            name=name,
            source=source,
            copy=torch.empty_like(source),
            version=0,
            sample=sample_of(source),
        )
        for name, source in sources.items()
    ]
    there = {t.untyped_storage().data_ptr() for one in late for t in (one.source, one.sample)}
    snapshot = snapshots.Snapshot(State(sources), 1)
    with Noted(lambda: stream.within) as noted:
        snapshot._copy(late, stream)
    assert stream.over
    assert not snapshot.torn
    read = [(func, within) for func, touched, within in noted.calls if there & set(touched)]
    assert read
    assert [func for func, within in read if not within] == []
    assert all(torch.equal(one.copy, one.source) for one in late)


@pytest.mark.parametrize("room", [1 << 20, 0], ids=["set aside", "no room"])
def test_what_the_forward_pass_changes_is_as_it_was_at_the_boundary(monkeypatch, room):
    """On a GPU it is set aside there, as far as there is room: the training thread goes on."""
    gate, early = threading.Event(), []
    copy_into = snapshots.copy_into

    def slow(copy, source, *, wait):
        early.append(wait)
        assert wait or gate.wait(20)
        copy_into(copy, source, wait=wait)

    monkeypatch.setattr(snapshots, "copy_into", slow)
    monkeypatch.setattr(snapshots, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(snapshots, "_ASIDE_BYTES", room)
    model, optimizer = trained()
    state = capture({"": model}, {"optimizer": optimizer}, {"step": 1})
    before = bits(state)
    snapshot = Stager().take(state, 1, late(state))
    assert any(early) == (room == 0)
    model.train()(torch.randn(8, 30))
    gate.set()
    snapshot.finish()
    assert not snapshot.torn
    assert bits(snapshot.state) == before


def test_where_no_memory_can_be_pinned_a_copy_lies_in_other_memory(monkeypatch):
    """It is slower, and the run goes on."""
    empty = torch.empty

    def refuse(*shape, pin_memory=False, **fields):
        if pin_memory:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return empty(*shape, **fields)

    monkeypatch.setattr(torch, "empty", refuse)
    on_gpu = SimpleNamespace(shape=(2, 3), dtype=torch.float64, is_cuda=True)
    room = Stager()._room("weight", on_gpu)
    assert (room.shape, room.dtype) == ((2, 3), torch.float64)
