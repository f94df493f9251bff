"""`elastix campaign list|show|resume`: what a store knows of searches, and going on with one."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from elastix.commands.exit_codes import says
from elastix.commands.output import AsJson, complain, print_table, undisturbed
from elastix.commands.store_arguments import STORE, Folder, require_folder
from elastix.errors import NotFound, StoreError
from elastix.observe.event_text import last_error

if TYPE_CHECKING:
    from elastix.search.results import Best, Results
    from elastix.search.trial import Trial


def _completed(ctx: typer.Context, incomplete: str) -> list[str]:
    """Campaigns of the store, for a shell that completes them."""
    from elastix.search.results import names  # not for --help

    found = names(ctx.params.get("store") or STORE)
    return [name for name in found if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(help="Name of the campaign.", autocompletion=_completed)]

app = typer.Typer(no_args_is_help=True, help="Look at searches, and go on with them.")


@app.command("list")
@says
def list_(store: Folder = STORE, as_json: AsJson = False) -> None:
    """List the campaigns of a store, the latest first."""
    from elastix.search.results import names

    require_folder(store)
    values = []
    broken: StoreError | None = None
    for name in names(store):
        try:
            values.append(_overview(*_opened(store, name)))
        except NotFound as error:
            complain(str(error))
        except StoreError as error:  # the others can be listed nevertheless
            broken = broken or error
    columns = (
        "campaign",
        "trials",
        "running",
        "interrupted",
        "failed",
        "best",
        "searcher",
        "began",
    )
    print_table(as_json, values, columns, ([v[c] for c in columns] for v in values))
    if not values and broken is None and not as_json:
        complain(f"{store} has no campaigns")
    if broken is not None:
        raise broken


@app.command()
@says
def show(
    name: Name,
    store: Folder = STORE,
    top: Annotated[
        int, typer.Option("--top", "-n", min=0, help="How many of the best; 0: all, by number.")
    ] = 10,
    failed: Annotated[bool, typer.Option("--failed", help="Only the failed ones.")] = False,
    parquet: Annotated[
        Path | None, typer.Option(help="Write all trials to this file as well.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the trials of a campaign, the best first; with lineage_epochs beside every score."""
    results, at_work = _opened(store, name)
    if parquet is not None:
        results.to_parquet(parquet)
    if failed:
        _failures(results, as_json)
        return
    chosen = _chosen(results, top)
    left_out = len(results) + len(results.reranked) - len(chosen)
    if top and left_out:
        shown = (
            f"the best {top} trials"
            if len(chosen) == top
            else f"trials with a score: {len(chosen)}"
        )
        complain(f"{shown}; {left_out} more are there: --top 0 shows all")
    shown_trials = [_plain(trial, results, at_work) for trial in chosen]
    value = {**_overview(results, at_work), "trials_shown": shown_trials}
    columns = ("trial", "state", *results.objectives.names, "epochs", "lineage", "inherited")
    rows = (_row(trial, results, at_work) for trial in chosen)
    print_table(as_json, value, (*columns, "parent", "memory", "model", "config"), rows)


@app.command()
@says
def resume(
    name: Name,
    store: Folder = STORE,
    trials: Annotated[int | None, typer.Option(help="How many trials in all.")] = None,
    epochs: Annotated[
        float | None, typer.Option(help="How many epochs in all, of all trials together.")
    ] = None,
    time_s: Annotated[float | None, typer.Option(help="For how many seconds at most.")] = None,
    parallel: Annotated[int | None, typer.Option(help="How many at once.")] = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a campaign where it was stopped or killed, or give it a larger budget.

    It runs the train function as it was when the campaign was last started from its script.
    Run this where that script was run, so that its imports are found.
    """
    given = {"trials": trials, "epochs": epochs, "time_s": time_s, "parallel": parallel}
    with undisturbed(as_json):
        results = _resume(name, store, given, quiet=as_json)
    print_table(as_json, _overview(results, at_work=False), (), ())


def _opened(store: str, name: str) -> "tuple[Results, bool]":
    """A campaign, and whether a process runs it."""
    from elastix.config import RunConfig
    from elastix.search.results import Results
    from elastix.search.trial_database import is_at_work

    at_work = is_at_work(RunConfig(name=name, store=store).directory)  # it may end meanwhile
    return Results.open(store, name), at_work


def _state(trial: "Trial", at_work: bool) -> str:
    from elastix.search.trial_database import state_in_words

    return state_in_words(trial, at_work)


def _resume(name: str, store: str, given: Mapping[str, float | None], *, quiet: bool) -> "Results":
    from elastix.search.executors import campaign_file  # slow to import
    from elastix.search.results import Results

    Results.open(store, name)  # or says which campaigns there are
    sys.path.insert(0, str(Path.cwd()))
    campaign = campaign_file.read(Path(store) / "runs" / name)
    changed: dict[str, Any] = {limit: value for limit, value in given.items() if value is not None}
    resumed = campaign.again(budget=replace(campaign.budget, **changed), store=store, quiet=quiet)
    found: Results = resumed.run()
    return found


def _chosen(results: "Results", top: int) -> "list[Trial]":
    if not top:
        return [*results.trials, *results.reranked]
    return [best.trial for best in results.top(top)]


def _failures(results: "Results", as_json: bool) -> None:
    found = [trial for trial in _chosen(results, 0) if trial.state == "failed"]
    values = [
        {"trial": t.number, "config": dict(t.config), "traceback": t.traceback} for t in found
    ]
    rows = ((t.number, last_error(t.traceback or "") or "-", _text(t)) for t in found)
    print_table(as_json, values, ("trial", "error", "config"), rows)
    if found and not as_json:
        complain(f"\nthe first of them, trial {found[0].number}:\n{found[0].traceback}")


def _overview(results: "Results", at_work: bool) -> dict[str, Any]:
    states = [_state(trial, at_work) for trial in results]
    best = results.top(1)
    return {
        "campaign": results.facts["name"],
        "trials": len(results),
        "running": sum(state == "running" for state in states),
        "interrupted": sum(state == "interrupted" for state in states),
        "failed": sum(state == "failed" for state in states),
        "paused": sum(state == "paused" for state in states),
        "refused": sum(state == "refused" for state in states),
        "starved": sum(trial.starved for trial in results),
        "best": _value(best[0]) if best else "-",
        "searcher": results.facts["searcher"],
        "inherit": results.facts["inherit"],
        "began": f"{datetime.fromtimestamp(results.facts['began_s']):%Y-%m-%d %H:%M}",
    }


def _value(best: "Best") -> str:
    return " ".join(f"{name}={value:.4g}" for name, value in best.values.items())


def _values(trial: "Trial", results: "Results") -> tuple[float, ...]:
    return results.objectives.values(trial.losses)


def _row(trial: "Trial", results: "Results", at_work: bool) -> list[Any]:
    scores = [f"{v:.4g}" for v in _values(trial, results)] or ["-"] * len(results.objectives.names)
    share = (trial.inherited or {}).get("share")
    parent, place = trial.suggestion.parent_number, ""
    if trial.suggestion.in_place:
        place = f" at {results.schedule(trial.number)[-1].begin:g}"
    return [
        f"{trial.number} (scratch)" if trial in results.reranked else trial.number,
        _state(trial, at_work),
        *scores,
        f"{trial.epochs:g}",
        f"{trial.lineage_epochs:g}",
        "-" if share is None else f"{share:.0%}",
        "-" if parent is None else f"{parent}{place}",
        decimal(trial.peak_bytes) if trial.peak_bytes else "-",
        trial.ref[:12] if trial.ref else "-",
        _text(trial),
    ]


def _text(trial: "Trial") -> str:
    return ", ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in trial.config.items()
    )


def _plain(trial: "Trial", results: "Results", at_work: bool) -> dict[str, Any]:
    values = dict(zip(results.objectives.names, _values(trial, results), strict=False))
    return {
        "trial": trial.number,
        "state": _state(trial, at_work),
        "values": values,
        "epochs": trial.epochs,
        "lineage_epochs": trial.lineage_epochs,
        "inherited": (trial.inherited or {}).get("share", 0.0),
        "parent": trial.suggestion.parent_number,
        "in_place": trial.suggestion.in_place,
        "ref": trial.ref,
        "peak_bytes": trial.peak_bytes,
        "starved": trial.starved,
        "config": dict(trial.config),
        "reranked": trial in results.reranked,
    }
