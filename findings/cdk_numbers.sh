#!/usr/bin/env bash
# aws-cdk-lib 2.275.0 from Python: numbers reach the template as JavaScript's. An int beyond 2**53,
# such as a seed of 64 bits, becomes another one, and the float 1.0 the int 1, in to_json_string(),
# in a state machine's input and in a custom resource's properties, without a word. Numbers in
# text, json.dumps(values), arrive as they are.
# Seen: 2**53 + 1 becomes 2**53, 2**63 + 12345 becomes 9223372036854788000, 1.0 becomes 1.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet aws-cdk-lib==2.275.0
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import json
import sys

from aws_cdk import App, CustomResource, Stack
from aws_cdk.aws_ssm import CfnParameter
from aws_cdk.aws_stepfunctions import DefinitionBody, Pass, Result, StateMachine

VALUES = {"seed": 2**63 + 12345, "step": 2**53 + 1, "small": 2**53 - 1, "decay": 1.0, "rate": 1e-7}
app = App()
stack = Stack(app, "Stack")
CfnParameter(stack, "Json", type="String", value=stack.to_json_string(VALUES))
CfnParameter(stack, "Text", type="String", value=json.dumps(VALUES))
CustomResource(stack, "Custom", properties=VALUES,
               service_token="arn:aws:lambda:us-east-1:123456789012:function:one")
step = Pass(stack, "Pass", result=Result.from_object(VALUES))
StateMachine(stack, "Machine", definition_body=DefinitionBody.from_chainable(step))
template = app.synth().get_stack_by_name("Stack").template["Resources"]


def properties(name):
    (found,) = (each for key, each in template.items()
                if key.startswith(name) and "Role" not in key)
    return found["Properties"]


states = json.loads(properties("Machine")["DefinitionString"])["States"]
arrived = {
    "to_json_string": json.loads(properties("Json")["Value"]),
    "json.dumps": json.loads(properties("Text")["Value"]),
    "custom resource": {key: properties("Custom")[key] for key in VALUES},
    "state machine": states["Pass"]["Result"],
}
print(f"{'given':>15}:", json.dumps(VALUES))
for way, values in arrived.items():
    print(f"{way:>15}:", json.dumps(values))
other = json.dumps({**VALUES, "seed": 9223372036854788000, "step": 2**53, "decay": 1})
expected = {way: other for way in arrived} | {"json.dumps": json.dumps(VALUES)}
sys.exit({way: json.dumps(values) for way, values in arrived.items()} != expected)
PY
