"""`elastix serve`: the pages of a store in a browser, live and read-only."""

import webbrowser
from contextlib import suppress
from typing import Annotated

import typer

from elastix.commands.output import AsJson, print_table, say
from elastix.commands.store_arguments import STORE, Folder, require_folder


def serve(
    store: Folder = STORE,
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="To listen on; 0: a free one.")
    ] = 8377,
    browse: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve runs, campaigns and models of a store to a browser on this machine, until Ctrl-C.

    It reads only, and listens on 127.0.0.1 alone: from elsewhere use ssh -L. Whoever opens the
    address that it prints may look; the token in it is new each time.
    """
    from elastix.report.serving import serve as serving  # not for --help
    from elastix.report.site import Site

    require_folder(store)

    def told(address: str) -> None:
        if as_json:
            print_table(True, {"address": address}, (), ())
        else:
            say(f"{store} is served at {address}   (Ctrl-C ends it)")
        if browse:
            webbrowser.open(address)

    with suppress(KeyboardInterrupt):
        serving(Site(store), port, told)
