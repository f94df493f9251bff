"""Configurations of one ConfigurationSpace as plain values: drawn, changed, checked, counted.

Not here: sequences of them (space.py).

Invariant: a value that leaves here is JSON, and a configuration that is drawn or changed here
satisfies the conditions and the forbidden clauses.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
from ConfigSpace import (
    BetaFloatHyperparameter,
    BetaIntegerHyperparameter,
    Configuration,
    ConfigurationSpace,
    Constant,
    ForbiddenValueError,
    GreaterThanCondition,
    InCondition,
    LessThanCondition,
    NormalFloatHyperparameter,
    NormalIntegerHyperparameter,
    NotEqualsCondition,
    OrConjunction,
)
from ConfigSpace.conditions import Conjunction
from ConfigSpace.hyperparameters import (
    CategoricalHyperparameter,
    Hyperparameter,
    IntegerHyperparameter,
    OrdinalHyperparameter,
)
from ConfigSpace.types import NotSet
from numpy.random import MT19937, RandomState, SeedSequence

from elastix.errors import ConfigError, EmptySpace

Values = dict[str, Any]
Parameter = Hyperparameter[Any, Any]

BELLS = (
    BetaFloatHyperparameter,
    BetaIntegerHyperparameter,
    NormalFloatHyperparameter,
    NormalIntegerHyperparameter,
)
"""Numbers of which some are likelier than others."""

TRIES = 2000
_NEAR = 0.2  # standard deviation of a small change, as a share of the range


def sound(space: ConfigurationSpace, *, always: bool = False) -> ConfigurationSpace:
    """The same with other words for "unless the parent is this", where the parent may be absent.

    Then such a condition does not hold. ConfigSpace says so too where it looks at values; where it
    looks at vectors it holds, since NaN is no value, and what one accepts the other refuses.

    Args:
        space: is left as it is.
        always: all parents may be absent, as those of a block are.
    """
    absent = {*space} if always else {*space} - {*space.unconditional_hyperparameters}
    conditions = [_said_otherwise(each, absent) for each in space.conditions]
    if all(new is old for new, old in zip(conditions, space.conditions, strict=True)):
        return space
    other = ConfigurationSpace(name=space.name)
    other.add([*space.values()])
    other.add(conditions)
    other.add([*space.forbidden_clauses])
    return other


def _said_otherwise(condition: Any, absent: Collection[str]) -> Any:  # noqa: ANN401 - of any kind
    if isinstance(condition, Conjunction):
        parts = [_said_otherwise(each, absent) for each in condition.components]
        same = all(new is old for new, old in zip(parts, condition.components, strict=True))
        return condition if same else type(condition)(*parts)
    if not isinstance(condition, NotEqualsCondition) or condition.parent.name not in absent:
        return condition
    child, parent, value = condition.child, condition.parent, condition.value
    listed = choices(parent)
    if listed is None:
        less, more = (
            kind(child, parent, value) for kind in (LessThanCondition, GreaterThanCondition)
        )
        return OrConjunction(less, more)
    others = [choice for choice in listed if choice != value]
    return InCondition(child, parent, others)  # of none if there is no other one: never


def generator(seed: int, count: int = 0) -> RandomState:
    """The `count`-th generator of `seed`: independent ones, of the kind that ConfigSpace takes.

    A searcher that makes each proposal with a generator of its own has only a count to save.
    """
    return RandomState(MT19937(SeedSequence([seed, count])))


def plain(value: Any) -> Any:  # noqa: ANN401 - a value of any hyperparameter
    """A Python value in place of NumPy's."""
    return value.item() if isinstance(value, np.generic) else value


def active(space: ConfigurationSpace, value_of: Callable[[str], Any]) -> Values:
    """Active hyperparameters with their values, parents first (the order of the space)."""
    values: Values = {}
    for name in space:
        values[name] = plain(value_of(name)) if _is_active(space, name, values) else NotSet
    return {name: value for name, value in values.items() if value is not NotSet}


def draw(space: ConfigurationSpace, rng: RandomState, *, evenly: bool = False) -> Values:
    """Random values that are allowed.

    Args:
        space: what they are values of.
        rng: is drawn from.
        evenly: each choice, and each part of a range, is as likely as any other, whatever the
            hyperparameters' own distributions say.

    Raises:
        EmptySpace: none of very many was.
    """
    how = _evenly if evenly else _drawn
    for _ in range(TRIES):
        values = active(space, lambda name: how(space[name], rng))
        if not forbidden(space, values):
            return values
    raise EmptySpace(
        f"none of {TRIES} random configurations satisfies the forbidden clauses "
        f"{list(space.forbidden_clauses)}. Nothing was started. Loosen them."
    )


def draw_many(space: ConfigurationSpace, count: int, rng: RandomState) -> list[Values]:
    """Up to `count` draws, fewer where some are forbidden. Many cost little more than one.

    Each hyperparameter is drawn for all of them at once: ConfigSpace takes 30 us a call.
    """
    columns = {
        name: _values(hyperparameter, hyperparameter.sample_vector(size=count, seed=rng))
        for name, hyperparameter in space.items()
    }
    drawn = (active(space, lambda n, i=i: columns[n][i]) for i in range(count))  # type: ignore[misc]
    return [values for values in drawn if not forbidden(space, values)]


def _drawn(hyperparameter: Parameter, rng: RandomState) -> Any:  # noqa: ANN401 - of any kind
    """By its own distribution."""
    return _values(hyperparameter, hyperparameter.sample_vector(size=1, seed=rng))[0]


def _values(hyperparameter: Parameter, vector: Any) -> Sequence[Any]:  # noqa: ANN401
    """What ConfigSpace's numbers mean. Choices are the very ones of the space.

    ConfigSpace puts them into an array of NumPy, where 1 beside 2.5 becomes 1.0, and True 1.
    """
    listed = choices(hyperparameter)
    if listed is None:
        return cast("Sequence[Any]", hyperparameter.to_value(vector))
    if isinstance(hyperparameter, Constant):
        return listed * len(vector)
    return [listed[int(place)] for place in vector]


def _evenly(hyperparameter: Parameter, rng: RandomState) -> Any:  # noqa: ANN401 - of any kind
    listed = choices(hyperparameter)
    if listed is not None:
        return listed[int(rng.randint(0, len(listed)))]
    bell: Any = hyperparameter
    return _drawn(bell.to_uniform() if isinstance(bell, BELLS) else hyperparameter, rng)


def is_uneven(hyperparameter: Parameter) -> bool:
    """Whether a user has said which of its values are likely to be good."""
    return isinstance(hyperparameter, BELLS) or getattr(hyperparameter, "weights", None) is not None


def default(space: ConfigurationSpace) -> Values:
    """Every active hyperparameter at its default."""
    return {name: plain(value) for name, value in space.get_default_configuration().items()}


def change(
    space: ConfigurationSpace, values: Values, rng: RandomState, name: str | None = None
) -> Values | None:
    """`values` with one hyperparameter changed; newly active ones are drawn, others dropped."""
    names = [name] if name else rng.permutation(list(values)).tolist()
    for chosen in names:
        other = _another(space[chosen], values[chosen], rng)
        if other is None:
            continue
        known = {**values, chosen: other}
        changed = active(
            space,
            lambda n, known=known: known[n] if n in known else _drawn(space[n], rng),  # type: ignore[misc]
        )
        if not forbidden(space, changed):
            return changed
    return None


def _another(hyperparameter: Parameter, value: Any, rng: RandomState) -> Any:  # noqa: ANN401
    """Another value; of numbers and ordered choices, a near one as often as any."""
    if isinstance(hyperparameter, Constant):
        return None
    ordered = not isinstance(hyperparameter, CategoricalHyperparameter)
    for _ in range(20):
        if ordered and rng.random_sample() < 0.5:
            near = _near(hyperparameter, value, rng)
            if len(near) == 0:
                continue
            other = plain(near[int(rng.randint(0, len(near)))])
        else:
            other = plain(_drawn(hyperparameter, rng))
        if other != value:
            return other
    return None


def _near(hyperparameter: Parameter, value: Any, rng: RandomState) -> Sequence[Any]:  # noqa: ANN401
    """One near value, or none."""
    vector = hyperparameter.to_vector(value)
    try:
        found = hyperparameter.neighbors_vectorized(vector, 1, seed=rng, std=_NEAR)
    except ValueError:  # at an end of a short range all that it tried may lie outside
        return ()
    return _values(hyperparameter, found)


def forbidden(space: ConfigurationSpace, values: Values) -> bool:
    """Whether a forbidden clause excludes these values."""
    if not space.forbidden_clauses:
        return False
    try:
        Configuration(space, values=values)
    except ForbiddenValueError:
        return True
    return False


def check_mapping(values: Any, what: str) -> None:  # noqa: ANN401
    """Raise ConfigError if `values`, which is called `what`, has no names."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{what} must be a mapping of names to values, not {values!r}.")


def check(space: ConfigurationSpace, values: Any, what: str) -> Values:  # noqa: ANN401
    """The values as `draw` gives them: Python's own numbers, and the very choices of the space.

    Raises:
        ConfigError: what is wrong with `values`, which is called `what`.
    """
    check_mapping(values, what)
    strange = sorted(values.keys() - set(space))
    if strange:
        raise ConfigError(f"{what} has {strange}, which the space does not know.")
    try:
        found = Configuration(space, values=dict(values))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{what} {dict(values)} is not valid: {error}") from error
    return {name: _as_drawn(space[name], each, values[name]) for name, each in found.items()}


def _as_drawn(hyperparameter: Parameter, value: Any, given: Any) -> Any:  # noqa: ANN401 - of any kind
    """Of the type that `draw` gives: 1 is equal to True, and is written and read otherwise.

    A number is the given one: a Configuration has rounded it after 13 decimals.
    """
    listed = choices(hyperparameter)
    if listed is None:
        whole = isinstance(hyperparameter, IntegerHyperparameter)
        return int(given) if whole else float(given) + 0.0  # -0.0 is written otherwise
    value = plain(value)
    same = [plain(choice) for choice in listed if plain(choice) == value]
    return next((choice for choice in same if type(choice) is type(value)), same[0])


def check_choices(space: ConfigurationSpace, what: str, may_be_empty: bool = False) -> None:
    """Refuse choices that are no JSON scalars, with ConfigError, and no choice at all."""
    if len(space) == 0 and not may_be_empty:
        raise EmptySpace(f"{what} has no hyperparameter. Nothing was made. Add one.")
    for hyperparameter in space.values():
        _check_text(hyperparameter.name, what)
        for choice in choices(hyperparameter) or ():
            _check_text(choice, what)
            if not isinstance(plain(choice), bool | int | float | str | None):
                raise ConfigError(
                    f"choice {choice!r} of {hyperparameter.name!r} in {what} is a "
                    f"{type(choice).__name__}; only numbers, text, booleans and None survive JSON. "
                    "Nothing was made. Name the choices and look them up in `build`."
                )


def _check_text(value: Any, what: str) -> None:  # noqa: ANN401
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{value!r} in {what} is no text that can be written down: {error}. Nothing was made."
        ) from error


def choices(hyperparameter: Parameter) -> tuple[Any, ...] | None:
    """All values, if there is a list of them."""
    if isinstance(hyperparameter, CategoricalHyperparameter):
        return tuple(hyperparameter.choices)
    if isinstance(hyperparameter, OrdinalHyperparameter):
        return tuple(hyperparameter.sequence)
    if isinstance(hyperparameter, Constant):
        return (hyperparameter.value,)
    return None


def grid(space: ConfigurationSpace) -> list[Values]:
    """Every allowed configuration of a finite space, each once."""
    found: list[Values] = [{}]
    for name, hyperparameter in space.items():
        listed = choices(hyperparameter)
        if listed is None:
            listed = tuple(range(hyperparameter.lower, hyperparameter.upper + 1))  # type: ignore[attr-defined]
        found = [
            {**begun, name: plain(value)}
            for begun in found
            for value in (listed if _is_active(space, name, begun) else (NotSet,))
        ]
    cleaned = ({n: v for n, v in values.items() if v is not NotSet} for values in found)
    return [values for values in cleaned if not forbidden(space, values)]


def _is_active(space: ConfigurationSpace, name: str, values: Values) -> bool:
    return all(c.satisfied_by_value(values) for c in space.parent_conditions_of[name])
