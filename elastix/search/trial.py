"""What a searcher proposes, what becomes of it, and the protocol between the two.

Not here: how a proposal is made (searchers/), where it runs (executors/), whether it goes on
(rungs.py), or where results are kept (trial_database.py).

Invariant: inside elastix everything is minimised. `Objectives` turns what a train function
reported into losses at the door; searchers and rungs see losses and never a mode.
"""

import copy
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from elastix.errors import ConfigError, SearchError
from elastix.flat import flatten
from elastix.notebook import facts
from elastix.observe.event_text import last_error
from elastix.state import Ref

if TYPE_CHECKING:
    from ConfigSpace import ConfigurationSpace

    from elastix.search.space import Space

Config = Mapping[str, Any]
"""A configuration: plain JSON values, block sequences as lists of mappings."""

Mode = Literal["min", "max"]


def config_key(config: Config) -> str:
    """Equal for equal configurations, whatever the order of their keys."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def run_of(campaign: str, trial: int) -> str:
    """The name of a trial's run. One that is a group of workers has a journal under it."""
    return f"{campaign}-{trial:05d}"


def campaign_of(run: str) -> str | None:
    """The campaign that a run is named after as one of its trials; None if it is after none."""
    campaign, _, number = run.rpartition("-")
    if not (campaign and number.isascii() and number.isdigit()):
        return None
    return campaign if run_of(campaign, int(number)) == run else None


MIXED = "mixed"
"""How trials get seeds in a campaign that begins today; its facts have it as `seeds`."""


def seed_of(facts: Mapping[str, Any], trial: int) -> int:
    """The seed of a trial's weights: those of two campaigns with neighbouring seeds share none.

    Campaigns of earlier versions, which say nothing of their seeds, had the sum of the two. They
    keep to it: a trial that runs again or goes on must have the seed that it began with.
    """
    from elastix.data.random_numbers import seed_at  # needs torch, which listings do without

    seed = int(facts["seed"])
    return seed_at(seed, "trial", trial) if facts.get("seeds") == MIXED else (seed + trial) % 2**63


@dataclass(frozen=True)
class Suggestion:
    """A configuration to try, with the trial that it was made from.

    Attributes:
        config: plain JSON values.
        parent: the stored model that it derives from, if that trial has one.
        parent_number: number of the trial it was changed from; None for a fresh one. Known even
            where nothing is stored.
        in_place: it goes on where the parent stands, in data and schedules, and does not begin
            at the beginning.
    """

    config: Config
    parent: Ref | None = None
    parent_number: int | None = None
    in_place: bool = False

    @cached_property  # asked for half a dozen times for each trial
    def key(self) -> str:
        """What makes two suggestions the same one: the configuration, and where it goes on."""
        return config_key(self.config) + (f" on {self.parent}" if self.in_place else "")

    def to_json(self) -> dict[str, Any]:
        """Its fields, as plain values."""
        return {name: value for name, value in vars(self).items() if name != "key"}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """With a configuration of its own. A key that is known is shared: campaigns hold many."""
        made = replace(self, config=copy.deepcopy(self.config, memo))
        if "key" in vars(self):
            vars(made)["key"] = self.key
        return made


class TrialState(StrEnum):
    """Where a trial stands. The first three may still change."""

    WAITING = "waiting"  # asked for, not yet started (or to be started again)
    RUNNING = "running"
    PAUSED = "paused"  # at a rung, its State stored; may be promoted
    FINISHED = "finished"  # ran to its end
    STOPPED = "stopped"  # ended early by a rung: it has losses
    FAILED = "failed"  # raised, or reported no finite value of the metric
    REFUSED = "refused"  # the gate said that it cannot fit: it never ran

    @property
    def is_final(self) -> bool:
        """Nothing more will happen to it."""
        return self in _FINAL


_FINAL = (TrialState.FINISHED, TrialState.STOPPED, TrialState.FAILED, TrialState.REFUSED)


@dataclass(frozen=True)
class Trial:
    """One run of one suggestion. Frozen: what happens to it makes another Trial (`but`).

    Attributes:
        number: its only identity, counted from 0 in a campaign.
        suggestion: what runs.
        state: where it stands.
        losses: one value per objective, lower is better; empty until something was reported.
        results: every report of the train function, in order.
        metrics: the last value of each metric.
        ref: its stored model.
        epochs: passes over the data that this trial itself made.
        lineage_epochs: those, and those of every ancestor that its tensors come from.
        inherited: what was inherited, as `Inherited.to_json` gives it; None for nothing.
        asked_s, started_s, finished_s: seconds since the epoch; None until then.
        traceback: of a train function that raised; of a refused trial, why.
        predicted_bytes: what a step was estimated to take; 0: nothing was.
        peak_bytes: the most that its worker held while it ran, or its GPU; 0: unknown.
        base_bytes: what that held before.
        starved: how often it ran out of memory and was run again.
        memory_bytes: what was kept free for it in its next run, since it starved; 0: it did not.
    """

    number: int
    suggestion: Suggestion
    state: TrialState = TrialState.WAITING
    losses: tuple[float, ...] = ()
    results: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    ref: Ref | None = None
    epochs: float = 0.0
    lineage_epochs: float = 0.0
    inherited: Mapping[str, Any] | None = None
    asked_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None
    traceback: str | None = None
    predicted_bytes: int = 0
    peak_bytes: int = 0
    base_bytes: int = 0
    starved: int = 0
    memory_bytes: int = 0

    @property
    def config(self) -> Config:
        """What the train function gets."""
        return self.suggestion.config

    @property
    def scored(self) -> bool:
        """It did not fail, and every loss is a finite number: it may be compared with others."""
        finite = bool(self.losses) and all(map(math.isfinite, self.losses))
        return finite and self.state not in (TrialState.FAILED, TrialState.REFUSED)

    @property
    def reach(self) -> int | None:
        """How many reports its losses are of; None: of all, as it ran to its end."""
        return None if self.state is TrialState.FINISHED else len(self.results)

    def _repr_html_(self) -> str:
        found = {
            **self.metrics,
            "model": self.ref and self.ref[:12],
            "epochs": f"{self.epochs:g}",
            "made from trial": self.suggestion.parent_number,
            **flatten(self.config, lists="blocks"),
            "traceback": self.traceback and last_error(self.traceback),
        }
        return facts(f"trial {self.number}: {self.state}", found.items())

    def but(self, **changes: Any) -> Self:  # noqa: ANN401 - values of any field
        """This trial with some fields changed."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` is the inverse. Infinite and NaN losses survive."""
        return {  # not asdict, which copies deeply: this is done for every change of every trial
            **{name: getattr(self, name) for name in _FIELDS},  # vars() would stay in memory
            "suggestion": self.suggestion.to_json(),
            "losses": [repr(loss) for loss in self.losses],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_json, from what json.loads gives.

        Raises:
            KeyError, OverflowError, TypeError, ValueError: it is no trial.
        """
        check_kinds(values, _KINDS)
        check_kinds(values["suggestion"], _KINDS_OF_SUGGESTION)
        check_kinds(values.get("inherited") or {}, _KINDS_OF_INHERITED)
        for result in values["results"]:
            check_kinds({"result": result}, {"result": Mapping})
            [float(value) for value in result.values() if isinstance(value, int)]
        suggestion = Suggestion(**values["suggestion"])
        results = tuple(map(_with_common_names, values["results"]))
        return cls(
            **{
                **values,
                "suggestion": replace(suggestion, config=_with_common_names(suggestion.config)),
                "state": TrialState(values["state"]),
                "losses": tuple(map(float, values["losses"])),
                "results": results,
                "metrics": _as_last(values.get("metrics", {}), results),
            }
        )


_FIELDS = tuple(each.name for each in fields(Trial))


def _with_common_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values; a campaign has very many trials, and json.loads makes new names for each."""
    return {sys.intern(name): value for name, value in values.items()}


def _as_last(metrics: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last report, where the metrics are those of it; see scores.merged."""
    same = bool(results) and [*results[-1].items()] == [*metrics.items()]
    return results[-1] if same else metrics


_KINDS: Mapping[Any, Any] = {
    "number": int,
    "suggestion": Mapping,
    "losses": list,
    "results": list,
    "metrics": Mapping,
    "ref": str | None,
    "epochs": int | float,
    "lineage_epochs": int | float,
    "inherited": Mapping | None,
    "asked_s": int | float | None,
    "started_s": int | float | None,
    "finished_s": int | float | None,
    "traceback": str | None,
    "predicted_bytes": int,
    "peak_bytes": int,
    "base_bytes": int,
    "starved": int,
    "memory_bytes": int,
}
_KINDS_OF_SUGGESTION: Mapping[Any, Any] = {
    "config": Mapping,
    "parent": str | None,
    "parent_number": int | None,
    "in_place": bool,
}
_KINDS_OF_INHERITED: Mapping[Any, Any] = {
    "ref": str,
    "share": int | float,
    "lineage_epochs": int | float,
}


_LARGEST = 1e300  # beyond it, sums and differences of numbers are none


def check_kinds(values: Mapping[Any, Any], kinds: Mapping[Any, Any]) -> None:
    """Raise TypeError for a value that is there and of another kind; for numbers without an end."""
    for name, kind in kinds.items():
        if name not in values:
            continue
        value = values[name]
        number = isinstance(value, int | float)
        if not isinstance(value, kind) or (number and not -_LARGEST < value < _LARGEST):
            raise TypeError(f"{name} is {value!r:.60}")


@dataclass(frozen=True)
class Objectives:
    """What is optimised: names of metrics, and for each whether more is better.

    Attributes:
        names: metrics that the train function reports.
        modes: "min" or "max", one per name.
    """

    names: tuple[str, ...]
    modes: tuple[Mode, ...]

    @classmethod
    def of(cls, metric: str | Sequence[str], mode: str | Sequence[str] = "max") -> Self:
        """From one name or several, with one mode for all or one each.

        Raises:
            ConfigError: no name, a name twice, or a mode that is neither "min" nor "max".
        """
        wanted = [metric] if isinstance(metric, str) else metric
        names = tuple(wanted) if isinstance(wanted, list | tuple) else ()
        how = [mode] * len(names) if isinstance(mode, str) else mode
        modes = tuple(how) if isinstance(how, list | tuple) else ()
        known = [m for m in modes if m in ("min", "max")]
        texts = all(isinstance(name, str) and name for name in names)
        if not texts or not 0 < len(set(names)) == len(names) == len(known) == len(modes):
            raise ConfigError(
                f"metric={metric!r}, mode={mode!r}: there must be one metric or several different "
                'ones, and for each the mode "min" or "max". Nothing was started.'
            )
        return cls(names, tuple(known))

    def losses(self, metrics: Mapping[str, Any]) -> tuple[float, ...]:
        """What is minimised; NaN and infinities are passed on, `Trial.scored` tells them.

        Raises:
            SearchError: a metric is not among those reported, or is no number.
        """
        found = []
        for name, mode in zip(self.names, self.modes, strict=True):
            value = metrics.get(name)
            if value is None:
                what = f"{name}=None alone" if name in metrics else sorted(metrics) or "nothing"
                raise SearchError(
                    f"the train function never reported a number as {name!r}; it reported {what}. "
                    f"Call ctx.report({name}=...) in it, or name another metric."
                )
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SearchError(
                    f"the train function reported {name}={value!r:.60}, which is no number. Report "
                    "a number under that name, or name another metric."
                )
            found.append(float(value) if mode == "min" else -float(value))
        return tuple(found)

    def values(self, losses: Iterable[float]) -> tuple[float, ...]:
        """The inverse of `losses`, for people; nothing for a trial that has none."""
        known = tuple(losses)
        pairs = zip(known, self.modes if known else (), strict=True)
        return tuple(loss if mode == "min" else -loss for loss, mode in pairs)


@runtime_checkable
class ExpectsTrials(Protocol):
    """A searcher that goes by how many trials there will be."""

    def expect(self, trials: int | None) -> None:
        """Take that in, before `start`. None: nobody knows."""
        ...


@dataclass(frozen=True)
class Selection:
    """What becomes of paused trials.

    Attributes:
        on: numbers of those that go on.
        over: of those that are stopped.
        children: further trials.
    """

    on: Sequence[int] = ()
    over: Sequence[int] = ()
    children: Sequence[Suggestion] = ()


@runtime_checkable
class Selects(Protocol):
    """A searcher that is not asked: when all of its trials are paused or over, it selects.

    A loop writes what was selected down in one transaction with the searcher's state.
    """

    @property
    def interval(self) -> int:
        """After how many further reports a trial pauses."""
        ...

    def select(self, paused: Sequence[Trial], most: int) -> Selection:
        """Of paused trials, by number, those that go on, and new ones.

        Args:
            paused: each with the State that it stands at (`ref`).
            most: no more children than that.
        """
        ...


@runtime_checkable
class Searcher(Protocol):
    """Proposes. Not thread safe: one loop asks and tells. No clock, no Ray, no files of its own.

    `start` comes first and once. What was asked for and not told yet is *pending*: it is never
    proposed again, and a model of the space takes it into account. Trials may be told that were
    never asked for (an old campaign, a user's own points). A trial is told once it is final.

    The same seed with the same calls gives the same suggestions, in another process too.
    `state_dict` is JSON; a searcher of the same arguments that is given it after `start` goes on
    as this one would have, except where its class says what it does instead. Its pending points
    are part of it.

    One whose suggestions have parents says `proposes_parents = True`: a campaign's trials then
    inherit from these by default. One that says `proposes_parents = False` is refused where they
    are to inherit from parents. One that goes by the number of trials is an ExpectsTrials, one that
    decides which trials go on is a Selects.

    One that says `hears_of_paused = True` is also told of trials that have come to a rung: each has
    the state PAUSED, its losses at that rung and the State stored there, and `reach` says which it
    is. It is told again at each further rung and when it is final; the latest counts. Losses of
    trials that have come equally far can be compared, others cannot (pareto.furthest). One that
    says `hears_of_paused = False` once it is started for several objectives is refused where trials
    pause at rungs.
    """

    def start(
        self, space: "Space | ConfigurationSpace", *, objectives: int = 1, seed: int = 0
    ) -> None:
        """Take the space. How many losses a trial will have is `objectives`.

        Raises:
            EmptySpace: no configuration is valid. ConfigError: see the message.
        """
        ...

    def ask(self, n: int = 1) -> list[Suggestion]:
        """Up to `n` suggestions, all different, none ever proposed before.

        Fewer than `n` mean that the space has no further configuration; they stay fewer.
        """
        ...

    def tell(self, trials: Sequence[Trial]) -> None:
        """Learn from trials. One without finite losses counts as failed, whatever its state."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All it knows, as JSON values."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what another one of the same kind knew."""
        ...


def ask(searcher: Searcher, n: int) -> Sequence[Suggestion]:
    """What it proposes, up to `n`, looked at before anything is done with it.

    Raises:
        SearchError: it is not what a Searcher promises; has it.
    """
    asked: Any = searcher.ask(n)
    call = f"{type(searcher).__name__}.ask({n})"
    advice = "The campaign was stopped; all trials are in its database. See Searcher."
    if not isinstance(asked, list | tuple):
        raise SearchError(f"{call} gave {asked!r:.100}, and no list of Suggestions. {advice}")
    if len(asked) > n:
        raise SearchError(f"{call} gave {len(asked)} of them, more than were asked for. {advice}")
    for suggestion in asked:
        if not isinstance(suggestion, Suggestion):
            raise SearchError(f"{call} gave {suggestion!r:.100}, which is no Suggestion. {advice}")
        try:
            _ = suggestion.key
        except (TypeError, ValueError) as error:
            raise SearchError(
                f"{call} gave the configuration {suggestion.config!r:.100}, which is not of plain "
                f"JSON values: {error}. {advice}"
            ) from error
    return asked
