"""A process of a run as the controller sees it, and its end."""

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastix.data import leaving
from elastix.train.on_ray.actor_classes import as_task


@dataclass
class WorkerHandle:
    """One process.

    Attributes:
        process: its number; that of its worker, if workers are single processes.
        actor: handle of its Worker.
        run: its outcome, when it comes.
        over: that has come.
    """

    process: int
    actor: Any
    run: ray.ObjectRef[Any]
    pid: int = 0
    node: str = ""
    over: bool = False

    @property
    def here(self) -> bool:
        """Whether it is on the controller's node."""
        return bool(self.node == ray.get_runtime_context().get_node_id())

    def end(self) -> None:
        """End its process as Ray does when it is meant: it says nothing of that to the driver."""
        ray.kill(self.actor, no_restart=True)

    def kill(self) -> ray.ObjectRef[Any] | None:
        """End the process of one that is lost, even a stopped one, wherever it is, and at once.

        Ray takes seconds to end a stopped one; and it takes this for a crash, of which it tells.

        Returns:
            What comes when there is nothing left of it on another node.
        """
        self.end()
        if not self.pid:
            return None
        if self.here:
            _kill_process(self.pid)
            return None
        strategy = NodeAffinitySchedulingStrategy(self.node, soft=False)
        task = as_task(_clear_away).options(num_cpus=0, scheduling_strategy=strategy)
        found: ray.ObjectRef[Any] = task.remote(self.pid)
        return found


def _kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _clear_away(pid: int) -> None:
    _kill_process(pid)
    leaving.clear(killed=True)
