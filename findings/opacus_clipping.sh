#!/usr/bin/env bash
# opacus 1.6.0: with clipping="adaptive", the bound that it adapts, and scales its noise by, is not
# in what save_checkpoint() writes. A resumed training clips and adds noise by the first bound
# again; epsilon, which does not depend on it, is the same, so nothing tells.
# Seen: after 10 epochs the bound was 0.3035, after a resume 10.0: 33 times the noise in each step;
# after 5 more epochs 0.4784 instead of 0.1768, epsilon 9.7312 in both.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet torch==2.15.0 \
  opacus==1.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
points = torch.randn(512, 10, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(points, (points[:, 0] > 0).long())


def start():
    torch.manual_seed(0)
    model = torch.nn.Linear(10, 2)
    engine = PrivacyEngine()
    return engine, *engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(DATA, batch_size=64), noise_multiplier=1.0, max_grad_norm=10.0,
        clipping="adaptive", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
        max_clipbound=100.0, min_clipbound=0.01, unclipped_num_std=5.0,
    )


def train(epochs, engine, model, optimizer, loader):
    for _ in range(epochs):
        for batch, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), labels).backward()
            optimizer.step()
    return float(optimizer.max_grad_norm), engine.get_epsilon(1e-5)


first = start()
saved, _ = train(10, *first)
first[0].save_checkpoint(path="checkpoint.pt", module=first[1], optimizer=first[2])
whole, epsilon = train(5, *first)
second = start()
second[0].load_checkpoint(path="checkpoint.pt", module=second[1], optimizer=second[2])
loaded = float(second[2].max_grad_norm)
resumed, same = train(5, *second)
print(f"the bound when it was saved {saved:.4f}, when it was loaded {loaded}")
print(f"5 epochs later: uninterrupted {whole:.4f}, resumed {resumed:.4f};", end=" ")
print(f"epsilon {epsilon:.4f} and {same:.4f}")
sys.exit(not (saved < 1 and loaded == 10 and resumed > 1.5 * whole and epsilon == same))
PY
