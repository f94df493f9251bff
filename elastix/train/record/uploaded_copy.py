"""The copy of a working directory that Ray makes for a job, or for a `runtime_env`.

Ray removes it some time after the job, and makes another one when a file in it has changed.
"""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

_COPIES = "working_dir_files"  # the folder in which Ray has them


def warn_of_copy(store: str) -> None:
    """Say so if a store is in such a copy: a job that is submitted again may not find it."""
    where = Path(store).resolve()
    if _COPIES in where.parts:
        logger.warning(
            "the store %s is in the copy of the working directory that Ray has made for this job. "
            "Ray removes that after the job, and a job that is submitted after a change has "
            "another copy, in which it begins anew. Give the store an absolute path elsewhere.",
            where,
        )
