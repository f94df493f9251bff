"""What hardware can do, from the makers' data sheets; and this machine, measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastix.errors import ConfigError
from elastix.lazy_import import later

if TYPE_CHECKING:
    import torch
else:
    torch = later("torch")

_MATMUL = 1024
_COPIED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        flops_per_s: the most it can do, by torch's name of a dtype; dense, no sparsity.
        bytes_per_s: bandwidth of its memory.
        memory_bytes: all of it.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: float

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype.

        Raises:
            ConfigError: the device has no such arithmetic.
        """
        if dtype not in self.flops_per_s:
            raise ConfigError(
                f"{self.name} has no known rate for {dtype}; it has {sorted(self.flops_per_s)}. "
                "Nothing was estimated. Choose one of those."
            )
        return self.flops_per_s[dtype]


def _gpu(
    name: str, memory_gb: float, tb_per_s: float, float32: float, half: float, bfloat16: bool = True
) -> Device:
    """A GPU; arithmetic in TFLOP/s. float32 is without TF32, halves are with tensor cores."""
    rates = {"float32": float32 * 1e12, "float16": half * 1e12}
    if bfloat16:
        rates["bfloat16"] = half * 1e12
    return Device(
        name=name, flops_per_s=rates, bytes_per_s=tb_per_s * 1e12, memory_bytes=memory_gb * 1e9
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("t4", 16, 0.32, 8.1, 65, bfloat16=False),
        _gpu("v100", 32, 0.9, 15.7, 125, bfloat16=False),
        _gpu("l4", 24, 0.3, 30.3, 121),
        _gpu("l40s", 48, 0.864, 91.6, 362),
        _gpu("rtx4090", 24, 1.008, 82.6, 165),
        _gpu("a100", 80, 2.039, 19.5, 312),
        _gpu("h100", 80, 3.35, 67, 989),
        _gpu("h200", 141, 4.8, 67, 989),
        _gpu("b200", 180, 8.0, 75, 2250),
        _gpu("mi300x", 192, 5.3, 163, 1307),
    )
}
"""By name: the SXM or OAM variant where there are several, the largest memory of V100 and A100."""


def this_machine(threads: int | None = None) -> Device:
    """This machine's CPU as one worker with `threads` threads has it; takes about a second.

    Rates are the best of some products of square matrices and of some copies.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        rates = {"float32": _matmul_rate(torch.float32), "float64": _matmul_rate(torch.float64)}
        source = torch.zeros(_COPIED_BYTES // 4)
        target = torch.empty_like(source)
        copy_s = _best_s(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(before)
    return Device(
        name="here",
        flops_per_s=rates,
        bytes_per_s=2 * _COPIED_BYTES / copy_s,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _matmul_rate(dtype: torch.dtype) -> float:
    a = torch.rand(_MATMUL, _MATMUL, dtype=dtype)
    out = torch.empty_like(a)
    return 2 * _MATMUL**3 / _best_s(lambda: torch.mm(a, a, out=out))


def _best_s(work: Callable[[], object], repeats: int = 5) -> float:
    """The quickest of some runs: what disturbs a run only ever makes it slower."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
