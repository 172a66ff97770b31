#!/usr/bin/env bash
# pytorch-metric-learning 2.9.0, lightly 1.6.0, torch 2.14.1: losses that compare with a memory of
# earlier batches forget it at a resume, though their state_dict is saved and loaded (strict).
# CrossBatchMemory saves the embeddings, but not how many there are nor where the next one goes: a
# full memory counts as empty. lightly's memory banks save nothing: random vectors again serve as
# negatives (NTXentLoss, as in MoCo) or as neighbours (NNMemoryBankModule, NNCLR). The loss jumps
# until the memory is full again. Saving has_been_filled and queue_idx (pytorch-metric-learning), or
# the buffers bank and bank_ptr (lightly), beside the state_dict and setting them again is exact.
# Seen: with a memory of 64 and batches of 8, the first 7 or 8 batches after a resume differ.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    pytorch-metric-learning==2.9.0 lightly==1.6.0 torch==2.14.1 torchvision==0.29.2 numpy==2.4.6
cd "$folder"
export HOME=$folder LIGHTLY_DID_VERSION_CHECK=True
venv/bin/python -W ignore - <<'PY'
import copy

import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import NNMemoryBankModule
from pytorch_metric_learning.losses import ContrastiveLoss, CrossBatchMemory

SIZE, WIDTH, BATCH = 64, 8, 8
MADE = {
    "CrossBatchMemory": lambda: CrossBatchMemory(ContrastiveLoss(), WIDTH, memory_size=SIZE),
    "NTXentLoss": lambda: NTXentLoss(memory_bank_size=(SIZE, WIDTH)),
    "NNMemoryBankModule": lambda: NNMemoryBankModule(size=(SIZE, WIDTH)),
}
BESIDE = {
    "CrossBatchMemory": lambda made: (made, ["has_been_filled", "queue_idx"]),
    "NTXentLoss": lambda made: (made.memory_bank, ["bank", "bank_ptr"]),
    "NNMemoryBankModule": lambda made: (made, ["bank", "bank_ptr"]),
}


def called(name, made, first, last):
    """Return a number for each batch: its loss, or the sum of its neighbours."""
    numbers = []
    for step in range(first, last):
        draw = torch.Generator().manual_seed(step)
        x = torch.nn.functional.normalize(torch.randn(BATCH, WIDTH, generator=draw)).requires_grad_()
        if name == "CrossBatchMemory":
            result = made(x, torch.randint(0, 4, (BATCH,), generator=draw))
        elif name == "NTXentLoss":
            result = made(x, x.flip(0))
        else:
            result = made(x, update=True).sum()
        numbers.append(round(result.item(), 5))
    return numbers


for name, make in MADE.items():
    torch.manual_seed(0)
    made = make()
    called(name, made, 0, 12)
    saved = copy.deepcopy(made.state_dict())
    holder, names = BESIDE[name](made)
    beside = {each: copy.deepcopy(getattr(holder, each)) for each in names}
    whole = called(name, made, 12, 24)
    resumed = []
    for careful in (False, True):
        torch.manual_seed(1)
        made = make()
        made.load_state_dict(saved)
        if careful:
            for each, value in beside.items():
                setattr(BESIDE[name](made)[0], each, copy.deepcopy(value))
        resumed.append(called(name, made, 12, 24))
    print(f"{name}, saved: {list(saved)}")
    for way, numbers in zip(("not stopped", "resumed", "with these beside"), (whole, *resumed)):
        print(f"  {way}: {numbers[:3]} ... {numbers[-1]}")
    wrong = [one != other for one, other in zip(whole, resumed[0])]
    filled = SIZE // BATCH
    print(f"  resumed, {sum(wrong)} batches differ, as long as the memory is not full again")
    assert resumed[1] == whole and all(wrong[: filled - 1]) and not any(wrong[filled:]), wrong
PY
