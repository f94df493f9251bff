"""One HTML page of a run, from its journal and the store: `write_report(name, store)`.

The page needs no network and nothing beside it, opens while the run is still going on, and is made
anew on demand. Everything that came from a user is text in it and nothing else.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastix.config import RunConfig
from elastix.errors import ConfigError, NotFound, StoreError
from elastix.observe import catalogue, journal
from elastix.report.compose import campaign_page, training_page
from elastix.report.page import Page, write
from elastix.report.side_by_side import comparison_page, differing
from elastix.report.sources import campaign_record, is_campaign
from elastix.report.training import tell
from elastix.store import Store
from elastix.store.verify import Stats

__all__ = ["report_page", "write_comparison", "write_report"]


def write_report(name: str, store: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a training run or a campaign; an older one is replaced at once.

    Args:
        name: of the run.
        store: directory in which it keeps its journal.
        out: the file; STORE/runs/NAME/report.html by default.

    Returns:
        Where the page is.

    Raises:
        ConfigError: no run can have that name. NotFound: there is no such run.
        Corrupt: its journal is not what was written. StoreError: the page cannot be written.
    """
    page = report_page(name, Path(store))
    directory = RunConfig(name=name, store=str(store)).directory
    target = Path(out) if out is not None else directory / "report.html"
    write(page, target)
    return target


def report_page(name: str, store: Path) -> Page:
    """The page of a training run or a campaign as it stands now.

    Raises:
        ConfigError: no run can have that name. NotFound: there is no such run.
        Corrupt: its journal is not what was written.
    """
    path = _journal(name, store)
    now = time.time()
    if is_campaign(path.parent):
        record = campaign_record(store, name, journal.read(path))
        return campaign_page(record, store, _stats(store), now)
    return training_page(name, store, tell(journal.read(path)), _stats(store), now)


def write_comparison(
    names: Sequence[str], store: str | Path, out: str | Path | None = None
) -> tuple[Path, dict[str, list[Any]]]:
    """Write one page of several training runs.

    Args:
        names: of the runs.
        store: directory in which they keep their journals.
        out: the file; STORE/runs/compare.html by default.

    Returns:
        Where the page is; settings that differ, by name, with a value for each run.

    Raises:
        ConfigError: no run can have such a name, or one is a campaign. NotFound: there is no such
        run. Corrupt: a journal is not what was written. StoreError: the page cannot be written.
    """
    runs = {}
    for name in names:
        path = _journal(name, Path(store))
        if is_campaign(path.parent):
            raise ConfigError(
                f"{name!r} is a campaign, and training runs are compared. Nothing was written. "
                "`elastix report` shows its trials beside each other."
            )
        runs[name] = tell(journal.read(path))
    target = Path(out) if out is not None else Path(store) / "runs" / "compare.html"
    write(comparison_page(runs, Path(store), time.time()), target)
    return target, differing(runs)


def _journal(name: str, store: Path) -> Path:
    """Where the journal of a run is.

    Raises:
        ConfigError: no run can have that name. NotFound: there is no such run.
    """
    path = RunConfig(name=name, store=str(store)).directory / catalogue.JOURNAL
    if not path.is_file():
        raise NotFound(f"there is no run {name!r} in {store}: {_others(store)}")
    return path


def _others(store: Path) -> str:
    """Runs that there are, for somebody who mistyped one."""
    names = catalogue.names(store)
    if not names:
        return "it has no runs. Name another store with --store."
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"it has {', '.join(names[:8])}{more}."


def _stats(store: Path) -> Stats | None:
    """What the store of models holds, if there is one."""
    if not (store / "index.sqlite").is_file():
        return None
    try:
        with Store(store, read_only=True) as opened:
            return opened.stats()
    except StoreError:
        return None  # a damaged store must not take the page of a run with it
