"""Megatron-Bridge's own ``pretrain``, its GPT step, model provider and checkpoints, on ranks without a GPU.

It gives that function what a recipe gives: a configuration, data, and callbacks that note losses and weights. Calls of
CUDA are redirected, and of the sources of Megatron-Core a C++ helper for data sets on disk is not compiled.
"""

import dataclasses
import functools
import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from comparing import digest

from demo import megatron_cpu

megatron_cpu.install()

from megatron.bridge.data.base import DatasetProvider  # noqa: E402
from megatron.bridge.models import GPTModelProvider  # noqa: E402
from megatron.bridge.models.gpt_provider import local_layer_spec  # noqa: E402
from megatron.bridge.training import config, initialize, setup  # noqa: E402
from megatron.bridge.training.callbacks import Callback  # noqa: E402
from megatron.bridge.training.gpt_step import forward_step  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402

_setup_optimizer = setup.setup_optimizer


def setup_optimizer_with_state(*args, **kwargs):
    """torch's Adam, unlike those for GPUs, has no state before its first step, and Megatron loads into one."""
    optimizer, scheduler = _setup_optimizer(*args, **kwargs)
    for part in optimizer.chained_optimizers:
        for parameter in (each for group in part.optimizer.param_groups for each in group["params"]):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            part.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return optimizer, scheduler


initialize.compile_helpers = lambda: None
setup.setup_optimizer = setup_optimizer_with_state
setup.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)

_LENGTH = 8
_STEPS = 6


class Tokens(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, place):
        tokens = torch.randint(63, (_LENGTH + 1,), generator=torch.Generator().manual_seed(place))
        mask, positions = torch.ones(_LENGTH), torch.arange(_LENGTH)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": positions}


@dataclasses.dataclass
class Data(DatasetProvider):
    seq_length: int = _LENGTH

    def build_datasets(self, context):
        return Tokens(context.train_samples), None, None


class Notes(Callback):
    """What a rank notes: where it starts, its losses, and at the end weights and the state of the optimizer."""

    def __init__(self):
        self.noted = {"losses": {}}

    def on_data_init_start(self, context):
        self.random = torch.get_rng_state()

    def on_train_start(self, context):
        # Making a data loader draws a random number of the CPU. Dropout on a GPU would not notice.
        torch.set_rng_state(self.random)
        self.noted["start"] = step = context.state.train_state.step
        if step:
            set_steps_of_adam(context.optimizer, step)

    def on_train_step_end(self, context):
        step = context.state.train_state.step + 1  # which Bridge counts after this call
        self.noted["losses"][step] = context.loss_dict["lm loss"].tolist()

    def on_train_end(self, context):
        optimizer = [
            [parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]]
            for part in context.optimizer.chained_optimizers
            for parameter, state in part.optimizer.state.items()
        ]
        self.noted["digest"] = digest([context.model[0].state_dict(), optimizer, context.scheduler.num_steps])


def set_steps_of_adam(optimizer, steps):
    """Without Apex and Transformer Engine, Megatron does not load the number of steps of Adam, with and without us."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = torch.tensor(float(steps))


def configuration(directory, loaded, step, async_save):
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
    without_kernels = dict.fromkeys(
        (
            "apply_rope_fusion",
            "bias_dropout_fusion",
            "cross_entropy_loss_fusion",
            "gradient_accumulation_fusion",
            "masked_softmax_fusion",
            "persist_layer_norm",
        ),
        False,
    )
    model = GPTModelProvider(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=2,
        seq_length=_LENGTH,
        vocab_size=64,
        transformer_layer_spec=local_layer_spec,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        use_cpu_initialization=True,
        pipeline_dtype=torch.bfloat16,
        **bf16,
        **without_kernels,
    )
    return config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(train_iters=_STEPS, micro_batch_size=1, global_batch_size=4),
        validation=config.ValidationConfig(eval_iters=0),
        optimizer=config.OptimizerConfig(optimizer="adam", lr=0.01, min_lr=0.0, use_distributed_optimizer=True, **bf16),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant",
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=True),
        dataset=Data(dataloader_type="single", num_workers=0, pin_memory=False),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=63),
        checkpoint=config.CheckpointConfig(
            save=str(directory),
            save_interval=2,
            load=None if loaded is None else str(loaded),
            ckpt_step=step,
            ckpt_format="torch_dist",
            async_save=async_save,
            async_strategy="mcore",  # the default asks for a newer nvidia_resiliency_ext than PyPI has
        ),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
    )


def main(directory, *runs):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for run in runs:
        command, _, name = run.partition(":")
        if command == "save":
            own, loaded, step = Path(directory, name), None, None
        else:
            own, (loaded, step) = Path(directory, f"after-{name}"), name.split("@")
            loaded, step = Path(directory, loaded), int(step)
        notes = Notes()
        pretrain(configuration(own, loaded, step, name == "async"), forward_step, callbacks=[notes])
        (own / f"notes.{dist.get_rank()}.json").write_text(json.dumps(notes.noted))
    dist.destroy_process_group()
