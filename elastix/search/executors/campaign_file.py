"""A campaign as a file, so that the command line can go on with it. Unpickle only your own."""

import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from elastix.errors import NotFound, SearchError
from elastix.train.record.pickled_function import keep_code

logger = logging.getLogger(__name__)
_FILE = "campaign.pkl"


def pickled(campaign: Any) -> bytes | Exception:  # noqa: ANN401 - a Campaign, imported above us
    """What `keep` writes, or why there is none.

    To be called before its executor is open: then that may have threads, workers and locks.
    """
    try:
        return bytes(_pickler().dumps(campaign))
    except Exception as error:  # noqa: BLE001 - whatever users' classes raise there
        return error


def keep(recipe: bytes | Exception, directory: Path) -> None:
    """Write it, whole or not at all. One that cannot be pickled leaves none: not an older one."""
    if isinstance(recipe, Exception):
        logger.warning(
            "this campaign cannot be pickled (%s). Its script can go on with it; `elastix campaign "
            "resume` cannot.",
            recipe,
        )
        (directory / _FILE).unlink(missing_ok=True)
        return
    keep_code(directory / _FILE, recipe)


def _pickler() -> Any:  # noqa: ANN401 - a module
    """Ray's, where Ray is in use: it may have been told which modules to take with it.

    It is not imported for that: a campaign with an executor of its own may do without Ray, which
    takes its time, and 35 MB.
    """
    return sys.modules.get("ray.cloudpickle", cloudpickle)


def read(directory: Path) -> Any:  # noqa: ANN401 - a Campaign
    """The campaign that was kept in `directory`.

    Raises:
        NotFound: none was. SearchError: it needs what cannot be imported here, or was kept by an
            elastix that was built otherwise. Nothing is lost by it.
    """
    path = directory / _FILE
    if not path.is_file():
        raise NotFound(
            f"{directory} holds no campaign that was kept for resuming. Nothing was started. Run "
            "its script again, with the same name and store: it goes on from the trials there are."
        )
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:  # whatever code of then does with the classes of now
        raise SearchError(
            f"{path} cannot be read here: {type(error).__name__}: {error}. Nothing was started, "
            "and nothing that the campaign has found is lost. If it misses a module of yours, run "
            "this from the directory of the script that began the campaign. If it is about "
            "elastix, that was another version when the file was written: run the script again, "
            "with the same name and store, and it goes on from the trials that are there."
        ) from error
