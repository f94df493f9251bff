"""Which exceptions say that a GPU has failed, and not the train function.

After one of them nothing can be computed in the process any more. The worker counts as lost, as if
its process had died: others go on, and a new process may take its place.
"""

import torch

_ASSERTED = 710
"""An index out of bounds, most often, and in every worker alike."""

_ASKED_FOR = {
    1: "invalid argument",
    2: "out of memory",  # of pinned memory, a stream, a graph: torch's allocator is not asked
    9: "invalid configuration argument",
    701: "too many resources requested for launch",
    _ASSERTED: "device-side assert triggered",
    720: "too many blocks in cooperative launch",
    801: "operation not supported",
    900: "operation not permitted when stream is capturing",
    901: "operation failed due to a previous error during capture",
    906: "operation would make the legacy stream depend on a capturing blocking stream",
}
"""Errors of CUDA that say what a program has asked for. They would be met again by whoever takes
the worker's place; and but for the asserted one the device goes on."""

_CAPTURING = range(900, 909)
"""Those of capturing a graph, which is refused."""

_SAID = (
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUBLAS_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR",
)
"""In errors of libraries that torch raises as any other."""


def is_device_failure(error: BaseException) -> bool:
    """Whether it is one, or what it was raised from, while handling, or together with."""
    seen = _chain(error)
    if any(_number(one) == _ASSERTED for one in seen):
        return False  # other errors follow it
    return any(map(_says_so, seen))


def _chain(error: BaseException) -> list[BaseException]:
    seen: list[BaseException] = []
    ahead: list[BaseException | None] = [error]
    while ahead:
        one = ahead.pop()
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        ahead.append(one.__cause__)
        if not one.__suppress_context__:
            ahead.append(one.__context__)
        if isinstance(one, BaseExceptionGroup):
            ahead.extend(one.exceptions)
    return seen


def _says_so(error: BaseException) -> bool:
    if isinstance(error, torch.AcceleratorError):
        number = _number(error)
        return number not in _ASKED_FOR and number not in _CAPTURING
    return type(error) is RuntimeError and any(one in str(error) for one in _SAID)


def _number(error: BaseException) -> int | None:
    """CUDA's; None where it is not known, and of what is no error of CUDA."""
    if not isinstance(error, torch.AcceleratorError):
        return None
    number = getattr(error, "error_code", None)
    if isinstance(number, int):
        return number
    told = str(error)
    return next((code for code, said in _ASKED_FOR.items() if f"CUDA error: {said}" in told), None)
