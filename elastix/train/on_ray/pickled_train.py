"""The train function as workers get it, and what is said of one that cannot be sent to them."""

import functools
import inspect

import ray

from elastix.errors import ConfigError
from elastix.train.on_ray.run_settings import UNPICKLABLE, TrainFunction


def pickle_train(train: TrainFunction) -> bytes:
    """The train function as workers get it.

    Raises:
        ConfigError: it cannot be pickled; names what it holds.
    """
    if culprit := _left_behind(train):
        raise ConfigError(
            f"the train function cannot be sent to workers: it uses {culprit!r}, which functools "
            "caches; that is pickled by its name alone, and workers do not have your script. "
            "Nothing was started. Move it to a module that workers can import, or do not cache it."
        )
    try:
        return bytes(ray.cloudpickle.dumps(train))
    except UNPICKLABLE as error:
        culprit = _unpicklable(train)
        raise ConfigError(
            f"the train function cannot be sent to workers: {culprit or error}. Nothing was "
            "started. Create such objects inside the function, or pass plain values in config."
        ) from error


def _left_behind(train: TrainFunction) -> str | None:
    """Name the first cached function of the script that the train function refers to."""
    used = inspect.getclosurevars(train) if inspect.isfunction(train) else None
    for name, value in used.globals.items() if used is not None else ():
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == "__main__":
            return name
    return None


def _unpicklable(train: TrainFunction) -> str | None:
    """Name the first thing that the function refers to and that cannot be pickled."""
    used = inspect.getclosurevars(train) if inspect.isfunction(train) else None
    if used is None:
        return None
    for kind, values in (("enclosed", used.nonlocals), ("global", used.globals)):
        for name, value in values.items():
            try:
                ray.cloudpickle.dumps(value)
            except UNPICKLABLE as error:
                return f"it uses the {kind} variable {name!r}, a {type(value).__name__}: {error}"
    return None
