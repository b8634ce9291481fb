"""Writes saves and loads to TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from robust_dcp.events import Event
from robust_dcp.hooks.metrics import metrics_of, step_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardHook"]


class TensorBoardHook:
    """Writes the numbers of each save and load of rank 0 as scalars.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.

    Example::

        robust_dcp.on_event(TensorBoardHook(SummaryWriter("runs/7b")))
    """

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def __call__(self, event: Event) -> None:
        if event.rank == 0:
            for name, value in metrics_of(event).items():
                self._writer.add_scalar(name, value, global_step=step_of(event), walltime=event.at_seconds)
