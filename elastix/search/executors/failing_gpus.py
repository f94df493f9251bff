"""Which GPUs fail for good, as far as trials have shown. Pure: no Ray, no torch.

That a trial's GPU has failed says little: it may be the trial, or have been for once. Two trials in
a row, each in a process of its own, say that it is the GPU. Not here: that a process which has just
begun can compute nothing on it, which says so at once (pool_worker).
"""

_OF_PROGRAMS = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
)
"""What GPUs that fail say, and others when a kernel makes a mistake or memory is short."""


def may_be_the_program(said: str) -> bool:
    """Whether an error of a GPU may be a trial's own, as it would be for each with such sizes."""
    return any(one in said for one in _OF_PROGRAMS)


class FailingGpus:
    """By their names."""

    def __init__(self) -> None:
        self._failed: dict[str, int] = {}  # by GPU the last trial, if it failed of that
        self._before: dict[int, int] = {}  # that one, when a worker began

    def begin(self, gpu: str, worker: int) -> None:
        """A worker is ready, with this GPU."""
        if gpu in self._failed:
            self._before[worker] = self._failed[gpu]

    def worked(self, gpu: str) -> None:
        """A trial ended there, and the GPU goes on."""
        self._failed.pop(gpu, None)

    def failed(self, gpu: str, worker: int, trial: int) -> bool:
        """It has failed in a trial; whether it is given up."""
        last, before = self._failed.get(gpu), self._before.pop(worker, None)
        self._failed[gpu] = trial
        return last is not None and last == before != trial
