"""`elastix estimate` for this GPU beside the memory and the time that steps take on it."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import (
    MODELS,
    Kind,
    Terms,
    block,
    built,
    loss_of,
    models_for,
    optimizer_of,
    step_of,
)
from benchmarks.gpu.overhead import alone
from elastix import Context
from elastix.cost.devices import DEVICES
from elastix.cost.plan import plan
from elastix.cost.trace import trace

_BLOCKS = 5


def steps(ctx: Context) -> None:
    """The train function: bytes at the peak beyond what there was, and seconds of the quickest."""
    config, device = ctx.config, torch.device(ctx.config["device"])
    kind, gpu = MODELS[config["model"]], device.type == "cuda"
    before = 0
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    model, batch = built(kind, device, config["tiny"])
    model, optimizer = ctx.prepare(model, optimizer_of(kind, model))
    step = step_of(model, optimizer, batch, ctx.boundary)
    for _ in range(3):
        step()
    peak = torch.cuda.max_memory_allocated(device) - before if gpu else None
    took = [block(step, 2 if config["tiny"] else kind.steps, device)[0] for _ in range(_BLOCKS)]
    told = json.dumps({"peak_bytes": peak, "step_s": min(took)})
    Path(config["told"]).write_text(told, encoding="utf-8")


def device_of(name: str) -> str:
    """By which name `elastix estimate` knows a GPU; h100 if it does not."""
    words = name.lower().replace("-", " ").split()
    return next((known for known in DEVICES if known in words), "h100")


def estimated(kind: Kind, tiny: bool, device: str) -> tuple[float, float]:
    """Bytes at the peak, and seconds of a step."""
    cost = trace(
        lambda: kind.build(tiny),
        lambda: (kind.batch(tiny),),
        loss=loss_of,
        optimizer=kind.optimizer,
        autocast=torch.bfloat16,
    )
    step_s = plan(cost, DEVICES[device], steps=1, dtype="bfloat16").step_s
    return float(cost.peak_bytes), step_s


def measure(terms: Terms) -> dict[str, Any]:
    """See the package; the ratios are those of benchmarks.estimate."""
    gpu = terms.device.type == "cuda"
    device = device_of(torch.cuda.get_device_name(terms.device) if gpu else "cpu")
    found: dict[str, Any] = {"as": device}
    for name in models_for(terms.tiny):
        kind = MODELS[name]
        told = terms.folder / f"{name}.json"
        config = {"model": name, "tiny": terms.tiny, "device": str(terms.device)}
        alone(steps, {**config, "told": str(told)}, terms.device)
        measured = json.loads(told.read_text(encoding="utf-8"))
        peak, step_s = estimated(kind, terms.tiny, device)
        found[name] = {
            **measured,
            "estimated_peak_bytes": peak,
            "estimated_step_s": step_s,
            "peak_ratio": measured["peak_bytes"] / peak if gpu else None,
            "step_ratio": step_s / measured["step_s"],
        }
    return found
