"""A sample as bytes, and back: pickled, with the memory of arrays and tensors beside it.

What is unpacked has memory of its own, which may be written to.
"""

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_WORD = struct.Struct("<q")
_ALIGNMENT = 16


def pack(sample: Any) -> bytes:  # noqa: ANN401
    """A sample as bytes.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: it cannot be pickled.
    """
    buffers: list[memoryview] = []
    text = io.BytesIO()
    Pickler(text, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(
        sample
    )
    parts = [text.getbuffer(), *buffers]
    lengths = [len(part) for part in parts]
    packed = bytearray(_WORD.pack(len(parts)) + b"".join(map(_WORD.pack, lengths)))
    for part in parts:
        packed += bytes(-len(packed) % _ALIGNMENT)
        packed += part
    return bytes(packed)


def unpack(packed: bytearray) -> Any:  # noqa: ANN401
    """The sample; it keeps `packed` and writes to it when its arrays are written to."""
    memory = memoryview(packed)
    (count,) = _WORD.unpack_from(memory)
    at = _WORD.size * (1 + count)
    parts = []
    for number in range(count):
        (length,) = _WORD.unpack_from(memory, _WORD.size * (1 + number))
        at += -at % _ALIGNMENT
        parts.append(memory[at : at + length])
        at += length
    return pickle.loads(parts[0], buffers=parts[1:])


class Pickler(pickle.Pickler):
    """Pickles in a way that is the same in each process; torch's own has an address in it."""

    def reducer_override(self, value: Any) -> Any:  # noqa: ANN401 - as pickle has it
        """How pickle is to write a value, if not in its own way."""
        if type(value) is np.ndarray and not value.flags.forc:
            return np.ascontiguousarray(value).__reduce_ex__(5)  # else it loses its byte order
        if type(value) is not torch.Tensor:
            return NotImplemented
        plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_nested
        quiet = not (value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized)
        if not (plain and quiet and value.numel()):
            return NotImplemented
        flat = value.detach().contiguous().as_strided((value.numel(),), (1,))  # of 1 any stride
        raw: Any = flat.view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape))


def _tensor(raw: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:  # noqa: ANN401
    memory = raw if not memoryview(raw).readonly else bytearray(raw)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)
