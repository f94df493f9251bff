"""What a run leaves, read from its journal and its store. Needs no Ray."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from elastix.data.audit import Audit, audit
from elastix.errors import NotFound
from elastix.events import Event, Resumed, RunStarted, StateDropped, StateStored
from elastix.notebook import facts
from elastix.observe import catalogue, journal, reported_metrics
from elastix.observe.progress import Progress, shown
from elastix.state import OF_MODEL, Ref, State
from elastix.store import Store

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run. `fit` returns it, and `Result.open` opens it again later.

    Attributes:
        ref: of the final State, or of the last stored one if the run is not finished; "" if none is
            stored.
        metrics: the last value of each metric that was reported.
        audit: how the samples were used and how often the replicas were compared, over the whole
            run, including restarts.
        worker_losses: workers lost since this `fit` began, or in the whole run if it was opened.
        directory: of the run, with its journal.
        store: where its States are stored, tagged `NAME/final`, `NAME/best`, `NAME/last`.
    """

    ref: Ref
    metrics: Mapping[str, Any]
    audit: Audit
    worker_losses: int
    directory: Path
    store: str = ""

    @classmethod
    def of(cls, directory: Path, losses: int | None = None) -> Self:
        """Of the run that has its journal in this directory; `losses` if not all of them count."""
        progress = Progress()
        states: dict[str, int] = {}

        def noted() -> Iterator[Event]:
            for event in journal.read(directory / "journal.jsonl"):
                progress.add(event)
                _take_state(states, event)
                yield event

        account = audit(noted())
        lost = len(progress.losses) if losses is None else losses
        ref = Ref(next(reversed(states), ""))
        return cls(ref, progress.metrics, account, lost, directory, str(directory.parents[1]))

    @classmethod
    def open(cls, store: str | Path, name: str) -> Self:
        """Of a run in a store, finished or not.

        Raises:
            ConfigError: no run can have that name. NotFound: there is no such run.
            Corrupt: its journal is not what was written. TooNew: a later elastix has written it.
        """
        return cls.of(catalogue.find(Path(store), name).parent.resolve())

    @property
    def name(self) -> str:
        """Of the run."""
        return self.directory.name

    @property
    def events(self) -> Iterator[Event]:
        """Everything that happened, from the journal."""
        return journal.read(self.directory / "journal.jsonl")

    @property
    def config(self) -> Mapping[str, Any]:
        """What the train function was given."""
        started = [event for event in self.events if isinstance(event, RunStarted)]
        return started[-1].config

    @property
    def history(self) -> "pd.DataFrame":
        """What was reported: a row for each step with a report, a column for each metric.

        The index is the step; `seconds` counts from when the run first began.
        """
        import pandas as pd  # takes a second

        rows = reported_metrics.history(self.events)
        columns = list(dict.fromkeys(["step", "seconds", *(name for row in rows for name in row)]))
        return pd.DataFrame(rows, columns=columns).set_index("step")

    @property
    def best(self) -> reported_metrics.BestValue:
        """The best value of the metric that checkpoints go by, its step and its State's ref.

        Raises:
            NotFound: `CheckpointConfig.best` named no metric, or none that was reported.
        """
        best = self._best()
        if best.value is not None:
            return best.value
        if best.metric is None:
            raise NotFound(
                f"run {self.name!r} has no best State: no metric was named. Give "
                "CheckpointConfig(best='accuracy'), or the name of another metric."
            )
        known = ", ".join(self.metrics) or "nothing"
        raise NotFound(
            f"run {self.name!r} has no best State: no finite number was ever reported as "
            f"best={best.metric!r}; reported: {known}."
        )

    def load(self) -> State:
        """The final State, mapped from disk.

        Raises:
            NotFound: none is stored yet, or it was retired since. Corrupt: names what is damaged.
        """
        with Store(self.store, read_only=True) as store:
            return store.get(self._stored())

    def model(self, build: Callable[[Any], nn.Module], *, best: bool = False) -> nn.Module:
        """The trained model, in evaluation mode.

        Args:
            build: makes the model of the run's config, as the train function does.
            best: take the best State and not the final one.

        Raises:
            StateError: `build` gives another model than was trained.
            NotFound: no State is stored yet, it was retired since, or there is no best one.
        """
        ref = self._stored(best=best)
        with Store(self.store, read_only=True) as store:
            return store.get(ref, OF_MODEL).load_into(build(self.config))

    def _stored(self, *, best: bool = False) -> Ref:
        if best and not self.best.ref:
            raise NotFound(
                f"no State of run {self.name!r} is stored for step {self.best.step}, at which "
                f"{self.best.metric!r} was best. load() gives the last one that is stored."
            )
        ref = Ref(self.best.ref) if best else self.ref
        if not ref:
            raise NotFound(
                f"run {self.name!r} has stored no State yet. It stores one at its end, or earlier "
                "with CheckpointConfig(every_steps=...)."
            )
        return ref

    def _best(self) -> reported_metrics.BestSoFar:
        best = reported_metrics.BestSoFar()
        for event in self.events:
            best.add(event)
        return best

    def __repr__(self) -> str:
        return f"Result({self.name!r}, {self.ref[:12]}, {shown(self.metrics) or 'no metrics'})"

    def _repr_html_(self) -> str:
        best = self._best().value
        state = f" (State {best.ref[:12]})" if best is not None and best.ref else ""
        return facts(
            f"run {self.name}",
            [
                ("metrics", shown(self.metrics) or None),
                ("best", best and f"{shown({best.metric: best.value})}, step {best.step}{state}"),
                ("state", self.ref[:12] or None),
                ("samples", self.audit),
                ("workers lost", self.worker_losses),
                ("store", self.store),
            ],
        )


def _take_state(states: dict[str, int], event: Event) -> None:
    """One more event of a run.

    Args:
        states: those that are stored and stand, with their steps; the newest is at the end.
        event: others than of States change nothing.
    """
    match event:
        case StateStored():
            states.pop(event.ref, None)
            states[event.ref] = event.step
        case StateDropped():
            states.pop(event.ref, None)
        case Resumed():
            for ref in [ref for ref, step in states.items() if step > event.step]:
                del states[ref]
            if event.ref:
                states.pop(event.ref, None)
                states[event.ref] = event.step
