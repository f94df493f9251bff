"""Recipes: small Python files that say what `jobs/train.py` and `jobs/search.py` run.

A recipe is a module of this folder, or the path of a file, with

    def trainer(run: RunConfig) -> ElasticTrainer      for jobs/train.py
    def campaign(run: RunConfig) -> Campaign           for jobs/search.py
"""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from elastix.errors import ConfigError


def load(name: str) -> ModuleType:
    """The recipe of that name, or in that file.

    Raises:
        ConfigError: there is none; names those that are there.
    """
    folder = Path(__file__).parent
    there = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    if name in there:
        return importlib.import_module(f"jobs.recipes.{name}")
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"there is no recipe {name!r}: it is one of {there}, or the path of a Python file. "
            "Nothing was started."
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
