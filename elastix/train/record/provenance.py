"""Where a run was started from: command, directory, host, versions, the commit of the code.

And whether all processes of a run have the same elastix, as several may be installed: what one
sends to another the other may take for something else.
"""

import os
import platform
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
from blake3 import blake3

import elastix

_GIT_S = 2.0


@dataclass(frozen=True)
class Installation:
    """An elastix that a process has imported.

    Attributes:
        version: as it is published.
        directory: of the package.
        digest: of all its modules; "" if they are in no directory.
    """

    version: str
    directory: str
    digest: str

    def __str__(self) -> str:
        return f"{self.version} in {self.directory} (code {self.digest[:8]})"

    def is_same(self, other: "Installation") -> bool:
        """Whether both have the same code, as far as it is known."""
        if self.digest and other.digest:
            return self.digest == other.digest
        return self.version == other.version


@cache
def installation() -> Installation:
    """Of this process."""
    package = Path(elastix.__file__).parent
    hasher, found = blake3(), sorted(package.rglob("*.py"))
    for path in found:
        code = path.read_bytes()
        hasher.update(f"{path.relative_to(package).as_posix()} {len(code)}\n".encode() + code)
    digest = hasher.hexdigest() if found else ""
    return Installation(metadata.version("elastix"), str(package), digest)


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
