"""Puts the parts of a page together: of a training run, or of a campaign. Pure but for the time."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.filesize import decimal

from elastix.observe.progress import duration
from elastix.report import campaign_part, training_part
from elastix.report.page import Cell, Page, Section, Table
from elastix.report.training import Training
from elastix.report.trials import CampaignRecord
from elastix.store.verify import Stats

_SILENT_S = 120.0  # without an event a run that has not ended is not called running


def training_page(
    name: str, store: Path, training: Training, stats: Stats | None, now: float
) -> Page:
    """The page of a training run at `now`, seconds since the Unix epoch."""
    progress = training.progress
    silent = now - progress.last_t > _SILENT_S
    words = [f"store {store}", f"began {date(training.began)}", *training_part.about(training)]
    return Page(
        name=name,
        kind="training run",
        status=progress.outcome or ("silent" if silent else "running"),
        about=words,
        tiles=list(training_part.tiles(training)),
        sections=[*training_part.sections(training), *_store(stats)],
        failure=training_part.failure(progress),
        command=_command(name, store),
        made=date(now),
    )


def campaign_page(campaign: CampaignRecord, store: Path, stats: Stats | None, now: float) -> Page:
    """The page of a campaign at `now`, seconds since the Unix epoch."""
    ends = [trial.finished_s for trial in campaign.trials if trial.finished_s is not None]
    heard = max([*ends, campaign.last, campaign.began])
    going = "silent" if now - heard > _SILENT_S else "running"
    until = heard if campaign.outcome or going == "silent" else now
    words = [f"store {store}", f"began {date(campaign.began)}"]
    return Page(
        name=campaign.name,
        kind="campaign",
        status=campaign.outcome or going,
        about=[*words, f"ran {duration(until - campaign.began - campaign.idle_s)}"],
        tiles=list(campaign_part.tiles(campaign)),
        sections=[*campaign_part.sections(campaign), *_store(stats)],
        failure=campaign_part.failure(campaign),
        command=_command(campaign.name, store),
        made=date(now),
    )


def _command(name: str, store: Path) -> str:
    return shlex.join(["elastix", "report", name, "--store", str(store)])


def date(t: float) -> str:
    """A time as a page has it; `t` is in seconds since 1970."""
    return f"{datetime.fromtimestamp(t, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _store(stats: Stats | None) -> Sequence[Section]:
    if stats is None:
        return ()
    rows = [
        [Cell("models"), Cell(str(stats.models))],
        [Cell("bytes of all models"), Cell(decimal(stats.logical_bytes))],
        [Cell("of them different"), Cell(decimal(stats.unique_bytes))],
        [Cell("bytes on disk"), Cell(decimal(stats.physical_bytes))],
        [Cell("saved by sharing tensors"), Cell(f"{stats.dedup_ratio:.2f}x")],
    ]
    table = Table("store-table", "Bytes", ("what", "how much"), rows, "All that is in this store.")
    return [Section("store", "Store", (), [table])]
