"""Several stored models as one: what is chosen, how it is kept, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elastix
from elastix.errors import ConfigError, NotFound, StateError
from elastix.search.ensemble import Ensemble, calibrate, select
from elastix.search.results import Results
from elastix.search.trial import Objectives, Suggestion, Trial, TrialState
from elastix.state import State, capture
from elastix.store import Store

CLASSES = 3


def build(config):
    return nn.Linear(config["inputs"], CLASSES)


def samples(count=300, seed=0):
    """Four features, of which each trial's model has learned some."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=rng)
    truth = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(7))
    noise = torch.randn(count, CLASSES, generator=rng)
    return x, (2 * x @ truth + noise).argmax(dim=1), truth


def finished(store, number, weight, score=0.5, inputs=4):
    model = nn.Linear(inputs, CLASSES)
    with torch.no_grad():
        model.weight.copy_(weight)
        model.bias.zero_()
    ref = store.put(State(model.state_dict(), {"trial": number}))
    suggestion = Suggestion({"inputs": inputs, "number": number})
    return Trial(number, suggestion, TrialState.FINISHED, (-score,), ref=ref)


@pytest.fixture
def campaign(tmp_path):
    """Six models, each of which is blind to two of the features, and one that knows nothing."""
    _, _, truth = samples()
    trials = []
    with Store(tmp_path) as store:
        for number in range(6):
            seen = torch.ones(4, 1)
            seen[[number % 4, (number + 1) % 4]] = 0
            trials.append(finished(store, number, 8 * (truth * seen).T, score=0.9 - number / 100))
        trials.append(finished(store, 6, torch.zeros(CLASSES, 4), score=0.1))
    return results(tmp_path, trials)


def results(path, trials):
    objectives = Objectives.of("accuracy")
    return Results(objectives, {"name": "nas"}, tuple(trials), (), str(path))


def nll(model, x, y):
    with torch.no_grad():
        return float(F.nll_loss(F.log_softmax(model(x), dim=1), y))


def singles(campaign):
    with Store(campaign.store, read_only=True) as store:
        for trial in campaign:
            model = build(trial.config)
            model.load_state_dict(store.get(trial.ref).model)
            yield model


def test_an_ensemble_says_more_than_the_best_of_its_members(campaign):
    x, y, _ = samples()
    made = campaign.ensemble(5, build=build, validation=(x, y))
    best = min(nll(model, x, y) for model in singles(campaign))
    assert nll(made, x, y) < 0.9 * best
    new_x, new_y, _ = samples(seed=1)
    assert nll(made, new_x, new_y) < min(nll(model, new_x, new_y) for model in singles(campaign))
    assert float(made.temperature) < 1  # the mean of very certain ones is too uncertain
    assert torch.allclose(made(x).exp().sum(dim=1), torch.ones(300))
    assert 2 <= len(made.members) <= 5
    assert float(made.weights.sum()) == pytest.approx(1)
    assert not made.training


def test_it_is_kept_as_one_model_with_its_members_as_parents(campaign):
    x, y, _ = samples()
    made = campaign.ensemble(4, build=build, validation=[(x[:100], y[:100]), (x[100:], y[100:])])
    with Store(campaign.store) as store:
        state = store.get("nas/ensemble")
        facts = state.meta["ensemble"]
        assert set(state.parents) == {member["ref"] for member in facts["members"]}
        assert set(state.parents) <= {trial.ref for trial in campaign}
        assert store.tags()["nas/ensemble"] == made.ref
        numbers = [member["trial"] for member in facts["members"]]
        assert len(set(numbers)) == len(made.members)
        assert facts["validation"]["nll"] == pytest.approx(nll(made, x, y), abs=1e-4)
        assert facts["validation"]["nll"] <= facts["validation"]["best_single"]["nll"]
        again = Ensemble.load(store, "nas/ensemble", build)
        assert torch.equal(again(x), made(x))
        assert again.ref == made.ref
        digests = [info.digest for info in store.manifest(str(made.ref)).tensors.values()]
        theirs = [i.digest for t in campaign for i in store.manifest(t.ref).tensors.values()]
        new = set(digests) - set(theirs)
        assert len(new) == 2  # the weights and the temperature
        with pytest.raises(StateError, match="no ensemble"):
            Ensemble.load(store, campaign[0].ref, build)
        with pytest.raises(StateError, match="another model than was stored"):
            Ensemble.load(store, "nas/ensemble", lambda config: nn.Linear(9, 2))


def test_with_one_member_it_is_the_best_single_model_calibrated(campaign):
    x, y, _ = samples()
    made = campaign.ensemble(1, build=build, validation=(x, y))
    assert len(made.members) == 1
    best = min(singles(campaign), key=lambda model: nll(model, x, y))
    assert torch.equal(made.members[0].weight, best.weight)
    assert nll(made, x, y) <= nll(best, x, y)


def test_the_selection_never_ends_above_the_best():
    for seed in range(30):
        rng = torch.Generator().manual_seed(seed)
        truth = torch.rand(8, 20, generator=rng) ** 3
        size = 1 + seed % 4
        counts = select(truth.log(), size)
        mean = (torch.tensor(counts)[:, None] * truth.double()).sum(dim=0) / sum(counts)
        assert 1 <= sum(count > 0 for count in counts) <= size
        assert -mean.log().mean() <= (-truth.double().log().mean(dim=1)).min() + 1e-9


class Table(nn.Module):
    """Logits of each sample, by its number."""

    def __init__(self, logits=None):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(100, 2) if logits is None else logits)

    def forward(self, x):
        return self.logits[x]


def test_what_a_very_certain_model_has_wrong_counts_in_full(tmp_path):
    """Its probability of the true class is 0 in float32, and the logarithm of that is not."""
    certain = torch.tensor([[500.0, -500.0]]).repeat(100, 1)
    certain[0] = torch.tensor([-500.0, 500.0])
    careful = torch.tensor([[1.0, 0.0]]).repeat(100, 1)
    x, y = torch.arange(100), torch.zeros(100, dtype=torch.long)
    trials = []
    with Store(tmp_path) as store:
        for number, logits in enumerate([certain, careful]):
            ref = store.put(State(Table(logits).state_dict(), {"trial": number}))
            trials.append(
                Trial(number, Suggestion({"n": number}), TrialState.FINISHED, (0.0,), ref=ref)
            )
    made = results(tmp_path, trials).ensemble(1, build=lambda config: Table(), validation=(x, y))
    assert nll(made, x, y) <= min(nll(Table(each), x, y) for each in (certain, careful))
    assert torch.equal(made.members[0].logits, careful)


class Counting(nn.Linear):
    """Keeps something besides tensors, as quantised layers do."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen, "scale": torch.ones(2)}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_an_ensemble_of_models_that_keep_more_than_tensors_is_got_back(tmp_path):
    model = Counting(4, CLASSES)
    model.seen = 7
    with Store(tmp_path) as store:
        ref = store.put(capture({"": model}, {}))
    trial = Trial(0, Suggestion({"inputs": 4}), TrialState.FINISHED, (0.0,), ref=ref)
    x, y, _ = samples()

    def counting(config):
        return Counting(config["inputs"], CLASSES)

    made = results(tmp_path, [trial]).ensemble(1, build=counting, validation=(x, y))
    with Store(tmp_path) as store:
        again = Ensemble.load(store, "nas/ensemble", counting)
    assert again.members[0].seen == 7
    assert torch.equal(again(x), made(x))
    assert not again.training


def test_the_temperature_undoes_too_much_certainty():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, CLASSES, generator=rng)
    targets = torch.multinomial(logits.softmax(dim=1), 1, generator=rng)[:, 0]
    assert calibrate(F.log_softmax(3 * logits, dim=1), targets) == pytest.approx(3, rel=0.15)
    assert calibrate(F.log_softmax(logits, dim=1), targets) == pytest.approx(1, rel=0.15)


class Masked(nn.Linear):
    """Knows that the last class does not occur."""

    def forward(self, x):
        return super().forward(x).index_fill(1, torch.tensor([CLASSES - 1]), -torch.inf)


def test_a_model_that_rules_a_class_out_is_as_good_as_others(tmp_path):
    x, y, truth = samples()
    x, y = x[y < CLASSES - 1], y[y < CLASSES - 1]
    with Store(tmp_path) as store:
        trials = [finished(store, number, truth.T * (2 + number)) for number in range(2)]
    made = results(tmp_path, trials).ensemble(
        2, build=lambda config: Masked(config["inputs"], CLASSES), validation=(x, y)
    )
    said = made(x)
    assert not said.isnan().any()
    assert (said[:, -1] == -torch.inf).all()
    assert nll(made, x, y) < nll(nn.Sequential(nn.Linear(4, CLASSES)), x, y)


def test_a_model_that_rules_a_true_class_out_is_left_out_and_it_is_said(campaign, caplog):
    x, y, _ = samples()

    def build_some(config):
        return (Masked if config["number"] < 3 else nn.Linear)(config["inputs"], CLASSES)

    made = campaign.ensemble(3, build=build_some, validation=(x, y))
    assert not any(isinstance(member, Masked) for member in made.members)
    told = [r.args for r in caplog.records if "a probability of 0, or NaN" in r.message]
    assert told == [(0,), (1,), (2,)]


def test_it_is_said_if_all_models_rule_a_true_class_out(campaign):
    x, y, _ = samples()
    with pytest.raises(NotFound, match="gave the true class of some sample a probability of 0"):
        campaign.ensemble(build=lambda config: Masked(config["inputs"], CLASSES), validation=(x, y))


def test_a_model_that_is_gone_or_broken_is_left_out(campaign, tmp_path):
    x, y, _ = samples()
    with Store(tmp_path) as store:
        store.retire(campaign[0].ref)
        broken = finished(store, 7, torch.full((CLASSES, 4), torch.nan), score=2.0)
        unstored = Trial(8, Suggestion({"inputs": 4}), TrialState.FINISHED, (-3.0,))
    made = results(tmp_path, [*campaign, broken, unstored]).ensemble(
        3, build=build, validation=(x, y)
    )
    with Store(tmp_path, read_only=True) as store:
        members = store.get(str(made.ref)).meta["ensemble"]["members"]
    assert not {0, 7, 8} & {member["trial"] for member in members}


def test_nothing_to_put_together(tmp_path):
    Store(tmp_path).close()
    x, y, _ = samples()
    unstored = Trial(0, Suggestion({"inputs": 4}), TrialState.FINISHED, (-3.0,))
    with pytest.raises(NotFound, match=r"ctx\.prepare"):
        results(tmp_path, [unstored]).ensemble(build=build, validation=(x, y))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"size": 0}, ConfigError, "size=0"),
        ({"size": 2.5}, ConfigError, "size=2.5"),
        ({"build": lambda config: nn.Linear(4, 2)}, StateError, "trial 0"),
        ({"validation": (torch.randn(3, 4), torch.tensor([0, 1]))}, ConfigError, "equal length"),
        ({"validation": (torch.randn(2, 4), torch.rand(2))}, ConfigError, "whole numbers"),
        ({"validation": []}, ConfigError, "validation"),
        ({"validation": 7}, ConfigError, "not: 7"),
        ({"validation": [(torch.randn(0, 4), torch.tensor([], dtype=int))]}, ConfigError, "empty"),
        ({"validation": TensorDataset(*samples(9)[:2])}, ConfigError, "DataLoader(dataset"),
        (
            {"validation": tuple(part.numpy() for part in samples(9)[:2])},
            ConfigError,
            "torch.as_tensor",
        ),
        ({"among": 0}, ConfigError, "among=0"),
        ({"among": -3}, ConfigError, "among=-3"),
        ({"validation": (torch.randn(2, 4), torch.tensor([0, 9]))}, ConfigError, "3 classes"),
        ({"validation": (torch.randn(2, 4), torch.tensor([-1, 0]))}, ConfigError, "-1"),
        ({"validation": (torch.randn(2, 5, 4), torch.tensor([0, 1]))}, ConfigError, "(2, 5, 3)"),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_is_stored(campaign, change, error, text):
    x, y, _ = samples()
    with pytest.raises(error) as caught:
        campaign.ensemble(**{"size": 3, "build": build, "validation": (x, y), **change})
    assert text in str(caught.value)
    with Store(campaign.store, read_only=True) as store:
        assert len(store.log()) == 7
        assert store.tags() == {}


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 0.0], [1.0, -1.0]])
def test_weights_that_are_none(weights):
    members = [nn.Linear(2, 2), nn.Linear(2, 2)] if weights else []
    with pytest.raises(ConfigError, match="weight"):
        elastix.Ensemble(members, weights)


def test_whoever_builds_models_takes_nothing_from_their_configurations(campaign):
    """The ensemble was stored with what was left of them, and could not be got back."""

    def takes_apart(config):
        return nn.Linear(config.pop("inputs"), CLASSES)

    x, y, _ = samples()
    made = campaign.ensemble(3, build=takes_apart, validation=(x, y))
    with Store(campaign.store) as store:
        for _ in range(2):
            again = Ensemble.load(store, "nas/ensemble", takes_apart)
            assert torch.equal(again(x), made(x))
    for _ in range(2):
        assert campaign.best.model(takes_apart).in_features == 4
    assert all(trial.config == {"inputs": 4, "number": trial.number} for trial in campaign)
