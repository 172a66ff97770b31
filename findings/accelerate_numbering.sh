#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.14.1: with automatic_checkpoint_naming, load_state() loads the newest
# checkpoint, but save_state() numbers from 0 again. With total_limit, what was just saved counts
# as the oldest: each later start loads the last state of the first process, and what came after it
# is lost, without a word. Without a limit, or when the number is met, save_state() is a ValueError.
# Setting project_configuration.iteration after load_state() helps.
# Seen: saved to 5; the next starts at 5 and saves 6 and 7, the one after it starts at 5.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    accelerate==1.15.0 torch==2.14.1 numpy==2.4.6
cd "$folder"
cat >train.py <<'PY'
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

project = ProjectConfiguration(
    project_dir="out", automatic_checkpoint_naming=True, total_limit=2
)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model = accelerator.prepare(model)
saved = Path("out/checkpoints")
if saved.exists():
    accelerator.load_state()
print(int(model.weight), end=" ")
for _ in range(int(sys.argv[1])):
    with torch.no_grad():
        model.weight += 1
    accelerator.save_state()
print(*sorted(path.name for path in saved.iterdir()))
PY
for steps in 5 2 1; do venv/bin/python train.py $steps 2>/dev/null; done | tee seen
diff seen - <<'SEEN'
0 checkpoint_3 checkpoint_4
5 checkpoint_1 checkpoint_4
5 checkpoint_0 checkpoint_4
SEEN
