"""How the end of an operation goes over the wire: a line of JSON, then bytes of tensors."""

from collections.abc import Sequence
from typing import Any, BinaryIO

import torch

from elastix.comm.protocol.catch_up_messages import Watched
from elastix.state import dtype_name, raw_bytes


def head_of(watched: Watched) -> tuple[dict[str, Any], Sequence[torch.Tensor]]:
    """What the line says, and the tensors that come after it."""
    tensors = (watched.result, *watched.parts)
    head = {
        "say": "operation",
        "operation": watched.operation,
        "kind": watched.kind,
        "plan": watched.plan,
        "contributors": watched.contributors,
        "complete": watched.complete,
        "generation": watched.generation,
        "tensors": [(dtype_name(tensor), tensor.shape) for tensor in tensors],
    }
    return head, tensors


def read_watched(head: dict[str, Any], stream: BinaryIO) -> tuple[Watched, int]:
    """The operation of that line, and the bytes of its tensors, which are next in `stream`."""
    tensors = [
        torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        for dtype, shape in head["tensors"]
    ]
    for tensor in tensors:
        read_into(stream, raw_bytes(tensor))
    watched = Watched(
        operation=head["operation"],
        kind=head["kind"],
        plan=tuple(head["plan"]),
        contributors=tuple(head["contributors"]),
        complete=head["complete"],
        generation=head["generation"],
        result=tensors[0],
        parts=tuple(tensors[1:]),
    )
    return watched, sum(tensor.nbytes for tensor in tensors)


def read_into(stream: BinaryIO, room: torch.Tensor) -> None:
    """Fill `room`; EOFError if there is not enough."""
    view = memoryview(room.numpy().data)
    while view:
        read = stream.readinto(view)  # type: ignore[attr-defined]
        if not read:
            raise EOFError
        view = view[read:]
