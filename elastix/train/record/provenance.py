"""Where a run was started from: command, directory, host, versions, the commit of the code."""

import os
import platform
import shlex
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

_GIT_S = 2.0


def origin() -> dict[str, str]:
    """Of this process. What is not known is left out."""
    found = {
        "command": shlex.join(sys.orig_argv),
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "git": commit(Path.cwd()),
    }
    return {name: value for name, value in found.items() if value}


def versions() -> dict[str, str]:
    """Of what a result depends on."""
    return {
        "elastix": metadata.version("elastix"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": str(os.cpu_count()),
    }


def commit(directory: Path) -> str:
    """The commit that is checked out there, and whether files differ from it; "" outside of git."""
    head = _git(directory, "rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return f"{head} with changes" if changed else head


def _git(directory: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
