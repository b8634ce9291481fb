"""A program that trains a small llama with the ``Trainer`` of transformers, its weights sharded by FSDP2.

It trains two steps and saves after each. ``load`` goes on from the second, as
``trainer.train(resume_from_checkpoint=...)`` does, and looks at what it starts from.
"""

import torch
from comparing import arguments, compare, keep, tell
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

    def __init__(self, path, is_new):
        self.path, self.is_new = path, is_new

    def on_step_begin(self, args, state, control, model, optimizer, lr_scheduler, **_):
        if not self.is_new and state.global_step == 2:
            compare(self.path, self.everything(model, optimizer, lr_scheduler))

    def on_train_end(self, args, state, control, model, optimizer, lr_scheduler, **_):
        if self.is_new:
            keep(self.path, self.everything(model, optimizer, lr_scheduler))

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            tell(logs["loss"])

    def everything(self, model, optimizer, lr_scheduler):
        return [model.state_dict(), optimizer.optimizer.state_dict(), lr_scheduler.state_dict()]


def train(path, is_new):
    torch.manual_seed(1 if is_new else 2)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=False, **shape))
    options = TrainingArguments(
        output_dir=str(path),
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        },
        max_steps=2 if is_new else 3,
        save_steps=1,
        save_strategy="steps" if is_new else "no",
        logging_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    believe_in_devices()
    trainer = Trainer(model=model, args=options, train_dataset=Words(), callbacks=[Look(path, is_new)])
    trainer.train(resume_from_checkpoint=not is_new)
    assert trainer.state.global_step == options.max_steps


if __name__ == "__main__":
    is_new, paths = arguments()
    for path in paths:
        train(path, is_new)
