"""A program that trains a small llama with the ``Trainer`` of transformers, its weights sharded by FSDP2.

``hf_trainer.py save trainer DIRECTORY`` trains two steps and saves after each. ``load`` goes on from the second, as
``trainer.train(resume_from_checkpoint=...)`` does, and looks at what it starts from.
"""

import sys
import warnings
from pathlib import Path

import torch
from comparing import compare, keep, tell
from hf_accelerate import believe_in_devices
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        words = (torch.arange(16) * (place + 1)) % 31
        return {"input_ids": words, "labels": words}


class Look(TrainerCallback):
    """Keeps what two steps have left, or looks whether that is what training starts from."""

    def __init__(self, command, directory):
        self.command, self.directory = command, directory

    def on_step_begin(self, args, state, control, model, optimizer, lr_scheduler, **_):
        if self.command == "load" and state.global_step == 2:
            compare(self.directory.parent, self.directory.name, self.everything(model, optimizer, lr_scheduler))

    def on_train_end(self, args, state, control, model, optimizer, lr_scheduler, **_):
        if self.command == "save":
            keep(self.directory.parent, self.directory.name, self.everything(model, optimizer, lr_scheduler))

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            tell(logs["loss"])

    def everything(self, model, optimizer, lr_scheduler):
        return [model.state_dict(), optimizer.optimizer.state_dict(), lr_scheduler.state_dict()]


def train(command, directory):
    torch.manual_seed(1 if command == "save" else 2)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **shape))
    arguments = TrainingArguments(
        output_dir=str(directory),
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        },
        max_steps=2,
        save_steps=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    if command == "load":
        arguments.max_steps, arguments.save_strategy = 3, "no"
    believe_in_devices()
    trainer = Trainer(model=model, args=arguments, train_dataset=Words(), callbacks=[Look(command, directory)])
    trainer.train(resume_from_checkpoint=command == "load")
    assert trainer.state.global_step == arguments.max_steps


def main():
    warnings.simplefilter("ignore")
    command, name, *directories = sys.argv[1:]
    for directory in map(Path, directories):
        train(command, directory / name)


if __name__ == "__main__":
    main()
