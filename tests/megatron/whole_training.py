"""A GPT of Megatron-Core with its distributed optimizer and its scheduler, as the trainers of frameworks hold them.

For tests of the functions by which ms-swift and verl save and load. It knows nothing of robust_dcp, and saves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import random

from demo.megatron_model import Layout, Trainer

__all__ = ["WholeTraining"]

_STEPS = {"lr_warmup_steps": 0, "lr_decay_steps": 10, "wd_incr_steps": 10}
_RATES = {"init_lr": 0.0, "max_lr": 0.001, "min_lr": 0.0, "start_wd": 0.01, "end_wd": 0.01}
_STYLES = {"lr_decay_style": "linear", "wd_incr_style": "constant"}


class WholeTraining:
    """Training on this rank, of which all ranks are data parallel. Calls of CUDA must have been redirected.

    Args:
        seed: of the weights and of the random numbers.
    """

    def __init__(self, seed: int) -> None:
        self._trainer = Trainer(Layout(), seed=seed, n_layers=2, hidden_size=16, experts=0)
        random.initialize_rng_tracker(force_reset=True)
        random.model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        self.model = self._trainer.ddp
        self.config = self._trainer.model.config
        self.optimizer = self._trainer.optimizer
        for group in self.optimizer.param_groups:
            group["min_lr"] = 0.0
        self.scheduler = OptimizerParamScheduler(self.optimizer, **_RATES, **_STEPS, **_STYLES)

    def step(self) -> None:
        self._trainer.train(n_microbatches=1)
        self.scheduler.step(1)

    def state(self) -> list[Any]:
        """Copies of what a job that goes on must have: weights, optimizer, scheduler, random numbers."""
        found = [value for value in self.model.state_dict().values() if isinstance(value, torch.Tensor)]
        for part in self.optimizer.chained_optimizers:
            for parameter, state in part.optimizer.state.items():
                found += [parameter, state["exp_avg"], state["exp_avg_sq"]]
        copies = [each.detach().clone() for each in found]
        return [*copies, torch.get_rng_state(), torch.tensor(self.scheduler.num_steps)]
