"""Arguments of the wrong type are refused where they are given, before Ray and the disk."""

import functools
import json
import pickle
import sys
from enum import IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from ConfigSpace import ConfigurationSpace, Float

import elastix
from elastix.arguments import check_train
from elastix.config import ProfileConfig, RestoreConfig
from elastix.errors import ConfigError
from elastix.search.rungs import Asha

SPACE = ConfigurationSpace(space=[Float("x", (0.0, 1.0))])


def train(ctx):
    pass


def trainer(**arguments):
    return elastix.ElasticTrainer(train, **arguments)


def campaign(**arguments):
    given = {"space": SPACE, "metric": "m", "budget": elastix.Budget(trials=1), **arguments}
    return elastix.Campaign(train, **given)


def ray_is_up():
    """In this process: other tests may have started one."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


@pytest.fixture(autouse=True)
def nothing_is_touched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = ray_is_up()
    yield
    assert ray_is_up() == before
    assert list(tmp_path.iterdir()) == []


BOTH = {
    "scaling": ["2", 2, {"num_workers": 2}, elastix.ScalingConfig, elastix.RunConfig()],
    "run": ["digits", Path("runs"), elastix.ScalingConfig()],
    "checkpoint": [10, "best", elastix.FailureConfig()],
    "failure": [3, elastix.CheckpointConfig()],
    "loggers": [print, "board", None, 3, [print], [elastix.TensorBoard]],
    "quiet": ["no", 1, None],
}
TRAINER = BOTH | {
    "config": [[1], "lr=1", {1: 2}, {"model": object()}, {"f": train}, {"s": {1, 2}}],
    "restore": [400, elastix.CheckpointConfig()],
    "profile": [20, True, "torch"],
    "metrics": ["loss", 0],
}
CAMPAIGN = BOTH | {
    "space": [{"x": [0, 1]}, None, Float("x", (0.0, 1.0))],
    "searcher": ["evolution", elastix.Evolution, train],
    "metric": [None, 3, [], ["a", "a"], [1], train],
    "mode": ["most", None, 3, ["max", "min"]],
    "budget": [24, {"trials": 24}, None, elastix.Budget],
    "inherit": [True, "lcs", {"mode": "lcs"}, elastix.InheritConfig],
    "rungs": ["asha", Asha, 3],
    "rerank": ["best", -1, 1.5, None],
    "retries": [-1, "2", None],
    "executor": ["pool", train],
}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (torch.nn.Linear(2, 2), r"train is a model \(Linear\). Nothing was started. Give the func"),
        (None, "not None. Nothing was started. Give the function itself, not what a call of it"),
        (
            lambda: None,
            r"the Context: it takes none\. Nothing was started\. Write `def train\(ctx\):`",
        ),
        (lambda ctx, width: None, "the Context: .*'width'.* Nothing was started. Give it what"),
    ],
)
def test_what_is_no_train_function_is_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        elastix.ElasticTrainer(given)
    with pytest.raises(ConfigError, match=says):
        elastix.Campaign(given, space=SPACE, metric="m", budget=elastix.Budget(trials=1))


def test_a_decorator_may_give_the_train_function_what_else_it_takes():
    """Its wrapper is what is called, whatever it wraps."""

    def with_width(train):
        return functools.wraps(train)(lambda ctx: train(ctx, width=8))

    check_train(with_width(lambda ctx, width: None), "the space")


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in TRAINER.items() for v in vs])
def test_a_trainer_refuses(name, value):
    with pytest.raises(ConfigError, match=name):
        trainer(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in CAMPAIGN.items() for v in vs])
def test_a_campaign_refuses(name, value):
    with pytest.raises(ConfigError, match=name):
        campaign(**{name: value})


@pytest.mark.parametrize("make", [trainer, campaign])
def test_a_comma_too_many_is_named(make):
    with pytest.raises(ConfigError, match="comma"):
        make(scaling=(elastix.ScalingConfig(num_workers=2),))


async def waits(ctx):
    pass


def yields(ctx):
    yield


async def waits_and_yields(ctx):
    yield


@pytest.mark.parametrize("make", [elastix.ElasticTrainer, elastix.Campaign])
@pytest.mark.parametrize("function", [waits, yields, waits_and_yields])
def test_a_function_whose_call_does_nothing_is_no_train_function(make, function):
    needed = {} if make is elastix.ElasticTrainer else {"space": SPACE, "metric": "m"}
    budget = {} if make is elastix.ElasticTrainer else {"budget": elastix.Budget(trials=1)}
    with pytest.raises(ConfigError, match="Write a plain function"):
        make(function, **needed, **budget)


def test_a_message_does_not_quote_a_whole_data_set():
    with pytest.raises(ConfigError, match=r"num_workers must be a whole number") as caught:
        elastix.ScalingConfig(num_workers=list(range(10**5)))
    assert len(str(caught.value)) < 4000
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_the_entry_of_a_config_is_named():
    with pytest.raises(ConfigError, match="model=<object"):
        trainer(config={"lr": 0.1, "model": object()})


def test_the_name_of_a_campaign_leaves_room_for_its_trials():
    with pytest.raises(ConfigError, match="90 characters"):
        campaign(run=elastix.RunConfig(name="x" * 91))
    assert campaign(run=elastix.RunConfig(name="x" * 90)).name == "x" * 90


FIELDS = [
    (elastix.RunConfig, {"store": [None, 3, "", True], "detached": ["no", 1, None], "name": [3]}),
    (
        elastix.ScalingConfig,
        {
            "cpus_per_worker": ["1", None, True],
            "gpus_per_worker": ["1", None],
            "spares": [None, "1"],
            "affinity": ["numa", None],
            "placement": [None, 3, ["PACK"]],
        },
    ),
    (
        elastix.CheckpointConfig,
        {
            "every_s": ["60", True],
            "best": [True, 3, ["accuracy"]],
            "mode": [None, 1],
            "keep_best": [None, 1.0],
            "wait": ["yes", None],
        },
    ),
    (
        elastix.FailureConfig,
        {
            "hang_timeout_s": ["30", None, True],
            "wait_s": [None],
            "start_timeout_s": ["a"],
            "evict_slower_than": ["2", True],
            "replace": [1, None],
            "recovery": [None, ["forward"]],
        },
    ),
    (elastix.Budget, {"trials": ["3"], "parallel": [1.5], "time_s": ["60"], "epochs": [True]}),
    (RestoreConfig, {"step": ["400", 1.0], "leave_out": [3, "12", None, ("1",)]}),
    (ProfileConfig, {"steps": ["20", None, (1,)], "torch": ["yes", None]}),
]


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [(cls, name, value) for cls, wrong in FIELDS for name, vs in wrong.items() for value in vs],
)
def test_a_configuration_refuses(cls, name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        cls(**{name: value})
    assert repr(value) in str(caught.value)


class Number(int):
    pass


class Text(str):  # as tomlkit and ruamel.yaml have them
    __slots__ = ()


class Size(IntEnum):
    TWO = 2


class Name(StrEnum):
    PACK = "PACK"


@pytest.mark.parametrize(
    ("cls", "name", "value", "plain"),
    [
        (elastix.ScalingConfig, "spares", np.int64(2), 2),
        (elastix.ScalingConfig, "spares", Number(2), 2),
        (elastix.ScalingConfig, "spares", Size.TWO, 2),
        (elastix.ScalingConfig, "num_workers", np.int32(2), 2),
        (elastix.ScalingConfig, "num_workers", (Number(1), np.int64(2)), (1, 2)),
        (elastix.ScalingConfig, "memory_per_worker", np.int64(2**40), 2**40),
        (elastix.ScalingConfig, "memory_per_worker", Text("auto"), "auto"),
        (elastix.ScalingConfig, "crew", {"shard": np.int64(2)}, {"shard": 2}),
        (elastix.ScalingConfig, "cpus_per_worker", np.float32(0.5), 0.5),
        (elastix.ScalingConfig, "cpus_per_worker", Fraction(1, 2), 0.5),
        (elastix.ScalingConfig, "placement", Name.PACK, "PACK"),
        (elastix.RunConfig, "seed", np.uint8(3), 3),
        (elastix.RunConfig, "name", np.str_("digits"), "digits"),
        (elastix.RunConfig, "store", Text("runs"), "runs"),
        (elastix.RestoreConfig, "leave_out", [np.int64(3)], (3,)),
        (elastix.ProfileConfig, "steps", [np.int64(3), Size.TWO + 2], (3, 4)),
    ],
)
def test_numbers_and_text_of_other_classes_become_pythons_own(cls, name, value, plain):
    found = getattr(cls(**{name: value}), name)
    assert repr(found) == repr(plain)
    assert json.loads(json.dumps(cls(**{name: value}).to_dict())) == json.loads(
        json.dumps(cls(**{name: plain}).to_dict())
    )


def test_what_is_no_number_to_python_is_none_here():
    for value in (np.True_, Fraction(10**400), "2", b"2", 2 + 0j):
        with pytest.raises(ConfigError, match="cpus_per_worker must be a finite number"):
            elastix.ScalingConfig(cpus_per_worker=value)


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_store_has_a_path(path):
    with pytest.raises(ConfigError, match="path must be a directory"):
        elastix.Store(path)
    with pytest.raises(ConfigError, match="store must be the path"):
        elastix.RunConfig(store=path)


def test_a_path_may_be_a_store():
    assert elastix.RunConfig(store=Path("a/b")).store == "a/b"  # type: ignore[arg-type]
