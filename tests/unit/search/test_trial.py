import copy
import json
import math

import pytest

import elastix
from elastix.search.campaign import _settled
from elastix.search.trial import Objectives, Suggestion, Trial, TrialState, config_key

SUGGESTION = Suggestion({"lr": 0.1, "body": [{"op": "conv"}]}, elastix.Ref("a" * 64), 3)


@pytest.mark.parametrize("loss", [0.25, math.inf, -math.inf, math.nan])
def test_a_trial_survives_json_with_any_loss(loss):
    trial = Trial(
        7,
        SUGGESTION,
        TrialState.STOPPED,
        losses=(loss, 1.0),
        results=({"accuracy": 0.5, "epoch": 1},),
        metrics={"accuracy": 0.5},
        ref=elastix.Ref("b" * 64),
        epochs=2.0,
        lineage_epochs=5.0,
        inherited={"tensors": {"a": "b"}},
        traceback="Traceback",
    )
    back = Trial.from_json(json.loads(json.dumps(trial.to_json())))
    assert repr(back) == repr(trial)  # NaN is not equal to itself
    assert back.state is TrialState.STOPPED


@pytest.mark.parametrize(
    ("losses", "state", "scored"),
    [
        ((0.1,), TrialState.FINISHED, True),
        ((0.1,), TrialState.STOPPED, True),
        ((0.1,), TrialState.FAILED, False),
        ((), TrialState.FINISHED, False),
        ((0.1, math.nan), TrialState.FINISHED, False),
        ((math.inf,), TrialState.FINISHED, False),
    ],
)
def test_only_finite_losses_score(losses, state, scored):
    assert Trial(0, SUGGESTION, state, losses).scored is scored


def test_the_key_ignores_the_order_of_names():
    assert config_key({"a": 1, "b": [1, 2]}) == config_key({"b": [1, 2], "a": 1})
    assert config_key({"b": [1, 2]}) != config_key({"b": [2, 1]})


def test_objectives_turn_at_the_door_and_back():
    objectives = Objectives.of(["accuracy", "latency"], ["max", "min"])
    losses = objectives.losses({"accuracy": 0.9, "latency": 3, "else": "x"})
    assert losses == (-0.9, 3.0)
    assert objectives.values(losses) == (0.9, 3.0)


@pytest.mark.parametrize("reported", [{}, {"acc": 1.0}, {"accuracy": None}])
def test_a_metric_that_is_never_reported_is_named_with_what_was(reported):
    with pytest.raises(elastix.SearchError, match="'accuracy'") as caught:
        Objectives.of("accuracy").losses(reported)
    assert all(name in str(caught.value) for name in reported)


def test_a_metric_that_was_only_ever_none_is_said_to_be():
    with pytest.raises(elastix.SearchError, match="it reported accuracy=None alone"):
        Objectives.of("accuracy").losses({"accuracy": None, "loss": 1.0})


@pytest.mark.parametrize("value", [True, "0.7", [0.7]])
def test_a_metric_that_is_no_number_is_named_with_its_value(value):
    with pytest.raises(elastix.SearchError, match="no number") as caught:
        Objectives.of("accuracy").losses({"accuracy": value, "loss": 1.0})
    assert f"accuracy={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ([], "max"),
        (["a", "a"], "max"),
        ("a", "best"),
        (["a", "b"], ["max"]),
        (["a", "b"], ["max", "?"]),
    ],
)
def test_wrong_objectives_are_refused(metric, mode):
    with pytest.raises(elastix.ConfigError, match="metric"):
        Objectives.of(metric, mode)


@pytest.mark.parametrize("said", [None, False, True])
def test_trials_inherit_from_parents_if_the_searcher_says_that_it_proposes_them(said):
    searcher = elastix.Random()
    if said is not None:
        searcher.proposes_parents = said
    settled = _settled(elastix.InheritConfig(), searcher)
    assert settled.provider == ("parent" if said else "store")
    assert settled.optimizer is bool(said)
    chosen = _settled(elastix.InheritConfig(provider="store", optimizer=True), searcher)
    assert (chosen.provider, chosen.optimizer) == ("store", True)
    assert not _settled(elastix.InheritConfig(mode="none", optimizer=True), searcher).optimizer


def test_trials_from_a_database_have_their_names_in_common_and_the_last_report_once():
    text = json.dumps(
        Trial(
            0,
            Suggestion({"learning_rate": 0.1}),
            TrialState.FINISHED,
            (0.5,),
            ({"accuracy": 0.25}, {"accuracy": 0.5}),
            {"accuracy": 0.5},
        ).to_json()
    )
    one, other = (Trial.from_json(json.loads(text)) for _ in range(2))
    assert one == other
    assert one.metrics is one.results[-1]
    for a, b in ((one.config, other.config), (one.metrics, other.metrics)):
        assert [*map(id, a)] == [*map(id, b)]


def test_metrics_that_are_not_those_of_the_last_report_are_kept():
    of_both = {"accuracy": 0.5, "loss": 1.0}
    trial = Trial(
        0, SUGGESTION, TrialState.FINISHED, (0.5,), ({"loss": 1.0}, {"accuracy": 0.5}), of_both
    )
    assert Trial.from_json(json.loads(json.dumps(trial.to_json()))).metrics == of_both


def test_a_copy_of_a_suggestion_has_its_own_configuration_and_the_same_key():
    known = Suggestion({"lr": 0.1, "body": [{"op": "conv"}]})
    key = known.key
    made = copy.deepcopy(known)
    assert made == known
    assert made.key is key
    made.config["body"][0]["op"] = "pool"
    assert known.config["body"][0]["op"] == "conv"
