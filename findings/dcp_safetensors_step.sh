#!/usr/bin/env bash
# torch 2.14.1, safetensors 0.8.0: torch.distributed.checkpoint's HuggingFaceStorageWriter takes a
# state with a number beside its tensors (a step) without a word, and writes a file that safetensors
# does not read: the tensors are lost with it. A state of tensors alone, the step as one, is read.
# Seen: tensors alone read; with "step": 7 saved, then "header too large".
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  torch==2.14.1 safetensors==0.8.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file

weights = torch.arange(6.0).reshape(2, 3)


def saved(name, step):
    dcp.save({"weights": weights, "step": step}, storage_writer=dcp.HuggingFaceStorageWriter(name))
    (file,) = Path(name).glob("*.safetensors")
    try:
        read = load_file(file)
    except SafetensorError as error:
        return f"{file.stat().st_size} bytes saved, not read: {error}"
    return "read" if torch.equal(read["weights"], weights) else "other values"


seen = {"a tensor": saved("tensor", torch.tensor(7)), "an int": saved("int", 7)}
for what, verdict in seen.items():
    print(f"step is {what}: {verdict}")
sys.exit(not (seen["a tensor"] == "read" and "not read" in seen["an int"]))
PY
