"""Configuration: what is refused, and what survives JSON."""

import copy
import dataclasses
import inspect
import json
import pickle
import re

import pytest
import torch

from elastix import config
from elastix.config import (
    CheckpointConfig,
    ExchangeConfig,
    FailureConfig,
    Guard,
    InheritConfig,
    ProfileConfig,
    RunConfig,
    ScalingConfig,
)
from elastix.errors import ConfigError
from elastix.mesh_check import pretended
from elastix.search.executors.pool import Pool
from elastix.testing.local import run_local
from elastix.testing.local_worker import Gpus
from elastix.train.on_ray.trainer import ElasticTrainer

ALL = [
    ScalingConfig,
    RunConfig,
    CheckpointConfig,
    FailureConfig,
    InheritConfig,
    ExchangeConfig,
]


@pytest.fixture(autouse=True)
def a_torch_that_shards(monkeypatch):
    """What is refused here is so with any other, too."""
    monkeypatch.setattr(config, "version", {"torch": "2.13.0"}.get)


@pytest.mark.parametrize(
    "sizes", [0, -1, 2.0, True, "2", (0, 2), (3, 2), (1, 2, 3), (1,), (1, 2.0), (True, 2), None]
)
def test_impossible_numbers_of_workers_are_refused_by_value(sizes):
    with pytest.raises(ConfigError, match="num_workers must be") as caught:
        ScalingConfig(num_workers=sizes)
    assert repr(sizes) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"cpus_per_worker": 0}, "cpus_per_worker=0"),
        ({"cpus_per_worker": 0, "gpus_per_worker": 0.0}, "gpus_per_worker=0.0"),
        ({"cpus_per_worker": -1, "gpus_per_worker": 1}, "cpus_per_worker=-1"),
        ({"gpus_per_worker": -0.5}, "gpus_per_worker=-0.5"),
        ({"placement": "ANYWHERE"}, "'ANYWHERE'"),
    ],
)
def test_impossible_resources_are_refused_by_value(values, named):
    with pytest.raises(ConfigError) as caught:
        ScalingConfig(**values)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"notices": "ibm"}, "'ibm'"),
        ({"notices": True}, "True"),
        ({"notices": ["aws"]}, "['aws']"),
        ({"notices": "aws", "notices_address": "169.254.169.254"}, "'169.254.169.254'"),
        ({"notices": "aws", "notices_address": "https://x"}, "'https://x'"),
        ({"notices": "aws", "notices_address": "http://x/path"}, "'http://x/path'"),
        ({"notices": "aws", "notices_address": 5}, "5"),
        ({"notices_address": "http://localhost:1338"}, "only with notices"),
    ],
)
def test_notices_of_no_cloud_are_refused_by_value(values, named):
    with pytest.raises(ConfigError) as caught:
        FailureConfig(**values)
    assert named in str(caught.value)


@pytest.mark.parametrize("wire", ["fp16", "float32", "", torch.bfloat16, 16, True])
def test_a_wire_of_another_type_is_refused_by_value(wire):
    with pytest.raises(ConfigError) as caught:
        ExchangeConfig(wire=wire)
    assert repr(wire) in str(caught.value)


def test_notices_are_off_unless_asked_for_and_survive_json():
    assert FailureConfig().notices is None
    for address in (None, "http://localhost:1338", "http://[::1]:80"):
        found = FailureConfig(notices="gcp", notices_address=address)
        assert FailureConfig.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    "name", ["", ".hidden", "a/b", "a b", "../up", "ü", "x" * 101, "a..b", 7, None]
)
def test_a_run_name_that_is_no_directory_name_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        RunConfig(name=name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["a", "7", "digits-1.2_b", "x" * 100])
def test_a_run_name_may_have_letters_digits_dots_and_dashes(name):
    assert RunConfig(name=name).directory.name == name


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "0"])
def test_an_impossible_seed_is_refused(seed):
    with pytest.raises(ConfigError) as caught:
        RunConfig(seed=seed)
    assert repr(seed) in str(caught.value)


@pytest.mark.parametrize("field", ["every_steps", "keep_last"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_impossible_checkpoint_numbers_are_refused(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        CheckpointConfig(**{field: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("cls", "name"), [(CheckpointConfig, "best"), (Guard, "metric")])
def test_a_metric_without_a_name_is_refused(cls, name):
    with pytest.raises(ConfigError, match=f"{name} must be the name of a metric"):
        cls(**{name: ""})


@pytest.mark.parametrize("field", ["every_steps", "keep_last"])
def test_checkpoint_numbers_may_be_one_or_none(field):
    assert getattr(CheckpointConfig(**{field: 1}), field) == 1
    assert getattr(CheckpointConfig(**{field: None}), field) is None


@pytest.mark.parametrize("losses", [-1, 1.0, True, "2"])
def test_impossible_numbers_of_losses_are_refused(losses):
    with pytest.raises(ConfigError, match="max_worker_losses") as caught:
        FailureConfig(max_worker_losses=losses)
    assert repr(losses) in str(caught.value)


def test_no_loss_at_all_may_be_allowed():
    assert FailureConfig(max_worker_losses=0).max_worker_losses == 0


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(FailureConfig) if f.name.endswith("_s")]
)
@pytest.mark.parametrize("value", [0, -2.5])
def test_times_must_be_positive(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        FailureConfig(**{field: value})
    assert repr(value) in str(caught.value)


def test_a_config_error_is_also_a_value_error():
    with pytest.raises(ValueError):
        ScalingConfig(num_workers=0)


@pytest.mark.parametrize(
    "config",
    [
        *[cls() for cls in ALL],
        ScalingConfig(num_workers=(2, 8), cpus_per_worker=0.5, gpus_per_worker=1, placement="PACK"),
        RunConfig(name="digits", store="/tmp/elsewhere", seed=7),
        CheckpointConfig(every_steps=10, keep_last=None),
        FailureConfig(max_worker_losses=3, hang_timeout_s=1.5, replace=False),
    ],
    ids=lambda config: type(config).__name__,
)
def test_every_config_survives_json(config):
    text = json.dumps(config.to_dict())
    assert type(config).from_dict(json.loads(text)) == config


def test_the_range_of_workers_is_a_tuple_again_after_json():
    values = json.loads(json.dumps(ScalingConfig(num_workers=(2, 8)).to_dict()))
    assert ScalingConfig.from_dict(values).num_workers == (2, 8)


@pytest.mark.parametrize("cls", ALL)
def test_configs_are_frozen_and_keyword_only(cls):
    with pytest.raises(ConfigError):
        cls(1)
    name = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(cls(), name, 1)


def test_a_number_of_workers_is_both_minimum_and_maximum():
    fixed, elastic = ScalingConfig(num_workers=3), ScalingConfig(num_workers=(2, 8))
    assert (fixed.min_workers, fixed.max_workers) == (3, 3)
    assert (elastic.min_workers, elastic.max_workers) == (2, 8)


def test_resources_are_in_the_words_of_ray_without_zeros():
    assert ScalingConfig().resources_per_worker == {"CPU": 1.0}
    both = ScalingConfig(cpus_per_worker=2, gpus_per_worker=0.5)
    assert both.resources_per_worker == {"CPU": 2.0, "GPU": 0.5}
    assert ScalingConfig(cpus_per_worker=0, gpus_per_worker=1).resources_per_worker == {"GPU": 1.0}


@pytest.mark.parametrize("store", ["s3://bucket/runs", "file:///tmp/runs"])
def test_a_run_is_kept_in_a_directory_and_not_at_an_address(store):
    with pytest.raises(ConfigError, match="opens it"):
        RunConfig(store=store)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mode": "all"}, "mode"),
        ({"provider": "friend"}, "provider"),
        ({"optimizer": 1}, "optimizer"),
    ],
)
def test_what_is_no_way_to_inherit_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        InheritConfig(**wrong)


# ---------------------------------------------------------------------------- outer steps


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"every_steps": 0}, "every_steps must be"),
        ({"every_steps": 4, "outer_lr": 0.0}, "outer_lr must be"),
        ({"every_steps": 4, "outer_momentum": 1.0}, "outer_momentum must be"),
        ({"outer_lr": 1.0}, "of use only with every_steps"),
    ],
    ids=str,
)
def test_outer_steps_that_cannot_be_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        ExchangeConfig(**given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recovery": "rollback"}, "recovery='rollback'"),
        ({"guard": Guard()}, "guard="),
        ({"shadows": 1}, "shadows=1"),
        ({"exact": True}, "exact=True"),
        ({"crew": {"pipe": 2}}, "crew={'pipe': 2}"),
    ],
    ids=str,
)
def test_what_does_not_work_with_inner_steps_is_refused_before_anything_starts(
    options, said, tmp_path
):
    exchange = ExchangeConfig(every_steps=4)
    with pytest.raises(ConfigError, match=f"{said}.* does not work with ExchangeConfig"):
        run_local(print, 2, exchange=exchange, directory=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------- crews


@pytest.mark.parametrize(
    ("crew", "said"),
    [
        ({"shards": 2}, "has no axis 'shards'"),
        ({"context": 2}, "not there yet"),
        ({"shard": 0}, "whole number >= 1"),
        ({"shard": 2, "tensor": -1}, "whole number >= 1"),
        ({"shard": True}, "whole number >= 1"),
        ({"shard": 1.5}, "whole number >= 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(crew, said):
    with pytest.raises(ConfigError, match=said):
        ScalingConfig(crew=crew)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shadows": 1}, "shadows=1"),
        ({"exact": True, "recompute_every": 10}, "recompute_every=10"),
        ({"recovery": "rollback"}, "recovery='rollback'"),
        ({"guard": Guard()}, "guard"),
        ({"checkpoint": CheckpointConfig(best="loss")}, "best='loss'"),
    ],
)
def test_what_crews_do_not_do_yet_is_refused_before_anything_starts(options, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        run_local(print, 2, crew={"shard": 2}, directory=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scaling": {"shadows": 1}}, "shadows=1"),
        (
            {
                "scaling": {"gpus_per_worker": 4, "crew": {"shard": 2, "tensor": 2}},
                "run": RunConfig(exact=True),
            },
            "exact=True with gpus_per_worker=4",
        ),
        (
            {
                "scaling": {"gpus_per_worker": 0.5, "crew": {"pipe": 2}},
                "run": RunConfig(exact=True),
            },
            "exact=True with gpus_per_worker=0.5",
        ),
        ({"scaling": {"placement": "STRICT_PACK"}}, "placement='STRICT_PACK'"),
        (
            {"run": RunConfig(exact=True), "failure": FailureConfig(recompute_every=10)},
            "recompute_every=10",
        ),
        ({"failure": FailureConfig(recovery="rollback")}, "recovery='rollback'"),
        ({"failure": FailureConfig(guard=Guard())}, "guard"),
        ({"checkpoint": CheckpointConfig(best="loss")}, "best='loss'"),
        ({"profile": ProfileConfig()}, "profile"),
    ],
)
def test_what_crews_do_not_do_on_ray_is_refused_before_anything_starts(options, said):
    scaling = ScalingConfig(**{"crew": {"shard": 2}, **options.pop("scaling", {})})
    with pytest.raises(ConfigError, match=f"{said}.* does not work with crew"):
        ElasticTrainer(print, scaling=scaling, **options)


@pytest.mark.parametrize(
    ("crew", "exact"),
    [({"shard": 2}, True), ({"tensor": 2}, True), ({"shard": 3}, False), ({"pipe": 2}, False)],
)
def test_crews_may_have_gpus(crew, exact):
    scaling = ScalingConfig(crew=crew, gpus_per_worker=1)
    ElasticTrainer(print, scaling=scaling, run=RunConfig(exact=exact))


def test_no_process_of_a_crew_has_more_than_one_gpu():
    scaling = ScalingConfig(crew={"shard": 2, "tensor": 2}, gpus_per_worker=6)
    with pytest.raises(ConfigError, match=r"more than one for each of the 4 .* gpus_per_worker=4,"):
        ElasticTrainer(print, scaling=scaling)


def test_two_processes_of_a_crew_share_a_gpu_only_if_they_fit_on_it():
    scaling = ScalingConfig(crew={"shard": 4}, gpus_per_worker=3)
    with pytest.raises(ConfigError, match=r"0\.75 for each of the 4 .* at most 2\."):
        ElasticTrainer(print, scaling=scaling)


def test_places_of_a_worker_compute_over_nccl_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"needs NCCL"):
        run_local(print, 2, crew={"shard": 2}, gpus=Gpus("gloo"), directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_is_sharded_with_a_torch_of_which_that_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "version", {"torch": "2.10.1+cpu"}.get)
    said = "needs torch 2.11 or newer; 2.10.1\\+cpu is installed"
    with pytest.raises(ConfigError, match=said):
        run_local(print, 2, crew={"shard": 2}, directory=tmp_path / "run")
    with pytest.raises(ConfigError, match=said), pretended({"shard": 2}):
        pass
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(config, "version", {"torch": "2.11.0.dev1"}.get)
    with pretended({"shard": 2}):
        pass


def test_an_exact_pipeline_asks_for_a_torch_that_draws_nothing_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "version", {"torch": "2.12.1"}.get)
    with pytest.raises(ConfigError, match=r"a pipeline with exact=True needs torch 2.13 or newer"):
        run_local(print, 2, crew={"pipe": 2}, exact=True, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trials_and_runs_that_inherit_are_no_crews_yet():
    from elastix.search.executors.tune_trials import Tune  # imports Ray Tune

    scaling = ScalingConfig(crew={"shard": 2})
    assert ScalingConfig.from_dict(scaling.to_dict()) == scaling
    trainer = ElasticTrainer(print, scaling=scaling)
    for start in (
        lambda: Pool(scaling=scaling),
        lambda: Tune(scaling=scaling),
        lambda: trainer.as_trial(None, None, print),
        lambda: trainer.descending(None),
    ):
        with pytest.raises(ConfigError, match="cannot have workers of several processes yet"):
            start()


def test_the_processes_of_a_worker_have_equal_parts_of_what_it_occupies():
    scaling = ScalingConfig(crew={"shard": 2, "tensor": 2}, cpus_per_worker=2)
    assert (scaling.processes, scaling.resources_per_process) == (4, {"CPU": 0.5})
    assert ScalingConfig().resources_per_process == {"CPU": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfAUser(RunConfig):
    """With a field of its own."""

    team: str
    note: str = ""


def test_a_configuration_that_derives_from_one_of_ours_gives_the_same_hints():
    made = OfAUser(team="vision", name="digits")
    assert made == pickle.loads(pickle.dumps(made)) == copy.deepcopy(made)
    assert dataclasses.replace(made, note="x").note == "x"
    for given, says in (
        ({"nmae": "digits"}, "Did you mean 'name'?"),
        ({"num_workers": 2}, "ScalingConfig has it"),
        ({"note": "x"}, "OfAUser needs team. Nothing was done"),
        ({"notes": "x", "team": "vision"}, "OfAUser has no argument 'notes'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            OfAUser(**given)
    with pytest.raises(ConfigError, match="without a name"):
        OfAUser("digits")
    assert list(inspect.signature(OfAUser).parameters)[-2:] == ["team", "note"]
    assert "name" in inspect.signature(RunConfig).parameters
