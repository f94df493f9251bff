"""`elastix grafana`: the dashboard, where Ray's Grafana finds it."""

from pathlib import Path
from typing import Annotated

import typer

from elastix.observe.grafana import provisioned_directory, write_dashboard
from elastix.verbs.output import AsJson, print_table


def grafana(
    out: Annotated[
        Path | None,
        typer.Option(help="Directory. Default: where the Ray on this machine provisions from."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the Grafana dashboard of elastix's metrics beside Ray's own."""
    path = write_dashboard(out or provisioned_directory())
    print_table(as_json, {"path": str(path)}, ("dashboard",), [(path,)])
