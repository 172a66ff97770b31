"""The architecture picture is current, complete and legible to a program."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import app as cdk_app
from stacks.picture import CAPTIONS, PICTURE, draw, main, read_boxes, read_templates
from stacks.picture_layout import Edge, place

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    context = json.loads((ROOT / "cdk.json").read_text(encoding="utf-8"))["context"]
    app = cdk_app.App(
        context={**context, "aws:cdk:enable-path-metadata": True},
        outdir=str(tmp_path_factory.mktemp("cdk.out")),
        builtin_cloud_formation_validation=False,
    )
    cdk_app.build(app)
    return Path(app.synth().directory)


@pytest.fixture(scope="module")
def templates(assembly: Path) -> dict[str, Any]:
    return read_templates(assembly)


def test_the_committed_picture_is_current(templates: dict[str, Any]) -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(templates), (
        "what is provisioned has changed: python -m stacks.picture"
    )


def test_every_construct_has_a_caption(templates: dict[str, Any]) -> None:
    boxes, _ = read_boxes(templates)
    assert {box.name for box in boxes} - CAPTIONS.keys() == set()


def test_every_resource_is_counted_in_one_box(templates: dict[str, Any]) -> None:
    boxes, _ = read_boxes(templates)
    resources = sum(len(template["Resources"]) for template in templates.values())
    assert sum(sum(box.types.values()) for box in boxes) == resources


def test_who_uses_whom_is_what_the_templates_say(templates: dict[str, Any]) -> None:
    _, edges = read_boxes(templates)
    ties = {(edge.user, edge.used): edge.kind for edge in edges}
    assert ties["Fleet", "LaunchTemplate"] == "uses"
    assert ties["InstanceRole", "RunBucket"] == "permission"
    assert ties["InstanceEvents", "Guard"] == "event"
    assert ties["FleetEvents", "Fleet"] == "watches"
    # The Guard and the instances know the fleet by a parameter's name only: else it were a circle.
    assert ties["Guard", "Fleet"] == ties["LaunchTemplate", "Fleet"] == "by name"


def test_the_picture_is_well_formed_and_no_boxes_overlap(templates: dict[str, Any]) -> None:
    ElementTree.fromstring(draw(templates))
    boxes, edges = read_boxes(templates)
    placed = place({box.name: box.height for box in boxes}, edges, 214, last=set()).boxes
    for one in placed:
        for other in placed:
            apart = one.x != other.x or one.y >= other.y + other.height
            assert one is other or apart or other.y >= one.y + one.height


def test_arrows_run_to_the_right_and_around_boxes() -> None:
    edges = [
        Edge(user="a", used="b", kind="uses"),
        Edge(user="b", used="c", kind="uses"),
        Edge(user="a", used="c", kind="uses"),
    ]
    drawing = place({"a": 50, "b": 50, "c": 50}, edges, 100, last={"c"})
    x = {box.name: box.x for box in drawing.boxes}
    assert x["a"] < x["b"] < x["c"]
    (b,) = [box for box in drawing.boxes if box.name == "b"]
    assert all(
        not b.y <= y <= b.y + b.height
        for px, y in drawing.routes["a", "c"]
        if b.x <= px <= b.x + 100
    )


def test_the_command_writes_it(
    assembly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stacks.picture.PICTURE", tmp_path / "docs.svg")
    monkeypatch.setattr("stacks.picture.ROOT", tmp_path)
    assert main([str(assembly)]) == 0
    assert re.match(r"<svg ", (tmp_path / "docs.svg").read_text())
