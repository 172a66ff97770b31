"""Our evaluation beside others': moto's where it evaluates, and a public simulator, weekly."""

import json
import random
import subprocess
from pathlib import Path

import pytest
from moto.iam.access_control import IAMPolicy, PermissionResult

from embedded_aws.iam.evaluation import BOUNDARY, IDENTITY, RESOURCE
from tests.embedded_aws.iam.cases import random_case, rule

# Moved on purpose only: its results are what ours are compared with.
JUDGE = "@cloud-copilot/iam-simulate@0.1.173"
# Its engine itself: the exported function fails for want of a resource policy's name.
ASK = f"""
const from = process.cwd() + '/node_modules/@cloud-copilot/'
const cjs = file => require(from + 'iam-simulate/dist/cjs/' + file + '.js')
const {{ authorize }} = cjs('core_engine/CoreSimulatorEngine')
const {{ AwsRequestImpl }} = cjs('request/request')
const {{ RequestContextImpl }} = cjs('requestContext')
const {{ DiscoveryContextKeyConstraints }} = cjs('context_keys/discoveryContextKeyConstraints')
const {{ loadPolicy }} = require('@cloud-copilot/iam-policy')
const load = list => list && list.map((policy, n) => loadPolicy(policy, {{ name: 'p' + n }}))
const cases = JSON.parse(require('fs').readFileSync(0))
console.log(JSON.stringify(cases.map(each => authorize({{
  request: new AwsRequestImpl(each.request.principal, each.request.resource, each.request.action,
    new RequestContextImpl(each.request.contextVariables)),
  identityPolicies: load(each[{json.dumps(IDENTITY)}]),
  permissionBoundaries: load(each[{json.dumps(BOUNDARY)}]),
  sessionPolicy: undefined,
  resourcePolicy: (load(each[{json.dumps(RESOURCE)}]) || [])[0],
  serviceControlPolicies: [], resourceControlPolicies: [],
  simulationParameters: {{ simulationMode: 'Strict',
    discoveryContextKeyConstraints: new DiscoveryContextKeyConstraints([]) }},
  serviceSettings: {{ s3: {{}} }},
}}).result)))
"""


def test_moto_agrees_where_it_evaluates() -> None:
    """Identity policies without conditions; more of moto's is wrong (test_moto_patches.py)."""
    dice, allowed = random.Random(0), 0
    for _ in range(500):
        case = random_case(dice, conditions=False, resource=False)
        request = case["request"]
        results = {
            # Actions in lower case: moto compares them as they are written.
            IAMPolicy(json.dumps(each).replace("S3:putobject", "s3:PutObject").replace("?", "[^/]"))
            .is_action_permitted(request["action"], request["resource"]["resource"])
            for each in case[IDENTITY]
        }  # fmt: skip
        theirs = PermissionResult.DENIED not in results and PermissionResult.PERMITTED in results
        assert rule(case).allowed == theirs, case
        allowed += theirs
    assert 100 < allowed < 400, "cases that say nothing"


@pytest.mark.slow
def test_a_public_simulator_agrees(tmp_path: Path) -> None:
    """AGPL, so it is fetched here and runs as a program of its own; nothing of it is ours."""
    subprocess.run(
        ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(tmp_path), JUDGE],
        check=True, capture_output=True,
    )  # fmt: skip
    dice = random.Random(1)
    cases = [random_case(dice) for _ in range(20_000)]
    done = subprocess.run(
        ["node", "-e", ASK], cwd=tmp_path, input=json.dumps(cases), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    theirs = json.loads(done.stdout)
    seen: dict[str, int] = {}
    for case, verdict in zip(cases, theirs, strict=True):
        ours = rule(case)
        said = (
            "Allowed"
            if ours.allowed
            else "ExplicitlyDenied"
            if ours.statements
            else "ImplicitlyDenied"
        )
        assert said == verdict, json.dumps(case, indent=1)
        seen[said] = seen.get(said, 0) + 1
    assert min(seen.values()) > 1000, seen
