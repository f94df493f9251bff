"""A campaign's events on Ray's metrics endpoint, for executors that have one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from elastix.events import Events


@contextmanager
def measured(name: str, bus: Events) -> Iterator[None]:
    """Feed Ray's metrics endpoint, if the trials run on Ray and there is one."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        yield
        return
    from elastix.observe.metrics import Metrics  # needs Ray, which not every executor does

    metrics = Metrics(name)
    bus.subscribe(metrics.read)
    try:
        yield
    finally:
        metrics.close()
