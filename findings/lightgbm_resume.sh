#!/usr/bin/env bash
# lightgbm 4.7.0: train(init_model=...) numbers its trees on, but begins all else anew: a schedule of
# learning rates (reset_parameter) with its first rate, and the draws of bagging_fraction,
# feature_fraction, GOSS and extra_trees with the seed's first numbers; with DART no earlier tree is
# dropped any more. So a forest resumed from a saved model is another one, although its seed is
# given and training twice gives the same; without any of these it is equal.
# Seen: stopped at 20 of 40 trees: plain predictions are equal, the others differ by 0.5 to 2.3; tree 21
# has the rate 0.1, not 0.012.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet lightgbm==4.7.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys

import lightgbm as lgb
import numpy as np

draw = np.random.default_rng(0)
x = draw.normal(size=(3000, 8))
y = x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2]) + draw.normal(size=3000) * 0.3
ALWAYS = {"objective": "regression", "verbose": -1, "seed": 5, "deterministic": True,
          "force_row_wise": True, "num_threads": 1, "learning_rate": 0.1}


def forest(rounds, options, more=lambda: [], before=None):
    return lgb.train(ALWAYS | options, lgb.Dataset(x, y), rounds, init_model=before, callbacks=more())


def stopped(rounds, options, more=lambda: []):
    forest(rounds // 2, options, more).save_model("half.txt")
    return forest(rounds // 2, options, more, "half.txt")


rates = []


def spy(env):
    rates.append(round(env.params["learning_rate"], 4))


spy.before_iteration, spy.order = True, 20
CASES = {"plain": {}, "bagging": {"bagging_fraction": 0.7, "bagging_freq": 1},
         "features": {"feature_fraction": 0.5}, "GOSS": {"data_sample_strategy": "goss"},
         "extra trees": {"extra_trees": True}, "DART": {"boosting": "dart"}}
ok = True
for name, options in CASES.items():
    whole, twice = (forest(40, options).predict(x) for _ in range(2))
    largest = np.abs(whole - stopped(40, options).predict(x)).max()
    print(f"{name}: predictions differ by up to {largest:.2f}")
    ok &= np.array_equal(whole, twice) and (largest == 0) == (name == "plain")

for act in (forest, stopped):
    rates.clear()
    act(40, {}, lambda: [lgb.reset_parameter(learning_rate=lambda n: 0.1 * 0.9**n), spy])
    print(f"rates of trees 19 to 22, {act.__name__}: {rates[18:22]}")
    ok &= (rates[20] == 0.1) == (act is stopped)
sys.exit(not ok)
PY
