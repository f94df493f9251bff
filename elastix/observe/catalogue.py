"""The runs and campaigns of a store at a glance, live or over, from their journals alone.

Most lines of a journal are steps; they are skipped unread, so a run of a million steps is summed up
in about a second. Not here: the size of what is stored (commands.runs), a run in full (progress).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastix.arguments import closest
from elastix.config import RunConfig, is_name
from elastix.errors import ConfigError, Corrupt, ElastixError, NotFound, StoreError, TooNew
from elastix.events import (
    CampaignEnded,
    CampaignStarted,
    Event,
    Reported,
    Resumed,
    RunEnded,
    RunStarted,
    StepCommitted,
    TrialEnded,
    TrialLost,
    WorkerLost,
    take_in,
)
from elastix.observe import journal, notes
from elastix.observe.best_trial import BestTrial
from elastix.observe.reported_metrics import BestSoFar
from elastix.observe.run_lock import holder

JOURNAL = "journal.jsonl"
_NAMED = 8  # of those that there are, where somebody asks for another
_READ = {
    cls.__name__
    for cls in (
        *(RunStarted, Reported, Resumed, RunEnded, WorkerLost),
        *(CampaignStarted, TrialLost, TrialEnded, CampaignEnded),
    )
} | {"StateStored", "StateDropped"}
_BEGIN = (RunStarted, CampaignStarted)


@dataclass
class Summary:
    """One run or campaign.

    Attributes:
        kind: "run" or "campaign".
        state: "running", "finished", "failed", "interrupted"; "stopped" if its process is gone
            without a word; "damaged" if its journal cannot be read; "too new" if a later version
            of elastix has written it.
        steps: committed; of a campaign, trials that ended, without those that its gate refused and
            controls from scratch.
        metrics: the last value of each; of a campaign, of the best trial.
        best: of the metric that checkpoints go by; None for none.
        began_t, last_t: of the first and the latest event, seconds since 1970.
        took_s: from the first to the last event of each process: between two of them nothing ran.
        losses: workers that were lost; of a campaign, how often a trial began again, as it had lost
            its worker or raised.
    """

    name: str
    kind: str = "run"
    state: str = "stopped"
    steps: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    best: tuple[str, float, int] | None = None
    began_t: float = 0.0
    last_t: float = 0.0
    took_s: float = 0.0
    losses: int = 0
    note: str = ""
    tags: tuple[str, ...] = ()
    message: str = ""

    @property
    def best_trial(self) -> Mapping[str, Any]:
        """The metrics, where they are a campaign's best; of several objectives none is that."""
        return self.metrics if self.kind == "campaign" and len(self.metrics) == 1 else {}


def names(store: Path) -> list[str]:
    """The runs and campaigns that have a journal in this store, by name."""
    return [path.parent.name for path in _journals(store) if _may_be(path)]


def _may_be(path: Path) -> bool:
    with suppress(StoreError):  # nobody may look there, which whoever reads it is told
        return journal.is_file(path)
    return True


def strangers(store: Path) -> list[str]:
    """Folders with a journal that no run can be named after: somebody else put them there."""
    found = {path.parent.name for path in store.glob(f"runs/[!.]*/{JOURNAL}")}
    return sorted(found - {path.parent.name for path in _journals(store)})


def _journals(store: Path) -> list[Path]:
    """Where they would be, by name: of a folder that may not be entered, too."""
    return sorted(path / JOURNAL for path in store.glob("runs/*") if is_name(path.name))


def find(store: Path, name: str) -> Path:
    """The journal of one.

    Raises:
        ConfigError: no run can have that name.
        NotFound: there is none of that name; names those that are there.
        StoreError: it cannot be told, as somebody may not look there.
    """
    if not is_name(name):
        raise ConfigError(
            "a run's name is 1 to 100 letters, digits, '.', '_' or '-', and no directory's path, "
            f"not {name!r}. Nothing was done. Give the name alone; --store says where it is."
        )
    run = RunConfig(name=name, store=str(store))
    path, store = run.directory / JOURNAL, Path(run.store)
    if not journal.is_file(path):
        if any(run.directory.glob("*")):
            raise NotFound(
                f"{run.directory} has no {JOURNAL}: {name!r} has not begun yet, or its journal was "
                "removed. Restore it from a backup."
            )
        raise NotFound(f"there is no run {name!r} in {store}. {known(names(store), name)}")
    return path


def known(there: Sequence[str], wanted: str, what: str = "runs") -> str:
    """What there is, for somebody who mistyped a name."""
    if not there:
        return f"It has no {what}: is it the right store?"
    more = f" and {len(there) - _NAMED} more" if len(there) > _NAMED else ""
    return f"{closest(wanted, there)}It has {', '.join(there[:_NAMED])}{more}."


def summaries(store: Path) -> Iterator[Summary]:
    """Of all of them; one that cannot be read is listed as such."""
    for path in _journals(store):
        try:
            if journal.is_file(path):
                yield _summed_up(path)
        except NotFound:
            continue  # it was removed just now
        except ElastixError as error:
            state = "too new" if isinstance(error, TooNew) else "damaged"
            yield Summary(path.parent.name, state=state, message=str(error))


def summary(store: Path, name: str) -> Summary:
    """Of one.

    Raises:
        ConfigError, NotFound: see `find`.
        Corrupt: its journal cannot be read. TooNew: a later version of elastix has written it.
    """
    return _summed_up(find(store, name))


def _summed_up(path: Path) -> Summary:
    fold = _Fold(Summary(path.parent.name))
    commit: bytes | None = None
    for kind, line in journal.lines(path):
        if kind in _READ:
            event = journal.parse(line, path)
            if commit is not None and isinstance(event, _BEGIN):  # the last of a killed process
                fold.add(journal.parse(commit, path))
            fold.add(event)
            commit = None if kind == "Resumed" else commit
        elif kind == StepCommitted.__name__:
            commit = line
        elif not kind:
            raise Corrupt(
                f"{path} has a line that is no event. Nothing was changed. Restore the file from a "
                "backup."
            )
    if commit is not None:
        fold.add(journal.parse(commit, path))
    found = fold.done()
    if holder(journal.lock_of(path)) is not None:
        found.state = "running"
    written = notes.read(path.parent)
    found.note, found.tags = written.note, tuple(written.tags)
    return found


class _Fold:
    """Adds up what is read of one journal."""

    def __init__(self, summary: Summary) -> None:
        self._found = summary
        self._best = BestSoFar()
        self._since = 0.0  # the process at work began
        self._before_s = 0.0
        self._best_trial = BestTrial()
        self._cases: Mapping[type[Event], Callable[[Any], None]] = {
            RunStarted: self._start,
            CampaignStarted: self._start_campaign,
            Reported: self._report,
            StepCommitted: self._commit,
            Resumed: self._resume,
            RunEnded: self._end,
            CampaignEnded: self._end,
            WorkerLost: self._lose,
            TrialLost: self._lose,
            TrialEnded: self._end_trial,
        }

    def add(self, event: Event) -> None:
        found = self._found
        found.began_t = found.began_t or event.t
        if isinstance(event, _BEGIN) or not self._since:
            self._before_s, self._since = found.took_s, event.t
        found.last_t = max(found.last_t, event.t)
        found.took_s = self._before_s + max(0.0, found.last_t - self._since)
        self._best.add(event)
        case = self._cases.get(type(event))
        if case is not None:
            case(event)

    def done(self) -> Summary:
        best = self._best.value
        if best is not None:
            self._found.best = (best.metric, best.value, best.step)
        return self._found

    def _start(self, event: RunStarted) -> None:
        del event
        self._found.state, self._found.message = "stopped", ""

    def _start_campaign(self, event: CampaignStarted) -> None:
        self._found.kind, self._found.state = "campaign", "stopped"
        self._found.steps = max(self._found.steps, event.known)
        self._best_trial.begin(event)

    def _report(self, event: Reported) -> None:
        take_in(self._found.metrics, event.metrics)
        self._found.steps = max(self._found.steps, event.step)

    def _commit(self, event: StepCommitted) -> None:
        self._found.steps = max(self._found.steps, event.step)

    def _resume(self, event: Resumed) -> None:
        self._found.steps = event.step

    def _end(self, event: RunEnded | CampaignEnded) -> None:
        self._found.state, self._found.message = event.outcome, event.message
        if isinstance(event, RunEnded):
            self._found.steps = event.step
        elif values := self._best_trial.values_of(event.best):
            self._found.metrics = dict(values)  # a control from scratch, which others have beaten

    def _lose(self, event: WorkerLost | TrialLost) -> None:
        self._found.losses += not (isinstance(event, TrialLost) and event.raised)

    def _end_trial(self, event: TrialEnded) -> None:
        final = event.state not in ("paused", "refused")
        self._found.steps += final and event.role == "search"
        self._best_trial.end(event)
        best = self._best_trial.event
        if best is not None:
            self._found.metrics = dict(best.values)


def refuse_folder_of(other: type[RunStarted | CampaignStarted], directory: Path) -> None:
    """Before a run or a campaign begins, or goes on: journal and tags would be those of both.

    Args:
        other: what the folder must not be of.
        directory: of that name.

    Raises:
        ConfigError: it is that of the other.
    """
    there, asked = ("run", "campaign") if other is RunStarted else ("campaign", "run")
    with suppress(NotFound, Corrupt):  # of what is damaged whoever goes on with it tells
        for kind, _ in journal.lines(directory / JOURNAL):
            if kind == other.__name__:
                raise ConfigError(
                    f"{directory.name!r} is a {there} of this store, and no {asked}. Nothing was "
                    "started. Choose another name, or remove it: `elastix runs rm`."
                )
            return
