"""A State as it was at a step boundary, copied while the next forward and backward run.

What only `optimizer.step` changes (parameters, the optimizer's own tensors) is copied by a thread
of its own, tensor by tensor; everything else (buffers, random numbers, whatever else was tracked)
is small or may change in the forward pass, and is copied at once. The owner calls `finish` at the
end of backward, before the user's code changes anything.

Code may change a parameter before that nevertheless, to clip it or to try other weights. The
version counters tell, but not of `.data` and numpy. So a sample of each tensor is kept from the
beginning and compared with its copy: that sees what changes all of a tensor or much of it, and not
a single element.

Memory: one more copy of the State in host memory, kept and used again, since giving 400 MB back
and getting them anew costs more than copying them.

Invariant: a snapshot whose source changed under the copy says so (`torn`), and is never stored.
"""

import threading
import time
from collections.abc import Collection
from typing import Any

import torch

from elastix.state import State, identity, raw_bytes

_SAMPLE = 64  # elements of a tensor
_Pair = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]  # name, source, copy, sample


class Snapshot:
    """One State being copied. Made by Stager.

    Attributes:
        state: the copies; complete after `finish`.
        step: committed steps in it.
        stall_s: how long the training thread has been held up by it.
        torn: why it cannot be used; "" if it can.
    """

    def __init__(self, state: State, step: int) -> None:
        self.state = state
        self.step = step
        self.stall_s = 0.0
        self.torn = ""
        self._complete = threading.Event()

    def finish(self) -> None:
        """Block until everything is copied. Call it before anything that was captured changes."""
        if not self._complete.is_set():
            started = time.monotonic()
            self._complete.wait()
            self.stall_s += time.monotonic() - started

    def finish_copy(self) -> None:
        """As `finish`, for a thread whose wait holds up nobody."""
        self._complete.wait()

    def _copy(self, pairs: list[_Pair], stream: Any) -> None:  # noqa: ANN401
        try:
            before = [_version(source) for _, source, _, _ in pairs]
            with torch.no_grad(), torch.cuda.stream(stream):
                for _, source, copy, _ in pairs:
                    copy_into(copy, source, wait=False)
                if stream is not None:
                    stream.synchronize()
            for (name, source, copy, sample), version in zip(pairs, before, strict=True):
                same = torch.equal(raw_bytes(_sample(copy)), raw_bytes(sample))
                if _version(source) != version or not same:
                    self.torn = f"tensor {name!r} changed before it was copied"
        except RuntimeError as error:  # out of memory, say: the step at hand must not suffer
            self.torn = repr(error)
        finally:
            self._complete.set()


class Stager:
    """Takes snapshots, one at a time, into memory that it keeps."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, state: State, step: int, late: Collection[str]) -> Snapshot:
        """Begin to copy `state`; returns when all but the tensors named in `late` is copied.

        Args:
            state: views of live tensors; tied ones are copied once.
            step: committed steps in it.
            late: tensors that stay as they are until `finish` has returned.
        """
        started = time.monotonic()
        copies: dict[tuple[Any, ...], torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        kept: dict[str, torch.Tensor] = {}
        pairs: list[_Pair] = []
        for name, tensor in state.tensors.items():
            key = identity(tensor)
            if key not in copies:
                kept[name] = copies[key] = self._room(name, tensor)
                if name in late:
                    pairs.append((name, tensor, copies[key], _sample(tensor)))
                else:
                    copy_into(copies[key], tensor, wait=True)
            tensors[name] = copies[key]
        self._kept = kept
        snapshot = Snapshot(State(tensors, dict(state.meta), state.parents, state.parts), step)
        stream = _side_stream(pairs)
        thread = threading.Thread(
            target=snapshot._copy, args=(pairs, stream), name=f"snapshot-{step}", daemon=True
        )
        thread.start()
        snapshot.stall_s = time.monotonic() - started
        return snapshot

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is not None and (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape):
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def copy_into(copy: torch.Tensor, source: torch.Tensor, *, wait: bool) -> None:
    """Copy bit for bit, in this thread alone if both are on the CPU: others have work to do.

    Args:
        copy: contiguous, of the same dtype and shape.
        source: any.
        wait: if not, a copy from a GPU may still be under way on the current stream.
    """
    source = source.detach()
    plain = source.device.type == "cpu" and source.is_contiguous()
    if plain and not source.is_conj() and not source.is_neg():
        into = copy.view(-1).view(torch.uint8).numpy()
        into[:] = source.view(-1).view(torch.uint8).numpy()
    else:
        copy.copy_(source, non_blocking=not wait and copy.is_pinned())


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements at even distances, in row-major order: the same of a tensor and of its copy."""
    tensor = tensor.detach()
    stride = max(1, tensor.numel() // _SAMPLE)
    if tensor.is_contiguous():
        sample = tensor.view(-1)[::stride].clone()
    else:  # without making a copy of all of it
        places = torch.arange(0, tensor.numel(), stride, device=tensor.device)
        sample = tensor[torch.unravel_index(places, tensor.shape)]
    return sample.resolve_conj().resolve_neg()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _side_stream(pairs: list[_Pair]) -> Any:  # noqa: ANN401
    """A CUDA stream that begins where the training thread's stream is now; None on the CPU."""
    device = next((source.device for _, source, _, _ in pairs if source.is_cuda), None)
    if device is None:
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
