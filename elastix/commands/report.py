"""`elastix report`: one HTML page of a run."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from elastix.commands.output import AsJson, print_table
from elastix.commands.runs import Name
from elastix.commands.store_arguments import STORE, Folder


def report(
    name: Name,
    store: Folder = STORE,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file; STORE/runs/NAME/report.html by default."),
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page of a run or a campaign, even while it is still going on.

    The page has its plots and data inside and needs no network. Calling this again makes it anew.
    """
    from elastix.report import write_report

    path = write_report(name, store, out)
    print_table(as_json, {"path": str(path), "bytes": path.stat().st_size}, ("report",), [(path,)])
    if browse:
        webbrowser.open(path.resolve().as_uri())
