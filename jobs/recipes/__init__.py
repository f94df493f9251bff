"""Recipes: small Python files that say what `jobs/train.py` and `jobs/search.py` run.

A recipe is a module of this folder, or the path of a file, with

    def trainer(run: RunConfig) -> ElasticTrainer      for jobs/train.py
    def campaign(run: RunConfig) -> Campaign           for jobs/search.py
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from elastix.commands.output import complain
from elastix.commands.run import load as load_file
from elastix.commands.run import run_config as named_run
from elastix.config import RunConfig
from elastix.errors import ConfigError, ElastixError
from elastix.observe.excepthook import was_told


def names() -> list[str]:
    """The recipes of this folder."""
    folder = Path(__file__).parent
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def load(name: str, part: str) -> ModuleType:
    """The recipe of that name, or in that file.

    Args:
        name: or path.
        part: what is wanted of it, "trainer" or "campaign".

    Raises:
        ConfigError: there is none, and which there are; or it has no such part.
    """
    there = names()
    if name in there:
        found = importlib.import_module(f"jobs.recipes.{name}")
    elif Path(name).is_file():
        found = load_file(Path(name))
    else:
        raise ConfigError(
            f"there is no recipe {name!r}: it is one of {there}, or the path of a Python file. "
            "Nothing was started."
        )
    if not callable(getattr(found, part, None)):
        raise ConfigError(
            f"the recipe {name!r} has no function {part}(run). Nothing was started. See "
            "jobs/recipes/__init__.py."
        )
    return found


def run_config(recipe: str, kind: str, name: str, store: str, seed: int) -> RunConfig:
    """Which run a job is; without a name it has the recipe's and what is done with it.

    Raises:
        ConfigError: that is no name of a run.
    """
    otherwise = f"{Path(recipe).stem}-{kind}"
    return named_run(name, store, seed, otherwise=otherwise, whose="A job has its recipe's")


@contextmanager
def told() -> Iterator[None]:
    """End the program with what an error of elastix says, and without its traceback."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not was_told(interrupt):
            complain("interrupted")
        sys.exit(130)
    except ElastixError as error:
        complain(str(error))
        sys.exit(2 if isinstance(error, ConfigError) else 1)
