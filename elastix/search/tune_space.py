"""A space as Ray Tune writes it, for people who bring one of Tune's own search algorithms.

    tune.Tuner(train, param_space=to_tune(space))       # and in train:
    config = space.from_flat(config)

Tune has no conditions: it draws inactive hyperparameters too, and `from_flat` drops them. With
elastix's own searchers use `elastix.tune.Search`, which needs no translation.
"""

from typing import Any

from ConfigSpace import Constant
from ConfigSpace.hyperparameters import UniformFloatHyperparameter, UniformIntegerHyperparameter
from ray import tune

from elastix.errors import ConfigError
from elastix.search.config_values import Parameter, choices, plain
from elastix.search.space import Space


def to_tune(space: Space) -> dict[str, Any]:
    """`param_space` for a Tuner: every hyperparameter of `space.flat`.

    Raises:
        ConfigError: the space has forbidden clauses, or a distribution that Tune has not.
    """
    flat = space.flat
    if flat.forbidden_clauses:
        raise ConfigError(
            f"Tune has no forbidden clauses, and the space has {list(flat.forbidden_clauses)}. "
            "Nothing was made. Use elastix.tune.Search, which respects them."
        )
    return {name: _domain(hyperparameter) for name, hyperparameter in flat.items()}


def _domain(hyperparameter: Parameter) -> Any:  # noqa: ANN401 - a Domain of Tune, or a constant
    if isinstance(hyperparameter, Constant):
        return plain(hyperparameter.value)
    listed = choices(hyperparameter)
    uneven = len({*(getattr(hyperparameter, "weights", None) or ())}) > 1
    if listed is not None and not uneven:
        return tune.choice([plain(choice) for choice in listed])
    if isinstance(hyperparameter, UniformIntegerHyperparameter):
        draw = tune.lograndint if hyperparameter.log else tune.randint
        return draw(int(hyperparameter.lower), int(hyperparameter.upper) + 1)
    if isinstance(hyperparameter, UniformFloatHyperparameter):
        draw = tune.loguniform if hyperparameter.log else tune.uniform
        return draw(float(hyperparameter.lower), float(hyperparameter.upper))
    kind = f"{type(hyperparameter).__name__}{' with weights' if uneven and listed else ''}"
    raise ConfigError(
        f"{hyperparameter.name!r} is a {kind}, which Tune has not. "
        "Nothing was made. Use elastix.tune.Search, or a uniform distribution."
    )
