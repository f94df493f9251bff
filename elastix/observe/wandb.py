"""Events to Weights & Biases. Needs `pip install 'elastix[wandb]'`."""

from pathlib import Path
from typing import Any, Literal

from elastix.errors import ConfigError
from elastix.events import Event, Reported, RunEnded, RunStarted
from elastix.observe.loggers import Scalars

_STEP = "elastix/step"


class WandB:
    """A Logger: a W&B run for each run. A run that goes on continues its W&B run.

    Args:
        project: in which the runs stand.
        entity: user or team; W&B's default if None.
        directory: where files are kept; needed before they are uploaded, and if mode is offline.
        mode: offline writes files for a later `wandb sync`.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(
        self,
        project: str = "elastix",
        *,
        entity: str | None = None,
        directory: str | Path | None = None,
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"wandb cannot be imported: {error}. Nothing was started. "
                "pip install 'elastix[wandb]'."
            ) from error
        self._library = wandb
        self._options: dict[str, Any] = {"project": project, "entity": entity, "mode": mode}
        self._directory = Path(directory) if directory is not None else None
        self._scalars = Scalars()
        self._run: Any = None
        self._exit_code = 1  # unless the run is said to have finished

    def log(self, event: Event) -> None:
        """See Logger."""
        if isinstance(event, RunStarted):
            self.close()
            self._begin(event)
        if self._run is None:
            return
        values: dict[str, Any] = dict(self._scalars.read(event))
        if isinstance(event, Reported):
            values |= {k: v for k, v in event.metrics.items() if isinstance(v, str)}
        if values:
            # W&B's own step must never go back, and a run that goes on from a State does.
            self._run.log({**values, _STEP: self._scalars.step})
        if isinstance(event, RunEnded):
            self._exit_code = 0 if event.outcome == "finished" else 1

    def close(self) -> None:
        """See Logger: W&B's own service has it all, and ends its writing with this process."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)
            self._run = None

    def _begin(self, event: RunStarted) -> None:
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        self._exit_code = 1
        self._run = self._library.init(
            **self._options,
            id=event.name,
            name=event.name,
            resume="allow",
            dir=str(self._directory) if self._directory is not None else None,
            config={**event.config, "elastix": {"seed": event.seed, **event.scaling}},
            reinit="create_new",
            # The terminal is the console's; W&B would print there, and wrap the process's stdout.
            settings=self._library.Settings(silent=True, console="off"),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
