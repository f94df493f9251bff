"""Events to MLflow. Needs `pip install 'elastix[mlflow]'`."""

import re
from collections.abc import Mapping
from typing import Any

from elastix.errors import ConfigError
from elastix.events import Event, RunEnded, RunStarted
from elastix.observe.loggers import Scalars

_RUN_TAG = "elastix.run"
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_FORBIDDEN = re.compile(r"[^\w\-./ ]")
_LONGEST = 500  # characters of a parameter


class MLflow:
    """A Logger: an MLflow run for each run. A run that goes on continues its MLflow run.

    Args:
        tracking_uri: of the server; `sqlite:///FILE` with the whole of MLflow installed;
            `file:DIRECTORY` where MLflow still allows it (MLFLOW_ALLOW_FILE_STORE=true).
        experiment: is made if there is none of that name.

    Raises:
        ConfigError: MLflow is not installed, or refuses the URI.
    """

    def __init__(self, tracking_uri: str, experiment: str = "elastix") -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError(
                f"MLflow cannot be imported: {error}. Nothing was started. "
                "pip install 'elastix[mlflow]'."
            ) from error
        self._library = mlflow
        try:
            self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        except mlflow.exceptions.MlflowException as error:
            raise ConfigError(
                f"MLflow refuses {tracking_uri!r}: {error} Nothing was started."
            ) from error
        self._experiment = experiment
        self._scalars = Scalars()
        self._run_id = ""

    def log(self, event: Event) -> None:
        """See Logger."""
        if isinstance(event, RunStarted):
            self._begin(event)
        if not self._run_id:
            return
        values = self._scalars.read(event)
        if values:
            self._client.log_batch(self._run_id, metrics=self._metrics(values, event.t))
        if isinstance(event, RunEnded):
            if event.message:
                self._client.set_tag(self._run_id, "elastix.message", event.message)
            self._client.set_terminated(self._run_id, _STATUS.get(event.outcome, "FAILED"))

    def close(self) -> None:
        """See Logger: every call of the client is safe when it returns."""

    def _begin(self, event: RunStarted) -> None:
        client = self._client
        experiment = client.get_experiment_by_name(self._experiment)
        number = (
            experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        )
        quoted = event.name.replace("'", "''")
        before = client.search_runs([number], f"tags.`{_RUN_TAG}` = '{quoted}'", max_results=1)
        if before:
            self._run_id = before[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        tags = {_RUN_TAG: event.name, **{f"elastix.{k}": v for k, v in event.versions.items()}}
        self._run_id = client.create_run(number, run_name=event.name, tags=tags).info.run_id
        values = {"seed": event.seed, **_flat(event.config), **_flat(event.scaling, "scaling.")}
        params = [
            self._library.entities.Param(_FORBIDDEN.sub("_", name), str(value)[:_LONGEST])
            for name, value in values.items()
        ]
        self._client.log_batch(self._run_id, params=params)

    def _metrics(self, values: Mapping[str, float], t: float) -> list[Any]:
        step = self._scalars.step
        return [
            self._library.entities.Metric(_FORBIDDEN.sub("_", name), value, round(t * 1000), step)
            for name, value in values.items()
        ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
