"""Events to Weights & Biases. Needs `pip install 'elastix[wandb]'`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from elastix.arguments import checked
from elastix.errors import ConfigError
from elastix.observe.loggers import Heading, Record, Records

_STEP = "elastix/step"
_WELL = ("finished", "stopped", "paused")  # a trial that rungs stopped has not failed


@checked
class WandB(Records):
    """A Logger: a W&B run for each run; for each trial one in the campaign's group.

    A run that goes on continues its W&B run.

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
        super().__init__()
        self._library = wandb
        self._options: dict[str, Any] = {"project": project, "entity": entity, "mode": mode}
        self._directory = Path(directory) if directory is not None else None

    def begin(self, heading: Heading) -> Record:
        """See Records."""
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        run = self._library.init(
            **self._options,
            id=heading.name,
            name=heading.name,
            group=heading.campaign,
            resume="allow",
            dir=str(self._directory) if self._directory is not None else None,
            config={**heading.config, "elastix": dict(heading.settings)},
            reinit="create_new",
            # The terminal is the console's; W&B would print there, and wrap the process's stdout.
            settings=self._library.Settings(silent=True, console="off"),
        )
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP)
        return _Run(run)


class _Run:
    def __init__(self, run: Any) -> None:  # noqa: ANN401 - W&B's own
        self._run = run

    def write(self, values: Mapping[str, float | str], step: int, t: float) -> None:
        del t
        # W&B's own step must never go back, and a run that goes on from a State does.
        self._run.log({**values, _STEP: step})

    def go_back(self, step: int) -> None:
        """W&B keeps what it has; see `elastix/step`."""

    def end(self, outcome: str, message: str, values: Mapping[str, float]) -> None:
        """W&B's own service has it all, and ends its writing with this process."""
        self._run.summary.update({**values, "elastix/outcome": outcome})
        if message:
            self._run.summary["elastix/message"] = message
        self._run.finish(exit_code=0 if outcome in _WELL else 1)
