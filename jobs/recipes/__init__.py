"""Recipes: small Python files that say what `jobs/train.py` and `jobs/search.py` run.

A recipe is a module of this folder, or the path of a file, with

    def trainer(run: RunConfig) -> ElasticTrainer      for jobs/train.py
    def campaign(run: RunConfig) -> Campaign           for jobs/search.py
"""

import importlib
from pathlib import Path
from types import ModuleType

from elastix.commands.run import load as load_file
from elastix.errors import ConfigError


def names() -> list[str]:
    """The recipes of this folder."""
    folder = Path(__file__).parent
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def load(name: str) -> ModuleType:
    """The recipe of that name, or in that file.

    Raises:
        ConfigError: there is none; names those that are there.
    """
    there = names()
    if name in there:
        return importlib.import_module(f"jobs.recipes.{name}")
    if not Path(name).is_file():
        raise ConfigError(
            f"there is no recipe {name!r}: it is one of {there}, or the path of a Python file. "
            "Nothing was started."
        )
    return load_file(Path(name))
