"""What the verbs of `elastix store` are given: a store, and a model in it."""

from typing import Annotated

import typer

from elastix.errors import ElastixError

STORE = "runs/store"

Where = Annotated[
    str,
    typer.Option("--store", "-s", envvar="ELASTIX_STORE", help="Directory or URI of the store."),
]


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
