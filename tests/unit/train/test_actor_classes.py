"""Ray keeps what it makes of a class: nobody makes one for each process that is started."""

from pathlib import Path

import elastix
from elastix.search.executors.pool_worker import LoneWorker
from elastix.train.on_ray.actor_classes import as_actor, as_task

ONCE = {"train/on_ray/actor_classes.py", "store/server.py"}
"""The store's is started once in a process."""


def test_a_class_is_made_once():
    assert as_actor(LoneWorker, control=2) is as_actor(LoneWorker, control=2)
    assert as_actor(LoneWorker) is not as_actor(LoneWorker, control=2)
    assert as_task(test_a_class_is_made_once) is as_task(test_a_class_is_made_once)


def test_they_are_made_nowhere_else():
    root = Path(elastix.__file__).parent
    makes = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "ray.remote(" in path.read_text()
    }
    assert makes == ONCE
