"""Which files a dataset is in, and whether they are still those it was opened with."""

import operator
import os
from collections import Counter
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from elastix.errors import ConfigError, Conflict

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file, a pattern such as "shards/*.tar", or several of them."""

Fingerprint = tuple[int, int]
"""Size in bytes, and time of the last change in nanoseconds."""


def found(paths: Paths) -> list[Path]:
    """The files, those of a pattern sorted by name.

    Raises:
        ConfigError: one of them names no file, or two of them the same one.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(several, list | tuple) or not all(
        isinstance(entry, str | os.PathLike) and os.fspath(entry) for entry in several
    ):
        raise ConfigError(
            f"paths must be a file, a pattern such as 'shards/*.tar', or a list of these, not "
            f"{paths!r}. Nothing was opened."
        )
    files: list[Path] = []
    for entry in several:
        path = Path(entry)
        matching = [path] if path.is_file() else [Path(name) for name in _matching(path)]
        matching = [match for match in matching if match.is_file()]
        if not matching:
            raise ConfigError(
                f"there is no file {os.fspath(entry)!r}. Nothing was opened. Give a file, or a "
                'pattern in quotes such as "shards/*.tar".'
            )
        files += matching
    if not files:
        raise ConfigError("no file was given. Nothing was opened.")
    places = [os.path.abspath(path) for path in files]  # noqa: PTH100 - resolve() follows links
    twice = next((place for place, times in Counter(places).items() if times > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{twice} was given twice, so its samples would come twice. Nothing was opened. If "
            "that is meant, put two datasets together with torch's ConcatDataset."
        )
    return files


def _matching(pattern: Path) -> list[str]:
    """By name; `**` stands for any number of folders."""
    return sorted(glob(str(pattern), recursive=True))  # noqa: PTH207 - patterns may be absolute


def check_decode(decode: object) -> None:
    """Refuse what is no function.

    Raises:
        ConfigError: says so.
    """
    if decode is not None and not callable(decode):
        raise ConfigError(
            f"decode must be a function of a sample's dict, not {decode!r}. Nothing was opened."
        )


def fingerprint(file: int | Path) -> Fingerprint:
    """Of a file that is open, or at a path."""
    info = os.fstat(file) if isinstance(file, int) else file.stat()
    return info.st_size, info.st_mtime_ns


def check_same(path: Path, now: Fingerprint, then: Fingerprint) -> None:
    """Refuse a file that was changed since it was opened.

    Raises:
        Conflict: it was.
    """
    if now != then:
        raise Conflict(
            f"{path} was changed while it was being read: {now[0]} bytes now, {then[0]} before. "
            "Positions in it mean other samples now, so nothing more is read from it. Leave files "
            "alone while a run uses them, and start the run again under another name."
        )


def check_index(index: int, length: int, what: str) -> int:
    """A position from the front.

    Args:
        index: a whole number of any type: NumPy's short ones cannot be added to a length.
        length: of the dataset.
        what: its name, for messages.

    Raises:
        IndexError: there is no such sample.
        TypeError: it is no whole number.
    """
    index = operator.index(index)
    if not -length <= index < length:
        raise IndexError(f"{what} has {length} samples and no sample {index}")
    return index + length if index < 0 else index
