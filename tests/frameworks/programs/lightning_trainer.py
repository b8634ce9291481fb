"""A program that trains with Lightning's Trainer.

Two epochs write a checkpoint each. ``load`` goes on from the second, as ``trainer.fit(ckpt_path=...)`` does, and looks
at what it starts from.
"""

import logging

import lightning
import torch
from comparing import arguments, compare, keep, small_model, tell
from fabric import let_fsdp_run_on_cpu, sharded
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy


class FSDPTrainerOnCPU(FSDPStrategy):
    pass


class Module(lightning.LightningModule):
    def __init__(self, path, is_new):
        super().__init__()
        self.path, self.is_new = path, is_new
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.model = small_model()
            if self.path.name == "mp":
                sharded(self.model, self.device_mesh)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainer.model.parameters())

    def training_step(self, batch, place):
        loss = self.model(batch).square().mean()
        tell(loss)
        return loss

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)

    def on_train_start(self):
        if not self.is_new:
            compare(self.path, self.state())
            assert self.trainer.current_epoch == 2

    def on_train_end(self):
        if self.is_new:
            keep(self.path, self.state())

    def state(self):
        return [
            [parameter.data for parameter in self.trainer.model.parameters()],
            self.optimizers().optimizer.state_dict(),
        ]


def strategy_named(name):
    if name == "fsdp":
        let_fsdp_run_on_cpu()
        return FSDPTrainerOnCPU(state_dict_type="sharded")
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def fit(path, is_new):
    lightning.seed_everything(1 if is_new else 2)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy_named(path.name),
        max_epochs=2 if is_new else 3,
        callbacks=[ModelCheckpoint(path, filename="{epoch}", save_top_k=-1, save_last=is_new)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(path, is_new), ckpt_path=None if is_new else path / "epoch=1.ckpt")


if __name__ == "__main__":
    logging.getLogger("lightning").setLevel(logging.ERROR)
    is_new, paths = arguments()
    for path in paths:
        fit(path, is_new)
