"""What may be tried: a ConfigSpace, and block sequences for architectures.

A configuration is plain JSON: a name with a value for each active hyperparameter, and for each
`Blocks` a list of mappings. Searchers that change structure use `mutate`; those that know nothing
of sequences use `flat`, in which a sequence is a length and conditional hyperparameters.

Not here: how DeepHyper, Optuna or Ray Tune write a space (each in the file that knows them).

Invariant: `sample`, `mutate` and `from_flat` give configurations that `check` accepts, and that
are equal to themselves after a trip through JSON. Randomness comes from the generator given.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, get_args

import numpy as np
from ConfigSpace import (
    ConfigurationSpace,
    Constant,
    ForbiddenValueError,
    GreaterThanCondition,
    Integer,
)
from ConfigSpace.conditions import ConditionLike
from ConfigSpace.forbidden import ForbiddenLike
from ConfigSpace.hyperparameters import Hyperparameter, IntegerHyperparameter
from numpy.random import RandomState

from elastix.arguments import checked, is_whole, of_kind
from elastix.errors import ConfigError, EmptySpace
from elastix.search import config_values
from elastix.search.config_values import Parameter, Values, generator
from elastix.search.trial import Config, config_key

Clause = Parameter | ConditionLike | ForbiddenLike
"""What a space is written with: hyperparameters, when they count, and what may not be."""

_CLAUSES = (Hyperparameter, *get_args(ConditionLike), *get_args(ForbiddenLike))
_ROUNDS = 8
_EXACT = 1 << 53  # whole numbers up to it are floating-point numbers
_PATIENCE = 50  # a space with a valid configuration has more, however rare they are


def _gathered(parts: ConfigurationSpace | Iterable[Clause], what: str) -> ConfigurationSpace:
    """Hyperparameters, conditions and forbidden clauses, in whatever order, as one space.

    Raises:
        ConfigError: something else is among them, or they contradict each other.
    """
    if isinstance(parts, ConfigurationSpace):
        _check_exact(parts, what)
        return config_values.sound(parts)
    kinds = "hyperparameters, conditions and forbidden clauses"
    rule = f"{what} must be a ConfigurationSpace, or a list of {kinds}"
    if not isinstance(parts, Iterable) or isinstance(parts, Hyperparameter):
        raise ConfigError(f"{rule}, not {parts!r}. Nothing was made.")
    try:
        given = list(parts)
    except TypeError as error:  # a tensor without dimensions
        raise ConfigError(f"{rule}, not {parts!r}. Nothing was made.") from error
    for part in given:
        if not isinstance(part, _CLAUSES):
            raise ConfigError(f"{rule}; {part!r} is none of these. Nothing was made.")
    space = ConfigurationSpace()
    try:
        space.add([part for part in given if isinstance(part, Hyperparameter)])
        space.add([part for part in given if not isinstance(part, Hyperparameter)])
    except ForbiddenValueError as error:  # ConfigSpace tries the defaults at once
        clause = str(error).partition("clause: ")[2].replace("Forbidden: ", "")
        raise ConfigError(
            f"{what} forbids its own defaults ({clause}). Nothing was made. Give a hyperparameter "
            "another default: Integer(..., default=...)."
        ) from error
    except (ValueError, KeyError) as error:  # ConfigSpace's own errors are of these
        raise ConfigError(f"{rule} that fit: {error}. Nothing was made.") from error
    _check_exact(space, what)
    return config_values.sound(space)


def _check_exact(space: ConfigurationSpace, what: str) -> None:
    """ConfigSpace and searchers compute with floating point, also where a value is whole.

    Raises:
        ConfigError: some whole numbers of a range would be rounded to others.
    """
    for part in space.values():
        if not isinstance(part, IntegerHyperparameter):
            continue
        low, high = int(part.lower), int(part.upper)
        if max(-low, high, high - low) > _EXACT:
            raise ConfigError(
                f"{what}: {part.name!r} is a whole number from {low} to {high}. Searchers would "
                f"round numbers beyond {_EXACT} (2**53), and those of a range that is larger. "
                "Nothing was made. Take a smaller range and add an offset in the train function, "
                "or search for an exponent, or take a Categorical."
            )


@checked
@dataclass(frozen=True, init=False)
class Blocks:
    """A sequence of `min` to `max` blocks, each a configuration of `block`.

    In a configuration it is a list under `name`. An architecture is grown and shrunk by `insert`
    and `delete`, altered by `change` and `reorder`; each gives another list that differs in that
    one place, or None if there is no such list.
    """

    name: str
    block: ConfigurationSpace
    min: int
    max: int

    def __init__(
        self,
        name: str,
        block: ConfigurationSpace | Iterable[Clause],
        min: int = 1,  # noqa: A002 - as it is called
        max: int = 8,  # noqa: A002 - as it is called
    ) -> None:
        """Describe a sequence.

        Args:
            name: under which a configuration has its list.
            block: what each block chooses: hyperparameters with their conditions and forbidden
                clauses, as a list or as a ConfigurationSpace.
            min: the fewest blocks.
            max: the most blocks.

        Raises:
            ConfigError: impossible lengths, no such block, or one whose whole numbers are beyond
                2**53, or that forbids its own defaults.
        """
        lengths = is_whole(min) and is_whole(max, 1) and min <= max
        if not isinstance(name, str) or not lengths:
            raise ConfigError(
                f"Blocks({name!r}, min={min!r}, max={max!r}): name must be text, and min and max "
                "whole numbers with 0 <= min <= max and room for one block. Nothing was made."
            )
        space = _gathered(block, f"a block of {name!r}")
        for field, value in (("name", name), ("block", space), ("min", min), ("max", max)):
            object.__setattr__(self, field, value)
        config_values.check_choices(space, f"a block of {name!r}")

    def sample(self, rng: RandomState, *, evenly: bool = False) -> list[Values]:
        """A random length, then random blocks; `evenly` as for a Space."""
        length = int(rng.randint(self.min, self.max + 1))
        return [config_values.draw(self.block, rng, evenly=evenly) for _ in range(length)]

    def samples(self, count: int, rng: RandomState) -> list[list[Values]]:
        """Up to `count` sequences as `sample` draws them, all at once."""
        lengths = rng.randint(self.min, self.max + 1, count).tolist()
        blocks = iter(config_values.draw_many(self.block, sum(lengths), rng))
        drawn = [list(islice(blocks, length)) for length in lengths]
        return [each for each, length in zip(drawn, lengths, strict=True) if len(each) == length]

    def default(self) -> list[Values]:
        """Default blocks, as many as halfway between min and max."""
        return [config_values.default(self.block) for _ in range((self.min + self.max) // 2)]

    def insert(self, blocks: Sequence[Values], rng: RandomState) -> list[Values] | None:
        """A new block at a random place."""
        if len(blocks) >= self.max:
            return None
        place = int(rng.randint(0, len(blocks) + 1))
        return [*blocks[:place], config_values.draw(self.block, rng), *blocks[place:]]

    def delete(self, blocks: Sequence[Values], rng: RandomState) -> list[Values] | None:
        """One block less."""
        if len(blocks) <= self.min:
            return None
        place = int(rng.randint(0, len(blocks)))
        return [*blocks[:place], *blocks[place + 1 :]]

    def change(self, blocks: Sequence[Values], rng: RandomState) -> list[Values] | None:
        """One hyperparameter of one block."""
        for place in rng.permutation(len(blocks)).tolist():
            changed = config_values.change(self.block, blocks[place], rng)
            if changed is not None:
                return [*blocks[:place], changed, *blocks[place + 1 :]]
        return None

    def reorder(self, blocks: Sequence[Values], rng: RandomState) -> list[Values] | None:
        """Two different neighbours change places."""
        places = [i for i in range(len(blocks) - 1) if blocks[i] != blocks[i + 1]]
        if not places:
            return None
        place = places[int(rng.randint(0, len(places)))]
        swapped = [blocks[place + 1], blocks[place]]
        return [*blocks[:place], *swapped, *blocks[place + 2 :]]


@checked
class Space:
    """A ConfigSpace with block sequences.

        kind, size = Categorical("kind", ["conv", "pool"]), Categorical("size", [3, 5])
        space = Space(
            [Float("lr", (1e-4, 1e-1), log=True)],
            Blocks("body", [kind, size, EqualsCondition(size, kind, "conv")], min=2, max=6),
        )

    Attributes:
        plain: the hyperparameters outside of sequences.
        blocks: the sequences, by name.
    """

    def __init__(
        self,
        plain: ConfigurationSpace | Iterable[Clause] = (),
        *blocks: Blocks,
        valid: Callable[[Config], bool] | None = None,
    ) -> None:
        """Put a space together.

        Args:
            plain: hyperparameters, with their conditions and forbidden clauses: a list, or a
                ConfigurationSpace.
            blocks: sequences, with names that differ from each other's and from those in `plain`.
            valid: says of a configuration whether it may be tried, for what forbidden clauses
                cannot express.

        Raises:
            ConfigError: names collide, a choice is no JSON scalar, a whole number is beyond 2**53,
                the defaults are forbidden, or something else was given.
            EmptySpace: there is nothing to choose, or no configuration is valid.
        """
        for part in blocks:
            of_kind("each of blocks", part, Blocks)
        self.plain = plain = _gathered(plain, "the space")
        self.blocks = {part.name: part for part in blocks}
        self._valid = valid
        names = [*plain, *(part.name for part in blocks)]
        if len(set(names)) < len(names) or any("." in name for name in self.blocks):
            raise ConfigError(
                f"the names {names} must differ, and those of block sequences have no dot. "
                "Nothing was made."
            )
        beneath = tuple(f"{name}." for name in self.blocks)
        if taken := [name for name in plain if name.startswith(beneath)]:
            raise ConfigError(
                f"the names {taken} may be those of a block's hyperparameters, which are "
                f"{beneath[0]}0.NAME and so on where sequences are spread out. Nothing was made. "
                "Choose others."
            )
        if not names:
            raise EmptySpace(
                "the space has no hyperparameter and no block sequence, so there is nothing to "
                "search. Nothing was started. Add one."
            )
        config_values.check_choices(plain, "the space", may_be_empty=True)
        self._drawn(generator(0), config_values.TRIES, "Nothing was started.")

    @property
    def _rule(self) -> str:
        name: str = getattr(self._valid, "__qualname__", type(self._valid).__name__)
        return name

    def __repr__(self) -> str:
        """All that it is made of, and nothing of where it lies in memory."""
        parts = [repr(self.plain), *map(repr, self.blocks.values())]
        return f"Space({', '.join(parts)}{f', valid={self._rule}' if self._valid else ''})"

    def plus(self, *clauses: Clause) -> "Space":
        """This space with further plain hyperparameters, such as those of an optimizer."""
        plain = deepcopy(self.plain)
        plain.add(list(clauses))
        return Space(plain, *self.blocks.values(), valid=self._valid)

    # ---------------------------------------------------------------------------------- proposals

    def sample(self, rng: RandomState | int, *, evenly: bool = False) -> Config:
        """A random configuration: every hyperparameter and length by its own distribution.

        Args:
            rng: is drawn from, or a seed.
            evenly: instead, every value is as likely as any other.

        Raises:
            EmptySpace: none of very many was valid.
        """
        rng = generator(rng) if isinstance(rng, int) else rng
        tries, so_far = _PATIENCE * config_values.TRIES, "Nothing is lost."
        return self._drawn(rng, tries, so_far, evenly=evenly)

    def _drawn(self, rng: RandomState, tries: int, so_far: str, *, evenly: bool = False) -> Config:
        for _ in range(tries):
            config = config_values.draw(self.plain, rng, evenly=evenly)
            config |= {name: part.sample(rng, evenly=evenly) for name, part in self.blocks.items()}
            if self._is_allowed(config):
                return config
        raise EmptySpace(
            f"none of {tries} random configurations is valid, the last of them {config}. "
            f"{so_far} Loosen the forbidden clauses or `valid`."
        )

    def samples(self, count: int, rng: RandomState) -> list[Config]:
        """Up to `count` random configurations, drawn together for a fraction of the time.

        The same one may come twice. Fewer, or none, where most are not valid.
        """
        found: list[Config] = []
        for _ in range(_ROUNDS):
            if len(found) < count:
                found += self._drawn_together(count - len(found), rng)
        return found

    def _drawn_together(self, count: int, rng: RandomState) -> list[Config]:
        drawn = config_values.draw_many(self.plain, count, rng) if len(self.plain) else [{}] * count
        for name, part in self.blocks.items():
            pairs = zip(drawn, part.samples(count, rng), strict=False)  # some were forbidden
            drawn = [{**config, name: blocks} for config, blocks in pairs]
        return [config for config in drawn if self._is_allowed(config)]

    def get_default_configuration(self) -> Config:
        """Every hyperparameter at its default; a random configuration if that one is not valid."""
        config = config_values.default(self.plain)
        config |= {name: part.default() for name, part in self.blocks.items()}
        return config if self.is_valid(config) else self.sample(generator(0))

    def mutate(self, config: Config, rng: RandomState) -> Config | None:
        """Another valid configuration that differs in one place; None if none was found.

        A place is a plain hyperparameter (those that it activates are drawn anew), or one
        insertion, deletion, change or exchange in a block sequence. A sequence is chosen as often
        as it has blocks, or once if it has none.
        """
        weights = [1.0 if name in config else 0.0 for name in self.plain]
        weights += [max(1.0, len(config[name])) for name in self.blocks]
        places = [*self.plain, *self.blocks]
        chances = np.array(weights) / sum(weights)
        for _ in range(50):
            name = places[int(rng.choice(len(places), p=chances))]
            changed = self._mutate_at(name, config, rng)
            if changed is not None and changed != config and self._is_allowed(changed):
                return changed
        return None

    def _mutate_at(self, name: str, config: Config, rng: RandomState) -> Config | None:
        if name not in self.blocks:
            plain = {key: value for key, value in config.items() if key not in self.blocks}
            changed = config_values.change(self.plain, plain, rng, name)
            return changed and changed | {key: config[key] for key in self.blocks}
        part = self.blocks[name]
        edits = [part.insert, part.delete, part.change, part.reorder]
        edited = edits[int(rng.randint(0, len(edits)))](config[name], rng)
        return None if edited is None else {**config, name: edited}

    # ------------------------------------------------------------------------------------- checks

    def check(self, config: Config) -> Config:
        """The configuration as proposals are: plain JSON values, of the hyperparameters' kinds.

        Raises:
            ConfigError: it is not of this space, and why; or `valid` has raised.
        """
        found = self._of_this_space(config)
        if not self._is_allowed(config):
            raise ConfigError(f"the space's own rule does not allow {dict(config)}.")
        return found

    def is_valid(self, config: Config) -> bool:
        """Whether it is of this space and allowed.

        Raises:
            ConfigError: `valid` has raised.
        """
        try:
            self._of_this_space(config)
        except ConfigError:
            return False
        return self._is_allowed(config)

    def _of_this_space(self, config: Config) -> Config:
        config_values.check_mapping(config, "the configuration")
        plain = {key: value for key, value in config.items() if key not in self.blocks}
        found = config_values.check(self.plain, plain, "the configuration")
        for name, part in self.blocks.items():
            blocks = config.get(name)
            if not isinstance(blocks, list) or not part.min <= len(blocks) <= part.max:
                raise ConfigError(
                    f"{name!r} must be a list of {part.min} to {part.max} blocks, not {blocks!r}."
                )
            found[name] = [
                config_values.check(part.block, block, f"block {place} of {name!r}")
                for place, block in enumerate(blocks)
            ]
        return found

    def _is_allowed(self, config: Config) -> bool:
        if self._valid is None:
            return True
        try:
            return self._valid(deepcopy(config))  # it may build the model, and so take it apart
        except Exception as error:
            raise ConfigError(
                f"the space's own rule {self._rule} raised {type(error).__name__}: {error}, for "
                f"the configuration {dict(config)}. It has to answer for every one of the space."
            ) from error

    # --------------------------------------------------------------------------------------- flat

    @cached_property
    def flat(self) -> ConfigurationSpace:
        """All of it as conditional hyperparameters: `body.length`, `body.0.width`, ..

        A block's own ones are active where the sequence is longer than its place. The space's own
        rule `valid` cannot be expressed and is not part of it.
        """
        flat = ConfigurationSpace()
        # Copies: ConfigSpace renames the parts of a conjunction where they are.
        flat.add_configuration_space("", deepcopy(self.plain), delimiter="")
        for name, part in self.blocks.items():
            length = _length(part)
            flat.add(length)
            block = config_values.sound(part.block, always=True)
            for place in range(part.max):
                at = f"{name}.{place}."
                flat.add_configuration_space(at[:-1], deepcopy(block), delimiter=".")
                if place >= part.min:
                    roots = [flat[at + n] for n in part.block.unconditional_hyperparameters]
                    flat.add([GreaterThanCondition(r, flat[length.name], place) for r in roots])
        return flat

    def to_flat(self, config: Config) -> Values:
        """The values of a configuration under the names of `flat`; active ones alone."""
        found = {key: value for key, value in config.items() if key not in self.blocks}
        for name in self.blocks:
            found[f"{name}.length"] = len(config[name])
            for place, block in enumerate(config[name]):
                found |= {f"{name}.{place}.{key}": value for key, value in block.items()}
        return found

    def from_flat(self, flat: Mapping[str, Any]) -> Config:
        """The inverse of `to_flat`. Values of inactive hyperparameters are dropped.

        Raises:
            KeyError: an active hyperparameter has no value.
        """
        config = config_values.active(self.plain, flat.__getitem__)
        for name, part in self.blocks.items():
            config[name] = [
                config_values.active(part.block, _Below(flat, f"{name}.{place}.").__getitem__)
                for place in range(int(flat[f"{name}.length"]))
            ]
        return config

    # ------------------------------------------------------------------------------------- size

    @property
    def size(self) -> float:
        """How many configurations there are at most; infinite with a Float, or beyond a float."""
        total = float(self.plain.estimate_size()) if len(self.plain) else 1.0
        for part in self.blocks.values():
            each = float(part.block.estimate_size())
            try:
                total *= sum(each**length for length in range(part.min, part.max + 1))
            except OverflowError:
                return math.inf
        return total

    def unseen(self, seen: set[str], limit: int = 20_000) -> Iterator[Config]:
        """Every valid configuration whose key is not in `seen`, of a space no larger than `limit`.

        For the end of a small space, when random ones are nearly all known.
        """
        if self.size > limit:
            return
        for plain in config_values.grid(self.plain):
            for config in _sequences(plain, list(self.blocks.values())):
                if config_key(config) not in seen and self._is_allowed(config):
                    yield config


def as_space(space: "Space | ConfigurationSpace") -> Space:
    """A Space, made of a bare ConfigurationSpace if need be.

    Raises:
        ConfigError: it is neither. EmptySpace: it has no valid configuration.
    """
    if isinstance(space, Space):
        return space
    if isinstance(space, ConfigurationSpace):
        return Space(space)
    raise ConfigError(
        f"space must be a Space or a ConfigSpace.ConfigurationSpace, not {type(space).__name__}. "
        "Nothing was started."
    )


@dataclass(frozen=True)
class _Below:
    """The values whose names begin with a prefix."""

    values: Mapping[str, Any]
    prefix: str

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a value of any hyperparameter
        return self.values[self.prefix + name]


def _length(part: Blocks) -> Parameter:
    name = f"{part.name}.length"
    if part.min == part.max:
        return Constant(name, part.min)
    return Integer(name, (part.min, part.max), default=(part.min + part.max) // 2)


def _sequences(config: Values, parts: Sequence[Blocks]) -> Iterator[Values]:
    if not parts:
        yield config
        return
    part, *rest = parts
    sequences: list[list[Values]] = [[]]
    for length in range(part.max + 1):
        if length >= part.min:
            for sequence in sequences:
                yield from _sequences({**config, part.name: sequence}, rest)
        sequences = [
            [*begun, block] for begun in sequences for block in config_values.grid(part.block)
        ]
