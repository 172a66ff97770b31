#!/usr/bin/env bash
# onnxslim 0.1.98 takes random operators for constants if their inputs are: it runs each once and
# writes the numbers into the model, which gives the same "random" numbers ever after (a sampler,
# noise, a dropout that is meant to stay). onnxsim 0.8.1 and onnxruntime's own optimizer keep them;
# onnxscript 0.7.2 takes Dropout in training mode for none.
# Seen: RandomNormal, RandomNormalLike, RandomUniform, Multinomial and Dropout frozen by onnxslim.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet onnxslim==0.1.98 \
  onnxsim==0.8.1 onnxscript==0.7.2 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys

import numpy as np
import onnxruntime
import onnxscript.optimizer
import onnxsim
import onnxslim
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper

CONSTANTS = {"half": np.full((2, 8), 0.5, np.float32), "ratio": np.float32(0.5),
             "training": np.bool_(True)}
OPERATORS = {
    "RandomNormal": ([], {"shape": [2, 8]}),
    "RandomNormalLike": (["half"], {}),
    "RandomUniform": ([], {"shape": [2, 8]}),
    "Multinomial": (["half"], {"sample_size": 8, "dtype": TensorProto.INT32}),
    "Dropout": (["half", "ratio", "training"], {}),
}
TOOLS = {
    "unchanged": lambda model: model,
    "onnxslim": onnxslim.slim,
    "onnxsim": lambda model: onnxsim.simplify(model)[0],
    "onnxscript": onnxscript.optimizer.optimize,
}


def model_with(operator):
    """x plus random numbers."""
    inputs, options = OPERATORS[operator]
    kept = [numpy_helper.from_array(np.asarray(CONSTANTS[name]), name) for name in inputs]
    nodes = [
        helper.make_node(operator, inputs, ["drawn"], **options),
        helper.make_node("Cast", ["drawn"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "numbers"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    checker.check_model(model)
    return model


def draws(model):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x = np.zeros((2, 8), np.float32)
    first, *others = (session.run(None, {"x": x})[0] for _ in range(5))
    return any(not np.array_equal(first, each) for each in others)


frozen = {name: [] for name in TOOLS}
for operator in OPERATORS:
    for name, tool in TOOLS.items():
        model = tool(ModelProto.FromString(model_with(operator).SerializeToString()))
        frozen[name] += [operator] * (not draws(model))
for name, operators in frozen.items():
    print(f"{name}: frozen {operators}")
expected = {"unchanged": [], "onnxslim": [*OPERATORS], "onnxsim": [], "onnxscript": ["Dropout"]}
sys.exit(frozen != expected)
PY
