"""What scripts write for use elsewhere: there whole or not at all, whoever is killed meanwhile.

It is written under another name and then renamed. A directory changes places with the one that was
there, at once where the file system can do that; elsewhere there is none for a moment. A model in
several files (shards, and an index that names them) is the old one until its index is replaced; so
the new shards must not have names that the old index has. Not here: the store, which keeps States.
"""

import ctypes
import glob
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_INDEX = ".index.json"
_NUMBERS = r"-\d{5}-of-\d{5}"
_OTHER = "-other"  # in the names of shards, every second time
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux, which Python does not have
_renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
if _renameat2 is not None:
    _path = ctypes.c_char_p
    _renameat2.argtypes = (ctypes.c_int, _path, ctypes.c_int, _path, ctypes.c_uint)


@dataclass(frozen=True)
class FileWriter:
    """A worker of a run, as a part of the names under which it writes.

    What another worker of the same run has left half written is removed: only one of them writes.
    What other runs are writing is not: trials of a search may share a directory.
    """

    run: str
    worker: int

    @property
    def partial(self) -> str:
        """The end of the name under which it writes."""
        return f"{self._run}{self.worker}.partial"

    @property
    def partials(self) -> str:
        """The same of all workers of the run, as a pattern."""
        return f"{self._run}*.partial"

    @property
    def _run(self) -> str:
        return f".{hashlib.blake2s(self.run.encode(), digest_size=6).hexdigest()}-"


def replace(path: Path, write: Callable[[Path], None], writer: FileWriter) -> None:
    """Have a file or directory written in place of what is there.

    Args:
        path: where it is afterwards. Where that is a link, it is where it leads to.
        write: writes to the path that it is given.
        writer: who it is.
    """
    path = path.resolve()  # "." has no name
    partial = path.with_name(f"{path.name}{writer.partial}")
    _write(partial, write)
    if not (partial.is_dir() and path.is_dir()):
        partial.replace(path)
    elif _exchanged(partial, path):
        _remove(partial)  # what was there before
    else:
        gone = _moved_away(path)
        partial.replace(path)
        _remove(gone)
    _sweep(path.parent, path.name, writer)


def add(folder: Path, write: Callable[[Path], None], writer: FileWriter) -> None:
    """Have the files of a directory written, beside what else is there.

    A file replaces the one of the same name, and a model its other forms: its shards if it is now
    one file, that file if it is now in shards. Nothing else is removed.

    Args:
        folder: where the files are afterwards.
        write: writes them into the directory that it is given.
        writer: who it is.
    """
    if not folder.is_dir():
        replace(folder, write, writer)
        return
    partial = folder / writer.partial
    _write(partial, write)
    for index in list(partial.rglob(f"*{_INDEX}")):
        _rename_shards(index, _shards(folder / index.relative_to(partial)))
    names = [file.relative_to(partial) for file in partial.rglob("*") if not file.is_dir()]
    for name in sorted(names, key=lambda name: (name.name.endswith(_INDEX), name)):  # those last
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).replace(folder / name)
    for name in names:
        _remove_other_forms(folder / name)
    _remove(partial)
    _sweep(folder, "", writer)


def remove_whole(folder: Path) -> None:
    """Remove a directory; whoever is killed meanwhile leaves no part of it under its name."""
    _remove(_moved_away(folder))


def _moved_away(folder: Path) -> Path:
    gone = folder.with_name(f".{folder.name}.gone")
    _remove(gone)
    return folder.rename(gone)


def _exchanged(one: Path, other: Path) -> bool:
    """Give each of two directories the other's name, at once. Not every file system can."""
    if _renameat2 is None:
        return False
    return bool(_renameat2(_HERE, bytes(one), _HERE, bytes(other), _EXCHANGE) == 0)


def sweep_removed(folder: Path) -> None:
    """Remove what `remove_whole` has left in a directory when its worker was killed."""
    for gone in folder.glob(".*.gone"):
        _remove(gone)


def _write(partial: Path, write: Callable[[Path], None]) -> None:
    """What cannot be written takes no room: the disk may be full."""
    _remove(partial)
    try:
        write(partial)
    except BaseException:
        _remove(partial)
        raise


def _sweep(folder: Path, name: str, writer: FileWriter) -> None:
    """Remove what workers of this run have left who were killed while they wrote this."""
    for partial in folder.glob(f"{glob.escape(name)}{writer.partials}"):
        _remove(partial)
    _remove(folder / f".{name}.gone")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _shards(index: Path) -> set[str]:
    """The files that an index names; none if it is none, or damaged."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _rename_shards(index: Path, taken: set[str]) -> None:
    """Give the shards of an index other names than those that are taken."""
    shards = _shards(index)
    if shards.isdisjoint(taken):
        return
    content = json.loads(index.read_text(encoding="utf-8"))
    to = {shard: re.sub(f"({_NUMBERS})", rf"{_OTHER}\1", shard) for shard in shards}
    for shard, name in to.items():
        index.with_name(shard).rename(index.with_name(name))
    content["weight_map"] = {tensor: to[shard] for tensor, shard in content["weight_map"].items()}
    index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _remove_other_forms(written: Path) -> None:
    """Remove what was there of a model that has now been written: one file, or shards."""
    if written.name.endswith(_INDEX):
        model, kept = written.with_name(written.name.removesuffix(_INDEX)), _shards(written)
        if not kept:
            return
        model.unlink(missing_ok=True)
    else:
        model, kept = written, set()
        written.with_name(f"{written.name}{_INDEX}").unlink(missing_ok=True)
    for shard in _all_shards(model):
        if shard.name not in kept:
            shard.unlink()


def _all_shards(model: Path) -> Iterator[Path]:
    name = f"{re.escape(model.stem)}({_OTHER})?{_NUMBERS}{re.escape(model.suffix)}"
    return (file for file in model.parent.iterdir() if re.fullmatch(name, file.name))
