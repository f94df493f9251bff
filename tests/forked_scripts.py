"""Scripts that tests start and kill, forked from the server that has imported what they import.

A new Python would import torch first: two seconds of a core. A script is a process of its own as
ever, with its own arguments, variables and pipes.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

_CONTEXT = multiprocessing.get_context("forkserver")


class Script:
    """What `python -m MODULE ARGUMENTS...` or `python -c CODE` would run, as subprocess.Popen.

    Attributes:
        pid: of the process.
        stdout: what it prints.
        stderr: what it complains of.
    """

    def __init__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(2)]
        (out, out_end), (err, err_end) = pipes
        started = (list(words), str(folder), dict(variables), out_end, err_end)
        self._process = _CONTEXT.Process(target=_run, args=started)
        self._process.start()
        out_end.close()
        err_end.close()
        self.pid = self._process.pid
        self.stdout, self.stderr = _text(out), _text(err)

    def kill(self) -> None:
        """By SIGKILL, whether it is there or not."""
        self._process.kill()

    def wait(self) -> int | None:
        """Until it has ended; its exit code, or the signal that ended it, negative."""
        self._process.join()
        return self._process.exitcode


def _text(end: Connection) -> TextIO:
    file = os.fdopen(os.dup(end.fileno()), encoding="utf-8")
    end.close()
    return file


def _run(
    words: list[str], folder: str, variables: dict[str, str], out: Connection, err: Connection
) -> None:
    for end, place in ((out, 1), (err, 2)):
        os.dup2(end.fileno(), place)
        end.close()
    # The server's know that they were files.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    atexit._clear()
    kind, what, *arguments = words
    sys.argv = [what, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(what, main.__dict__)
    finally:
        atexit._run_exitfuncs()  # which is not done for forked processes
        sys.stdout.flush()
