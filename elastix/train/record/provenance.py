"""Where a run was started from: command, directory, host, versions, the commit of the code.

And whether all processes of a run have the same elastix, as several may be installed: what one
sends to another the other may take for something else.
"""

import logging
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
from elastix.errors import OtherCode

logger = logging.getLogger(__name__)
_GIT_S = 2.0


@dataclass(frozen=True)
class Installation:
    """An elastix that a process has imported.

    Attributes:
        version: as it is published; "" if it was not installed, but lies where Python looks.
        directory: of the package.
        digest: of all its modules; "" if they are in no directory.
    """

    version: str
    directory: str
    digest: str

    def __str__(self) -> str:
        return f"{self.version} in {self.directory} (code {self.digest[:8]})".lstrip()

    def is_same(self, other: "Installation") -> bool:
        """Whether both have the same code, as far as it is known."""
        if self.digest and other.digest:
            return self.digest == other.digest
        return self.version == other.version


@cache
def installation() -> Installation:
    """Of this process."""
    package = Path(elastix.__file__).parent
    hasher, found = blake3(), sorted(filter(_is_module, package.rglob("*.py")))
    for path in found:
        code = path.read_bytes()
        hasher.update(f"{path.relative_to(package).as_posix()} {len(code)}\n".encode() + code)
    digest = hasher.hexdigest() if found else ""
    return Installation(published(), str(package), digest)


def warn_of_other(driver: Installation, who: str) -> None:
    """Say so if this process, in a run that goes on, has another elastix than the driver."""
    if not (here := installation()).is_same(driver):
        logger.warning(
            "%s has elastix %s, and the run was begun with %s. It may fail, or compute something "
            "else. Install the same on all nodes.",
            who,
            here,
            driver,
        )


def other_code(
    driver: Installation, has: Installation | None, who: str, node: str = ""
) -> OtherCode | None:
    """Why a process that would take part is refused, if it has another elastix than the driver.

    Args:
        driver: what the driver has.
        has: what that process has; None: one that is too old, or too new, to say so.
        who: the process, for people.
        node: of it; see OtherCode.
    """
    if has is not None and has.is_same(driver):
        return None
    other = "another elastix, which does not say what it is" if has is None else f"elastix {has}"
    return OtherCode(
        f"{who} has {other}, and the driver has {driver}: what one of them sends, the other "
        "could take for something else, or compute otherwise. Nothing is trained there. "
        f"{how_to_have_one(driver, has)}",
        node=node,
    )


def how_to_have_one(driver: Installation, other: Installation | None) -> str:
    """What to do about it, if a process has another elastix than the driver."""
    cure = "Install the same on all nodes, or give Ray's workers the driver's by runtime_env."
    if other is None or other.directory != driver.directory:
        return cure
    changed = "If that is one directory, it was changed since the driver began: start that again."
    return f"{changed} {cure}"


def _is_module(path: Path) -> bool:
    """Not what an editor has put beside them: a copy, or a link that leads nowhere."""
    return path.stem.isidentifier() and path.is_file()


def published() -> str:
    """The version that pip knows of this elastix; "" for none, as of a copy that a job carries."""
    try:
        return metadata.version("elastix")
    except metadata.PackageNotFoundError:
        return ""


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
        "elastix": published(),
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
