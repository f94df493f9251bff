"""Arguments of the wrong type are refused where they are given, before Ray and the disk."""

import sys
from pathlib import Path

import pytest
from ConfigSpace import ConfigurationSpace, Float

import elastix
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


@pytest.fixture(autouse=True)
def nothing_is_touched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized()
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


def test_a_path_may_be_a_store():
    assert elastix.RunConfig(store=Path("a/b")).store == "a/b"  # type: ignore[arg-type]
