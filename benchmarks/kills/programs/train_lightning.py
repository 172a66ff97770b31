"""Lightning's Trainer with ModelCheckpoint and `ckpt_path="last"`, as in its documentation."""

# /// script
# dependencies = ["lightning"]
# [tool.kills]
# users_must = """
# save random states and the loader's position yourself (`on_save_checkpoint`, a loader with
# `state_dict`): its checkpoints have neither, so a resume inside an epoch trains on different
# samples. Not tested here with both."""
# ///

import lightning
import reports
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class _Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = reports.network()

    def training_step(self, batch):
        self.seen = batch[0][:, 0]
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def on_train_batch_end(self, *_):
        reports.step(self.global_step, self.seen)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


lightning.seed_everything(0)
module = _Module()
saves = ModelCheckpoint(reports.CHECKPOINTS, every_n_train_steps=reports.SAVE_EVERY, save_last=True)
settings = {"max_steps": reports.STEPS, "accelerator": "cpu", "logger": False}
trainer = lightning.Trainer(**settings, callbacks=[saves])
loader = DataLoader(TensorDataset(*reports.samples()), batch_size=reports.BATCH, shuffle=True)
trainer.fit(module, loader, ckpt_path="last")
reports.final(module.network.state_dict())
