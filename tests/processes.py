"""Long tests of many independent cases, shared out to forked processes.

A fork needs no imports and has what the test has built. Log lines are dropped in it: pytest keeps
each for as long as a test runs.
"""

import logging
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

Case = TypeVar("Case")
Found = TypeVar("Found")

_function: Callable[[Any], object] | None = None


def in_processes(check: Callable[[Case], Found], cases: Iterable[Case]) -> Iterator[Found]:
    """What `check` returns for each case, in any order; the first exception is raised here.

    As many processes as this one may use processors.
    """
    global _function
    _function = check  # inherited, so that it need not be pickled
    with ProcessPoolExecutor(
        len(os.sched_getaffinity(0)),
        multiprocessing.get_context("fork"),
        logging.disable,
        (logging.CRITICAL,),
    ) as pool:
        try:
            for done in as_completed([pool.submit(_call, case) for case in cases]):
                yield done.result()  # type: ignore[misc]
        finally:
            pool.shutdown(cancel_futures=True)


def _call(case: object) -> object:
    assert _function is not None
    return _function(case)


def own_copy(root: Path) -> Path:
    """A copy of a directory for this process alone, made the first time."""
    copy = root.with_name(f"{root.name}-{os.getpid()}")
    if not copy.exists():
        shutil.copytree(root, copy)
    return copy
