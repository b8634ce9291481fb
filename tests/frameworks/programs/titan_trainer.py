"""A program that trains torchtitan's debug llama with torchtitan's own ``Trainer``, on a CPU.

It trains three steps and writes a checkpoint after each. ``load`` goes on from the last, and looks at what it starts
from. It is named by ``checkpoint.async_mode``.

torchtitan is for accelerators. What stands in for them here: the name of the device, what it says of its memory, and
attention, whose kernel has no backward on a CPU.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch._utils
from comparing import arguments, compare, keep, tell
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: type("Properties", (), {"total_memory": 2**30}),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "current_device": lambda: 0,
}.items():
    setattr(torch.cpu, name, value)
if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 has not what torchtitan 0.3 calls
    torch.distributed.set_timeout = lambda *_: None

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


def attention_on_cpu(self, q, k, v, *, attention_masks, scale=None, enable_gqa=False, **_):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)


FlexAttention.forward = attention_on_cpu


class Words(torch.utils.data.IterableDataset):
    """The same few sentences on every rank, for ever; knows where it is."""

    def __init__(self, seq_len):
        self.seq_len, self.place = seq_len, 0

    def __iter__(self):
        while True:
            self.place += 1
            words = (torch.arange(self.seq_len + 1) * self.place) % 97
            yield {"input": words[:-1], "positions": torch.arange(self.seq_len)}, words[1:]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state_dict):
        self.place = state_dict["place"]


class DataLoader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, snapshot_every_n_steps, **_):
        super().__init__(
            Words(seq_len),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps or 1,
        )


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, text):
        return [0]

    def decode(self, tokens):
        return ""

    def get_vocab_size(self):
        return 97


def configured(path, steps):
    config = llama3_debugmodel()
    config.dump_folder = str(path.parent)
    config.tokenizer, config.dataloader = Tokenizer.Config(), DataLoader.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 1, 32, steps
    config.training.disable_cuda_graphs = True
    config.debug.seed = 1
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.validator.enable = False
    config.checkpoint = CheckpointManager.Config(
        enable=True, folder=path.name, interval=1, async_mode=path.name, last_save_model_only=False
    )
    return config


class LookingTrainer(Trainer):
    """Keeps what three steps have left, or looks whether that is what training starts from."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, data_iterator):
        path = Path(self.config.dump_folder, self.config.checkpoint.folder)
        if self.step == 4:
            compare(path, self.everything())
        super().train_step(data_iterator)
        if self.step == 3:
            keep(path, self.everything())

    def forward_backward_step(self, **kwargs):
        loss = super().forward_backward_step(**kwargs)
        tell(loss.detach())
        return loss

    def everything(self):
        states = self.checkpointer.states
        return {
            "model": self.model_parts[0].state_dict(),
            **{name: states[name].state_dict() for name in ("optimizer", "lr_scheduler", "dataloader")},
            "ntokens_seen": self.ntokens_seen,
        }


def main():
    is_new, (path,) = arguments()
    trainer = LookingTrainer(configured(path, steps=3 if is_new else 4))
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it reduces
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
