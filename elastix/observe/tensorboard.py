"""Events to TensorBoard. Needs `pip install 'elastix[tensorboard]'`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from elastix.errors import ConfigError
from elastix.events import Event, Reported, Resumed, RunStarted
from elastix.observe.loggers import Scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """A Logger: event files in DIRECTORY/NAME. A run that goes on adds a file there.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            import torch.utils.tensorboard as library
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard cannot be imported: {error}. Nothing was started. "
                "pip install 'elastix[tensorboard]'."
            ) from error
        self._library = library
        self._directory = Path(directory)
        self._scalars = Scalars()
        self._run: RunStarted | None = None
        self._writer: SummaryWriter | None = None

    def log(self, event: Event) -> None:
        """See Logger."""
        if isinstance(event, RunStarted):
            self.close()
            self._run = event
            return  # whether the run goes on from somewhere is known with the next event
        if self._run is None:
            return
        if isinstance(event, Resumed):
            self._open(event.step + 1)
        writer = self._writer or self._open(None)
        for name, value in self._scalars.read(event).items():
            writer.add_scalar(name, value, self._scalars.step, walltime=event.t)
        if isinstance(event, Reported):
            for name, value in event.metrics.items():
                if isinstance(value, str):
                    writer.add_text(name, value, event.step, walltime=event.t)

    def close(self) -> None:
        """See Logger."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, purge_step: int | None) -> "SummaryWriter":
        """Begin a file; curves from `purge_step` on that earlier files hold are void."""
        if self._run is None:
            raise RuntimeError("no run has started")
        self.close()
        folder = self._directory / self._run.name
        self._writer = self._library.SummaryWriter(str(folder), purge_step=purge_step)
        text = json.dumps(self._run.config, indent=2, default=str)
        self._writer.add_text("config", f"```\n{text}\n```", 0)
        return self._writer
