"""The runs and campaigns of a store at a glance, live or over, from their journals alone.

Most lines of a journal are steps; they are skipped unread, so a run of a million steps is summed up
in about a second. Not here: the size of what is stored (verbs.runs), a run in full (progress).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastix.errors import Corrupt, NotFound
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
    WorkerLost,
)
from elastix.observe import journal, notes
from elastix.observe.lock import holder
from elastix.observe.reports import BestSoFar

JOURNAL = "journal.jsonl"
_READ = {
    cls.__name__
    for cls in (
        *(RunStarted, Reported, Resumed, RunEnded, WorkerLost),
        *(CampaignStarted, TrialEnded, CampaignEnded),
    )
} | {"StateStored", "StateDropped"}


@dataclass
class Summary:
    """One run or campaign.

    Attributes:
        kind: "run" or "campaign".
        state: "running", "finished", "failed", "interrupted"; "stopped" if its process is gone
            without a word; "damaged" if its journal cannot be read.
        steps: committed; of a campaign, trials that ended.
        metrics: the last value of each; of a campaign, of the best trial.
        best: of the metric that checkpoints go by; None for none.
        began_t, last_t: of the first and the latest event, seconds since 1970.
        losses: workers that were lost.
    """

    name: str
    kind: str = "run"
    state: str = "stopped"
    steps: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    best: tuple[str, float, int] | None = None
    began_t: float = 0.0
    last_t: float = 0.0
    losses: int = 0
    note: str = ""
    tags: tuple[str, ...] = ()
    message: str = ""


def names(store: Path) -> list[str]:
    """The runs and campaigns that have a journal in this store, by name."""
    return sorted(path.parent.name for path in store.glob(f"runs/*/{JOURNAL}"))


def summaries(store: Path) -> Iterator[Summary]:
    """Of all of them; a damaged one is listed as such."""
    for name in names(store):
        try:
            yield summary(store, name)
        except Corrupt as error:
            yield Summary(name=name, state="damaged", message=str(error))


def summary(store: Path, name: str) -> Summary:
    """Of one.

    Raises:
        NotFound: there is none of that name; names those that are there.
        Corrupt: its journal cannot be read.
    """
    directory = store / "runs" / name
    path = directory / JOURNAL
    if not path.is_file():
        there = names(store)
        more = f" and {len(there) - 8} more" if len(there) > 8 else ""
        known = ", ".join(there[:8]) + more if there else "none"
        raise NotFound(f"there is no run {name!r} in {store}; there are: {known}.")
    fold = _Fold(Summary(name))
    commit: bytes | None = None
    for kind, line in journal.lines(path):
        if kind in _READ:
            fold.add(journal.parse(line, path))
            commit = None if kind == "Resumed" else commit
        elif kind == StepCommitted.__name__:
            commit = line
        elif not kind:
            raise Corrupt(f"{path} has a line that is no event.")
    found = fold.done()
    if commit is not None:
        last = journal.parse(commit, path)
        found.last_t = max(found.last_t, last.t)
        found.steps = max(found.steps, getattr(last, "step", 0))
    if holder(journal.lock_of(path)) is not None:
        found.state = "running"
    written = notes.read(directory)
    found.note, found.tags = written.note, tuple(written.tags)
    return found


class _Fold:
    """Adds up what is read of one journal."""

    def __init__(self, summary: Summary) -> None:
        self._found = summary
        self._best = BestSoFar()
        self._cases: Mapping[type[Event], Callable[[Any], None]] = {
            RunStarted: self._start,
            CampaignStarted: self._start_campaign,
            Reported: self._report,
            Resumed: self._resume,
            RunEnded: self._end,
            CampaignEnded: self._end,
            WorkerLost: self._lose,
            TrialEnded: self._end_trial,
        }

    def add(self, event: Event) -> None:
        self._found.began_t = self._found.began_t or event.t
        self._found.last_t = max(self._found.last_t, event.t)
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

    def _report(self, event: Reported) -> None:
        self._found.metrics.update(event.metrics)
        self._found.steps = max(self._found.steps, event.step)

    def _resume(self, event: Resumed) -> None:
        self._found.steps = event.step

    def _end(self, event: RunEnded | CampaignEnded) -> None:
        self._found.state, self._found.message = event.outcome, event.message
        if isinstance(event, RunEnded):
            self._found.steps = event.step

    def _lose(self, event: WorkerLost) -> None:
        del event
        self._found.losses += 1

    def _end_trial(self, event: TrialEnded) -> None:
        if event.state == "paused":
            return
        self._found.steps += 1
        if event.best:
            self._found.metrics = dict(event.values)
