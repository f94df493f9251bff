"""What is done before a process that reads data is killed, as Ray ends its own, and after it.

A process that is stopped and then killed does nothing before: whoever kills it clears up, on the
same host.
"""

from elastix.data import loader_processes
from elastix.data.shared import dataset

_MOMENT_S = 1.0


def leave() -> None:
    """End the processes that read for this one, and share no samples any more.

    So nothing is left in /dev/shm by the last one to go. Whatever reads on reads for itself.
    """
    loader_processes.end_all()
    dataset.leave()


def clear(*, killed: bool) -> None:
    """Remove what processes of this host have left in /dev/shm that were killed.

    Args:
        killed: some were just now. Blocks for a moment, as they may be on their way out.
    """
    dataset.clear(_MOMENT_S if killed else 0.0)
