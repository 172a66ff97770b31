#!/usr/bin/env bash
# lightning 2.6.6, torch 2.14.1: ModelCheckpoint(save_last=True) overwrites last.ckpt at each save. If
# a run resumes from last.ckpt in a folder of another path (a restored copy: a new machine, a
# container's mount, a scratch folder named by the job), Lightning no longer takes that file for its
# own and writes last-v1.ckpt beside it, without a word in the log. A script that opens last.ckpt by
# name gets the state of the first machine at each later start. ckpt_path="last" finds the newest;
# enable_version_counter=False keeps one file.
# Seen: moved once, last.ckpt stays at step 4 and last-v1.ckpt is at step 8.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    lightning==2.6.6 torch==2.14.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import logging
import shutil
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder, epochs, **options):
    last = Path(folder, "last.ckpt")
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True, **options)],
    )
    data = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1)
    trainer.fit(Line(), data, ckpt_path=last if last.exists() else None)


def steps(folder):
    files = sorted(Path(folder).glob("last*.ckpt"))
    return {one.name: torch.load(one, weights_only=False)["global_step"] for one in files}


def moved(name, **options):
    train(f"{name}-1", 1, **options)
    shutil.copytree(f"{name}-1", f"{name}-2")
    train(f"{name}-2", 2, **options)
    return steps(f"{name}-2")


train("stays", 1)
train("stays", 2)
found = {
    "in one folder": steps("stays"),
    "moved": moved("moved"),
    "moved, without a version counter": moved("flat", enable_version_counter=False),
}
for name, files in found.items():
    print(f"{name}: {files}")
assert found["in one folder"] == {"last.ckpt": 8}, found
assert found["moved"] == {"last-v1.ckpt": 8, "last.ckpt": 4}, found
assert found["moved, without a version counter"] == {"last.ckpt": 8}, found
PY
