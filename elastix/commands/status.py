"""`elastix status`: the training runs that are live on a Ray cluster, as their controllers say."""

import logging
import os
from typing import Annotated, Any

import typer

from elastix.commands.output import AsJson, print_table, undisturbed
from elastix.errors import TrainError
from elastix.observe.progress import duration, shown

_ANSWER_S = 5.0


def status(
    address: Annotated[
        str, typer.Option(help="Of the Ray cluster; by default the one running here.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """List the training runs that are live on the cluster, with progress and lost workers."""
    with undisturbed(as_json):
        rows = live(address)
    columns = ("run", "running", "step", "done", "left", "workers", "goodput", "lost", "metrics")
    print_table(as_json, rows, columns, map(_row, rows))
    if not rows and not as_json:
        typer.echo("no elastix run is live on this cluster", err=True)


def live(address: str) -> list[dict[str, Any]]:
    """What every controller on the cluster says, by the name of its run.

    Raises:
        TrainError: there is no cluster at that address.
    """
    import ray  # not before it is asked for: other commands need no Ray
    from ray._private.utils import read_ray_address

    from elastix.train.on_ray.find_ray import is_gone
    from elastix.train.on_ray.takeover import CONTROLLER, NAMESPACE

    ours = not ray.is_initialized()
    if ours:
        noted = os.environ.get("RAY_ADDRESS") or read_ray_address()
        named = noted if address == "auto" else address
        try:
            if is_gone(named):
                raise ConnectionError(f"nobody answers at {named}")
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = f"answers at {address}" if address != "auto" else "was found on this machine"
            raise TrainError(
                f"no Ray cluster {where}. Nothing was asked. A run that finds none starts one, and "
                "stops it at its end; `ray start --head` starts one that stays, and --address "
                f"names one elsewhere. ({str(error).rstrip('.')}.)"
            ) from error
    try:
        names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
        found = [_ask(name, NAMESPACE) for name in names if name.endswith(CONTROLLER)]
    finally:
        if ours:
            ray.shutdown()
    answers = [answer for answer in found if answer is not None]
    return sorted(answers, key=lambda answer: (answer["run"], answer["store"]))


def _ask(name: str, namespace: str) -> dict[str, Any] | None:
    """One controller's answer; None from one that ended meanwhile, or is no controller of ours."""
    import ray

    try:
        actor: Any = ray.get_actor(name, namespace)
        answer: dict[str, Any] = ray.get(actor.status.remote(), timeout=_ANSWER_S)
    except (ValueError, AttributeError, ray.exceptions.RayError):
        return None
    return answer


def _row(answer: dict[str, Any]) -> tuple[str, ...]:
    share, done, left = answer["goodput"], answer["done"], answer["left_s"]
    return (
        answer["run"],
        duration(answer["running_s"]),
        str(answer["step"]),
        "-" if done is None else f"{done:.0%}",
        "-" if left is None else duration(left),
        f"{answer['workers']}/{answer['workers_wanted']}",
        "-" if share is None else f"{share:.0%}",
        str(answer["losses"]),
        shown(answer["metrics"]) or "-",
    )
