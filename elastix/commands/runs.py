"""`elastix runs`: all runs and campaigns of a store, live or over; look at one, compare several."""

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from elastix.commands.exit_codes import says
from elastix.commands.output import AsJson, complain, print_table
from elastix.commands.store_arguments import STORE, Folder, require_folder
from elastix.errors import ConfigError, Conflict, Corrupt, NotFound, StoreError
from elastix.observe import catalogue, notes
from elastix.observe.journal import lock_of
from elastix.observe.progress import duration, number, shown
from elastix.observe.run_lock import DRIVER_LOCK, Lock, killed_holder

if TYPE_CHECKING:
    from elastix.store import Store

_REMOVED = ".removed-"

app = typer.Typer(help="List runs and campaigns, live or over; look at one, compare several.")


def _completed(ctx: typer.Context, incomplete: str) -> list[str]:
    """Runs of the store, for a shell that completes them."""
    found = catalogue.names(Path(ctx.params.get("store") or STORE))
    return [name for name in found if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(help="Name of the run.", autocompletion=_completed)]


@app.callback(invoke_without_command=True)
@says
def list_(
    ctx: typer.Context,
    store: Folder = STORE,
    tag: Annotated[str | None, typer.Option(help="Only those with this tag.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs and campaigns of a store, live or over, the latest first."""
    if ctx.invoked_subcommand is None:
        _list(store, tag, as_json)
    elif store != STORE:
        ctx.default_map = {
            ctx.invoked_subcommand: {"store": store}
        }  # `elastix runs -s S show NAME`


@app.command(name="list")
@says
def list_as_command(
    store: Folder = STORE,
    tag: Annotated[str | None, typer.Option(help="Only those with this tag.")] = None,
    as_json: AsJson = False,
) -> None:
    """The same as `elastix runs` alone."""
    _list(store, tag, as_json)


def _list(store: str, tag: str | None, as_json: bool) -> None:
    require_folder(store)
    found = [s for s in catalogue.summaries(Path(store)) if tag is None or tag in s.tags]
    found.sort(key=lambda summary: -summary.last_t)
    sizes = _sizes(store)
    values = [_value(summary, sizes) for summary in found]
    columns = ("run", "kind", "state", "steps", "best", "last", "lost", "size", "began", "tags")
    print_table(as_json, values, columns, (_row(summary, sizes) for summary in found))
    for summary in found:
        if summary.state in ("damaged", "too new"):
            complain(f"{summary.name}: {summary.message}")
    if strangers := catalogue.strangers(Path(store)):
        what = "1 folder" if len(strangers) == 1 else f"{len(strangers)} folders"
        complain(
            f"left out: {what} of {store}/runs with names that no run can have, as {strangers[0]!r}"
        )
    if not found and not as_json:
        complain(f"{store} has no runs" + (f" with the tag {tag!r}" if tag else ""))


@app.command()
@says
def show(name: Name, store: Folder = STORE, as_json: AsJson = False) -> None:
    """Show one run: its state, its metrics, its note, how it was set up."""
    summary = catalogue.summary(Path(store), name)
    value = _value(summary, _sizes(store))
    people: dict[str, Any] = {**value, "began": _began(summary), "took": _took(summary)}
    people["size"] = decimal(people.pop("bytes"))
    del people["began_t"], people["last_t"], people["took_s"]
    rows = [(key, _text(item)) for key, item in people.items() if item not in (None, "", [], {})]
    print_table(as_json, value, ("what", "value"), rows)


@app.command()
@says
def note(
    name: Name,
    text: Annotated[str, typer.Argument(help="The note; '' removes it.")],
    store: Folder = STORE,
    as_json: AsJson = False,
) -> None:
    """Write a note on a run; it replaces the one before."""
    found = notes.change(_directory(name, store), note=text)
    print_table(as_json, asdict(found), ("run", "note"), [(name, text)])


@app.command()
@says
def tag(
    name: Name,
    tags: Annotated[list[str], typer.Argument(help="Tags to add.")],
    store: Folder = STORE,
    delete: Annotated[bool, typer.Option("--delete", "-d", help="Remove them instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tag a run, to find it again with `elastix runs --tag`."""
    if wrong := [t for t in tags if not t or t.split() != [t]]:
        raise ConfigError(
            f"{wrong[0]!r} is no tag: it is empty or has spaces. Nothing was changed."
        )

    def changed(before: Sequence[str]) -> list[str]:
        kept = [t for t in before if t not in tags]
        return kept if delete else [*kept, *dict.fromkeys(tags)]

    found = notes.change(_directory(name, store), tags=changed)
    print_table(as_json, asdict(found), ("run", "tags"), [(name, " ".join(found.tags))])


@app.command()
@says
def rm(
    names: Annotated[
        list[str], typer.Argument(help="Names of the runs.", autocompletion=_completed)
    ],
    store: Folder = STORE,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove runs that are over, with their journals and States; `store gc` frees the bytes.

    A campaign goes with the runs of its trials. States that another tag names are kept.
    """
    with _owned(names, store):
        pass  # before anybody is asked
    if not yes and not typer.confirm(f"Remove {', '.join(names)} from {store} for good?", err=True):
        raise typer.Exit(1)
    with _owned(names, store):
        removed = [_remove(name, store) for name in dict.fromkeys(names)]
    rows = [(value["run"], value["states"], " ".join(value["kept"]) or "-") for value in removed]
    print_table(as_json, removed, ("removed", "states", "kept, as others name them"), rows)


@app.command()
@says
def compare(
    names: Annotated[
        list[str], typer.Argument(help="Names of the runs.", autocompletion=_completed)
    ],
    store: Folder = STORE,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The page; STORE/runs/compare.html by default."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one page of several training runs: curves over each other, settings that differ."""
    from elastix.report import write_comparison  # not for --help

    names = list(dict.fromkeys(names))
    if len(names) < 2:
        raise ConfigError("give two runs at least. Nothing was written.")
    path, settings = write_comparison(names, store, out)
    columns = ("setting", *names)
    rows = ((key, *map(_text, values)) for key, values in settings.items())
    value = {"path": str(path), "runs": names, "settings": settings}
    print_table(as_json, value, columns, rows)
    if not as_json:
        complain(f"the curves are in {path}")


def _directory(name: str, store: str) -> Path:
    return catalogue.find(Path(store), name).parent


@contextmanager
def _owned(names: Sequence[str], store: str) -> Iterator[None]:
    """As long as nobody else trains one of these runs, and nobody else can begin to.

    Raises:
        Conflict: somebody does; names them.
    """
    refusal = "Nothing was removed. Stop it first."
    with ExitStack() as held:
        for name in dict.fromkeys(run for asked in names for run in _runs_of(asked, store)):
            path = catalogue.find(Path(store), name)
            _refuse_restarting(name, lock_of(path))
            for lock, what in (
                (path.with_name(DRIVER_LOCK), f"run {name!r} of this store is at work"),
                (lock_of(path), f"the journal {path} is written"),
            ):
                held.enter_context(Lock(lock, what, refusal=refusal, makes_room=True))
        yield


def _refuse_restarting(name: str, lock: Path) -> None:
    """Ray starts the controller of a detached run anew if it is killed; nobody writes meanwhile.

    Raises:
        Conflict: it may be about to.
    """
    left = killed_holder(lock)
    if left is not None and left.stays:
        raise Conflict(
            f"run {name!r} of this store is trained, detached: its controller, {left}, was killed, "
            "and Ray starts it anew within seconds. Nothing was removed. Stop it first. If its Ray "
            f"cluster is gone for good, delete {lock}, and try again."
        )


def _sizes(store: str) -> dict[str, int]:
    """Bytes of the States that each run's tags name; empty if there is no store of models yet."""
    from elastix.store import Store

    sizes: dict[str, int] = {}
    with suppress(StoreError), Store(store, read_only=True) as opened:
        named = {(tag.split("/", 1)[0], ref) for tag, ref in opened.tags().items() if "/" in tag}
        for name, ref in named:
            with suppress(NotFound):  # retired just now
                sizes[name] = sizes.get(name, 0) + opened.nbytes(ref)
    return sizes


def _value(summary: catalogue.Summary, sizes: dict[str, int]) -> dict[str, Any]:
    value = {**asdict(summary), "bytes": sizes.get(summary.name, 0), "tags": list(summary.tags)}
    if summary.best is not None:
        metric, best, step = summary.best
        value["best"] = {"metric": metric, "value": best, "step": step}
    return value


def _row(summary: catalogue.Summary, sizes: dict[str, int]) -> tuple[str, ...]:
    best, best_trial = summary.best, summary.best_trial
    at_best = "-" if best is None else f"{best[0]} {number(best[1])} (step {best[2]})"
    what = "trials" if summary.kind == "campaign" else "steps"
    return (
        summary.name,
        summary.kind,
        summary.state,
        f"{summary.steps} {what}",
        shown(best_trial) or at_best,
        "-" if best_trial else shown(summary.metrics) or "-",
        str(summary.losses),
        decimal(sizes.get(summary.name, 0)),
        f"{_began(summary)}, {_took(summary)}",
        " ".join(summary.tags) or "-",
    )


def _began(summary: catalogue.Summary) -> str:
    return f"{datetime.fromtimestamp(summary.began_t):%Y-%m-%d %H:%M}" if summary.began_t else "-"


def _took(summary: catalogue.Summary) -> str:
    return duration(summary.took_s)


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON
    if isinstance(value, dict):
        return "  ".join(f"{key} {number(item)}" for key, item in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else number(value)


def _remove(name: str, store: str) -> dict[str, Any]:
    """States first, so that what is left after a kill can be removed again by name."""
    from elastix.store import Store

    refs, kept = set(_trials(name, store)), []
    runs = dict.fromkeys(_runs_of(name, store))
    with suppress(NotFound), Store(store, read_only=True), Store(store) as opened:
        for label, ref in opened.tags().items():
            if label.partition("/")[0] in runs and "/" in label:
                opened.untag(label)
                refs.add(ref)
        kept = [ref[:12] for ref in sorted(refs) if not _retired(opened, ref)]
    folder = Path(store) / "runs"
    for run in runs:
        with notes.alone(folder / run, makes_room=True):
            # At once, so that whoever waits for its locks begins in a folder of its own.
            (folder / run).rename(folder / f"{_REMOVED}{secrets.token_hex(8)}")
    for left in folder.glob(f"{_REMOVED}*"):  # of a removal that was killed as well
        if left.is_symlink():  # what it leads to is not of this store
            left.unlink(missing_ok=True)
        shutil.rmtree(left, ignore_errors=True)
    return {"run": name, "states": len(refs) - len(kept), "kept": kept}


def _runs_of(name: str, store: str) -> list[str]:
    """It, after the runs of its trials if it is a campaign: without it nobody would find them."""
    from elastix.search.trial_runs import trial_runs

    catalogue.find(Path(store), name)
    return [*trial_runs(Path(store), name), name]


def _retired(store: "Store", ref: str) -> bool:
    try:
        store.retire(ref)
    except NotFound:
        return True  # it was before
    except Conflict:
        return False
    return True


def _trials(name: str, store: str) -> list[str]:
    """Models that the trials of a campaign have left, before they were lost or went on as well."""
    from elastix.search.results import Results
    from elastix.store import Store

    try:
        results = Results.open(store, name)
    except NotFound:
        return []
    except Corrupt:
        complain(
            f"the trial database of {name!r} is damaged, so it is not known which models its "
            "trials have left: these stay in the store."
        )
        return []
    found = [str(t.ref) for t in (*results.trials, *results.reranked) if t.ref is not None]
    with suppress(NotFound), Store(store, read_only=True) as opened:
        left = [e for e in opened.log(where={"campaign": name}) if "trial" in e.meta]
        found += [entry.ref for entry in left]
    return found
