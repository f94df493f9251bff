"""`elastix serve-model REF`: a stored model behind HTTP, which follows its tag."""

import sys
from contextlib import redirect_stdout, suppress
from typing import Annotated

import typer

from elastix.commands.output import AsJson, complain, print_table, say, undisturbed
from elastix.commands.store_arguments import STORE, Name, Where
from elastix.errors import ConfigError


def serve_model(
    ref: Name,
    model: Annotated[
        str, typer.Option(help="What builds it: MODULE[:FUNCTION] or FILE.py[:FUNCTION].")
    ],
    store: Where = STORE,
    config: Annotated[
        str | None, typer.Option(help="JSON for FUNCTION(config). A trial has its own stored.")
    ] = None,
    input_dtype: Annotated[str, typer.Option(help="Of inputs; int64 for tokens.")] = "float32",
    host: Annotated[
        str, typer.Option(help="To listen on. Whoever reaches it may ask: there is no password.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="To listen on; 0: a free one.")
    ] = 8378,
    every: Annotated[float, typer.Option(help="Seconds from one look at the tag to the next.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Answer requests with a stored model until Ctrl-C, and with another one when the tag moves.

    `curl ADDRESS/predict --json '{"inputs": [[...], ...]}'` gives the outputs and the model's ref.
    """
    if not 0.01 <= every <= 1e6:
        raise ConfigError(
            f"--every is a number of seconds from 0.01 to 1e6, not {every:g}. Nothing is served."
        )
    if not host:
        raise ConfigError(
            "--host is empty, which would be all addresses of this machine. Nothing is served. "
            "Name one; 0.0.0.0 stands for all."
        )
    from elastix.commands.estimate import input_dtype_of  # not for --help
    from elastix.commands.model_server import ServedModel, following, serve

    with undisturbed(as_json):
        served = ServedModel(store, ref, model, config, input_dtype_of(input_dtype))

    out = sys.stdout

    def told(address: str) -> None:
        if as_json:
            with redirect_stdout(out):
                print_table(True, {"address": address, "ref": served.ref}, (), ())
        else:
            say(f"{ref} ({served.ref[:12]}) answers at {address}predict   (Ctrl-C ends it)")

    with suppress(KeyboardInterrupt), undisturbed(as_json), following(served, every, complain):
        serve(served, host, port, told)
