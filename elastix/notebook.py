"""What objects look like in a notebook: small HTML tables in which everything is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def facts(title: str, pairs: Iterable[tuple[str, Any]]) -> str:
    """A heading, and a row for each name and value; None leaves a row out."""
    return table(title, (), [(name, value) for name, value in pairs if value is not None])


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A heading, and a table beneath it. The first cell of a row is what the row is about."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = [f"<thead><tr>{head}</tr></thead>"] if columns else []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(str(cell))}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{escape(str(first))}</th>{cells}</tr>')
    return f"<p><strong>{escape(title)}</strong></p><table>{''.join(lines)}</table>"


def size(count: float) -> str:
    """Bytes for people: 12.3 kB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
