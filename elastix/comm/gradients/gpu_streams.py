"""On which streams of a GPU gradients are computed: a model may use several."""

import torch

from elastix.errors import ConfigError


class GpuStreams:
    """Those of one step. Autograd calls hooks on the stream that computed the gradient."""

    def __init__(self) -> None:
        self._last = 0, 0  # device and handle of one; to make an object of it takes long
        self._seen: set[torch.cuda.Stream] = set()

    def note(self, tensor: torch.Tensor) -> None:
        """The current stream has work on a tensor like this one.

        Raises:
            ConfigError: that work is captured into a CUDA graph, and not done.
        """
        if not tensor.is_cuda:
            return
        index = tensor.device.index
        here = index, torch._C._cuda_getCurrentRawStream(index)
        if here == self._last and self._seen:
            return
        self._last = here
        if torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "a backward pass is captured into a CUDA graph, which is replayed without what "
                "averages gradients. The step was not taken; the run ends. Capture the model "
                "alone: forward = torch.cuda.make_graphed_callables(model, (batch,))"
            )
        self._seen.add(torch.cuda.current_stream(tensor.device))

    def join(self, device: torch.device) -> None:
        """What comes next on the current stream comes after the work of all of them.

        Nothing on a processor, where buckets that only count may lie.
        """
        if not self._seen or device.type != "cuda":
            return
        current = torch.cuda.current_stream(device)
        for stream in self._seen:
            if stream != current and stream.device == device:
                current.wait_stream(stream)

    def wait_for_current(self) -> None:
        """What comes next on any of them comes after the work of the current stream.

        To be called before gradients are freed that it reads: torch's allocator gives memory to
        the stream again that it was taken on, and does not wait for others.
        """
        for stream in self._seen:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                stream.wait_stream(current)

    def forget(self) -> None:
        """A step begins."""
        self._seen.clear()
