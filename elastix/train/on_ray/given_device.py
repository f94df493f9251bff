"""Which device a process computes on that Ray has started: workers of runs, and those of trials."""

import os

import ray
import torch


def given_device() -> torch.device:
    """The first GPU that Ray gave this process, if any, which is made current in this thread.

    Raises:
        RuntimeError: torch's, if that GPU fails.
    """
    given = ray.get_gpu_ids() if torch.cuda.is_available() else []
    if not given:
        return torch.device("cpu")
    # Ray hides all others, so that it comes first, unless it was told not to.
    hides = os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "") in ("", "0")
    device = torch.device("cuda", 0 if hides else int(given[0]))
    torch.cuda.set_device(device)
    return device
