"""A State from a live peer to newcomers, over a group that holds them all.

Collective over that group. Blocks until done; `wait` makes it end early when the group changes.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastix.comm.network.pending import Pending
from elastix.comm.network.process_group import Group
from elastix.comm.protocol.participant import OutOfMemory
from elastix.sharding import Part, Shard
from elastix.state import Ref, State, bytes_in_place, dtype_name, identity, raw_bytes

Wait = Callable[[Pending], None]

_CHUNK_BYTES = 16 << 20
_NO_MEMORY = "can't allocate memory", "CUDA error: out of memory"  # of the host; pinned


def give(group: Group, state: State, device: torch.device, wait: Wait) -> int:
    """Send `state` from this rank to all others in the group.

    Args:
        group: all others call `take` with this rank as root.
        state: must not change while it is sent.
        device: where pieces lie on their way.
        wait: waits for one operation, or raises.

    Returns:
        Payload bytes; tied tensors count once.
    """
    body, tensors = describe(state)
    header = torch.frombuffer(bytearray(json.dumps(body).encode()), dtype=torch.uint8)
    wait(
        group.broadcast(torch.tensor([header.numel()], dtype=torch.int64, device="cpu"), group.rank)
    )
    wait(group.broadcast(header, group.rank))
    for chunk in chunks(tensors, device):
        wait(group.broadcast(chunk, group.rank))
    return sum(tensor.nbytes for tensor in tensors)


def take(group: Group, root: int, device: torch.device, wait: Wait) -> State:
    """Receive what rank `root` gives, into new tensors on the CPU."""
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    wait(group.broadcast(size, root))
    header = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
    wait(group.broadcast(header, root))
    body = json.loads(header.numpy().tobytes())
    tensors, parts = rooms(body)
    for pieces in _chunks(parts):
        sizes = [piece.numel() for piece in pieces]
        chunk = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        wait(group.broadcast(chunk, root))
        for piece, received in zip(pieces, torch.split(chunk, sizes), strict=True):
            piece.copy_(received)
    return assemble(body, tensors)


@contextmanager
def taking() -> Iterator[None]:
    """Around all that a newcomer does to hold the State that it is given.

    Raises:
        OutOfMemory: there is no memory for it. That is this worker's trouble alone.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        told = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not told and not any(said in str(error) for said in _NO_MEMORY):
            raise
        raise OutOfMemory(f"no memory for the State: {error}") from error


def describe(state: State) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A State without its bytes, as JSON values; and its tensors, tied ones once, in order."""
    first: dict[tuple[object, ...], str] = {}
    index = {}
    tensors = []
    for name, tensor in state.tensors.items():
        original = first.setdefault(identity(tensor), name)
        tied = original if original != name else None
        index[name] = (dtype_name(tensor), list(tensor.shape), tied)
        if tied is None:
            tensors.append(tensor)
    body = {"index": index, "meta": state.meta, "parents": state.parents}
    return (body | {"parts": state.parts} if state.parts else body), tensors


def rooms(body: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Tensors for what `describe` described, and their bytes, to be filled in order."""
    tensors: dict[str, torch.Tensor] = {}
    parts = []
    for name, (dtype, shape, tied) in body["index"].items():
        if tied is not None:
            tensors[name] = tensors[tied]
            continue
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        parts.append(raw_bytes(tensors[name]))
    return tensors, parts


def assemble(body: dict[str, Any], tensors: dict[str, torch.Tensor]) -> State:
    """The State, when its tensors are filled."""
    parts = {
        name: Shard(Part(tuple(start), tuple(stop)), tuple(whole))
        for name, ((start, stop), whole) in body.get("parts", {}).items()
    }
    return State(tensors, body["meta"], tuple(Ref(parent) for parent in body["parents"]), parts)


def chunks(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Their bytes in memory of their own on `device`, at most _CHUNK_BYTES at a time, in order.

    From one GPU to another they do not come by the host's memory.
    """
    for pieces in _chunks(map(bytes_in_place, tensors)):
        yield torch.cat([piece.to(device) for piece in pieces])


def _chunks(parts: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut flat byte tensors into lists of views of at most _CHUNK_BYTES each, in order.

    Many small tensors share a message, and a large one does not need a second copy of itself.
    """
    pieces: list[torch.Tensor] = []
    room = _CHUNK_BYTES
    for part in parts:
        start = 0
        while start < part.numel():
            piece = part[start : start + room]
            pieces.append(piece)
            start += piece.numel()
            room -= piece.numel()
            if room == 0:
                yield pieces
                pieces, room = [], _CHUNK_BYTES
    if pieces:
        yield pieces
