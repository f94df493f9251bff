"""What a worker uses and where its time goes: processor, memory, GPU, and the parts of its steps.

Measured by the thread of the heartbeats, every few seconds; the training thread only notes the time
when it passes a place that has a name. Not here: who is slow (control.failure_detector).
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import torch

EVERY_S = 5.0

# What the training thread is at from a place on. Until the first boundary it starts up.
_PARTS = {
    "boundary": "data",
    "batch": "compute",
    "filled": "reduce",
    "round": "wait",
    "left": "compute",
    "wait": "wait",
    "released": "compute",
    "snapshot": "checkpoint",
    "evaluate": "evaluate",
    "mean": "wait",
    "enter": "recover",
    "meet": "recover",
    "give": "recover",
    "take": "recover",
    "pause": "wait",
}


class Parts:
    """How long the training thread was at what. One thread writes; others may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._now = ("start", clock())

    def phase(self, name: str, detail: int) -> None:
        """The training thread has got to a place."""
        del detail
        part = _PARTS.get(name)
        before, since = self._now
        if part is None or part == before:
            return
        now = self._clock()
        self._seconds[before] = self._seconds.get(before, 0.0) + now - since
        self._now = (part, now)

    def seconds(self) -> dict[str, float]:
        """By part, up to now."""
        (part, since), found = self._now, dict(self._seconds)
        found[part] = found.get(part, 0.0) + self._clock() - since
        return found


class Usage:
    """Measures this process since the last call."""

    def __init__(self, parts: Parts, device: torch.device) -> None:
        self._parts = parts
        self._device = device
        self._process = psutil.Process()
        self._before = (time.monotonic(), self._cpu_s(), parts.seconds())

    def measure(self) -> dict[str, float]:
        """What there is, by name.

        `cpu`: cores in use. `memory`: bytes of the process that are in memory. `gpu`: share of the
        time at which it computed, `gpu_memory`: bytes in use on it, by all processes. `NAME_s`: the
        share of the time that went to a part of the step.
        """
        now, cpu_s, parts = time.monotonic(), self._cpu_s(), self._parts.seconds()
        then, cpu_before, parts_before = self._before
        self._before = (now, cpu_s, parts)
        elapsed = max(1e-6, now - then)
        memory = float(self._process.memory_info().rss)
        found = {"cpu": (cpu_s - cpu_before) / elapsed, "memory": memory}
        for part, seconds in parts.items():
            share = (seconds - parts_before.get(part, 0.0)) / elapsed
            if share > 0:
                found[f"{part}_s"] = min(1.0, share)
        found |= _gpu(self._device)
        return {name: round(value, 4) for name, value in found.items()}

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def _gpu(device: torch.device) -> dict[str, float]:
    """Of a CUDA device; its utilisation only if NVML is there."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    found: dict[str, Any] = {"gpu_memory": float(total - free)}
    with suppress(Exception):  # torch raises whatever NVML's package, or its absence, makes it
        found["gpu"] = torch.cuda.utilization(device) / 100
    return found
