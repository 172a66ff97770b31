#!/usr/bin/env bash
# paddlepaddle 3.3.1 numbers layers within a process (linear_0, linear_1, ...) and keys an
# optimizer's state by these names. A process that builds another layer first - a teacher, an
# average of the weights - loads the model (keyed by structure) but not its optimizer: the first step
# ends with an AssertionError. In the same order, it resumes exactly.
# Seen: same order equal; teacher first: "Optimizer set error, linear_2.w_0_moment1_0 should in ...".
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  paddlepaddle==3.3.1 setuptools==80.9.0 numpy==2.4.6
cat >"$folder/train.py" <<'PY'
import sys

import numpy as np
import paddle


def network():
    paddle.seed(0)
    return paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.Tanh(), paddle.nn.Linear(8, 2))


how = sys.argv[1]
paddle.set_device("cpu")
teacher = network() if how == "teacher-first" else None
model = network()
optimizer = paddle.optimizer.Adam(learning_rate=0.05, parameters=model.parameters())
first = 0
if how != "uninterrupted":
    first = 10
    model.set_state_dict(paddle.load("model.pdparams"))
    optimizer.set_state_dict(paddle.load("optimizer.pdopt"))
for step in range(first, 20):
    if step == 10 and how == "uninterrupted":
        paddle.save(model.state_dict(), "model.pdparams")
        paddle.save(optimizer.state_dict(), "optimizer.pdopt")
    x = np.random.default_rng(step).normal(size=(8, 4)).astype("float32")
    (model(paddle.to_tensor(x)) ** 2).mean().backward()
    try:
        optimizer.step()
    except AssertionError as error:
        print(f"{how}: AssertionError: {error}")
        sys.exit(3)
    optimizer.clear_grad()
weights = np.concatenate([each.numpy().ravel() for each in model.parameters()])
if how == "uninterrupted":
    np.save("weights.npy", weights)
is_equal = np.array_equal(weights, np.load("weights.npy"))
print(f"{how}: {'equal' if is_equal else 'other weights'}")
sys.exit(0 if is_equal else 4)
PY
cd "$folder"
for how in uninterrupted same-order teacher-first; do
  status=0
  venv/bin/python train.py "$how" 2>/dev/null || status=$?
  test "$status" = "$(test "$how" = teacher-first && echo 3 || echo 0)" || exit 1
done
