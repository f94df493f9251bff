"""Whatever is given to whatever is set up: it is taken, or refused with its name and its value."""

import http
import inspect
import json
import math
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from ConfigSpace import ConfigurationSpace, Float
from torch.utils.data import TensorDataset

import elastix
from elastix.arguments import _PEERS
from elastix.config import _Config
from elastix.errors import ConfigError

ODD = [
    *(object(), "x", "", b"x", [], {}, (1,), (2, 1), {1}, print, int),
    *(-1, 0, 1.5, 10**30, math.nan, math.inf, -math.inf, True, False, None),
    *(np.int64(2), np.float32(0.5), np.array([1, 2]), torch.tensor([1, 2]), torch.tensor(2)),
    *(Fraction(1, 2), http.HTTPStatus.OK, "a\0b"),
]
CONFIGS = [
    *(elastix.ScalingConfig, elastix.RunConfig, elastix.InheritConfig, elastix.CheckpointConfig),
    *(elastix.RestoreConfig, elastix.ProfileConfig, elastix.Guard, elastix.FailureConfig),
    *(elastix.ExchangeConfig, elastix.Budget),
]
RULES = [
    *(elastix.Asha, elastix.Median, elastix.Evolution, elastix.ScreenedEvolution),
    *(elastix.Random, elastix.DeepHyper, elastix.Optuna, elastix.Population),
]
WITH_DATA = [
    *(elastix.Blocks, elastix.Gate, elastix.Rehearsal, elastix.Shared, elastix.Ensemble),
    *(elastix.Campaign, elastix.ElasticTrainer),
]
# Opened on files or by other libraries; their names alone are looked at here.
OPENED = [
    *(elastix.Parquet, elastix.Arrow, elastix.Tar, elastix.Store, elastix.Space),
    *(elastix.TensorBoard, elastix.MLflow, elastix.WandB),
]
MADE_BY_ELASTIX = {elastix.Context, elastix.Ref, elastix.Result, elastix.Results, elastix.State}
X = Float("x", (0.0, 1.0))


def train(ctx):
    pass


NEEDED = {
    elastix.Budget: {"trials": 3},
    elastix.Blocks: {"name": "blocks", "block": [X]},
    elastix.Gate: {"build": train, "inputs": train, "parameters": 9},
    elastix.Rehearsal: {"capacity": 9},
    elastix.Shared: {"dataset": TensorDataset(torch.zeros(4, 2))},
    elastix.Ensemble: {"members": [torch.nn.Linear(1, 2)], "weights": [1.0]},
    elastix.ElasticTrainer: {"train": train},
    elastix.Campaign: {
        "train": train,
        "space": ConfigurationSpace(space=[X]),
        "metric": "m",
        "budget": elastix.Budget(trials=3),
    },
}
BY_A_LIBRARY = {elastix.DeepHyper, elastix.Optuna}
TAKEN_BY_A_LIBRARY = inspect.Parameter.VAR_KEYWORD
SOMETHING_ELSE = {"dataset", "past", "build", "inputs", "loss", "labels", "train"}


def parameters():
    for cls in CONFIGS + RULES + WITH_DATA:
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind is not TAKEN_BY_A_LIBRARY and name not in SOMETHING_ELSE:
                yield pytest.param(cls, name, id=f"{cls.__name__}-{name}")


def test_every_configuration_is_among_them():
    public = [getattr(elastix, name) for name in elastix.__all__]
    found = {cls for cls in public if cls.__module__.startswith("elastix.")}
    found = {cls for cls in found if not issubclass(cls, Exception)} - MADE_BY_ELASTIX
    assert found == {*CONFIGS, *RULES, *WITH_DATA, *OPENED}


@pytest.mark.parametrize(("cls", "name"), list(parameters()))
def test_a_value_is_taken_or_refused_by_its_name(cls, name):
    wrong = {}
    for value in ODD:
        try:
            made = cls(**{**NEEDED.get(cls, {}), name: value})
        except ConfigError as error:
            if name not in str(error):
                wrong[repr(value)] = f"refused without a name: {error}"
        else:
            if why := taken_wrongly(cls, name, value, made):
                wrong[repr(value)] = why
    assert wrong == {}


def taken_wrongly(cls, name, value, made):
    """Why this cannot be right for any argument, or None."""
    if isinstance(value, bytes | type) or value is print or value == 10**30:
        return "never of use"
    if isinstance(value, float) and not math.isfinite(value):
        return "no number"
    if isinstance(value, bool):
        annotation = inspect.signature(cls).parameters[name].annotation
        if annotation not in (bool, bool | None):
            return f"taken for a {annotation}"
    if isinstance(made, _Config):
        text = json.dumps(made.to_dict())
        if cls.from_dict(json.loads(text)) != made:
            return f"read back as another: {text}"
    return None


OWN_WORDS = [cls for cls in CONFIGS + RULES + WITH_DATA + OPENED if cls not in BY_A_LIBRARY]


@pytest.mark.parametrize("cls", OWN_WORDS, ids=lambda cls: cls.__name__)
def test_an_unknown_name_is_refused_with_those_there_are(cls):
    names = list(inspect.signature(cls).parameters)
    with pytest.raises(ConfigError, match=f"{cls.__name__} has no argument 'qqqq'") as caught:
        cls(**NEEDED.get(cls, {}), qqqq=1)
    assert ("It has " + (", ".join(names) or "none")) in str(caught.value)


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_a_configuration_from_json_is_no_exception(cls):
    with pytest.raises(ConfigError, match=f"{cls.__name__} has no argument 'qqqq'"):
        cls.from_dict({**NEEDED.get(cls, {}), "qqqq": 1})


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: elastix.RunConfig(nmae="digits"), "Did you mean 'name'?"),
        (lambda: elastix.FailureConfig(hang_timeout=3), "Did you mean 'hang_timeout_s'?"),
        (
            lambda: elastix.ElasticTrainer(train, num_workers=4),
            "ScalingConfig has it: ScalingConfig(num_workers=...)",
        ),
        (lambda: elastix.Campaign(train, trials=4), "Budget has it: Budget(trials=...)"),
        (lambda: elastix.Random(seed=4), "RunConfig has it: RunConfig(seed=...)"),
        (lambda: elastix.Campaign(train), "needs space and metric and budget"),
        (lambda: elastix.RunConfig("digits"), "takes no argument without a name"),
        (lambda: elastix.ElasticTrainer(train, {"lr": 1}), "takes only train without a name"),
        (lambda: elastix.Median(1, grace=1), "multiple values for argument 'grace'"),
        (lambda: elastix.Context.loader(None, [], batchsize=4), "Did you mean 'batch_size'?"),
        (
            lambda: elastix.Context.report(None, {"loss": 1}),
            "was given {'loss': 1}. Nothing was done. Write ** before it, or name=value.",
        ),
        (lambda: elastix.Context.mean(None, 1.0), "ctx.mean takes no argument without a name"),
        (lambda: elastix.ScalingConfig(use_gpu=True), "Did you mean 'gpus_per_worker'?"),
        (lambda: elastix.RunConfig(storage_path="x"), "Did you mean 'store'?"),
        (lambda: elastix.CheckpointConfig(monitor="acc"), "Did you mean 'best'?"),
        (lambda: elastix.CheckpointConfig(every=10), "Did you mean 'every_steps'?"),
        (lambda: elastix.Campaign(train, n_trials=3), "Did you mean 'budget'?"),
        (
            lambda: elastix.ElasticTrainer(train, use_gpu=True),
            "ScalingConfig has gpus_per_worker: ScalingConfig(gpus_per_worker=...)",
        ),
        (lambda: elastix.Context.evaluate(None, batch_size=4), "needs metric and dataset"),
    ],
)
def test_a_wrong_name_is_answered_with_what_was_meant(call, meant):
    with pytest.raises(ConfigError) as caught:
        call()
    assert meant in str(caught.value)
    assert "Nothing was done" in str(caught.value)


def test_words_of_peers_are_for_arguments_that_there_are():
    theirs = _PEERS.values()
    made = CONFIGS + RULES + WITH_DATA
    ours = {name for call in made for name in inspect.signature(call).parameters}
    assert set(theirs) <= ours


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Trainer", "'ElasticTrainer'"),
        ("ScalingConf", "'ScalingConfig'"),
        ("Catgorical", "'Categorical'"),
        ("nothing_like_it", ""),
    ],
)
def test_a_wrong_name_of_the_package_is_answered_too(name, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(elastix, name)
    hint = f" Did you mean {meant}?" if meant else ""
    assert str(caught.value) == f"module 'elastix' has no attribute {name!r}.{hint}"


def test_a_wrong_name_on_the_context_is_answered_too():
    ctx = elastix.Context(None, {})
    with pytest.raises(AttributeError, match=r"ctx has no 'dataloader'. Did you mean 'loader'\?"):
        ctx.dataloader([], batch_size=4)
    assert not hasattr(ctx, "_anything")


def test_a_time_is_one_that_somebody_can_wait():
    assert elastix.FailureConfig(wait_s=1e9).wait_s <= threading.TIMEOUT_MAX
    with pytest.raises(ConfigError, match=r"wait_s must be at most 1e\+09"):
        elastix.FailureConfig(wait_s=1e10)
