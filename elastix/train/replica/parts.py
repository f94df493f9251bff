"""What a worker is made of, for those of its parts that work with most of the others. Data."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from elastix.comm.driver import GroupDriver
from elastix.train.checkpoint.schedule import Schedule
from elastix.train.replica.link import Link, Settings
from elastix.train.replica.replicated_events import ReplicatedEvents
from elastix.train.replica.state_copies import StateCopies
from elastix.train.replica.tracked_objects import TrackedObjects


@dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """One worker's. All are used in the training thread.

    Attributes:
        me: this worker.
        place: of this process in the worker's mesh.
        device: that it computes on.
        settings: of the run.
        link: to the process around it.
        driver: of its group.
        tracked: the objects that the train function gave it.
        replicated: takes the events that all workers generate alike.
        schedule: when States are stored and compared.
        copies: of the State, which are complete before a step counts.
        phase: is told where the training thread is.
    """

    me: int
    place: int
    device: torch.device
    settings: Settings
    link: Link
    driver: GroupDriver
    tracked: TrackedObjects
    replicated: ReplicatedEvents
    schedule: Schedule
    copies: StateCopies
    phase: Callable[[str, int], None]
