"""Whatever is given to whatever is set up: it is taken, or refused with its name and its value."""

import inspect
import json
import math

import pytest

import elastix
from elastix.config import _Config
from elastix.errors import ConfigError

ODD = [
    *(object(), "x", "", b"x", [], {}, (1,), (2, 1), {1}, print, int),
    *(-1, 0, 1.5, 10**30, math.nan, math.inf, -math.inf, True, False, None),
]
NEEDED = {elastix.Budget: {"trials": 3}}
CONFIGS = [
    *(elastix.ScalingConfig, elastix.RunConfig, elastix.InheritConfig, elastix.CheckpointConfig),
    *(elastix.RestoreConfig, elastix.ProfileConfig, elastix.Guard, elastix.FailureConfig),
    *(elastix.ExchangeConfig, elastix.Budget),
]
OTHERS = [
    *(elastix.Asha, elastix.Median, elastix.Evolution, elastix.ScreenedEvolution),
    *(elastix.Random, elastix.DeepHyper, elastix.Optuna),
]
TAKEN_BY_A_LIBRARY = inspect.Parameter.VAR_KEYWORD


def parameters():
    for cls in CONFIGS + OTHERS:
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind is not TAKEN_BY_A_LIBRARY:
                yield pytest.param(cls, name, id=f"{cls.__name__}-{name}")


def test_every_configuration_is_among_them():
    found = {cls for cls in vars(elastix).values() if isinstance(cls, type)}
    assert {cls for cls in found if issubclass(cls, _Config)} == set(CONFIGS)


@pytest.mark.parametrize(("cls", "name"), list(parameters()))
@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:16])
def test_a_value_is_taken_or_refused_by_its_name(cls, name, value):
    refusal, made = "", None
    try:
        made = cls(**{**NEEDED.get(cls, {}), name: value})
    except ConfigError as error:
        refusal = str(error)
    if made is None:
        assert name in refusal
        return
    assert not isinstance(value, bytes | type)
    assert value is not print
    if isinstance(made, _Config):
        text = json.dumps(made.to_dict())
        assert cls.from_dict(json.loads(text)) == made
