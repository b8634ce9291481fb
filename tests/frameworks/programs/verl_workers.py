"""verl's own ``MegatronCheckpointManager`` in the workers of its own ``RayWorkerGroup``: ``verl_workers.py DIRECTORY
NAME=VALUE save:sync save:async load:sync``.

The variables go to the workers as verl hands them on, in ``ray_init.runtime_env.env_vars``.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token is written into the home directory
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
import torch.distributed as dist
from comparing import digest
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

_RANKS = 2


class Actor(Worker):
    """A rank that trains a GPT of Megatron-Core, and the manager of its checkpoints."""

    def __init__(self):
        super().__init__()
        from demo import megatron_cpu

        megatron_cpu.install()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")

    def make(self, seed, async_save):
        from verl.trainer.config import CheckpointConfig
        from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

        from tests.megatron.whole_training import WholeTraining

        self.training = training = WholeTraining(seed)
        megatron = SimpleNamespace(
            dist_ckpt_optim_fully_reshardable=False, distrib_optim_fully_reshardable_mem_efficient=False
        )
        return MegatronCheckpointManager(
            config=SimpleNamespace(model=SimpleNamespace(path=None), megatron=megatron),
            checkpoint_config=CheckpointConfig(async_save=async_save),
            model_config=None,
            transformer_config=training.config,
            role="actor",
            model=[training.model],
            arch="GPT",
            hf_config=None,
            param_dtype=torch.bfloat16,
            share_embeddings_and_output_weights=False,
            processing_class=None,
            optimizer=training.optimizer,
            optimizer_scheduler=training.scheduler,
            use_distributed_optimizer=True,
            use_checkpoint_opt_param_scheduler=True,
            use_dist_checkpointing=True,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, directory, async_save):
        from megatron.core.dist_checkpointing.strategies.base import async_calls

        manager = self.make(1, async_save)
        digests = []
        for step in (1, 2, 3):
            self.training.step()
            digests.append(digest(self.training.state()))
            folder = os.path.join(directory, f"global_step_{step}", "actor")
            manager.save_checkpoint(folder, global_step=step, max_ckpt_to_keep=2)
            # verl's trainer asks its workers for ``async_calls_finalize_fn_exec``, which no worker of 0.9.1 has.
            async_calls.maybe_finalize_async_calls(blocking=True)
        return digests

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, directory, step):
        manager = self.make(2, False)
        manager.load_checkpoint(os.path.join(directory, f"global_step_{step}", "actor"))
        return digest(self.training.state())


def main():
    directory, words = Path(sys.argv[1]), sys.argv[2:]
    variables = dict(word.split("=") for word in words if "=" in word)
    runtime_env = {"env_vars": {"OMP_NUM_THREADS": "1", **variables}}
    # Paths of Ray's sockets must be short, so they are not below the directory of a test.
    with tempfile.TemporaryDirectory(prefix="ray") as files:
        ray.init(num_cpus=_RANKS, include_dashboard=False, runtime_env=runtime_env, _temp_dir=files)
        pool = RayResourcePool([_RANKS], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Actor)), device_name="cpu")
        for command, name in (word.split(":") for word in words if ":" in word):
            folder, kept = directory / name, directory / f"{name}.json"
            if command == "save":
                kept.write_text(json.dumps(group.save(str(folder), name == "async")))
            else:
                of_ranks = json.loads(kept.read_text())
                for step in (2, 3):
                    assert group.load(str(folder), step) == [digests[step - 1] for digests in of_ranks]
                print(f"equal: {name}", flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main()
