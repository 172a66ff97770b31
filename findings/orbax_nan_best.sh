#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: with best_fn, a CheckpointManager takes a metric that is NaN for the best
# there has been, in both modes: it keeps that step and deletes the real best, and best_step() names
# it. A checkpoint after it is compared with the NaN and wins in its turn, so one NaN loss in an
# evaluation costs the best model. A best_fn that returns -inf (inf for "min") for NaN helps.
# Seen: of 0.5, 0.9, NaN, 0.6 the manager keeps 0.6 (max_to_keep=1), or NaN and 0.6 (2), not 0.9.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  orbax-checkpoint==0.12.8 jax==0.10.2 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import math
import sys
import tempfile
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp


def kept(metrics, mode, limit, best_fn):
    """The metrics of the steps that a manager keeps, and of the one that it calls the best."""
    options = ocp.CheckpointManagerOptions(max_to_keep=limit, best_fn=best_fn, best_mode=mode)
    with ocp.CheckpointManager(tempfile.mkdtemp(dir=Path.cwd()), options=options) as manager:
        for step, metric in enumerate(metrics):
            state = ocp.args.StandardSave({"weights": np.full(1, step)})
            manager.save(step, args=state, metrics={"score": metric})
        manager.wait_until_finished()
        return [metrics[step] for step in sorted(manager.all_steps())], metrics[manager.best_step()]


def score(metrics):
    return metrics["score"]


def score_or_worst(metrics):
    return -math.inf if math.isnan(metrics["score"]) else metrics["score"]


CASES = [
    ("max", [0.5, 0.9, 0.6], 1, score, "([0.9], 0.9)"),
    ("max", [0.5, 0.9, math.nan], 1, score, "([nan], nan)"),
    ("max", [0.5, 0.9, math.nan, 0.6], 1, score, "([0.6], 0.6)"),
    ("max", [0.5, 0.9, math.nan, 0.6], 2, score, "([nan, 0.6], 0.6)"),
    ("min", [0.5, 0.2, math.nan, 0.6], 1, score, "([0.6], 0.6)"),
    ("max", [0.5, 0.9, math.nan, 0.6], 1, score_or_worst, "([0.9], 0.9)"),
]
ok = True
for mode, metrics, limit, best_fn, expected in CASES:
    seen = str(kept(metrics, mode, limit, best_fn))
    print(f"{mode} of {metrics}, max_to_keep={limit}, {best_fn.__name__}: kept, best {seen}")
    ok &= seen == expected
sys.exit(not ok)
PY
