"""elastix.tune.Search under a real Ray Tune, and the translation of its spaces."""

import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import torch
from ray import tune
from ray.tune import Checkpoint
from ray.tune.schedulers import HyperBandScheduler

import elastix
import elastix.tune
from elastix.errors import ConfigError, StoreError
from elastix.flat import nest
from tests.search_parts import SPACE, Drawing, Net
from tests.unit.test_state import HasMore

PARAM_SPACE = {
    "width": tune.choice([16, 32]),
    "depth": tune.randint(1, 4),
    "inner": {"lr": tune.loguniform(1e-4, 1e-1), "drop": tune.quniform(0.0, 0.5, 0.25)},
    "name": "constant",
}


def test_tunes_spaces_are_translated_with_their_bounds():
    space = elastix.tune.space_of(PARAM_SPACE)
    space.seed(1)
    drawn = [dict(config) for config in space.sample_configuration(200)]
    assert {config["depth"] for config in drawn} == {1, 2, 3}
    assert {config["width"] for config in drawn} == {16, 32}
    assert {config["inner/drop"] for config in drawn} == {0.0, 0.25, 0.5}
    logs = [math.log10(config["inner/lr"]) for config in drawn]
    assert -4 <= min(logs) < -3.5 < -1.5 < max(logs) <= -1
    assert nest({"a": 1, "b/c": 2, "b/d/e": 3}, "/") == {
        "a": 1,
        "b": {"c": 2, "d": {"e": 3}},
    }


def values(domain):
    return list(elastix.tune.space_of({"n": domain})["n"].sequence)


def test_quantised_whole_numbers_are_tunes_own_multiples_within_the_bounds():
    assert values(tune.qrandint(1, 8, 4)) == [4, 8]
    assert values(tune.qrandint(8, 24, 8)) == [8, 16, 24]
    assert values(tune.qlograndint(1, 64, 16)) == [16, 32, 48, 64]
    with pytest.raises(ConfigError, match=r"param_space\['n'\].* no multiple of 8"):
        values(tune.qrandint(1, 7, 8))


@pytest.mark.parametrize(
    ("domain", "middle"),
    [
        (tune.qloguniform(1e-4, 1e-1, 1e-4), (1e-3, 1e-2)),
        (tune.qlograndint(8, 1024, 8), (40, 200)),
    ],
)
def test_quantised_domains_are_searched_on_the_scale_that_they_have(domain, middle):
    search = elastix.tune.Search(elastix.Random(), metric="score", mode="max")
    search.set_search_properties(None, None, {"one": domain, "x": tune.uniform(0, 1)})
    found = [search.suggest(str(number))["one"] for number in range(300)]
    assert {type(value) for value in found} == {type(domain.sample())}
    own = set(elastix.tune.space_of({"one": domain})["one"].sequence)
    assert set(found) <= own
    low, high = middle
    assert low < sorted(found)[150] < high


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        (None, None),
        (np.int64(3), 3),
        (tune.randint(3, 4), 3),
        (tune.uniform(0.5, 0.5), 0.5),
        (tune.choice([5]), 5),
    ],
)
def test_what_has_one_value_is_that_value(entry, value):
    search = elastix.tune.Search(elastix.Random(), metric="score", mode="max")
    search.set_search_properties(None, None, {"one": entry, "x": tune.uniform(0, 1)})
    found = search.suggest("a")["one"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "entry", [tune.choice([]), tune.choice([1, 1]), tune.uniform(1, 0), tune.loguniform(1e-300, 1)]
)
def test_what_is_no_domain_is_named(entry):
    with pytest.raises(ConfigError, match=r"param_space\['odd'\] .* Nothing was started"):
        elastix.tune.space_of({"odd": entry})


@pytest.mark.parametrize(
    "value",
    [tune.grid_search([1, 2]), tune.randn(), tune.sample_from(lambda spec: 1), [1, tune.randn()]],
)
def test_what_only_tune_can_draw_is_named(value):
    with pytest.raises(ConfigError, match=r"param_space\['odd'\]"):
        elastix.tune.space_of({"odd": value})


class Kind:
    """A choice that JSON has no word for."""


CHOICES = ([64, 32], (16,), {"kind": "cosine"}, Kind, np.int64(3), "plain", None)


def test_choices_that_no_space_holds_are_given_to_trials_as_they_are():
    search = elastix.tune.Search(elastix.Random(), metric="score", mode="max")
    search.set_search_properties(None, None, {"inner": {"odd": tune.choice(CHOICES)}})
    drawn = [search.suggest(str(number))["inner"]["odd"] for number in range(len(CHOICES))]
    assert sorted(map(repr, drawn)) == sorted(map(repr, CHOICES))


def test_a_domain_among_choices_is_refused():
    for choice in (tune.uniform(0, 1), [tune.uniform(0, 1)], {"grid_search": [1, 2]}):
        with pytest.raises(ConfigError, match=r"param_space\['odd'\] has a domain among its"):
            elastix.tune.space_of({"odd": tune.choice([choice, 3])})


@pytest.mark.parametrize("name", ["a/b", 7])
def test_a_name_that_would_come_back_as_another_is_refused(name):
    for space in ({name: tune.uniform(0, 1)}, {"in": {name: 1, "x": tune.uniform(0, 1)}}):
        with pytest.raises(ConfigError, match=f"the name {name!r}"):
            elastix.tune.space_of(space)


def begun(searcher=None, **options):
    search = elastix.tune.Search(searcher or Drawing(), **options)
    search.set_max_concurrency(4)
    search.set_search_properties(
        "score", "max", {"x": tune.uniform(0, 1), "depth": tune.randint(1, 4)}
    )
    return search


def test_a_mode_that_nobody_gave_is_asked_for():
    """It was "max", so a loss was made as large as possible."""
    search = elastix.tune.Search(elastix.Random())
    with pytest.raises(ConfigError, match="Give metric and mode to TuneConfig"):
        search.set_search_properties("loss", None, {"x": tune.uniform(0, 1)})


def test_search_has_a_metric_and_tune_config_the_mode():
    search = elastix.tune.Search(Drawing(), space=SPACE, metric="score")
    assert search.set_search_properties(None, "min", {})
    search.suggest("t0")
    search.on_trial_complete("t0", {"score": 3.0})
    assert search._elastix.best.losses == (3.0,)


@pytest.mark.parametrize("given", [("loss", "min"), ("score", "max")])
def test_tune_config_and_search_must_not_contradict_each_other(given):
    search = elastix.tune.Search(elastix.Random(), metric="score", mode="min")
    with pytest.raises(ConfigError, match=r"TuneConfig has .* Nothing was started"):
        search.set_search_properties(*given, {"x": tune.uniform(0, 1)})


def test_results_reach_the_searcher_and_failures_count_as_such():
    drawing = Drawing()
    search = begun(drawing)
    for number in range(4):
        search.suggest(f"t{number}")
    search.on_trial_complete("t0", {"score": 0.3})
    search.on_trial_complete("t1", {"score": 0.9})
    search.on_trial_complete("t2", None, error=True)
    search.on_trial_complete("t3", {"score": math.nan})
    assert drawing.told == [0, 1, 2, 3]
    assert drawing.best.number == 1
    assert drawing.best.losses == (-0.9,)


def test_a_trial_that_tune_ends_without_a_result_counts_with_its_last_score(tmp_path):
    search = begun()
    for name in ("scored", "silent", "raised"):
        search.suggest(name)
    for name in ("scored", "raised"):
        search.on_trial_result(name, {"score": 0.5})
        search.on_trial_result(name, {"score": torch.tensor(0.7)})
        search.on_trial_result(name, {"other": 1})
    search.save(str(tmp_path / "state"))
    drawing = Drawing()
    again = begun(drawing)
    again.restore(str(tmp_path / "state"))
    for name in ("silent", "scored"):
        again.on_trial_complete(name)
    again.on_trial_complete("raised", error=True)
    assert drawing.told == [1, 0, 2]
    assert (drawing.best.number, drawing.best.state) == (0, "finished")
    assert drawing.best.losses == pytest.approx((-0.7,))


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float16(0.5), torch.tensor(0.5), np.array([0.5]), np.int64(3)]
)
def test_numbers_of_numpy_and_torch_are_scores(tmp_path, number):
    drawing = Drawing()
    search = begun(drawing, store=tmp_path)
    config = search.suggest("a")
    left = elastix.tune.leave(Net(config["depth"]), config, score=number)
    assert left["elastix_ref"]
    search.on_trial_complete("a", {"score": number, **left})
    assert drawing.best.losses == (-number.item(),)
    search.save(str(tmp_path / "state"))


@pytest.mark.parametrize("odd", [True, "0.5", 10**400, None, np.array([1.0, 2.0])])
def test_what_is_no_finite_number_is_a_failure_and_ends_nothing(odd):
    drawing = Drawing()
    search = begun(drawing)
    search.suggest("a")
    search.on_trial_complete("a", {"score": odd})
    assert drawing.told == [0]
    assert drawing.best is None


def test_a_model_that_has_more_than_tensors_is_left_with_all_of_it(tmp_path):
    config = begun(store=tmp_path).suggest("a")
    ref = elastix.tune.leave(HasMore({"seen": 7}), config, score=0.5)["elastix_ref"]
    with elastix.Store(tmp_path, read_only=True) as store:
        assert store.get(ref).load_into(HasMore(None)).more == {"seen": 7}


def test_nothing_is_inherited_from_another_experiment(tmp_path):
    first = begun(store=tmp_path, provider="store")
    config = first.suggest("a")
    assert elastix.tune.inherit(Net(config["depth"]), config) is None
    elastix.tune.leave(Net(config["depth"]), config, score=0.5)
    first.save(str(tmp_path / "state"))
    other = begun(store=tmp_path, provider="store")
    config = other.suggest("a")
    assert elastix.tune.inherit(Net(config["depth"]), config) is None
    again = begun(store=tmp_path, provider="store")
    again.restore(str(tmp_path / "state"))
    config = again.suggest("b")
    assert elastix.tune.inherit(Net(config["depth"]), config) is not None


@pytest.mark.parametrize(
    ("searcher", "provider"), [(elastix.Random, "store"), (elastix.Evolution, "parent")]
)
def test_who_has_no_parents_inherits_from_the_store(tmp_path, searcher, provider):
    """As in a campaign: nothing would be inherited otherwise."""
    search = begun(searcher(), store=tmp_path)
    assert search.suggest("a")[elastix.tune.KEY]["provider"] == provider


def test_a_hyperparameter_does_not_take_the_place_of_the_model_source(tmp_path):
    """Trials would be given what they inherit by in place of its value."""
    named = {elastix.tune.KEY: tune.uniform(0, 1)}
    search = elastix.tune.Search(elastix.Random(), store=tmp_path)
    with pytest.raises(ConfigError, match="called 'elastix'"):
        search.set_search_properties("score", "max", named)
    with pytest.raises(ConfigError, match="called 'elastix'"):
        elastix.tune.Search(space=elastix.tune.space_of(named), store=tmp_path)
    search = elastix.tune.Search(elastix.Random())
    search.set_search_properties("score", "max", named)
    assert 0 <= search.suggest("a")[elastix.tune.KEY] <= 1


def test_what_it_knows_survives_a_restart(tmp_path):
    search = begun()
    search.suggest("a")
    search.suggest("b")
    search.on_trial_complete("a", {"score": 0.5})
    search.save(str(tmp_path / "state"))
    json.loads((tmp_path / "state").read_text())
    drawing = Drawing()
    again = begun(drawing)
    again.restore(str(tmp_path / "state"))
    assert again.suggest("c") == search.suggest("c")
    again.on_trial_complete("b", {"score": 0.7})
    assert drawing.told == [1]


def test_a_population_is_refused_as_tune_could_not_let_it_select():
    with pytest.raises(ConfigError, match=r"Population decides which trials go on.*Nothing was"):
        elastix.tune.Search(elastix.Population())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"searcher": "random"}, "searcher must be an object with the methods"),
        ({"searcher": elastix.Random}, r"Give an object: Random\(\)"),
        ({"space": {"lr": 1}}, "space must be a Space"),
        ({"seed": "a"}, "seed must be"),
        ({"seed": -1}, "seed must be"),
        ({"provider": "nearest"}, "provider must be"),
        ({"mode_of_inheritance": "all"}, "mode.* must be"),
        ({"store": 5}, "store must be"),
        ({"searchers": None}, "searcher"),
    ],
)
def test_what_cannot_work_is_refused_before_a_tuner_has_it(wrong, told):
    with pytest.raises(ConfigError, match=told):
        elastix.tune.Search(**wrong)


def test_the_end_of_a_space_is_the_end():
    search = begun(Drawing(limit=1))
    search.suggest("a")
    assert search.suggest("b") == elastix.tune.Search.FINISHED


def test_weights_are_inherited_by_those_who_want_them(tmp_path):
    search = begun(store=tmp_path)
    first = search.suggest("a")
    model = Net(first["depth"])
    assert elastix.tune.inherit(model, first) is None
    left = elastix.tune.leave(model, first, epochs=2, score=0.5)
    search.on_trial_complete("a", {"score": 0.5, **left})
    second = search.suggest("b")
    child = Net(second["depth"])
    found = elastix.tune.inherit(child, second)
    assert found["ref"] == left["elastix_ref"]
    assert found["lineage_epochs"] == 2
    assert torch.equal(child.body[0].weight, model.body[0].weight)
    ref = elastix.tune.leave(child, second, score=0.6)["elastix_ref"]
    with elastix.Store(tmp_path, read_only=True) as store:
        assert store.ancestors(ref) == [found["ref"]]
    assert elastix.tune.inherit(child, {"x": 1}) is None
    assert elastix.tune.leave(child, {"x": 1}, score=1.0) == {}


def test_a_tuner_that_is_restored_without_a_param_space_goes_on_with_its_own(tmp_path):
    """Otherwise Tune logs the error, drops the trials of before, and waits for ever."""
    domains = {"x": tune.uniform(0, 1), "inner": {"odd": tune.choice([[1], [2]])}}
    first = elastix.tune.Search(elastix.Evolution())
    kept = cloudpickle.dumps(first)  # as Tuner does, before it says anything to it
    first.set_search_properties("score", "min", domains)
    first.suggest("a")
    first.on_trial_complete("a", {"score": 0.5})
    first.save(str(tmp_path / "state"))
    again = cloudpickle.loads(kept)
    again.restore(str(tmp_path / "state"))
    assert again.suggest("b") == first.suggest("b")
    assert again._objectives == first._objectives


def test_it_is_not_restored_from_an_earlier_version_before_it_knows_its_space(tmp_path):
    begun().save(str(tmp_path / "state"))
    state = json.loads((tmp_path / "state").read_text())
    del state["begun"]
    (tmp_path / "state").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="before it knew a space"):
        elastix.tune.Search(Drawing()).restore(str(tmp_path / "state"))
    begun().restore(str(tmp_path / "state"))


def test_models_are_left_by_trials_with_any_constants(tmp_path):
    search = begun(store=tmp_path)
    config = search.suggest("a")
    constants = {"sizes": [8, (4, 2)], "loss": torch.nn.MSELoss(), "more": {"dtype": torch.half}}
    ref = elastix.tune.leave(Net(config["depth"]), {**config, **constants}, score=0.5)
    with elastix.Store(tmp_path, read_only=True) as store:
        found = store.get(ref["elastix_ref"]).meta["config"]
    wanted = {"sizes": [8, [4, 2]], "loss": "MSELoss", "more": {"dtype": "dtype"}}
    assert {name: found[name] for name in constants} == wanted


def test_a_tune_run_with_another_search_alg(cluster, tmp_path):
    def train(config):
        assert config["sizes"] == [8, 4]
        assert config["inner"]["loss"](torch.ones(1), torch.ones(1)) == 0
        assert config["inner"]["none"] == {}
        assert config["widths"] in ([8, 4], [4])
        assert config["inner"]["act"] in (torch.nn.ReLU, torch.nn.Tanh)
        tune.report({"score": config["x"] * config["inner"]["depth"]})

    search = elastix.tune.Search(elastix.Evolution(population=8, sample=4))
    grid = tune.Tuner(
        train,
        param_space={
            "x": tune.uniform(0, 1),
            "sizes": [8, 4],
            "widths": tune.choice([[8, 4], [4]]),
            "inner": {
                "depth": tune.randint(1, 4),
                "act": tune.choice([torch.nn.ReLU, torch.nn.Tanh]),
                "loss": torch.nn.MSELoss(),
                "none": {},
            },
        },
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            num_samples=6,
            max_concurrent_trials=2,
            search_alg=search,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert len(grid) == 6
    configs = {(result.config["x"], result.config["inner"]["depth"]) for result in grid}
    assert len(configs) == 6
    best = max(result.metrics["score"] for result in grid)
    assert grid.get_best_result().metrics["score"] == best


def test_trials_that_hyperband_pauses_are_no_failures(cluster, tmp_path):
    """It pauses each of them before it stops it, the best one too."""

    def train(config):
        checkpoint = tune.get_checkpoint()
        begin = 0
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                begin = int((Path(folder) / "epochs").read_text())
        for epoch in range(begin, 4):
            folder = tempfile.mkdtemp(dir=tmp_path)
            (Path(folder) / "epochs").write_text(str(epoch + 1))
            tune.report({"score": config["x"] * (epoch + 1)}, checkpoint=Checkpoint(folder))

    class Kept(Drawing):
        trials = ()

        def tell(self, trials):
            self.trials += tuple(trials)
            super().tell(trials)

    kept = Kept()
    grid = tune.Tuner(
        train,
        param_space={"x": tune.uniform(0, 1)},
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            num_samples=3,
            max_concurrent_trials=2,
            search_alg=elastix.tune.Search(kept),
            scheduler=HyperBandScheduler(max_t=4, reduction_factor=2),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert {trial.state for trial in kept.trials} == {"finished"}
    scores = sorted(result.metrics["score"] for result in grid)
    assert sorted(-trial.losses[0] for trial in kept.trials) == pytest.approx(scores)


def test_a_space_of_elastix_instead_of_tunes():
    search = elastix.tune.Search(Drawing(), space=SPACE, metric="score", mode="max")
    config = search.suggest("a")
    assert set(config) == {"x", "depth"}
    assert SimpleNamespace(**config).depth in (1, 2, 3)


def test_a_store_that_is_not_on_the_host_of_a_trial_is_not_begun_there(tmp_path):
    search = begun(store=tmp_path / "store")
    config = search.suggest("one")
    assert elastix.tune.inherit(Net(1), config) is None  # the first has no ancestor
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="on the host of the Tuner"):
        elastix.tune.inherit(Net(1), config)
    assert not (tmp_path / "store").exists()


def test_a_store_that_cannot_be_made_is_told_before_a_trial_is_started(tmp_path):
    (tmp_path / "file").write_text("in its way")
    with pytest.raises(StoreError):
        begun(store=tmp_path / "file" / "store").suggest("one")


@pytest.mark.parametrize("searcher", [elastix.Evolution, elastix.Optuna])
def test_a_tuner_of_an_earlier_version_goes_on_in_the_values_that_its_trials_had(
    tmp_path, monkeypatch, searcher
):
    """Its 64 are no 64 steps of 8. With an error here Tune drops the trials of before."""
    state = tmp_path / "state"

    def of_now():
        search = elastix.tune.Search(searcher(), metric="score", mode="max")
        domains = {"one": tune.qlograndint(8, 1024, 8), "x": tune.uniform(0, 1)}
        search.set_search_properties(None, None, domains)
        return search

    with monkeypatch.context() as then:
        then.setattr(elastix.tune, "_by_steps", lambda space, config: (space, {}))
        first = of_now()
    for number in range(4):
        first.suggest(str(number))
        first.on_trial_complete(str(number), {"score": number / 10})
    first.save(str(state))
    known = json.loads(state.read_text())
    del known["in_steps"]
    state.write_text(json.dumps(known))
    again = of_now()
    again.restore(str(state))
    assert again.suggest("4") == first.suggest("4")
    again.save(str(state))
    later = of_now()
    later.restore(str(state))
    assert later.suggest("5") == again.suggest("5")
