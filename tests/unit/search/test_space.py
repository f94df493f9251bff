import json
import math
from collections import Counter

import pytest
from ConfigSpace import (
    AndConjunction,
    Beta,
    Categorical,
    ConfigurationSpace,
    Constant,
    EqualsCondition,
    Float,
    ForbiddenAndConjunction,
    ForbiddenEqualsClause,
    ForbiddenEqualsRelation,
    GreaterThanCondition,
    Integer,
    Normal,
    NotEqualsCondition,
    OrdinalHyperparameter,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import elastix
from elastix.errors import ConfigError, EmptySpace
from elastix.search.config_values import generator
from elastix.search.space import Blocks, Space, as_space
from elastix.search.trial import Trial, TrialState, config_key

SEEDS = st.integers(0, 2**31)
quick = settings(max_examples=60)


def awkward() -> ConfigurationSpace:
    """Conditions within conditions, forbidden clauses, every kind of hyperparameter."""
    cs = ConfigurationSpace()
    kind = Categorical("kind", ["conv", "pool", "none"])
    kernel = Categorical("kernel", [1, 3, 5], ordered=True)
    depth = Integer("depth", (1, 4))
    rate = Float("rate", (1e-3, 1.0), log=True)
    flag = Categorical("flag", [True, False])
    cs.add([kind, kernel, depth, rate, flag, Constant("k", 7)])
    cs.add(EqualsCondition(kernel, kind, "conv"))
    cs.add(
        AndConjunction(EqualsCondition(rate, kind, "conv"), GreaterThanCondition(rate, depth, 2))
    )
    cs.add(
        ForbiddenAndConjunction(ForbiddenEqualsClause(kernel, 5), ForbiddenEqualsClause(depth, 4))
    )
    return cs


SPACES = {
    "plain": Space(awkward()),
    "blocks": Space((), Blocks("body", awkward(), min=0, max=4)),
    "both": Space(awkward(), Blocks("a", awkward(), min=2, max=2), Blocks("b", awkward())),
    "ruled": Space(
        [Integer("x", (0, 9)), Integer("y", (0, 9))], valid=lambda config: config["x"] > config["y"]
    ),
}


def edits(a: dict, b: dict, space: Space) -> int:
    """How many places differ. A hyperparameter that its parent switched on or off is no place."""
    count = hyperparameter_edits(
        {k: v for k, v in a.items() if k not in space.blocks},
        {k: v for k, v in b.items() if k not in space.blocks},
    )
    return count + sum(sequence_edits(a[name], b[name]) for name in space.blocks)


def hyperparameter_edits(a: dict, b: dict) -> int:
    return sum(a[key] != b[key] for key in a.keys() & b.keys())


def sequence_edits(a: list, b: list) -> int:
    if a == b:
        return 0
    if abs(len(a) - len(b)) == 1:
        longer, shorter = (a, b) if len(a) > len(b) else (b, a)
        return 1 if any(longer[:i] + longer[i + 1 :] == shorter for i in range(len(longer))) else 99
    if len(a) != len(b):
        return 99
    places = [i for i in range(len(a)) if a[i] != b[i]]
    if len(places) == 1:
        return hyperparameter_edits(a[places[0]], b[places[0]])
    swapped = len(places) == 2 and places[1] == places[0] + 1
    return 1 if swapped and [b[i] for i in reversed(places)] == [a[i] for i in places] else 99


@pytest.mark.parametrize("name", SPACES)
@quick
@given(SEEDS)
def test_samples_are_valid_and_survive_json_and_flattening(name, seed):
    space = SPACES[name]
    config = space.sample(seed)
    space.check(config)
    assert config_key(json.loads(json.dumps(config))) == config_key(config)
    assert json.loads(json.dumps(config)) == config
    flat = space.to_flat(config)
    assert space.from_flat(flat) == config
    assert space.sample(seed) == config


@pytest.mark.parametrize("name", SPACES)
def test_many_drawn_together_are_like_any_drawn_one_by_one(name):
    space = SPACES[name]
    drawn = space.samples(60, generator(7))
    assert len(drawn) == 60
    assert drawn == space.samples(60, generator(7))
    for config in drawn:
        space.check(config)
        assert json.loads(json.dumps(config)) == config
        assert space.from_flat(space.to_flat(config)) == config


def test_many_drawn_together_have_the_same_distribution():
    space = SPACES["both"]
    together = space.samples(600, generator(1))
    singly = [space.sample(generator(2, i)) for i in range(600)]

    def means(configs):
        return [
            sum(config["depth"] for config in configs) / 600,
            sum("rate" in config for config in configs) / 600 * 3,
            sum(len(config["b"]) for config in configs) / 600,
            sum(block["flag"] for config in configs for block in config["a"]) / 600,
        ]

    assert means(together) == pytest.approx(means(singly), abs=0.4)


@pytest.mark.parametrize("distribution", [None, Normal(3, 0.3), Beta(2, 9)])
def test_drawn_evenly_the_ends_of_a_range_are_as_likely_as_what_is_between(distribution):
    space = Space([Integer("x", (0, 3), distribution=distribution)])
    rng = generator(0)
    drawn = Counter(space.sample(rng, evenly=True)["x"] for _ in range(2000))
    assert sorted(drawn) == [0, 1, 2, 3]
    assert all(abs(count - 500) < 100 for count in drawn.values()), drawn  # five times its spread


def test_where_hardly_anything_is_valid_few_are_drawn_together():
    space = Space([Integer("x", (0, 999))], valid=lambda config: config["x"] % 100 == 7)
    drawn = space.samples(50, generator(0))
    assert len(drawn) < 10
    assert all(config["x"] % 100 == 7 for config in drawn)


@pytest.mark.parametrize("name", SPACES)
@quick
@given(SEEDS)
def test_what_the_flat_space_samples_is_valid(name, seed):
    space = SPACES[name]
    space.flat.seed(seed)
    values = dict(space.flat.sample_configuration())
    config = space.from_flat(values)
    if name != "ruled":  # a rule of one's own is no part of the flat space
        space.check(config)
    assert space.to_flat(config).keys() == values.keys()


@pytest.mark.parametrize("name", SPACES)
@quick
@given(SEEDS)
def test_a_mutation_is_valid_and_differs_in_one_place(name, seed):
    space = SPACES[name]
    config = space.sample(seed)
    before = json.dumps(config)
    changed = space.mutate(config, generator(seed, 1))
    assert json.dumps(config) == before
    assert changed is not None
    space.check(changed)
    assert json.loads(json.dumps(changed)) == changed
    assert edits(config, changed, space) == 1


def test_a_short_range_can_always_be_mutated():
    space = Space([Integer("kernel", (1, 3))])
    for count in range(4000):
        assert space.mutate({"kernel": 1}, generator(0, count))["kernel"] in (2, 3)


@pytest.mark.parametrize("make", [Categorical, OrdinalHyperparameter])
@pytest.mark.parametrize("listed", [[1, 2.5, 3], [False, 2.5], [True, 5], ["a", "a\0"]])
def test_choices_of_several_types_stay_what_they_are(make, listed):
    space = Space([make("x", listed)])
    allowed = {repr(choice) for choice in listed}
    rng = generator(0)
    drawn = space.samples(40, rng)
    drawn += [space.sample(rng) for _ in range(40)]
    drawn += [space.mutate({"x": listed[0]}, rng) for _ in range(40)]
    assert {repr(config["x"]) for config in drawn} == allowed


def test_mutation_reaches_all_that_it_should():
    space = SPACES["blocks"]
    config = space.sample(3)
    reached = {config_key(config)}
    lengths, swaps = set(), 0
    for count in range(400):
        changed = space.mutate(config, generator(5, count))
        swaps += sorted(map(config_key, changed["body"])) == sorted(map(config_key, config["body"]))
        lengths.add(len(changed["body"]))
        reached.add(config_key(changed))
        config = changed
    assert lengths == {0, 1, 2, 3, 4}
    assert swaps > 10
    assert len(reached) > 200


def test_the_flat_space_has_conditions_on_the_length():
    flat = Space((), Blocks("body", awkward(), min=1, max=3)).flat
    assert flat["body.length"].lower == 1
    assert flat["body.length"].upper == 3
    assert not flat.parents_of["body.0.kind"]
    assert [p.name for p in flat.parents_of["body.2.kind"]] == ["body.length"]
    assert {p.name for p in flat.parents_of["body.2.rate"]} == {"body.2.kind", "body.2.depth"}


@pytest.mark.parametrize("name", SPACES)
def test_the_default_is_valid(name):
    SPACES[name].check(SPACES[name].get_default_configuration())


def test_all_configurations_of_a_small_space_are_listed_once():
    block = ConfigurationSpace(space=[Categorical("op", ["a", "b"]), Integer("n", (1, 2))])
    space = Space([Categorical("x", [1, 2])], Blocks("body", block, min=0, max=2))
    every = [config_key(config) for config in space.unseen(set())]
    assert len(every) == len(set(every)) == space.size == 2 * (1 + 4 + 16)
    assert list(space.unseen(set(every[1:]))) == [json.loads(every[0])]
    assert list(Space([Float("x", (0, 1))]).unseen(set())) == []
    assert Space([], Blocks("body", block, min=0, max=2000)).size == math.inf
    ruled = [config["x"] - config["y"] for config in SPACES["ruled"].unseen(set())]
    assert len(ruled) == 45
    assert min(ruled) > 0
    allowed = list(Space(finite(awkward())).unseen(set()))
    assert len(allowed) == (3 * 4 - 1 + 4 + 4) * 2
    for config in allowed:
        rated = config["kind"] == "conv" and config["depth"] > 2
        SPACES["plain"].check({**config, "rate": 0.5} if rated else config)


def finite(cs: ConfigurationSpace) -> ConfigurationSpace:
    """`awkward` without its Float."""
    small = ConfigurationSpace()
    kind, kernel, depth = cs["kind"], cs["kernel"], cs["depth"]
    small.add([kind, kernel, depth, cs["flag"], cs["k"]])
    small.add(EqualsCondition(kernel, kind, "conv"))
    small.add(
        ForbiddenAndConjunction(ForbiddenEqualsClause(kernel, 5), ForbiddenEqualsClause(depth, 4))
    )
    return small


def test_further_hyperparameters():
    space = SPACES["both"].plus(Float("momentum", (0.0, 0.9)))
    assert 0 <= space.sample(0)["momentum"] <= 0.9
    assert "momentum" not in SPACES["both"].sample(0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Space(),
        lambda: Space(ConfigurationSpace()),
        lambda: Blocks("body", ConfigurationSpace()),
        lambda: Space([Integer("x", (0, 9))], valid=lambda config: config["x"] > 9),
    ],
)
def test_a_space_with_no_valid_configuration(wrong):
    with pytest.raises(EmptySpace, match="Nothing was"):
        wrong()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Blocks("body", awkward(), min=3, max=2),
        lambda: Blocks("body", awkward(), min=0, max=0),
        lambda: Blocks("body", awkward(), min=-1, max=2),
        lambda: Space([Integer("body", (0, 1))], Blocks("body", awkward())),
        lambda: Space((), Blocks("a.b", awkward())),
        lambda: Space([Integer("body.length", (0, 1))], Blocks("body", awkward())),
        lambda: Space([Integer("body.0.depth", (0, 1))], Blocks("body", awkward())),
        lambda: Space([Categorical("x", [(1, 2), (3, 4)])]),
        lambda: Space([Categorical("x", ["a", "\udc80"])]),
        lambda: Space([Integer("\udc80", (0, 1))]),
        lambda: as_space({"x": [1, 2]}),
    ],
)
def test_what_makes_no_space(wrong):
    with pytest.raises(ConfigError):
        wrong()


@pytest.mark.parametrize(
    "change",
    [
        {"strange": 1},
        {"kind": "dense"},
        {"a": []},
        {"a": 3},
        {"a": [{"kind": "none", "depth": 1, "flag": True, "k": 7}, 5]},
        {"b": [{"kind": "none", "kernel": 3, "depth": 1, "flag": True, "k": 7}]},
    ],
)
def test_what_is_no_configuration(change):
    space = SPACES["both"]
    with pytest.raises(ConfigError):
        space.check({**space.sample(1), **change})
    assert not space.is_valid({**space.sample(1), **change})


def test_a_space_is_written_as_a_list_in_any_order():
    kind, size = elastix.Categorical("kind", ["conv", "pool"]), elastix.Integer("size", (3, 7))
    block = [elastix.EqualsCondition(size, kind, "conv"), size, kind]
    rate = elastix.Float("lr", (1e-4, 1e-1), log=True)
    space = elastix.Space([rate], elastix.Blocks("body", block, min=2, max=3))
    for seed in range(20):
        config = space.sample(seed)
        space.check(config)
        for part in config["body"]:
            assert ("size" in part) == (part["kind"] == "conv")
    with_forbidden = elastix.Space([kind, elastix.ForbiddenEqualsClause(kind, "pool")])
    assert {with_forbidden.sample(seed)["kind"] for seed in range(20)} == {"conv"}


KIND, SIZE = elastix.Categorical("kind", ["conv", "pool"]), elastix.Integer("size", (3, 7))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: elastix.Space([3]),
        lambda: elastix.Space(3),
        lambda: elastix.Space("lr"),
        lambda: elastix.Space({"lr": (0.0, 1.0)}),
        lambda: elastix.Space([KIND, KIND]),
        lambda: elastix.Space([elastix.EqualsCondition(SIZE, KIND, "conv")]),
        lambda: elastix.Space([KIND], [KIND]),
        lambda: elastix.Blocks("body", [3]),
        lambda: elastix.Blocks("body", KIND),
        lambda: elastix.Blocks(3, [KIND]),
        lambda: elastix.Blocks("body", [KIND], min="2"),
        lambda: elastix.Blocks("body", [KIND], min=3, max=2),
        lambda: elastix.Blocks("body", []),
    ],
)
def test_what_is_no_space_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"Nothing was (made|started)"):
        wrong()


def test_a_checked_configuration_is_one_that_could_have_been_drawn():
    """Equal values of other types are written otherwise: it would be tried a second time."""
    space = elastix.Space(
        [
            elastix.Categorical("norm", [True, False]),
            elastix.Categorical("size", [1, 2.5, "1"]),
            elastix.Float("rate", (0.0, 2.0)),
            elastix.Integer("width", (1, 64)),
        ]
    )
    found = space.check({"norm": 1, "size": 1.0, "rate": 1, "width": 8.0})
    assert json.dumps(found, sort_keys=True) == (
        '{"norm": true, "rate": 1.0, "size": 1, "width": 8}'
    )
    assert str(space.check({**found, "rate": -0.0})["rate"]) == "0.0"
    with pytest.raises(ConfigError, match="is not valid"):
        space.check({**found, "rate": 10**400})


def test_a_checked_configuration_has_the_numbers_that_were_given():
    """ConfigSpace rounds floats after 13 decimals: of 1e-12 that leaves one digit."""
    space = elastix.Space([elastix.Float("decay", (1e-12, 1.0), log=True)])
    blocks = elastix.Blocks("body", [elastix.Float("drop", (0.0, 1.0))])
    for seed in range(5):
        config = Space(space.plain, blocks).sample(seed)
        assert Space(space.plain, blocks).check(config) == config


def test_a_space_whose_valid_configurations_are_rare_goes_on_being_drawn_from():
    """Of 2000 draws none may be valid, which ended a campaign that had begun, for good."""
    space = Space([Float("x", (0.0, 1.0))], valid=lambda config: config["x"] < 1 / 4000)
    assert all(space.sample(seed)["x"] < 1 / 4000 for seed in range(6))


@pytest.mark.parametrize("ask", [Space.check, Space.is_valid])
def test_a_rule_that_raises_is_named_with_what_it_was_asked(ask):
    """It was not asked whether that may be tried, so it is not taken to forbid it."""

    def small_half(config):
        return 1 / config["x"] < 2

    space = Space([Integer("x", (0, 9999))], valid=small_half)
    with pytest.raises(ConfigError, match=r"small_half raised ZeroDivisionError.*'x': 0}"):
        ask(space, {"x": 0})


@pytest.mark.parametrize(
    "bounds", [(0, 2**53 + 2), (-(2**53) - 2, 0), (-(2**52), 2**52 + 1), (0, 2**62)]
)
@pytest.mark.parametrize("make", [lambda part: [part], lambda part: ConfigurationSpace([part])])
def test_whole_numbers_that_would_be_rounded_are_refused(bounds, make):
    """ConfigSpace takes 2**53 + 1 for 2**53 + 2."""
    with pytest.raises(ConfigError, match=rf"'n' is a whole number from {bounds[0]} to"):
        Space([Blocks("layers", make(Integer("n", bounds)))])
    with pytest.raises(ConfigError, match=r"2\*\*53"):
        Space(make(Integer("n", bounds)))


def test_the_largest_whole_numbers_that_are_exact_can_be_searched():
    for bounds in ((0, 2**53), (-(2**53), -1), (-(2**52), 2**52)):
        space = Space([Integer("n", bounds)])
        for value in (bounds[0], bounds[0] + 1, bounds[1] - 1, bounds[1]):
            assert space.check({"n": value}) == {"n": value}


def test_a_space_that_forbids_its_own_defaults_says_that_it_is_these():
    a, b = Integer("a", (0, 9)), Integer("b", (0, 9))
    with pytest.raises(ConfigError, match=r"the space forbids its own defaults \(a == b\)"):
        Space([a, b, ForbiddenEqualsRelation(a, b)])
    a, b = Integer("a", (0, 9), default=3), Integer("b", (0, 9))
    assert Space([a, b, ForbiddenEqualsRelation(a, b)]).get_default_configuration()["a"] == 3


def unless(parent, value):
    """A choice, one that depends on it, and one that is there unless that has some value."""
    kind = Categorical("kind", ["conv", "pool"])
    child = Categorical("child", [1, 2, 3])
    return [
        *(kind, parent, child),
        EqualsCondition(parent, kind, "conv"),
        NotEqualsCondition(child, parent, value),
    ]


@pytest.mark.parametrize(
    ("parent", "value"),
    [
        (Categorical("size", [3, 5, 7]), 5),
        (Integer("size", (1, 3)), 2),
        (Float("size", (0, 1)), 0.5),
    ],
    ids=["choices", "integer", "float"],
)
def test_unless_an_absent_parent_has_a_value_means_absent_everywhere(parent, value):
    """ConfigSpace's vectors say otherwise, and what was drawn was then refused."""
    forbidden = ForbiddenEqualsClause(parent, 7 if value == 5 else 1)
    spaces = [
        Space(unless(parent, value)),
        Space([*unless(parent, value), forbidden]),
        Space([], Blocks("body", unless(parent, value), min=0, max=3)),
    ]
    for space in spaces:
        drawn = [space.sample(generator(seed)) for seed in range(60)]
        drawn += [one for each in drawn if (one := space.mutate(each, generator(7)))]
        for config in drawn:
            assert space.check(config) == config
            assert space.from_flat(space.to_flat(config)) == config
            for one in config.get("body", [config]):
                there = one["kind"] == "conv" and one["size"] != value
                assert ("child" in one) is there
    for make in (elastix.ScreenedEvolution, elastix.Optuna, elastix.DeepHyper):
        searcher = make()
        searcher.start(spaces[2], seed=1)
        for number in range(3):
            (asked,) = searcher.ask(1)
            searcher.tell([Trial(number, asked, TrialState.FINISHED, (float(number),))])


@pytest.mark.parametrize(
    "parent", [Constant("size", 5), Categorical("size", [5])], ids=["constant", "one choice"]
)
def test_unless_the_only_value_of_a_parent_means_never(parent):
    kind, size, child, _, never = unless(parent, 5)
    spaces = [
        Space(unless(parent, 5)),
        Space([], Blocks("body", unless(parent, 5), min=0, max=3)),
        Space([], Blocks("body", [kind, size, child, never], min=0, max=3)),
    ]
    for space in spaces:
        drawn = [space.sample(generator(seed)) for seed in range(30)]
        drawn += [one for each in drawn if (one := space.mutate(each, generator(7)))]
        for config in drawn:
            assert space.check(config) == config
            assert space.from_flat(space.to_flat(config)) == config
            assert not any("child" in one for one in config.get("body", [config]))
        for values in space.flat.sample_configuration(30):
            assert not any(name.endswith("child") for name in values)


def test_a_rule_that_takes_a_configuration_apart_takes_nothing_from_it():
    """As one does that builds the model to see how large it is."""

    def is_small(config):
        return sum(block.pop("width") for block in config.pop("body")) <= 64

    space = Space([], Blocks("body", [Integer("width", (1, 64))], min=1, max=2), valid=is_small)
    rng = generator(3)
    sampled = [space.sample(rng), *space.samples(4, rng), space.get_default_configuration()]
    for config in [*sampled, space.mutate(sampled[0], rng)]:
        assert 0 < sum(block["width"] for block in config["body"]) <= 64
        assert space.check(config) == config
