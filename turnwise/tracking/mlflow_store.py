"""Keeps runs in MLflow."""

import re
import time
from collections.abc import Mapping
from typing import Any

from turnwise.tracking.store import TrackedRun

MAX_PARAMS = 100
"""MLflow's limit of parameters in one call."""
MAX_VALUE = 6000
"""MLflow's limit of characters in a parameter's value."""


class MlflowStore:
    """A run of MLflow.

    Args:
        tracking_uri: a server or a database [the variable MLFLOW_TRACKING_URI; else a file that the
        experiment's runs share]. artifact_location: where a new experiment keeps the sample texts [the
        server's choice, or beside that file].
    """

    def __init__(
        self,
        run: TrackedRun,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        artifact_location: str | None = None,
        tags: Mapping[str, object] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client, experiment_id = open_experiment(
            run,
            tracking_uri,
            experiment_name,
            artifact_location,
        )
        new_run = self._client.create_run(
            experiment_id,
            run_name=run_name or run.name,
            tags=dict(tags or {}),
        )
        self._id: str = new_run.info.run_id
        settings = run.settings or {}
        params = [Param(_allowed(key), str(value)[:MAX_VALUE]) for key, value in settings.items()]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])
        self.place = f"run {self._id} in {self._client.tracking_uri}"

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        text: str,
    ) -> None:
        time_ms = int(time.time() * 1000)
        batch = [self._metric(_allowed(key), value, time_ms, step) for key, value in metrics.items()]
        self._client.log_batch(self._id, batch)
        if text:
            self._client.log_text(self._id, text, f"samples/step_{step:06d}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def open_experiment(
    run: TrackedRun,
    tracking_uri: str | None = None,
    experiment_name: str | None = None,
    artifact_location: str | None = None,
) -> tuple[Any, str]:
    """A client of MLflow, and the id of the run's experiment there, which is made if it isn't there. The
    arguments are those of `MlflowStore`."""
    import mlflow
    from mlflow.environment_variables import MLFLOW_TRACKING_URI

    shared = run.folder.parent
    if tracking_uri is None and not MLFLOW_TRACKING_URI.get():
        shared.mkdir(parents=True, exist_ok=True)
        tracking_uri = f"sqlite:///{shared / 'mlflow.db'}"
        artifact_location = artifact_location or (shared / "mlflow_texts").as_uri()
    client = mlflow.MlflowClient(tracking_uri)
    name = experiment_name or run.project
    experiment = client.get_experiment_by_name(name)
    if experiment:
        return client, experiment.experiment_id
    return client, client.create_experiment(name, artifact_location=artifact_location)


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. /:]", "_", name)
