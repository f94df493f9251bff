"""A State as it was at a step boundary, copied while the next forward and backward run.

What only `optimizer.step` changes (parameters, the optimizer's own tensors) is copied by a thread
of its own, tensor by tensor; everything else (buffers, random numbers, whatever else was tracked)
is small or may change in the forward pass, and is copied at once. The owner calls `finish` at the
end of backward, before the user's code changes anything.

Code may change a parameter before that nevertheless, to clip it or to try other weights. The
version counters tell, but not of `.data` and numpy. So a sample of each tensor is kept from the
beginning and compared with its copy: that sees what changes all of a tensor or much of it, and not
a single element.

On a GPU all is read in a stream of its own, which begins where the training thread's is at the
boundary: nothing here waits for kernels that were issued since. What may change in the forward pass
is set aside on the GPU first, in the training thread's stream, if it is little.

Memory: one more copy of the State in host memory, kept and used again, since giving 400 MB back
and getting them anew costs more than copying them.

Invariant: a snapshot whose source changed under the copy, or whose copy has not ended well, says so
(`torn`), and is never stored.
"""

import contextlib
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from elastix.state import State, identity, raw_bytes, sample_of

_ASIDE_BYTES = 64 << 20  # of a GPU's memory, until they are copied


@dataclass(frozen=True, kw_only=True)
class Late:
    """One tensor that the thread copies.

    Attributes:
        source, copy: from, and into.
        version, sample: of `source` at the boundary; no sample if nobody else can change it.
    """

    name: str
    source: torch.Tensor
    copy: torch.Tensor
    version: int = 0
    sample: torch.Tensor | None = None

    def changed(self, sample: torch.Tensor | None) -> bool:
        """Whether it did before it was copied; `sample` is that of the boundary, on the CPU."""
        if sample is None:
            return False
        same = torch.equal(raw_bytes(sample_of(self.copy)), raw_bytes(sample))
        return _version(self.source) != self.version or not same


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

    def _copy(self, late: list[Late], stream: Any) -> None:  # noqa: ANN401
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                for one in late:
                    copy_into(one.copy, one.source, wait=False)
                samples = [None if one.sample is None else _on_host(one.sample) for one in late]
                if stream is not None:
                    stream.synchronize()
            for one, sample in zip(late, samples, strict=True):
                if one.changed(sample):
                    self.torn = f"tensor {one.name!r} changed before it was copied"
        except Exception as error:  # noqa: BLE001 - out of memory, say: the step must not suffer
            self.torn = repr(error)
        finally:
            self._complete.set()


class Stager:
    """Takes snapshots, one at a time, into memory that it keeps."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._stream: Any = None  # one: what it frees is used again in the same stream alone

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
        begun: list[Late] = []
        room = _ASIDE_BYTES
        for name, tensor in state.tensors.items():
            key = identity(tensor)
            if key not in copies:
                kept[name] = copy = copies[key] = self._room(name, tensor)
                if name in late:
                    begun.append(
                        Late(
                            name=name,
                            source=tensor,
                            copy=copy,
                            version=_version(tensor),
                            sample=sample_of(tensor),
                        )
                    )
                elif _on_gpu(tensor) and tensor.nbytes <= room:
                    room -= tensor.nbytes
                    begun.append(Late(name=name, source=tensor.detach().clone(), copy=copy))
                else:
                    copy_into(copy, tensor, wait=True)
            tensors[name] = copies[key]
        self._kept = kept
        snapshot = Snapshot(State(tensors, dict(state.meta), state.parents, state.parts), step)
        stream = self._side_stream(begun)
        thread = threading.Thread(
            target=snapshot._copy, args=(begun, stream), name=f"snapshot-{step}", daemon=True
        )
        thread.start()
        snapshot.stall_s = time.monotonic() - started
        return snapshot

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is not None and (kept.dtype, kept.shape) == (tensor.dtype, tensor.shape):
            return kept
        if tensor.is_cuda:
            with contextlib.suppress(torch.AcceleratorError):  # no memory that can be pinned
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    def _side_stream(self, begun: list[Late]) -> Any:  # noqa: ANN401
        """A CUDA stream that begins where the training thread's stream is now; None on the CPU."""
        device = next((one.source.device for one in begun if one.source.is_cuda), None)
        if device is None:
            return None
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream


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


def _on_gpu(tensor: torch.Tensor) -> bool:
    """A function of its own, as tests without a GPU replace it."""
    return tensor.is_cuda


def _on_host(sample: torch.Tensor) -> torch.Tensor:
    """Its elements on the CPU, once the current stream is through."""
    return torch.empty_like(sample, device="cpu").copy_(sample, non_blocking=True)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
