"""One HTML page of a run, from its journal and the store: `write_report(name, store)`.

The page needs no network and nothing beside it, opens while the run is still going on, and is made
anew on demand. Everything that came from a user is text in it and nothing else.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastix.config import RunConfig
from elastix.errors import ConfigError, ElastixError, StoreError
from elastix.observe import catalogue, journal
from elastix.report.compose import campaign_page, training_page
from elastix.report.page import Page, write
from elastix.report.side_by_side import comparison_page, differing
from elastix.report.sources import campaign, campaign_record, is_campaign, winner
from elastix.report.training import tell
from elastix.store import Store
from elastix.store.verify import Stats

_FILE = "report.html"

__all__ = ["report_page", "write_comparison", "write_report"]


def write_report(name: str, store: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a training run or a campaign; an older one is replaced at once.

    Where a campaign's trials are runs of several workers, its page leads to that of the best one,
    and that one's back. So the other page is written as well, if it is older than its journal.

    Args:
        name: of the run.
        store: directory in which it keeps its journal.
        out: the file; STORE/runs/NAME/report.html by default.

    Returns:
        Where the page is.

    Raises:
        ConfigError: no run can have that name. NotFound: there is no such run.
        Corrupt: its journal is not what was written. TooNew: a later elastix has written it.
        StoreError: the page cannot be written.
    """
    page = report_page(name, Path(store))
    if out is not None:
        write(page, Path(out))
        return Path(out)
    for _, other in page.kin:
        path = catalogue.find(Path(store), other)
        with suppress(OSError):  # no page yet, or the run is being removed
            if _page_of(store, other).stat().st_mtime >= path.stat().st_mtime:
                continue
        with suppress(ElastixError):  # it must not take this one with it
            _write(report_page(other, Path(store)), store)
    return _write(page, store)


def _write(page: Page, store: str | Path) -> Path:
    links = [(what, f"../{quote(other)}/{_FILE}") for what, other in page.kin]
    target = _page_of(store, page.name)
    write(replace(page, links=links), target)
    return target


def _page_of(store: str | Path, name: str) -> Path:
    return RunConfig(name=name, store=str(store)).directory / _FILE


def report_page(name: str, store: Path) -> Page:
    """The page of a training run or a campaign as it stands now.

    Raises:
        ConfigError: no run can have that name. NotFound: there is no such run.
        Corrupt: its journal is not what was written. TooNew: a later elastix has written it.
    """
    path = catalogue.find(store, name)
    now = time.time()
    if is_campaign(path.parent):
        record = campaign_record(store, name, journal.read(path))
        page = campaign_page(record, store, _stats(store), now)
        return replace(page, kin=winner(store, record))
    page = training_page(name, store, tell(journal.read(path)), _stats(store), now)
    return replace(page, kin=campaign(store, name))


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
            run. Corrupt: a journal is not what was written. TooNew: a later elastix has written
            one. StoreError: the page cannot be written.
    """
    runs = {}
    for name in names:
        path = catalogue.find(Path(store), name)
        if is_campaign(path.parent):
            raise ConfigError(
                f"{name!r} is a campaign, and training runs are compared. Nothing was written. "
                "`elastix report` shows its trials beside each other."
            )
        runs[name] = tell(journal.read(path))
    target = Path(out) if out is not None else Path(store) / "runs" / "compare.html"
    write(comparison_page(runs, Path(store), time.time()), target)
    return target, differing(runs)


def _stats(store: Path) -> Stats | None:
    """What the store of models holds, if there is one."""
    if not (store / "index.sqlite").is_file():
        return None
    try:
        with Store(store, read_only=True) as opened:
            return opened.stats()
    except StoreError:
        return None  # a damaged store must not take the page of a run with it
