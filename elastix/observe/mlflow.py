"""Events to MLflow. Needs `pip install 'elastix[mlflow]'`."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from elastix.arguments import checked
from elastix.errors import ConfigError
from elastix.flat import flatten
from elastix.observe.loggers import Heading, Record, Records

_RUN_TAG = "elastix.run"
_PARENT_TAG = "mlflow.parentRunId"  # MLflow's own word for what stands below what
_STATUS = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "stopped": "KILLED",
    "paused": "SCHEDULED",
}
_FORBIDDEN = re.compile(r"[^\w\-./ ]")
_LONGEST = 500  # characters of a parameter


@checked
class MLflow(Records):
    """A Logger: an MLflow run for each run; for each trial one below the campaign's.

    A run that goes on continues its MLflow run.

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
        super().__init__()
        self._library = mlflow
        try:
            self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        except mlflow.exceptions.MlflowException as error:
            raise ConfigError(
                f"MLflow refuses {tracking_uri!r}: {error} Nothing was started."
            ) from error
        self._experiment = experiment
        self._runs: dict[str, str] = {}  # id of each run, by name

    def begin(self, heading: Heading) -> Record:
        """See Records."""
        run = self._find(heading.name)
        if run is None:
            run = self._create(heading)
        else:
            self._client.update_run(run, status="RUNNING")
        self._runs[heading.name] = run
        return _Run(self._library, self._client, run)

    def _create(self, heading: Heading) -> str:
        client = self._client
        tags = {_RUN_TAG: heading.name, **{f"elastix.{k}": v for k, v in heading.versions.items()}}
        if heading.campaign is not None:
            tags[_PARENT_TAG] = self._runs[heading.campaign]
        created = client.create_run(self._number, run_name=heading.name, tags=tags)
        run = str(created.info.run_id)
        values = {**flatten(heading.settings), **flatten(heading.config)}
        params = [
            self._library.entities.Param(_FORBIDDEN.sub("_", name), str(value)[:_LONGEST])
            for name, value in values.items()
        ]
        client.log_batch(run, params=params)
        return run

    @cached_property
    def _number(self) -> str:
        """Of the experiment; asked for with the first run, when the server must be there."""
        found = self._client.get_experiment_by_name(self._experiment)
        return str(
            found.experiment_id if found else self._client.create_experiment(self._experiment)
        )

    def _find(self, name: str) -> str | None:
        quoted = name.replace("'", "''")
        found = self._client.search_runs(
            [self._number], f"tags.`{_RUN_TAG}` = '{quoted}'", max_results=1
        )
        return str(found[0].info.run_id) if found else None


class _Run:
    def __init__(self, library: Any, client: Any, run: str) -> None:  # noqa: ANN401
        self._library = library
        self._client = client
        self._run = run

    def write(self, values: Mapping[str, float | str], step: int, t: float) -> None:
        metrics = [
            self._library.entities.Metric(_FORBIDDEN.sub("_", name), value, round(t * 1000), step)
            for name, value in values.items()
            if not isinstance(value, str)
        ]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def go_back(self, step: int) -> None:
        """MLflow keeps what it has; of two values at a step the later one counts."""

    def end(self, outcome: str, message: str, values: Mapping[str, float]) -> None:
        del values  # they are among the metrics
        if message:
            self._client.set_tag(self._run, "elastix.message", message)
        self._client.set_terminated(self._run, _STATUS.get(outcome, "FAILED"))
