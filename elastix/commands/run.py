"""`elastix run SCRIPT`: train with the function of a Python file, as torchrun runs one."""

import ast
import importlib.util
import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from elastix.commands.output import AsJson, print_table, undisturbed
from elastix.config import RunConfig, ScalingConfig, is_name
from elastix.errors import ConfigError, ElastixError
from elastix.interrupts import heeding

_NOT_THE_USERS = (__file__, "<frozen importlib")

Script = Annotated[Path, typer.Argument(help="Python file with the train function.")]
Function = Annotated[str, typer.Option(help="Its name; it takes one argument, ctx.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE for ctx.config; VALUE is JSON, or text."),
]


def run(
    script: Script,
    function: Function = "train",
    workers: Annotated[str, typer.Option("--workers", "-w", help="4, or 2:8 for min:max.")] = "1",
    spares: Annotated[int, typer.Option(help="Further workers, to replace lost ones.")] = 0,
    shadows: Annotated[int, typer.Option(help="Further workers that go on if all are lost.")] = 0,
    cpus: Annotated[float, typer.Option(help="CPUs of each worker.")] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs of each worker.")] = 0.0,
    config: Settings = None,
    name: Annotated[
        str, typer.Option(help="Of the run; by default the script's. The same name continues it.")
    ] = "",
    store: Annotated[
        str, typer.Option("--store", "-s", envvar="ELASTIX_STORE", help="Directory of the store.")
    ] = "runs/store",
    seed: Annotated[int, typer.Option(help="Of initial weights and of the order of samples.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train with the train function of a Python file, on this Ray cluster or a local one."""
    scaling = ScalingConfig(
        num_workers=_sizes(workers),
        spares=spares,
        shadows=shadows,
        cpus_per_worker=cpus,
        gpus_per_worker=gpus,
    )
    _require_file(script)
    chosen = run_config(name, store, seed, otherwise=script.stem, whose="A run has its script's")
    settings = pairs(config or [])
    with undisturbed(as_json), heeding():
        train = train_function(script, function)
        from elastix.train.on_ray.trainer import ElasticTrainer  # not for --help

    trainer = ElasticTrainer(train, config=settings, scaling=scaling, run=chosen, quiet=as_json)
    with undisturbed(as_json):
        result = trainer.fit()
    if as_json:
        found = {"ref": result.ref, "metrics": dict(result.metrics), "exact": result.audit.exact}
        found["replicas_equal"] = result.audit.replicas.equal
        print_table(True, found, (), [])


def run_config(name: str, store: str, seed: int, *, otherwise: str, whose: str) -> RunConfig:
    """Which run is meant, from a command's options.

    Args:
        name: as it was given; empty if it was not.
        store: directory.
        seed: of weights and of the order of samples.
        otherwise: its name if none was given.
        whose: name that is, as the beginning of a sentence.

    Raises:
        ConfigError: that is no name of a run.
    """
    try:
        return RunConfig(name=name or otherwise, store=store, seed=seed)
    except ConfigError as error:
        if name or is_name(otherwise):
            raise
        raise ConfigError(f"{error} {whose} name unless --name says another.") from error


def train_function(script: Path, name: str) -> Callable[..., None]:
    """The function of that name in a Python file.

    Raises:
        ConfigError: there is no such file, or no such function in it.
    """
    _require_file(script)
    train = None
    if _may_bind(script, name):  # a plain script would train before it is refused
        train = getattr(load(script), name, None)
    if train is None:
        raise ConfigError(
            f"{script} has no {name!r}. Nothing was started. Name the function that takes the "
            "Context: --function NAME."
        )
    found: Callable[..., None] = train
    return found


def load(script: Path, name: str = "") -> ModuleType:
    """The module in a file. Not under its own name, so that workers are sent what is in it.

    Args:
        script: the file.
        name: of the module, if it is to have another.

    Raises:
        ConfigError: there is no such Python file, or its code trains or searches by itself; or it
            fails, for which the user's own lines are told.
    """
    _require_file(script)
    name = name or f"elastix_run_{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{script} is not a Python file. Nothing was started.")
    from elastix.train.record.loaded_script import loading  # not for --help

    module = importlib.util.module_from_spec(spec)
    try:
        with loading(script):
            spec.loader.exec_module(module)
    except ElastixError:
        raise
    except SystemExit as error:
        raise ConfigError(
            f"{script} ended itself when it was loaded, with sys.exit({error.code!r}). Nothing was "
            "started. What is not for workers, such as reading arguments, belongs under "
            '`if __name__ == "__main__":`.'
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{script} cannot be loaded. Nothing was started.\n{_what_failed(error)}"
        ) from error
    return module


def _require_file(script: Path) -> None:
    if script.is_dir():
        raise ConfigError(f"{script} is a directory, not a Python file. Nothing was started.")
    if not script.is_file():
        raise ConfigError(f"there is no file {script}. Nothing was started.")


def _what_failed(error: Exception) -> str:
    """The traceback without the lines of elastix and of Python's own importing."""
    told = traceback.TracebackException.from_exception(error)
    own = [frame for frame in told.stack if not frame.filename.startswith(_NOT_THE_USERS)]
    told.stack = traceback.StackSummary.from_list(own)
    return "".join(told.format()).rstrip()


def _may_bind(script: Path, name: str) -> bool:
    """Whether the script could have something of that name once it has run."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True  # loading it says what is wrong
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                pass
            case ast.ClassDef(name=found) | ast.Name(id=found) | ast.MatchAs(name=found):
                pass
            case ast.alias(name=whole, asname=None):
                found = "*" if whole == "*" else whole.partition(".")[0]
            case ast.alias(asname=found) | ast.Constant(value=found):  # globals()["train"] = ...
                pass
            case _:
                continue
        if found in (name, "*"):
            return True
    return False


def _sizes(text: str) -> int | tuple[int, int]:
    low, colon, high = text.partition(":")
    try:
        return (int(low), int(high)) if colon else int(low)
    except ValueError as error:
        raise ConfigError(
            f"--workers {text}: give a number, or MIN:MAX. Nothing was started."
        ) from error


def pairs(texts: Sequence[str]) -> dict[str, Any]:
    """What `--set` says, for ctx.config.

    Raises:
        ConfigError: one is no KEY=VALUE.
    """
    return dict(map(_pair, texts))


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text}: give KEY=VALUE. Nothing was started.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
