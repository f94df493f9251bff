"""What is done before a process that reads data is killed, as Ray ends its own, and after it.

A process that is stopped and then killed does nothing before: whoever kills it clears up, on the
same host. What cannot be cleared up now, for want of file handles say, the next one to read clears
up; the run ends as it does.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from elastix.data import loader_processes
from elastix.data.shared import dataset

_LOG = logging.getLogger(__name__)
_MOMENT_S = 1.0


def leave() -> None:
    """End the processes that read for this one, and share no samples any more.

    So nothing is left in /dev/shm by the last one to go. Whatever reads on reads for itself.
    """
    with _as_far_as_possible():
        loader_processes.end_all()
    with _as_far_as_possible():
        dataset.leave()


def clear(*, killed: bool) -> None:
    """Remove what processes of this host have left in /dev/shm that were killed.

    Args:
        killed: some were just now. Blocks for a moment, as they may be on their way out.
    """
    with _as_far_as_possible():
        dataset.clear(_MOMENT_S if killed else 0.0)


@contextmanager
def _as_far_as_possible() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _LOG.warning(
            "not all is cleared up that was for reading samples; the next run does so: %s", error
        )
