#!/usr/bin/env bash
# transformers 5.24.0, datasets 5.2.0, accelerate 1.15.0, torch 2.14.1: a Trainer with a dataset of
# unknown length (streaming, max_steps) counts all of max_steps as one epoch. A resume skips batches
# in the first pass over the data only; from a checkpoint of any later pass it starts at the second
# pass's first batch. A training that is often interrupted sees the same batches again and again,
# and never the others, without a warning, although ignore_data_skip is False.
# dataset.repeat(PASSES) makes one pass of them, in one order, and each resume exact.
# Seen: 5 passes of 8 steps over 32 samples. Stopped at step 22, it goes on with what was step 9.
# Stopped at 10, 16, 22, 28, 34, it sees 8 samples once, the others 6 or 7 times, instead of 5 each.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0 torch==2.14.1 numpy==2.4.6
cd "$folder"
export HOME=$folder
venv/bin/python -W ignore - <<'PY'
from collections import Counter

import datasets
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

BATCH, PASS, STEPS = 4, 8, 40
seen = []


class Model(torch.nn.Linear):
    def forward(self, x):
        seen.append([int(sample) for sample in x[:, 0]])
        return {"loss": super().forward(x).square().mean()}


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == stop


def samples(shards):
    for shard in shards:
        yield from ({"x": [float(shard * PASS + each)]} for each in range(PASS))


def trained(folder, repeat, stops):
    """Train until each of the stops, and from the newest checkpoint again; return the batches."""
    global stop
    seen.clear()
    for begin, stop in zip([0, *stops], [*stops, STEPS]):
        data = datasets.IterableDataset.from_generator(samples, gen_kwargs={"shards": [0, 1, 2, 3]})
        data = data.shuffle(seed=1, buffer_size=16)
        trainer = Trainer(
            model=Model(1, 1),
            args=TrainingArguments(
                output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, seed=3, use_cpu=True,
                save_steps=1, save_total_limit=2, report_to="none", logging_strategy="no", disable_tqdm=True,
            ),
            train_dataset=data.repeat(STEPS // PASS) if repeat else data,
            callbacks=[Stop()],
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{begin}" if begin else None)
    return list(seen)


datasets.disable_progress_bars()
for repeat in (False, True):
    whole = trained(f"whole{repeat}", repeat, [])
    once = trained(f"once{repeat}", repeat, [22])
    often = trained(f"often{repeat}", repeat, [10, 16, 22, 28, 34])
    counts = Counter(sample for batch in often for sample in batch)
    at, spread = whole.index(once[22]) + 1, sorted(Counter(counts.values()).items())
    print(f"repeat {repeat}: exact {once == whole}, stopped often {often == whole}")
    print(f"  after step 22 comes what was step {at}; (seen so often, so many samples): {spread}")
    assert len(once) == len(often) == STEPS
    if repeat:
        assert once == often == whole == whole[:PASS] * (STEPS // PASS)
    else:
        assert once[22:] == whole[PASS : PASS + STEPS - 22] and spread == [(1, 8), (6, 16), (7, 8)]
PY
