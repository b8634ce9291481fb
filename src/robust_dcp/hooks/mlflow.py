"""Logs saves and loads to MLflow."""

from __future__ import annotations

from robust_dcp.events import Event
from robust_dcp.hooks.metrics import metrics_of, step_of

__all__ = ["MlflowHook"]


class MlflowHook:
    """Logs the numbers of each save and load of rank 0.

    Args:
        run_id: the run to log to; ``None`` for the active run of this process. Pass it if you save asynchronously,
            because the active run of MLflow is the one of the thread.

    Example::

        robust_dcp.on_event(MlflowHook(mlflow.active_run().info.run_id))
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._run_id = run_id

    def __call__(self, event: Event) -> None:
        values = metrics_of(event) if event.rank == 0 else {}
        if values:
            import mlflow

            mlflow.log_metrics(values, step=step_of(event), run_id=self._run_id)
