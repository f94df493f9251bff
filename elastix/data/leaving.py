"""What is done before a process that reads data is killed, as Ray ends its own."""

from elastix.data import loader_processes
from elastix.data.shared import dataset


def leave() -> None:
    """End the processes that read for this one, and share no samples any more.

    So nothing is left in /dev/shm by the last one to go. Whatever reads on reads for itself.
    """
    loader_processes.end_all()
    dataset.leave()
