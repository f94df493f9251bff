"""Events to TensorBoard. Needs `pip install 'elastix[tensorboard]'`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastix.arguments import checked, require
from elastix.errors import ConfigError
from elastix.flat import flatten
from elastix.observe.loggers import Heading, Record, Records

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@checked
class TensorBoard(Records):
    """A Logger: event files in DIRECTORY/NAME, a trial's in DIRECTORY/CAMPAIGN/NAME.

    A run that goes on adds a file. Trials have a row each under HParams.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        require(
            isinstance(directory, str | Path) and directory != "",
            f"directory must be the path of one, not {directory!r}. Nothing was started.",
        )
        try:
            import torch.utils.tensorboard as library
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard cannot be imported: {error}. Nothing was started. "
                "pip install 'elastix[tensorboard]'."
            ) from error
        super().__init__()
        self._library = library
        self._directory = Path(directory)

    def begin(self, heading: Heading) -> Record:
        """See Records."""
        return _Folder(self._library, self._directory, heading)


class _Folder:
    """A file is begun with the first point: by then it is known where the run goes on."""

    def __init__(self, library: Any, directory: Path, heading: Heading) -> None:  # noqa: ANN401
        self._library = library
        self._heading = heading
        self._folder = directory / (heading.campaign or "") / heading.name
        self._purge: int | None = None
        self._writer: SummaryWriter | None = None

    def write(self, values: Mapping[str, float | str], step: int, t: float) -> None:
        writer = self._open()
        for name, value in values.items():
            add = writer.add_text if isinstance(value, str) else writer.add_scalar
            add(name, value, step, walltime=t)

    def go_back(self, step: int) -> None:
        self._close()
        self._purge = step + 1

    def end(self, outcome: str, message: str, values: Mapping[str, float]) -> None:
        del outcome
        writer = self._open()
        if message:
            writer.add_text("elastix/message", message)
        if values:
            config = {
                name: value if isinstance(value, bool | str | int | float) else str(value)
                for name, value in flatten(self._heading.config).items()
            }
            writer.add_hparams(config, {f"hparam/{k}": v for k, v in values.items()}, run_name=".")
        self._close()

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            self._writer = self._library.SummaryWriter(str(self._folder), purge_step=self._purge)
            text = json.dumps(self._heading.config, indent=2, default=str)
            self._writer.add_text("config", f"```\n{text}\n```", 0)
        return self._writer

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
