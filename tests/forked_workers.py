"""Ray's worker processes, forked from one that has imported what they need besides Ray.

A worker of Ray is a new Python that imports torch and elastix: three seconds of a core, and tests
start hundreds. Within `serve` a raylet that this process starts runs this file in place of each
worker. It has the server fork one that is given its arguments, its environment and its open files,
and lives as long as that. So workers are processes of their own as ever, and begin in a third of
the time. What needs another environment, or another raylet's, is started in Ray's own way.
"""

import array
import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

_SOCKET = "ELASTIX_TESTS_FORK_SERVER"
_RAYLET = "RAY_RAYLET_PID"
_FILES = 32
SETTINGS = {
    "worker_niceness": 0,  # or they starve beside tests that compute
    "worker_register_timeout_seconds": 600,  # after which ray.init() waits for ever
}
"""For ray.init, as its `_system_config`."""

IMPORTED = (
    # What modules of tests import, where the functions are that workers run.
    "ConfigSpace",
    "hypothesis",
    "pytest",
    # What Ray and Tune import.
    "google.protobuf.json_format",
    "jsonschema",
    "pandas",
    "psutil",
    "pyarrow.json",
    "pydantic.main",
    "pydantic.v1",
    "requests",
    "rich.live",
    "rich.progress",
    "starlette.datastructures",
    "yaml",
    # What a worker of ours imports as it begins.
    "encodings.idna",
    "torch.profiler._cupti_monitor",
    "torch._dynamo",
    "elastix.search.inherit",
    "elastix.store",
    "elastix.testing.local",
    "elastix.train.record.result",
    "elastix.train.replica.member",
)
"""Imported by the servers of tests that fork processes, before they fork the first."""

_OF_RAY = (
    "elastix.search.executors.group_worker",
    "elastix.search.executors.pool_worker",
    "elastix.train.on_ray.controller",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "ray._private.arrow_serialization",
)
"""Imported by the server of Ray's workers before the first; not Tune: see `_draw_apart`."""

_EARLY = ("LD_", "MKL_", "OMP_", "PYTHON")
"""Variables that begin so are read as Python starts or torch is imported."""


@contextlib.contextmanager
def serve(*, logs=True):
    """Within, the first raylet that is started has its workers forked.

    Args:
        logs: False where no driver wants to see what workers print: then nothing goes through
            their files all along. Nor does anything look whether there should be more nodes.
    """
    from ray._private.parameter import RayParams

    begin = RayParams.__init__

    def begin_with_this_file(self, *args, **values):
        begin(self, *args, **values)
        self.setup_worker_path = __file__
        self.include_log_monitor, self.no_monitor = logs, not logs

    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        os.environ[_SOCKET] = f"{folder}/socket"
        command = [sys.executable, __file__, "--serve", f"{folder}/socket"]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"ready\n"
        RayParams.__init__ = begin_with_this_file
        try:
            yield
        finally:
            RayParams.__init__ = begin
            del os.environ[_SOCKET]
            server.communicate()  # its input ends, by which it knows


# ------------------------------------------------------------------ what a raylet starts


def _variables(context):
    """What a runtime environment adds to a worker's variables; None if it is more than that."""
    variables = context.pop("env_vars", None) or {}
    if context.pop("py_executable", sys.executable) != sys.executable or any(context.values()):
        return None
    known = all(not name.startswith(_EARLY) and "$" not in variables[name] for name in variables)
    return variables if known else None


def _ask(path, words, variables):
    """Have a worker forked, and wait for its end; False if it must be started otherwise."""
    files = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    files = [fd for fd in files if _is_open(fd)]
    told = json.dumps([words, variables, str(Path.cwd()), files]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        server.sendmsg([len(told).to_bytes(4, "big")], handed)
        server.sendall(told)
        forked = server.recv(1) == b"y"
        # Ray ends what a worker leaves by the group of this process, so its id must stay taken.
        return forked and server.recv(1) == b""


def _is_open(fd):
    with contextlib.suppress(OSError):
        return bool(os.fstat(fd))
    return False


_LANGUAGE, _CONTEXT = "--language=", "--serialized-runtime-env-context="


def _start(words):
    plain = [word for word in words if not word.startswith((_LANGUAGE, _CONTEXT))]
    contexts = [word.removeprefix(_CONTEXT) for word in words if word.startswith(_CONTEXT)]
    variables = _variables(json.loads(contexts[0] if contexts else "{}"))
    if variables is not None and _SOCKET in os.environ:
        with contextlib.suppress(OSError):
            if _ask(os.environ[_SOCKET], plain, {**os.environ, **variables}):
                return
    import ray

    setup = Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py"
    os.execv(sys.executable, [sys.executable, str(setup), *words])


# ------------------------------------------------------------------ the server


def _serve(path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _bury)
    for name in IMPORTED:
        importlib.import_module(name)
    os.write(1, b"ready\n")
    os.dup2(2, 1)
    raylet = None
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            return
        asker, _ = listener.accept()
        with asker:
            files, (words, environment, folder, places) = _receive(asker)
            if raylet is None:
                raylet = environment[_RAYLET]
                _import_ray(environment)
            served = environment[_RAYLET] == raylet
            if served and os.fork() == 0:
                listener.close()
                moved = dict(zip(places, files, strict=True))
                _become(words, environment, folder, moved, asker)
            with contextlib.suppress(OSError):  # it may have been given up
                asker.sendall(b"y" if served else b"n")
            for fd in files:
                os.close(fd)


def _import_ray(environment):
    """Its library reads its settings as it is imported: from what the raylet gives its workers."""
    os.environ.update(environment)
    for name in _OF_RAY:
        importlib.import_module(name)
    assert _draw_apart()
    gc.collect()
    gc.freeze()


def _draw_apart():
    """Whether two copies of this process draw different random numbers in Ray's library.

    Not if it has drawn one before, as Tune's modules do. Ray takes the numbers for names of tasks:
    an actor that two copies call at once ends with "Check failed: erased == 1".
    """
    from ray._raylet import JobID, PlacementGroupID

    drawn = set()
    for _ in range(2):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, PlacementGroupID.of(JobID.from_int(1)).binary())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:  # noqa: PTH123 - a descriptor
            drawn.add(pipe.read())
    return len(drawn) == 2


def _receive(asker):
    size, handed, _, _ = asker.recvmsg(4, socket.CMSG_SPACE(4 * _FILES))
    told = b""
    while len(told) < int.from_bytes(size, "big"):
        told += asker.recv(1 << 20)
    return array.array("i", handed[0][2]), json.loads(told)


def _bury(*_):
    """Whoever has ended takes along what it has started, as under Ray."""
    with contextlib.suppress(ChildProcessError):
        while (process := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)


def _become(words, environment, folder, files, asker):
    """A worker of Ray, in the process that was forked for it."""
    import numpy as np

    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        spare = {place: fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for place, fd in files.items()}
        held = fcntl.fcntl(asker.detach(), fcntl.F_DUPFD_CLOEXEC, 512)
        for place, fd in spare.items():
            os.dup2(fd, place)
        os.closerange(max(files) + 1, held)
        os.closerange(held + 1, held + 512)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        random.seed()
        np.random.seed()
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - the end of the process
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _serve(sys.argv[2])
    else:
        _start(sys.argv[1:])
