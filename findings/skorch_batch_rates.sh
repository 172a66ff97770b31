#!/usr/bin/env bash
# skorch 1.4.0, torch 2.14.1: where LRScheduler(step_every="batch") meets a resume (LoadInitState), it
# takes the number of epochs so far for the number of batches: a OneCycleLR warms up once more and
# never comes down, a LambdaLR goes back to rates of long ago, a StepLR changes at other batches. No
# warning; step_every="epoch" is exact. LRScheduler(..., last_epoch=BATCHES_SO_FAR - 1) helps.
# Seen: 12 epochs of 4 batches, stopped after 5: OneCycleLR goes on with 0.0322 instead of 0.0919, and
# ends with 0.0447 instead of 0.0002.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    skorch==1.4.0 torch==2.14.1 numpy==2.4.6 scikit-learn==1.9.0
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import shutil

import numpy as np
import torch
from skorch import NeuralNetRegressor
from skorch.callbacks import Checkpoint, LoadInitState, LRScheduler
from torch.optim import lr_scheduler as schedules

EPOCHS, BATCHES, STOP = 12, 4, 5
X = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def trained(epochs, policy, every, settings, resume=False):
    """Train so many epochs more, and return the learning rate of each batch (or epoch)."""
    torch.manual_seed(0)
    saved = Checkpoint(dirname="saved", monitor=None)
    callbacks = [LRScheduler(policy, step_every=every, event_name="rate", **settings), saved]
    if resume:
        callbacks.insert(0, LoadInitState(saved))
    net = NeuralNetRegressor(
        torch.nn.Linear(2, 1), optimizer=torch.optim.SGD, lr=0.1, batch_size=16, train_split=None,
        max_epochs=epochs, verbose=0, callbacks=[(f"c{n}", each) for n, each in enumerate(callbacks)],
    )
    net.fit(X, Y)
    rates = net.history[:, "rate"] if every == "epoch" else sum(net.history[:, "batches", :, "rate"], [])
    return [round(rate, 4) for rate in rates]


CASES = {
    "OneCycleLR": ("batch", {"max_lr": 0.1, "total_steps": EPOCHS * BATCHES + 1}),
    "StepLR": ("batch", {"step_size": 6, "gamma": 0.5}),
    "LambdaLR": ("batch", {"lr_lambda": lambda step: 0.97**step}),
    "CosineAnnealingLR": ("epoch", {"T_max": EPOCHS}),
}
exact = {}
for name, (every, settings) in CASES.items():
    policy, at = getattr(schedules, name), STOP * (BATCHES if every == "batch" else 1)
    whole = trained(EPOCHS, policy, every, settings)
    resumed = []
    for extra in ({}, {"last_epoch": at - 1}):
        shutil.rmtree("saved")
        trained(STOP, policy, every, settings)
        resumed.append(trained(EPOCHS - STOP, policy, every, settings | extra, resume=True))
    exact[name] = [rates == whole for rates in resumed]
    for way, rates in zip(("not stopped", "resumed", "last_epoch"), (whole, *resumed)):
        print(f"{name}, {every}, {way}: {rates[at : at + 4]} ... {rates[-1]}")
assert exact.pop("CosineAnnealingLR") == [True, True], exact
assert all(each == [False, True] for each in exact.values()), exact
PY
