"""Which exceptions say that a GPU has failed, and not the train function.

After one of them nothing can be computed in the process any more. The worker counts as lost, as if
its process had died: others go on, and a new process may take its place.
"""

import torch

_ASSERTED = 710, "device-side assert triggered"
"""cudaErrorAssert: an index out of bounds, most often, and in every worker alike."""

_SAID = (
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)
"""In errors of libraries that torch raises as any other."""


def is_device_failure(error: BaseException) -> bool:
    """Whether it, or what it was raised from, is one. Being out of memory is none."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.AcceleratorError):
            return not _asserted(seen)
        if type(seen) is RuntimeError and any(one in str(seen) for one in _SAID):
            return True
        seen = seen.__cause__
    return False


def _asserted(error: torch.AcceleratorError) -> bool:
    number, said = _ASSERTED
    return getattr(error, "error_code", number if said in str(error) else 0) == number
