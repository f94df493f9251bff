"""A campaign as a file, so that the command line can go on with it. Unpickle only your own."""

import logging
from pathlib import Path
from typing import Any

from ray import cloudpickle

from elastix.errors import NotFound, SearchError
from elastix.train.on_ray.trainer import keep_code

logger = logging.getLogger(__name__)
_FILE = "campaign.pkl"


def keep(campaign: Any, directory: Path) -> None:  # noqa: ANN401 - a Campaign, imported above us
    """Write it, whole or not at all. One that cannot be pickled leaves the file as it was."""
    try:
        pickled = cloudpickle.dumps(campaign)
    except (TypeError, AttributeError, ValueError, RuntimeError) as error:
        logger.warning("campaign cannot be resumed by command reason=%s", error)
        return
    keep_code(directory / _FILE, pickled)


def read(directory: Path) -> Any:  # noqa: ANN401 - a Campaign
    """The campaign that was kept in `directory`.

    Raises:
        NotFound: none was. SearchError: what it needs cannot be imported here.
    """
    path = directory / _FILE
    if not path.is_file():
        raise NotFound(f"{directory} holds no campaign that was kept for resuming.")
    try:
        return cloudpickle.loads(path.read_bytes())
    except (ImportError, AttributeError) as error:
        raise SearchError(
            f"{path} cannot be read here: {error}. Nothing was started. Run this from the "
            "directory of the script that began the campaign, or run that script again."
        ) from error
