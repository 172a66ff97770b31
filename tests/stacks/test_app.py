"""The app through the real CLI, as people type it: no account, no AWS variable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aws_cdk import App, Environment
from aws_cdk.assertions import Template

import app as cdk_app
from stacks.review_stack import ISSUER

ROOT = Path(__file__).parents[2]


def _synth(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "AWS" not in name}
    return subprocess.run(
        ["npx", "cdk", "synth", "--quiet", "--output", str(out), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("assembly")
    done = _synth(out)
    assert done.returncode == 0, done.stderr
    assert "[WARNING]" not in done.stderr, done.stderr
    (out / "printed.txt").write_text(done.stderr)
    return out


def test_synth_needs_no_account(assembly: Path) -> None:
    artifacts = json.loads((assembly / "manifest.json").read_text())["artifacts"]
    environments = {
        each["environment"]
        for each in artifacts.values()
        if each["type"] == "aws:cloudformation:stack"
    }
    assert environments == {"aws://unknown-account/unknown-region"}


def test_the_cli_says_what_the_run_takes_and_when_it_is_stopped(assembly: Path) -> None:
    printed = (assembly / "printed.txt").read_text()
    assert "INFO plan: trajectory/full on g5.2xlarge takes " in printed
    assert "INFO the Guard stops the run at 4 billed hours or $5 or 24 hours" in printed
    assert "INFO the fleet may start g5.2xlarge, g5.4xlarge; the dearest, g5.4xlarge" in printed
    assert ".js:" not in printed  # where in jsii a message was added helps nobody


def test_a_concrete_account_and_region_need_no_look_up(tmp_path: Path) -> None:
    review = {
        "review.repository": "owner/name",
        "review.oidc_provider": f"arn:aws:iam::123456789012:oidc-provider/{ISSUER}",
    }
    given = json.loads((ROOT / "cdk.json").read_text())["context"]
    app = cdk_app.App(context={**given, **review, "kms": "create"}, outdir=str(tmp_path))
    cdk_app.build(app, env=Environment(account="123456789012", region="eu-west-1"))
    cdk_app.Validations.of(app).add_plugins(cdk_app.AwsSolutionsChecks(app))
    app.synth()  # which raises if cdk-nag finds anything
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert "missing" not in manifest
    environments = {each.get("environment") for each in manifest["artifacts"].values()}
    assert environments - {None} == {"aws://123456789012/eu-west-1"}


def test_the_guard_counts_with_the_prices_of_the_region_that_the_cli_deploys_to() -> None:
    def environment(region: str | None) -> dict[str, str]:
        stack = cdk_app.build(App(context={"size": "g5.4xlarge"}), region=region)
        functions = Template.from_stack(stack).find_resources("AWS::Lambda::Function")
        found = [
            each["Properties"]["Environment"]["Variables"]
            for each in functions.values()
            if "USD_PER_HOUR" in each["Properties"].get("Environment", {})["Variables"]
        ]
        return dict(found[0])

    usual, there = environment(None), environment("eu-west-1")
    assert json.loads(usual["USD_PER_HOUR"])["g5.4xlarge"]["on-demand"] == 1.624
    assert json.loads(there["USD_PER_HOUR"])["g5.4xlarge"]["on-demand"] == 1.81287
    assert float(there["MAX_USD"]) > float(usual["MAX_USD"])
    assert float(there["STORAGE_USD_PER_HOUR"]) > float(usual["STORAGE_USD_PER_HOUR"])


def test_the_training_stack_brings_the_shared_ones_first(assembly: Path) -> None:
    artifacts = json.loads((assembly / "manifest.json").read_text())["artifacts"]
    # The network as well: an instance that boots before its route exists never gets its code.
    assert {"DatasetStack", "NetworkStack"} <= set(artifacts["TrainingStack"]["dependencies"])
    assert artifacts["DatasetStack"]["properties"]["terminationProtection"] is True
    assert not artifacts["TrainingStack"]["properties"].get("terminationProtection")


def test_the_plan_of_the_run_is_part_of_the_assembly(assembly: Path) -> None:
    plan = json.loads((assembly / "TrainingStack.plan.json").read_text())
    assert plan["fits"] is True
    assert plan["usd_spot_p50"] < plan["usd_on_demand"]


def test_the_guards_code_is_what_it_imports(assembly: Path) -> None:
    template = json.loads((assembly / "TrainingStack.template.json").read_text())
    (function,) = [
        each for each in template["Resources"].values() if each["Type"] == "AWS::Lambda::Function"
    ]
    folder = assembly / function["Metadata"]["aws:asset:path"]
    carried = {each.relative_to(folder) for each in folder.rglob("*") if each.is_file()}
    folders = ("contract", "stacks/guard", "sizing/fallback")
    files = [each for room in folders for each in ROOT.glob(f"{room}/*.py")]
    expected = {each.relative_to(ROOT) for each in files} - {Path("stacks/guard/construct.py")}
    assert carried == expected | {Path("stacks/__init__.py"), Path("sizing/__init__.py")}
    # With nothing else on the path, like on Lambda.
    module, _, name = function["Properties"]["Handler"].rpartition(".")
    program = f"import importlib; importlib.import_module({module!r}).{name}"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


def test_fails_without_a_traceback_for_a_users_mistake(tmp_path: Path) -> None:
    done = _synth(tmp_path, "-c", "size=g5.huge")
    assert done.returncode != 0
    assert "app.py: size 'g5.huge' is not in the instance catalogue" in done.stderr
    assert "Traceback" not in done.stderr
