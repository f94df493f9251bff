"""Which device a process computes on that Ray has started: workers of runs, and those of trials."""

import os
from pathlib import Path

import ray
import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def given_device() -> torch.device:
    """The first GPU that Ray gave this process, if any, which is made current in this thread.

    Where there is no driver, as in tests that tell Ray of GPUs, it is the CPU.

    Raises:
        RuntimeError: torch's, if that GPU fails; also if torch can use none of those it was given.
    """
    if not torch.cuda.is_available():
        if torch.version.cuda and _DRIVER.exists() and (given := ray.get_gpu_ids()):
            raise torch.AcceleratorError(
                f"CUDA error: Ray has given this process GPU {given[0]}, and torch (for CUDA "
                f"{torch.version.cuda}) can use none. `elastix doctor` says more."
            )
        return torch.device("cpu")
    given = ray.get_gpu_ids()
    if not given:
        return torch.device("cpu")
    # Ray hides all others, so that it comes first, unless it was told not to.
    hides = os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "") in ("", "0")
    device = torch.device("cuda", 0 if hides else _place(str(given[0]).strip()))
    torch.cuda.set_device(device)
    return device


def _place(gpu: str) -> int:
    """Where torch has a GPU. Of those that Ray itself was started with Ray gives the names."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return seen.index(gpu) if gpu in seen else int(gpu)
