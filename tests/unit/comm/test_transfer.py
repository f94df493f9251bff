"""A State on its way to a newcomer, and what that does where it does not go well."""

import json

import pytest
import torch

from elastix.comm.network import transfer
from elastix.comm.protocol.participant import OutOfMemory
from elastix.sharding import Part, Shard
from elastix.state import State


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
        room.copy_(source)
    taken = transfer.assemble(body, made)
    assert taken.parts == {"w": held}
    assert taken.manifest() == sent.manifest()
    plain, _ = transfer.describe(State(tensors))
    assert plain.keys() == {"index", "meta", "parents"}
