"""Whose prices count: of the region that a stack names, else of the one the CLI deploys to."""

import json
from pathlib import Path

import pytest

from review.assembly import read_assembly


@pytest.mark.parametrize(
    ("environment", "variables", "region"),
    [
        ("aws://111122223333/eu-west-1", {"AWS_REGION": "us-west-2"}, "eu-west-1"),
        ("aws://unknown-account/unknown-region", {"AWS_REGION": "us-west-2"}, "us-west-2"),
        ("aws://unknown-account/unknown-region", {"AWS_REGION": ""}, "us-east-1"),
        ("aws://unknown-account/unknown-region", {"AWS_PROFILE": "nobody"}, "us-east-1"),
    ],
)
def test_a_sides_region(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: str,
    variables: dict[str, str],
    region: str,
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stack = {
        "type": "aws:cloudformation:stack",
        "environment": environment,
        "properties": {"templateFile": "T.template.json"},
    }
    (tmp_path / "manifest.json").write_text(json.dumps({"artifacts": {"T": stack}}))
    (tmp_path / "T.template.json").write_text("{}")
    assert read_assembly(tmp_path, "a side").region == region
