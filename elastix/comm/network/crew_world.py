"""The inside of a worker that is a crew: its processes as torch's default world, with a mesh.

All that shards a model (FSDP2, tensor parallel) works on that mesh as it does without elastix. What
is particular is the end: when a process of the worker is lost, its mates have to come out of
whatever collective they are in. `cut` ends their connections, from any thread; the training thread
gets a RuntimeError. What NCCL carries between GPUs raises nothing when it is ended, so there one
has to ask: `check`.

Not here: the rails, which are groups of their own (process_group), who decides that a worker is
broken, and how NCCL is made to end anything (crew_gpus).
"""

import contextlib
import gc
import json
import math
import struct
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastix.comm.network import sockets
from elastix.comm.network.crew_gpus import MatesGpus
from elastix.comm.network.meeting import MeetingStore
from elastix.comm.network.process_group import Wiring

__all__ = ["DeviceMesh", "Inside"]

_TIMEOUT = timedelta(minutes=30)
_ALIKE = {"shard", "tensor"}
"""Axes along which all places run the same program."""
_BY_PAIRS = "pipe"
"""The axis along which places send to each other: two of them have begun equally much."""


class Inside:
    """One process in the world of its worker.

    Args:
        wiring: of this process; its place says which it is.
        axes: of the mesh: how many places each has, by name.

    Attributes:
        place: in the mesh, counted with the last axis the fastest.
        size: how many processes the worker is.
        mesh: of torch; None before `open`.

    Raises:
        OSError: the meeting cannot be reached.
    """

    def __init__(self, wiring: Wiring, axes: Mapping[str, int]) -> None:
        self.place, self.size = wiring.place, math.prod(axes.values())
        self.mesh: DeviceMesh | None = None
        self._axes = dict(axes)
        self._device = wiring.device
        self._gpus = MatesGpus(wiring.device) if wiring.device.type == "cuda" else None
        self._lock = threading.Lock()
        self._over = self._cut = False
        self._settled = self._gathered = 0
        self._counted: dict[str, dist.ProcessGroup] = {}
        self._mine: set[sockets.Port] = set()
        self._theirs: set[sockets.Port] = set()
        self._meeting = MeetingStore(
            wiring.address, wiring.secret, wiring.me, f"inside-{wiring.me}"
        )

    def open(self, tells: str = "") -> list[str]:
        """Block until all places of the worker are here, and connected.

        Args:
            tells: what this place tells the others.

        Returns:
            What each has told, by place.

        Raises:
            OSError, RuntimeError: one of them is lost.
        """
        self._before = sockets.listening()
        told = self.tell("told", tells)
        dist.init_process_group(
            "gloo" if self._gpus is None else "cpu:gloo,cuda:nccl",
            store=self._meeting,
            rank=self.place,
            world_size=self.size,
            timeout=_TIMEOUT,
        )
        shape, names = tuple(self._axes.values()), tuple(self._axes)
        self.mesh = mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        if self._gpus is not None:
            before = sockets.listening()
            pairs = [mesh.get_group(axis) for axis in names if axis == _BY_PAIRS]
            self._gpus.connect(map(mesh.get_group, names), pairs)
            self._before |= sockets.listening() - before  # NCCL's are closed by its aborts
        self._counted = self._groups()
        self.settle()
        return told

    def settle(self) -> None:
        """All groups that user code makes are there: remember where they were connected."""
        self._mine = sockets.listening() - self._before
        self._settled += 1
        told = self.tell(f"ports-{self._settled}", json.dumps(sorted(self._mine)))
        others = [json.loads(text) for place, text in enumerate(told) if place != self.place]
        self._theirs = {(host, port) for ports in others for host, port in ports}

    def tell(self, what: str, text: str) -> list[str]:
        """What each place has said of `what`, by place; once for each. Collective.

        Raises:
            OSError: one of them is lost.
        """
        keys = [f"{what}-{place}" for place in range(self.size)]
        said = self._meeting.arrive(keys[self.place], text.encode(), keys, lambda: self._cut)
        if not said:
            raise ConnectionError("a process of this worker is lost")
        return [one.decode() for one in said]

    def add_up(self, tensor: torch.Tensor, axis: str) -> None:
        """In place, over the places along an axis. Collective."""
        assert self.mesh is not None  # noqa: S101 - asked for after `open`
        dist.all_reduce(tensor, group=self.mesh.get_group(axis))

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """What each place has, by place; of one shape. Collective."""
        self._gathered += 1
        told = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(told, mine)
        return told

    def begun(self) -> dict[str, int]:
        """By group of places, the collectives that this one has begun there. Any thread.

        Of the group of all places only `gather` counts, since user code may send between any two
        of them. The last entry is how many this place has begun altogether: places do not compare
        it, it only shows that this one moves.
        """
        groups: dict[str, Any] = self._counted  # torch's stubs leave out what is asked for here
        every: Any = dict(dist.distributed_c10d._world.pg_map)
        try:
            counts = {name: _begun(group) for name, group in groups.items()}
            mine = sum(map(_begun, every))
            return {**counts, "all axes": self._gathered, f"all of place {self.place}": mine}
        except RuntimeError:  # it is being closed
            return {}

    def carried(self) -> int | None:
        """Bytes that came from and went to mates; None while some are on their way. Any thread.

        Of what GPUs send nothing is known, so there some always may be.
        """
        if self._gpus is not None:
            return None
        try:
            return sockets.carried(self._mine, self._theirs)
        except (OSError, struct.error):  # an old kernel: nothing is known
            return None

    def _groups(self) -> dict[str, dist.ProcessGroup]:
        """Those in which all places begin equally much, named alike by all their places."""
        mesh, axes = self.mesh, self._axes
        assert mesh is not None  # noqa: S101 - made before
        here = dict(zip(axes, mesh.get_coordinate() or (), strict=True))
        found = {}
        pairs = {_BY_PAIRS} if self._axes.get(_BY_PAIRS) == 2 else set()
        for axis in (_ALIKE | pairs).intersection(axes):
            others = "".join(f", {other}={at}" for other, at in here.items() if other != axis)
            found[axis + others] = mesh.get_group(axis)
        return found

    @property
    def silent(self) -> bool:
        """Whether what is ended raises nothing, so that one has to `check`."""
        return self._gpus is not None

    def check(self, *, wait: bool = False) -> None:
        """That what this place has computed was computed with its mates; see MatesGpus.check.

        Raises:
            RuntimeError: it may be anything.
        """
        if self._gpus is not None:
            self._gpus.check(wait=wait)

    def cut(self) -> None:
        """End all connections to mates. Any thread, any number of times."""
        with self._lock:
            self._cut = True
            if not self._over:
                if self._gpus is not None:
                    self._gpus.end()
                sockets.shut_down(self._mine, self._theirs)
        self._meeting.close()

    def come_out(self) -> None:
        """After `cut`: block until nothing that was ended writes to memory of this place."""
        if self._gpus is not None:
            self._gpus.close()

    def close(self) -> None:
        """Leave the world; another one may be made then."""
        with self._lock:
            self._over = True
        self.come_out()
        self._counted = {}  # they stay connected as long as anything refers to them
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        # Torch numbers worlds, and has counted one that did not come about. Fresh mates would wait
        # for this place under another name.
        dist.distributed_c10d._world.group_count = 0
        self._meeting.close()
        _forget_meshes()
        gc.collect()


def _begun(group: Any) -> int:  # noqa: ANN401 - torch's stubs leave out what is asked for here
    """Collectives, whatever carries them."""
    kinds = {group._get_backend(device) for device in group._device_types}
    return sum(kind._get_sequence_number_for_group() for kind in kinds)


def _forget_meshes() -> None:
    """What torch remembers of operations on DTensors holds meshes, and takes equal ones for them.

    A mesh of another life is equal if it is as large, also if its connections are gone, or if this
    process was at another place of it. There is no public way to have it forgotten.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
