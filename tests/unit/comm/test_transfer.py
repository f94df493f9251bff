"""A State on its way to a newcomer, and what that does where it does not go well."""

import json

import pytest
import torch

from elastix.comm.network import transfer
from elastix.comm.protocol.participant import OutOfMemory
from elastix.sharding import Part, Shard
from elastix.state import State, raw_bytes


def too_much():
    return torch.empty(1 << 60, dtype=torch.uint8)


def python_too():
    raise MemoryError


def on_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def pinned():
    raise torch.AcceleratorError("CUDA error: out of memory")


@pytest.mark.parametrize("allocate", [too_much, python_too, on_a_gpu, pinned])
def test_no_memory_is_the_newcomers_own_trouble(allocate):
    with pytest.raises(OutOfMemory, match="no memory for the State"), transfer.taking():
        allocate()


def test_what_else_goes_wrong_is_passed_on():
    with pytest.raises(RuntimeError, match="shapes differ"), transfer.taking():
        raise RuntimeError("shapes differ")


def test_user_code_cannot_take_it_for_an_error_of_its_own():
    assert not issubclass(OutOfMemory, Exception)


def test_a_state_in_parts_says_so_on_its_way():
    held = Shard(Part((2, 0), (4, 3)), (4, 3))
    tensors = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    sent = State(tensors, {"step": 3}, parts={"w": held})
    body, sources = transfer.describe(sent)
    body = json.loads(json.dumps(body))
    made, rooms = transfer.rooms(body)
    for room, source in zip(rooms, sources, strict=True):
        room.copy_(raw_bytes(source))
    taken = transfer.assemble(body, made)
    assert taken.parts == {"w": held}
    assert taken.manifest() == sent.manifest()
    plain, _ = transfer.describe(State(tensors))
    assert plain.keys() == {"index", "meta", "parents"}


class Sent:
    """A group whose others receive what is sent."""

    rank = 0

    def __init__(self):
        self.sent = []

    def broadcast(self, tensor, root):
        assert root == self.rank
        self.sent.append(tensor)


def test_bytes_on_a_gpu_go_from_there_and_those_beside_them_too(monkeypatch):
    """On a stand-in for it, of which nothing can be copied to the host."""
    monkeypatch.setattr(transfer, "_CHUNK_BYTES", 40)
    gpu, group = torch.device("meta"), Sent()
    turned = torch.empty(6, 5, device=gpu).t()
    tensors = {"large": turned, "small": torch.empty(3, device=gpu), "@rng": torch.ones(2)}
    state = State({**tensors, "tied": turned})
    assert transfer.give(group, state, gpu, lambda _: None) == 4 * (30 + 3 + 2)
    _size, _header, *chunks = group.sent
    assert [chunk.numel() for chunk in chunks] == [40, 40, 40, 20]
    assert {chunk.device for chunk in chunks} == {gpu}


def test_chunks_have_memory_of_their_own_and_all_bytes_in_order(monkeypatch):
    monkeypatch.setattr(transfer, "_CHUNK_BYTES", 10)
    tensors = [torch.arange(7.0), torch.arange(6, dtype=torch.int16).view(2, 3).t()]
    expected = torch.cat([raw_bytes(tensor) for tensor in tensors])
    chunks = list(transfer.chunks(tensors, torch.device("cpu")))
    assert torch.equal(torch.cat(chunks), expected)
    for chunk in chunks:
        chunk.zero_()
    assert torch.equal(torch.cat([raw_bytes(tensor) for tensor in tensors]), expected)
