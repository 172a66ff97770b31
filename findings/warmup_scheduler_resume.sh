#!/usr/bin/env bash
# warmup-scheduler 0.3, torch 2.14.1: a GradualWarmupScheduler that is loaded from its state_dict never
# changes the learning rate again once the warm-up is over. Its state holds after_scheduler as an
# object, pickled with an optimizer of its own (so torch.load needs weights_only=False, and the
# checkpoint has the model's weights and moments twice): the resumed schedule sets that one's rate.
# Loading after_scheduler's state into the new one instead, and the other entries one by one, helps.
# Seen: with a cosine of 20 epochs after 3 of warm-up, saved at epoch 8, the rate stays 0.091.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    warmup-scheduler==0.3 torch==2.14.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import io
import warnings

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from warmup_scheduler import GradualWarmupScheduler

warnings.simplefilter("ignore")


def made():
    model = torch.nn.Linear(1000, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    after = CosineAnnealingLR(optimizer, 20)
    return model, optimizer, GradualWarmupScheduler(optimizer, 1.0, 3, after)


def trained(optimizer, schedule, epochs):
    rates = []
    for _ in range(epochs):
        rates.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        schedule.step()
    return rates


def resumed(saved, careful):
    _, optimizer, schedule = made()
    state = torch.load(io.BytesIO(saved), weights_only=False)
    optimizer.load_state_dict(state["optimizer"])
    if careful:
        after = state["schedule"].pop("after_scheduler")
        schedule.after_scheduler.load_state_dict(after.state_dict())
    schedule.load_state_dict(state["schedule"])
    return trained(optimizer, schedule, 6)


_, optimizer, schedule = made()
trained(optimizer, schedule, 8)
file = io.BytesIO()
torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
whole = trained(optimizer, schedule, 6)
plain, careful = (resumed(file.getvalue(), careful) for careful in (False, True))
for name, rates in {"not stopped": whole, "resumed": plain, "with care": careful}.items():
    print(f"{name}: {rates}")
assert len(set(whole)) == 6 and whole == careful, (whole, careful)
assert plain == whole[:1] * 6, plain
PY
