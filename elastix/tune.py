"""For people who use Ray Tune: `elastix.tune.Search` is a search_alg over any elastix searcher.

    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.loguniform(1e-4, 1e-1), "width": tune.choice([16, 32, 64])},
        tune_config=tune.TuneConfig(
            metric="accuracy", mode="max", num_samples=100, max_concurrent_trials=8,
            search_alg=elastix.tune.Search(),
        ),
    )

Give max_concurrent_trials: without it Tune lets a custom searcher have one pending trial at a
time. With `Search(store=...)` trials may inherit weights: see `inherit` and `leave`.

Not here: running a campaign's trials on Tune (search.executors.tune_trials).
"""

import json
import logging
import math
import socket
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import cloudpickle
from ConfigSpace import Categorical, ConfigurationSpace, Constant, Float, Integer
from ray.tune.search import Searcher as TuneSearcher
from ray.tune.search import sample
from torch import nn

from elastix.arguments import able, checked, single
from elastix.config import InheritConfig, InheritMode, InheritProvider, RunConfig
from elastix.errors import ConfigError, SearchError
from elastix.flat import flatten, nest
from elastix.search.config_values import choices, plain
from elastix.search.model_sources import InheritTerms, StoreDirectory, TrialModelSource
from elastix.search.space import Space, as_space
from elastix.search.trial import Objectives, Searcher, Selects, Trial, TrialState
from elastix.state import Ref, capture
from elastix.store import Store
from elastix.train.replica.model_source import TrainedModel

logger = logging.getLogger(__name__)

KEY = "elastix"
"""Key of a configuration under which its trial finds its model source, with `Search(store=...)`."""

_REF = "elastix_ref"
_SEPARATOR = "/"
_PLAIN = str | int | float | bool | None  # the constants that a space can hold


@checked
class Search(TuneSearcher):
    """Tune's search_alg over an elastix searcher.

    It learns from how trials end. Tune does not tell a trial that its scheduler stopped from one
    that came to its end: both count with their last score.

    Args:
        searcher: any but a Population; ScreenedEvolution by default. Tune does not say how many
            trials there will be: for fewer than a hundred give `ScreenedEvolution(population=...)`,
            a third of them or less.
        space: a ConfigSpace or Space, instead of Tune's param_space.
        metric, mode: as in TuneConfig, which need not repeat them. Neither has a default.
        seed: of the suggestions.
        store: directory of a lineage store, for trials that call `inherit` and `leave`. They
            inherit from trials of this Search, and of the one that it was restored from.
            All have to run on one host. On a second one it is refused: as in use by another
            machine, or as not there.
        mode_of_inheritance: "lcs" or "lp".
        provider: "parent" or "store". None: as in a Campaign, the parent with searchers that have
            parents, otherwise the store.

    Raises:
        ConfigError: something given here cannot work.
    """

    _in_steps = True
    """Quantised logarithmic domains are numbers of steps; in earlier versions they were values."""
    _in_values: tuple[ConfigurationSpace, dict[str, dict[Any, Any]]] | None = None
    """The space and the labels that these had; None: there are no such domains."""

    def __init__(
        self,
        searcher: Searcher | None = None,
        *,
        space: ConfigurationSpace | Space | None = None,
        metric: str | None = None,
        mode: str | None = None,
        seed: int = 0,
        store: str | Path | None = None,
        mode_of_inheritance: InheritMode = "lcs",
        provider: InheritProvider | None = None,
    ) -> None:
        super().__init__(metric=metric, mode=mode)
        if searcher is None:
            from elastix.search.searchers.screened import ScreenedEvolution

            searcher = ScreenedEvolution()
        searcher = able("searcher", searcher, Searcher)
        if isinstance(searcher, Selects):
            raise ConfigError(
                f"{type(searcher).__name__} decides which trials go on from whose State, and Tune "
                "asks its search_alg for configurations alone. Nothing was started. Take "
                "elastix.Campaign, or Tune's own scheduler PopulationBasedTraining without a "
                "search_alg."
            )
        self._elastix = searcher
        self._space: ConfigurationSpace | Space | None = None
        if space is not None:
            self._space = as_space(space)
        self._nested = False
        self._labelled: dict[str, dict[Any, Any]] = {}
        self._seed = RunConfig(seed=seed).seed
        self._store = None
        if store is not None:
            given: Any = store  # a RunConfig takes a Path as well
            self._store = str(Path(RunConfig(store=given).store).resolve())
        self._experiment = f"tune-{uuid4().hex[:12]}"
        has_parents = getattr(searcher, "proposes_parents", False)
        how = InheritConfig(mode=mode_of_inheritance, provider=provider)
        self._how: tuple[InheritMode, InheritProvider] = (
            how.mode,
            how.provider or ("parent" if has_parents else "store"),
        )
        self._live: dict[str, Trial] = {}
        self._asked = 0
        self._objectives: Objectives | None = None
        self._limited = False
        if isinstance(self._space, Space):
            self._check_key((*self._space.plain, *self._space.blocks))
        if space is not None and metric is not None and mode is not None:
            self._begin()

    def set_search_properties(
        self,
        metric: str | None,
        mode: str | None,
        config: Mapping[str, Any],
        **spec: Any,  # noqa: ANN401 - whatever Tune adds
    ) -> bool:
        """Take what the Tuner was given. Called by Tune, before the first suggestion.

        Raises:
            ConfigError: a param_space that cannot be searched; names the entry. Or a metric or
                mode that is not the one that Search was given, or a name that Search needs itself.
        """
        del spec
        for name, told, own in (("metric", metric, self._metric), ("mode", mode, self._mode)):
            if None not in (told, own) and told != own:
                raise ConfigError(
                    f"TuneConfig has {name}={told!r}, and elastix.tune.Search {name}={own!r}. "
                    "Nothing was started. Give it to one of them, or the same to both."
                )
        self._check_key(config)
        if self._objectives is not None:
            return not config
        self._metric, self._mode = metric or self._metric, mode or self._mode
        if self._space is None:
            values, labels = space_of(config), _labelled(config)
            self._space, steps = _by_steps(values, config)
            self._labelled = labels | steps
            self._in_values = (values, labels) if steps else None
            self._nested = True
        self._begin()
        return True

    def _check_key(self, names: Collection[Any]) -> None:
        """Refuse a hyperparameter in whose place trials would find their model source."""
        if self._store is not None and KEY in names:
            raise ConfigError(
                f"a hyperparameter is called {KEY!r}, under which trials of Search(store=...) have "
                "what `inherit` and `leave` need. Nothing was started. Give it another name."
            )

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Tune keeps the limit; here it is only noted that there is one."""
        del max_concurrent
        self._limited = True
        return False

    def _begin(self) -> None:
        if self._metric is None or self._mode is None or self._space is None:
            raise ConfigError(
                "elastix.tune.Search needs to know what to optimise. Nothing was started. Give "
                "metric and mode to TuneConfig, or to Search."
            )
        self._objectives = Objectives.of(self._metric, self._mode)
        names = self._objectives.names
        self._elastix.start(self._space, objectives=len(names), seed=self._seed)

    def suggest(self, trial_id: str) -> Any:  # noqa: ANN401 - a mapping, or Tune's FINISHED
        """The next configuration; Tune's FINISHED when the space has no other."""
        if self._objectives is None:
            raise ConfigError(
                "elastix.tune.Search was asked before it knew a space. Nothing was started. Give "
                "param_space to the Tuner, or space to Search."
            )
        if not self._limited and self._asked == 1:
            logger.warning(
                "max_concurrent_trials is not set: Tune lets a custom searcher have one pending "
                "trial at a time. Set it in TuneConfig."
            )
        if self._store is not None and self._asked == 0:
            with Store(self._store):
                pass  # it is there for trials, or says why it cannot be before one is started
        asked = self._elastix.ask(1)
        if not asked:
            return TuneSearcher.FINISHED
        trial = Trial(self._asked, asked[0], TrialState.RUNNING)
        self._asked += 1
        self._live[trial_id] = trial
        row = {
            name: self._labelled[name].get(value, value) if name in self._labelled else value
            for name, value in trial.config.items()
        }
        config = nest(row, _SEPARATOR) if self._nested else row
        if self._store is not None:
            mode, provider = self._how
            config[KEY] = {
                "number": trial.number,
                "parent": trial.suggestion.parent,
                "store": self._store,
                "campaign": self._experiment,
                "metrics": list(self._objectives.names),
                "modes": list(self._objectives.modes),
                "mode": mode,
                "provider": provider,
            }
        return config

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Keep the score: Tune ends a trial that HyperBand has paused without a word of it."""
        trial = self._live.get(trial_id)
        if trial is not None and self._objectives is not None:
            self._live[trial_id] = _having_reported(trial, self._objectives.names, result)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tell the searcher. A trial without a finite number for the metric failed."""
        trial = self._live.pop(trial_id, None)
        if trial is None or self._objectives is None:
            return
        trial = _having_reported(trial, self._objectives.names, result or {})
        losses: tuple[float, ...] = ()
        if not error:
            with suppress(SearchError, OverflowError):  # it is no number, or beyond all floats
                losses = self._objectives.losses(trial.metrics)
        failed = not losses or not all(map(math.isfinite, losses))
        self._elastix.tell(
            [
                trial.but(
                    state=TrialState.FAILED if failed else TrialState.FINISHED,
                    losses=() if failed else losses,
                    metrics={} if failed else trial.metrics,
                )
            ]
        )

    def save(self, checkpoint_path: str) -> None:
        """Write what the searcher knows, as JSON; Tune calls it now and then."""
        live = {trial_id: trial.to_json() for trial_id, trial in self._live.items()}
        state = {
            "searcher": self._elastix.state_dict(),
            "live": live,
            "asked": self._asked,
            "experiment": self._experiment,
            "begun": self._begun_with(),
            "in_steps": self._in_steps,
        }
        Path(checkpoint_path).write_text(json.dumps(state))

    def _begun_with(self) -> str | None:
        """What it was told before its first suggestion: choices may be anything, so pickled."""
        if self._objectives is None:
            return None
        known = (self._metric, self._mode, self._space, self._nested, self._labelled)
        return b64encode(cloudpickle.dumps(known)).decode()

    def restore(self, checkpoint_path: str) -> None:
        """Go on from `save`. Tuner.restore sets no properties before, unless it has a param_space.

        Raises:
            ConfigError: neither it nor an earlier version that saved this knows the space.
        """
        state = json.loads(Path(checkpoint_path).read_text())
        self._in_steps = state.get("in_steps", False)  # earlier versions say nothing of it
        if self._objectives is None:
            begun = state.get("begun")  # earlier versions have none
            if begun is None:
                raise ConfigError(
                    "elastix.tune.Search was to be restored before it knew a space. Nothing was "
                    "restored. Give param_space to Tuner.restore, or space, metric and mode to "
                    "Search."
                )
            known = cloudpickle.loads(b64decode(begun))
            self._metric, self._mode, self._space, self._nested, self._labelled = known
            self._mode = self._mode or "max"  # as an earlier version took it
            self._begin()
        elif not self._in_steps and self._in_values is not None:
            self._space, self._labelled = self._in_values  # what its trials were given
            self._begin()
        self._elastix.load_state_dict(state["searcher"])
        self._live = {key: Trial.from_json(value) for key, value in state["live"].items()}
        self._asked = state["asked"]
        self._experiment = state.get("experiment", "tune")  # as earlier versions called them all


def _having_reported(trial: Trial, names: tuple[str, ...], result: Mapping[str, Any]) -> Trial:
    """The trial with its latest scores and model. A result without them changes nothing."""
    told = {name: single(result[name]) for name in names if result.get(name) is not None}
    scores = {n: value if isinstance(value, _PLAIN) else str(value) for n, value in told.items()}
    ref = result.get(_REF)
    return trial.but(metrics={**trial.metrics, **scores}, ref=Ref(ref) if ref else trial.ref)


# ------------------------------------------------------------------------- inside of a trial


def _model_source(config: Mapping[str, Any]) -> TrialModelSource | None:
    given = config.get(KEY)
    if given is None:
        return None
    if not Path(given["store"]).is_dir():
        raise ConfigError(
            f"the store {given['store']} of elastix.tune.Search is not on {socket.gethostname()}, "
            "where this trial runs: its trials have to run on the host of the Tuner. Nothing was "
            "inherited, and nothing stored. Leave store= out, or take elastix.Campaign, whose "
            "trials reach the store from any host."
        )
    objectives = Objectives(tuple(given["metrics"]), tuple(given["modes"]))
    terms = InheritTerms(
        store=StoreDirectory(given["store"]),
        campaign=given.get("campaign", "tune"),
        objectives=objectives,
        mode=given["mode"],
        provider=given["provider"],
    )
    own = {name: _told(value) for name, value in config.items() if name != KEY}
    parent = Ref(given["parent"]) if given["parent"] else None
    return TrialModelSource(terms, given["number"], own, parent=parent)


def _told(value: Any) -> Any:  # noqa: ANN401 - whatever the user has
    """What the record of a model says of an entry: of what JSON cannot hold, its type."""
    if isinstance(value, Mapping):
        return {str(name): _told(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_told(inner) for inner in value]
    value = single(value)
    return value if isinstance(value, _PLAIN) else type(value).__name__


def _trial(config: Mapping[str, Any]) -> tuple[str, int]:
    return config[KEY].get("campaign", ""), config[KEY]["number"]


_inherited: dict[tuple[str, int], TrialModelSource] = {}


def inherit(model: nn.Module, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """In a Tune trial: copy an ancestor's tensors into `model`, before its optimizer is made.

    Args:
        model: as the trial builds it.
        config: as the trial was given it.

    Returns:
        What was inherited, as JSON values; None for nothing, or without `Search(store=...)`.

    Raises:
        ConfigError: the trial runs on another host than the Tuner.
        StoreError: the ancestor cannot be read.
    """
    model_source = _model_source(config)
    if model_source is None:
        return None
    _inherited.clear()  # one trial at a time in a process
    _inherited[_trial(config)] = model_source
    return model_source.inherit(model)


def leave(
    model: nn.Module, config: Mapping[str, Any], *, epochs: float = 1.0, **metrics: float
) -> dict[str, Any]:
    """In a Tune trial: store its model. Report what this returns, beside the metrics.

    Args:
        model: trained.
        config: as the trial was given it.
        epochs: passes over the data that it was trained for.
        metrics: as they are reported; the score is among them.

    Returns:
        What to report beside the metrics; empty without `Search(store=...)`.

    Raises:
        ConfigError: the trial runs on another host than the Tuner.
        StoreError: the model cannot be stored (Full: there is no room).
    """
    if config.get(KEY) is None:
        return {}
    model_source = _inherited.get(_trial(config)) or _model_source(config)
    if model_source is None:
        return {}
    metrics = {name: single(value) for name, value in metrics.items()}
    state = capture({"": model}, {})
    left = model_source.leave(TrainedModel(model, state, metrics, epochs, "final"))
    return {_REF: left.ref} if left is not None else {}


# ------------------------------------------------------------------------- Tune's spaces


def space_of(config: Mapping[str, Any]) -> ConfigurationSpace:
    """The ConfigSpace of a param_space; nested entries are joined by '/'.

    Constants that a space cannot hold (lists, functions, datasets) are not in it: Tune gives trials
    what it was given itself, with the suggestion on top. Choices that it cannot hold have labels.

    Raises:
        ConfigError: an entry that has no bounds or that only Tune can draw; names it.
    """
    _check_names(config)
    row = flatten(config, separator=_SEPARATOR)
    grid = f"{_SEPARATOR}grid_search"  # which Tune writes as a mapping
    parameters = [
        _named(name.removesuffix(grid), value)
        for name, value in row.items()
        if name.endswith(grid) or not _is_only_tunes(value)
    ]
    return ConfigurationSpace(name="tune", space=parameters)


def _labelled(config: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    """By entry, its choices by what the space has for them."""
    return {
        name: dict(zip(_labels(value), value.categories, strict=True))
        for name, value in flatten(config, separator=_SEPARATOR).items()
        if isinstance(value, sample.Categorical)
    }


def _by_steps(
    space: ConfigurationSpace, config: Mapping[str, Any]
) -> tuple[ConfigurationSpace, dict[str, dict[Any, Any]]]:
    """Quantised logarithmic domains as numbers of steps; by entry, Tune's values by these numbers.

    In a list of values all are equally likely, and nine of ten would lie in the last decade.
    """
    row = flatten(config, separator=_SEPARATOR)
    parts: list[Any] = []
    values: dict[str, dict[Any, Any]] = {}
    for name, part in space.items():
        sampler: Any = getattr(row[name], "sampler", None)
        listed = [plain(value) for value in choices(part) or ()]
        quantised = isinstance(sampler, sample.Quantized) and len(listed) > 1
        if quantised and isinstance(sampler.sampler, sample.LogUniform):
            first = round(listed[0] / sampler.q)
            values[name] = dict(enumerate(listed, first))
            part = Integer(name, (first, max(values[name])), log=True)
        parts.append(part)
    return ConfigurationSpace(name="tune", space=parts), values


def _labels(value: sample.Categorical) -> list[Any]:
    """What a space has for each choice: itself, or a label if no space holds it (lists, classes).

    Labels go by places: a Tuner that is restored has to find the same ones.
    """
    return [
        choice if isinstance(choice, _PLAIN) else f"choice {place}"
        for place, choice in enumerate(value.categories)
    ]


def _is_only_tunes(value: Any) -> bool:  # noqa: ANN401 - whatever the user has
    """Whether it is a constant that no space holds."""
    if isinstance(value, list | tuple):
        return not _has_a_domain(value)
    return not isinstance(single(value), sample.Domain | _PLAIN)


def _has_a_domain(value: Any) -> bool:  # noqa: ANN401 - whatever the user has
    if isinstance(value, Mapping):
        return "grid_search" in value or any(map(_has_a_domain, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_a_domain, value))
    return isinstance(value, sample.Domain)


def _check_names(config: Mapping[Any, Any]) -> None:
    """Refuse names that would come back as others."""
    for name, value in config.items():
        if not isinstance(name, str) or _SEPARATOR in name:
            raise ConfigError(
                f"param_space has the name {name!r}; names are text without {_SEPARATOR!r}, which "
                "joins those of nested entries. Nothing was started. Choose another name."
            )
        if isinstance(value, Mapping):
            _check_names(value)


def _named(name: str, value: Any) -> Any:  # noqa: ANN401 - a hyperparameter of ConfigSpace
    try:
        return _parameter(name, value)
    except ConfigError:
        raise
    except (ValueError, ZeroDivisionError) as error:  # ConfigSpace's, of a domain without a value
        raise ConfigError(
            f"param_space[{name!r}] is no domain that can be searched: {error.__cause__ or error}. "
            "Nothing was started."
        ) from error


def _parameter(name: str, value: Any) -> Any:  # noqa: ANN401 - a hyperparameter of ConfigSpace
    if isinstance(value, sample.Categorical):
        if _has_a_domain(list(value.categories)):
            raise ConfigError(
                f"param_space[{name!r}] has a domain among its choices. Nothing was started. Give "
                "each domain an entry of its own."
            )
        return Categorical(name, _labels(value))
    if not isinstance(value, sample.Domain):
        value = single(value)
        if not isinstance(value, _PLAIN):
            raise ConfigError(
                f"param_space[{name!r}] is a {type(value).__name__} with domains in it, or a "
                "grid_search; elastix searches tune.uniform, loguniform, quniform, randint, choice "
                "and their kin. Nothing was started. Use tune.choice in place of grid_search, and "
                "a mapping in place of a list."
            )
        return Constant(name, value)
    sampler = value.sampler
    step = sampler.q if isinstance(sampler, sample.Quantized) else None
    inner = sampler.sampler if isinstance(sampler, sample.Quantized) else sampler
    log = isinstance(inner, sample.LogUniform)
    known = isinstance(value, sample.Float | sample.Integer) and (
        log or isinstance(inner, sample.Uniform)
    )
    if not known:
        raise ConfigError(
            f"param_space[{name!r}] = {value!r} cannot be searched: only Tune can draw from it, or "
            "it has no bounds. Nothing was started. Use tune.uniform or tune.choice."
        )
    bounds: Any = value
    if step is not None:
        return _steps(name, bounds, float(step))
    if isinstance(value, sample.Integer):  # Tune's upper bound is not among the values
        first, last = int(value.lower), int(value.upper) - 1
        return Constant(name, first) if first == last else Integer(name, (first, last), log=log)
    low, high = float(bounds.lower), float(bounds.upper)
    return Constant(name, low) if low == high else Float(name, (low, high), log=log)


def _steps(name: str, value: Any, step: float) -> Any:  # noqa: ANN401 - Tune's, ConfigSpace's
    """A quantised domain: the multiples of its step within the bounds, in order.

    Tune refuses a Float whose bounds are none, so there the quotients are whole but for rounding.
    """
    whole = isinstance(value, sample.Integer)
    low, high = value.lower / step, value.upper / step
    first, last = (math.ceil(low), math.floor(high)) if whole else (round(low), round(high))
    if first > last:
        raise ConfigError(
            f"param_space[{name!r}] has no multiple of {step:g} from {value.lower} to "
            f"{value.upper}. Nothing was started. Widen the bounds."
        )
    if whole:
        return Categorical(name, [int(i * step) for i in range(first, last + 1)], ordered=True)
    values = [value.lower + i * step for i in range(last - first + 1)]
    return Categorical(name, [float(v) for v in values], ordered=True)
