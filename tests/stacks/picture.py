"""The architecture diagram, drawn from the synthesized templates: python -m tests.stacks.picture

It writes docs/architecture.md: a Mermaid diagram, which GitHub renders, of the constructs and who
uses whom, and a table of their resources. A test fails when the page is out of date.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
INTRODUCTION = """# Architecture

What `cdk.json`'s defaults provision, generated from the templates by
`python -m tests.stacks.picture`. A box is a construct; an arrow points from the user to the used.
"by name" is a lookup at run time, because a reference would be a cycle in the template.
"""
# What each construct is for; a test fails for one without a caption.
CAPTIONS = {
    "DatasetBucket": "datasets with their manifests",
    "RunBucket": "heads, checkpoints, receipts",
    "Network": "public subnets, shared by all runs",
    "Bundle": "where the code of new runs is",
    "InstanceRole": "what a run's instance may do",
    "RunImage": "the run's image, kept",
    "LaunchTemplate": "image, volumes, user data, no way in",
    "FleetRole": "lets EC2 start instances",
    "Fleet": "keeps one GPU instance on Spot",
    "Guard": "stops a run that no longer pays",
    "Notifications": "e-mails people",
    "InstanceEvents": "notices, rebalances",
    "FleetEvents": "what the fleet did",
    "Alarms": "idle, full, hot, stuck, late",
    "Overview": "dashboard",
}
# The strongest first: of several ties between the same two constructs, that one is drawn.
TIES = ("may use", "notifies", "watches", "made with", "by name")
# What a reference means, by the resource type and the property that holds it; "*" is any other.
_MEANINGS: Mapping[str, Mapping[str, str]] = {
    "AWS::IAM::Policy": {"*": "may use"},
    "AWS::Lambda::Permission": {"*": "notifies"},
    "AWS::Events::Rule": {"EventPattern": "watches", "*": "notifies"},
    "AWS::CloudWatch::Alarm": {"AlarmActions": "notifies", "*": "watches"},
    "AWS::CloudWatch::Dashboard": {"*": "watches"},
}
_REFERENCE = re.compile(
    r'"(?:Ref|Fn::GetAtt)": \[?"(\w+)|(?:ExportsOutput(?:Ref|FnGetAtt)|(?=RunImage-))(\w+)'
)
Resource = Mapping[str, Any]


def construct_of(resource: Resource) -> tuple[str, str]:
    """Return the stack of a resource and the construct directly below it."""
    stack, construct, *_ = str(resource["Metadata"]["aws:cdk:path"]).split("/")
    return stack, construct


def read_ties(resources: Mapping[str, Resource]) -> dict[tuple[str, str], str]:
    """Return what ties each using construct to each used one, according to the templates."""
    ties: dict[tuple[str, str], str] = {}
    for resource in resources.values():
        user = construct_of(resource)[1]
        for target, tie in _references(resource, resources):
            used = construct_of(target)[1]
            if used != user:
                ties[user, used] = min(tie, ties.get((user, used), tie), key=TIES.index)
    return ties


def _references(
    resource: Resource, resources: Mapping[str, Resource]
) -> Iterator[tuple[Resource, str]]:
    meanings = _MEANINGS.get(resource["Type"], {})
    for name, value in resource.get("Properties", {}).items():
        text = json.dumps(value)
        tie = meanings.get(name, meanings.get("*", "made with"))
        for local, exported in _REFERENCE.findall(text):
            for logical_id, target in resources.items():
                # An export's name is the logical id with a hash behind it.
                if local == logical_id or (exported and exported.startswith(logical_id)):
                    yield target, tie
        for target in resources.values():
            # An IAM policy names a parameter without its leading slash.
            named = target["Type"] == "AWS::SSM::Parameter" and target["Properties"].get("Name")
            if named and named.lstrip("/") in text:
                yield target, "by name"


def draw(resources: Mapping[str, Resource]) -> str:
    """Return the page: the diagram and the table."""
    types: dict[tuple[str, str], Counter[str]] = {}
    for resource in resources.values():
        counter = types.setdefault(construct_of(resource), Counter())
        counter[resource["Type"].removeprefix("AWS::")] += 1
    lines = ["flowchart LR"]
    for stack in dict.fromkeys(owner for owner, _ in sorted(types, reverse=True)):
        names = [name for owner, name in sorted(types) if owner == stack]
        lines.append(f"    subgraph {stack}")
        lines += [f'        {name}["<b>{name}</b><br/>{CAPTIONS[name]}"]' for name in names]
        lines.append("    end")
    lines += [
        f"    {user} -->|{tie}| {used}"
        for (user, used), tie in sorted(read_ties(resources).items())
    ]
    rows = []
    for (stack, construct), counter in sorted(types.items()):
        listed = ", ".join(f"{number} {name}" for name, number in sorted(counter.items()))
        rows.append(f"| {construct} | {stack} | {listed} |")
    table = ["| construct | stack | resources |", "|---|---|---|", *rows]
    return "\n".join([INTRODUCTION, "```mermaid", *lines, "```", "", *table, ""])


def read_resources(assembly: Path) -> dict[str, Resource]:
    """Return the resources of all templates; their logical ids do not collide."""
    return {
        logical_id: resource
        for path in sorted(assembly.glob("*.template.json"), reverse=True)
        for logical_id, resource in json.loads(path.read_text())["Resources"].items()
    }


def main(arguments: Sequence[str]) -> int:
    """Write the page for the given cloud assembly, or for the app with its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        assembly = Path(arguments[0] if arguments else folder)
        if not arguments:
            command = ["npx", "--no-install", "cdk", "synth", "--quiet", "--output", folder]
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
            if status != 0:
                return status
        resources = read_resources(assembly)
        if not resources:
            print(f"{assembly} has no templates; use the folder of cdk synth", file=sys.stderr)
            return 2
        PAGE.write_text(draw(resources), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
