"""Saves and loads as monitoring systems see them. `make test-hooks` installs these systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from robust_dcp import on_event
from tests.hooks.saves import save_twice_and_fail

pytestmark = pytest.mark.compat


def test_tensorboard_shows_each_save_at_its_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from robust_dcp.hooks.tensorboard import TensorBoardHook

    with SummaryWriter(str(tmp_path / "events")) as writer, on_event(TensorBoardHook(writer)):
        save_twice_and_fail(tmp_path)
    found = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [each.step for each in found.Scalars("robust_dcp/save/seconds")] == [10, 20, 30]
    assert [each.value for each in found.Scalars("robust_dcp/save/failures")] == [0, 0, 1]
    assert [each.value for each in found.Scalars("robust_dcp/load/nbytes")] == [36]


def test_wandb_gets_each_save_with_a_step_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    from robust_dcp.hooks.wandb import WandbHook

    logged: list[dict[str, float]] = []
    with wandb.init(dir=tmp_path, project="robust_dcp") as run:
        log = run.log
        monkeypatch.setattr(run, "log", lambda values: (logged.append(values), log(values)))
        with on_event(WandbHook(run)):
            save_twice_and_fail(tmp_path)
        assert run.summary["robust_dcp/save/failures"] == 1
    assert [values["robust_dcp/step"] for values in logged] == [10, 20, 20, 30]
    assert any(path.suffix == ".wandb" and path.stat().st_size > 0 for path in tmp_path.rglob("*"))


def test_mlflow_keeps_each_save_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    from robust_dcp.hooks.mlflow import MlflowHook

    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    with mlflow.start_run() as run, on_event(MlflowHook(run.info.run_id)):
        save_twice_and_fail(tmp_path)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "robust_dcp/save/failures")
    assert sorted((metric.step, metric.value) for metric in history) == [(10, 0), (20, 0), (30, 1)]
