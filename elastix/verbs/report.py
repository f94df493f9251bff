"""`elastix report`: one HTML page of a run."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from elastix.verbs.output import AsJson, print_table

_STORE = "runs/store"


def _runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Runs of the store, for a shell that completes them."""
    from elastix.report import runs_in  # not for --help

    names = runs_in(Path(ctx.params.get("store") or _STORE))
    return [name for name in names if name.startswith(incomplete)]


def report(
    name: Annotated[str, typer.Argument(help="Name of the run.", autocompletion=_runs)],
    store: Annotated[
        str,
        typer.Option("--store", "-s", envvar="ELASTIX_STORE", help="Directory of the store."),
    ] = _STORE,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file; STORE/runs/NAME/report.html by default."),
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page of a run, also while it is still going on.

    The page has its plots and data inside and needs no network. Calling this again makes it anew.
    """
    from elastix.report import write_report

    path = write_report(name, store, out)
    print_table(as_json, {"path": str(path), "bytes": path.stat().st_size}, ("report",), [(path,)])
    if browse:
        webbrowser.open(path.resolve().as_uri())
