"""Real processes that are crews of any mesh, one after the other, and a model that they share.

`Places` starts its processes once; each `run` is a life of its own: a world on gloo, a mesh, a
function called at every place, the world destroyed.
"""

import multiprocessing
import tempfile
import traceback
from collections.abc import Mapping
from datetime import timedelta
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from elastix.config import check_torch
from elastix.errors import ConfigError

TIMEOUT_S = 90.0

MESHES: dict[str, dict[str, int]] = {
    "one process": {},
    "shard 2": {"shard": 2},
    "shard 3": {"shard": 3},
    "tensor 2": {"tensor": 2},
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "shard 1, tensor 4": {"shard": 1, "tensor": 4},
}


def skip_if_refused() -> None:
    """With a torch with which elastix shards no model a test of such models shows nothing."""
    try:
        check_torch()
    except ConfigError as error:
        pytest.skip(str(error))


class Places:
    """Processes that wait to be a crew. Closed with the test module."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        self._lives = 0
        self._lines: list[Connection] = []
        self._processes = []
        for _ in range(number):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._lines.append(here)
            self._processes.append(process)

    def run(self, mesh: Mapping[str, int], function: Any, *args: Any) -> list[Any]:
        """What `function(mesh, *args)` returned at each place."""
        self._lives += 1
        path = Path(self._folder.name) / str(self._lives)
        size = prod(mesh.values())
        for rank in range(size):
            self._lines[rank].send((dict(mesh), str(path), rank, size, function, args))
        results = []
        for rank in range(size):
            assert self._lines[rank].poll(TIMEOUT_S), f"place {rank} of {mesh} is stuck"
            results.append(self._lines[rank].recv())
        for rank, (result, error) in enumerate(results):
            assert error is None, f"place {rank} of {mesh}:\n{error}"
            del result
        return [result for result, _ in results]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(line: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            mesh, path, rank, size, function, args = line.recv()
        except EOFError:
            return
        try:
            line.send((_live(mesh, path, rank, size, function, args), None))
        except BaseException:  # noqa: BLE001 - told to the test
            line.send((None, traceback.format_exc()))


def _live(mesh: Any, path: str, rank: int, size: int, function: Any, args: Any) -> Any:
    if not mesh:
        return function(None, *args)
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    store = distributed.FileStore(path, size)
    limit = timedelta(seconds=TIMEOUT_S / 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    try:
        names, sizes = tuple(mesh), tuple(mesh.values())
        return function(init_device_mesh("cpu", sizes, mesh_dim_names=names), *args)
    finally:
        distributed.destroy_process_group()


# ------------------------------------------------------------------------ a model for all meshes


class Block(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """Sizes that four divide where tensors are split by columns, and three divides nowhere.

    The last layer has two rows, so of three places one has nothing of it. `count` is a buffer.
    """

    def __init__(self, inner: int = 20) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 10)
        self.blocks = torch.nn.ModuleList([Block(10, inner) for _ in range(2)])
        self.last = torch.nn.Linear(10, 2)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def built(mesh: Any, seed: int = 0, inner: int = 20) -> torch.nn.Module:
    """The model, with the same weights on any mesh."""
    torch.manual_seed(seed)
    return sharded(Net(inner).double(), mesh)


def sharded(model: Any, mesh: Any) -> Any:
    """As a train function does it."""
    if mesh is None:
        return model
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if "tensor" in mesh.mesh_dim_names:
        for block in model.blocks:
            parallelize_module(
                block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
    if "shard" in mesh.mesh_dim_names:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    return model


def trained(model: Any, optimizer: torch.optim.Optimizer, mesh: Any, steps: range) -> None:
    """Steps of which each has a batch of twelve, split over `shard`: the same sums on any mesh."""
    named = () if mesh is None else mesh.mesh_dim_names
    rank, size = (
        (mesh.get_local_rank("shard"), mesh["shard"].size()) if "shard" in named else (0, 1)
    )
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 8, generator=generator, dtype=torch.float64)
        y = torch.randn(12, 2, generator=generator, dtype=torch.float64)
        mine = slice(rank * 12 // size, (rank + 1) * 12 // size)
        functional.mse_loss(model(x[mine]), y[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.count += 1
