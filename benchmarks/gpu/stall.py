"""What a checkpoint of a State on the GPU costs the step in which it is taken.

A step is what a training loop does: forward and backward are issued, which returns before the GPU
is through; then the optimizer changes the State in place, so what is still being copied is waited
for. All take turns: no checkpoint, torch's distributed checkpoint (DCP) with asynchronous staging
into pinned memory that is kept, and elastix. Every save is stored before the next step begins.

DCP's staging does not wait for what the GPU has yet to do; here it has nothing to do then.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.checkpoint import Elastix
from benchmarks.gpu.models import Terms, wait_for
from benchmarks.peers.dcp import DcpAsync, alone

_TENSORS = 48
_STEP_S = 0.4
_LEAST, _MOST = 2, 12  # rounds that count
_SLOW = 2.5  # so many times of the time, one will do

Saving = DcpAsync | Elastix


def calibrated(device: torch.device, tiny: bool) -> Callable[[], None]:
    """Forward and backward: products of matrices that take so long on this device."""
    size = 64 if tiny else 8192
    a = torch.randn(size, size, device=device, dtype=torch.float32 if tiny else torch.bfloat16)
    b, out = a.clone(), torch.empty_like(a)

    def products(number: int) -> None:
        for _ in range(number):
            torch.mm(a, b, out=out)

    products(3)
    wait_for(device)
    started = time.perf_counter()
    products(20)
    wait_for(device)
    one_s = (time.perf_counter() - started) / 20
    number = 20 if tiny else max(1, round(_STEP_S / one_s))
    return lambda: products(number)


def one_step(
    saving: Saving | None,
    tensors: dict[str, torch.Tensor],
    work: Callable[[], None],
    device: torch.device,
) -> dict[str, float]:
    """Seconds of the step, those of its training thread in the save, and bytes of the GPU."""
    gpu = device.type == "cuda"
    wait_for(device)
    base = 0
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
    began = time.perf_counter()
    if saving is not None:
        saving.begin(tensors)
    held = time.perf_counter() - began
    work()
    started = time.perf_counter()
    if saving is not None:
        saving.copied()
        held += time.perf_counter() - started
    torch._foreach_add_(list(tensors.values()), 1.0)  # the optimizer's step
    wait_for(device)
    took = time.perf_counter() - began
    if saving is not None:
        saving.durable()
    peak = torch.cuda.max_memory_allocated(device) - base if gpu else 0
    durable = time.perf_counter() - began
    return {"held_s": held, "step_s": took, "durable_s": durable, "peak": float(peak)}


def _enough(rounds: int, spent: float) -> bool:
    """Of them, one of which does not count, for that share of the time; disks may be slow."""
    return rounds > (1 if spent > _SLOW else _LEAST if spent > 1 else _MOST)


def summed(rounds: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, float]:
    """Of one kind; the first round, in which memory is pinned, by itself."""
    first, *others = rounds
    usual = statistics.median(one["step_s"] for one in plain[1:])
    held = [1e3 * one["held_s"] for one in others]
    longer = [1e3 * (one["step_s"] - usual) for one in others]
    return {
        "held_ms_median": statistics.median(held),
        "held_ms_max": max(held),
        "longer_ms_median": statistics.median(longer),
        "longer_ms_max": max(longer),
        "first_held_ms": 1e3 * first["held_s"],
        "durable_s_median": statistics.median(one["durable_s"] for one in others),
        "gpu_mb_more": max(one["peak"] for one in rounds) / 1e6,
        "rounds": len(others),
    }


def measure(terms: Terms) -> dict[str, Any]:
    """See the package."""
    device, nbytes = terms.device, 4_800_000 if terms.tiny else 5_000_000_000
    tensors = {
        f"t{number}": torch.randn(nbytes // 4 // _TENSORS, device=device)
        for number in range(_TENSORS)
    }
    work = calibrated(device, terms.tiny)
    work()
    found: dict[str, list[dict[str, float]]] = {"none": [], "dcp_async": [], "elastix": []}
    with alone():
        savings: dict[str, Saving | None] = {
            "none": None,
            "dcp_async": DcpAsync(terms.folder / "dcp"),
            "elastix": Elastix(terms.folder / "elastix"),
        }
        names, number = list(found), 0
        began = time.perf_counter()
        while not _enough(number, (time.perf_counter() - began) / terms.seconds):
            for turn in range(len(names)):
                name = names[(number + turn) % len(names)]
                found[name].append(one_step(savings[name], tensors, work, device))
            shown = (f"{name} {1e3 * found[name][-1]['held_s']:.1f}" for name in names)
            print(f"stall, round {number}, ms: " + "  ".join(shown), flush=True)
            number += 1
        for saving in savings.values():
            if saving is not None:
                saving.close()
    usual = statistics.median(one["step_s"] for one in found["none"][1:])
    return {
        "state_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "step_s": usual,
        **{name: summed(found[name], found["none"]) for name in ("dcp_async", "elastix")},
    }
