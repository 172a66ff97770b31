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
import told
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class _Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = told.network()

    def training_step(self, batch):
        self.seen = batch[0][:, 0]
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def on_train_batch_end(self, *_):
        told.step(self.global_step, self.seen)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


lightning.seed_everything(0)
module = _Module()
saves = ModelCheckpoint(told.CHECKPOINTS, every_n_train_steps=told.SAVE_EVERY, save_last=True)
settings = {"max_steps": told.STEPS, "accelerator": "cpu", "logger": False}
trainer = lightning.Trainer(**settings, callbacks=[saves])
loader = DataLoader(TensorDataset(*told.samples()), batch_size=told.BATCH, shuffle=True)
trainer.fit(module, loader, ckpt_path="last")
told.final(module.network.state_dict())
