"""Nodes that are to be taken away: what Ray knows of them, and what their clouds say.

On each node of the run a small actor asks the cloud's metadata service, which tells a machine of
itself alone. Nothing is asked unless FailureConfig.notices says so. Not here: who leaves
(conductor).
"""

import logging
import time
from collections.abc import Collection
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastix.train.on_ray.actor_classes import as_actor
from elastix.train.on_ray.cloud_notices import EVERY_S, Service

logger = logging.getLogger(__name__)
_AGAIN_S = 30.0


def draining_nodes() -> set[str]:
    """Ids of nodes that Ray is to lose: preempted, or idle for the autoscaler.

    There is no public call (Ray 2.60); Ray Train goes by this one as well. In a Ray that does not
    have it nobody leaves before a node is gone, and that is said once.
    """
    state: Any = getattr(getattr(ray, "_private", None), "state", None)
    ask = getattr(getattr(state, "state", None), "get_draining_nodes", None)
    if ask is not None:
        return set(ask() or ())
    if not _told:
        logger.warning(
            "Ray %s does not tell which nodes are being drained: workers there stay until they "
            "are lost.",
            ray.__version__,
        )
        _told.append(True)
    return set()


_told: list[bool] = []


class NoticeWatcher:
    """The actor of one node."""

    def __init__(self, cloud: str, address: str | None) -> None:
        self._service = Service(cloud, address)

    def change(self, known: bool) -> bool:
        """Whether the node is to go; waits until the answer is no longer the one that is known."""
        while True:
            going = self._service.going()
            if going != known:
                return going
            time.sleep(EVERY_S)


class Notices:
    """What the clouds of a run's nodes say.

    Args:
        cloud: whom to ask; None for nobody.
        address: of the metadata service, if it is not the vendor's own.
    """

    def __init__(self, cloud: str | None, address: str | None) -> None:
        self._cloud, self._address = cloud, address
        self._watchers: dict[str, tuple[Any, ray.ObjectRef[bool]]] = {}
        self._going: set[str] = set()
        self._failed: dict[str, float] = {}  # watchers, and when

    def look(self, nodes: Collection[str]) -> set[str]:
        """Of all nodes that were ever asked, those that are to go.

        Args:
            nodes: ids of those that the run is on now.
        """
        if self._cloud is None:
            return set()
        now = time.monotonic()
        for node in set(nodes) - self._watchers.keys():
            if now - self._failed.get(node, -_AGAIN_S) >= _AGAIN_S:
                self._watch(node)
        asked = {answer: node for node, (_, answer) in self._watchers.items()}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], 0)
        for answer in answered:
            self._hear(asked[answer], answer)
        return set(self._going)

    def close(self) -> None:
        """Ask no more."""
        for watcher, _ in self._watchers.values():
            ray.kill(watcher, no_restart=True)
        self._watchers.clear()

    def _watch(self, node: str) -> None:
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = as_actor(NoticeWatcher)
        watcher = actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=here).remote(
            self._cloud, self._address
        )
        self._watchers[node] = watcher, watcher.change.remote(node in self._going)

    def _hear(self, node: str, answer: "ray.ObjectRef[bool]") -> None:
        watcher, _ = self._watchers.pop(node)
        try:
            going = ray.get(answer)
        except ray.exceptions.RayError as error:  # its node is gone, as a rule
            logger.info("nobody asks for notices node=%s error=%r", node, error)
            self._failed[node] = time.monotonic()
            return
        logger.info("notice node=%s going=%s", node, going)
        (self._going.add if going else self._going.discard)(node)
        self._watchers[node] = watcher, watcher.change.remote(going)
