"""The pages of a store: its runs and campaigns, each of them, its models, what differs between two.

The same pages as `elastix report` writes, made anew when they are asked for. Read-only. Not here:
how a browser gets them (serving.py).
"""

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from rich.filesize import decimal

from elastix.config import RunConfig
from elastix.errors import NotFound
from elastix.observe import catalogue
from elastix.observe.progress import duration, number, shown
from elastix.report import report_page
from elastix.report.compose import date
from elastix.report.page import Cell, Page, Section, Table
from elastix.search.trial_database import FILE
from elastix.state import Ref
from elastix.store import Diff, Entry, Store

_MODELS = 500  # rows, the latest
_NAMES = 200  # tensors of a difference
LINKS = (("runs", "/"), ("models", "/models"))


class Site:
    """The pages of one store."""

    def __init__(self, store: str | Path) -> None:
        self._store = Path(store)

    def version(self, name: str = "") -> str:
        """Changes whenever a page may: of a run, or of all that is in the store."""
        if name:
            directory = RunConfig(name=name, store=str(self._store)).directory
            files = [directory / catalogue.JOURNAL, directory / FILE, directory / f"{FILE}-wal"]
        else:
            index = [self._store / f"index.sqlite{end}" for end in ("", "-wal")]
            files = [*self._store.glob("runs/*/*.json*"), *index]
        marks = []
        for file in sorted(files):
            if file.is_file():
                found = file.stat()
                marks.append(f"{found.st_size}.{found.st_mtime_ns}")
        live = int(time.time() // 60)  # a run falls silent without a word
        return f"{live}-{hash(tuple(marks)) & (1 << 60) - 1:x}"

    def runs(self) -> Page:
        """All runs and campaigns, the latest first."""
        found = sorted(catalogue.summaries(self._store), key=lambda summary: -summary.last_t)
        columns = ("run", "kind", "state", "steps", "best", "last", "lost", "began", "took", "note")
        rows = [_run(summary) for summary in found]
        table = Table("runs-table", "Runs", columns, rows, "", sortable=True, wide=True)
        return self._page("runs", [Section("runs", "Runs and campaigns", (), [table])])

    def run(self, name: str) -> Page:
        """One of them.

        Raises:
            ConfigError: no run can have that name. NotFound: there is none.
        """
        page = report_page(name, self._store)
        kin = [(what, f"/run/{quote(other)}") for what, other in page.kin]
        return replace(page, links=(*LINKS, *kin))

    def models(self) -> Page:
        """The latest models of the store.

        Raises:
            NotFound: there is no store.
        """
        with Store(self._store, read_only=True) as store:
            entries, count = store.log(limit=_MODELS), store.stats().models
        columns = ("ref", "parents", "score", "stored", "tensors", "size", "tags")
        more = f"The latest {len(entries)} of {count}." if count > len(entries) else ""
        rows = [_model(entry) for entry in entries]
        table = Table("models-table", "Models", columns, rows, more, sortable=True, wide=True)
        return self._page("models", [Section("models", "Models", (), [table])])

    def model(self, ref: str) -> Page:
        """One model: where it comes from, and how it differs from each of its parents.

        Raises:
            NotFound: there is no such model, or no store.
        """
        with Store(self._store, read_only=True) as store:
            own = store.manifest(ref).ref
            line = {one.ref: one for one in store.log(own)}
            entry = line.get(own)
            if entry is None:
                raise NotFound(f"model {own[:12]} was retired just now.")
            above, below = store.ancestors(own), store.descendants(own)
            here = {*line, *(known for known in below if _is_there(store, known))}
            diffs = []
            for parent in filter(here.__contains__, entry.parents):
                with suppress(NotFound):  # it was retired since then
                    diffs.append((parent, store.diff(parent, own)))
        facts = [
            *(("tags", " ".join(entry.tags) or "-"), ("size", decimal(entry.nbytes))),
            ("stored", date(entry.time_s)),
            ("score", "-" if entry.score is None else number(entry.score)),
            *((key, str(value)[:400]) for key, value in entry.meta.items() if key[:1] != "@"),
        ]
        rows = [[Cell(name), Cell(value)] for name, value in facts]
        family = [
            [Cell(kind), _link(known) if known in here else Cell(known[:12])]
            for kind, refs in (("ancestor", above), ("descendant", below))
            for known in refs
        ]
        tables = [
            Table("facts", "Model", ("what", "value"), rows),
            Table("family", "Lineage", ("which", "ref"), family, "The nearest first."),
        ]
        parts = [Section("model", "Model", (), tables)]
        parts += [_difference(place, parent, diff) for place, (parent, diff) in enumerate(diffs)]
        return self._page(entry.ref[:12], parts)

    def _page(self, name: str, sections: Sequence[Section]) -> Page:
        return Page(
            name=name,
            kind="store",
            status="",
            about=[f"store {self._store}"],
            tiles=[],
            sections=sections,
            command=shlex.join(["elastix", "serve", "--store", str(self._store)]),
            made=date(time.time()),
            links=LINKS,
        )


def _is_there(store: Store, ref: Ref) -> bool:
    """Whether it was not retired."""
    try:
        store.nbytes(ref)
    except NotFound:
        return False
    return True


def _run(summary: catalogue.Summary) -> list[Cell]:
    best, took = summary.best, summary.took_s
    best_trial = summary.best_trial
    at_best = Cell("" if best is None else f"{best[0]} {number(best[1])}", best[1] if best else "")
    mood = {"failed": "bad", "damaged": "bad", "finished": "good"}.get(summary.state, "")
    what = "trials" if summary.kind == "campaign" else "steps"
    return [
        Cell(summary.name, summary.name, href=f"/run/{quote(summary.name)}"),
        Cell(summary.kind, summary.kind),
        Cell(summary.state, summary.state, mood),
        Cell(f"{summary.steps:,} {what}", summary.steps),
        Cell(shown(best_trial), *best_trial.values()) if best_trial else at_best,
        Cell("" if best_trial else shown(summary.metrics)),
        Cell(str(summary.losses), summary.losses),
        Cell(date(summary.began_t) if summary.began_t else "", summary.began_t),
        Cell(duration(took), took),
        Cell(" ".join(filter(None, (summary.note, *(f"#{tag}" for tag in summary.tags))))),
    ]


def _link(ref: str) -> Cell:
    return Cell(ref[:12], ref, href=f"/model/{quote(ref)}")


def _model(entry: Entry) -> list[Cell]:
    parent = _link(entry.parents[0]) if entry.parents else Cell("-")
    return [
        _link(entry.ref),
        parent,
        Cell("", "") if entry.score is None else Cell(number(entry.score), entry.score),
        Cell(date(entry.time_s), entry.time_s),
        Cell(str(entry.tensors), entry.tensors),
        Cell(decimal(entry.nbytes), entry.nbytes),
        Cell(" ".join(entry.tags)),
    ]


def _difference(place: int, parent: str, diff: Diff) -> Section:
    rows = list(_changes(diff))
    left_out = max(0, len(rows) - _NAMES)
    same = len(diff.same)
    caption = f"{same} tensor is the same." if same == 1 else f"{same} tensors are the same."
    caption += f" {left_out} more differences are not shown." if left_out else ""
    names = ("", "name", "change")
    table = Table(f"diff-{place}", f"Against {parent[:12]}", names, rows[:_NAMES], caption)
    return Section(f"difference-{place}", "What differs from its parent", (), [table])


def _changes(diff: Diff) -> Iterator[list[Cell]]:
    for what, names in (("new", diff.added), ("gone", diff.removed), ("changed", diff.changed)):
        for name in names:
            yield [Cell(what), Cell(name), Cell("")]
    for key, (old, new) in diff.meta.items():
        if not key.startswith("@"):
            yield [Cell("metadata"), Cell(key), Cell(f"{old} -> {new}"[:400])]
