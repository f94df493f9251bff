"""`elastix store export`: a stored model in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from elastix.commands.output import AsJson, print_table, undisturbed
from elastix.commands.store_arguments import STORE, Name, Where
from elastix.errors import ConfigError

FORMATS = ("safetensors", "huggingface", "onnx")
_OTHER_FILES = (".pt", ".pth", ".bin", ".ckpt", ".onnx", ".h5", ".pkl", ".npz")


def export(
    ref: Name,
    path: Annotated[
        Path,
        typer.Argument(
            help="X.safetensors; X.parquet for the list; huggingface, onnx: a directory."
        ),
    ],
    store: Where = STORE,
    kind: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "safetensors",
    model: Annotated[
        str | None,
        typer.Option(help="What builds it: MODULE[:FUNCTION], FILE.py[:FUNCTION], config.json."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="JSON for FUNCTION(config). A trial has its own stored.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="onnx: of one sample, without the batch: 3,224,224.")
    ] = None,
    input_dtype: Annotated[
        str | None, typer.Option(help="onnx: int64 for tokens, else float32.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace existing files.")] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="safetensors: with the optimizer's State.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a model as safetensors, as a Hugging Face folder or as ONNX, and check it.

    `export all X.parquet` writes the catalogue. safetensors needs the store alone. The other two
    need the code that builds the model, given by --model, and are loaded again and compared.
    """
    from elastix.store import Store  # not for --help

    written = _target(ref, path, kind, force)
    _check_options(kind, model, config, shape, input_dtype, whole=whole)
    if whole and path.suffix == ".parquet":
        raise ConfigError(
            "--whole writes the optimizer's State of a model, and a .parquet file has the list of "
            "all models. Nothing was written. Leave it out."
        )
    with Store(store, read_only=True) as opened:
        if path.suffix == ".parquet":
            opened.catalogue(path)
        elif kind == "safetensors":
            opened.export(ref, written, whole=whole)
        else:
            from elastix.commands import export_formats

            state = opened.get(ref)
            chosen = state.meta.get("config") if config is None else config
            with undisturbed(as_json):
                export_formats.write(
                    state,
                    kind,
                    written,
                    model or "",
                    chosen,
                    shape or "",
                    input_dtype or "float32",
                    force=force,
                )
    size = written.stat().st_size
    value: dict[str, Any] = {"path": str(written), "bytes": size}
    print_table(as_json, value, ("path", "size"), [(written, decimal(size))])


def _target(ref: str, path: Path, kind: str, force: bool) -> Path:
    """The file that will hold the model.

    Raises:
        ConfigError: the words contradict each other, or it exists.
    """
    if kind not in FORMATS:
        raise ConfigError(f"--format is one of {FORMATS}, not {kind!r}. Nothing was written.")
    catalogue = path.suffix == ".parquet"
    if catalogue and ref != "all":
        raise ConfigError(
            f"a .parquet file holds the list of all models, not {ref!r}. Nothing was written. "
            "Say `export all X.parquet`, or give a .safetensors file for the model."
        )
    if catalogue and kind != "safetensors":
        raise ConfigError(
            f"the list of all models is written as Parquet, not as {kind}. Nothing was written. "
            "Leave --format out."
        )
    if path.suffix in _OTHER_FILES:
        what = "a file in the format safetensors" if kind == "safetensors" else "a directory"
        how = "Give X.safetensors." if kind == "safetensors" else "Give the name of a directory."
        raise ConfigError(
            f"{path} would be {what}, and others would read it by its name as something else. "
            f"Nothing was written. {how}"
        )
    if kind == "safetensors":
        written = path
    else:
        names = {"huggingface": "model.safetensors", "onnx": "model.onnx"}
        written = path / names[kind]
        if path.is_file():
            raise ConfigError(
                f"{path} is a file, and --format {kind} writes a directory. Nothing was written. "
                "Give another name."
            )
    if written.exists() and not (force and written.is_file()):
        how = "Give another name." if written.is_dir() else "Give another name, or --force."
        raise ConfigError(f"{written} exists. Nothing was written. {how}")
    return written


def _check_options(
    kind: str,
    model: str | None,
    config: str | None,
    shape: str | None,
    input_dtype: str | None,
    *,
    whole: bool,
) -> None:
    if kind == "safetensors":
        if any(given is not None for given in (model, config, shape, input_dtype)):
            raise ConfigError(
                "--model, --config, --shape and --input-dtype are for --format huggingface and "
                "onnx; safetensors needs none of them. Nothing was written."
            )
        return
    if whole:
        raise ConfigError(
            f"--whole writes the optimizer's State, which {kind} has no place for. Nothing was "
            "written. Leave it out, or take safetensors."
        )
    if model is None:
        raise ConfigError(
            f"a store has tensors and no code, and {kind} needs the model. Nothing was written. "
            "Name what builds it: --model FILE.py:FUNCTION"
            + (", or the model's config.json." if kind == "huggingface" else ".")
        )
    if (shape is None) == (kind == "onnx"):
        raise ConfigError(
            "--format onnx needs the --shape of one sample, as 3,224,224, and no other format "
            "takes it. Nothing was written."
        )
    if input_dtype is not None and kind != "onnx":
        raise ConfigError(
            f"--input-dtype is of the samples that --format onnx runs; {kind} needs none. Nothing "
            "was written. Leave it out."
        )
