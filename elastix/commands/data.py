"""`elastix data`: give data an index, so that a position means a sample."""

from pathlib import Path
from typing import Annotated, Any

import typer

from elastix.commands.exit_codes import says
from elastix.commands.output import AsJson, print_table, undisturbed
from elastix.commands.run import load
from elastix.errors import ConfigError

app = typer.Typer(no_args_is_help=True)


@app.callback()
def data() -> None:
    """Make indexes of data that has none."""  # with one verb alone it would be the verb


@app.command()
@says
def index(
    paths: Annotated[
        list[str], typer.Argument(help="Files, patterns in quotes, or SCRIPT.py:NAME of a stream.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Archive to write TFRecord files or a stream to."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the index of tar archives, anew if there is one; check that of Parquet and Arrow files.

    TFRecord files, and a stream that a Python file has under a name (a dataset that can be iterated
    over, or a function that makes one), have no index: with --out their samples are written once
    to a tar archive, with its index, for elastix.Tar. Those of a stream are pickled in it.
    """
    from elastix.data.formats.files import found  # not for --help

    if out is not None:
        with undisturbed(as_json):
            rows = [_written(paths, out)]
    else:
        rows = [_indexed(path) for path in found(paths)]
    shown = [(r["path"], r["samples"], r["note"]) for r in rows]
    print_table(as_json, rows, ("path", "samples", ""), shown)


def _row(path: Path, samples: int, note: str) -> dict[str, Any]:
    return {"path": str(path), "samples": samples, "note": note}


def _indexed(path: Path) -> dict[str, Any]:
    from elastix.data.formats.tables import Arrow, Parquet
    from elastix.data.formats.tar import make_index

    with path.open("rb") as file:
        magic = file.read(6)
    if magic[:4] == b"PAR1":
        table = Parquet(path)
        return _row(path, len(table), f"{len(table.blocks)} row groups; elastix.Parquet")
    if magic == b"ARROW1":
        batches = Arrow(path)
        return _row(path, len(batches), f"{len(batches.blocks)} record batches; elastix.Arrow")
    if path.suffix in (".tfrecord", ".tfrecords"):
        raise ConfigError(
            f"{path} is a stream of records without an index. Nothing was written. Name the tar "
            "archive that its records are to be written to: --out FILE.tar."
        )
    samples, left_out = make_index(path)
    note = f"; {left_out} files are of no sample" if left_out else ""
    return _row(path, samples, f"{path.name}.index; elastix.Tar{note}")


def _written(paths: list[str], out: Path) -> dict[str, Any]:
    from elastix.data.formats import streams
    from elastix.data.formats.files import found
    from elastix.data.formats.tar import make_index

    script, colon, name = paths[0].rpartition(":")
    if colon and script.endswith(".py") and len(paths) == 1:
        stream = getattr(load(Path(script)), name, None)
        if stream is None:
            raise ConfigError(f"{script} has no {name!r}. Nothing was written.")
        made = stream() if callable(stream) else stream
        files, part = streams.pickled(streams.samples_of(made)), streams.PICKLE
    else:
        files, part = streams.records(found(paths)), streams.RECORD
    streams.write_tar(files, out)
    samples, _ = make_index(out)
    return _row(out, samples, f"elastix.Tar; a sample's bytes are under {part!r}")
