"""That what is trained, and what changes, is what was prepared for it."""

from collections.abc import Iterable, Sequence

import torch

from elastix.comm.gradients.buffer_bucket import BufferBucket
from elastix.comm.gradients.gradient_bucket import GradientBucket
from elastix.errors import ConfigError


class PreparedTensors:
    """Parameters and buffers of modules, against those that are in buckets.

    Attributes:
        frozen: parameters that are in none, with their names.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        gradients: Sequence[GradientBucket],
        buffers: Sequence[BufferBucket],
    ) -> None:
        self._modules = list(modules)
        self._gradients = gradients
        self._buffers = buffers
        self._averaged = {id(p) for bucket in gradients for p in bucket.parameters}
        named = [pair for module in modules for pair in module.named_parameters()]
        self._named = [pair for pair in named if not pair[1].is_inference()]  # torch counts none
        self.frozen = self._unaveraged()
        self._versions: list[int] = []  # of all these, when the loop over slices began

    def _unaveraged(self) -> list[tuple[str, torch.nn.Parameter]]:
        every = [pair for module in self._modules for pair in module.named_parameters()]
        return [(name, p) for name, p in every if id(p) not in self._averaged]

    def check(self, thoroughly: bool = False) -> None:
        """Look for parameters that are trained, and were not to be.

        Args:
            thoroughly: look for parameters and buffers that were added, too; it takes a walk over
                the modules.

        Raises:
            ConfigError: there are some.
        """
        if thoroughly:
            self._check_buffers()
        for name, parameter in self._unaveraged() if thoroughly else self.frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name} requires a gradient and did not at ctx.prepare, or was not "
                    "there, so no other worker would have its gradient. The run ends before "
                    "replicas part. Prepare the model with everything trainable that ever will "
                    "be, and freeze after ctx.prepare what is not to be trained yet."
                )

    def _check_buffers(self) -> None:
        averaged = set[int]().union(*(buffers.holds() for buffers in self._buffers))
        for module in self._modules:
            for name, buffer in module.named_buffers():
                if id(buffer) not in averaged:
                    raise ConfigError(
                        f"buffer {name} of the prepared {type(module).__name__} was not there at "
                        "ctx.prepare, or was one tensor with another buffer, so no worker has the "
                        "other workers' part of it. The run ends before replicas part. Register "
                        "buffers before ctx.prepare, by a forward pass if need be; to one that two "
                        "modules share, write in place."
                    )

    def has_unaveraged(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether one of these has a gradient that is this worker's own, and not all workers'."""
        wanted = set(map(id, parameters))
        return any(gradients.has_unaveraged(wanted) for gradients in self._gradients)

    def remember(self) -> None:
        """The loop over the slices of a step begins."""
        self._versions = [parameter._version for _, parameter in self._named]

    def look_if_moved(self) -> None:
        """It has ended.

        Raises:
            ConfigError: parameters were changed within it.
        """
        for (name, parameter), version in zip(self._named, self._versions, strict=True):
            if parameter._version != version:
                raise ConfigError(
                    f"parameter {name} was changed within the loop over a step's slices; an "
                    "embedding with max_norm does so in forward, say. Each worker computes other "
                    "slices, so replicas would part. The step was not taken; the run ends. Change "
                    "parameters before or after that loop, and keep what forward changes in "
                    "buffers."
                )
