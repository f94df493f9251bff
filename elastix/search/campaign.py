"""Campaign: one search, from the first suggestion to the best model, whatever happens between.

It puts the parts together: a trial database, a searcher, rungs, an executor, the store.

Not here: the loop that moves them (campaign_loop), and anything that Ray does (executors).

Invariant: `run()` with the same name and store continues: no final trial is lost or run twice,
pending ones are started again.
"""

import copy
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import cloudpickle
from blake3 import blake3
from ConfigSpace import ConfigurationSpace

from elastix.arguments import able, all_able, check_train, checked, given, of_kind, require
from elastix.config import (
    Budget,
    CheckpointConfig,
    FailureConfig,
    InheritConfig,
    RunConfig,
    ScalingConfig,
)
from elastix.errors import (
    ConfigError,
    Conflict,
    ElastixError,
    NotFound,
    SearchError,
    StoreError,
)
from elastix.events import CampaignEnded, CampaignStarted, Events, RunStarted
from elastix.interrupts import heeding
from elastix.observe.catalogue import JOURNAL, refuse_folder_of
from elastix.observe.excepthook import told, was_told
from elastix.observe.journal import Journal
from elastix.observe.loggers import Logger, LoggerThread
from elastix.observe.trials_console import TrialsConsole
from elastix.search.campaign_loop import Loop, LoopTerms
from elastix.search.executors import campaign_file
from elastix.search.executors.executor import Executor, TrainFunction, Work
from elastix.search.gate import Gate
from elastix.search.model_sources import (
    InheritTerms,
    StoreDirectory,
    StoreOpener,
    TrialModelSource,
    from_scratch,
)
from elastix.search.results import Results
from elastix.search.rungs import Rungs
from elastix.search.searchers.screened import ScreenedEvolution
from elastix.search.space import Space, as_space
from elastix.search.store_size import StoreSize
from elastix.search.trial import (
    MIXED,
    Config,
    ExpectsTrials,
    Objectives,
    Searcher,
    Selects,
    Trial,
    config_key,
    run_of,
    seed_of,
)
from elastix.search.trial_database import Role, TrialDatabase, readable
from elastix.search.trial_runs import refuse_named_after
from elastix.store import Store
from elastix.train.record.finished import mark
from elastix.train.record.loaded_script import refuse_while_loading
from elastix.train.record.provenance import versions
from elastix.train.record.uploaded_copy import warn_of_copy

logger = logging.getLogger(__name__)

_MAX_LOSSES = 3
_COMPARED = ("metrics", "modes")  # facts that may not change
_THE_SAME = ("searcher", "space")  # by which a searcher's state is worth something
_TOLD = {
    "space": ("space",),
    "searcher": ("searcher",),
    "rule of rungs": ("rungs",),
    "way of inheritance": ("inherit", "provider", "optimizer"),
}
"""What may differ when a campaign goes on, and the facts by which that is seen."""
_NAME = 90  # of its characters; the number of a trial follows


@contextmanager
def _measured(name: str, bus: Events) -> Iterator[None]:
    """Feed Ray's metrics endpoint, if the trials run on Ray and there is one."""
    loaded = sys.modules.get("ray")  # an executor that needs it has imported it
    if loaded is None or not loaded.is_initialized():
        yield
        return
    from elastix.observe.ray_metrics import Metrics  # needs Ray, which not every executor does

    metrics = Metrics(name)
    bus.subscribe(metrics.read)
    try:
        yield
    finally:
        metrics.close()


@checked
class Campaign:
    """Searches a space with a train function, inherits weights, and survives being killed.

    Args:
        train: a train function, as for ElasticTrainer; it calls `ctx.report` with the metric.
        space: a ConfigSpace, or a Space with Blocks.
        searcher: proposes configurations; ScreenedEvolution by default.
        metric: what is optimised; several metrics give a Pareto front. A trial's score is the last
            value that it reported.
        mode: whether the "max" or the "min" is best; one for all metrics, or one for each.
        budget: when the campaign ends.
        inherit: what a trial inherits from models that are already trained, and from which.
        run: name, store and seed. The same name and store continue a campaign, with the seed that
            it began with.
        rungs: Asha or Median: which trials are continued.
        rerank: train this many of the best again at the end, without inheritance; "scratch" means
            5.
        scaling: the resources of a trial; with several workers each trial is an elastic group.
        checkpoint: for trials that are elastic groups.
        failure: for trials that are elastic groups. For every trial `max_worker_losses` is how
            often it may lose its worker, 3 times by default; and a worker of the default executor
            counts as lost if it answers nothing for the longer of `hang_timeout_s` and
            `start_timeout_s`.
        retries: how often a trial that raised an exception is run again.
        executor: where trials run, if not on Ray workers of the campaign: `Local()` of
            elastix.search.executors.serial for this process, `Tune()` of
            elastix.search.executors.tune_trials for Ray Tune. Not together with `scaling` or
            `checkpoint`.
        loggers: TensorBoard, MLflow, WandB or your own, with a record of each trial; they read the
            campaign's events in this process.
        quiet: print nothing.
        enqueued: configurations to try first; see `enqueue`.
        gate: refuses configurations that cannot fit. The searcher learns from them; they are in the
            results as "refused" and do not count towards the budget.

    Raises:
        ConfigError: something given here cannot work. Nothing was started.
    """

    def __init__(
        self,
        train: TrainFunction,
        *,
        space: ConfigurationSpace | Space,
        searcher: Searcher | None = None,
        metric: str | Sequence[str],
        mode: str | Sequence[str] = "max",
        budget: Budget,
        inherit: InheritConfig | None = None,
        run: RunConfig | None = None,
        rungs: Rungs | None = None,
        rerank: Literal["scratch"] | int = 0,
        scaling: ScalingConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        failure: FailureConfig | None = None,
        retries: int = 0,
        executor: Executor | None = None,
        loggers: Sequence[Logger] = (),
        quiet: bool = False,
        enqueued: Sequence[Config] = (),
        gate: Gate | None = None,
    ) -> None:
        check_train(train, "the space, as a Constant")
        self.objectives = Objectives.of(metric, mode)
        again = 5 if isinstance(rerank, str) else rerank
        if again < 0 or retries < 0:
            raise ConfigError(
                f'rerank={rerank!r}, retries={retries!r}: rerank is "scratch" or a number of '
                "trials, retries a number >= 0. Nothing was started."
            )
        self._run = given("run", run, RunConfig)
        self.name = self._run.name
        require(
            len(self.name) <= _NAME,
            f"the name of a campaign has at most {_NAME} characters, as its trials have it in "
            f"theirs; {self.name!r} has {len(self.name)}. Nothing was started.",
        )
        self._train = train
        self._space = space
        self._checked_space = as_space(space)  # or says what is wrong with it
        self._searcher = (
            ScreenedEvolution() if searcher is None else able("searcher", searcher, Searcher)
        )
        self._budget = of_kind("budget", budget, Budget)
        self._inherit = _settled(given("inherit", inherit, InheritConfig), self._searcher)
        self._rungs = None if rungs is None else able("rungs", rungs, Rungs)
        if isinstance(self._searcher, Selects):
            _check_selects(self._searcher, self._inherit, self._rungs)
        self._rerank = again
        self._scaling = given("scaling", scaling, ScalingConfig)
        self._checkpoint = given("checkpoint", checkpoint, CheckpointConfig)
        self._failure = given("failure", failure, FailureConfig)
        self._retries = retries
        self._executor = None if executor is None else able("executor", executor, Executor)
        require(
            executor is None or (scaling is None and checkpoint is None),
            "scaling and checkpoint are of the workers that the campaign starts, and an executor "
            "has its own. Nothing was started. Give them to the executor, as Tune(scaling=...), or "
            "leave executor out.",
        )
        self._loggers: tuple[Logger, ...] = all_able("loggers", loggers, Logger)
        self._quiet = quiet
        self._gate = None if gate is None else of_kind("gate", gate, Gate)
        self._enqueued: list[Config] = []
        require(
            isinstance(enqueued, list | tuple),
            f"enqueued must be a list of configurations, not {enqueued!r}. Nothing was started.",
        )
        self.enqueue(*enqueued)

    def enqueue(self, *configs: Config) -> None:
        """Try these before the searcher is asked, in this order: what is known to be good.

        They count as trials of the budget, and the searcher learns from them. One that the
        campaign has tried already is left out, so a script that enqueues the same again goes on.

        Args:
            configs: a name with a value for each active hyperparameter, and for each `Blocks` a
                list of such mappings.

        Raises:
            ConfigError: one is not of the space. None of them was enqueued.
        """
        checked = []
        for config in configs:
            try:
                checked.append(self._checked_space.check(config))
            except ConfigError as error:
                raise ConfigError(f"{error} Nothing was enqueued.") from error
        self._enqueued += checked

    # ------------------------------------------------------------------ running

    def run(self) -> Results:
        """Search until the budget is spent. Blocks; shows progress.

        Returns:
            What was found, over all runs of this campaign.

        Raises:
            EmptySpace, ConfigError: before anything is started.
            NeverReported: the first trial ended without a number for the metric.
            EveryTrialFailed: all trials failed, or the first five; has the first traceback.
            OtherCode: nodes have other elastix code than this process. No trial has failed of it.
            Conflict: another process runs this campaign.
            Full, StoreError: the store cannot be written; what is in it stays.
            KeyboardInterrupt: Ctrl-C; calling `run()` again goes on.
        """
        refuse_while_loading("run()")
        try:
            return self._run_here()
        except KeyboardInterrupt as interrupt:
            if not was_told(interrupt):
                TrialsConsole(self.name, self._run.directory, None, quiet=self._quiet).interrupted()
            raise told(interrupt) from None

    def _run_here(self) -> Results:
        if self._gate is not None:
            self._gate.check(self._checked_space.get_default_configuration())
        searcher = self._begun(self._run.seed)
        directory = self._run.directory
        refuse_folder_of(RunStarted, directory)
        with TrialDatabase(directory) as database:
            if self._scaling.max_workers > 1 and not database.count():
                refuse_named_after(Path(self._run.store), self.name)
            facts, same = self._introduce(database)
            if facts["seed"] != self._run.seed:
                searcher = self._begun(facts["seed"])
            warn_of_copy(self._run.store)
            with Store(self._run.store) as store:  # or says why not before anything is started
                if not database.count():
                    self._warn_of_namesake(store)
            executor = self._executor or self._pool()
            recipe = campaign_file.pickled(self)
            try:
                executor.open(self._train)
                campaign_file.keep(recipe, directory)
                del recipe
                return self._carry_out(database, searcher, executor, facts, same)
            finally:
                executor.close()

    def _warn_of_namesake(self, store: Store) -> None:
        """Models that are found by the campaign's name may be of one whose folder was removed."""
        if self._inherit.mode == "none" or self._inherit.provider != "store":
            return
        left = len(store.log(where={"campaign": self.name}))
        if left:
            logger.warning(
                "the store has %d models of an earlier campaign %r, whose trials are gone, and "
                "those of this one inherit from them too. Choose another name to begin without.",
                *(left, self.name),
            )

    def _begun(self, seed: int) -> Searcher:
        """The searcher, started and not told of anything yet."""
        searcher = copy.deepcopy(self._searcher)
        if isinstance(searcher, Selects):
            self._check_first(searcher)
        if isinstance(searcher, ExpectsTrials):
            searcher.expect(self._budget.most_trials)
        searcher.start(self._space, objectives=len(self.objectives.names), seed=seed)
        _check_hears(searcher, self._rungs, self.objectives)
        return searcher

    def _check_first(self, searcher: Selects) -> None:
        """Refuse what is enqueued beyond the first members: only these are no children."""
        members = int(getattr(searcher, "members", sys.maxsize))
        wanted = len({config_key(config) for config in self._enqueued})
        require(
            wanted <= members,
            f"{wanted} configurations are enqueued, and a {type(searcher).__name__} begins with "
            f"{members} members, whose children come after them: the others would never be tried. "
            "Nothing was started. Enqueue fewer, or give more members.",
        )

    def _carry_out(
        self,
        database: TrialDatabase,
        searcher: Searcher,
        executor: Executor,
        facts: Mapping[str, Any],
        same: tuple[bool, bool],
    ) -> Results:
        directory = self._run.directory
        opener = executor.reach(str(Path(self._run.store).resolve()))
        bus = Events()
        console = TrialsConsole(self.name, directory, self._budget.trials, quiet=self._quiet)
        with (
            Journal(directory / JOURNAL) as journal,
            _measured(self.name, bus),
            self._look_into(opener) as store,
            closing(LoggerThread(self._loggers)) as feed,
        ):
            bus.subscribe(journal.append)
            if not self._quiet:  # what it would print of it takes memory for each trial
                bus.subscribe(console.show)
            bus.subscribe(feed.show)
            store_size = StoreSize(store, bus.emit)
            bus.subscribe(store_size.read)
            loop = Loop(
                LoopTerms(
                    objectives=self.objectives,
                    budget=self._budget,
                    enqueued=self._enqueued,
                    max_losses=self._losses_allowed(),
                    retries=self._retries,
                    rerank=self._rerank,
                ),
                database,
                searcher,
                copy.deepcopy(self._rungs),
                executor,
                self._work_maker(opener, facts),
                bus.emit,
                gate=copy.deepcopy(self._gate),
            )
            known = loop.restore(*same, {"campaign": facts})
            bus.emit(self._started(known))
            outcome, message = "interrupted", "calling run() again goes on"
            try:
                loop.run()
                outcome, message = "finished", ""
            except KeyboardInterrupt as interrupt:
                told(interrupt)
                raise
            except ElastixError as error:
                outcome, message = "failed", str(error)
                raise
            finally:
                del loop  # or all trials would be in memory twice
                results = Results.of(database, self._run.store)
                self._tidy(opener, results, database)
                store_size.measure()
                bus.emit(_over(results, outcome, message))
        return results

    def _look_into(self, opener: StoreOpener) -> Store:
        """The store, to read from it: nobody is kept from owning it afterwards."""
        if isinstance(opener, StoreDirectory):
            return Store(self._run.store, read_only=True)
        return opener.open()

    def _tidy(self, opener: StoreOpener, results: Results, database: TrialDatabase) -> None:
        """Name the best model, and let go of States that trials have gone beyond."""
        try:
            with (
                Store(self._run.store)
                if isinstance(opener, StoreDirectory)
                else opener.open() as store
            ):
                for ref in results.stored:
                    with suppress(NotFound):  # somebody has retired it
                        store.tag(f"{self.name}/best", ref)  # first: what is tagged stays
                        break
                needed = _ancestors(results.trials)
                gone = [ref for ref in database.superseded() if ref not in needed]
                for ref in gone:
                    with suppress(NotFound, Conflict):
                        store.retire(ref)
                database.forget_superseded(gone)
        except StoreError as error:  # full, or gone: the results matter more
            logger.warning("store not tidied campaign=%s error=%s", self.name, error)

    def _losses_allowed(self) -> int:
        allowed = self._failure.max_worker_losses
        return _MAX_LOSSES if allowed is None else allowed

    def _pool(self) -> Executor:
        with heeding():
            from elastix.search.executors.pool import Pool  # Ray is imported when it is needed

        return Pool(
            scaling=self._scaling,
            parallel=self._budget.parallel,
            checkpoint=self._checkpoint,
            failure=self._failure,
            store=self._run.store,
        )

    def _work_maker(
        self, opener: StoreOpener, facts: Mapping[str, Any]
    ) -> Callable[[Trial, Role, int | None], Work]:
        terms = InheritTerms(
            store=opener,
            campaign=self.name,
            objectives=self.objectives,
            mode=self._inherit.mode,
            provider=self._inherit.provider or "store",
            optimizer=bool(self._inherit.optimizer),
        )
        plain = from_scratch(terms)

        def make(trial: Trial, role: Role, rung: int | None) -> Work:
            model_source = TrialModelSource(
                plain if role == "rerank" else terms,
                trial.number,
                trial.config,
                parent=trial.suggestion.parent,
                in_place=trial.suggestion.in_place,
                paused=trial.ref,
                inherited=trial.inherited,
                asked_s=trial.asked_s,
            )
            return Work(
                number=trial.number,
                name=run_of(self.name, trial.number),
                config=trial.config,
                seed=seed_of(facts, trial.number),
                order_seed=facts["seed"],
                model_source=model_source,
                until_reports=rung,
                memory_bytes=trial.memory_bytes,
                predicted_bytes=trial.predicted_bytes,
            )

        return make

    # ------------------------------------------------------------------ what the database says

    def _introduce(self, database: TrialDatabase) -> tuple[Mapping[str, Any], tuple[bool, bool]]:
        """What this campaign is; whether searcher and space, and rungs, are as before.

        Raises:
            ConfigError: the campaign of that name optimises something else.
        """
        facts = {
            "name": self.name,
            "metrics": list(self.objectives.names),
            "modes": list(self.objectives.modes),
            "searcher": type(self._searcher).__name__,
            "space": _fingerprint(self._space),
            "rungs": _kind(self._rungs),
            "code": _code(self._train),
            "inherit": self._inherit.mode,
            "provider": self._inherit.provider,
            "optimizer": self._inherit.optimizer,
            "budget": self._budget.to_dict(),
            "seed": self._run.seed,
            "seeds": MIXED,
            "began_s": time.time(),
        }
        before = database.fact("campaign")
        if before is not None:
            with readable(database.directory):
                known = {key: before[key] for key in (*_COMPARED, *_THE_SAME, "began_s")}
            for key in _COMPARED:
                if known[key] != facts[key]:
                    raise ConfigError(
                        f"the campaign {self.name!r} has {key} {known[key]}, and now {facts[key]} "
                        "is asked for: its scores cannot be compared. Nothing was started. Choose "
                        "another name."
                    )
            facts["began_s"] = known["began_s"]
            if database.count():  # without a trial it has not begun: the seed may be mended
                with readable(database.directory):
                    facts["seed"] = int(before.get("seed", facts["seed"]))
                facts["seeds"] = before.get("seeds")
            facts["code"] = facts["code"] or before.get("code", "")
        if before is None:
            database.commit([], {"campaign": facts})
            return facts, (True, True)
        if facts["code"] and before.get("code", "") not in ("", facts["code"]) and database.count():
            logger.warning(
                "campaign %r goes on with another train function than its trials were run with, or "
                "one that holds other values or whose modules have changed, and compares their "
                "scores with those of new ones. Choose another name if they mean something else.",
                self.name,
            )
        nothing = before.get("inherit") == facts["inherit"] == "none"
        changed = {key for key in facts if key in before and before[key] != facts[key]}
        changed -= {"provider", "optimizer"} if nothing else set()
        others = [what for what, keys in _TOLD.items() if changed.intersection(keys)]
        if others and database.count():
            logger.warning(
                "campaign %r goes on with another %s than before. Trials of before stay in its "
                "results, and their scores are compared with those of new ones. Choose another "
                "name if that is not what you want.",
                *(self.name, " and another ".join(others)),
            )
        if facts["seed"] != self._run.seed:
            logger.warning(
                "campaign %r goes on with seed %s, with which it began, and not with %s: all its "
                "trials have their samples in one order.",
                *(self.name, facts["seed"], self._run.seed),
            )
        begun = bool(database.count())  # else their states, if any, may be of another seed
        same = begun and all(before[key] == facts[key] for key in _THE_SAME)
        return facts, (same, begun and before.get("rungs") == facts["rungs"])

    def _started(self, known: int) -> CampaignStarted:
        return CampaignStarted(
            name=self.name,
            objectives=dict(zip(self.objectives.names, self.objectives.modes, strict=True)),
            budget=self._budget.to_dict(),
            searcher=type(self._searcher).__name__,
            inherit=_in_words(self._inherit),
            known=known,
            versions=versions(),
        )

    # ------------------------------------------------------------------ for `campaign resume`

    def again(self, *, budget: Budget, store: str, quiet: bool) -> Self:
        """The same campaign with another budget, in a store that may have moved.

        Raises:
            ConfigError: an executor of its own runs the trials, and another `budget.parallel` is
                given.
        """
        known = (None, self._budget.parallel)
        if self._executor is not None and budget.parallel not in known:
            raise ConfigError(
                f"parallel={budget.parallel}, and campaign {self.name!r} has an executor of its "
                f"own ({type(self._executor).__name__}), which knows how many trials it runs at "
                "once. Nothing was started. Leave it out, or change the executor in the "
                "campaign's script."
            )
        run = replace(self._run, store=store)
        return type(self)(**{**self._arguments(), "budget": budget, "run": run, "quiet": quiet})

    @property
    def budget(self) -> Budget:
        """When it has done enough."""
        return self._budget

    def _arguments(self) -> dict[str, Any]:
        """Of the call that makes a campaign like this one."""
        return {
            "train": self._train,
            "space": self._space,
            "searcher": self._searcher,
            "metric": self.objectives.names,
            "mode": self.objectives.modes,
            "budget": self._budget,
            "inherit": self._inherit,
            "run": self._run,
            "rungs": self._rungs,
            "rerank": self._rerank,
            "scaling": None if self._executor is not None else self._scaling,
            "checkpoint": None if self._executor is not None else self._checkpoint,
            "failure": self._failure,
            "retries": self._retries,
            "executor": self._executor,
            "loggers": self._loggers,
            "quiet": self._quiet,
            "enqueued": tuple(self._enqueued),
            "gate": self._gate,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """As that call, so that a file of it depends on what users write and on nothing within."""
        return partial(type(self), **self._arguments()), ()

    def __setstate__(self, state: object) -> None:
        """Nothing of what `__reduce__` gives comes here; older files do.

        Raises:
            SearchError: always.
        """
        raise SearchError("an earlier version of elastix kept it, in a form that is not read now")


def _settled(inherit: InheritConfig, searcher: Searcher) -> InheritConfig:
    """With what it leaves open decided, by what the searcher proposes."""
    has_parents = getattr(searcher, "proposes_parents", None)
    require(
        has_parents is not False or inherit.provider != "parent" or inherit.mode == "none",
        f"inherit={inherit!r} with {type(searcher).__name__}, which makes no configuration from "
        'another: nothing would be inherited. Nothing was started. Give provider="store", or take '
        "a searcher with parents, such as elastix.Evolution().",
    )
    provider = inherit.provider or ("parent" if has_parents else "store")
    optimizer = provider == "parent" if inherit.optimizer is None else inherit.optimizer
    optimizer = optimizer and inherit.mode != "none"
    return InheritConfig(mode=inherit.mode, provider=provider, optimizer=optimizer)


def _check_selects(searcher: Searcher, inherit: InheritConfig, rungs: Rungs | None) -> None:
    name = type(searcher).__name__
    require(
        rungs is None,
        f"rungs={rungs!r} with {name}: both decide which trials go on. Nothing was started. Leave "
        "rungs out, or take another searcher.",
    )
    require(
        inherit.mode != "none" and inherit.provider == "parent",
        f"inherit={inherit!r} with {name}, whose trials go on from the State of their parent. "
        'Nothing was started. Leave inherit out, or give mode="lcs" or "lp" and provider="parent".',
    )


def _check_hears(searcher: Searcher, rungs: Rungs | None, objectives: Objectives) -> None:
    """Started: some hear of rungs with one objective only."""
    pauses = bool(getattr(rungs, "levels", ())) and len(objectives.names) > 1
    require(
        not pauses or getattr(searcher, "hears_of_paused", None) is not False,
        f"rungs={rungs!r} with {type(searcher).__name__} and {len(objectives.names)} objectives: "
        "it cannot be told of trials that are paused, and would take them all for bad ones. "
        "Nothing was started. Take elastix.Evolution(), ScreenedEvolution() or DeepHyper(), or "
        "leave rungs out.",
    )


def _in_words(inherit: InheritConfig) -> str:
    return "none" if inherit.mode == "none" else f"{inherit.mode} ({inherit.provider})"


def _ancestors(trials: Sequence[Trial]) -> set[str]:
    """Of trials that may go on, the States that they inherit from."""
    going = [trial for trial in trials if not trial.state.is_final]
    return {
        ref
        for trial in going
        for ref in (trial.suggestion.parent, (trial.inherited or {}).get("ref"))
        if ref
    }


def _over(results: Results, outcome: str, message: str) -> CampaignEnded:
    best = results.top(1)
    return CampaignEnded(
        outcome=outcome,
        trials=sum(trial.finished_s is not None for trial in results.trials),
        best=best[0].trial.number if best else -1,
        message=message,
    )


def _kind(rungs: Rungs | None) -> str:
    """Equal for equal rules: their state is only worth something under the same one."""
    known = vars(rungs) if hasattr(rungs, "__dict__") else {}
    given = sorted(f"{k}={v!r}" for k, v in known.items() if isinstance(v, str | int | float))
    return f"{type(rungs).__name__}({', '.join(given)})"


def _code(train: TrainFunction) -> str:
    """Equal for equal train functions; "" for one that cannot be pickled."""
    try:
        return mark(cloudpickle.dumps(train))
    except Exception:  # noqa: BLE001 - whatever user code raises there: it is for a warning alone
        return ""


def _fingerprint(space: ConfigurationSpace | Space) -> str:
    """Equal for equal spaces: a searcher's state is only worth something in its own space."""
    return blake3(repr(space).encode()).hexdigest()[:16]
