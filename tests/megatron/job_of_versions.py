"""A small job of Megatron that runs under every version from 0.10 on: what checkpoints of all versions hold.

As a command it saves and packs one: ``make megatron-checkpoints`` runs it with each version. So it uses what all these
versions have, and nothing else of these tests.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import os
import random
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, utils
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint import filesystem

__all__ = ["SHARDING", "JobOfVersion", "leaves", "sharding_of_this_version"]

SHARDING = "distrib_optim_sharding_type"
"""Megatron's key for how the distributed optimizer is saved."""


def sharding_of_this_version() -> str:
    """How Megatron-LM of this version saves the distributed optimizer if it is not told otherwise."""
    is_known = hasattr(distrib_optimizer.DistributedOptimizer, "sharded_param_state_fully_reshardable")  # from 0.15 on
    return "fully_reshardable" if is_known else "dp_zero_gather_scatter"


class JobOfVersion:
    """A GPT with Megatron's distributed optimizer on this rank, as ``save_checkpoint`` of Megatron-LM sees it.

    Args:
        n_tensor_parallel: over how many ranks a layer is cut. The other ranks are data parallel.
        value: what all that is saved depends on.
    """

    def __init__(self, n_tensor_parallel: int, value: int) -> None:
        self.value = value
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=n_tensor_parallel)
        tracker = {"inference_rng_tracker": True}  # it tracks no generator of CUDA
        has_tracker = "inference_rng_tracker" in inspect.signature(initialize_rng_tracker).parameters  # from 0.12 on
        initialize_rng_tracker(**tracker if has_tracker else {})
        torch.manual_seed(value)  # weights are drawn whole on each rank, and cut
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            ffn_hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=n_tensor_parallel,
            params_dtype=torch.bfloat16,
            bf16=True,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
        )
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=16,
            max_sequence_length=8,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        ).to(torch.bfloat16)
        for parameter in self.model.parameters():
            parameter.data += value / 8
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
        adam = OptimizerConfig(
            optimizer="adam", lr=0.25, use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16
        )
        self.optimizer = get_megatron_optimizer(adam, [DistributedDataParallel(config, ddp, self.model)])
        for parameter in self.model.parameters():
            parameter.main_grad.fill_(0.5)
        self.optimizer.step()  # Adam has no state before its first step, and Megatron loads into it

    def sharded_state_dict(self, sharding: str, *, is_loading: bool = False) -> dict[str, Any]:
        """A new one each time, because Megatron changes it.

        Args:
            sharding: how the distributed optimizer is saved, in Megatron's words.
            is_loading: whether a checkpoint is loaded into it.
        """
        rank, size, tensor_rank = (
            dist.get_rank(),
            dist.get_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        state: dict[str, Any] = {
            "model": self.model.sharded_state_dict(metadata={SHARDING: sharding}),
            "rng_state": ShardedObject("rng_state", [] if is_loading else self._rng_state(), (1,), (0,), rank),
            "of each rank": ShardedObject("of_each_rank", {"rank": rank, "value": self.value}, (size,), (rank,)),
            "ragged": ShardedTensor.from_rank_offsets(
                "ragged", torch.full((3, 5), float(self.value + tensor_rank)), (0, rank, size), (1, 0, 1)
            ),
        }
        # As Megatron-LM asks for it without further arguments.
        takes = inspect.signature(distrib_optimizer.DistributedOptimizer.sharded_state_dict).parameters
        name, way = ("metadata", {SHARDING: sharding}) if "metadata" in takes else ("sharding_type", sharding)
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, **{name: way})
        return state if is_loading else {**state, **self._common()}

    def _common(self) -> dict[str, Any]:
        # Megatron-LM has it among its arguments from 0.12 on.
        backend = getattr(importlib.import_module("megatron.core.transformer.enums"), "AttnBackend", None)
        args = argparse.Namespace(
            bf16=True,
            params_dtype=torch.bfloat16,
            lr=0.25,
            data_path=["a", "b"],
            iteration=self.value,
            attention_backend=None if backend is None else backend.fused,
            tensor_model_parallel_size=2,
            world_size=2,
        )
        scheduler = {"max_lr": 0.25, "num_steps": self.value, "lr_decay_style": "linear"}
        return {"args": args, "checkpoint_version": 3.0, "iteration": self.value, "opt_param_scheduler": scheduler}

    def _rng_state(self) -> list[Any]:
        return [
            {
                "random_rng_state": random.Random(self.value).getstate()[:1] + ((self.value,), None),
                "np_rng_state": ("MT19937", np.arange(self.value, self.value + 4, dtype=np.uint32), 2, 0, 0.0),
                "torch_rng_state": torch.arange(self.value, dtype=torch.uint8),
                "rng_tracker_states": {},
            }
        ]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested state dict by path, as values that can be compared."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from leaves(each, f"{path}.{place}")
    elif isinstance(value, torch.Tensor):
        yield path, (str(value.dtype), tuple(value.shape), hashlib.sha256(value.float().numpy().tobytes()).hexdigest())
    else:
        yield path, repr(value)


def _write_item(*args: Any, **options: Any) -> Any:
    """torch's function. Megatron 0.12 calls it as torch had it up to 2.6, and 0.10 as torch had it up to 2.5."""
    transforms = [filesystem._StorageWriterTransforms()] if len(args) == 4 else []
    options.setdefault("serialization_format", filesystem.SerializationFormat.TORCH_SAVE)
    return filesystem._write_item(*transforms, *args, **options)


def _main() -> None:
    """Save with two ranks, cut in two by tensor parallelism, and pack: ``python -m … FILE.tar.xz``."""
    from demo import megatron_cpu

    target = Path(sys.argv[1])
    directory = target.with_suffix("").with_suffix("")
    megatron_cpu.install()
    # Of Transformer Engine, which is missing, 0.10 asks for the version, and 0.12 that it casts no tensors.
    utils._te_version = utils.PkgVersion("1.0")
    distrib_optimizer.quantize_param_shard = lambda *args: None
    filesystem_async._write_item = _write_item
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    sharding = sharding_of_this_version()
    options: dict[str, Any] = {"content_metadata": {SHARDING: sharding}}
    if "content_metadata" not in inspect.signature(dist_checkpointing.save).parameters:  # up to 0.12
        options = {}
    dist_checkpointing.save(JobOfVersion(2, 3).sharded_state_dict(sharding), str(directory), **options)
    dist.barrier()
    if dist.get_rank() == 0:
        with tarfile.open(target, "w:xz") as packed:
            for path in sorted(directory.iterdir()):
                packed.add(path, path.name)
    dist.barrier()
    os._exit(0)  # without waiting for what old versions leave behind


if __name__ == "__main__":
    _main()
