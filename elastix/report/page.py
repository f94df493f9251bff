"""The page itself: one HTML file with its styles, its data and the plotting library inside.

Whatever comes from a user is text here and nothing else: the template escapes, labels of plots
are escaped before plotly reads tags in them, data travel packed, and the page's policy forbids the
browser to run a script without the page's nonce, or to load anything. Not here: what there is to
tell (compose.py).
"""

import base64
import gzip
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from elastix.errors import StoreError
from elastix.report.figures import Figure


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and what it is sorted by.

    Attributes:
        key: a number, text, or "" for what is not known and comes last.
        mood: "good", "bad" or "".
        href: where it leads to, on a site; made by us, never by a user.
    """

    text: str
    key: float | str = ""
    mood: str = ""
    href: str = ""

    @property
    def sorts_as(self) -> str | None:
        """What it is sorted by, where that is not its text."""
        return None if str(self.key) == self.text else str(self.key)

    @property
    def kind(self) -> str:
        """How it is set: long texts with line breaks and room for them, all else on one line."""
        is_text = not isinstance(self.key, int | float)
        return "long" if is_text and len(self.text) > 24 else ""


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    id: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    id: str
    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    note: str = ""


@dataclass(frozen=True)
class Tile:
    """A number at the top.

    Attributes:
        mood: "good", "bad" or "" for neither.
        meaning: how it is defined, shown under the mouse.
    """

    name: str
    value: str
    more: str = ""
    mood: str = ""
    meaning: str = ""


@dataclass(frozen=True)
class Failure:
    """The first failure."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that the page says.

    Attributes:
        kind: "training run" or "campaign".
        status: running, silent, finished, failed or interrupted.
        about: where and when, in a few words each.
        command: makes this page again.
        made: when it was made.
        kin: runs that belong to this one, each with what it is to it.
        links: to other pages: name and address.
    """

    name: str
    kind: str
    status: str
    about: Sequence[str]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    command: str
    made: str
    failure: Failure | None = None
    kin: Sequence[tuple[str, str]] = ()
    links: Sequence[tuple[str, str]] = ()

    @property
    def live(self) -> bool:
        """It is worth looking again."""
        return self.status in ("running", "silent")


def figures_of(page: Page) -> str:
    """Its plots as JSON: by id, what plotly draws, with every text of a user escaped."""
    figures = {one.id: one.figure for section in page.sections for one in section.figures}
    return json.dumps(_escaped(figures), allow_nan=False)


def render(page: Page, *, source: str = "", version: str = "") -> str:
    """The whole file.

    Args:
        page: what it says.
        source: address at which a served page asks for its data again; a file has none.
        version: of its data, which it asks for if there is another one.
    """
    plots = any(section.figures for section in page.sections)
    here = resources.files(__package__)
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.PackageLoader("elastix", "report"),
    )
    return environment.get_template("page.html").render(
        page=page,
        source=source,
        data_version=version,
        figures=_packed(figures_of(page)),
        plotly=_plotly() if plots or source else "",
        css=Markup((here / "page.css").read_text("utf-8")),  # our own files
        js=Markup((here / "page.js").read_text("utf-8")),
        nonce=secrets.token_urlsafe(16),
        version=metadata.version("elastix"),
    )


def write(page: Page, path: Path) -> None:
    """Put the page at `path`, whole or not at all: a browser may be looking.

    Raises:
        StoreError: it cannot be written there.
    """
    text = render(page)
    beside = path.parent / f".{path.name}.{os.getpid()}"  # Path(".") has no name
    try:
        # /dev/stdout would be a file from then on; of `> FILE` it is a link to an open one.
        opened = path.is_symlink() and Path("/proc") in path.readlink().parents
        if opened or (path.exists() and not path.is_file()):
            raise OSError("it is a folder or a device, and no file")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, "utf-8", "backslashreplace")  # half a character has no bytes
        beside.replace(path)
    except OSError as error:
        raise StoreError(
            f"the report could not be written to {path}: {error}. Nothing was changed. Name "
            "another file with --out."
        ) from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


@cache
def _plotly() -> str:
    """The library, packed."""
    from plotly.offline import get_plotlyjs  # half a second to import

    return _packed(get_plotlyjs())


def _packed(text: str) -> str:
    """As base64 of gzip: a third of plotly's size, a tenth of that of data, and never markup."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _escaped(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """With every text that is no Markup escaped: plotly reads tags in names and labels."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return str(escape(value)) if isinstance(value, str) else value
