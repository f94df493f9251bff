"""Whether all workers have prepared the same model: a line for each parameter and buffer.

A first line may say what they compute with, where that has to be the same too.
"""

import json
from collections.abc import Mapping

import torch
from blake3 import blake3

from elastix.comm.network.process_group import Group
from elastix.comm.network.transfer import Wait
from elastix.errors import ConfigError
from elastix.state import dtype_name

_KIND = "computes with "


def layout_of(modules: Mapping[str, torch.nn.Module], kind: str = "") -> list[str]:
    """The lines of some modules, by the prefixes of their parameters' names.

    Args:
        modules: those that were prepared.
        kind: what this worker computes with, if that matters.
    """
    lines = [_KIND + kind] if kind else []
    for prefix, module in modules.items():
        for kind, named in (
            ("parameter", module.named_parameters()),
            ("buffer", module.named_buffers()),
        ):
            for name, tensor in named:
                frozen = "" if tensor.requires_grad or kind == "buffer" else ", frozen"
                dtype = dtype_name(tensor)
                laid = _laid_out(tensor)
                lines.append(f"{kind} {prefix}{name} {dtype}{list(tensor.shape)}{laid}{frozen}")
    return lines


def _laid_out(tensor: torch.Tensor) -> str:
    """How its elements lie, unless that is the usual way: buckets carry them in that order."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ""
    return f" with strides {list(tensor.stride())}"


def check(group: Group, layout: list[str], wait: Wait) -> None:
    """Refuse workers whose layouts differ. Collective over the group.

    Args:
        group: all members call this.
        layout: this worker's.
        wait: waits for one operation, or raises.

    Raises:
        ConfigError: the layouts differ; names the first line that does.
    """
    text = json.dumps(layout).encode()
    digest = torch.frombuffer(bytearray(blake3(text).digest()), dtype=torch.int64)
    mine = torch.cat([digest, torch.tensor([len(text)], device="cpu")])
    everybody = [torch.empty_like(mine) for _ in range(group.size)]
    wait(group.all_gather(mine, everybody))
    if all(torch.equal(other, everybody[0]) for other in everybody):
        return
    longest = max(int(other[-1].item()) for other in everybody)
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty_like(padded) for _ in range(group.size)]
    wait(group.all_gather(padded, texts))
    found = [json.loads(bytes(t.tolist()).rstrip(b"\0")) for t in texts]
    compare(found, [f"worker {member}" for member in group.members])


def compare(layouts: list[list[str]], names: list[str]) -> None:
    """Layouts, and whose they are: of workers, or of a group.

    Raises:
        ConfigError: they differ; names the first line that does, or all workers by what they
            compute with.
    """
    reference = layouts[0]
    kinds = ["".join(layout[:1]).removeprefix(_KIND) for layout in layouts]
    if reference and reference[0].startswith(_KIND) and len(set(kinds)) > 1:
        raise _unlike(kinds, names)
    for rank, layout in enumerate(layouts[1:], start=1):
        for place in range(max(len(reference), len(layout))):
            here = reference[place] if place < len(reference) else "nothing"
            there = layout[place] if place < len(layout) else "nothing"
            if here != there:
                raise ConfigError(
                    f"the workers did not prepare the same model: entry {place} of {names[0]} is "
                    f"{here}, of {names[rank]} {there}. The run ends. Build the model from "
                    "ctx.config alone, not from the rank or from unseeded random choices."
                )


def _unlike(kinds: list[str], names: list[str]) -> ConfigError:
    who = [
        f"{', '.join(n for n, k in zip(names, kinds, strict=True) if k == kind)}: {kind}"
        for kind in dict.fromkeys(kinds)
    ]
    return ConfigError(
        f"RunConfig(exact=True) and workers that compute differently. {'; '.join(who)}. They would "
        "round differently, and the result would depend on who computes what. The run ends. "
        "Use workers of one kind, with the same number of threads, or leave exact out."
    )
