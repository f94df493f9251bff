"""What verbs are given: a store, and a model in it."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from elastix.errors import ElastixError, NotFound, StoreError

STORE = "runs/store"


def expanded(store: str) -> str:
    """`--store=~/models`: the shell leaves that as it is."""
    if not store:  # a variable that is not set: the shell's own folder was not meant
        raise typer.BadParameter("it is empty. Name the directory of the store.")
    return os.path.expanduser(store)  # noqa: PTH111 - a URI is no path


def _where(what: str) -> Any:  # noqa: ANN401 - as typer.Option
    return typer.Option("--store", "-s", envvar="ELASTIX_STORE", callback=expanded, help=what)


Where = Annotated[str, _where("Directory or URI of the store.")]
Folder = Annotated[str, _where("Directory of the store.")]


def require_folder(store: str) -> None:
    """That there is such a store and its runs may be looked at: one that may not looks empty.

    Raises:
        NotFound, StoreError: it is not so.
    """
    root = Path(store)
    for folder in (root, root / "runs"):
        try:
            os.scandir(folder).close()
        except OSError as error:
            if folder == root and isinstance(error, FileNotFoundError | NotADirectoryError):
                told = f"there is no directory {store}. Name the store with --store."
                raise NotFound(told) from error
            if not isinstance(error, FileNotFoundError):  # it may have no runs
                cure = " Let this user read it." if isinstance(error, PermissionError) else ""
                raise StoreError(f"reading {folder} failed: {error.strerror}.{cure}") from error


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Tags and refs, for a shell that completes them."""
    from elastix.store import Store  # not for --help

    try:
        with Store(ctx.params.get("store") or STORE, read_only=True) as opened:
            known = [*opened.tags(), *(entry.ref[:12] for entry in opened.log(limit=50))]
    except ElastixError:
        return []
    return [name for name in known if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(help="Tag, ref, or the first digits of a ref.", autocompletion=_names),
]
