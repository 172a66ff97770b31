"""The architecture page is current and complete, and the diagram says what the templates say."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stacks.picture import CAPTIONS, PAGE, TIES, construct_of, draw, main, read_ties


def test_the_committed_page_is_current(resources: dict[str, Any]) -> None:
    assert PAGE.read_text(encoding="utf-8") == draw(resources), (
        "what is provisioned has changed: python -m tests.stacks.picture"
    )


def test_every_construct_has_a_caption_and_every_caption_a_construct(
    resources: dict[str, Any],
) -> None:
    assert {construct_of(each)[1] for each in resources.values()} == CAPTIONS.keys()


def test_every_resource_is_counted_once(resources: dict[str, Any]) -> None:
    rows = re.findall(r"^\| \w+ \| [\w-]+ \| (.*) \|$", draw(resources), re.MULTILINE)[1:]
    counts = [int(number) for row in rows for number in re.findall(r"(\d+) \w+::", row)]
    assert sum(counts) == len(resources)


def test_who_uses_whom_is_what_the_templates_say(resources: dict[str, Any]) -> None:
    ties = read_ties(resources)
    assert set(ties.values()) == set(TIES)
    assert ties["Fleet", "LaunchTemplate"] == "made with"
    assert ties["InstanceRole", "RunBucket"] == "may use"
    assert ties["InstanceEvents", "Guard"] == "notifies"
    assert ties["FleetEvents", "Fleet"] == "watches"
    # The Guard and the instances know the fleet by a parameter's name only: else it were a circle.
    assert ties["Guard", "Fleet"] == ties["LaunchTemplate", "Fleet"] == "by name"


def test_the_diagram_has_each_construct_and_each_tie_once(resources: dict[str, Any]) -> None:
    drawn = draw(resources)
    nodes = re.findall(r'^        (\w+)\["<b>\1</b><br/>[^"<]+"\]$', drawn, re.MULTILINE)
    arrows = re.findall(r"^    (\w+) -->\|([a-z ]+)\| (\w+)$", drawn, re.MULTILINE)
    assert sorted(nodes) == sorted(CAPTIONS)
    assert {(user, used): tie for user, tie, used in arrows} == read_ties(resources)
    assert len(arrows) == len(read_ties(resources))


def test_the_command_writes_it(
    synthesize: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stack, template in synthesize().items():
        (tmp_path / f"{stack}.template.json").write_text(json.dumps(template))
    monkeypatch.setattr("tests.stacks.picture.ROOT", tmp_path)
    monkeypatch.setattr("tests.stacks.picture.PAGE", tmp_path / "page.md")
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "page.md").read_text() == PAGE.read_text(encoding="utf-8")


def test_fails_for_a_folder_without_templates_and_keeps_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("as it was")
    monkeypatch.setattr("tests.stacks.picture.PAGE", page)
    assert main([str(tmp_path)]) == 2
    assert "has no templates" in capsys.readouterr().err
    assert page.read_text() == "as it was"
