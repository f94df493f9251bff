"""Whether a run that is called again has anything left to do.

It has not if it ended well and is called with the same config, seed and train function, from the
same parents. Not here: how it goes on (start_or_resume).
"""

import ast
import json
import pickletools
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path

from blake3 import blake3

from elastix.events import RunStarted
from elastix.observe import journal
from elastix.observe.progress import Progress
from elastix.train.record.pickle_content import content

_LIBRARY = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib"))
_INSTALLED = {"site-packages", "dist-packages"}
_NOT_FOLLOWED = {"__main__", "elastix"}
_PICKLERS = ("cloudpickle.cloudpickle", "ray.cloudpickle.cloudpickle")
_PARSING = threading.Lock()
"""CPython 3.11 keeps one depth for all threads that parse, and a collection lets another one in."""


def mark(train: bytes, parents: Sequence[str] = ()) -> str:
    """Equal for equal train functions that begin from the same models, in another process too.

    Covers what was pickled and the files of all modules that it imports, at whatever remove: a
    function that is imported is pickled as its name alone. Installed packages, and what is imported
    by a name that is put together at run time, are taken to stay as they are.
    """
    words = {text for _, text, _ in pickletools.genops(train) if isinstance(text, str)}
    found = blake3(content(train, _class_ids()))
    for name, source in sorted(_sources(words).items()):
        found.update(json.dumps([name, len(source)]).encode() + source)
    found.update(json.dumps([str(parent) for parent in parents]).encode())
    return found.hexdigest()[:16]


def _class_ids() -> set[str]:
    """What cloudpickle has drawn in this process to tell classes of a script apart."""
    picklers = (sys.modules.get(name) for name in _PICKLERS)
    return {
        drawn
        for pickler in picklers
        for drawn in getattr(pickler, "_DYNAMIC_CLASS_TRACKER_BY_ID", ())
    }


def _sources(words: set[str]) -> dict[str, bytes]:
    """Of the modules that are named, and of those that they import: name to the file's content."""
    found: dict[str, bytes] = {}
    packages: set[str] = set()
    wanted = [word for word in words if word.isidentifier() or "." in word]
    while wanted:
        for name, file in _chain(wanted.pop()):
            if name not in found:
                found[name] = _read(file)
                wanted += _imported(name, file, found[name])
                if file.stem == "__init__":
                    packages.add(name)
        if not wanted:  # `from package import module` within a function leaves two words
            wanted = [f"{package}.{word}" for package in packages for word in words]
            packages = set()
    return found


def _chain(name: str) -> Iterator[tuple[str, Path]]:
    """The files of a module and of the packages that it is in; nothing of what is installed."""
    parts = name.split(".")
    path: Sequence[str] | None = None
    if parts[0] in _NOT_FOLLOWED or not all(part.isidentifier() for part in parts):
        return
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        loaded = sys.modules.get(name)
        spec = getattr(loaded, "__spec__", None) or PathFinder.find_spec(name, path)
        if spec is None:
            return
        path = spec.submodule_search_locations
        if spec.has_location and spec.origin:
            file = Path(spec.origin)
            if spec.origin.startswith(_LIBRARY) or _INSTALLED.intersection(file.parts):
                return
            yield name, file
        if path is None:
            return


def _imported(name: str, file: Path, source: bytes) -> Iterator[str]:
    """Names that may be modules, as the import statements of a file have them."""
    if file.suffix != ".py":
        return
    try:
        with _PARSING:
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    package = name.split(".") if file.stem == "__init__" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def over(before: Progress, now: RunStarted) -> bool:
    """Whether the run that `before` tells of ended well, and `now` would begin it unchanged."""
    return before.run is not None and before.outcome == "finished" and same(before.run, now)


def same(then: RunStarted, now: RunStarted) -> bool:
    """Whether one config, seed and train function were asked for, from one parent."""
    asked = (now.code, now.seed, now.exact, json.loads(json.dumps(dict(now.config))))
    return bool(now.code) and (then.code, then.seed, then.exact, dict(then.config)) == asked


def history(directory: Path, attached: bool = False) -> Progress:
    """What earlier processes of this run came to; the one at work now tells its part itself."""
    path = directory / "journal.jsonl"
    progress = Progress()
    if not journal.is_file(path):
        return progress
    kinds = enumerate(kind for kind, _ in journal.lines(path)) if attached else ()
    began = [place for place, kind in kinds if kind == RunStarted.__name__]
    for event in islice(journal.read(path), began[-1] if began else None):
        progress.add(event)
    return progress
