"""A Megatron-Core GPT model with its distributed optimizer, in any parallel layout, on a CPU or another device.

Owns how the model is built and the contents of its sharded state dict. It saves and loads nothing. Used by the demo's
Megatron jobs, by tests/megatron and by tests/gpu.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

__all__ = ["SAVED_LAYOUT", "Layout", "Trainer"]

_CONTEXT = 64
_VOCABULARY = 256

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = (
        None  # without Transformer Engine 0.16.1 does not define this name, and then looks it up
    )


@dataclass(frozen=True)
class Layout:
    """The sizes of tensor, pipeline and expert parallelism. The rest of the ranks is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline} x EP{self.expert}"


SAVED_LAYOUT = Layout(pipeline=2, expert=2)
"""The layout that the demo's job saves from."""


class Trainer:
    """A GPT model with (optionally) experts and Megatron's distributed optimizer, ready to be saved.

    Args:
        layout: the sizes of the parallel groups. Megatron's groups are made anew for it.
        seed: the seed of the initial weights. Ranks that hold the same shard get the same bits.
        experts: the number of experts in each MoE layer; 0 for a dense model.
        device: where the model is and trains. On a CPU call ``megatron_cpu.install`` first.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        seed: int,
        n_layers: int = 4,
        hidden_size: int = 64,
        experts: int = 4,
        device: str | torch.device = "cpu",
    ) -> None:
        self.layout = layout
        self._device = torch.device(device)
        self.iteration = 0
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
        )
        initialize_rng_tracker(inference_rng_tracker=True)  # this one tracks no CUDA generator
        config = _config(layout, n_layers=n_layers, hidden_size=hidden_size, experts=experts)
        # CPU initialisation draws whole tensors and cuts them. So data-parallel replicas agree, and stages differ.
        torch.manual_seed(seed + parallel_state.get_pipeline_model_parallel_rank())
        self._generator = torch.Generator().manual_seed(seed + parallel_state.get_data_parallel_rank())
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=experts or None, moe_grouped_gemm=False),
            vocab_size=_VOCABULARY,
            max_sequence_length=_CONTEXT,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        ).to(self._device, torch.bfloat16)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not getattr(parameter, "allreduce", True):  # of an expert: let experts differ
                    parameter.add_(0.125 * parallel_state.get_expert_model_parallel_rank())
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False),
            self.model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                use_distributed_optimizer=True,
                bf16=True,
                params_dtype=torch.bfloat16,
            ),
            [self.ddp],
        )
        # torch's Adam has no state before its first step, and Megatron loads into it.
        for parameter in self.model.parameters():
            parameter.main_grad.fill_(0.01)
        self.optimizer.step()

    def train(self, *, n_microbatches: int = 4) -> None:
        """Do one training step in Megatron's own pipeline schedule, on tokens that this data-parallel rank draws."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=None,
            model=[self.ddp],
            num_microbatches=n_microbatches,
            seq_length=_CONTEXT,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        self.iteration += 1

    def sharded_state_dict(self, *, is_loading: bool = False) -> dict[str, Any]:
        """The state dict that Megatron training saves: model, optimizer, RNG state of model-parallel ranks, iteration.

        It refers to the tensors of the model. Megatron changes it, so each save or load needs a new one.
        """
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state_dict: dict[str, Any] = {"model": self.model.sharded_state_dict(metadata=metadata)}
        state_dict["optimizer"] = self.optimizer.sharded_state_dict(
            state_dict, is_loading=is_loading, metadata=metadata
        )
        state_dict["iteration"] = self.iteration
        return state_dict

    def rng_state(self) -> ShardedObject:
        """The RNG state as Megatron training saves it: one object for each pipeline and tensor rank."""
        return ShardedObject(
            "rng_state",
            {"random_seed": self.iteration, "torch_rng_state": torch.get_rng_state()},
            (parallel_state.get_pipeline_model_parallel_world_size(), self.layout.tensor),
            (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )

    def rerun_state(self) -> ShardedObject:
        """The object that Megatron's rerun state machine adds to a save if it suspects a fault (Megatron-LM #4378)."""
        return ShardedObject(
            "rerun_state_machine_state",
            {"mode": "validate_results", "rank": dist.get_rank(), "suspicious_iteration": self.iteration},
            (dist.get_world_size(),),
            (dist.get_rank(),),
        )

    def _forward_step(self, data_iterator: None, model: torch.nn.Module) -> Any:
        """Run one microbatch. Megatron's schedule calls this."""
        tokens = torch.randint(_VOCABULARY, (1, _CONTEXT + 1), generator=self._generator).to(self._device)
        positions = torch.arange(_CONTEXT, device=self._device).unsqueeze(0)
        hidden = torch.ones(1, 1, _CONTEXT, _CONTEXT, dtype=torch.bool, device=self._device).triu(1)
        output = model(tokens[:, :-1].contiguous(), positions, hidden, labels=tokens[:, 1:].contiguous())

        def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = losses.float().mean()
            return mean, {"loss": mean.detach()}

        return output, mean_loss


def _config(layout: Layout, *, n_layers: int, hidden_size: int, experts: int) -> TransformerConfig:
    moe: dict[str, Any] = {}
    if experts:
        moe = {
            "num_moe_experts": experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": hidden_size,
            "moe_token_dispatcher_type": "allgather",
            "add_bias_linear": False,
        }
    return TransformerConfig(
        num_layers=n_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=2 * hidden_size,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        finalize_model_grads_func=finalize_model_grads,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **moe,
    )
