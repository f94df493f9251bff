"""Nested mappings as one row, and back."""

from collections.abc import Mapping
from typing import Any, Literal


def flatten(
    values: Mapping[str, Any],
    prefix: str = "",
    *,
    separator: str = ".",
    lists: Literal["whole", "blocks", "all"] = "whole",
) -> dict[str, Any]:
    """One mapping of what is nested; names are joined by `separator`.

    Args:
        values: what is nested.
        prefix: before each name.
        separator: between the names.
        lists: which are spread out, by their length and places (`body.length`, `body.0.kernel`):
            none, those of mappings only, or all.
    """
    row: dict[str, Any] = {}
    for name, value in values.items():
        inner = f"{prefix}{name}{separator}"
        if isinstance(value, Mapping):
            row |= flatten(value, inner, separator=separator, lists=lists)
        elif isinstance(value, list | tuple) and _is_spread(value, lists):
            row[f"{inner}length"] = len(value)
            places = {str(place): item for place, item in enumerate(value)}
            row |= flatten(places, inner, separator=separator, lists=lists)
        else:
            row[f"{prefix}{name}"] = value
    return row


def _is_spread(value: list[Any] | tuple[Any, ...], lists: str) -> bool:
    if lists == "blocks":
        return all(isinstance(item, Mapping) for item in value)
    return lists == "all"


def nest(row: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """The inverse, of a row in which no list was spread out."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        *path, last = name.split(separator)
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return found
