#!/usr/bin/env bash
# mace-torch 0.3.16, torch 2.14.1: `mace_run_train --restart_latest` goes back to the best epoch, not
# to the latest (only a better one is saved), trains that epoch once more on top of itself, and has
# forgotten how good it was: the first epoch after a restart counts as the best, so the best model's
# file is overwritten by a worse one. So an interrupted run repeats all epochs since its best, and
# ends with another, here worse, model. --save_all_checkpoints goes on from the latest, and always
# ends with the latest.
# Seen: of 24 epochs the best is 4 (0.1311). Stopped after 16 and restarted, training begins at epoch
# 4, and its file then has a model of 0.1367; the run ends with epoch 21's (0.1327).
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    mace-torch==0.3.16 torch==2.14.1 numpy==2.4.6 ase==3.29.0 "setuptools<81"
cd "$folder"
export HOME=$folder OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
venv/bin/python - <<'PY'
import os
import re
import subprocess

import numpy as np
from ase import Atoms
from ase.io import write

draw, molecules = np.random.default_rng(0), []
for _ in range(24):
    place = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]]) + draw.normal(size=(3, 3)) * 0.05
    water = Atoms("OHH", positions=place, cell=[10] * 3, pbc=False)
    stretch = np.linalg.norm(place[1] - place[0]) + np.linalg.norm(place[2] - place[0]) - 1.92
    water.info["REF_energy"] = float(stretch**2 * 20 - 14)
    water.arrays["REF_forces"] = draw.normal(size=(3, 3)) * 0.1
    molecules.append(water)
write("train.xyz", molecules)


def train(folder, epochs):
    """Return the validation loss of each epoch that it trained, and the model that it ends with."""
    text = subprocess.run(
        ["venv/bin/mace_run_train", "--name=m", "--train_file=train.xyz", "--valid_fraction=0.3",
         "--E0s=average", "--model=MACE", "--hidden_irreps=16x0e", "--r_max=3", "--batch_size=4",
         f"--max_num_epochs={epochs}", "--patience=1000", "--lr=0.03", "--seed=1", "--device=cpu",
         "--default_dtype=float32", f"--work_dir={folder}", "--restart_latest"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
    ).stdout
    losses = re.findall(r"Epoch (\d+): head: Default, loss= *([\d.e-]+)", text)
    return {int(e): round(float(x), 4) for e, x in losses}, int(re.findall(r"epoch-(\d+)\.pt", text)[-1])


whole, last = train("whole", 24)
print(f"not stopped: best {min(whole, key=whole.get)}, ends with epoch {last}: {whole[last]}")
first, _ = train("stopped", 16)
best = min(first, key=first.get)
again, last_again = train("stopped", 24)
print(f"stopped after 16: best {best} ({first[best]}), goes on with epoch {min(again)}")
print(f"epoch {best} is then {again[best]}, ends with epoch {last_again}: {again[last_again]}")
print("files:", [name for name in os.listdir("stopped/checkpoints") if "epoch" in name])
assert min(whole, key=whole.get) == last == best < 15, (whole, first)
assert {e: whole[e] for e in first} == first, "the same seed gives the same epochs"
assert min(again) == best and again[best] > first[best] and last_again != best, again
assert again[last_again] > whole[last], (again, whole)
PY
