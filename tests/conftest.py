"""One Ray cluster for the whole session; logical CPUs beyond the cores of the machine."""

import gc
import logging
import multiprocessing
import os
import signal
import sys
from contextlib import chdir
from fnmatch import fnmatchcase
from pathlib import Path

import hypothesis
import pytest

from tests import forked_workers

ROOT = Path(__file__).parents[1]

# How long an example takes is a matter of the machine; pytest's own limit is for tests that hang.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# In the background of a shell SIGINT is ignored, by all processes that tests start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """With the collector off: what is imported and collected stays, and is no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark what is slow, and have tests that share a Ray come first: then one process starts it.

    Of a table that is marked `fast`, the rows that match none of its patterns are slow.
    """
    idle = {}
    for item in items:
        if mark := item.get_closest_marker("fast"):
            matched = {pattern for pattern in mark.args if fnmatchcase(item.callspec.id, pattern)}
            table = item.nodeid.partition("[")[0]
            idle[table] = idle.get(table, set(mark.args)) - matched
            if not matched:
                item.add_marker(pytest.mark.slow)
    if any(idle.values()) and not any("::" in path for path in config.args):  # whole tables
        raise pytest.UsageError(f"marked fast, but no such rows: {idle}")
    items.sort(key=lambda item: "cluster" not in item.fixturenames)


def pytest_collection_finish():
    """One server forks the processes of all tests, and has imported what any test module does.

    It is told so late because elastix.testing.local, when it is imported, asks for less.
    """
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload([*forked_workers.IMPORTED, "tests.chaos.store_processes"])
    gc.freeze()  # all tests and what they import stay: each full collection would look at them
    if local := sys.modules.get("elastix.testing.local"):
        # How long a run takes is a matter of the machine, too.
        local.run_local.__kwdefaults__["timeout_s"] = 1000.0


def pytest_sessionstart(session):
    session.config.there = set(ROOT.iterdir())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """What a test leaves in the working directory may be what another one stumbles over."""
    new = {path.name for path in set(ROOT.iterdir()) - session.config.there}
    left = sorted(name for name in new - {"build"} if not name.startswith("."))
    if left and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nFAILED: tests have left {', '.join(left)} in {ROOT}")


@pytest.fixture
def caplog(caplog):
    """It hears of our warnings, whatever tests before it in this process did to logging."""
    caplog.set_level(logging.WARNING, logger="elastix")
    for name in logging.root.manager.loggerDict:
        if name.startswith("elastix"):
            logging.getLogger(name).disabled = False
    return caplog


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A local Ray, with workers that begin at once, in a folder of their own."""
    import ray

    os.environ["PYTHONPATH"] = str(ROOT)
    with forked_workers.serve(logs=False):
        with chdir(tmp_path_factory.mktemp("workers")):
            ray.init(
                address="local",  # another Ray that happens to be up here is none of ours
                num_cpus=8,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                _system_config=forked_workers.SETTINGS,
            )
        yield ray
        ray.shutdown()
