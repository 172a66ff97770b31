#!/usr/bin/env bash
# fvcore 0.1.5.post20221221: PeriodicCheckpointer(max_to_keep=2) counts the files that it wrote
# since it was made, not those in the folder: after each resume the two old ones stay for ever, so
# the disk of a run that is interrupted n times holds 2 n + 2 checkpoints.
# Seen: 2 files, then 4, 6, 8.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet torch==2.15.0 \
  fvcore==0.1.5.post20221221 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys
from pathlib import Path

import torch
from fvcore.common.checkpoint import Checkpointer, PeriodicCheckpointer

seen = []
Path("checkpoints").mkdir()
for start in range(0, 200, 50):
    checkpointer = Checkpointer(torch.nn.Linear(1, 1), "checkpoints")
    checkpointer.resume_or_load("", resume=True)
    periodic = PeriodicCheckpointer(checkpointer, 10, max_iter=1000, max_to_keep=2)
    for step in range(start, start + 50):
        periodic.step(step)
    files = sorted(path.name for path in Path("checkpoints").glob("*.pth"))
    print(f"to step {start + 50}:", *files)
    seen.append(len(files))
sys.exit(seen != [2, 4, 6, 8])
PY
