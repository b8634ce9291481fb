"""Logs saves and loads to Weights & Biases."""

from __future__ import annotations

from typing import Any

from robust_dcp.events import Event
from robust_dcp.hooks.metrics import metrics_of, step_of

__all__ = ["WandbHook"]

_STEP = "robust_dcp/step"


class WandbHook:
    """Logs the numbers of each save and load of rank 0.

    They have a step of their own, ``robust_dcp/step``, which is the number in the name of the checkpoint. So an async
    save that ends when training is further on does not disturb the steps of the training loop.

    Args:
        run: what ``wandb.init`` returns.

    Example::

        robust_dcp.on_event(WandbHook(wandb.init(project="7b")))
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric(_STEP)
        run.define_metric("robust_dcp/*", step_metric=_STEP)

    def __call__(self, event: Event) -> None:
        values = metrics_of(event) if event.rank == 0 else {}
        if values:
            step = step_of(event)
            self._run.log(values if step is None else {**values, _STEP: step})
