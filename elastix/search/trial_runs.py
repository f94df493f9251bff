"""Runs in a store that are trials of a campaign: those of several workers have a folder each.

Their names are made from the campaign's, and a user may have given the same name to another run.
"""

from contextlib import suppress
from pathlib import Path

from elastix.errors import ConfigError, Corrupt, NotFound, TooNew
from elastix.events import RunStarted
from elastix.observe import catalogue, journal
from elastix.search.trial import campaign_of


def trial_runs(store: Path, campaign: str) -> list[str]:
    """Those of the trials of this campaign, by name."""
    return [name for name in _named_after(store, campaign) if is_trial(store, name)]


def is_trial(store: Path, run: str) -> bool:
    """Whether a run was started as a trial; False if its journal cannot be read before that."""
    with suppress(NotFound, Corrupt, TooNew):
        for event in journal.read_only(store / "runs" / run / catalogue.JOURNAL, RunStarted):
            return isinstance(event, RunStarted) and event.order_seed is not None
    return False


def refuse_named_after(store: Path, campaign: str) -> None:
    """Before a campaign begins whose trials are runs of their own.

    Raises:
        ConfigError: a trial would go on from the State of a run that is there.
    """
    found = _named_after(store, campaign)
    if found:
        raise ConfigError(
            f"the store has the run {found[0]!r}, and a trial of the campaign {campaign!r} would "
            "have that name, and go on from its State. Nothing was started. Choose another name, "
            "or remove that run: `elastix runs rm`."
        )


def _named_after(store: Path, campaign: str) -> list[str]:
    return [name for name in catalogue.names(store) if campaign_of(name) == campaign]
