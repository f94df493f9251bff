"""`elastix grafana`: the dashboard, where Ray's Grafana finds it."""

from pathlib import Path
from typing import Annotated

import typer

from elastix.commands.output import AsJson, print_table
from elastix.observe.grafana import provisioned_directory, write_alerts, write_dashboard


def grafana(
    out: Annotated[
        Path | None,
        typer.Option(help="Directory. Default: where the Ray on this machine provisions from."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the Grafana dashboard of elastix's metrics beside Ray's own, and alerting rules.

    Grafana finds the dashboard by itself. Prometheus reads the rules when its `rule_files` name
    the file.
    """
    path = write_dashboard(out or provisioned_directory())
    rules = write_alerts(path.parent)
    value = {"path": str(path), "alerts": str(rules)}
    print_table(as_json, value, ("what", "path"), [("dashboard", path), ("alerts", rules)])
