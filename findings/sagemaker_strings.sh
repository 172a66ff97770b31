#!/usr/bin/env bash
# sagemaker-train 1.27.0 (SageMaker's SDK 3): a hyperparameter that is text reaches the script as
# another text where it reads as JSON. ModelTrainer stores text as it is, which SDK 2 put in quotes,
# and the driver in the container reads each value as JSON and writes it again as an argument.
# Seen: of "1.10", "1e3", "4170e10", "0123" and "main" the script gets 1.1, 1000.0,
# 41700000000000.0, 0123 and main; with SDK 2's quotes it gets each as it was.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet --no-deps \
    sagemaker-train==1.27.0
cd "$folder"
venv/bin/python - <<'PY'
import ast
import json
import runpy
import sys
from pathlib import Path

train = next(Path("venv/lib").glob("python*/site-packages/sagemaker/train"))
driver = runpy.run_path(str(train / "container_drivers/common/utils.py"))
# Of the SDK's module only this function, because the others need all of its packages.
tree = ast.parse((train / "utils.py").read_text())
tree.body = [n for n in tree.body if getattr(n, "name", "") == "safe_serialize"]
sdk = {"json": json, "PipelineVariable": ()}
exec(compile(tree, "utils.py", "exec"), sdk)

asked = {"a": "1.10", "b": "1e3", "c": "4170e10", "d": "0123", "e": "main"}
stored = {name: sdk["safe_serialize"](text) for name, text in asked.items()}
got = driver["hyperparameters_to_cli_args"](stored)[1::2]
quoted = {name: json.dumps(text) for name, text in asked.items()}
before = driver["hyperparameters_to_cli_args"](quoted)[1::2]
print("asked:", *asked.values(), "\ngot:", *got, "\nin quotes:", *before)
seen = ["1.1", "1000.0", "41700000000000.0", "0123", "main"]
sys.exit(got != seen or before != [*asked.values()])
PY
