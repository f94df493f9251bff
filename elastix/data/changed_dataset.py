"""What the train function changes in a dataset while processes read copies of it.

They were given it when they began, so they never see `dataset.level = epoch.number`. Whoever joins
begins with other copies. Looked at are plain values and functions, in the dataset and in what it is
made of; not what it holds of samples, nor what datasets of elastix note while they are read.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from elastix.data.formats.indexed import Indexed

_PLAIN = (bool, int, float, str)
_DEEP = 3
_MOST = 256  # attributes, and parts of a list of datasets or transforms
_GIVEN = ("_dataset", "_decode")  # what one of ours was made of; other such names are notes

CHANGED = (
    "%r of the %s was changed after processes had begun to read it ahead. Their copies stay "
    "what it was then, and those of a worker that joins, or of a run that is continued, begin with "
    "what it is there: samples depend on that. The run goes on. Use num_workers=0, or give each "
    "stage a dataset and a loader of its own."
)


def look(dataset: object) -> dict[str, object]:
    """Its attributes by path: what changes if the train function sets one."""
    return dict(islice(_attributes(dataset, "", _DEEP), _MOST))


def changed(before: dict[str, object], dataset: object) -> str | None:
    """The first attribute with another value of its kind than `before`; None if there is none."""
    for path, value in look(dataset).items():
        known = before.get(path)
        if known is not None and type(known) is type(value) and known != value:
            return path
    return None


def _attributes(one: object, path: str, deep: int) -> Iterator[tuple[str, object]]:
    for name, value in list(getattr(one, "__dict__", {}).items()):
        if isinstance(one, Indexed) and name.startswith("_") and name not in _GIVEN:
            continue
        yield from _attribute(value, f"{path}.{name}" if path else name, deep)


def _attribute(value: Any, path: str, deep: int) -> Iterator[tuple[str, object]]:  # noqa: ANN401
    if isinstance(value, _PLAIN):
        if value == value:  # not a number is unlike itself
            yield path, value
    elif isinstance(value, type):
        return
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value[:_MOST] if deep else ()):
            if not isinstance(part, _PLAIN):
                yield from _attribute(part, f"{path}[{number}]", deep - 1)
    else:
        if callable(value):
            yield path, _Function(id(value))
        if deep and hasattr(value, "__dict__"):
            yield from _attributes(value, path, deep - 1)


class _Function(int):
    """Which one it is."""
