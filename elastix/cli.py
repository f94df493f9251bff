"""The command line: commands over what exists. Tables on a terminal, `--json` for programs.

Exit codes: 0 done; 1 failed (damage found, no such model, a conflict); 2 the call is wrong; 130
after Ctrl-C.
"""

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

import elastix
from elastix.commands import campaigns, data, exit_codes, output
from elastix.commands.bench import bench
from elastix.commands.dashboard import grafana
from elastix.commands.doctor import doctor
from elastix.commands.estimate import estimate
from elastix.commands.exit_codes import says as _says
from elastix.commands.export import export
from elastix.commands.output import AsJson
from elastix.commands.output import print_table as _print
from elastix.commands.report import report
from elastix.commands.run import run
from elastix.commands.runs import app as runs_app
from elastix.commands.serve import serve
from elastix.commands.serve_model import serve_model
from elastix.commands.status import status
from elastix.commands.store_arguments import STORE, Name, Where
from elastix.errors import ConfigError, NotFound, StoreError

if TYPE_CHECKING:
    from elastix.store import Entry, Store

_HELP = (
    "Elastic PyTorch training and architecture search on Ray.\n\n"
    "Tables on a terminal, `--json` for programs.\n\n"
    "Exit codes: 0 done; 1 failed (damage found, no such model, a conflict); 2 the call is wrong; "
    "130 after Ctrl-C."
)
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=_HELP)
store_app = typer.Typer(no_args_is_help=True, help="Look after the models in a store.")
app.add_typer(store_app, name="store")
app.add_typer(runs_app, name="runs")
app.add_typer(campaigns.app, name="campaign")
app.add_typer(data.app, name="data")
for verb in (bench, doctor, estimate, grafana, report, run, serve, serve_model, status):
    app.command()(_says(verb))


def _read(path: str) -> "Store":
    """A store to look at."""
    from elastix.store import Store  # not for --help

    return Store(path, read_only=True)


def _written(path: str) -> "Store":
    """A store to change, which is begun if there is none."""
    from elastix.store import Store

    return Store(path)


def _existing(path: str, *, readable: bool = True) -> "Store":
    """A store to change; a mistyped path must not begin another one.

    Args:
        path: of the store.
        readable: whether its index has to be; else it need only be there.
    """
    try:
        _read(path).close()
    except NotFound:
        raise
    except StoreError:
        if readable:
            raise
    return _written(path)


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_META = 400  # characters of a model's metadata


def _tell_version(wanted: bool) -> None:
    if wanted:
        output.say(f"elastix {elastix.__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_tell_version, is_eager=True, help="Show it and exit."),
]


@app.callback(help=_HELP)
def main(debug: Debug = False, version: Version = False) -> None:
    """Options before a verb."""
    del version  # told already
    exit_codes.show_tracebacks(debug)


def _line(entry: "Entry") -> tuple[str, ...]:
    return (
        entry.ref[:12],
        " ".join(parent[:12] for parent in entry.parents) or "-",
        "-" if entry.score is None else f"{entry.score:.4g}",
        f"{datetime.fromtimestamp(entry.time_s):%Y-%m-%d %H:%M:%S}",
        str(entry.tensors),
        decimal(entry.nbytes),
        " ".join(entry.tags) or "-",
    )


@store_app.command()
@_says
def log(
    ref: Annotated[str | None, typer.Argument(help="Only this model and its ancestors.")] = None,
    store: Where = STORE,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List models, the latest first."""
    with _read(store) as opened:
        found = opened.log(ref, limit + 1)
    entries = found[:limit]
    if len(found) > limit:
        output.complain(f"the latest {limit} models; there are more: --limit N shows N")
    columns = ("ref", "parents", "score", "stored", "tensors", "size", "tags")
    _print(as_json, [asdict(e) for e in entries], columns, map(_line, entries))


@store_app.command()
@_says
def show(ref: Name, store: Where = STORE, as_json: AsJson = False) -> None:
    """Show one model: its tensors, who first wrote each, its metadata."""
    from elastix.store.whole_tensors import wholes  # not for --help

    with _read(store) as opened:
        manifest = opened.manifest(ref)
        found = wholes(manifest)
        owners = {name: opened.owner(ref, name) for name in found}
    value = {
        "ref": manifest.ref,
        "parents": manifest.parents,
        "meta": manifest.meta,
        "tensors": {
            name: {"dtype": one.dtype, "shape": list(one.shape), "owner": owners[name]}
            | ({"parts": list(one.stored)} if one.split else {})
            for name, one in found.items()
        },
    }
    if not as_json:
        output.say(f"ref      {manifest.ref}")
        output.say(f"parents  {' '.join(manifest.parents) or '-'}")
        output.say(f"meta     {_short(json.dumps(manifest.meta))}")
    lines = [
        (
            name,
            one.dtype,
            f"{list(one.shape)} in {len(one.stored)} parts" if one.split else list(one.shape),
            owners[name][:12],
        )
        for name, one in found.items()
    ]
    _print(as_json, value, ("tensor", "dtype", "shape", "owner"), lines)


def _short(text: str) -> str:
    """The beginning of a long text, with where the rest is."""
    return text if len(text) <= _META else f"{text[:_META]} ... ({len(text)} characters; --json)"


@store_app.command()
@_says
def diff(a: Name, b: Name, store: Where = STORE, as_json: AsJson = False) -> None:
    """Compare two models: tensors and metadata."""
    with _read(store) as opened:
        found = opened.diff(a, b)
    rows: list[tuple[str, str, str]] = [("=", f"{len(found.same)} tensors", "")]
    for sign, names in (("+", found.added), ("-", found.removed), ("~", found.changed)):
        rows += [(sign, name, "") for name in names]
    rows += [("meta", key, f"{old} -> {new}") for key, (old, new) in found.meta.items()]
    _print(as_json, asdict(found), ("", "name", "change"), rows)


@store_app.command()
@_says
def nearest(
    ref: Name,
    store: Where = STORE,
    mode: Annotated[str, typer.Option(help="lp (longest prefix) or lcs (subsequence).")] = "lp",
    tagged: Annotated[str | None, typer.Option(help="Only models with such a tag (glob).")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the stored model that shares most layers with this one (itself left out)."""
    if mode not in ("lp", "lcs"):
        raise ConfigError(f"--mode must be lp or lcs, not {mode!r}. Nothing was searched.")
    with _read(store) as opened:
        signature = opened.signature(ref)
        if signature is None:
            raise ConfigError(
                f"{ref!r} was stored without a signature, which says what its layers are. Nothing "
                "was searched. Models of trials have one, and those of put(..., signature=...)."
            )
        found = opened.nearest(
            signature,
            "lp" if mode == "lp" else "lcs",
            tagged=tagged,
            but=opened.manifest(ref).ref,
        )
    rows = [(found.ref[:12], found.length, found.score)] if found else []
    _print(as_json, asdict(found) if found else None, ("ref", "layers", "score"), rows)
    if found is None:
        which = "other stored model with such a tag" if tagged else "other stored model"
        output.complain(f"no {which} has a layer in common with it")
        raise typer.Exit(1)


store_app.command()(_says(export))


@store_app.command("import")
@_says
def import_(
    path: Annotated[Path, typer.Argument(help="A safetensors file.")],
    store: Where = STORE,
    tag: Annotated[str | None, typer.Option(help="Tag the model with this name.")] = None,
    parent: Annotated[list[str] | None, typer.Option(help="Tag or ref of a parent.")] = None,
    as_json: AsJson = False,
) -> None:
    """Store a safetensors file."""
    with _written(store) as opened:
        ref = opened.import_(path, parents=parent or None)
        if tag is not None:
            opened.tag(tag, ref)
    _print(as_json, {"ref": ref}, ("ref",), [(ref,)])


@store_app.command()
@_says
def verify(store: Where = STORE, as_json: AsJson = False) -> None:
    """Read every byte and compare digests. Exit code 1 if anything is damaged."""
    with _read(store) as opened:
        damage = opened.verify()
        models = opened.stats().models
    rows = [((d.model or "-")[:12], d.tensor or "-", d.what) for d in damage]
    _print(as_json, [asdict(d) for d in damage], ("model", "tensor", "what"), rows)
    if damage:
        typer.echo(f"elastix: {len(damage)} records are damaged; all else is readable.", err=True)
        raise typer.Exit(1)
    if not as_json:
        typer.echo(f"{models} models, nothing damaged")


@store_app.command()
@_says
def gc(store: Where = STORE, as_json: AsJson = False) -> None:
    """Give back the bytes of retired models. Works on a full disk."""
    with _existing(store) as opened:
        found = opened.gc()
    rows = [("freed", decimal(found.freed_bytes)), ("packs removed", len(found.removed))]
    rows += [(pack, why) for pack, why in found.kept.items()]
    _print(as_json, asdict(found), ("what", "how much"), rows)


@store_app.command()
@_says
def stats(store: Where = STORE, as_json: AsJson = False) -> None:
    """Count models and bytes."""
    with _read(store) as opened:
        found = opened.stats()
    value = {**asdict(found), "dedup_ratio": found.dedup_ratio}
    rows = [(k, decimal(v) if k.endswith("_bytes") else round(v, 3)) for k, v in value.items()]
    _print(as_json, value, ("what", "how much"), rows)


@store_app.command()
@_says
def consolidate(ref: Name, store: Where = STORE, as_json: AsJson = False) -> None:
    """Store a model that is kept in parts again, as whole tensors, and move its tags there."""
    with _existing(store) as opened:
        before = opened.manifest(ref).ref
        made = opened.consolidate(before)
        names = [name for name, meant in opened.tags().items() if meant == made]
    value = {"ref": made, "in_parts": before if made != before else None, "tags": names}
    _print(as_json, value, ("ref", "tags"), [(made, " ".join(names) or "-")])
    if made != before:
        output.complain(f"{before[:12]} still has the parts: `elastix store retire` drops it")
    else:
        output.complain("it is whole already; nothing was changed")


@store_app.command()
@_says
def retire(ref: Name, store: Where = STORE, as_json: AsJson = False) -> None:
    """Drop a model; gc gives its bytes back."""
    with _existing(store) as opened:
        full = opened.manifest(ref).ref
        opened.retire(full)
    _print(as_json, {"retired": full}, ("retired",), [(full,)])


@store_app.command()
@_says
def tag(
    name: Annotated[str, typer.Argument(help="The tag.")],
    ref: Annotated[
        str | None, typer.Argument(help="Tag or ref of the model that it names.")
    ] = None,
    store: Where = STORE,
    delete: Annotated[bool, typer.Option("--delete", "-d", help="Remove the tag.")] = False,
    as_json: AsJson = False,
) -> None:
    """Name a model, or remove a name."""
    if (ref is None) != delete:
        raise ConfigError("give either a model to tag, or --delete. Nothing was changed.")
    with _existing(store) as opened:
        if ref is None:
            opened.untag(name)
        else:
            opened.tag(name, ref)
        found = opened.tags()
    _print(as_json, found, ("tag", "ref"), found.items())


@store_app.command()
@_says
def tags(store: Where = STORE, as_json: AsJson = False) -> None:
    """List the tags."""
    with _read(store) as opened:
        found = opened.tags()
    _print(as_json, found, ("tag", "ref"), found.items())


@store_app.command()
@_says
def lineage(ref: Name, store: Where = STORE, as_json: AsJson = False) -> None:
    """List what a model derives from and what derives from it, nearest first."""
    with _read(store) as opened:
        above, below = opened.ancestors(ref), opened.descendants(ref)
    rows = [*(("ancestor", name) for name in above), *(("descendant", name) for name in below)]
    _print(as_json, {"ancestors": above, "descendants": below}, ("which", "ref"), rows)


@store_app.command()
@_says
def rebuild(store: Where = STORE, as_json: AsJson = False) -> None:
    """Make the index anew from the packs, when it is damaged or lost."""
    with _existing(store, readable=False) as opened:
        opened.rebuild()
        found = opened.stats()
    value = {"models": found.models, "packs": found.packs}
    _print(as_json, value, ("what", "how many"), value.items())
