"""What a campaign has found, from its trial database: trials, the best, tables for other tools.

Works while the campaign is running, and without Ray. Not here: changing anything.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from elastix.arguments import given, plain, require
from elastix.config import RunConfig
from elastix.errors import ConfigError, NotFound
from elastix.flat import flatten
from elastix.notebook import facts, table
from elastix.observe.catalogue import known
from elastix.observe.journal import is_file
from elastix.search.pareto import fronts, order
from elastix.search.trial import Config, Objectives, Trial, TrialState, check_kinds, seed_of
from elastix.search.trial_database import FILE, TrialDatabase, TrialRow, lock_of, readable, unbegun
from elastix.state import OF_MODEL, Ref, State
from elastix.store import Store

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from elastix.search.ensemble import Batch, Build, Ensemble
    from elastix.train.on_ray.run_settings import TrainFunction
    from elastix.train.on_ray.trainer import ElasticTrainer


_SHOWN = 10  # trials in a notebook
_KINDS_OF_FACTS = {"name": str, "searcher": str, "budget": Mapping, "began_s": int | float}


@dataclass(frozen=True, repr=False)
class Best:
    """A trial worth having.

    Attributes:
        trial: all that is known of it.
        values: of the objectives, in the user's sense.
        store: directory of the store that its model is in.
    """

    trial: Trial
    values: Mapping[str, float]
    store: str

    @property
    def config(self) -> Config:
        """What the train function was given."""
        return self.trial.config

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The last value of each metric."""
        return self.trial.metrics

    @property
    def ref(self) -> Ref | None:
        """Of its model; None if the train function prepared none."""
        return self.trial.ref

    def load(self) -> State:
        """Its model: `state.model` is what load_state_dict takes.

        Raises:
            NotFound: the trial left no model, or it was retired.
        """
        with Store(self.store, read_only=True) as store:
            return store.get(self._model())

    def model(self, build: Callable[[Config], "nn.Module"]) -> "nn.Module":
        """Its model, in evaluation mode; `build(config)` makes it as the train function does.

        Raises:
            StateError: `build` gives another model than the trial has left.
            NotFound: the trial left no model, or it was retired.
        """
        with Store(self.store, read_only=True) as store:
            return store.get(self._model(), OF_MODEL).load_into(build(deepcopy(self.config)))

    def _model(self) -> Ref:
        if self.ref is None:
            stopped = self.trial.state is TrialState.STOPPED
            why = "rungs stopped it" if stopped else "its train function did not call ctx.prepare"
            raise NotFound(
                f"trial {self.trial.number} left no model: {why}. Its configuration is in `config`."
            )
        return self.ref

    def trainer(
        self,
        train: "TrainFunction",
        config: Mapping[str, Any] | None = None,
        **options: Any,  # noqa: ANN401 - whatever ElasticTrainer takes
    ) -> "ElasticTrainer":
        """An ElasticTrainer of this trial's configuration that goes on from its model.

        `ctx.inherit` copies the model's tensors, and the run's States have it as their parent.

        Args:
            train: the train function; may be that of the campaign.
            config: what differs from the trial's configuration.
            options: as for ElasticTrainer. The store is the campaign's, whatever `run` says.

        Raises:
            NotFound: the trial left no model.
            ConfigError: see ElasticTrainer.
        """
        from elastix.search.model_sources import StoreDirectory, StoredModelSource
        from elastix.train.on_ray.trainer import (  # Ray is imported when it is needed
            ElasticTrainer,
        )

        store = str(Path(self.store).resolve())
        run = replace(given("run", options.pop("run", None), RunConfig), store=store)
        trainer = ElasticTrainer(
            train, config={**self.config, **plain("config", config)}, run=run, **options
        )
        opener = StoreDirectory(store, read_only=True)  # workers may be on several hosts
        return trainer.descending(StoredModelSource(opener, self._model()))

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:.6g}" for name, value in self.values.items())
        return f"trial {self.trial.number}: {shown}"

    def __repr__(self) -> str:
        return f"Best({self})"

    def _repr_html_(self) -> str:
        found = {**self.values, "model": self.ref and self.ref[:12], **_flat(self.config)}
        return facts(f"trial {self.trial.number}", found.items())


@dataclass(frozen=True)
class Stretch:
    """A part of a model's training, under one configuration.

    Attributes:
        trial: whose configuration it is.
        begin, end: in passes over the data, since the first of these began.
    """

    trial: int
    config: Config
    begin: float
    end: float


@dataclass(frozen=True, repr=False)
class Results(Sequence[Trial]):
    """The trials of a campaign, by number; those of `rerank` stand apart.

    Attributes:
        objectives: what is optimised.
        facts: name, searcher, budget and so on, as the campaign wrote them.
        trials: those that were searched; the Results themselves are a sequence of these.
        reranked: the best, run again without inheritance; `parent_number` says which.
        store: directory of the store that the models are in.
    """

    objectives: Objectives
    facts: Mapping[str, Any]
    trials: tuple[Trial, ...]
    reranked: tuple[Trial, ...]
    store: str

    @classmethod
    def of(cls, database: TrialDatabase, store: str) -> Self:
        """From an open trial database.

        Raises:
            NotFound: nothing is in it yet. Corrupt: it cannot be read.
        """
        facts = database.fact("campaign")
        if facts is None:
            raise NotFound(unbegun(database.directory))
        with readable(database.directory):
            check_kinds(facts, _KINDS_OF_FACTS)
            objectives = Objectives.of(facts["metrics"], facts["modes"])
        lines: list[TrialRow] = database.lines()
        return cls(
            objectives,
            facts,
            tuple(line.trial for line in lines if line.role == "search"),
            tuple(line.trial for line in lines if line.role == "rerank"),
            store,
        )

    @classmethod
    def open(cls, store: str | Path, name: str) -> Self:
        """Of a campaign in a store, whether it runs or not.

        Raises:
            ConfigError: no campaign can have that name.
            NotFound: there is no such campaign (names those that are there), or it was stopped
                before it began.
            Corrupt: its database cannot be read, or lacks trials that its journal knows to be over.
        """
        run = RunConfig(name=name, store=str(store))
        if not is_file(run.directory / FILE):
            if is_file(lock_of(run.directory)):
                raise NotFound(
                    f"{run.directory} has no {FILE}: the campaign's trial database was removed. "
                    "Restore it from a backup."
                )
            there = known(names(run.store), name, "campaigns")
            raise NotFound(f"there is no campaign {name!r} in {run.store}. {there}")
        with TrialDatabase(run.directory, read_only=True) as database:
            return cls.of(database, run.store)

    def __repr__(self) -> str:
        best = f", best {best}" if (best := next(iter(self.top(1)), None)) else ""
        return f"Results({self.facts.get('name')!r}, {len(self)} trials{best})"

    def _repr_html_(self) -> str:
        names = self.objectives.names
        columns = ("trial", *names, "epochs", "inherited", "parent", "config")
        rows = [(b.trial.number, *_cells(b)) for b in self.top(_SHOWN)]
        of = f"the best {len(rows)} of {len(self)} trials"
        return table(f"campaign {self.facts.get('name')}: {of}", columns, rows)

    def __len__(self) -> int:
        return len(self.trials)

    def __getitem__(self, place: Any) -> Any:  # noqa: ANN401 - an index or a slice, as a tuple
        return self.trials[place]

    def __iter__(self) -> Iterator[Trial]:
        return iter(self.trials)

    def top(self, count: int | None = None) -> list[Best]:
        """The best first; with several objectives by Pareto front. Reruns from scratch decide.

        If the best were run again from scratch, these runs come first, as they compare models on
        equal terms, and the others follow.

        Args:
            count: how many at most; None: all.
        """
        require(
            count is None or (type(count) is int and count >= 0),
            f"count={count!r}: a whole number >= 0, or None.",
        )
        return [self._best(trial) for trial in islice(self._ranked(), count)]

    def _ranked(self) -> Iterator[Trial]:
        """Those with a score; see `top`."""
        for group in (self.reranked, self.trials):
            scored = [trial for trial in group if trial.scored]
            yield from (scored[place] for place in order([trial.losses for trial in scored]))

    @property
    def stored(self) -> Iterator[Ref]:
        """The models that trials have left, that of the best trial first."""
        return (trial.ref for trial in self._ranked() if trial.ref is not None)

    def _best(self, trial: Trial) -> Best:
        values = self.objectives.values(trial.losses)
        return Best(trial, dict(zip(self.objectives.names, values, strict=True)), self.store)

    @property
    def best(self) -> Best:
        """The first of `top`. One that rungs stopped has a score, and may have no model.

        Raises:
            NotFound: no trial has a score.
        """
        ranked = self.top(1)
        if not ranked:
            name = self.facts.get("name")
            raise NotFound(
                f"no trial of {name!r} has a score yet. `elastix campaign show {name} --failed` "
                "lists those that failed."
            )
        return ranked[0]

    @property
    def front(self) -> list[Best]:
        """The trials that no other one beats in every objective."""
        scored = [trial for trial in self.trials if trial.scored]
        if not scored:
            return []
        return [self._best(scored[i]) for i in fronts([t.losses for t in scored])[0]]

    @cached_property  # it is asked of one trial after the other
    def _by_number(self) -> Mapping[int, Trial]:
        return {trial.number: trial for trial in self.trials}

    def schedule(self, number: int) -> list[Stretch]:
        """Under which configurations a trial's model was trained, the first one first.

        More than one, if it goes on in the place of another trial: see Population. A training that
        changes its hyperparameters at these epochs, with the seed of the first of these trials
        (see `seed_of`), makes the same model, unless that one began with inherited weights.

        Raises:
            NotFound: there is no such trial, or one that it goes on from was removed.
        """
        known = self._by_number
        if number not in known:
            raise NotFound(f"{self.facts.get('name')!r} has no trial {number!r}.")
        line = [known[number]]
        while line[0].suggestion.in_place and line[0].inherited:
            before = known.get(line[0].suggestion.parent_number or 0)
            if before is None:
                raise NotFound(
                    f"trial {line[0].number} goes on in the place of trial "
                    f"{line[0].suggestion.parent_number}, which is not in the database any more: "
                    f"nobody knows under which configuration trial {number} began."
                )
            line.insert(0, before)
        first = _lineage_before(line[0])
        begins = [0.0, *(_lineage_before(trial) - first for trial in line[1:])]
        ends = [*begins[1:], begins[-1] + line[-1].epochs]
        return [
            Stretch(trial.number, trial.config, begin, end)
            for trial, begin, end in zip(line, begins, ends, strict=True)
        ]

    def seed_of(self, number: int) -> int:
        """The seed of a trial's weights, as `RunConfig(seed=...)` takes it.

        The order of its samples has the campaign's seed, which is in `facts`.

        Raises:
            NotFound: there is no such trial.
        """
        if number not in self._by_number and number not in {t.number for t in self.reranked}:
            raise NotFound(f"{self.facts.get('name')!r} has no trial {number!r}.")
        with readable(Path(self.store)):
            return seed_of(self.facts, number)

    def ensemble(
        self,
        size: int = 5,
        *,
        build: "Build",
        validation: "Batch | Iterable[Batch]",
        among: int = 50,
    ) -> "Ensemble":
        """Put several classifiers together, weighted and calibrated by validation samples.

        It is stored as one model whose parents are its members, with the tag NAME/ensemble; its
        tensors are theirs and cost no further bytes. `Ensemble.load` gets it back. A model that
        gives the true class of some sample a probability of 0, or NaN, is left out with a warning.

        Args:
            size: how many different models at most.
            build: makes the model of a configuration, as the train function does.
            validation: samples, (N, ...), and their classes, whole numbers of shape (N,), as two
                tensors or in batches. Take none that models were trained on, and keep those apart
                that the ensemble is to be tested on.
            among: how many of the best trials are looked at.

        Returns:
            A module that gives log-probabilities, (N, classes), in evaluation mode; `ref` is the
            name of the stored ensemble.

        Raises:
            ConfigError: models do not give logits of shape (N, classes) for these samples.
            StateError: `build` gives other models than were stored.
            NotFound: no trial has left a model that can be used. Conflict: a StoreServer owns the
                store.
        """
        from elastix.search.ensemble import assemble  # a campaign's results are read without it

        require(
            type(among) is int and among >= 1,
            f"among={among!r}: a whole number >= 1. Nothing was stored.",
        )
        found = {best.ref: best.trial for best in reversed(self.top(among))}
        trials = [trial for ref, trial in reversed(found.items()) if ref is not None]
        name = str(self.facts["name"])
        with Store(self.store) as store:
            made = assemble(
                trials, store, size=size, build=build, validation=validation, campaign=name
            )
            store.tag(f"{name}/ensemble", str(made.ref))
        return made

    # -------------------------------------------------------------------------- for other tools

    def rows(self) -> list[dict[str, Any]]:
        """A mapping for each trial, with DeepHyper's column names.

        `p:` hyperparameters, `objective` (higher is better, as there; None if the trial has no
        score), `job_id`, `job_status`, and under `m:` the metrics and what else elastix knows. A
        metric with the name of one of these is in `m:reported:`.
        """
        roles = {"search": self.trials, "rerank": self.reranked}
        count = len(self.objectives.names)
        return [_row(trial, role, count) for role, trials in roles.items() for trial in trials]

    def dataframe(self) -> "pd.DataFrame":
        """`rows` as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def to_parquet(self, path: str | Path) -> Path:
        """Write `rows` as a Parquet table; hyperparameters of mixed types as JSON text.

        Raises:
            ConfigError: there is no such place to write to.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {name: _column([row.get(name) for row in rows]) for name in names}
        with _writable(path):
            pq.write_table(pa.table(columns), path)
        return Path(path)

    def to_optuna(self, path: str | Path) -> Path:
        """Write an Optuna journal; `optuna-dashboard PATH` shows it.

        Raises:
            ConfigError: Optuna is not installed, or there is no such place to write to.
            Conflict: the file is there already.
        """
        try:
            from elastix.search import optuna_journal
        except ImportError as error:
            raise ConfigError(
                f"{error}. Nothing was written. Install the extra: pip install 'elastix[optuna]'."
            ) from error
        with _writable(path):
            return optuna_journal.write(self, Path(path), [_flat(trial.config) for trial in self])


@contextmanager
def _writable(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(
            f"{path} cannot be written: {error}. Nothing was written. Name another file."
        ) from error


def _cells(best: Best) -> list[str]:
    trial = best.trial
    inherited = (trial.inherited or {}).get("share", 0.0)
    parent = trial.suggestion.parent_number
    config = ", ".join(f"{name}={value}" for name, value in _flat(trial.config).items())
    values = [f"{value:.6g}" for value in best.values.values()]
    shown = "-" if parent is None else str(parent)
    return [*values, f"{trial.epochs:g}", f"{inherited:.0%}", shown, config]


def _lineage_before(trial: Trial) -> float:
    """Passes over the data that what it inherited had seen."""
    return float((trial.inherited or {}).get("lineage_epochs", 0.0))


def names(store: str | Path) -> list[str]:
    """The campaigns in a store, the latest first."""
    found = [path for path in Path(store).glob(f"runs/*/{FILE}") if path.is_file()]
    return [p.parent.name for p in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)]


def _flat(config: Config) -> dict[str, Any]:
    return flatten(config, lists="blocks")


def _row(trial: Trial, role: str, objectives: int) -> dict[str, Any]:
    names = [f"objective_{i}" for i in range(objectives)] if objectives > 1 else ["objective"]
    scores = [-loss for loss in trial.losses] if trial.scored else [None] * objectives
    inherited = trial.inherited or {}
    known = {
        "m:timestamp_submit": trial.asked_s,
        "m:timestamp_start": trial.started_s,
        "m:timestamp_end": trial.finished_s,
        "m:epochs": trial.epochs,
        "m:lineage_epochs": trial.lineage_epochs,
        "m:inherited": float(inherited.get("share", 0.0)),
        "m:parent": trial.suggestion.parent_number,
        "m:in_place": trial.suggestion.in_place,
        "m:ref": trial.ref,
        "m:peak_bytes": trial.peak_bytes,
        "m:starved": trial.starved,
        "m:role": role,
    }
    metrics = {
        f"m:reported:{name}" if f"m:{name}" in known else f"m:{name}": value
        for name, value in trial.metrics.items()
    }
    return {
        **{f"p:{name}": value for name, value in _flat(trial.config).items()},
        **dict(zip(names, scores, strict=True)),
        "job_id": trial.number,
        "job_status": trial.state.value,
        **metrics,
        **known,
    }


def _column(values: list[Any]) -> Any:  # noqa: ANN401 - pyarrow has no types
    """A column of one type, or of JSON text where there is none that holds all values."""
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) <= 1 and not kinds & {list, dict, tuple}):
        with suppress(pa.ArrowException, OverflowError, UnicodeError):
            return pa.array(values)
    return [None if value is None else json.dumps(value) for value in values]
