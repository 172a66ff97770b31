#!/usr/bin/env bash
# transformers 5.24.0, datasets 5.2.0, accelerate 1.15.0, torch 2.14.1: with
# train_sampling_strategy="group_by_length" a Trainer that resumes in the middle of an epoch after the
# first shuffles that epoch anew, and skips the first batches of this other order: some samples are
# trained twice, others never, although ignore_data_skip is False. Its sampler draws from torch's
# global random numbers, which are restored only after that; the default sampler has a seed.
# A checkpoint at the end of an epoch (save_strategy="epoch") resumes exactly.
# Seen: 32 samples, 3 epochs of 8 steps, stopped at step 11 or 21: 9 of them never come in that epoch.
# Stopped at 3 (the first epoch) or at 16 (the end of one), all is as without the stop.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0 torch==2.14.1 numpy==2.4.6
cd "$folder"
export HOME=$folder
venv/bin/python -W ignore - <<'PY'
import datasets
import torch
from transformers import Trainer, TrainingArguments

seen = []


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x, length):
        seen.append([int(sample) for sample in x[:, 0]])
        return {"loss": self.layer(x).square().mean()}


def trained(strategy, folder, begin=0):
    """Train 3 epochs of 8 steps, or their rest from a checkpoint; return the batches."""
    seen.clear()
    data = datasets.Dataset.from_dict(
        {"x": [[float(each)] for each in range(32)], "length": [1 + each % 5 for each in range(32)]}
    )
    trainer = Trainer(
        model=Model(),
        args=TrainingArguments(
            output_dir=folder, num_train_epochs=3, per_device_train_batch_size=4, seed=3, use_cpu=True,
            train_sampling_strategy=strategy, save_strategy="steps", save_steps=1, report_to="none",
            logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        ),
        train_dataset=data,
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{begin}" if begin else None)
    return list(seen)


found = {}
for strategy in ("random", "group_by_length"):
    whole = trained(strategy, strategy)
    for stop in (3, 11, 16, 21):
        parts = whole[:stop] + trained(strategy, strategy, stop)
        first = stop // 8 * 8
        samples = [sample for batch in parts[first : first + 8] for sample in batch]
        found[strategy, stop] = parts == whole, 32 - len(set(samples))
        print(f"{strategy}, stopped at {stop}: exact {found[strategy, stop][0]}, never {found[strategy, stop][1]}")
inexact = {stop: never for (strategy, stop), (exact, never) in found.items() if not exact}
assert inexact == {11: 9, 21: 9} and found["group_by_length", 16][0] and found["random", 21][0], found
PY
