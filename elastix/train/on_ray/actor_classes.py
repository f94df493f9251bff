"""Classes and functions of ours as Ray has them: each is made once in a process.

Ray makes a class of its own of each that it is given, keeps it as long as the process is connected,
and sends it to the cluster. A controller that starts a process for each that is lost, and a pool
for each trial that dies, would grow with every one.
"""

import functools
from collections.abc import Callable
from typing import Any

import ray


@functools.cache
def as_actor(kind: type, **groups: int) -> Any:  # noqa: ANN401 - Ray's own
    """An actor class; `groups` are its concurrency groups, and how many threads each has."""
    if not groups:
        return ray.remote(kind)
    return ray.remote(concurrency_groups=groups)(kind)  # type: ignore[call-overload]


@functools.cache
def as_task(work: Callable[..., object]) -> Any:  # noqa: ANN401 - Ray's own
    """A function as a task."""
    return ray.remote(work)
