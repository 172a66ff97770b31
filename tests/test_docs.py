"""What docs/ says can be typed and adds up: commands, links, figures, the FIS template."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import boto3
import pytest
from botocore.validate import validate_parameters

from review.assembly import read_assembly
from review.costs import cost_rows
from stacks.parameters import StackParameters

REPOSITORY = Path(__file__).parent.parent
PAGES = ("operations", "first-day-on-aws")


def page(name: str) -> str:
    return (REPOSITORY / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_commands_and_links_exist(name: str) -> None:
    text = page(name)
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", text, re.MULTILINE)) - targets == set()
    modules = set(re.findall(r"python -m ([\w.]+)", text))
    assert modules
    assert [each for each in modules if find_spec(each) is None] == []
    links = [each for each in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in each]
    assert [each for each in links if not (REPOSITORY / "docs" / each).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_option_of_a_deploy_is_a_parameter(name: str) -> None:
    known = StackParameters.__dataclass_fields__
    options = re.findall(r"-c ([a-z_]+)=", page(name))
    assert options
    assert [each for each in options if each not in known] == []


def test_the_cost_of_idling_is_what_the_review_says(tmp_path: Path) -> None:
    import app as cdk_app

    context = json.loads((REPOSITORY / "cdk.json").read_text())["context"]
    app = cdk_app.App(
        context=context, outdir=str(tmp_path), builtin_cloud_formation_validation=False
    )
    cdk_app.build(app)
    side = read_assembly(Path(app.synth().directory), "docs")
    figures = {row.name: float(row.after) for row in cost_rows(side, side) if "$" in row.name
               and row.after != "-" and not row.name.startswith("run")}  # fmt: skip
    text = page("operations")
    idle = figures["**a month with the fleet at zero**, $"]
    assert f"A month with the fleet at zero: ${idle:.2f}" in text, "python -m review HEAD"
    for market in ("Spot", "on demand"):
        hour = figures[f"**an hour of training, {market}**, $/h"]
        assert f"${hour:.2f} on {market.removeprefix('on ')}" in text, "python -m review HEAD"
    assert f"${idle:.2f} a month" in page("first-day-on-aws")


def test_fis_would_take_the_experiment_template() -> None:
    template = json.loads((REPOSITORY / "docs" / "fis-interruption.json").read_text())
    client = boto3.client(
        "fis", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y"
    )
    shape = client.meta.service_model.operation_model("CreateExperimentTemplate").input_shape
    validate_parameters(template, shape)
    (action,) = template["actions"].values()
    # The end comes after the rebalance recommendation and the two minutes of the notice.
    assert action["parameters"] == {"durationBeforeInterruption": "PT3M"}
    assert set(action["targets"].values()) <= template["targets"].keys()


def test_the_role_for_fis_is_one_json_document() -> None:
    (command,) = re.findall(r"^ {4}(aws iam create-role .*?)\n {4}aws", page("first-day-on-aws"),
                            re.MULTILINE | re.DOTALL)  # fmt: skip
    document = json.loads(shlex.split(command.replace("\\\n", " "))[-1])
    assert document["Statement"][0]["Principal"] == {"Service": "fis.amazonaws.com"}
