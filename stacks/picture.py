"""The architecture picture, drawn from the synthesized templates: python -m stacks.picture

One box a construct, with its resources; an arrow from what uses to what is used, as the templates
say it. It writes docs/architecture.svg; a test holds that the file is current.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from stacks.picture_layout import Edge, Placed, place

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"
# What each construct is for; one that has no line here fails the test.
CAPTIONS = {
    "DatasetBucket": "datasets with their manifests",
    "RunBucket": "heads, checkpoints, receipts",
    "DataKey": "encrypts buckets and volumes",
    "AccessLogs": "who read what",
    "Network": "public subnets, no way in",
    "InstanceRole": "what an instance may do",
    "LaunchTemplate": "image, volumes, user data",
    "FleetRole": "EC2 starts instances with it",
    "Fleet": "keeps one GPU instance on Spot",
    "Guard": "stops what runs for nothing",
    "Notifications": "mails people",
    "InstanceEvents": "notices, state changes",
    "FleetEvents": "what the fleet did",
    "Alarms": "idle, full, hot, stuck, late",
    "Overview": "dashboard",
}
_WIDTH, _LINE, _HEAD = 214, 15, 44
# The strongest tie first: of several between the same two it is the one that is drawn.
_COLOURS = {
    "permission": "#15803d",
    "event": "#b45309",
    "watches": "#0e7490",
    "uses": "#6b7280",
    "by name": "#7c3aed",
}
_LEGEND = {
    "uses": "is made with",
    "permission": "may use (IAM)",
    "event": "tells",
    "watches": "watches",
    "by name": "finds by name",
}
# What a reference means, by the resource type and the property that holds it; "*" is any other.
_KINDS: Mapping[str, Mapping[str, str]] = {
    "AWS::IAM::Policy": {"*": "permission"},
    "AWS::Lambda::Permission": {"*": "event"},
    "AWS::Events::Rule": {"EventPattern": "watches", "*": "event"},
    "AWS::CloudWatch::Alarm": {"AlarmActions": "event", "OKActions": "event", "*": "watches"},
    "AWS::CloudWatch::CompositeAlarm": {"AlarmActions": "event", "*": "watches"},
    "AWS::CloudWatch::Dashboard": {"*": "watches"},
}
_FRAMES = {"TrainingStack": "#f3f6fb", "DatasetStack": "#fdf6ec"}


@dataclass(frozen=True, kw_only=True)
class Box:
    """One construct: its stack, its name and how many resources of which type it has."""

    stack: str
    name: str
    types: Counter[str] = field(default_factory=Counter)

    @property
    def lines(self) -> list[str]:
        """The resources, those of which there are most first."""
        return [
            f"{number} × {name}" if number > 1 else name
            for name, number in sorted(self.types.items(), key=lambda item: (-item[1], item[0]))
        ]

    @property
    def height(self) -> int:
        return _HEAD + _LINE * len(self.lines) + 6


def read_boxes(templates: Mapping[str, Mapping[str, Any]]) -> tuple[list[Box], list[Edge]]:
    """Return the constructs below the stacks, and who uses whom."""
    boxes: dict[str, Box] = {}
    owner: dict[tuple[str, str], str] = {}
    for stack, template in templates.items():
        for logical_id, resource in template["Resources"].items():
            path = str(resource["Metadata"]["aws:cdk:path"]).split("/")
            name = path[1]
            box = boxes.setdefault(name, Box(stack=stack, name=name))
            box.types[resource["Type"].removeprefix("AWS::")] += 1
            owner[stack, logical_id] = name
    edges: dict[tuple[str, str], str] = {}
    for stack, template in templates.items():
        for logical_id, resource in template["Resources"].items():
            user = owner[stack, logical_id]
            for used, kind in _uses(stack, resource, owner, templates):
                # The same two may be tied in several ways; the first by rank is drawn.
                known = edges.get((user, used), kind)
                edges[user, used] = min(known, kind, key=list(_COLOURS).index)
    return list(boxes.values()), [
        Edge(user=user, used=used, kind=kind)
        for (user, used), kind in edges.items()
        if user != used
        # What is found by name and used as well is drawn once.
        and not (kind == "by name" and (used, user) in edges and edges[used, user] == "by name")
    ]


def _uses(
    stack: str,
    resource: Mapping[str, Any],
    owner: Mapping[tuple[str, str], str],
    templates: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, str]]:
    properties = resource.get("Properties") or {}
    kinds = _KINDS.get(resource["Type"], {})
    for name, value in properties.items():
        kind = kinds.get(name, kinds.get("*", "uses"))
        for logical_id in _references(value):
            if (stack, logical_id) in owner:
                yield owner[stack, logical_id], kind
    text = json.dumps(properties)
    for other, exported in re.findall(r"(\w+):ExportsOutput(?:Ref|FnGetAtt)(\w+)", text):
        for (other_stack, logical_id), name in owner.items():
            if other_stack == other and exported.startswith(logical_id):
                yield name, kinds.get("*", "uses")
    for other, template in templates.items():
        for logical_id, candidate in template["Resources"].items():
            own_name = (candidate.get("Properties") or {}).get("Name")
            if candidate["Type"] != "AWS::SSM::Parameter" or candidate is resource:
                continue
            if isinstance(own_name, str) and own_name.lstrip("/") in text:
                yield owner[other, logical_id], "by name"


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _references(item)
    elif isinstance(node, dict):
        if isinstance(node.get("Ref"), str):
            yield node["Ref"]
        if "Fn::GetAtt" in node:
            argument = node["Fn::GetAtt"]
            yield argument[0] if isinstance(argument, list) else argument.partition(".")[0]
        for item in node.values():
            yield from _references(item)


def draw(templates: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the SVG of all stacks."""
    boxes, edges = read_boxes(templates)
    heights = {box.name: box.height for box in boxes}
    kept = {box.name for box in boxes if box.stack == "DatasetStack"}
    drawing = place(heights, edges, _WIDTH, last=kept)
    by_name = {box.name: box for box in boxes}
    parts = [*_frames(drawing.boxes, by_name)]
    parts += [_arrow(edge, drawing.routes[edge.user, edge.used]) for edge in edges]
    parts += [_box(by_name[placed.name], placed) for placed in drawing.boxes]
    parts += _legend(drawing.height)
    width, height = drawing.width, drawing.height + 34
    markers = "".join(
        f'<marker id="{kind.replace(" ", "-")}" viewBox="0 0 8 8" refX="7" refY="4" '
        f'markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" '
        f'fill="{colour}"/></marker>'
        for kind, colour in _COLOURS.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif">\n'
        f"<title>What is provisioned: made by python -m stacks.picture</title>\n"
        f"<defs>{markers}</defs>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _frames(placed: Sequence[Placed], boxes: Mapping[str, Box]) -> Iterator[str]:
    for stack, colour in _FRAMES.items():
        inside = [each for each in placed if boxes[each.name].stack == stack]
        if not inside:
            continue
        left = min(each.x for each in inside) - 18
        top = min(each.y for each in inside) - 36
        right = max(each.x for each in inside) + _WIDTH + 18
        bottom = max(each.y + each.height for each in inside) + 18
        yield (
            f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" rx="10" '
            f'fill="{colour}" stroke="#cbd5e1"/>'
            f'<text x="{left + 14}" y="{top + 22}" font-size="15" font-weight="bold" '
            f'fill="#334155">{stack}</text>'
        )


def _box(box: Box, at: Placed) -> str:
    lines = "".join(
        f'<text x="{at.x + 10}" y="{at.y + _HEAD + 11 + _LINE * index}" font-size="11" '
        f'fill="#475569">{escape(line)}</text>'
        for index, line in enumerate(box.lines)
    )
    return (
        f'<rect x="{at.x}" y="{at.y}" width="{_WIDTH}" height="{at.height}" rx="6" fill="#ffffff" '
        f'stroke="#475569"/>'
        f'<text x="{at.x + 10}" y="{at.y + 19}" font-size="14" font-weight="bold" '
        f'fill="#0f172a">{escape(box.name)}</text>'
        f'<text x="{at.x + 10}" y="{at.y + 35}" font-size="11" font-style="italic" '
        f'fill="#0f172a">{escape(CAPTIONS.get(box.name, ""))}</text>{lines}'
    )


def _arrow(edge: Edge, points: Sequence[tuple[float, float]]) -> str:
    path = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = (x0 + x1) / 2
        path += f"C{middle:.0f} {y0:.0f} {middle:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"
    dashes = ' stroke-dasharray="5 4"' if edge.kind == "by name" else ""
    return (
        f'<path d="{path}" fill="none" stroke="{_COLOURS[edge.kind]}" stroke-width="1.4"{dashes} '
        f'marker-end="url(#{edge.kind.replace(" ", "-")})">'
        f"<title>{escape(f'{edge.user}: {_LEGEND[edge.kind]} {edge.used}')}</title></path>"
    )


def _legend(top: int) -> Iterator[str]:
    x = 24
    for kind, words in _LEGEND.items():
        yield _arrow(Edge(user="", used="", kind=kind), [(x, top + 14), (x + 40, top + 14)])
        yield f'<text x="{x + 48}" y="{top + 18}" font-size="12" fill="#334155">{words}</text>'
        x += 170


def main(arguments: Sequence[str]) -> int:
    """Write the picture of a given cloud assembly, or of the app with its defaults."""
    with tempfile.TemporaryDirectory() as folder:
        assembly = Path(arguments[0]) if arguments else Path(folder)
        if not arguments:
            command = ["npx", "--no-install", "cdk", "synth", "--quiet", "--output", folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                print(f"picture: the app does not synthesize:\n{done.stderr}", file=sys.stderr)
                return 2
        PICTURE.write_text(draw(read_templates(assembly)), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
    return 0


def read_templates(assembly: Path) -> dict[str, Any]:
    """The templates of an assembly by stack, the kept one last."""
    return {
        name: json.loads((assembly / f"{name}.template.json").read_text(encoding="utf-8"))
        for name in _FRAMES
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
