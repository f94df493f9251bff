"""Bind a worker to cores near its GPU: memory of the other socket is half as fast.

Linux says in /sys which cores form a NUMA node and to which node a PCI device belongs. A worker
without a GPU is bound to one node as well, by its number, so that workers spread over the nodes.
With one node there is nothing to choose, and nothing is done.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

logger = logging.getLogger(__name__)
_SYS = Path("/sys")


def bind(worker: int, gpu: int | None, sys: Path = _SYS) -> set[int]:
    """Bind the calling thread, and all that it starts later, to the cores of one NUMA node.

    Args:
        worker: its number.
        gpu: CUDA index of its GPU; None if it has none.
        sys: where the kernel tells of the machine.

    Returns:
        The cores it is bound to; empty if nothing was done.
    """
    near = gpu_node(bus_id(gpu), sys) if gpu is not None else None
    cores = choose(numa_nodes(sys), os.sched_getaffinity(0), near, worker)
    if cores:
        os.sched_setaffinity(0, cores)
        logger.info("bound worker=%d cores=%s", worker, sorted(cores))
    return cores


def choose(
    nodes: Mapping[int, set[int]], allowed: Iterable[int], near: int | None, worker: int
) -> set[int]:
    """Cores for a worker. Pure.

    Args:
        nodes: cores of each NUMA node.
        allowed: cores that this process may use.
        near: the node of its GPU; None if that is not known.
        worker: its number, which decides if no node is near.

    Returns:
        Empty if there is nothing to choose: one node, or none of its cores is allowed.
    """
    may = set(allowed)
    usable = {node: cores & may for node, cores in nodes.items() if cores & may}
    if len(usable) < 2:
        return set()
    if near is not None:
        return usable.get(near, set())
    return usable[sorted(usable)[worker % len(usable)]]


def numa_nodes(sys: Path = _SYS) -> dict[int, set[int]]:
    """Cores of each NUMA node; empty where the kernel does not say."""
    found = {}
    for folder in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        listed = folder / "cpulist"
        if listed.is_file():
            found[int(folder.name.removeprefix("node"))] = parse_cores(listed.read_text())
    return found


def parse_cores(text: str) -> set[int]:
    """`0-3,8` as the kernel writes it."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def bus_id(gpu: int) -> str:
    """PCI address of a CUDA device, as /sys has it: `0000:3b:00.0`."""
    device = torch.cuda.get_device_properties(gpu)
    domain, bus, slot = (
        getattr(device, f"pci_{part}_id", 0) for part in ("domain", "bus", "device")
    )
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def gpu_node(address: str, sys: Path = _SYS) -> int | None:
    """NUMA node of a PCI device; None if it belongs to none in particular."""
    path = sys / "bus/pci/devices" / address / "numa_node"
    if not path.is_file():
        return None
    node = int(path.read_text())
    return node if node >= 0 else None
