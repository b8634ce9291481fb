"""Megatron-LM's own training loop, ``megatron.training.training.train``, on a rank of :mod:`training_job`.

Holds what a pretraining script gives that function: batches, a forward step, a loss. A batch follows from the number of
its iteration, so that a job that goes on from a checkpoint sees what a job without interruption would have seen. What
the rank notes in each iteration is what was on the disk before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from robust_dcp.megatron import save as torch_dist_save
from robust_dcp.storage.files.disk import Disk
from robust_dcp.storage.writer import RobustWriter
from tests.harness.disks import FullDisk, GatedDisk

__all__ = ["TrainingLoop"]


class TrainingLoop:
    """The iterations of one rank, and what happens in them to its disk.

    Args:
        args: of Megatron.
        tracker: gives what the file says that names the latest checkpoint.

    Attributes:
        losses: of the iterations, as Megatron's loss function returned them on this rank.
        trackers: for each iteration what the file said before it.
        early: checkpoints that the file named before they were committed.
    """

    def __init__(self, args: Any, tracker: Callable[[], str | None]) -> None:
        self._args = args
        self._tracker = tracker
        self._iteration = args.iteration
        self._disk = contextlib.ExitStack()
        self._gates: dict[int, GatedDisk] = {}
        self.losses: list[float] = []
        self.trackers: list[str | None] = []
        self.early: list[str] = []

    def run(
        self, model: list[Any], optimizer: Any, scheduler: Any, context: dict[str, Any], events: dict[int, str]
    ) -> None:
        """Train until ``--train-iters``.

        Args:
            events: what happens before the forward pass of an iteration: ``full`` (what is saved after it goes to a
                disk without room), ``gate`` (what is saved after it is not written), ``open`` (now it is).
        """
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.core.utils import get_model_config
        from megatron.training import training

        self._events = events
        self._args.do_train, self._args.do_valid, self._args.do_test = True, False, False
        self._args.padded_vocab_size = self._args.vocab_size  # which a tokenizer would have set
        try:
            training.train(
                self._forward_step,
                model,
                optimizer,
                scheduler,
                RerunDataIterator(self._batches()),
                None,
                None,
                get_model_config(model[0]),
                context,
                None,
            )
        finally:
            self._disk.close()

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        args = self._args
        while True:
            generator = torch.Generator().manual_seed(1000 * self._iteration + args.rank)
            tokens = torch.randint(args.vocab_size, (args.micro_batch_size, args.seq_length + 1), generator=generator)
            yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def _forward_step(self, batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        self._iteration += 1
        self._look()
        self._disk.close()
        self._happen(self._events.get(self._iteration, ""))
        tokens = batch["tokens"]
        length = tokens.shape[1]
        positions = torch.arange(length).expand_as(tokens)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        return model(tokens, positions, mask, labels=batch["labels"]), self._loss

    def _loss(self, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        self.losses.append(loss.item())
        return loss, {"lm loss": loss.detach().clone()}

    def _look(self) -> None:
        named = self._tracker()
        self.trackers.append(named)
        if named is not None and not (Path(self._args.save, f"iter_{int(named):07d}") / "metadata.json").exists():
            self.early.append(named)

    def _happen(self, event: str) -> None:
        if event == "full":
            self._save_on(FullDisk())
        elif event == "gate":
            self._gates[self._iteration] = disk = GatedDisk()
            self._save_on(disk)
        elif event == "open":
            for disk in self._gates.values():
                disk.gate.set()

    def _save_on(self, disk: Disk) -> None:
        """Until the next iteration; what is asked for before then is written there, also later."""
        self._disk.callback(setattr, torch_dist_save, "RobustWriter", RobustWriter)
        torch_dist_save.RobustWriter = partial(RobustWriter, disk=disk)  # type: ignore[assignment, misc]
