"""What `Store.log` returns: models with what the index knows of them, as a list and as a table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from elastix.notebook import size, table
from elastix.state import Ref
from elastix.store.index import Row

SHOWN = 10
"""Models that a notebook shows of a list."""


@dataclass(frozen=True)
class Entry:
    """One model in `log`. `time_s` is in seconds since 1970; `nbytes` is before deduplication."""

    ref: Ref
    parents: tuple[Ref, ...]
    tags: tuple[str, ...]
    score: float | None
    time_s: float
    tensors: int
    nbytes: int
    meta: Mapping[str, Any]


class Log(list[Entry]):
    """What `log` returns: a list, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        """The latest of them."""
        columns = ("ref", "score", "stored", "size", "tags")
        rows = [
            (
                entry.ref[:12],
                "-" if entry.score is None else f"{entry.score:.4g}",
                f"{datetime.fromtimestamp(entry.time_s):%Y-%m-%d %H:%M:%S}",
                size(entry.nbytes),
                " ".join(entry.tags) or "-",
            )
            for entry in self[:SHOWN]
        ]
        left = len(self) - len(rows)
        return table("The latest models", columns, rows) + (f"<p>{left} more</p>" if left else "")


def entries(rows: Iterable[tuple[Row, list[Ref], dict[str, Any]]], tags: Mapping[str, Ref]) -> Log:
    """What `rows` of a Ledger are to users, each with its tags."""
    names: dict[Ref, list[str]] = {}
    for tag, ref in tags.items():
        names.setdefault(ref, []).append(tag)
    return Log(
        Entry(
            row.ref,
            tuple(parents),
            tuple(names.get(row.ref, ())),
            row.score,
            row.time_s,
            row.tensors,
            row.nbytes,
            meta,
        )
        for row, parents, meta in rows
    )
